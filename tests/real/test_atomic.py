"""A refit that fails anywhere leaves the version before it live, and says who failed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import trainer
from conftest import EngineCase, LiveEngine, Refitted, on_engine
from test_policy_parity import PROMPTS, TOLERANCE, disagreement, sample

from lora_refit import CommitFailed, NotCommitted, RefitError, Ticket, WriterTimeout
from lora_refit.testing.ranks import RankError, TrainerRanks

QWEN_TP2 = EngineCase("qwen3-mqa", 2, "float32")
ONE_SLOT_TP2 = EngineCase("qwen3-mqa", 2, "float32", max_loras=1)


def rpc_in_step(live: LiveEngine) -> bool:
    """Whether every worker answers this call, in its place."""
    token = next(live.tokens)
    workers = range(live.case.tensor_parallel)
    return live.inspect("echo", token) == [[worker, token] for worker in workers]


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
    with pytest.raises(RefitError, match=f"engine worker {worker}: .*injected {moment} {phase}") as caught:
        refitted.engine.refit(ticket)
    assert (phase == "commit") == isinstance(caught.value, CommitFailed)
    assert rpc_in_step(refitted.live)
    attestation = refitted.engine.attest()
    assert attestation.ok and attestation.version == 1
    assert refitted.engine.lora_request().lora_name.startswith("policy@1/")
    assert disagreement(refitted) > TOLERANCE
    assert refitted.engine.refit(ticket).version == 2
    assert refitted.engine.attest().ok
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


@pytest.fixture
def mortals() -> Iterator[TrainerRanks]:
    """Two trainer ranks of a test that kills one."""
    with TrainerRanks(2, timeout_s=120.0) as ranks:
        yield ranks


def kill(ranks: TrainerRanks, rank: int) -> None:
    process = ranks.processes[rank]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def same_answers(refitted: Refitted, before: Any) -> bool:
    """Whether the engine samples what it sampled before, with the same log-probabilities."""
    responses, log_probs = sample(refitted.live.llm, refitted.engine.lora_request(), seed=0)
    return responses == before[0] and torch.allclose(
        torch.tensor(log_probs), torch.tensor(before[1]), rtol=0, atol=TOLERANCE
    )


def recovers(refitted: Refitted, attach: Callable[..., Refitted]) -> None:
    """A trainer in new processes attaches while the old version is live, and refits."""
    restarted = attach(2, engine=refitted.engine)
    assert refitted.engine.attest().ok
    for version in (2, 3):
        restarted.refit(version, seed=version)
        assert restarted.engine.attest().ok
        assert disagreement(restarted) < TOLERANCE


@on_engine(QWEN_TP2)
def test_a_trainer_rank_killed_before_it_publishes(
    attach: Callable[..., Refitted], mortals: TrainerRanks
) -> None:
    refitted = attach(mortals)
    refitted.refit(1, seed=1)
    before = sample(refitted.live.llm, refitted.engine.lora_request(), seed=0)
    kill(mortals, 1)
    ticket = Ticket.from_bytes(mortals.call_on(0, trainer.publish, 2))
    with pytest.raises(WriterTimeout, match="trainer rank 1 .*is gone before it published"):
        refitted.engine.refit(ticket)
    assert rpc_in_step(refitted.live)
    assert refitted.engine.attest().ok and refitted.engine.attest().version == 1
    assert same_answers(refitted, before)
    recovers(refitted, attach)


@on_engine(QWEN_TP2)
def test_a_trainer_rank_killed_after_it_published(
    attach: Callable[..., Refitted], mortals: TrainerRanks
) -> None:
    """What it published outlives it: the version goes live whole. The next one cannot."""
    refitted = attach(mortals)
    refitted.refit(1, seed=1)
    ticket = refitted.publish(2, seed=2)
    kill(mortals, 1)
    refitted.engine.refit(ticket)
    attestation = refitted.engine.attest()
    assert attestation.ok and attestation.version == 2
    responses, log_probs = before = sample(
        refitted.live.llm, refitted.engine.lora_request(), seed=0
    )
    ticket = Ticket.from_bytes(mortals.call_on(0, trainer.publish, 3))
    with pytest.raises(WriterTimeout, match="trainer rank 1"):
        refitted.engine.refit(ticket)
    assert refitted.engine.attest().ok and same_answers(refitted, before)
    refitted.engine.close()
    twin = attach(2)
    twin.ranks.call(trainer.randomize, 2)
    policy = twin.ranks.call(trainer.log_probs, PROMPTS, responses)[0]
    assert float((torch.tensor(log_probs).double() - policy).abs().max()) < TOLERANCE


@on_engine(QWEN_TP2)
def test_a_trainer_rank_killed_while_workers_wait_for_it(
    attach: Callable[..., Refitted], mortals: TrainerRanks
) -> None:
    refitted = attach(mortals)
    refitted.refit(1, seed=1)
    before = sample(refitted.live.llm, refitted.engine.lora_request(), seed=0)
    ticket = Ticket.from_bytes(mortals.call_on(0, trainer.publish, 2))
    killer = threading.Timer(1.0, kill, (mortals, 1))
    killer.start()
    with pytest.raises(WriterTimeout, match="trainer rank 1 .*is gone"):
        refitted.engine.refit(ticket)
    killer.join()
    assert rpc_in_step(refitted.live)
    assert refitted.engine.attest().ok and same_answers(refitted, before)
    recovers(refitted, attach)


@on_engine(QWEN_TP2)
def test_a_rank_that_does_not_publish_is_named(attach: Callable[..., Refitted]) -> None:
    refitted = attach(2, timeout_s=0.5)
    refitted.refit(1, seed=1)
    ticket = Ticket.from_bytes(refitted.ranks.call_on(0, trainer.publish, 2))
    with pytest.raises(WriterTimeout, match="trainer rank 1 .*did not publish sequence 2"):
        refitted.engine.refit(ticket)
    assert rpc_in_step(refitted.live) and refitted.engine.attest().ok
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
    assert refitted.engine.attest().ok and refitted.engine.attest().version == 1
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


@on_engine(ONE_SLOT_TP2)
def test_one_slot_is_not_overwritten_under_running_requests(attach: Callable[..., Refitted]) -> None:
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
