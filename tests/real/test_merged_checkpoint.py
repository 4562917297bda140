"""The merged checkpoint of a live Megatron policy is the model that PEFT merges from its adapter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
import trainer
import transformers
from safetensors.torch import load_file, save_file

from lora_refit.collectives import all_gather_bytes, world
from lora_refit.merged.checkpoint import MergedState
from lora_refit.merged.magnitudes import gather_magnitudes
from lora_refit.merged.pieces import BaseShard, adapted_weights, describe_shards, find_pieces
from lora_refit.sources.base import PEFT_PREFIX, lora_scale
from lora_refit.sources.full_model import BridgeModel
from lora_refit.testing.megatron import PolicyConfig
from lora_refit.testing.ranks import RankError, TrainerRanks
from lora_refit.trace.export import trace_export

TOLERANCE = 1e-5
"""On logits, both models run in fp64: what is left is the rounding of the merged weights to fp32."""
FORWARD_TOLERANCE = 1e-4
"""On log-probabilities in fp32, between Megatron's forward and that of transformers."""
NOTICEABLE = 1e-1
SHARD_BYTES = 400_000
"""Of checkpoints of 6 MB, whose largest tensors have 540 kB: many shards, some too small for one."""
RANK, ALPHA = 6, 9
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1")
TOKENS = torch.randint(3, 259, (3, 12), generator=torch.Generator().manual_seed(1))
Policy = Callable[[PolicyConfig], TrainerRanks]


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Path:
    """Grouped queries, and a vocabulary that Megatron pads."""
    return tiny("llama", heads=12, kv_heads=6, vocab=700)


def config(model: Path, tensor_parallel: int, **settings: Any) -> PolicyConfig:
    return PolicyConfig(model, tensor_parallel, lora_rank=RANK, lora_alpha=ALPHA, **settings)


def save_adapter(state: dict[str, Any], folder: str) -> None:
    """What PEFT loads, by the publisher: collective only in what it publishes."""
    trainer.offer(state, "float32")
    state["publisher"].publish(1)
    torch.distributed.barrier()
    if world(None)[0] == 0:
        state["publisher"].export_packed(folder)
    torch.distributed.barrier()


def merged_state(
    state: dict[str, Any], lost: str = "", stretch: float = 1.0, **settings: Any
) -> MergedState:
    """Of the policy's present values. Mutants: factors with `lost` in their name are left out, and
    the scale is multiplied."""
    factors = {
        name: item for name, item in trainer.export(state).items() if lost not in name or not lost
    }
    model = BridgeModel(state["policy"].bridge, state["policy"].chunks)
    return MergedState(model, factors, stretch * lora_scale(state["source"].config()), **settings)


def save_merged(state: dict[str, Any], folder: str, *mutant: Any, **settings: Any) -> None:
    before = digest(state)
    merged_state(state, *mutant, **settings).save(folder, shard_bytes=SHARD_BYTES)
    assert digest(state) == before, "the trainer's own parameters changed"


def save_dora(state: dict[str, Any], adapter: str, folder: str) -> None:
    """The merged checkpoint, and the adapter as PEFT stores it."""
    source, (rank, _) = state["source"], world(None)
    export_map = trace_export(source)
    held = source.base_weights()
    own = msgspec.msgpack.encode(describe_shards(held, export_map, rank))
    shards = [
        shard
        for data in all_gather_bytes(own, None)
        for shard in msgspec.msgpack.decode(data, type=list[BaseShard])
    ]
    pieces = find_pieces(export_map, shards).pieces
    magnitudes = gather_magnitudes(pieces, held, adapted_weights(export_map), rank)
    save_merged(state, folder, magnitudes=magnitudes)
    trainer.save(state, adapter)
    if rank == 0:
        file = Path(adapter) / "adapter_model.safetensors"
        vectors = {
            f"{PEFT_PREFIX}{name}.lora_magnitude_vector": item for name, item in magnitudes.items()
        }
        save_file(load_file(file) | vectors, file)


def first_name(state: dict[str, Any]) -> str:
    """Rank 0 stops at the first tensor; the other ranks get none and run to the end."""
    return next((name for name, _ in merged_state(state)), "")


def digest(state: dict[str, Any]) -> str:
    """Over every parameter of this rank, in order."""
    hasher = hashlib.blake2b()
    for chunk in state["policy"].chunks:
        for name, parameter in chunk.named_parameters():
            hasher.update(name.encode())
            hasher.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """In fp64."""
    return model.double().eval()(TOKENS).logits


def load(path: Path) -> Any:
    """Weights that are missing, left over or of another shape are an error here."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def merged_by_peft(model: Path, adapter: Path) -> Any:
    """Merged in fp64."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    return peft.PeftModel.from_pretrained(base, adapter).double().merge_and_unload()


def check_files(path: Path) -> None:
    """Bounded shards, an index of exactly what they hold, and all that belongs to a checkpoint."""
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(path.glob("*.safetensors"))
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    total = 0
    for number, file in enumerate(files, start=1):
        assert file.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = load_file(file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        total += size
        assert size <= SHARD_BYTES or len(tensors) == 1
        assert all(index["weight_map"][name] == file.name for name in tensors)
    assert total == index["metadata"]["total_size"]
    assert len(files) > 5
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {
        file.name for file in path.iterdir()
    }
    assert transformers.AutoTokenizer.from_pretrained(path)("a").input_ids
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_equals_pefts_merge(
    policy: Policy, model: Path, tensor_parallel: int, tmp_path: Path
) -> None:
    """In fp32, twice with different adapters: the base is the same both times."""
    ranks = policy(config(model, tensor_parallel))
    unadapted = logits(load(model))
    for seed in (1, 2):
        adapter, merged = tmp_path / f"adapter{seed}", tmp_path / f"merged{seed}"
        ranks.call(trainer.randomize, seed)
        ranks.call(save_adapter, str(adapter))
        ranks.call(save_merged, str(merged))
        check_files(merged)
        got = logits(load(merged))
        off = float((got - logits(merged_by_peft(model, adapter))).abs().max())
        moved = float((got - unadapted).abs().max())
        print(
            f"TP {tensor_parallel}: max |dlogit| {off:.1e}; the adapter moves them by {moved:.1e}"
        )
        assert off < TOLERANCE
        assert moved > NOTICEABLE
    ranks.call(save_merged, str(tmp_path / "wrong"), "", 1.001)
    wrong = float((logits(load(tmp_path / "wrong")) - got).abs().max())
    print(f"mutant: a scale that is 0.1 % too large moves them by {wrong:.1e}")
    assert wrong > 10 * TOLERANCE


def test_bf16_weights_are_rounded_once(policy: Policy, model: Path, tmp_path: Path) -> None:
    """Every adapted weight of a bf16 trainer is within half a unit in the last place, and 2^-22 of
    the operands, of fp64; all others are the checkpoint's, bit for bit. Mutant: an update that is
    rounded to bf16 before it is added, as in an eager merge."""
    ranks = policy(config(model, 2, dtype="bfloat16"))
    ranks.call(trainer.randomize, 3)
    ranks.call(save_merged, str(tmp_path / "merged"))
    factors = ranks.call(trainer.export)[0]
    got, base = tensors_of(tmp_path / "merged"), tensors_of(model)
    assert got.keys() == base.keys()
    for name, weight in base.items():
        weight = weight.bfloat16()
        assert got[name].dtype == torch.bfloat16
        lora = PEFT_PREFIX + name.removesuffix(".weight")
        if f"{lora}.lora_A.weight" in factors:
            a, b = (factors[f"{lora}.lora_{k}.weight"].double() for k in "AB")
            delta = ALPHA / RANK * b @ a
            room = 2.0**-22 * (weight.abs() + ALPHA / RANK * b.abs() @ a.abs())
            assert rounded_once(got[name], weight + delta, room), name
            assert not rounded_once(weight + delta.bfloat16(), weight + delta, room)
        else:
            assert torch.equal(got[name], weight), name
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"


def rounded_once(merged: torch.Tensor, exact: torch.Tensor, room: torch.Tensor) -> bool:
    """Whether bf16 values are within half a unit in the last place of some number near `exact`."""
    _, exponent = torch.frexp(exact.abs() + room)
    return bool(((merged.double() - exact).abs() <= 2.0 ** (exponent.double() - 9) + room).all())


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_dora_equals_pefts_merge(
    policy: Policy, model: Path, tensor_parallel: int, tmp_path: Path
) -> None:
    """PEFT's merge, and the trainer's own forward. With TP 2 only column-parallel weights:
    Megatron-Bridge takes the norms of row-parallel ones over the columns of one rank."""
    targets = {} if tensor_parallel == 1 else {"targets": COLUMN_PARALLEL}
    ranks = policy(config(model, tensor_parallel, dora=True, **targets))
    ranks.call(trainer.randomize, 4)
    ranks.call(save_dora, str(tmp_path / "adapter"), str(tmp_path / "merged"))
    got = logits(load(tmp_path / "merged"))
    off = float((got - logits(merged_by_peft(model, tmp_path / "adapter"))).abs().max())
    prompts, responses = TOKENS[:, :4].tolist(), TOKENS[:, 4:].tolist()
    policy_scores = ranks.call(trainer.log_probs, prompts, responses)[0]
    scores = got[:, 3:-1].log_softmax(-1).gather(-1, TOKENS[:, 4:, None])[..., 0]
    apart = float((scores - policy_scores).abs().max())
    print(f"DoRA TP {tensor_parallel}: max |dlogit| {off:.1e}, from the trainer {apart:.1e}")
    assert off < TOLERANCE
    assert apart < FORWARD_TOLERANCE


def test_a_failure_on_rank_0_leaves_no_rank_waiting(
    policy: Policy, model: Path, tmp_path: Path
) -> None:
    """Both ranks raise, nothing is written, and the next export works."""
    ranks = policy(config(model, 2))
    path = tmp_path / "merged"
    with pytest.raises(RankError, match=r"CoverageError: .*layers\.1\.mlp\.down_proj"):
        ranks.call(save_merged, str(path), "layers.1.mlp.down_proj")
    assert list(tmp_path.iterdir()) == []
    first, nothing = ranks.call(first_name)
    assert (first, nothing) == ("model.norm.weight", "")
    ranks.call(save_merged, str(path))
    with pytest.raises(RankError, match="already exists and is not an empty folder"):
        ranks.call(save_merged, str(path))
    check_files(path)
