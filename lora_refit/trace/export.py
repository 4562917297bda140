"""Learn what a trainer's exporter moves, by letting it export tagged parameters.

Collective over the trainer's ranks, once, when a publisher is built. The parameters come back bit
for bit, also when the exporter raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial

import msgspec
import torch

from lora_refit.collectives import ProcessGroup, all_gather_bytes, same_outcome, world
from lora_refit.errors import CoverageError, LayoutMismatch, NotMovement, RefitError
from lora_refit.sources.base import PEFT_PREFIX, Source, has_storage
from lora_refit.trace import tags
from lora_refit.trace.axis import IntArray
from lora_refit.trace.coverage import uncovered_elements
from lora_refit.trace.movement import TagReader, TensorMap, gather

Visit = Callable[[str, torch.Tensor], None]
Check = Callable[[TensorMap, torch.Tensor], None]

_A, _B = ".lora_A.weight", ".lora_B.weight"


class Parameter(msgspec.Struct, frozen=True, array_like=True):
    """One adapter parameter of one trainer rank."""

    rank: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch dtype without the `torch.` prefix."""

    @property
    def label(self) -> str:
        return f"trainer rank {self.rank}, {self.name}"


class ExportMap(msgspec.Struct, frozen=True, array_like=True):
    """Where every element of every exported factor comes from.

    parameters: of all ranks; cells of the factors index this list.
    replicas: pairs of parameters that hold the same bytes on different ranks; the first is read.
    """

    parameters: tuple[Parameter, ...]
    factors: tuple[TensorMap, ...]
    replicas: tuple[tuple[int, int], ...]


def trace_export(source: Source, group: ProcessGroup | None = None) -> ExportMap:
    """Trace the source's exporter and prove the result on ones and on random values.

    Returns the same map on every rank. Raises, on every rank alike, NotMovement if the exporter
    computes rather than moves, CoverageError if a parameter element is never exported or a factor
    is duplicated, misnamed or lacks its partner, UnsupportedAdapter if the source's own forward
    disagrees with its factors.
    """
    rank, _ = world(group)
    local = source.parameters()
    described = tuple(
        Parameter(rank, name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in local
    )
    parameters = tuple(
        parameter
        for data in all_gather_bytes(msgspec.msgpack.encode(described), group)
        for parameter in msgspec.msgpack.decode(data, type=tuple[Parameter, ...])
    )
    if not parameters:
        raise CoverageError("no trainer rank holds an adapter parameter; is LoRA attached?")
    first = next((i for i, item in enumerate(parameters) if item.rank == rank), 0)
    tensors = [tensor.detach() for _, tensor in local]

    same_outcome(lambda: _require_storage(source), group)
    with _restored(local):
        factors = _trace_tags(source, tensors, first, parameters, group)
        maps = _exchange(factors, group)
        same_outcome(lambda: _prove_ones(source, tensors, factors), group)
        same_outcome(lambda: _prove_random(source, tensors, first, parameters, factors), group)
        merged = _merge(parameters, maps)
        _check_pairs(merged.factors)
        _check_parameters_used(parameters, maps)
        same_outcome(lambda: source.prove(merged, rank), group)
    return merged


@contextmanager
def _restored(parameters: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Bring the parameters back bit for bit, whatever happens, and verify it."""
    saved = [(name, tensor.detach(), tensor.detach().clone()) for name, tensor in parameters]
    try:
        with torch.no_grad():
            yield
    finally:
        lost = [name for name, tensor, before in saved if not _restore(tensor, before)]
        if lost:
            raise RefitError(
                f"{', '.join(lost)}: could not be restored after tracing; reload the checkpoint"
            )


def _restore(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    if not has_storage(tensor):
        return False
    tensor.copy_(before)
    return torch.equal(_bytes_of(tensor), _bytes_of(before))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _require_storage(source: Source) -> None:
    for name, tensor in source.parameters():
        if not has_storage(tensor):
            raise LayoutMismatch(f"{name}: has no storage (offloaded?); reload it first")


def _drain(source: Source, visit: Visit) -> None:
    """Run the exporter to its end even if a tensor is refused: it may be collective."""
    refusal: Exception | None = None
    for item in source.export():
        if refusal is None:
            try:
                visit(*_named_tensor(item))
            except Exception as error:
                refusal = error
    _require_storage(source)
    if refusal is not None:
        raise refusal


def _named_tensor(item: object) -> tuple[str, torch.Tensor]:
    match item:
        case (str(name), torch.Tensor() as tensor):
            return name, tensor
    raise NotMovement(
        f"the exporter yields {type(item).__name__} {str(item)[:60]!r}; it must yield pairs of a "
        "PEFT name and a torch.Tensor"
    )


def _check_again(source: Source, factors: Sequence[TensorMap], check: Check) -> None:
    """Export once more and check every factor; they must be the traced ones, each once."""
    pending = {factor.name: factor for factor in factors}

    def visit(name: str, tensor: torch.Tensor) -> None:
        factor = pending.pop(name, None)
        if factor is None or factor.shape != tuple(tensor.shape):
            raise NotMovement(
                f"{name}: exported with shape {tuple(tensor.shape)} in a later pass, but not when "
                "traced; the exporter must yield the same factors each time"
            )
        check(factor, tensor)

    _drain(source, visit)
    if pending:
        raise NotMovement(
            f"{next(iter(pending))}: not exported again in a later pass; the exporter must yield "
            "the same factors each time"
        )


def _trace_tags(
    source: Source,
    tensors: Sequence[torch.Tensor],
    first: int,
    parameters: Sequence[Parameter],
    group: ProcessGroup | None,
) -> list[TensorMap]:
    """One collective export for each plane; all ranks stop after the same one."""
    reader = TagReader([parameter.shape for parameter in parameters])
    for plane in reader.planes:
        for offset, tensor in enumerate(tensors):
            tags.fill(tensor, first + offset, plane)
        same_outcome(partial(_drain, source, partial(reader.read, plane=plane)), group)
    return same_outcome(lambda: [reader.tensor_map(name) for name in reader.names], group)


def _prove_ones(
    source: Source, tensors: Sequence[torch.Tensor], factors: Sequence[TensorMap]
) -> None:
    for tensor in tensors:
        tensor.fill_(1)

    def check(factor: TensorMap, tensor: torch.Tensor) -> None:
        wrong = tensor != 1
        if bool(wrong.any()):
            value = float(tensor[wrong].flatten()[0])
            raise NotMovement(
                f"{factor.name}: the exporter turns parameters of one into {value!r}; scale, cast "
                "or pad after export instead, or pass an exporter that only moves"
            )

    _check_again(source, factors, check)


def _prove_random(
    source: Source,
    tensors: Sequence[torch.Tensor],
    first: int,
    parameters: Sequence[Parameter],
    factors: Sequence[TensorMap],
) -> None:
    """Values drawn per global parameter index, so any rank can replay any other rank's pieces."""
    # Factors that share a parameter come one after another: fused projections, stacked experts.
    values = lru_cache(maxsize=16)(lambda index: _random_values(index, parameters[index]))
    for offset, tensor in enumerate(tensors):
        tensor.copy_(values(first + offset))

    def check(factor: TensorMap, tensor: torch.Tensor) -> None:
        used = {cell.tensor for cell in factor.cells}
        expected = gather(factor, {index: values(index) for index in used})
        wrong = tensor.detach().to("cpu", torch.float64) != expected
        if bool(wrong.any()):
            raise NotMovement(
                f"{factor.name}: {int(wrong.sum())} of {tensor.numel()} random values changed on "
                "export; the exporter rounds, quantises or rescales, which cannot be replayed"
            )

    _check_again(source, factors, check)


def _random_values(index: int, parameter: Parameter) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x5EED + index)
    dtype: torch.dtype = getattr(torch, parameter.dtype)
    return torch.randn(parameter.shape, generator=generator).to(dtype)


def _exchange(
    factors: Sequence[TensorMap], group: ProcessGroup | None
) -> list[tuple[TensorMap, ...]]:
    """Every rank's view of the export, in rank order."""
    return [
        msgspec.msgpack.decode(data, type=tuple[TensorMap, ...])
        for data in all_gather_bytes(msgspec.msgpack.encode(tuple(factors)), group)
    ]


def _merge(parameters: tuple[Parameter, ...], maps: Sequence[Sequence[TensorMap]]) -> ExportMap:
    """One map from all ranks' maps; where ranks export the same factor, the lowest is read."""
    chosen: dict[str, TensorMap] = {}
    replicas: dict[tuple[int, int], None] = {}
    for rank, factors in enumerate(maps):
        for factor in factors:
            first = chosen.setdefault(factor.name, factor)
            for pair in _replica_pairs(first, factor, rank, parameters):
                replicas[pair] = None
    return ExportMap(parameters, tuple(chosen.values()), tuple(replicas))


def _replica_pairs(
    first: TensorMap, other: TensorMap, rank: int, parameters: Sequence[Parameter]
) -> Iterator[tuple[int, int]]:
    if first.shape != other.shape or len(first.cells) != len(other.cells):
        raise CoverageError(
            f"{other.name}: trainer rank {rank} exports it from other pieces than the first rank "
            "that yields it; all ranks must export the same adapter"
        )
    for a, b in zip(first.cells, other.cells, strict=True):
        if msgspec.structs.replace(b, tensor=a.tensor) != a:
            raise CoverageError(
                f"{other.name}: trainer rank {rank} builds it from other elements of "
                f"{parameters[b.tensor].label} than the first rank that yields it"
            )
        if a.tensor != b.tensor:
            yield a.tensor, b.tensor


def _check_pairs(factors: Sequence[TensorMap]) -> None:
    names = dict.fromkeys(factor.name for factor in factors)
    for name in names:
        module, end = name[: -len(_A)], name[-len(_A) :]
        if not module.startswith(PEFT_PREFIX) or end not in (_A, _B):
            raise CoverageError(
                f"{name}: not a PEFT factor name; expected {PEFT_PREFIX}<module>{_A} or "
                f"{PEFT_PREFIX}<module>{_B}"
            )
        partner = module + (_B if end == _A else _A)
        if partner not in names:
            raise CoverageError(f"{name}: exported without its partner {partner}")


def _check_parameters_used(
    parameters: Sequence[Parameter], maps: Sequence[Sequence[TensorMap]]
) -> None:
    pieces: dict[int, list[tuple[IntArray, IntArray]]] = {}
    for factors in maps:
        for factor in factors:
            for cell in factor.cells:
                pieces.setdefault(cell.tensor, []).append((cell.source_rows, cell.source_cols))
    for index, parameter in enumerate(parameters):
        missing = uncovered_elements(tags.matrix_shape(parameter.shape), pieces.get(index, []))
        if missing:
            raise CoverageError(
                f"{parameter.label}: {missing} of its {math.prod(parameter.shape)} elements are "
                "exported by no factor; the engine would never see them"
            )
