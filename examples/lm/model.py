"""A small transformer that predicts the next character."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["CharTransformer", "Config", "learning_rate_at", "next_character_loss"]


@dataclass(frozen=True)
class Config:
    """Everything that decides what is trained, and how."""

    steps: int
    seed: int = 0
    corpus: int = 1_500_000  # characters
    vocabulary: int = 96
    width: int = 96
    depth: int = 3
    heads: int = 3
    context: int = 64  # characters that the model sees
    rows: int = 16  # stretches of text in a trainer's batch
    learning_rate: float = 4e-3


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer; both add to what they are given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.query_key_value(self.attention_norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(rows, length, width))
        x = x + self.feed_forward(x)
        return x


class CharTransformer(nn.Module):
    """Ids of characters, shape [rows, length], to scores of the next character, shape [rows, length, vocabulary]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.context = config.context
        self.characters = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config.width, config.heads) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(config.width)
        self.scores = nn.Linear(config.width, config.vocabulary)
        # Embeddings as large as what the blocks add to them: smaller ones are drowned, and learning begins late.
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.5)
        # Small scores: before it has learned anything, every character is about as likely as every other.
        nn.init.normal_(self.scores.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.characters(ids) + self.positions(torch.arange(ids.shape[1]))
        scores: torch.Tensor = self.scores(self.norm(self.blocks(x)))
        return scores

    @torch.no_grad()
    def continue_text(self, ids: torch.Tensor, length: int, temperature: float, seed: int) -> torch.Tensor:
        """Draw `length` more characters after `ids`, shape [characters]; returns all of them."""
        random = torch.Generator().manual_seed(seed)
        for _ in range(length):
            scores = self(ids[None, -self.context :])[0, -1]
            drawn = torch.multinomial(torch.softmax(scores / temperature, dim=0), 1, generator=random)
            ids = torch.cat([ids, drawn])
        return ids


def next_character_loss(model: CharTransformer, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats per character, of predicting each character of uint8 [rows, context + 1] from those before it."""
    ids = batch.long()
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def learning_rate_at(step: int, config: Config) -> float:
    """A short linear rise, then a straight line down to nothing."""
    rise = max(1, config.steps // 20)
    return config.learning_rate * min((step + 1) / rise, (config.steps - step) / max(1, config.steps - rise))
