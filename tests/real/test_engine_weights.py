"""One worker's own weights: found, reloaded in part, read back, compared with a trainer's base."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from parity import PROMPTS, distance
from rig import (
    LLAMA_TP2,
    MERGED_LLAMA_TP1,
    MERGED_LLAMA_TP2,
    MERGED_QWEN_TP2,
    MODELS,
    LiveEngine,
    on_engine,
)
from safetensors.torch import load_file, save_file

from lora_refit.base_samples import BaseSample
from lora_refit.testing.engine import cpu_llm, shutdown
from lora_refit.testing.models import byte_tokenizer
from lora_refit.testing.worker import InspectionFailed, Inspector

TOLERANCE = 1e-4
Tensors = dict[str, torch.Tensor]

on_all_engines = on_engine(MERGED_LLAMA_TP1, MERGED_LLAMA_TP2, MERGED_QWEN_TP2)


class Checkpoint:
    """A model folder, and folders with other weights beside it."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder
        self.scratch = scratch
        self.tensors: Tensors = load_file(folder / "model.safetensors")

    @property
    def file(self) -> str:
        return str(self.folder / "model.safetensors")

    def projections(self, *parts: str) -> list[str]:
        """Names of the linear layers' weights that contain one of the parts, all without."""
        return [
            name
            for name in self.tensors
            if "_proj.weight" in name and any(part in name for part in parts or ("",))
        ]

    def shapes(self, names: list[str]) -> dict[str, list[int]]:
        return {name: list(self.tensors[name].shape) for name in names}

    def changed(self, names: list[str], seed: int, std: float = 0.03) -> Checkpoint:
        """This checkpoint with noise on some weights."""
        generator = torch.Generator().manual_seed(seed)
        new = dict(self.tensors)
        for name in names:
            new[name] = new[name] + std * torch.randn(new[name].shape, generator=generator)
        return self.with_tensors(new, f"changed-{seed}")

    def with_tensors(self, tensors: Tensors, name: str) -> Checkpoint:
        folder = self.scratch / name
        folder.mkdir()
        for item in self.folder.iterdir():
            if item.suffix != ".safetensors":
                os.link(item, folder / item.name)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return Checkpoint(folder, self.scratch)

    def samples(self, names: list[str]) -> list[BaseSample]:
        return [_sample(name, self.tensors[name]) for name in names]


def _sample(name: str, weight: torch.Tensor, points: int = 7) -> BaseSample:
    rows, cols = (
        torch.linspace(0, size - 1, points).round().long().unique() for size in weight.shape
    )
    values = weight[rows][:, cols].float().contiguous()
    shape = (int(weight.shape[0]), int(weight.shape[1]))
    return BaseSample(
        name, shape, tuple(rows.tolist()), tuple(cols.tolist()), values.numpy().tobytes()
    )


@pytest.fixture
def checkpoint(live: LiveEngine, tmp_path: Path) -> Iterator[Checkpoint]:
    """The engine's checkpoint; its weights are the engine's again after the test."""
    base = Checkpoint(live.model, tmp_path)
    names = base.projections()
    live.inspect("targets", base.shapes(names))
    live.inspect("reload", base.file, names)  # other tests leave merged weights behind
    before = live.inspect("digests")
    yield base
    live.inspect("targets", base.shapes(names))
    live.inspect("reload", base.file, names)
    assert live.inspect("digests") == before


def sample(llm: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy responses to PROMPTS and the log-probability of each of their tokens."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True),
        use_tqdm=False,
    )
    done = [output.outputs[0] for output in outputs]
    log_probs = [[next(iter(step.values())).logprob for step in item.logprobs] for item in done]
    return [list(item.token_ids) for item in done], torch.tensor(log_probs, dtype=torch.float64)


def transformers_log_probs(folder: Path, responses: list[list[int]]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([p + r for p, r in zip(PROMPTS, responses, strict=True)])
    start = len(PROMPTS[0])
    with torch.no_grad():
        scores = model(tokens).logits[:, start - 1 : -1].double().log_softmax(-1)
    return scores.gather(-1, tokens[:, start:, None])[..., 0]


def refused(live: LiveEngine, shapes: dict[str, list[int]], *texts: str) -> None:
    with pytest.raises(InspectionFailed) as caught:
        live.inspect("targets", shapes)
    print(caught.value)
    for text in texts:
        assert text in str(caught.value)


@on_all_engines
def test_reloading_some_layers_serves_what_a_checkpoint_with_those_weights_serves(
    live: LiveEngine, checkpoint: Checkpoint
) -> None:
    """All of layer 0 and one matrix of layer 1; twice in a row."""
    names = checkpoint.projections("layers.0.", "layers.1.mlp.down_proj")
    found = live.inspect("targets", checkpoint.shapes(names))
    layers = [name for name, _ in found[0]]
    assert len(layers) == 5
    for seed in (1, 2):
        before = live.inspect("snapshot")
        changed = checkpoint.changed(names, seed)
        processed = live.inspect("reload", changed.file, names)
        assert processed == [layers] * live.case.tensor_parallel
        after = live.inspect("snapshot")
        for old, new in zip(before, after, strict=True):
            assert list(old) == list(new)
            moved = {name for name in old if old[name] != new[name]}
            assert {name.rpartition(".weight")[0] or name.split(" ")[0] for name in moved} == set(
                layers
            )
            assert all(old[name][1] == new[name][1] for name in old)
        responses, served = sample(live.llm)
        if live.case.dtype == "float32":
            error = distance(served, transformers_log_probs(changed.folder, responses))
            control = distance(served, transformers_log_probs(checkpoint.folder, responses))
            print(f"{live.case}: max |dlogp| {error:.1e}, against the old weights {control:.1e}")
            assert error < TOLERANCE
            assert control > 100 * TOLERANCE
    if live.case.dtype != "float32":
        _equals_a_fresh_engine(live, changed)


def _equals_a_fresh_engine(live: LiveEngine, checkpoint: Checkpoint) -> None:
    fresh = cpu_llm(
        checkpoint.folder,
        tensor_parallel=live.case.tensor_parallel,
        dtype=live.case.dtype,
        enable_lora=False,
        worker_extension_cls=live.case.worker,
    )
    try:
        assert sample(live.llm)[0] == sample(fresh)[0]
        assert torch.equal(sample(live.llm)[1], sample(fresh)[1])
        digests = [
            [{name: digest for name, (digest, _) in worker.items()} for worker in workers]
            for workers in (live.inspect("snapshot"), Inspector(fresh)("snapshot"))
        ]
        assert digests[0] == digests[1]
    finally:
        shutdown(fresh)


@on_all_engines
def test_finding_layers_touches_nothing(live: LiveEngine, checkpoint: Checkpoint) -> None:
    before = live.inspect("snapshot")
    live.inspect("targets", checkpoint.shapes(checkpoint.projections()))
    with pytest.raises(InspectionFailed):
        live.inspect("targets", {"model.nowhere.weight": [3, 3]})
    assert live.inspect("snapshot") == before


@on_engine(MERGED_LLAMA_TP1)
def test_what_cannot_be_reloaded_whole_is_refused_by_name(
    live: LiveEngine, checkpoint: Checkpoint
) -> None:
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    shapes = checkpoint.shapes(checkpoint.projections())
    partial = {
        f"{attention}q_proj.weight": (
            "UnsupportedAdapter",
            f"{attention}qkv_proj",
            "k_proj, v_proj",
        ),
        f"{mlp}up_proj.weight": ("UnsupportedAdapter", f"{mlp}gate_up_proj", "without gate_proj"),
    }
    for name, texts in partial.items():
        refused(live, {name: shapes[name]}, *texts)
    missing = dict(shapes)
    del missing[f"{attention}k_proj.weight"]
    refused(live, missing, "UnsupportedAdapter", f"{attention}qkv_proj", "without k_proj")
    unknown = f"{mlp}side_proj.weight"
    refused(live, shapes | {unknown: [4, 4]}, "CoverageError", unknown)
    wrong = f"{attention}o_proj.weight"
    refused(live, {wrong: [192, 7]}, "CoverageError", wrong, "[192, 7]")


@on_engine(MERGED_LLAMA_TP1)
def test_tied_weights_are_refused_by_name(live: LiveEngine, checkpoint: Checkpoint) -> None:
    live.inspect("tie_embeddings", True)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        refused(live, {name: [768, 192]}, "UnsupportedAdapter", "lm_head", "embed_tokens")
    live.inspect("tie_embeddings", False)
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    (found,) = live.inspect("targets", checkpoint.shapes(names))
    assert [layer for layer, _ in found] == ["lm_head", "model.embed_tokens"]


@on_engine(MERGED_LLAMA_TP1, MERGED_QWEN_TP2)
@pytest.mark.parametrize("end", ["finish", "abort"])
def test_a_reload_that_breaks_off_leaves_old_weights_in_incomplete_layers(
    live: LiveEngine, checkpoint: Checkpoint, end: str
) -> None:
    """q and k of a layer arrive, v does not; one other layer is complete."""
    before = live.inspect("digests")
    changed = checkpoint.changed(checkpoint.projections(), seed=3)
    sent = changed.projections("0.mlp.down_proj", "0.self_attn.q_proj", "0.self_attn.k_proj")
    if end == "finish":
        with pytest.raises(
            InspectionFailed, match="were not loaded completely.*qkv_proj"
        ) as caught:
            live.inspect("reload_fails", changed.file, sent, end)
        assert "layers.0.mlp.down_proj," not in str(caught.value)
    else:
        assert set(live.inspect("reload_fails", changed.file, sent, end)) == {"the source broke"}
    for old, new in zip(before, live.inspect("digests"), strict=True):
        moved = {
            name.split(" ")[0].removesuffix(".weight") for name in old if old[name] != new[name]
        }
        assert moved == {"model.layers.0.mlp.down_proj"}
    sample(live.llm)


@on_engine(MERGED_LLAMA_TP1, MERGED_LLAMA_TP2)
def test_digests_tell_one_changed_element(live: LiveEngine, checkpoint: Checkpoint) -> None:
    """Of every layer its first, a middle and its last element, by a reload."""
    base = live.inspect("digests")
    assert live.inspect("digests") == base
    for name in checkpoint.projections("layers.1."):
        tensors = dict(checkpoint.tensors)
        weight = tensors[name] = tensors[name].clone()
        weight.view(-1)[weight.numel() // 2 + 5] *= 1 + 2**-6
        altered = checkpoint.with_tensors(tensors, name)
        live.inspect("reload", altered.file, checkpoint.projections())
        now = live.inspect("digests")
        moved = {
            key for old, new in zip(base, now, strict=True) for key in old if old[key] != new[key]
        }
        assert len(moved) == 1, (name, moved)
        live.inspect("reload", checkpoint.file, checkpoint.projections())
        assert live.inspect("digests") == base


@on_engine(MERGED_LLAMA_TP2)
@pytest.mark.parametrize("byte", [0, 12345, -1])
def test_digests_tell_one_flipped_bit(live: LiveEngine, checkpoint: Checkpoint, byte: int) -> None:
    """In weights that vLLM leaves in place, as it does on GPUs; this CPU packs no bf16."""
    base = live.inspect("digests")
    parameters = [name for name in base[0] if name.endswith(".weight")]
    assert len(parameters) == 8, "the CPU packs bf16"
    for parameter in parameters:
        live.inspect.on(1, "flip_weight_bit", parameter, byte)
        now = live.inspect("digests")
        assert now[0] == base[0]
        assert [key for key in base[1] if base[1][key] != now[1][key]] == [parameter]
        live.inspect.on(1, "flip_weight_bit", parameter, byte)
    assert live.inspect("digests") == base


def compare(live: LiveEngine, samples: list[BaseSample]) -> tuple[list[str], list[str], list[int]]:
    """Lines of all workers, and how many elements each worker compared."""
    answers = live.inspect("compare_bases", msgspec.msgpack.encode(samples))
    differing = [line for lines, _, _ in answers for line in lines]
    not_compared = [line for _, lines, _ in answers for line in lines]
    return differing, not_compared, [count for _, _, count in answers]


@on_engine(MERGED_LLAMA_TP1, MERGED_LLAMA_TP2, MERGED_QWEN_TP2, LLAMA_TP2)
def test_the_base_guard_finds_one_other_element_and_passes_the_same_base(
    live: LiveEngine, tmp_path: Path
) -> None:
    """Also of embeddings and output layer, and of an engine whose layers are wrapped for LoRA."""
    checkpoint = Checkpoint(live.model, tmp_path)
    names = [name for name, tensor in checkpoint.tensors.items() if tensor.dim() == 2]
    before = live.inspect("snapshot")
    differing, not_compared, counts = compare(live, checkpoint.samples(names))
    print(f"{live.case}: compared {counts} elements of {len(names)} weights")
    assert not differing and not not_compared
    assert sum(counts) >= 49 * len(names)
    for name in names:
        weight = checkpoint.tensors[name].clone()
        last = _sample(name, weight)
        row, col = last.rows[-1], last.cols[3]
        weight[row, col] += 0.01
        differing, _, _ = compare(live, [_sample(name, weight)])
        assert differing, name
        expected = float(weight[row, col].to(getattr(torch, live.case.dtype)))
        for line in differing:
            assert line.startswith(f"{name}[{row}, {col}]: the engine has ")
            assert f"the trainer {expected!r}" in line
    assert live.inspect("snapshot") == before


@on_engine(MERGED_LLAMA_TP1)
def test_the_base_guard_says_what_it_cannot_compare(live: LiveEngine, tmp_path: Path) -> None:
    known = Checkpoint(live.model, tmp_path).samples(["lm_head.weight"])
    strange = _sample("model.layers.9.mlp.up_proj.weight", torch.ones(4, 4))
    differing, not_compared, counts = compare(live, [strange, *known])
    assert not differing
    assert counts == [49]
    assert len(not_compared) == 1 and strange.name in not_compared[0]


def update(llm: Any, *updates: dict[str, int]) -> None:
    llm.collective_rpc("update_weights", kwargs={"update_info": list(updates)})


@on_engine(MERGED_QWEN_TP2)
@pytest.mark.parametrize(
    ("second", "failure"),
    [
        ({"worker": 0, "bucket": 1}, "worker 1 was sent the update of worker 0"),
        ({"worker": 1, "bucket": 99}, "there is no bucket 99"),
        ({"worker": 1, "basket": 1}, "Invalid update_info"),
    ],
    ids=["worker", "bucket", "payload"],
)
def test_transfer_hooks_keep_a_failure_to_themselves(
    live: LiveEngine, checkpoint: Checkpoint, second: dict[str, int], failure: str
) -> None:
    """One rank that raises would leave vLLM's RPC out of step for good."""
    names = checkpoint.projections()
    changed = checkpoint.changed(names, seed=4)
    live.inspect("bind_checkpoint", changed.file, checkpoint.shapes(names))
    stamp = {"version": 1, "sequence": 1}
    for wrong in (True, False):
        live.llm.collective_rpc("start_weight_update")
        for bucket in range(len(names)):
            other = second if wrong and bucket == 1 else {"worker": 1, "bucket": bucket}
            update(live.llm, {"worker": 0, "bucket": bucket, **stamp}, {**other, **stamp})
        live.llm.collective_rpc("finish_weight_update")
        assert live.rpc_in_step()
        healthy, failed = live.inspect("transferred")
        assert healthy == ["", list(range(len(names)))]
        if wrong:
            assert failure in failed[0]
            assert failed[1] == [0]
        else:
            assert failed == healthy
        sample(live.llm)
    responses, served = sample(live.llm)
    assert distance(served, transformers_log_probs(changed.folder, responses)) < TOLERANCE
    live.inspect("unbind")
    live.llm.collective_rpc("start_weight_update")
    live.llm.collective_rpc("finish_weight_update")
    assert all("nothing is staged" in failure for failure, _ in live.inspect("transferred"))
    assert live.rpc_in_step()


def tiny_checkpoint(path: Path, model_class: Any, config_class: Any, **settings: Any) -> Checkpoint:
    config = config_class(
        hidden_size=192,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        intermediate_size=384,
        vocab_size=768,
        initializer_range=0.1,
        tie_word_embeddings=False,
        dtype=torch.float32,
        **settings,
    )
    torch.manual_seed(0)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_(std=0.5)
    model.save_pretrained(path / "model")
    byte_tokenizer().save_pretrained(path / "model")
    return Checkpoint(path / "model", path)


def test_biases_survive_a_reload_that_does_not_send_them(tmp_path: Path) -> None:
    """vLLM itself would hold every layer that has a bias back until the end."""
    checkpoint = tiny_checkpoint(tmp_path, transformers.Qwen2ForCausalLM, transformers.Qwen2Config)
    names = checkpoint.projections()
    changed = checkpoint.changed(names, seed=5)
    llm = cpu_llm(
        checkpoint.folder,
        tensor_parallel=2,
        enable_lora=False,
        worker_extension_cls="mutants.MutantWorkerExtension",
    )
    inspect = Inspector(llm)
    try:
        found = inspect("targets", checkpoint.shapes(names))
        before = inspect("digests")
        processed = inspect("reload", changed.file, names)
        after = inspect("digests")
        responses, served = sample(llm)
    finally:
        shutdown(llm)
    assert [[name for name, _ in layers] for layers in found] == processed
    for old, new in zip(before, after, strict=True):
        biases = {name for name in old if name.endswith(".bias")}
        assert len(biases) == 2
        assert {name for name in old if old[name] == new[name]} == biases
    assert distance(served, transformers_log_probs(changed.folder, responses)) < TOLERANCE


def test_experts_that_vllm_would_not_pack_again_are_refused(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(
        tmp_path,
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=192,
    )
    llm = cpu_llm(
        checkpoint.folder,
        enable_lora=False,
        worker_extension_cls="mutants.MutantWorkerExtension",
    )
    experts = [name for name, tensor in checkpoint.tensors.items() if ".experts." in name]
    attention = checkpoint.projections("self_attn")
    try:
        inspect = Inspector(llm)
        with pytest.raises(InspectionFailed, match="does not pack experts again"):
            inspect("targets", checkpoint.shapes(experts))
        (found,) = inspect("targets", checkpoint.shapes(attention))
        samples = msgspec.msgpack.encode(checkpoint.samples([*experts, *attention]))
        ((differing, not_compared, _),) = inspect("compare_bases", samples)
    finally:
        shutdown(llm)
    assert len(found) == 4
    assert not differing
    assert len(not_compared) == len(experts)
    assert all(any(name in line for line in not_compared) for name in experts)


def test_weights_that_the_engine_quantises_are_quantised_again(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """The reload of other weights and back equals the first load; the guard allows for rounding."""
    import online_int8  # noqa: F401

    checkpoint = Checkpoint(tiny(**MODELS["llama-gqa"]), tmp_path)
    names = checkpoint.projections()
    changed = checkpoint.changed(names, seed=6)
    llm = cpu_llm(
        checkpoint.folder,
        dtype="bfloat16",
        enable_lora=False,
        quantization="test_int8",
        worker_extension_cls="online_int8.Int8WorkerExtension",
    )
    try:
        inspect = Inspector(llm)
        inspect("targets", checkpoint.shapes(names))
        before, served = inspect("digests"), sample(llm)
        rights = inspect("compare_bases", msgspec.msgpack.encode(checkpoint.samples(names)))
        wrongs = inspect("compare_bases", msgspec.msgpack.encode(changed.samples(names)))
        inspect("reload", changed.file, names)
        other = inspect("digests")
        inspect("reload", checkpoint.file, names)
        after, served_again = inspect("digests"), sample(llm)
    finally:
        shutdown(llm)
    assert any(name.endswith("down_proj.weight_scale") for name in before[0])
    assert all(before[0][name] != other[0][name] for name in before[0])
    assert after == before
    assert torch.equal(served[1], served_again[1])
    assert rights == [[[], [], 49 * len(names)]]
    assert len(wrongs[0][0]) > 10


def test_a_checkpoint_that_is_quantised_is_refused_by_name(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    config = json.loads((tiny(**MODELS["llama-gqa"]) / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**scheme, "strategy": "channel", "dynamic": False},
                "input_activations": {**scheme, "strategy": "token", "dynamic": True},
            }
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(tmp_path)
    llm = cpu_llm(
        tmp_path,
        dtype="bfloat16",
        enable_lora=False,
        load_format="dummy",
        worker_extension_cls="mutants.MutantWorkerExtension",
    )
    name = "model.layers.0.mlp.down_proj.weight"
    try:
        with pytest.raises(InspectionFailed, match=rf"{name}: its checkpoint is quantised.*int8"):
            Inspector(llm)("targets", {name: [192, 384]})
    finally:
        shutdown(llm)
