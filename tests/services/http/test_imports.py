"""What a front end loads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, time
import services.http.app
import services.text.tokenizer
heavy = {"torch", "transformers", "ray", "ucxx"} & set(sys.modules)
print(sorted(heavy), time.process_time() < 2.0)
"""


def test_the_api_loads_nothing_heavy_and_is_imported_quickly() -> None:
    """In CPU time, so that neighbours on the machine do not matter."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[] True"
