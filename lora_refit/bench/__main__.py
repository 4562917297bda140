"""`python -m lora_refit.bench refit [--quick] [--json FILE]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from lora_refit.bench import refit


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lora_refit.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("refit", help="one refit into a real engine, beside its peers")
    command.add_argument("--quick", action="store_true", help="5 repetitions instead of 15")
    command.add_argument("--layers", type=int, default=32, help="layers of 8B shape")
    command.add_argument("--lora-rank", type=int, default=16)
    command.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args(argv)

    console = Console()
    result = refit.run(
        [
            refit.Scenario(
                layers=arguments.layers,
                lora_rank=arguments.lora_rank,
                trainer_tensor_parallel=size,
                repetitions=5 if arguments.quick else 15,
            )
            for size in (2, 1)
        ],
        console,
    )
    console.print(refit.render(result))
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
