"""``python -m worker.device_probe``: print the CUDA devices that torch can use, as one line of
JSON.

A process of its own, because the launcher loads no torch and must hold no CUDA context.
"""

from __future__ import annotations

import json
import sys

import torch


def probe() -> list[dict[str, str | int]]:
    """Name and free bytes of every CUDA device, in torch's order."""
    if not torch.cuda.is_available():
        return []
    return [
        {
            "name": torch.cuda.get_device_name(index),
            "free_bytes": torch.cuda.mem_get_info(index)[0],
        }
        for index in range(torch.cuda.device_count())
    ]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
