"""The steps of a protocol: each is sent to the workers by whoever drives the generator."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import msgspec

from lora_refit.engines.vllm import rpc
from lora_refit.errors import CommitFailed, LayoutMismatch, NotCommitted, RefitError, StaleArena
from lora_refit.report import Attestation
from lora_refit.spec import Spec, Ticket

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

Step = rpc.Call | rpc.EngineCall | rpc.DriverCall
Steps = Generator[Step, Sequence[Any], T]
"""Yields a step and is sent the replies to it: `rpc.Reply` of every worker for an `rpc.Call`."""


def call(method: str, request: msgspec.Struct) -> rpc.Call:
    return rpc.Call(method, msgspec.msgpack.encode(request))


def ask(method: str, request: msgspec.Struct, answer: type[S]) -> Steps[list[S]]:
    """Every worker's answer; raises the first worker's error after all have answered."""
    replies = yield call(method, request)
    for reply in replies:
        if reply.error:
            raise reply.exception()
    return [msgspec.msgpack.decode(reply.body, type=answer) for reply in replies]


def tell(method: str, request: msgspec.Struct) -> Steps[None]:
    """Best effort, for clean-up: errors are the lesser news and are dropped."""
    with contextlib.suppress(RefitError):
        yield call(method, request)


def attest(version: int, request: msgspec.Struct) -> Steps[Attestation]:
    """Have every worker compare what is live with what it committed."""
    replies = yield call("attest", request)
    lines = []
    for reply in replies:
        if reply.error:
            lines.append(f"worker {reply.worker}: {reply.message}")
            continue
        answer = msgspec.msgpack.decode(reply.body, type=rpc.AttestAnswer)
        lines.append(f"worker {reply.worker}: {answer.problem or 'ok'}")
    ok = all(line.endswith(": ok") for line in lines)
    return Attestation(version, ok, tuple(lines))


def reset_caches() -> Steps[None]:
    """What was computed with other weights must not be reused. Raises CommitFailed."""
    (was_reset,) = yield rpc.DriverCall("reset_prefix_cache")
    if was_reset is False:
        raise CommitFailed("vLLM did not reset its prefix cache; are requests running?")
    yield rpc.DriverCall("reset_encoder_cache")


def check_ticket(spec: Spec | None, ticket: Ticket) -> Spec:
    """The attached spec. Raises NotCommitted, LayoutMismatch or StaleArena if the ticket is not of
    it."""
    if spec is None:
        raise NotCommitted("nothing is attached; call attach(publisher.spec) first")
    if ticket.layout_digest != spec.layout_digest:
        raise LayoutMismatch(
            f"the ticket of version {ticket.version} belongs to another layout than the "
            "attached spec; attach the publisher's current spec first"
        )
    if ticket.publisher != spec.publisher:
        raise StaleArena(
            f"the ticket of version {ticket.version} belongs to another publisher than the "
            "attached spec; attach that publisher's spec first"
        )
    return spec
