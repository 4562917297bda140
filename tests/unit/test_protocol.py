"""The driver's protocol, driven by hand against workers that answer from a script."""

from __future__ import annotations

from collections import Counter

import pytest
from scripted_workers import SPEC, B, Workers, make_spec, ticket

from lora_refit import errors
from lora_refit.engines.vllm import rpc
from lora_refit.engines.vllm.protocol import NO_LIVE, Protocol
from lora_refit.spec import Spec


def attached(workers: Workers, version: int = 0) -> Protocol:
    """A protocol that is attached and, for a version above 0, has it live."""
    protocol = Protocol("policy", timeout_s=5.0)
    workers.run(protocol.attach(SPEC))
    if version:
        workers.run(protocol.refit(ticket(version)))
    workers.calls.clear()
    return protocol


# ---- attach


def test_attach_asks_every_worker_and_reports() -> None:
    workers = Workers()
    protocol = Protocol("policy", timeout_s=5.0)
    report = workers.run(protocol.attach(SPEC))
    assert workers.methods == ["facts", "attach", "adopt"]
    request = workers.last("attach")
    assert Spec.from_bytes(request.spec) == SPEC
    assert (request.live, request.timeout_s) == (NO_LIVE, 5.0)
    assert request.lora_ids == protocol.lora_ids
    assert (report.workers, report.trainer_ranks, report.factors, report.slots) == (2, 1, 2, 2)
    assert (report.blocks, report.plan_digests) == ((3, 4), ("plan0", "plan1"))
    assert (report.transport, report.trace_ms) == (("memfd", "memfd"), 1.5)
    assert report.warnings == ("careful",), "said once for all workers"


def test_a_factor_that_does_not_arrive_whole_is_named() -> None:
    workers = Workers()
    workers.halves = [range(3), range(3, 5)]
    protocol = Protocol("policy", timeout_s=5.0)
    with pytest.raises(errors.CoverageError, match=rf"no place for {B} \(2 elements\): it wraps"):
        workers.run(protocol.attach(SPEC))
    assert workers.methods == ["facts", "attach", "abort"]
    with pytest.raises(errors.NotCommitted, match="nothing is attached"):
        workers.run(protocol.refit(ticket(1)))
    workers.halves = [range(3), range(2, 6)]
    workers.run(protocol.attach(SPEC))


def test_an_attach_that_fails_on_one_worker_is_taken_back_on_all() -> None:
    workers = Workers()
    workers.failing["attach", 1] = errors.UnsupportedAdapter("no such module")
    protocol = Protocol("policy", timeout_s=5.0)
    with pytest.raises(errors.UnsupportedAdapter, match="engine worker 1: no such module"):
        workers.run(protocol.attach(SPEC))
    assert workers.methods == ["facts", "attach", "abort"]
    assert protocol.lora_ids == ()


def test_a_failed_attach_keeps_what_is_live() -> None:
    workers = Workers()
    protocol = attached(workers, version=4)
    before = protocol.identity()
    workers.failing["attach", 0] = errors.LayoutMismatch("other rank")
    with pytest.raises(errors.LayoutMismatch):
        workers.run(protocol.attach(make_spec("float32")))
    assert protocol.identity() == before
    assert workers.last("attach").live == before[1], "that slot goes on serving"
    assert before[1] in workers.last("attach").lora_ids
    workers.failing.clear()
    workers.run(protocol.refit(ticket(5)))


def test_attaching_again_changes_the_layout() -> None:
    workers = Workers()
    protocol = attached(workers, version=4)
    other = make_spec("float16")
    workers.run(protocol.attach(other))
    assert protocol.require_live().version == 4
    with pytest.raises(errors.LayoutMismatch, match="version 5 belongs to another layout"):
        workers.run(protocol.refit(ticket(5)))
    workers.run(protocol.refit(ticket(5, other)))


def test_a_worker_that_does_not_adopt_can_be_attached_again() -> None:
    workers = Workers()
    protocol = Protocol("policy", timeout_s=5.0)
    workers.failing["adopt", 1] = errors.NotCommitted("no attach is under way")
    with pytest.raises(errors.NotCommitted, match="engine worker 1"):
        workers.run(protocol.attach(SPEC))
    with pytest.raises(errors.NotCommitted, match="nothing is attached"):
        workers.run(protocol.refit(ticket(1)))
    ids = protocol.lora_ids
    workers.failing.clear()
    workers.facts = rpc.EngineFacts(slots=2, free_slots=0, dtype="bfloat16")
    workers.run(protocol.attach(SPEC))
    assert len(protocol.lora_ids) == len(ids), "no slot is taken twice"


@pytest.mark.parametrize(("free", "slots"), [(1, 1), (2, 2), (9, 2)])
def test_no_more_slots_are_taken_than_are_free(free: int, slots: int) -> None:
    workers = Workers(slots=9, free=free)
    assert workers.run(Protocol("policy", timeout_s=5.0).attach(SPEC)).slots == slots


def test_no_free_slot() -> None:
    workers = Workers(slots=3, free=0)
    with pytest.raises(errors.LayoutMismatch, match="all 3 LoRA slots are taken"):
        workers.run(Protocol("policy", timeout_s=5.0).attach(SPEC))
    assert workers.methods == ["facts"]


# ---- refit


def test_refit_stages_on_all_then_commits_on_all() -> None:
    workers = Workers()
    protocol = attached(workers)
    report = workers.run(protocol.refit(ticket(7)))
    assert workers.methods == ["stage", "commit"]
    assert workers.last("stage") == rpc.StageRequest(0, 7, 7, SPEC.publisher, 5.0)
    assert workers.last("commit") == rpc.CommitRequest(7, 7, protocol.identity()[1])
    assert (report.version, report.bytes, report.digest) == (7, 200, "same")
    assert (report.launches, report.collectives, report.allocations) == (1, 0, 1)
    assert set(report.phases_ms) == {"pack", "stage", "commit", "wait", "verify", "scatter"}
    fixed = {name: report.phases_ms[name] for name in ("pack", "wait", "verify", "scatter")}
    assert fixed == {"pack": 2.5, "wait": 2.0, "verify": 3.0, "scatter": 4.0}


def test_two_slots_take_turns() -> None:
    workers = Workers()
    protocol = attached(workers)
    ids: list[int] = []
    slots = []
    for version in range(1, 6):
        running = ids[-1:]
        workers.run(protocol.refit(ticket(version), running))
        ids.append(protocol.identity()[1])
        slots.append(workers.last("stage").slot)
    assert slots == [0, 1, 0, 1, 0]
    assert len(set(ids)) == 5, "no version is served under the id of another"


@pytest.mark.parametrize("slots", [1, 2])
def test_a_stage_that_fails_on_one_worker_keeps_the_live_version(slots: int) -> None:
    workers = Workers(free=slots)
    protocol = attached(workers, version=1)
    before = protocol.identity()
    workers.failing["stage", 1] = errors.WriterTimeout("trainer rank 3 did not publish")
    with pytest.raises(errors.WriterTimeout, match="engine worker 1: trainer rank 3"):
        workers.run(protocol.refit(ticket(2)))
    assert workers.methods == ["stage", "abort"]
    assert protocol.identity() == before


def test_workers_that_staged_different_bytes_do_not_commit() -> None:
    workers = Workers()
    protocol = attached(workers, version=1)
    workers.digests = ["same", "other"]
    with pytest.raises(errors.CommitFailed, match=r"different bytes: digests \['other', 'same'\]"):
        workers.run(protocol.refit(ticket(2)))
    assert workers.methods == ["stage", "abort"]
    assert protocol.require_live().version == 1


FULL = errors.CommitFailed("slot is gone")


def test_a_commit_that_fails_half_way_keeps_the_other_slot_live() -> None:
    workers = Workers()
    protocol = attached(workers, version=1)
    before = protocol.identity()
    workers.failing["commit", 1] = FULL
    for _ in range(2):
        with pytest.raises(errors.CommitFailed, match="slot is gone; version 1 is still live"):
            workers.run(protocol.refit(ticket(2)))
        assert protocol.identity() == before
        assert workers.last("stage").slot == 1, "never the live one"
    assert workers.methods == ["stage", "commit", "abort"] * 2
    workers.failing.clear()
    workers.run(protocol.refit(ticket(2)))
    assert protocol.require_live().version == 2


def test_a_commit_that_fails_half_way_in_the_only_slot_poisons_it() -> None:
    workers = Workers(free=1)
    protocol = attached(workers, version=1)
    workers.failing["commit", 1] = FULL
    with pytest.raises(errors.CommitFailed, match="nothing is live until a refit succeeds"):
        workers.run(protocol.refit(ticket(2)))
    for use in (protocol.identity, lambda: workers.run(protocol.attest())):
        with pytest.raises(errors.NotCommitted, match=r"failed half-way \(.*slot is gone\)"):
            use()
    workers.failing = {("stage", 0): errors.StaleArena("late")}
    with pytest.raises(errors.StaleArena):
        workers.run(protocol.refit(ticket(3)))
    with pytest.raises(errors.NotCommitted, match="half-way"):
        protocol.identity()
    workers.run(protocol.attach(SPEC))
    assert workers.last("attach").live == NO_LIVE, "a poisoned slot serves nothing"
    workers.failing.clear()
    workers.run(protocol.refit(ticket(4)))
    assert protocol.require_live().version == 4


def test_a_first_commit_that_fails_leaves_nothing_live() -> None:
    workers = Workers()
    protocol = attached(workers)
    workers.failing["commit", 0] = FULL
    with pytest.raises(errors.CommitFailed, match="nothing is live yet"):
        workers.run(protocol.refit(ticket(1)))
    with pytest.raises(errors.NotCommitted, match="no version of adapter 'policy' is live"):
        protocol.identity()


@pytest.mark.parametrize(("slots", "still_live"), [(1, False), (2, True)])
def test_a_commit_that_is_interrupted(slots: int, still_live: bool) -> None:
    workers = Workers(free=slots)
    protocol = attached(workers, version=1)
    workers.interrupted = "commit"
    with pytest.raises(KeyboardInterrupt):
        workers.run(protocol.refit(ticket(2)))
    assert (protocol.poisoned is None) is still_live
    workers.interrupted = ""
    workers.run(protocol.refit(ticket(3)))
    assert protocol.require_live().version == 3


@pytest.mark.parametrize(("slots", "kept"), [(1, "one slot"), (2, "version 1 is still live")])
def test_a_broken_engine_does_not_hide_the_first_error(slots: int, kept: str) -> None:
    workers = Workers(free=slots)
    protocol = attached(workers, version=1)
    workers.broken = {"commit", "abort"}
    with pytest.raises(errors.CommitFailed, match=f"did not answer 'commit'.*{kept}"):
        workers.run(protocol.refit(ticket(2)))
    assert (protocol.poisoned is None) is (slots == 2)
    workers.broken = {"stage", "abort"}
    with pytest.raises(errors.CommitFailed, match="did not answer 'stage'"):
        workers.run(protocol.refit(ticket(3)))


def test_the_only_slot_is_not_written_under_running_requests() -> None:
    workers = Workers(free=1)
    protocol = attached(workers)
    workers.run(protocol.refit(ticket(1)))
    workers.calls.clear()
    running = {protocol.identity()[1], 7}
    with pytest.raises(errors.CommitFailed, match=r"finished or abort them.*max_loras=2"):
        workers.run(protocol.refit(ticket(2), running))
    assert workers.calls == []
    assert protocol.require_live().version == 1
    workers.run(protocol.attach(SPEC, running))
    workers.run(protocol.refit(ticket(2), {7}))


def test_an_older_version_is_not_overwritten_under_its_running_requests() -> None:
    workers = Workers()
    protocol = attached(workers, version=1)
    running = {protocol.identity()[1]}
    workers.run(protocol.refit(ticket(2), running))
    workers.calls.clear()
    with pytest.raises(errors.CommitFailed, match="earlier version are still running"):
        workers.run(protocol.refit(ticket(3), running))
    assert workers.calls == []
    with pytest.raises(errors.CommitFailed, match="earlier version are still running"):
        workers.run(protocol.attach(SPEC, running))
    assert workers.methods == ["facts"], "attaching clears the idle slot"
    assert protocol.require_live().version == 2
    workers.run(protocol.refit(ticket(3), {protocol.identity()[1]}))


def test_tickets_of_another_publisher_reach_no_worker() -> None:
    """A second trainer with the same adapter counts the same sequences and versions."""
    workers = Workers()
    protocol = attached(workers, version=1)
    other = make_spec(token=b"o" * 16)
    assert other.layout_digest == SPEC.layout_digest
    with pytest.raises(errors.StaleArena, match="version 2 belongs to another publisher"):
        workers.run(protocol.refit(ticket(2, other)))
    assert workers.calls == []
    workers.run(protocol.attach(other))
    workers.run(protocol.refit(ticket(2, other)))


def test_tickets_of_another_layout_reach_no_worker() -> None:
    workers = Workers()
    protocol = attached(workers, version=1)
    with pytest.raises(errors.LayoutMismatch, match="version 2 belongs to another layout"):
        workers.run(protocol.refit(ticket(2, make_spec("float32"))))
    assert workers.calls == []
    assert protocol.require_live().version == 1


# ---- identity


@pytest.mark.parametrize("slots", [1, 2])
def test_no_two_versions_share_an_identity(slots: int) -> None:
    workers = Workers(free=slots)
    protocol = attached(workers)
    seen: Counter[str] = Counter()
    for version in range(1, 20):
        for digest in ("one", "two"):
            workers.digests = [digest] * 2
            workers.run(protocol.refit(ticket(version)))
            name, lora_id, path = protocol.identity()
            assert name == f"policy@{version}/{digest}"
            assert path == f"lora-refit://{name}"
            assert lora_id in protocol.lora_ids
            seen.update([name, path])
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("name", ["", "a/b", "a@1", "/", "@"])
def test_adapter_names_that_would_blur_identities(name: str) -> None:
    Protocol("a-b.c 1", timeout_s=1.0)
    with pytest.raises(errors.LayoutMismatch, match="adapter name"):
        Protocol(name, timeout_s=1.0)


def test_every_handle_has_ids_of_its_own() -> None:
    """Also handles of one adapter: a request of an old one must not meet a new one's slots."""
    taken: Counter[int] = Counter()
    for name in ("policy", "policy", "critic"):
        protocol = Protocol(name, timeout_s=1.0)
        Workers().run(protocol.attach(SPEC))
        taken.update(protocol.lora_ids)
    assert set(taken.values()) == {1}
    assert min(taken) > 1 << 16, "users count theirs from one"
    assert max(taken) < 1 << 31


# ---- attest and close


def test_attest_reports_a_line_for_each_worker() -> None:
    workers = Workers()
    protocol = attached(workers, version=3)
    good = workers.run(protocol.attest())
    assert (good.version, good.ok, good.workers) == (3, True, ("worker 0: ok", "worker 1: ok"))
    assert workers.last("attest") == rpc.AttestRequest(slot=0, version=3)
    workers.problems[1] = "differs from its commit in proj.lora_b[0]"
    bad = workers.run(protocol.attest())
    assert not bad.ok
    assert bad.workers == ("worker 0: ok", f"worker 1: {workers.problems[1]}")
    workers.failing["attest", 0] = errors.EngineAsleep("asleep")
    assert workers.run(protocol.attest()).workers[0] == "worker 0: asleep"
    assert not workers.run(protocol.attest()).ok


def test_attest_needs_something_live() -> None:
    workers = Workers()
    with pytest.raises(errors.NotCommitted, match="refit first"):
        workers.run(attached(workers).attest())
    assert workers.calls == []


@pytest.mark.parametrize("trouble", ["none", "worker", "engine", "poisoned"])
def test_after_close_nothing_is_live(trouble: str) -> None:
    workers = Workers(free=1)
    protocol = attached(workers, version=1)
    if trouble == "worker":
        workers.failing["detach", 0] = errors.LayoutMismatch("odd")
    if trouble == "engine":
        workers.broken = {"detach"}
    if trouble == "poisoned":
        workers.failing["commit", 0] = FULL
        with pytest.raises(errors.CommitFailed):
            workers.run(protocol.refit(ticket(2)))
    for _ in range(2):
        workers.run(protocol.close())
        assert workers.methods[-1] == "detach"
        with pytest.raises(errors.NotCommitted, match="refit first"):
            protocol.identity()
        with pytest.raises(errors.NotCommitted, match="nothing is attached"):
            workers.run(protocol.refit(ticket(3)))
    workers.failing.clear()
    workers.run(protocol.attach(SPEC))
    workers.run(protocol.refit(ticket(3)))
    assert protocol.require_live().version == 3


def test_errors_of_workers_keep_their_type() -> None:
    for name in errors.__all__:
        error = rpc.Reply(3, name, "why", b"").exception()
        assert type(error).__name__ == name
        assert str(error) == "engine worker 3: why"
    assert type(rpc.Reply(3, "Unheard", "why", b"").exception()) is errors.RefitError
