"""What cannot be served whole is refused by name, before anything of it is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trainer
from parity import TOLERANCE, disagreement
from rig import LLAMA_TP1, QWEN_TP2, Refitted, on_engine, policy_config

from lora_refit import CoverageError, LayoutMismatch, RefitError, Spec, Ticket, UnsupportedAdapter
from lora_refit.testing.megatron import PolicyConfig
from lora_refit.testing.ranks import RankError, TrainerRanks

Policy = Callable[[PolicyConfig], TrainerRanks]


@pytest.fixture
def serving(attach: Callable[..., Refitted]) -> Refitted:
    """An engine that serves version 1 of an adapter of rank 6."""
    refitted = attach(1)
    refitted.refit(1, seed=1)
    return refitted


def still_serves(refitted: Refitted, version: int = 1) -> None:
    """The version is live, whole, and what the engine answers with."""
    assert refitted.attests(version)
    assert disagreement(refitted) < TOLERANCE


def refused(refitted: Refitted, spec: bytes, kind: type[RefitError], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        refitted.engine.attach(Spec.from_bytes(spec))
    print(caught.value)
    still_serves(refitted)


@on_engine(LLAMA_TP1)
@pytest.mark.parametrize(
    ("alteration", "match"),
    [
        ("unwrapped module", r"layers\.1\.mlp\.side_proj\.lora_A\.weight"),
        ("misspelt layer", r"layers\.9\.self_attn\.q_proj\.lora_A\.weight"),
    ],
)
def test_engine_refuses_names_it_has_no_place_for(
    serving: Refitted, alteration: str, match: str
) -> None:
    """Each would be dropped silently by vLLM's own loader or fail without saying why."""
    spec = serving.ranks.call(trainer.offer_altered, alteration, "float32")[0]
    refused(serving, spec, CoverageError, match)


@on_engine(LLAMA_TP1)
@pytest.mark.parametrize(
    ("alteration", "match"),
    [
        ("missing lora_B", r"layers\.0\.mlp\.gate_proj"),
        ("duplicate name", r"layers\.0\.mlp\.up_proj\.lora_A"),
        ("unreadable name", r"o_proj\.lora_"),
    ],
)
def test_publisher_refuses_an_incomplete_export(
    serving: Refitted, alteration: str, match: str
) -> None:
    with pytest.raises(RankError, match=f"CoverageError: .*{match}"):
        serving.ranks.call(trainer.offer_altered, alteration, "float32")
    still_serves(serving)


@on_engine(LLAMA_TP1)
def test_rank_above_the_engines_maximum(serving: Refitted, policy: Policy) -> None:
    ranks = policy(policy_config(serving.live.model, 2, lora_rank=32))
    spec = ranks.call(trainer.offer, "float32")[0]
    refused(serving, spec, UnsupportedAdapter, "worker 0: .*32 .*16")


@on_engine(LLAMA_TP1)
def test_another_dtype(serving: Refitted) -> None:
    spec = serving.ranks.call(trainer.offer, "bfloat16")[0]
    refused(serving, spec, LayoutMismatch, "bfloat16.*float32.*dtype=torch.float32")


@on_engine(LLAMA_TP1)
def test_no_free_slot(serving: Refitted, tmp_path: Path) -> None:
    """Other adapters hold the rest of the slots: a second refitted adapter finds no place."""
    from vllm.lora.request import LoRARequest

    from lora_refit.vllm import RefitEngine

    serving.ranks.call(trainer.save, str(tmp_path))
    others = range(1, serving.live.case.max_loras - 1)
    for lora_id in others:
        serving.live.llm.llm_engine.add_lora(LoRARequest(f"a{lora_id}", lora_id, str(tmp_path)))
    spec = Spec.from_bytes(serving.ranks.call(trainer.offer, "float32")[0])
    with pytest.raises(LayoutMismatch, match="all 4 LoRA slots are taken"):
        RefitEngine(serving.live.llm, adapter="second").attach(spec)
    for lora_id in others:
        serving.live.llm.llm_engine.remove_lora(lora_id)
    still_serves(serving)


@on_engine(LLAMA_TP1)
def test_tickets_of_another_layout(serving: Refitted, policy: Policy) -> None:
    ranks = policy(policy_config(serving.live.model, 2, lora_rank=8))
    ranks.call(trainer.offer, "float32")
    ticket = Ticket.from_bytes(ranks.call(trainer.publish, 2)[0])
    with pytest.raises(LayoutMismatch, match="version 2 belongs to another layout"):
        serving.engine.refit(ticket)
    still_serves(serving)


@on_engine(QWEN_TP2)
@pytest.mark.parametrize("lora_rank", [6, 8], ids=["same-layout", "another-layout"])
def test_attach_again_while_a_version_is_live(
    attach: Callable[..., Refitted], mortals: TrainerRanks, lora_rank: int
) -> None:
    """The trainer comes back, in other processes and sizes; the old version serves on until a refit."""
    refitted = attach(2, lora_rank=6)
    refitted.refit(1, seed=1)
    restarted = attach(2, ranks=mortals, engine=refitted.engine, lora_rank=lora_rank)
    still_serves(refitted)
    refitted.ranks.call(trainer.close)
    still_serves(refitted)
    for version in (2, 3, 4):
        restarted.refit(version, seed=version)
        still_serves(restarted, version)
