"""A small transformer, which predicts the next token."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Transformer(nn.Module):
    """A small decoder-only transformer, which predicts the next token at every position.

    Its output layer is the embedding's own matrix, as in GPT-2. Such a tied parameter is used twice
    and still has one gradient.

    Args:
        vocabulary: number of different tokens.
        dim: width of a token's vector.
        depth: number of blocks.
        heads: attention heads of each block; must divide ``dim``.
        context: the longest sequence it can read, tokens.

    Raises:
        ValueError: a number below one, or heads that do not divide ``dim``.
    """

    def __init__(self, vocabulary: int, dim: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        sizes = {"vocabulary": vocabulary, "dim": dim, "depth": depth}
        sizes |= {"heads": heads, "context": context}
        if min(sizes.values()) < 1:
            raise ValueError(f"expected a vocabulary and sizes of at least 1, got {sizes}")
        if dim % heads:
            raise ValueError(f"expected a number of heads that divides dim {dim}, got {heads}")
        self.context = context
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(_Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocabulary, bias=False)
        # Radford et al. (GPT, 2018): with embeddings this small, the first logits are small too.
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token numbers to the logits of each position's next token.

        Args:
            tokens: int64 of shape ``(batch, length)``, with ``length`` at most ``context``.

        Returns:
            Shape ``(batch, length, vocabulary)``. Position i depends on tokens 0 to i only.

        Raises:
            ValueError: the sequence is longer than ``context``.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"expected at most {self.context} tokens, got {length}")
        x = self.tokens(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.output(self.norm(x))
        return result


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of next tokens.

    Args:
        logits: shape ``(batch, length, vocabulary)``, as a :class:`Transformer` gives them.
        targets: the tokens, int64 of shape ``(batch, length)``.
    """
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Block(nn.Module):
    """Attention, then a network of two layers, each on normalised input and added to it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mix = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 4 * dim)
        self.narrow = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, dim / heads)
        heads = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(heads.transpose(1, 2).reshape(batch, length, dim))
        hidden = nn.functional.gelu(self.widen(self.mlp_norm(x)))
        result: torch.Tensor = x + self.narrow(hidden)
        return result
