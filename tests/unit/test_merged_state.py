"""The merged state of a pretended trainer: coverage, bounded memory, and files that appear whole."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lora_refit.errors import (
    CoverageError,
    LayoutMismatch,
    RefitError,
    UnsupportedAdapter,
)
from lora_refit.merged.checkpoint import MergedState
from lora_refit.merged.layout import MergedWeight, Piece
from lora_refit.merged.magnitudes import assemble_magnitudes, magnitudes_of_rank
from lora_refit.merged.pieces import FactorRows, SourcedPiece
from lora_refit.sources.base import PEFT_PREFIX, BaseWeight

LAYERS, OUT, IN, RANK = 20, 48, 64, 4
SCALE = 0.75
TENSOR_BYTES = OUT * IN * 4
SHARD_BYTES = 3 * TENSOR_BYTES + 100
MOST_ALIVE = 6
"""Tensors at a time in a save: three of a shard, the next one, and its base and the one before."""


class PretendedModel:
    """Layers of one adapted and one other weight; counts the tensors that live at a time."""

    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at = fail_at
        self.exhausted = False
        self.most_alive = 0
        self._watched = 0
        self._alive: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.norms = [torch.full((OUT, IN), float(layer)) for layer in range(LAYERS)]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for layer in range(LAYERS):
            if layer == self.fail_at:
                raise RuntimeError("the trainer failed")
            yield f"layers.{layer}.proj.base_layer.weight", self.watch(base(layer))
            yield f"layers.{layer}.other.weight", self.norms[layer]
        self.exhausted = True

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        self._watched += 1
        self._alive[self._watched] = tensor
        self.most_alive = max(self.most_alive, len(self._alive))
        return tensor

    def names(self) -> Collection[str] | None:
        return [
            f"layers.{layer}.{name}.weight" for layer in range(LAYERS) for name in ("proj", "other")
        ]

    def write_config(self, folder: Path) -> None:
        (folder / "config.json").write_text('{"torch_dtype": "float16"}')


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def base(layer: int) -> torch.Tensor:
    return normal(layer, OUT, IN)


def factors() -> dict[str, torch.Tensor]:
    found = {}
    for layer in range(LAYERS):
        name = f"{PEFT_PREFIX}layers.{layer}.proj"
        found[f"{name}.lora_A.weight"] = normal(100 + layer, RANK, IN)
        found[f"{name}.lora_B.weight"] = normal(200 + layer, OUT, RANK)
    return found


def test_merges_what_is_adapted_and_copies_the_rest() -> None:
    model = PretendedModel()
    given = factors()
    state = dict(MergedState(model, given, SCALE, dtype=torch.bfloat16))
    assert list(state) == model.names()
    for layer in range(LAYERS):
        name = f"{PEFT_PREFIX}layers.{layer}.proj"
        delta = SCALE * given[f"{name}.lora_B.weight"] @ given[f"{name}.lora_A.weight"]
        merged = state[f"layers.{layer}.proj.weight"]
        assert torch.allclose(merged.float(), base(layer) + delta, rtol=2**-8, atol=1e-5)
        other = state[f"layers.{layer}.other.weight"]
        assert torch.equal(other, model.norms[layer].bfloat16())
        other.fill_(7)
    for layer, norm in enumerate(PretendedModel().norms):
        assert torch.equal(model.norms[layer], norm), "a tensor was the trainer's own"


def test_unchanged_tensors_are_copies_too() -> None:
    model = PretendedModel()
    for _, tensor in MergedState(model, factors(), SCALE):
        tensor.fill_(7)
    assert all(map(torch.equal, model.norms, PretendedModel().norms))


def watched(state: MergedState, model: PretendedModel) -> None:
    """From now on also the tensors that come out are counted."""
    merged = state._merged

    def watch(stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in merged(stream):
            model.watch(tensor)
            yield name, tensor
            del tensor

    state._merged = watch  # type: ignore[method-assign]


def test_memory_is_bounded_by_a_shard(tmp_path: Path) -> None:
    """Control: a consumer that keeps everything is counted as such."""
    gc.collect()
    model = PretendedModel()
    state = MergedState(model, factors(), SCALE)
    watched(state, model)
    state.save(tmp_path / "merged", shard_bytes=SHARD_BYTES)
    sizes = [file.stat().st_size for file in (tmp_path / "merged").glob("*.safetensors")]
    print(f"at most {model.most_alive} of {3 * LAYERS} tensors, in {len(sizes)} shards")
    assert len(sizes) == -(-2 * LAYERS // 3)
    assert max(sizes) < SHARD_BYTES + 1000
    assert model.most_alive <= MOST_ALIVE

    keeping = PretendedModel()
    state = MergedState(keeping, factors(), SCALE)
    watched(state, keeping)
    everything = list(state)
    assert keeping.most_alive >= len(everything)


@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, 1, 1 << 30])
def test_files_hold_every_tensor_once(tmp_path: Path, shard_bytes: int) -> None:
    """Shards of some tensors, of one each as none fits, and one file without an index."""
    path = tmp_path / "new" / "merged"
    MergedState(PretendedModel(), factors(), SCALE).save(path, shard_bytes=shard_bytes)
    expected = dict(MergedState(PretendedModel(), factors(), SCALE))
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        assert not tensors.keys() & found.keys()
        found |= tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    index = path / "model.safetensors.index.json"
    assert index.exists() == (shard_bytes != 1 << 30)
    assert json.loads((path / "config.json").read_text()) == {"dtype": "float32"}
    assert [entry.name for entry in path.parent.iterdir()] == ["merged"]


WITHOUT = {
    "an adapter of a weight that is not exported": (
        {f"{PEFT_PREFIX}lm_head.lora_{k}.weight": torch.zeros(4, 4) for k in "AB"},
        "lm_head.weight: has an adapter, but the trainer exports no such weight",
    ),
    "a wrapped weight without factors": (
        {f"{PEFT_PREFIX}layers.7.proj.lora_A.weight": None},
        "layers.7.proj: its weight is under an adapter whose factors were not exported",
    ),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_adapters_and_weights_must_meet(case: str, tmp_path: Path) -> None:
    changed, message = WITHOUT[case]
    given = {name: item for name, item in (factors() | changed).items() if item is not None}
    model = PretendedModel()
    with pytest.raises(CoverageError, match=message):
        MergedState(model, given, SCALE).save(tmp_path / "merged")
    assert model.exhausted, "other ranks would wait in the middle of the export"
    assert list(tmp_path.iterdir()) == []


def test_names_must_come_once_and_all() -> None:
    class Twice(PretendedModel):
        def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "layers.3.proj.weight", base(3)
            yield from super().weights()

    class Partial(PretendedModel):
        def names(self) -> Collection[str] | None:
            return ["embed.weight", *(super().names() or ())]

    with pytest.raises(CoverageError, match="layers.3.proj.weight: the trainer exports it twice"):
        list(MergedState(Twice(), factors(), SCALE))
    with pytest.raises(CoverageError, match="embed.weight and 0 more: the base checkpoint has"):
        list(MergedState(Partial(), factors(), SCALE))


def test_factors_must_fit() -> None:
    wrong = {f"{PEFT_PREFIX}layers.2.proj.lora_A.weight": torch.zeros(RANK, IN - 1)}
    with pytest.raises(LayoutMismatch, match="layers.2.proj: lora_B .* do not fit its weight"):
        list(MergedState(PretendedModel(), factors() | wrong, SCALE))
    lost = {f"layers.{layer}.proj": torch.ones(OUT) for layer in range(LAYERS - 1)}
    with pytest.raises(CoverageError, match="layers.19.proj: .* magnitude"):
        list(MergedState(PretendedModel(), factors(), SCALE, magnitudes=lost))
    short = {f"layers.{layer}.proj": torch.ones(OUT - 1) for layer in range(LAYERS)}
    with pytest.raises(LayoutMismatch, match=r"magnitude \(47,\)"):
        list(MergedState(PretendedModel(), factors(), SCALE, magnitudes=short))


def test_a_quantised_base_is_refused_by_name() -> None:
    class Quantised(PretendedModel):
        def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().weights():
                yield name, tensor.to(torch.float8_e4m3fn) if ".4.proj" in name else tensor

    with pytest.raises(UnsupportedAdapter, match="layers.4.proj: its weight is exported as .*8"):
        list(MergedState(Quantised(), factors(), SCALE))


def test_stopping_early_finishes_the_export() -> None:
    model = PretendedModel()
    for _ in MergedState(model, factors(), SCALE):
        break
    assert model.exhausted


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the trainer failed"):
        MergedState(PretendedModel(fail_at=9), factors(), SCALE).save(tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    """An empty folder is filled; a file, a full folder and a link are not touched."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    for name in ("file", "full", "link"):
        model = PretendedModel()
        with pytest.raises(RefitError, match=f"{name}: already exists"):
            MergedState(model, factors(), SCALE).save(tmp_path / name)
        assert not model.exhausted, "it is found out before anything is gathered"
    MergedState(PretendedModel(), factors(), SCALE).save(tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "file", "full", "link"]
    assert (tmp_path / "full" / "mine").read_text() == "mine"


def die_in_a_save(path: str) -> None:
    """In a process of its own."""

    class Dying(PretendedModel):
        def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, pair in enumerate(super().weights()):
                if number == 9:
                    os._exit(9)
                yield pair

    MergedState(Dying(), factors(), SCALE).save(path, shard_bytes=SHARD_BYTES)


def test_a_killed_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    """Shards were written, but only beside the path; the next save to it works."""
    path = tmp_path / "merged"
    code = "import sys, test_merged_state; test_merged_state.die_in_a_save(sys.argv[1])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, timeout=60)
    assert child.returncode == 9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".merged.")
    assert list(left.glob("*.safetensors"))
    MergedState(PretendedModel(), factors(), SCALE).save(path)
    assert (path / "model.safetensors").exists()


def pieces(rows: list[np.ndarray], cols: list[range]) -> list[SourcedPiece]:
    """Ranks that hold the given rows of a weight [4, 6], and columns."""
    empty = np.zeros(0, np.int64)
    none = FactorRows(0, empty, empty)
    return [
        SourcedPiece(
            Piece(0, rank, 0 if len(row) == 4 else 2 * rank, len(row), col.start, len(col)),
            0,
            row,
            empty,
            none,
            (),
        )
        for rank, (row, col) in enumerate(zip(rows, cols, strict=True))
    ]


def magnitudes(found: list[SourcedPiece], values: list[list[float]]) -> torch.Tensor:
    parts = []
    for rank, own in enumerate(values):
        held = [BaseWeight("a", "b", torch.zeros(len(own), 3), magnitude=torch.tensor(own))]
        parts += magnitudes_of_rank(found, held, rank)
    return assemble_magnitudes(parts, [MergedWeight("proj.weight", (4, 6))])["proj"]


def test_magnitudes_in_the_order_of_the_checkpoint() -> None:
    """Column-parallel with rows in another order, and row-parallel with all rows on each rank."""
    column_parallel = pieces([np.array([1, 0])] * 2, [range(6)] * 2)
    assert magnitudes(column_parallel, [[1, 2], [3, 4]]).tolist() == [2, 1, 4, 3]
    row_parallel = pieces([np.arange(4)] * 2, [range(3), range(3, 6)])
    assert magnitudes(row_parallel, [[1, 2, 3, 4]] * 2).tolist() == [1, 2, 3, 4]
    with pytest.raises(UnsupportedAdapter, match=r"proj\.weight, row 2: trainer ranks hold diff"):
        magnitudes(row_parallel, [[1, 2, 3, 4], [1, 2, 5, 4]])
