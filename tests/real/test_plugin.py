"""vLLM finds the weight transfer engine by the package's entry point."""

from __future__ import annotations

import importlib
from pathlib import Path

import tomllib
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from lora_refit.engines.vllm import plugin


def test_the_entry_point_registers_the_engine_as_often_as_it_is_called() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (entry_point,) = project["entry-points"]["vllm.general_plugins"].values()
    module, function = entry_point.split(":")
    for _ in range(3):
        getattr(importlib.import_module(module), function)()
    engine = WeightTransferEngineFactory._registry[plugin.BACKEND]()
    assert f"{engine.__module__}.{engine.__name__}".endswith("transfer.RefitTransferEngine")
    assert WeightTransferConfig(backend=plugin.BACKEND).backend == plugin.BACKEND
