"""Imported once by the fork server of `TrainerRanks`, so that each worker forks with Megatron."""

import logging
import warnings

import transformers

from lora_refit.testing import megatron_cpu

logging.getLogger("megatron").setLevel(logging.ERROR)
megatron_cpu.enable()
transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore", module="(megatron|torch)")
