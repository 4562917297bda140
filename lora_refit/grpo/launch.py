"""Starts the trainer ranks of a run as processes of this machine."""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from lora_refit.grpo.config import REFIT_MODES, GrpoConfig
from lora_refit.grpo.tasks import TASKS

TINY_OVERRIDES: dict[str, Any] = {
    "task": "letters",
    "steps": 8,
    "max_new_tokens": 6,
    "learning_rate": 1e-2,
    "lora_rank": 6,
    "lora_alpha": 12,
}
"""What `--tiny` changes: a small random model learns to write letters in under a minute."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    output = Path(options.output)
    with tempfile.TemporaryDirectory(prefix="lora-refit-grpo-") as folder:
        config = _config(options, Path(folder))
        launch(config, output, f"file://{folder}/rendezvous")
    return 0


def launch(config: GrpoConfig, output: Path, rendezvous: str) -> None:
    """Run `config` on its trainer ranks; rank 0 shows progress and writes to `output`.

    If one rank fails, the others are ended and its traceback is raised here.
    """
    # Trainer and engine take turns on the same cores, so waiting threads must not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    spawn(_run_rank, args=(config, output, rendezvous), nprocs=config.trainer_ranks)


def _run_rank(rank: int, config: GrpoConfig, output: Path, rendezvous: str) -> None:
    _quieten()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    elif rank == 0:
        from lora_refit.testing.engine import start_engine_server

        start_engine_server()  # vLLM's long import overlaps with building the policy
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=config.trainer_ranks,
        timeout=datetime.timedelta(minutes=30),
    )
    try:
        _train_and_show(config, output)
    finally:
        torch.distributed.destroy_process_group()


def _train_and_show(config: GrpoConfig, output: Path) -> None:
    from lora_refit.grpo.driver import train

    if torch.distributed.get_rank() != 0:
        train(config)
        return
    from lora_refit.grpo.display import Display

    title = f"{config.task}, {config.trainer_ranks} trainer rank(s)"
    with Display(title, config.steps, output) as display:
        report = train(config, display.step)
        assert report is not None
        display.finish(report)


def _quieten() -> None:
    """Megatron, transformers and torch comment on what a CPU run lacks, on every rank."""
    warnings.filterwarnings("ignore")
    for library in ("megatron", "torch"):
        logging.getLogger(library).setLevel(logging.ERROR)
    import transformers

    transformers.logging.set_verbosity_error()


def _config(options: argparse.Namespace, folder: Path) -> GrpoConfig:
    chosen: dict[str, Any] = {
        name: value
        for name, value in vars(options).items()
        if value is not None and name not in ("tiny", "output")
    }
    if options.tiny:
        from lora_refit.testing.models import tiny_model

        model = tiny_model(folder / "model", vocab=384)
        return GrpoConfig(**(TINY_OVERRIDES | {"model": model} | chosen))
    if "model" not in chosen:
        from lora_refit.testing.smollm2 import ensure_smollm2

        chosen["model"] = ensure_smollm2()
    return GrpoConfig(**chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lora_refit.grpo",
        description="Train a LoRA policy with GRPO: Megatron trains, vLLM generates, and the "
        "adapter is refitted into the engine each step.",
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, under a minute")
    parser.add_argument("--output", default="grpo-run", help="folder of metrics.jsonl and grpo.png")
    parser.add_argument("--model", type=Path, help="Hugging Face checkpoint; default SmolLM2-135M")
    parser.add_argument("--task", choices=sorted(TASKS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--prompts-per-step", type=int)
    parser.add_argument("--samples-per-prompt", type=int)
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--updates-per-batch", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--kl-coefficient", type=float, help="weight of the KL to the base model")
    parser.add_argument("--stop-reward", type=float, help="end once three steps average to it")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--lora-rank", type=int)
    parser.add_argument("--lora-alpha", type=int)
    parser.add_argument("--tensor-parallel", type=int, help="Megatron tensor parallel ranks")
    parser.add_argument("--pipeline-parallel", type=int, help="Megatron pipeline stages")
    parser.add_argument("--sequence-parallel", action="store_const", const=True)
    parser.add_argument("--engine-tensor-parallel", type=int, help="vLLM workers")
    parser.add_argument("--refit-mode", choices=REFIT_MODES, help="default: adapter")
    return parser
