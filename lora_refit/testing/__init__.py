"""Real Megatron and vLLM on CPU, tiny models and trainer ranks, for tests here and in user CI.

Import the module you need: this package itself imports nothing.
"""
