"""The command line that benchmarks have in common."""

from __future__ import annotations

import argparse


def parser(name: str, description: str | None = None) -> argparse.ArgumentParser:
    """Of ``python -m benchmarks.NAME``, with ``--out``, which ``report.finish`` takes."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", help="also write the result to this file, as JSON")
    return made
