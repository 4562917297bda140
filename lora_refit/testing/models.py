"""Small Hugging Face checkpoints and a byte-level tokenizer, made locally from a seed.

The default sizes divide evenly by 1, 2 and 3 tensor-parallel ranks in Megatron and in vLLM, without
padding the vocabulary (Megatron pads it to a multiple of 128 x ranks), and the head size is one that
vLLM's fp32 CPU attention supports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

_ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}
_SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def tiny_model(
    path: str | Path,
    architecture: str = "qwen3",
    hidden: int = 192,
    layers: int = 2,
    heads: int = 6,
    kv_heads: int = 6,
    head_dim: int = 32,
    ffn: int = 384,
    vocab: int = 768,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random checkpoint with its tokenizer to `path` and return the path.

    Args:
        architecture: `"qwen3"` or `"llama"`.
        vocab: at least 259, the size of the byte-level tokenizer.
        seed: of the random weights; they are large enough that every token depends on the prompt.
    """
    if architecture not in _ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r}: choose one of {sorted(_ARCHITECTURES)}")
    config_class, model_class = _ARCHITECTURES[architecture]
    config = config_class(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=512,
        initializer_range=0.1,
        dtype=dtype,
        **_shared_settings(),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(dtype)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return Path(path)


def llama8b_shaped(path: str | Path, layers: int) -> Path:
    """Write a config (no weights) with the layer shapes of Llama-3-8B and a small vocabulary.

    For benchmarks with dummy weights: hidden 4096, feed-forward 14336, 32 heads and 8 kv heads of 128.
    """
    config = transformers.LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=768,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
        **_shared_settings(),
    )
    config.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return Path(path)


def byte_tokenizer() -> Any:
    """One token per byte plus pad, begin and end of sequence: 259 tokens."""
    symbols = [*_SPECIAL_TOKENS.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {symbol: token for token, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, **_SPECIAL_TOKENS)


def _shared_settings() -> dict[str, Any]:
    return {
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
