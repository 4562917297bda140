"""The reference GRPO driver: Megatron trains, vLLM generates, lora_refit connects them.

Run it with `python -m lora_refit.grpo --help`.
"""
