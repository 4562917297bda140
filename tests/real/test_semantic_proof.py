"""An exporter that moves faithfully, but to the wrong place, is refused by the trainer's proofs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trainer
from rig import MODELS, policy_config

from lora_refit import Spec
from lora_refit.testing.ranks import RankError, TrainerRanks

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "tp1": {"tensor_parallel": 1},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "tp3": {"tensor_parallel": 3},
}

WRONG_NAMES = ("layers in turn", "k and v in turn", "gate and up in turn")
WRONG_PLACES = ("rows of down_proj shifted", "columns of o_proj shifted", "rank of lora_A reversed")


@pytest.fixture(scope="module", params=TOPOLOGIES, ids=str)
def ranks(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Iterator[TrainerRanks]:
    settings = TOPOLOGIES[request.param]
    with TrainerRanks(settings["tensor_parallel"], timeout_s=120.0) as group:
        group.call(trainer.build, policy_config(tiny(**MODELS["llama-gqa"]), **settings))
        yield group


def test_the_unaltered_export_passes(ranks: TrainerRanks) -> None:
    """Megatron-Bridge's own export, and the same through a callable."""
    for spec in (
        ranks.call(trainer.offer, "float32")[0],
        ranks.call(trainer.offer_altered, "nothing", "float32")[0],
    ):
        assert len(Spec.from_bytes(spec).layout.export_map.factors) == 28


@pytest.mark.parametrize("alteration", WRONG_NAMES)
def test_names_of_other_modules(ranks: TrainerRanks, alteration: str) -> None:
    """Every factor is whole and paired; only the base weights can tell that names are exchanged."""
    with pytest.raises(RankError, match="UnsupportedAdapter: .*exported as model"):
        ranks.call(trainer.offer_altered, alteration, "float32")


@pytest.mark.parametrize("alteration", WRONG_PLACES)
def test_rows_and_columns_of_other_places(ranks: TrainerRanks, alteration: str) -> None:
    with pytest.raises(RankError, match="UnsupportedAdapter: .*(own forward|exported as)"):
        ranks.call(trainer.offer_altered, alteration, "float32")


@pytest.mark.parametrize("config", [{"lora_alpha": 18}, {"use_rslora": True}], ids=str)
def test_a_config_with_another_scale(ranks: TrainerRanks, config: dict[str, Any]) -> None:
    """The engine would scale by what the config says, not by what the trainer does."""
    with pytest.raises(RankError, match="UnsupportedAdapter: .*own forward differs"):
        ranks.call(trainer.offer_altered, "nothing", "float32", config)
