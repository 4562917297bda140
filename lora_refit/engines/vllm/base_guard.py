"""Whether an engine serves the base weights that a trainer's adapter belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from lora_refit.base_samples import BaseSample
from lora_refit.engines.vllm import probe
from lora_refit.engines.vllm.load_trace import Parameter, Write, trace_loading
from lora_refit.errors import LayoutMismatch, RefitError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

QUANTISED_TOLERANCE = 0.125
"""By how much quantisation to 8 bits may change an element, as a share of the largest element that
was sampled of its weight."""

_UNQUANTISED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@dataclass(frozen=True)
class BaseComparison:
    """differing: lines that name weight, element and both values. not_compared: lines that name a
    weight and the reason. elements: how many were compared on this worker."""

    differing: tuple[str, ...]
    not_compared: tuple[str, ...]
    elements: int


def require_same_base(found: BaseComparison, gaps: Sequence[str] = ()) -> tuple[str, ...]:
    """Warnings about what could not be compared; gaps: what the trainer could not sample.

    Raises LayoutMismatch, naming weights and values, if the engine serves another base.
    """
    if found.differing:
        more = f"; and {len(found.differing) - 3} more" if len(found.differing) > 3 else ""
        raise LayoutMismatch(
            f"the engine serves another base than the trainer has: {'; '.join(found.differing[:3])}"
            f"{more}. Start the engine from the trainer's checkpoint, or from one written by "
            "publisher.merged_state(path); an adapter whose initialisation changed the base (PiSSA, "
            "OLoRA) needs that base in the engine"
        )
    left_out = (*found.not_compared, *gaps)
    if not left_out:
        return ()
    more = f"; and {len(left_out) - 1} more" if len(left_out) > 1 else ""
    return (f"the engine's base was not compared everywhere: {left_out[0]}{more}",)


def compare_bases(
    model: torch.nn.Module, samples: Sequence[BaseSample], dtype: torch.dtype
) -> BaseComparison:
    """Compare samples of the trainer's base with what this worker holds of the same elements.

    An element is the same if the sample, cast to the engine's dtype, equals it, or is one step of
    that dtype away where the cast rounds; in layers that the engine quantised if they are within
    QUANTISED_TOLERANCE. Weights and adapters stay as they are.
    """
    writes, not_compared = _trace(model, samples, dtype)
    differing: list[str] = []
    elements = 0
    for sample in samples:
        for write in writes.get(sample.name, ()):
            problem = _unreadable(write)
            if problem:
                not_compared.append(f"{sample.name}: {problem}")
                continue
            shared = _SharedElements.of(sample, write)
            elements += len(shared.values)
            differing += shared.differing(write.parameter, dtype)
    return BaseComparison(tuple(differing), tuple(not_compared), elements)


def _trace(
    model: torch.nn.Module, samples: Sequence[BaseSample], dtype: torch.dtype
) -> tuple[dict[str, list[Write]], list[str]]:
    """The copies of every weight that the engine loads, and lines about those that it does not."""
    shapes = {sample.name: sample.shape for sample in samples}
    refused: dict[str, str] = {}
    traced: list[Write] = []
    try:
        traced += trace_loading(model, shapes, dtype).writes
    except RefitError:
        for name, shape in shapes.items():
            try:
                traced += trace_loading(model, {name: shape}, dtype).writes
            except RefitError as error:
                refused[name] = str(error)
    writes: dict[str, list[Write]] = defaultdict(list)
    for write in traced:
        if not write.is_fill:
            writes[write.weight].append(write)
    for name in shapes:
        if name not in writes:
            refused.setdefault(name, "the engine's model does not load it on this worker")
    return writes, [f"{name}: {reason}" for name, reason in refused.items()]


def _unreadable(write: Write) -> str:
    """Why the elements of a copy cannot be read, or nothing."""
    parameter = write.parameter
    where = f"{parameter.layer_name}.{parameter.name}"
    if write.source is None or len(parameter.shape) != 2:
        return f"vLLM rearranges it in {where}"
    if _live_tensor(parameter) is None and not isinstance(parameter.layer, LinearBase):
        return f"vLLM rearranges {where} of {type(parameter.layer).__name__} after loading"
    return ""


@dataclass(frozen=True)
class _SharedElements:
    """The sampled elements of a weight that lie in one parameter of this worker.

    elements: (row, column) in the weight. rows, cols: in the parameter. values: the trainer's.
    scale: magnitude of the largest sample.
    """

    name: str
    elements: IntArray
    rows: IntArray
    cols: IntArray
    values: FloatArray
    scale: float

    @staticmethod
    def of(sample: BaseSample, write: Write) -> _SharedElements:
        grid = np.stack(np.meshgrid(sample.rows, sample.cols, indexing="ij"), -1).reshape(-1, 2)
        grid = grid.astype(np.int64)
        values = np.frombuffer(sample.values, "<f4")
        places = write.places(grid[:, 0] * sample.shape[1] + grid[:, 1])
        here = places >= 0
        rows, cols = np.divmod(places[here], write.parameter.shape[1])
        scale = float(np.abs(values).max(initial=0.0))
        return _SharedElements(sample.name, grid[here], rows, cols, values[here], scale)

    def differing(self, parameter: Parameter, dtype: torch.dtype) -> Iterator[str]:
        """A line for every element that the engine has another value of."""
        engine = _read(parameter, self.rows, self.cols, dtype)
        expected = torch.from_numpy(self.values.copy()).to(dtype).to(torch.float32).numpy()
        # A checkpoint may have been rounded to the trainer's dtype before it is to the engine's.
        twice = np.where(expected != self.values, torch.finfo(dtype).eps * np.abs(expected), 0.0)
        tolerance = twice if _is_unquantised(parameter) else QUANTISED_TOLERANCE * self.scale
        same = np.abs(engine - expected) <= tolerance
        for index in np.flatnonzero(~same):
            row, col = self.elements[index]
            yield (
                f"{self.name}[{row}, {col}]: the engine has {float(engine[index])!r}, the trainer "
                f"{float(expected[index])!r}"
            )


def _read(parameter: Parameter, rows: IntArray, cols: IntArray, dtype: torch.dtype) -> FloatArray:
    """Elements as the engine multiplies with them, in float32."""
    live = _live_tensor(parameter)
    if live is not None:
        values = live[
            torch.from_numpy(rows).to(live.device), torch.from_numpy(cols).to(live.device)
        ]
    else:
        wanted, position = np.unique(cols, return_inverse=True)
        read = probe.columns(parameter.layer, wanted, dtype)
        values = read[
            torch.from_numpy(rows).to(read.device), torch.from_numpy(position).to(read.device)
        ]
    return values.to("cpu", torch.float32).numpy()


def _live_tensor(parameter: Parameter) -> torch.Tensor | None:
    """The tensor itself, if it is as it was loaded: not quantised, packed or removed."""
    live = parameter.layer._parameters.get(parameter.name)
    if live is None or not _is_unquantised(parameter):
        return None
    return (
        live.detach()
        if (tuple(live.shape), live.dtype) == (parameter.shape, parameter.dtype)
        else None
    )


def _is_unquantised(parameter: Parameter) -> bool:
    method = getattr(parameter.layer, "quant_method", None)
    return method is None or isinstance(method, _UNQUANTISED)
