"""Kernels for capability 9.0: a device that has it, and Triton's compiler where none is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch

from tests.support.devices import usable
from worker.model.kernels.hopper import CAPABILITY

MOST_SHARED_BYTES: Final = 232_448
"""Of a program at capability 9.0."""

COMPILE: Final = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from worker.model.kernels.hopper import SWIZZLED

module, name, constants, boxes, pointers = json.load(sys.stdin)
kernel = getattr(importlib.import_module(f"worker.model.kernels.{module}"), name)
kinds = dict.fromkeys(kernel.arg_names, "i32") | pointers | dict.fromkeys(constants, "constexpr")
for argument, (height, width) in boxes.items():
    kinds[argument] = f"tensordesc<bf16[{height},{width}],{SWIZZLED!r}>"
source = GluonASTSource(
    fn=kernel,
    signature=kinds,
    constexprs={(kernel.arg_names.index(key),): value for key, value in constants.items()},
)
options = dict(num_warps=4, launch_pdl=True)
built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(json.dumps([built.metadata.shared, built.asm["ptx"]]))
"""


@dataclass(frozen=True)
class Compiled:
    """``text`` is in PTX."""

    shared_bytes: int
    text: str


def hopper_device() -> str:
    """The device, or a skip."""
    found = usable("cuda")
    if torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip(f"expected a device of capability {CAPABILITY}")
    return found


def compiled(
    kernel: str,
    constants: Mapping[str, Any],
    boxes: Mapping[str, tuple[int, int]],
    pointers: Mapping[str, str],
) -> Compiled:
    """``module.name`` of a kernel, compiled in a process whose Triton does not interpret.

    ``boxes`` are of bfloat16; arguments that nothing is said of are int32.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    given = [*kernel.split("."), dict(constants), dict(boxes), dict(pointers)]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(given),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Compiled(*json.loads(done.stdout.splitlines()[-1]))
