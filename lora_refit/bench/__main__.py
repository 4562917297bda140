"""`python -m lora_refit.bench refit|merge [--quick] [--json FILE]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType

from lora_refit.bench import layer, merge, refit


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    arguments = _parser().parse_args(argv)
    console = Console()
    result, rendered = arguments.run(arguments, console)
    console.print(rendered)
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lora_refit.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("refit", help="one refit into a real engine, beside its peers")
    command.set_defaults(run=_refit)
    command.add_argument("--quick", action="store_true", help="5 repetitions instead of 15")
    command.add_argument("--layers", type=int, default=32, help="layers of 8B shape")
    command.add_argument("--lora-rank", type=int, default=16)
    command.add_argument("--json", type=Path, help="also write the result to this file")

    command = commands.add_parser("merge", help="merging into base weights, beside its peers")
    command.set_defaults(run=_merge)
    command.add_argument("--quick", action="store_true", help="2 repetitions instead of 7")
    command.add_argument("--layers", type=int, default=1, help="layers of 8B shape, 436 MB each")
    command.add_argument(
        "--ranks", type=_lora_rank, nargs="+", default=[8, 16, 32, 64, 128], help="LoRA ranks"
    )
    command.add_argument("--json", type=Path, help="also write the result to this file")
    return parser


def _lora_rank(text: str) -> int:
    """Ranks of column-parallel adapters are sharded."""
    rank = int(text)
    if rank < 1 or rank % layer.TP:
        raise argparse.ArgumentTypeError(f"{text} is no positive multiple of {layer.TP}")
    return rank


def _refit(arguments: argparse.Namespace, console: Console) -> tuple[refit.Result, RenderableType]:
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
    return result, refit.render(result)


def _merge(arguments: argparse.Namespace, console: Console) -> tuple[merge.Result, RenderableType]:
    scenario = merge.Scenario(
        layers=arguments.layers,
        lora_ranks=tuple(arguments.ranks),
        repetitions=2 if arguments.quick else 7,
    )
    result = merge.run(scenario, console)
    return result, merge.render(result)


if __name__ == "__main__":
    sys.exit(main())
