"""Numbers of 8 bits with a scale for each chunk, and how far off they are. Pure: tensors in, tensors out.

The format is e4m3: a sign, 4 bits of exponent, 3 of mantissa; the largest number is 448, the smallest step 2⁻⁹. A chunk is divided by its
scale, its largest magnitude / 448, so that all of the range is used whatever the size of the values.

Rules:

* A number comes back with an error of at most 1/16 of itself, or of 2⁻¹⁰ scales where it is smaller than 2⁻⁶ scales: `error_bound`.
* Zeros come back as zeros, and a chunk that holds inf or NaN comes back as NaN: what overflowed is not hidden.
* Everything is calculated in float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

__all__ = ["SCALE_BYTES", "Parts", "dequantise", "error_bound", "parts_of", "quantise"]

LARGEST = 448.0
SCALE_BYTES = 4
LEAST_SCALE = 2.0**-126
"""The smallest normal float32: a smaller scale would itself be off by too much."""
VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
"""By code."""
SLACK = 1 + 2.0**-20
"""What the divisions and products in float32 add to the error."""


class Parts(NamedTuple):
    """How a flat tensor is cut: into a part for each member, of as many chunks each. Zeros fill it up."""

    members: int
    chunks: int  # of a part
    chunk: int  # elements

    @property
    def elements(self) -> int:
        return self.members * self.chunks * self.chunk

    @property
    def part_bytes(self) -> int:
        return self.chunks * (self.chunk + SCALE_BYTES)


def parts_of(count: int, members: int, chunk: int) -> Parts:
    """Equal parts in equal chunks of at most `chunk` elements, with as few zeros to fill up as that allows."""
    part = max(1, math.ceil(count / members))
    chunks = math.ceil(part / chunk)
    return Parts(members, chunks, math.ceil(part / chunks))


def quantise(values: torch.Tensor) -> torch.Tensor:
    """float32 [..., chunks, chunk] to uint8 [..., bytes]: the numbers of all chunks, then their scales."""
    scales = (values.abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=LEAST_SCALE)
    codes = (values / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return torch.cat([codes.view(torch.uint8).flatten(-2), scales.squeeze(-1).view(torch.uint8)], dim=-1)


def dequantise(data: torch.Tensor, chunks: int, chunk: int) -> torch.Tensor:
    """The other way round: float32 [..., chunks, chunk]."""
    count = chunks * chunk
    codes = data[..., :count].reshape(-1).int()
    scales = data[..., count:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned
    # By a table: torch's own conversion takes five times as long on a CPU.
    values = VALUES.to(data.device).index_select(0, codes).view(*data.shape[:-1], chunks, chunk)
    return values.mul_(scales.unsqueeze(-1))


def error_bound(values: torch.Tensor) -> torch.Tensor:
    """By how much each element of finite float64 [..., chunks, chunk] may be off once it is quantised."""
    scales = (values.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    return torch.maximum(values.abs() / 16, scales * 2.0**-10) * SLACK
