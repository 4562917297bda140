"""Plans: what moves where, found by composing an export map with a slot map."""

from lora_refit.plan.blocks import Block
from lora_refit.plan.compose import compose
from lora_refit.plan.plan import Buffer, Plan

__all__ = ["Block", "Buffer", "Plan", "compose"]
