"""The text to learn: source code of Python's standard library, which every machine has.

A character is a byte: newline and printable ASCII, 96 in all. Tabs become spaces, any other character becomes ``?``. The text is split by
file, every tenth being held out, so that held-out text was never seen in part.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["VOCABULARY", "Corpus", "decode", "encode", "read_corpus"]

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
HELD_OUT_EVERY = 10
_IDS = bytes(max(VOCABULARY.find(chr(code)), 0) for code in range(256))


def encode(text: str) -> torch.Tensor:
    """Text as ids of characters: uint8, shape [characters]."""
    ids = text.expandtabs(4).encode("ascii", "replace").translate(_IDS)
    return torch.frombuffer(bytearray(ids), dtype=torch.uint8)


def decode(ids: torch.Tensor) -> str:
    """The text of such ids."""
    return "".join(VOCABULARY[int(index)] for index in ids)


@dataclass(frozen=True)
class Corpus:
    """Encoded text: uint8, one dimension each."""

    files: int
    train: torch.Tensor
    held_out: torch.Tensor

    def train_batch(self, rows: int, length: int, seed: int) -> torch.Tensor:
        """Stretches from anywhere: uint8, shape [rows, length]. The same for the same seed."""
        starts = torch.randint(len(self.train) - length, (rows,), generator=torch.Generator().manual_seed(seed))
        return torch.stack([self.train[start : start + length] for start in starts.tolist()])

    def held_out_batch(self, rows: int, length: int, index: int) -> torch.Tensor:
        """Stretches spread evenly over the held-out text, other ones for each index: uint8, shape [rows, length]."""
        step = (len(self.held_out) - length) // rows
        starts = [row * step + index * length % step for row in range(rows)]
        return torch.stack([self.held_out[start : start + length] for start in starts])


def read_corpus(size: int) -> Corpus:
    """About `size` characters of the standard library: its modules in the order of their names, as many as are needed."""
    parts: dict[bool, list[str]] = {False: [], True: []}
    files = characters = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if characters >= size:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        parts[files % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(text)
        files += 1
        characters += len(text)
    return Corpus(files, encode("".join(parts[False])), encode("".join(parts[True])))
