"""vLLM as the engine of a refit; its public names are in lora_refit.vllm."""
