"""Attesting tells a live slot that is what was committed from one that is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trainer
from rig import LLAMA_TP2, Refitted, on_engine


@on_engine(LLAMA_TP2)
def test_every_commit_attests(attach: Callable[..., Refitted]) -> None:
    refitted = attach(2)
    for version in range(1, 5):
        refitted.refit(version, seed=version)
        attestation = refitted.engine.attest()
        assert attestation.ok and attestation.version == version
        assert attestation.workers == ("worker 0: ok", "worker 1: ok")


@on_engine(LLAMA_TP2)
@pytest.mark.parametrize("byte", [0, -1], ids=["data", "padding"])
@pytest.mark.parametrize("buffer", ["layers.0.self_attn.qkv_proj.lora_a", "down_proj.lora_b"])
def test_one_flipped_bit_is_named(attach: Callable[..., Refitted], buffer: str, byte: int) -> None:
    """In the first byte of a slot buffer or in its last, which rank 6 leaves as padding."""
    refitted = attach(2, lora_rank=6)
    refitted.refit(1, seed=1)
    lora_id = refitted.engine.lora_request().lora_int_id
    for worker in range(2):
        name = refitted.live.inspect.on(worker, "flip_bit", lora_id, buffer, byte)
        attestation = refitted.engine.attest()
        assert not attestation.ok
        assert name in attestation.workers[worker]
        assert attestation.workers[worker].startswith(f"worker {worker}: differs")
        assert attestation.workers[1 - worker] == f"worker {1 - worker}: ok"
        refitted.live.inspect.on(worker, "flip_bit", lora_id, buffer, byte)
        assert refitted.engine.attest().ok


@on_engine(LLAMA_TP2)
def test_refits_clear_damage_to_padding(attach: Callable[..., Refitted]) -> None:
    """Refits write no padding, so a slot that failed to attest is zeroed before it is used again.
    The second refit is back in that slot."""
    refitted = attach(2, lora_rank=6)
    refitted.refit(1, seed=1)
    lora_id = refitted.engine.lora_request().lora_int_id
    refitted.live.inspect.on(1, "flip_bit", lora_id, "down_proj.lora_b", -1)
    assert not refitted.engine.attest().ok
    for version in (2, 3):
        refitted.refit(version, seed=version)
        assert refitted.engine.attest().ok


def load_in_place(refitted: Refitted, lora_id: int, folder: Path) -> None:
    from vllm.lora.request import LoRARequest

    refitted.ranks.call(trainer.save, str(folder))
    request = LoRARequest("somebody", lora_id, str(folder), load_inplace=True)
    assert refitted.live.llm.llm_engine.add_lora(request)


def remove(refitted: Refitted, lora_id: int, folder: Path) -> None:
    assert refitted.live.llm.llm_engine.remove_lora(lora_id)


def reload_base(refitted: Refitted, lora_id: int, folder: Path) -> None:
    """vLLM drops all adapters when it reloads the base model's weights."""
    refitted.live.llm.collective_rpc("reload_weights")


INTERFERENCES: dict[str, tuple[Callable[..., None], str]] = {
    "load_inplace": (load_in_place, "was replaced in vLLM's registry"),
    "remove_lora": (remove, "belongs to adapter None"),
    "reload_weights": (reload_base, "belongs to adapter None"),
}


@on_engine(LLAMA_TP2)
@pytest.mark.parametrize("interference", INTERFERENCES)
def test_interference_is_named_and_a_refit_recovers(
    attach: Callable[..., Refitted], interference: str, tmp_path: Path
) -> None:
    """Others take the live adapter's slot away through vLLM's own calls."""
    interfere, problem = INTERFERENCES[interference]
    refitted = attach(2)
    for version in (1, 2):
        refitted.refit(version, seed=version)
    interfere(refitted, refitted.engine.lora_request().lora_int_id, tmp_path)
    attestation = refitted.engine.attest()
    assert not attestation.ok
    assert all(problem in line for line in attestation.workers), attestation
    for version in (3, 4, 5):
        refitted.refit(version, seed=version)
        assert refitted.engine.attest().ok


@on_engine(LLAMA_TP2)
def test_a_request_that_outlived_its_version_finds_nothing(attach: Callable[..., Refitted]) -> None:
    """Every version has an id of its own: two refits later, no worker knows the first one's."""
    refitted = attach(1)
    ids = []
    for version in range(1, 5):
        refitted.refit(version, seed=version)
        ids.append(refitted.engine.lora_request().lora_int_id)
        known = set(refitted.live.llm.llm_engine.list_loras())
        assert known.intersection(ids) == set(ids[-2:])
        assert refitted.attests(version)
    print(f"four versions had the ids {ids}")
