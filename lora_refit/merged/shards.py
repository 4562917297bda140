"""Writes a Hugging Face checkpoint in shards, with no more than one shard in memory."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections import Counter
from pathlib import Path

import torch

from lora_refit.errors import RefitError


class NewFolder:
    """A folder that takes its place only when it is complete.

    Until then its contents are in `partial`, a hidden folder beside it, which is all that a process
    that is killed leaves behind.

    Raises RefitError if there is anything at the path but an empty folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._require_free()
        self.partial = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
        self.partial.mkdir(parents=True)

    def complete(self) -> None:
        self._require_free()
        os.replace(self.partial, self._path)

    def discard(self) -> None:
        """Remove what is there of an incomplete folder."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _require_free(self) -> None:
        path = self._path
        if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
            raise RefitError(
                f"{path}: already exists and is not an empty folder; choose another path"
            )


class ShardWriter:
    """Collects tensors and writes them whenever a shard is full.

    Shards have at most `shard_bytes`, except that a larger tensor has one of its own. Tensors lie
    on the CPU, contiguous, each in memory of its own.
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._bytes: Counter[torch.dtype] = Counter()

    @property
    def dtype(self) -> torch.dtype | None:
        """Of most of the bytes; None before the first tensor."""
        most = self._bytes.most_common(1)
        return most[0][0] if most else None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes
        self._bytes[tensor.dtype] += tensor.nbytes

    def finish(self) -> None:
        """Write the last shard, and name all as `transformers` expects them: `model.safetensors`,
        or numbered files with an index."""
        if self._pending or not self._shards:
            self._flush()
        count = len(self._shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for number, name in enumerate(names):
            (self._folder / _unnumbered(number)).rename(self._folder / name)
        if count > 1:
            index = {
                "metadata": {"total_size": self._bytes.total()},
                "weight_map": {
                    tensor: name
                    for name, shard in zip(names, self._shards, strict=True)
                    for tensor in shard
                },
            }
            text = json.dumps(index, indent=2)
            (self._folder / "model.safetensors.index.json").write_text(text)

    def _flush(self) -> None:
        from safetensors.torch import save_file

        path = self._folder / _unnumbered(len(self._shards))
        save_file(self._pending, path, metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0


def _unnumbered(number: int) -> str:
    """Name of a shard while the number of shards is unknown."""
    return f"shard-{number:05d}.safetensors"
