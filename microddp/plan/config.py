"""The number of a model's parameters, from its ``config.json`` of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
USED = (*NEEDED, "vocab_size", "num_key_value_heads", "head_dim")


def count_parameters(config: Mapping[str, Any]) -> tuple[int, int]:
    """Count the parameters of a decoder of Llama's kind: Llama, Mistral, Qwen, SmolLM. No biases.

    Args:
        config: content of ``config.json``.

    Returns:
        The number of parameters, and the number of layers.

    Raises:
        ValueError: a configuration of another kind: it lacks a number, or has experts, or what
            should be a number above 0 is not.

    Example:
        >>> smol = {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32}
        >>> smol |= {"num_attention_heads": 15, "num_key_value_heads": 5, "vocab_size": 49152}
        >>> count_parameters(smol | {"tie_word_embeddings": True})
        (361821120, 32)
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"expected a configuration of names and values, got {config!r}")
    missing = [name for name in (*NEEDED, "vocab_size") if config.get(name) is None]
    if missing:
        raise ValueError(
            f"expected a configuration of Llama's kind, with {', '.join(missing)}; got one of "
            f"{config.get('model_type', 'no model_type')!r}"
        )
    for name, number in ((name, config[name]) for name in USED if name in config):
        if number is not None and not (isinstance(number, int) and number > 0):
            raise ValueError(f"expected {name} as a whole number above 0, got {number!r}")
    kinds = ("num_local_experts", "num_experts", "n_routed_experts")
    if experts := next(filter(None, map(config.get, kinds)), None):
        raise ValueError(f"expected one feed-forward network a layer, got {experts} experts")
    if (gate := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ValueError(f"expected a feed-forward network with a gate of silu, got {gate!r}")
    hidden, inner, layers, heads = (int(config[name]) for name in NEEDED)
    wide = attention_width(config)
    shared = int(config.get("num_key_value_heads") or heads)
    attention = 2 * hidden * wide + 2 * hidden * shared * wide // heads
    layer = attention + 3 * hidden * inner + 2 * hidden
    embeddings = int(config["vocab_size"]) * hidden
    tied = bool(config.get("tie_word_embeddings", False))
    return layers * layer + hidden + embeddings * (1 if tied else 2), layers


def attention_width(config: Mapping[str, Any]) -> int:
    """Compute the width of all heads of the attention together, which need not be the model's."""
    heads = int(config["num_attention_heads"])
    return heads * int(config.get("head_dim") or int(config["hidden_size"]) // heads)
