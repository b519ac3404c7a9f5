"""What a process holds, as the kernel counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

SHARED_MEMORY = ("/SYSV", "/dev/shm/ucx")


@dataclass(frozen=True)
class ProcessFacts:
    """Of one process at one moment."""

    rss_bytes: int
    private_bytes: int
    descriptors: int
    threads: int
    shared_segments: int
    """Mappings of shared memory, through which pages of peers pass."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Of a running process of this user."""
        process = Path("/proc") / str(pid)
        memory: dict[str, int] = {}
        for line in (process / "smaps_rollup").read_text().splitlines()[1:]:
            name, value, _ = line.split()
            memory[name] = int(value) << 10
        maps = (process / "maps").read_text().splitlines()
        return cls(
            rss_bytes=memory["Rss:"],
            private_bytes=memory["Private_Clean:"] + memory["Private_Dirty:"],
            descriptors=len(list((process / "fd").iterdir())),
            threads=len(list((process / "task").iterdir())),
            shared_segments=sum(any(name in line for name in SHARED_MEMORY) for line in maps),
        )
