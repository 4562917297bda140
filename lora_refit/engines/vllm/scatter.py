"""The plan that scatters all trainer ranks' arenas into one worker's slots."""

from __future__ import annotations

import math

from lora_refit.engines.vllm.slot_map import SlotMap, scatter_plan
from lora_refit.plan import Buffer, Plan
from lora_refit.spec import Spec


def scatter_plan_of(spec: Spec, slot_map: SlotMap, worker: int) -> Plan:
    """The plan from all ranks' arena entries into one worker's slot buffers."""
    export_map = spec.layout.export_map
    return scatter_plan(
        slot_map,
        export_map.factors,
        [
            Buffer(item.name, item.rank, spec.layout.dtype, math.prod(item.shape))
            for item in export_map.parameters
        ],
        [item.shape for item in export_map.parameters],
        worker,
        spec.layout.scale_folded,
    )
