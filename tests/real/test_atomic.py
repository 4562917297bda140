"""A refit that fails anywhere leaves the version before it live, and says who failed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
import trainer
from parity import PROMPTS, TOLERANCE, disagreement, distance, sample
from rig import ONE_SLOT_TP2, QWEN_TP2, Refitted, on_engine

from lora_refit import (
    CommitFailed,
    NotCommitted,
    RefitError,
    StaleArena,
    Ticket,
    WriterTimeout,
)
from lora_refit.testing.ranks import RankError, TrainerRanks

Answers = tuple[list[list[int]], torch.Tensor]


@on_engine(QWEN_TP2)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("phase", ["stage", "commit"])
def test_an_error_in_one_worker(
    attach: Callable[..., Refitted], phase: str, worker: int, moment: str
) -> None:
    """An unplanned error before or after a worker's part of a phase; a failed commit leaves one
    worker with the new version in its idle slot and the other without."""
    refitted = attach(2)
    refitted.refit(1, seed=1)
    ticket = refitted.publish(2, seed=2)
    refitted.live.inspect.on(worker, "fail", phase, moment, "raise")
    with pytest.raises(
        RefitError, match=f"engine worker {worker}: .*injected {moment} {phase}"
    ) as caught:
        refitted.engine.refit(ticket)
    assert (phase == "commit") == isinstance(caught.value, CommitFailed)
    assert refitted.live.rpc_in_step()
    assert refitted.attests(1)
    assert refitted.engine.lora_request().lora_name.startswith("policy@1/")
    assert disagreement(refitted) > TOLERANCE
    refitted.engine.refit(ticket)
    assert refitted.attests(2)
    assert disagreement(refitted) < TOLERANCE


@on_engine(QWEN_TP2)
def test_a_first_commit_that_fails_leaves_nothing_live(attach: Callable[..., Refitted]) -> None:
    refitted = attach(2)
    ticket = refitted.publish(1, seed=1)
    refitted.live.inspect.on(1, "fail", "commit", "before", "raise")
    with pytest.raises(CommitFailed, match="(?s)engine worker 1: .*nothing is live yet"):
        refitted.engine.refit(ticket)
    with pytest.raises(NotCommitted):
        refitted.engine.lora_request()
    refitted.engine.refit(ticket)
    assert disagreement(refitted) < TOLERANCE


def kill(ranks: TrainerRanks, rank: int) -> None:
    process = ranks.processes[rank]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def still_serves(refitted: Refitted, version: int, before: Answers) -> bool:
    """Whether the version is live and whole, and the engine samples what it sampled before."""
    responses, log_probs = sample(refitted)
    same = responses == before[0] and distance(log_probs, before[1]) < TOLERANCE
    return same and refitted.attests(version) and refitted.live.rpc_in_step()


def recovers(refitted: Refitted, attach: Callable[..., Refitted]) -> None:
    """A trainer in new processes attaches while the old version is live, and refits."""
    restarted = attach(2, engine=refitted.engine)
    assert refitted.attests(1)
    for version in (2, 3):
        restarted.refit(version, seed=version)
        assert restarted.attests(version)
        assert disagreement(restarted) < TOLERANCE


@on_engine(QWEN_TP2)
@pytest.mark.parametrize("phase", ["attach", "adopt"])
def test_an_error_while_attaching_again(attach: Callable[..., Refitted], phase: str) -> None:
    """Another layout, and one worker that cannot follow: the old version serves on."""
    refitted = attach(2, lora_rank=6)
    refitted.refit(1, seed=1)
    before = sample(refitted)
    refitted.live.inspect.on(1, "fail", phase, "before", "raise")
    with pytest.raises(RefitError, match=f"engine worker 1: .*injected before {phase}"):
        attach(2, engine=refitted.engine, lora_rank=8)
    assert still_serves(refitted, 1, before)
    again = attach(2, engine=refitted.engine, lora_rank=8)
    assert still_serves(again, 1, before)
    again.refit(2, seed=2)
    assert again.attests(2)
    assert disagreement(again) < TOLERANCE


@on_engine(QWEN_TP2)
def test_a_trainer_rank_killed_before_it_publishes(
    attach: Callable[..., Refitted], mortals: TrainerRanks
) -> None:
    refitted = attach(2, ranks=mortals)
    refitted.refit(1, seed=1)
    before = sample(refitted)
    kill(mortals, 1)
    ticket = Ticket.from_bytes(mortals.call_on(0, trainer.publish, 2))
    with pytest.raises(WriterTimeout, match="trainer rank 1 .*is gone before it published"):
        refitted.engine.refit(ticket)
    assert still_serves(refitted, 1, before)
    recovers(refitted, attach)


@on_engine(QWEN_TP2)
def test_a_trainer_rank_killed_after_it_published(
    attach: Callable[..., Refitted], mortals: TrainerRanks
) -> None:
    """What it published outlives it: the version goes live whole. The next one cannot."""
    refitted = attach(2, ranks=mortals)
    refitted.refit(1, seed=1)
    ticket = refitted.publish(2, seed=2)
    kill(mortals, 1)
    refitted.engine.refit(ticket)
    assert refitted.attests(2)
    responses, log_probs = before = sample(refitted)
    ticket = Ticket.from_bytes(mortals.call_on(0, trainer.publish, 3))
    with pytest.raises(WriterTimeout, match="trainer rank 1"):
        refitted.engine.refit(ticket)
    assert still_serves(refitted, 2, before)
    refitted.engine.close()
    twin = attach(2)
    twin.ranks.call(trainer.randomize, 2)
    policy = twin.ranks.call(trainer.log_probs, PROMPTS, responses)[0]
    assert distance(log_probs, policy) < TOLERANCE


@on_engine(QWEN_TP2)
def test_a_trainer_rank_killed_while_workers_wait_for_it(
    attach: Callable[..., Refitted], mortals: TrainerRanks
) -> None:
    refitted = attach(2, ranks=mortals)
    refitted.refit(1, seed=1)
    before = sample(refitted)
    ticket = Ticket.from_bytes(mortals.call_on(0, trainer.publish, 2))
    killer = threading.Timer(1.0, kill, (mortals, 1))
    killer.start()
    with pytest.raises(WriterTimeout, match="trainer rank 1 .*is gone"):
        refitted.engine.refit(ticket)
    killer.join()
    assert still_serves(refitted, 1, before)
    recovers(refitted, attach)


@on_engine(QWEN_TP2)
def test_a_rank_that_does_not_publish_is_named(attach: Callable[..., Refitted]) -> None:
    refitted = attach(2, timeout_s=0.5)
    refitted.refit(1, seed=1)
    ticket = Ticket.from_bytes(refitted.ranks.call_on(0, trainer.publish, 2))
    with pytest.raises(WriterTimeout, match="trainer rank 1 .*did not publish sequence 2 within"):
        refitted.engine.refit(ticket)
    assert refitted.live.rpc_in_step() and refitted.attests(1)
    refitted.ranks.call_on(1, trainer.publish, 2)
    assert refitted.engine.refit(ticket).version == 2


@on_engine(ONE_SLOT_TP2)
@pytest.mark.parametrize("worker", [0, 1])
def test_one_slot_is_poisoned_by_a_failed_commit_and_healed_by_the_next(
    attach: Callable[..., Refitted], worker: int
) -> None:
    refitted = attach(2)
    assert refitted.report.slots == 1
    refitted.refit(1, seed=1)
    ticket = refitted.publish(2, seed=2)
    refitted.live.inspect.on(worker, "fail", "stage", "before", "raise")
    with pytest.raises(RefitError, match=f"engine worker {worker}"):
        refitted.engine.refit(ticket)
    assert refitted.attests(1)
    refitted.live.inspect.on(worker, "fail", "commit", "before", "raise")
    with pytest.raises(CommitFailed, match=f"(?s)engine worker {worker}: .*nothing is live until"):
        refitted.engine.refit(ticket)
    with pytest.raises(NotCommitted, match="refit again"):
        refitted.engine.lora_request()
    with pytest.raises(NotCommitted, match="refit again"):
        refitted.engine.attest()
    refitted.engine.refit(ticket)
    assert refitted.engine.attest().ok
    assert disagreement(refitted) < TOLERANCE


@on_engine(QWEN_TP2)
def test_an_older_version_is_not_overwritten_under_its_running_requests(
    attach: Callable[..., Refitted],
) -> None:
    """With two slots the second refit after a request began would write into its slot."""
    from vllm import SamplingParams

    refitted = attach(2)
    refitted.refit(1, seed=1)
    core = refitted.live.llm.llm_engine
    request = refitted.engine.lora_request()
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    core.add_request("a", {"prompt_token_ids": PROMPTS[0]}, sampling, lora_request=request)
    refitted.refit(2, seed=2)
    ticket = refitted.publish(3, seed=3)
    with pytest.raises(CommitFailed, match="earlier version are still running"):
        refitted.engine.refit(ticket)
    assert refitted.attests(2)
    while core.has_unfinished_requests():
        core.step()
    refitted.engine.refit(ticket)
    assert disagreement(refitted) < TOLERANCE


@on_engine(ONE_SLOT_TP2)
def test_a_failed_refit_does_not_bring_a_lost_slot_back_empty(
    attach: Callable[..., Refitted],
) -> None:
    """A zeroed slot in the live version's place would serve the base model under its name."""
    refitted = attach(2)
    stale = refitted.publish(1, seed=1)
    refitted.engine.refit(stale)
    refitted.live.llm.llm_engine.remove_lora(refitted.engine.lora_request().lora_int_id)
    for version in (2, 3):
        refitted.publish(version)
    with pytest.raises(StaleArena, match="was replaced"):
        refitted.engine.refit(stale)
    attestation = refitted.engine.attest()
    assert all("belongs to adapter None" in line for line in attestation.workers), attestation
    refitted.refit(4, seed=4)
    assert refitted.attests(4)
    assert disagreement(refitted) < TOLERANCE


@on_engine(ONE_SLOT_TP2)
def test_one_slot_is_not_overwritten_under_running_requests(
    attach: Callable[..., Refitted],
) -> None:
    from vllm import SamplingParams

    refitted = attach(2)
    refitted.refit(1, seed=1)
    core = refitted.live.llm.llm_engine
    request = refitted.engine.lora_request()
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    core.add_request("a", {"prompt_token_ids": PROMPTS[0]}, sampling, lora_request=request)
    ticket = refitted.publish(2, seed=2)
    with pytest.raises(CommitFailed, match="requests are running in the only slot"):
        refitted.engine.refit(ticket)
    while core.has_unfinished_requests():
        core.step()
    refitted.engine.refit(ticket)
    assert disagreement(refitted) < TOLERANCE


@on_engine(ONE_SLOT_TP2)
def test_a_killed_engine_worker_does_not_stop_the_trainer(attach: Callable[..., Refitted]) -> None:
    """It dies while it pins what it reads. Ends the engine, so this is its last test."""
    refitted = attach(2)
    refitted.refit(1, seed=1)
    ticket = refitted.publish(2, seed=2)
    refitted.live.inspect.on(1, "fail", "commit", "before", "kill")
    with pytest.raises(CommitFailed, match="did not answer 'commit' on all workers"):
        refitted.engine.refit(ticket)
    with pytest.raises(NotCommitted):
        refitted.engine.lora_request()
    for version in range(3, 8):
        try:
            ticket = refitted.publish(version, seed=version)
        except RankError as error:
            pytest.fail(f"the dead engine holds up the trainer: {error}")
    with pytest.raises(CommitFailed, match="did not answer 'stage'"):
        refitted.engine.refit(ticket)
