"""Refits of merged weights from real Megatron ranks into real vLLM, started without LoRA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer
from parity import PROMPTS, TOLERANCE, disagreement, distance, sample
from rig import (
    LLAMA_TP1,
    MERGED_AND_LORA_TP1,
    MERGED_DUMMY_TP1,
    MERGED_LLAMA_TP1,
    MERGED_LLAMA_TP2,
    MERGED_QWEN_TP2,
    Refitted,
    on_engine,
)

from lora_refit import (
    CommitFailed,
    LayoutMismatch,
    NotCommitted,
    Spec,
    StaleArena,
    UnsupportedAdapter,
    WriterTimeout,
)
from lora_refit.testing.ranks import RankError
from lora_refit.vllm import RefitEngine

BFLOAT16_NOISE = 0.15
"""Largest difference of a log-probability between vLLM's bf16 forward and an fp32 forward of the
same bf16 weights; the adapters here move them by more than 1."""

ManyBuckets = pytest.mark.parametrize("bucket_bytes", [100_000, 1 << 30], ids=["many", "one"])


@on_engine(MERGED_LLAMA_TP1, LLAMA_TP1)
def test_another_base_in_the_engine_is_refused(request: pytest.FixtureRequest, live: Any) -> None:
    """Before anything is refitted: merged weights take the place of the engine's base."""
    attach = request.getfixturevalue("attach" if live.case.enable_lora else "attach_merged")
    refitted = attach(1)
    assert refitted.report.warnings == ()
    refitted.engine.close()
    refitted.ranks.call(trainer.change_base, 2.0)
    try:
        with pytest.raises(LayoutMismatch, match=r"another base .*o_proj.weight\[0, 0\]"):
            attach(1)
    finally:
        refitted.ranks.call(trainer.change_base, 0.5)
    attach(1)


@on_engine(MERGED_LLAMA_TP1, MERGED_QWEN_TP2)
@ManyBuckets
@pytest.mark.parametrize("trainer_tp", [1, 2])
def test_the_engine_serves_the_trainers_policy(
    attach_merged: Callable[..., Refitted], trainer_tp: int, bucket_bytes: int
) -> None:
    """Prompts are longer than a block, so a prefix cache of another version would show."""
    refitted = attach_merged(trainer_tp, bucket_bytes=bucket_bytes)
    with pytest.raises(NotCommitted):
        refitted.engine.lora_request()
    for version in (1, 2):
        report = refitted.refit(version, seed=version)
        assert refitted.engine.lora_request() is None
        assert disagreement(refitted) < TOLERANCE
        assert refitted.attests(version)
        assert report.fidelity is not None
        assert report.fidelity.lost < 1e-6
        version_bytes = report.bytes // refitted.live.case.tensor_parallel
        rings = 2 * min(bucket_bytes * trainer_tp, version_bytes)
        weight = 192 * 384 * 4  # of a layer, gate and up, and the one that is being put together
        held = version_bytes if report.buckets == 1 else 3 * weight
        assert report.peak_extra_bytes <= rings + held
    print(f"{report.buckets} buckets, {report.peak_extra_bytes} bytes, {report.phases_ms}")
    assert (report.buckets == 1) == (bucket_bytes == 1 << 30)
    served = refitted.live.llm.llm_engine.get_weight_version()
    assert served == f"lora-refit://policy@2/{report.digest}"


@on_engine(MERGED_LLAMA_TP1, MERGED_LLAMA_TP2)
def test_the_engine_agrees_with_transformers_on_the_exported_checkpoint(
    attach_merged: Callable[..., Refitted], tmp_path: Path
) -> None:
    import transformers

    refitted = attach_merged(2, bucket_bytes=200_000)
    refitted.refit(1, seed=3)
    refitted.ranks.call(trainer.save_merged, str(tmp_path / "merged"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=getattr(torch, refitted.live.case.dtype)
    ).float()
    responses, engine = sample(refitted)
    tokens = torch.tensor([p + r for p, r in zip(PROMPTS, responses, strict=True)])
    with torch.no_grad():
        scores = model(tokens).logits[:, len(PROMPTS[0]) - 1 : -1].double().log_softmax(-1)
    expected = scores.gather(-1, tokens[:, len(PROMPTS[0]) :, None])[..., 0]
    exact = refitted.live.case.dtype == "float32"
    print(f"{refitted.live.case}: max |dlogp| {distance(engine, expected):.2e}")
    assert distance(engine, expected) < (TOLERANCE if exact else BFLOAT16_NOISE)


@on_engine(MERGED_LLAMA_TP1)
def test_the_error_of_the_policy_grows_as_the_fidelity_says(
    attach_merged: Callable[..., Refitted], tiny: Callable[..., Path]
) -> None:
    """Smaller updates lose a larger share on the bf16 grid, and so does what they do to log-probs.
    Adapter mode, which loses nothing, agrees with the trainer to 1e-4."""
    refitted = attach_merged(1, dtype="bfloat16", policy_settings={"lora_alpha": 12})
    refitted.refit(0, seed=1)  # a first one takes the place of the engine's fp32 base
    refitted.ranks.call(trainer.round_base)
    offered = refitted.ranks.call(trainer.offer_merged, "bfloat16", {})[0]
    refitted.engine.attach(Spec.from_bytes(offered))
    found = []
    for version, std in enumerate((0.06, 0.03, 0.015, 0.008), start=1):
        refitted.ranks.call(trainer.randomize, 5, std)
        report = refitted.refit(version)
        responses, engine = sample(refitted)
        trained = refitted.ranks.call(trainer.log_probs, PROMPTS, responses)[0]
        refitted.ranks.call(trainer.randomize, 5, 0.0)
        base = refitted.ranks.call(trainer.log_probs, PROMPTS, responses)[0]
        assert report.fidelity is not None
        lost_of_update = float((engine - trained).norm() / (trained - base).norm())
        found.append((report.fidelity.lost, lost_of_update))
        print(
            f"std {std}: fidelity loss {report.fidelity.lost:.1%}, log-prob error "
            f"{lost_of_update:.1%} of the update; warnings {report.warnings}"
        )
        assert bool(report.warnings) == (report.fidelity.lost > 0.25)
    losses, errors = zip(*found, strict=True)
    assert list(losses) == sorted(losses)
    assert list(errors) == sorted(errors)
    assert losses[-1] > 5 * losses[0]
    assert all(loss / 4 < error < 4 * loss for loss, error in found)


@on_engine(MERGED_QWEN_TP2)
@pytest.mark.parametrize("bucket", [0, 7])
def test_a_failure_while_loading_poisons_the_engine_until_a_refit_succeeds(
    attach_merged: Callable[..., Refitted], bucket: int
) -> None:
    refitted = attach_merged(2, bucket_bytes=100_000)
    refitted.refit(1, seed=1)
    refitted.live.inspect.on(1, "fail_update", bucket, "raise")
    with pytest.raises(CommitFailed, match=rf"engine worker 1: .*injected before bucket {bucket}"):
        refitted.refit(2, seed=2)
    for ask in (refitted.engine.lora_request, refitted.engine.attest):
        with pytest.raises(NotCommitted, match="mixture of versions"):
            ask()
    assert refitted.live.llm.llm_engine.get_weight_version() == "lora-refit://policy@mixture"
    sample_anyway(refitted)
    assert refitted.live.rpc_in_step()
    refitted.refit(3, seed=2)
    assert disagreement(refitted) < TOLERANCE
    assert refitted.attests(3)


def sample_anyway(refitted: Refitted) -> None:
    """A poisoned engine still runs: its layers are whole, of one version or the other."""
    from vllm import SamplingParams

    refitted.live.llm.generate(
        [{"prompt_token_ids": PROMPTS[0]}], SamplingParams(max_tokens=1), use_tqdm=False
    )


@on_engine(MERGED_QWEN_TP2)
@pytest.mark.parametrize("method", ["stage", "commit"])
def test_a_failure_before_loading_leaves_the_live_version(
    attach_merged: Callable[..., Refitted], method: str
) -> None:
    refitted = attach_merged(2, bucket_bytes=100_000)
    refitted.refit(1, seed=1)
    refitted.live.inspect.on(0, "fail", method, "before", "raise")
    with pytest.raises(Exception, match=f"injected before {method}"):
        refitted.refit(2, seed=2)
    if method == "commit":
        with pytest.raises(NotCommitted):
            refitted.engine.lora_request()
    else:
        refitted.ranks.call(trainer.randomize, 1)
        assert disagreement(refitted) < TOLERANCE
        assert refitted.attests(1)
    refitted.refit(3, seed=3)
    assert disagreement(refitted) < TOLERANCE


@on_engine(MERGED_QWEN_TP2)
@pytest.mark.parametrize(
    ("elements", "message"),
    [(None, "its base weight has changed since"), (1, "merged to other bytes than when")],
    ids=["everywhere", "one-element"],
)
def test_a_base_that_changes_between_staging_and_loading_is_noticed(
    attach_merged: Callable[..., Refitted], elements: int | None, message: str
) -> None:
    refitted = attach_merged(2, bucket_bytes=100_000)
    steps = refitted.engine._protocol.refit(refitted.publish(1, seed=1))
    step, changed = next(steps), False
    with pytest.raises(CommitFailed, match=message):
        while True:
            if not changed and getattr(step, "method", "") == "start_weight_update":
                refitted.ranks.call(trainer.change_base, 2.0, elements)
                changed = True
            step = steps.send(refitted.engine._take(step))
    refitted.ranks.call(trainer.change_base, 0.5, elements)
    refitted.refit(2, seed=2)
    assert disagreement(refitted) < TOLERANCE


@on_engine(MERGED_QWEN_TP2)
def test_attest_sees_that_the_base_was_loaded_again(
    attach_merged: Callable[..., Refitted],
) -> None:
    refitted = attach_merged(1)
    refitted.refit(1, seed=1)
    assert refitted.attests(1)
    refitted.live.llm.collective_rpc("reload_weights")
    attestation = refitted.engine.attest()
    print(attestation.workers)
    assert not attestation.ok
    assert all("differs from its commit in" in line for line in attestation.workers)
    refitted.refit(2, seed=1)
    assert refitted.attests(2)


@on_engine(MERGED_LLAMA_TP1)
def test_requests_under_way_are_not_given_other_weights(
    attach_merged: Callable[..., Refitted],
) -> None:
    from vllm import SamplingParams

    refitted = attach_merged(1)
    refitted.refit(1, seed=1)
    engine = refitted.live.llm.llm_engine
    engine.add_request("slow", {"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=4))
    with pytest.raises(CommitFailed, match="1 requests are running"):
        refitted.refit(2, seed=2)
    engine.abort_request(["slow"])
    refitted.refit(3, seed=2)
    assert disagreement(refitted) < TOLERANCE


@on_engine(MERGED_DUMMY_TP1)
def test_an_engine_with_dummy_weights_gets_its_base_first(
    attach_merged: Callable[..., Refitted], live: Any, tmp_path: Path
) -> None:
    with pytest.raises(LayoutMismatch, match=r"another base"):
        attach_merged(2, bucket_bytes=200_000)
    ranks = attach_merged.ranks(2)
    ranks.call(trainer.save_merged, str(tmp_path / "base"), True)
    engine = RefitEngine(live.llm)
    with pytest.raises(LayoutMismatch, match="no checkpoint folder"):
        engine.load_base(tmp_path)
    engine.load_base(tmp_path / "base")
    refitted = attach_merged(2, bucket_bytes=200_000)
    refitted.refit(1, seed=1)
    assert disagreement(refitted) < TOLERANCE


@on_engine(MERGED_LLAMA_TP1)
def test_publishing_while_an_engine_takes_a_version_waits_or_says_so(
    attach_merged: Callable[..., Refitted],
) -> None:
    refitted = attach_merged(1, bucket_bytes=100_000, timeout_s=0.5)
    ticket = refitted.publish(1, seed=1)
    steps = refitted.engine._protocol.refit(ticket)
    step = next(steps)
    while getattr(step, "method", "") != "start_weight_update":
        step = steps.send(refitted.engine._take(step))
    with pytest.raises(RankError, match=r"ReaderTimeout: .* has a session of publication 1"):
        refitted.publish(2, seed=2)
    refitted.engine.close()
    refitted.ranks.call(trainer.publish, 3, 3)


@on_engine(MERGED_QWEN_TP2)
def test_a_trainer_rank_that_dies_is_named(
    attach_merged: Callable[..., Refitted], mortals: Any
) -> None:
    refitted = attach_merged(2, bucket_bytes=100_000, ranks=mortals)
    refitted.refit(1, seed=1)
    ticket = refitted.publish(2, seed=2)
    steps = refitted.engine._protocol.refit(ticket)
    step, killed = next(steps), False
    with pytest.raises(CommitFailed, match=r"trainer rank 1 .* is gone"):
        while True:
            if not killed and getattr(step, "method", "") == "start_weight_update":
                mortals.processes[1].kill()
                mortals.processes[1].join()
                killed = True
            step = steps.send(refitted.engine._take(step))
    with pytest.raises(NotCommitted):
        refitted.engine.lora_request()
    with pytest.raises((WriterTimeout, StaleArena), match="trainer rank 1"):
        refitted.engine.refit(ticket)
    refitted.engine.close()
    again = attach_merged(1)
    again.refit(3, seed=3)
    assert disagreement(again) < TOLERANCE


@on_engine(MERGED_LLAMA_TP1)
def test_merged_weights_of_before_never_stay_beside_others(
    attach_merged: Callable[..., Refitted], tmp_path: Path
) -> None:
    """A trainer that comes back with fewer modules would leave the old update in the others."""
    refitted = attach_merged(1)
    refitted.refit(1, seed=1)
    refitted.ranks.call(trainer.save_merged, str(tmp_path / "base"), True)
    refitted.engine.close()
    fewer = {"targets": ("linear_fc2",)}
    with pytest.raises(LayoutMismatch, match=r"merged weights that this publisher does not send"):
        attach_merged(1, policy_settings=fewer)
    RefitEngine(refitted.live.llm).load_base(tmp_path / "base")
    again = attach_merged(1, policy_settings=fewer)
    assert again.report.warnings == ()
    again.refit(2, seed=2)
    assert disagreement(again) < TOLERANCE
    with pytest.raises(LayoutMismatch, match="attached to a publisher in merged mode; close"):
        RefitEngine(refitted.live.llm).load_base(tmp_path / "base")
    assert again.attests(2)


@on_engine(MERGED_LLAMA_TP1)
def test_weights_that_are_no_numbers_are_not_loaded(
    attach_merged: Callable[..., Refitted],
) -> None:
    refitted = attach_merged(1)
    refitted.refit(1, seed=1)
    refitted.ranks.call(trainer.spoil, float("nan"))
    with pytest.raises(UnsupportedAdapter, match=r"o_proj.weight .* not finite numbers"):
        refitted.refit(2)
    refitted.ranks.call(trainer.randomize, 1)
    assert disagreement(refitted) < TOLERANCE
    assert refitted.attests(1)


@on_engine(MERGED_AND_LORA_TP1)
def test_one_engine_serves_one_mode(
    attach: Callable[..., Refitted], attach_merged: Callable[..., Refitted], tmp_path: Path
) -> None:
    """Merged weights under an adapter would count its update twice, and loading them drops it."""
    adapted = attach(1)
    adapted.refit(1, seed=1)
    with pytest.raises(LayoutMismatch, match="attached to adapter 'policy'; close"):
        attach_merged(1)
    assert disagreement(adapted) < TOLERANCE
    adapted.ranks.call(trainer.save_base, str(tmp_path / "base"))
    adapted.engine.close()
    merged = attach_merged(1)
    merged.refit(2, seed=2)
    assert disagreement(merged) < TOLERANCE
    with pytest.raises(LayoutMismatch, match="attached to a publisher in merged mode; close"):
        attach(1)
    merged.engine.close()
    with pytest.raises(LayoutMismatch, match="on which an adapter would count twice"):
        attach(1)
    RefitEngine(merged.live.llm).load_base(tmp_path / "base")
    again = attach(1)
    again.refit(3, seed=3)
    assert disagreement(again) < TOLERANCE
