"""The `lora-refit` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lora_refit.errors import LayoutMismatch, RefitError
from lora_refit.plan import Plan
from lora_refit.spec import Spec


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="lora-refit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="print a saved plan or spec")
    inspect.add_argument("file", type=Path)
    inspect.add_argument("--limit", type=int, default=40, help="lines to print at most")
    commands.add_parser("bench", help="see `lora-refit bench --help`", add_help=False)
    commands.add_parser("demo", help="the reference GRPO run; see --help", add_help=False)
    arguments, rest = parser.parse_known_args(argv)

    if arguments.command == "bench":
        from lora_refit.bench.__main__ import main as bench

        return bench(rest)
    if arguments.command == "demo":
        from lora_refit.grpo.__main__ import main as demo

        return demo(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        print(describe(arguments.file.read_bytes(), arguments.limit))
    except (OSError, RefitError) as error:
        print(f"{arguments.file}: {error}", file=sys.stderr)
        return 1
    return 0


def describe(data: bytes, limit: int) -> str:
    """A saved plan or spec in words. Raises LayoutMismatch if the bytes are neither."""
    try:
        return Plan.from_bytes(data).inspect(limit)
    except LayoutMismatch as no_plan:
        try:
            spec = Spec.from_bytes(data)
        except LayoutMismatch as no_spec:
            raise LayoutMismatch(f"neither a plan ({no_plan}) nor a spec ({no_spec})") from None
    return spec.inspect(limit)
