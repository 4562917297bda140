"""What the tests run on trainer ranks: functions for `TrainerRanks.call`, all of module level."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretended_gpu
import psutil
import torch
from safetensors.torch import save_file

import lora_refit
from lora_refit.testing import megatron
from lora_refit.testing.collective_counter import CollectiveCounter
from lora_refit.testing.megatron import PolicyConfig

STD = 0.2
"""Of adapter values: large enough that the adapter moves log-probabilities by more than 0.1."""


def build(state: dict[str, Any], config: PolicyConfig) -> None:
    close(state)
    policy = state["policy"] = megatron.build_policy(config)
    state["source"] = lora_refit.MegatronSource(policy.chunks, bridge=policy.bridge)


def close(state: dict[str, Any]) -> None:
    if "publisher" in state:
        state.pop("publisher").close()


def pretend_gpu(state: dict[str, Any]) -> None:
    """From now on this rank's adapter lies on GPU 0 of the stand-in driver."""
    pretended_gpu.pretend_gpu()


def offer(
    state: dict[str, Any], dtype: str, scale_rounding: str = "engine", memory: str = "auto"
) -> bytes:
    """Make a publisher and return its encoded spec. The one before is closed."""
    close(state)
    state["publisher"] = lora_refit.Publisher(
        state["source"],
        getattr(torch, dtype),
        scale_rounding=scale_rounding,
        timeout_s=20.0,
        memory=memory,
    )
    return state["publisher"].spec.to_bytes()


def offer_merged(state: dict[str, Any], dtype: str, settings: dict[str, Any]) -> bytes:
    """As `offer`, in merged mode."""
    close(state)
    state["publisher"] = lora_refit.Publisher(
        state["source"],
        getattr(torch, dtype),
        mode="merged",
        **({"timeout_s": 20.0} | settings),
    )
    return state["publisher"].spec.to_bytes()


def export_base(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every weight of the base by its checkpoint name, as Megatron-Bridge exports it. Collective."""
    policy = state["policy"]
    exported = policy.bridge.export_hf_weights(
        policy.chunks, cpu=True, show_progress=False, merge_adapter_weights=False
    )
    return {name.replace(".base_layer", ""): tensor.clone() for name, tensor in exported}


def save_merged(state: dict[str, Any], folder: str, base_only: bool = False) -> None:
    """Write a checkpoint of the merged model, or of its base. Collective."""
    publisher = state["publisher"]
    (publisher.base_state if base_only else publisher.merged_state)(folder)


def save_base(state: dict[str, Any], folder: str) -> None:
    save_merged(state, folder, base_only=True)


def change_base(state: dict[str, Any], factor: float, elements: int | None = None) -> None:
    """Multiply the first adapted base weight of this rank, or some elements after its first."""
    with torch.no_grad():
        weight = state["source"].base_weights()[0].weight.view(-1)
        (weight if elements is None else weight[1 : 1 + elements]).mul_(factor)


def spoil(state: dict[str, Any], value: float) -> None:
    """Set one element of the adapter."""
    with torch.no_grad():
        state["source"].parameters()[1][1].view(-1)[0] = value


def magnitudes(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """DoRA's magnitudes [out] by checkpoint name, put in order as the bridge orders a weight's rows:
    through a base whose every row holds its magnitude. Collective."""
    held = state["source"].base_weights()
    saved = [base.weight.detach().clone() for base in held]
    with torch.no_grad():
        for base in held:
            base.weight.copy_(base.magnitude[:, None].expand_as(base.weight))
    try:
        adapted = {n.rsplit(".lora_", 1)[0] for n in export(state)}
        return {
            name: tensor[:, 0].clone()
            for name, tensor in export_base(state).items()
            if "base_model.model." + name.removesuffix(".weight") in adapted
        }
    finally:
        with torch.no_grad():
            for base, before in zip(held, saved, strict=True):
                base.weight.copy_(before)


def base_digest(state: dict[str, Any]) -> str:
    """Of every bit of this rank's frozen weights."""
    found = hashlib.blake2b()
    for chunk in state["policy"].chunks:
        for name, tensor in chunk.named_parameters():
            if not tensor.requires_grad:
                found.update(
                    name.encode() + tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
                )
    return found.hexdigest()


def publish_often(state: dict[str, Any], first: int, count: int) -> None:
    """Publish many versions in a row, the adapter moving a little each time."""
    for version in range(first, first + count):
        for _, tensor in state["source"].parameters():
            tensor.detach().mul_(-1.0001)
        state["publisher"].publish(version)


def randomize(state: dict[str, Any], seed: int, std: float = STD) -> None:
    megatron.randomize_adapters(state["policy"].chunks, seed, std)


def round_base(state: dict[str, Any]) -> None:
    """Round the adapted base weights to bf16, as if that had been their dtype."""
    with torch.no_grad():
        for base in state["source"].base_weights():
            base.weight.copy_(base.weight.bfloat16())


def publish(state: dict[str, Any], version: int, seed: int | None = None) -> bytes:
    """Publish new random values (with `seed`) or the present ones; return the encoded ticket."""
    if seed is not None:
        randomize(state, seed)
    return state["publisher"].publish(version).to_bytes()


def export(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What Megatron-Bridge exports now, in fp32. Collective."""
    return {name: tensor.clone().contiguous() for name, tensor in state["source"].export()}


def save(state: dict[str, Any], folder: str) -> None:
    """Write the export as an adapter directory, on rank 0. Collective."""
    tensors = export(state)
    if torch.distributed.get_rank() == 0:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(state["source"].config()))


@torch.no_grad()
def log_probs(state: dict[str, Any], prompts: list[list[int]], responses: list[list[int]]) -> Any:
    """The policy's log-probability of every response token; one length for all prompts and for
    all responses. Returns [sequences, response tokens]."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    tokens = torch.tensor([p + r for p, r in zip(prompts, responses, strict=True)])
    rows, length = tokens.shape
    positions = torch.arange(length).expand(rows, -1)
    hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    (chunk,) = state["policy"].chunks
    logits = gather_from_tensor_model_parallel_region(chunk(tokens, positions, hidden))
    start = len(prompts[0])
    scores = logits[:, start - 1 : -1].double().log_softmax(-1)
    return scores.gather(-1, tokens[:, start:, None])[..., 0]


def resources(state: dict[str, Any]) -> dict[str, int]:
    process = psutil.Process()
    return {"rss": process.memory_info().rss, "fds": process.num_fds()}


def launches(state: dict[str, Any]) -> int:
    count: int = state["publisher"].launches
    return count


def start_counting(state: dict[str, Any]) -> None:
    state["counter"] = CollectiveCounter()
    state["counter"].start()


def stop_counting(state: dict[str, Any]) -> int:
    counter: CollectiveCounter = state.pop("counter")
    return counter.stop()


def offer_altered(
    state: dict[str, Any], alteration: str, dtype: str, config: dict[str, Any] | None = None
) -> bytes:
    """Offer an adapter whose export is wrong in one way; see `ALTERATIONS`."""
    source, policy = state["source"], state["policy"]
    state["source"] = lora_refit.MegatronSource(
        policy.chunks,
        bridge=policy.bridge,
        export=lambda: ALTERATIONS[alteration](source.export()),
        config=source.config() | (config or {}),
    )
    try:
        return offer(state, dtype)
    finally:
        state["source"] = source


Factors = Iterator[tuple[str, torch.Tensor]]


def _renamed(factors: Factors, old: str, new: str) -> Factors:
    for name, tensor in factors:
        yield name.replace(old, new), tensor


def _without(factors: Factors, lost: str) -> Factors:
    for name, tensor in factors:
        if lost not in name:
            yield name, tensor


def _twice(factors: Factors, doubled: str) -> Factors:
    for name, tensor in factors:
        yield name, tensor
        if doubled in name:
            yield name, tensor


def _exchanged(factors: Factors, one: str, other: str) -> Factors:
    for name, tensor in factors:
        yield name.replace(one, "@").replace(other, one).replace("@", other), tensor


def _shifted(factors: Factors, shifted: str) -> Factors:
    """Output rows of a lora_B, or input columns of a lora_A, moved on by one."""
    for name, tensor in factors:
        dim = 1 if "lora_A" in name else 0
        yield name, tensor.roll(1, dim) if shifted in name else tensor


def _rank_reversed(factors: Factors, reversed_: str) -> Factors:
    for name, tensor in factors:
        yield name, tensor.flip(0) if reversed_ in name else tensor


ALTERATIONS = {
    "unwrapped module": lambda f: _renamed(f, "layers.1.mlp.down_proj", "layers.1.mlp.side_proj"),
    "misspelt layer": lambda f: _renamed(f, "layers.1.self_attn.q", "layers.9.self_attn.q"),
    "unreadable name": lambda f: _renamed(f, "o_proj.lora_B.weight", "o_proj.lora_Q.weight"),
    "missing lora_B": lambda f: _without(f, "layers.0.mlp.gate_proj.lora_B"),
    "duplicate name": lambda f: _twice(f, "layers.0.mlp.up_proj.lora_A"),
    "layers in turn": lambda f: _exchanged(f, "layers.0.", "layers.1."),
    "k and v in turn": lambda f: _exchanged(f, ".k_proj.", ".v_proj."),
    "gate and up in turn": lambda f: _exchanged(f, ".gate_proj.", ".up_proj."),
    "rows of down_proj shifted": lambda f: _shifted(f, "layers.0.mlp.down_proj.lora_B"),
    "columns of o_proj shifted": lambda f: _shifted(f, "layers.1.self_attn.o_proj.lora_A"),
    "rank of lora_A reversed": lambda f: _rank_reversed(f, "layers.0.mlp.down_proj.lora_A"),
    "nothing": lambda f: f,
}
