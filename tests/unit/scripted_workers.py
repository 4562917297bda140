"""Engine workers that answer the driver's protocol from a script."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from lora_refit import errors
from lora_refit.engines.vllm import rpc
from lora_refit.messages import ArenaHandle
from lora_refit.spec import FORMAT, Layout, Spec, Ticket
from lora_refit.trace.axis import AxisMap
from lora_refit.trace.export import ExportMap, Parameter
from lora_refit.trace.movement import identity

T = TypeVar("T")
A, B = (f"base_model.model.proj.lora_{letter}.weight" for letter in "AB")
SHAPES = {A: (2, 4), B: (6, 2)}


def make_spec(dtype: str = "bfloat16", token: bytes = b"t" * 16) -> Spec:
    layout = Layout(
        format=FORMAT,
        dtype=dtype,
        scale_folded=False,
        peft_config={"r": 2, "lora_alpha": 4},
        export_map=ExportMap(
            parameters=tuple(
                Parameter(0, name, shape, "float32") for name, shape in SHAPES.items()
            ),
            factors=tuple(
                identity(name, shape, index) for index, (name, shape) in enumerate(SHAPES.items())
            ),
            replicas=(),
        ),
    )
    arena = ArenaHandle(rank=0, pid=1, fd=2, token=token, total_bytes=0, entry_bytes=())
    return Spec(layout=layout, layout_digest=layout.digest(), arenas=(arena,))


SPEC = make_spec()


def ticket(version: int, spec: Spec = SPEC) -> Ticket:
    return Ticket(
        version=version,
        sequence=version,
        layout_digest=spec.layout_digest,
        publisher=spec.publisher,
        rank=0,
        pack_ms=2.5,
    )


def piece(factor: int, rows: Sequence[int], cols: Sequence[int]) -> rpc.Piece:
    axes = (AxisMap.from_coordinates(np.asarray(axis)).packed for axis in (rows, cols))
    return rpc.Piece(factor, *axes)


class Workers:
    """Engine workers that do as told, and the engine's RPC between them and the driver.

    failing: error of a worker (method, index). broken: methods at which the RPC itself fails.
    interrupted: a method at which the user presses Ctrl-C. digests: of the staged bytes, by worker.
    """

    def __init__(self, count: int = 2, slots: int = 2, free: int = 2) -> None:
        self.facts = rpc.EngineFacts(slots, free, "bfloat16")
        self.failing: dict[tuple[str, int], errors.RefitError] = {}
        self.broken: set[str] = set()
        self.interrupted = ""
        self.digests = ["same"] * count
        self.problems = [""] * count
        self.halves = [range(3), range(3, 6)] if count == 2 else [range(6)]
        self.calls: list[tuple[str, Any]] = []

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]

    def last(self, method: str) -> Any:
        return [request for name, request in self.calls if name == method][-1]

    def run(self, steps: Generator[rpc.Call, Sequence[rpc.Reply], T]) -> T:
        try:
            call = next(steps)
            while True:
                try:
                    replies = self._broadcast(call)
                except errors.RefitError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(replies)
        except StopIteration as done:
            result: T = done.value
            return result

    def _broadcast(self, call: rpc.Call) -> list[rpc.Reply]:
        request = msgspec.msgpack.decode(call.body, type=REQUESTS.get(call.method, rpc.Nothing))
        self.calls.append((call.method, request))
        if call.method == self.interrupted:
            raise KeyboardInterrupt
        if call.method in self.broken:
            raise errors.CommitFailed(f"the engine did not answer {call.method!r}")
        return [self._reply(call.method, worker) for worker in range(len(self.digests))]

    def _reply(self, method: str, worker: int) -> rpc.Reply:
        error = self.failing.get((method, worker))
        if error is not None:
            return rpc.Reply(worker, type(error).__name__, str(error), b"")
        return rpc.Reply(worker, "", "", msgspec.msgpack.encode(self._answer(method, worker)))

    def _answer(self, method: str, worker: int) -> msgspec.Struct:
        if method == "facts":
            return self.facts
        if method == "attach":
            pieces = (piece(0, range(2), range(4)), piece(1, self.halves[worker], range(2)))
            return rpc.AttachAnswer(
                pieces, 3 + worker, f"plan{worker}", "memfd", 1.5 * worker, ("careful",)
            )
        if method == "stage":
            return rpc.StageAnswer(self.digests[worker], 1.0 + worker, 2.0 + worker)
        if method == "commit":
            return rpc.CommitAnswer(
                bytes_written=100, launches=1, allocations=worker, scatter_ms=3.0 + worker
            )
        if method == "attest":
            return rpc.AttestAnswer(self.problems[worker])
        return rpc.Nothing()


REQUESTS: dict[str, type[msgspec.Struct]] = {
    "attach": rpc.AttachRequest,
    "stage": rpc.StageRequest,
    "commit": rpc.CommitRequest,
    "attest": rpc.AttestRequest,
}
