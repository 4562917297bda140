"""What tests ask a worker about the weights of its model, through an EngineWeights of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from lora_refit.base_samples import BaseSample
from lora_refit.engines.vllm.layer_digest import digest_layers
from lora_refit.engines.vllm.weights import EngineWeights
from lora_refit.errors import CommitFailed, StaleArena
from lora_refit.merged.layout import MergedWeight


class CheckpointSource:
    """Serves the weights of a safetensors file, one a bucket."""

    def __init__(self, file: str, names: list[str]) -> None:
        self._file = file
        self._names = names

    def take(self, bucket: int) -> Iterator[tuple[str, torch.Tensor]]:
        if bucket >= len(self._names):
            raise StaleArena(f"there is no bucket {bucket}")
        yield from read(self._file, self._names[bucket : bucket + 1])


def read(file: str, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, "pt") as checkpoint:
        for name in names:
            yield name, checkpoint.get_tensor(name)


def weights_of(worker: Any) -> EngineWeights:
    if not hasattr(worker, "_tested_weights"):
        worker._tested_weights = EngineWeights.of_worker(worker)
    weights: EngineWeights = worker._tested_weights
    return weights


def targets(worker: Any, shapes: dict[str, list[int]]) -> list[tuple[str, list[str]]]:
    """Find and adopt; returns each layer's name and its weights."""
    weights = weights_of(worker)
    found = weights.targets([MergedWeight(name, (r, c)) for name, (r, c) in shapes.items()])
    weights.adopt(found)
    return [(target.name, list(target.weights)) for target in found]


def reload(worker: Any, file: str, names: list[str]) -> list[str]:
    """Load these weights of a file into the adopted layers; returns the layers that vLLM had
    processed before the end."""
    weights = weights_of(worker)
    dtype = weights.dtype
    weights.start()
    weights.load((name, tensor.to(dtype)) for name, tensor in read(file, names))
    processed = [
        target.name
        for target in weights._targets
        if not get_layerwise_info(target.module).can_load()
    ]
    weights.finish()
    return processed


def reload_fails(worker: Any, file: str, names: list[str], end: str) -> str:
    """Break a reload off after these weights, by an error of their source; returns the error."""

    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield from read(file, names)
        raise CommitFailed("the source broke")

    weights = weights_of(worker)
    weights.start()
    try:
        weights.load(breaking())
    except CommitFailed as error:
        if end == "abort":
            weights.abort()
            return str(error)
    weights.finish()
    return "finished"


def digests(worker: Any) -> dict[str, int]:
    names, found = weights_of(worker).digests()
    return dict(zip(names, found.tolist(), strict=True))


def snapshot(worker: Any) -> dict[str, tuple[int, int]]:
    """Digest and address of all tensors of the whole model, packed ones included, in order."""
    model = worker.model_runner.get_model()
    layers = [
        (name, module) for name, module in model.named_modules() if not list(module.children())
    ]
    names, found = digest_layers(layers, weights_of(worker).dtype)
    addresses = {
        name: tensor.data_ptr()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    return {
        name: (digest, addresses.get(name, 0))
        for name, digest in zip(names, found.tolist(), strict=True)
    }


def compare_bases(worker: Any, samples: bytes) -> tuple[list[str], list[str], int]:
    decoded = msgspec.msgpack.decode(samples, type=list[BaseSample])
    found = weights_of(worker).compare_bases(decoded)
    return list(found.differing), list(found.not_compared), found.elements


def flip_weight_bit(worker: Any, parameter: str, byte: int) -> None:
    """Flip the lowest bit of a byte of a parameter (negative: from the end)."""
    tensor = worker.model_runner.get_model().get_parameter(parameter)
    tensor.data.view(torch.uint8).view(-1)[byte] ^= 1


def tie_embeddings(worker: Any, tie: bool) -> None:
    """Tie the output layer to the embedding as vLLM does, or give it its own weight back."""
    model = worker.model_runner.get_model()
    if tie:
        worker._untied = model.lm_head.weight
        model.lm_head.tie_weights(model.model.embed_tokens)
    else:
        model.lm_head.weight = worker._untied


def bind_checkpoint(worker: Any, file: str, shapes: dict[str, list[int]]) -> None:
    """Let vLLM's weight transfer load from a file."""
    transfer = worker.weight_transfer_engine
    weights = [MergedWeight(name, (r, c)) for name, (r, c) in shapes.items()]
    transfer.weights.adopt(transfer.weights.targets(weights))
    transfer.bind(CheckpointSource(file, list(shapes)))


def unbind(worker: Any) -> None:
    worker.weight_transfer_engine.bind(None)


def transferred(worker: Any) -> tuple[str, list[int]]:
    """Failure and buckets of the last weight update."""
    transfer = worker.weight_transfer_engine
    return transfer.failure, [update.bucket for update in transfer.updates]


INSPECTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        targets,
        reload,
        reload_fails,
        digests,
        snapshot,
        compare_bases,
        flip_weight_bit,
        tie_embeddings,
        bind_checkpoint,
        unbind,
        transferred,
    )
}
