"""Matrices by two thin ones: the arithmetic of PowerSGD (Vogels, Karimireddy, Jaggi, 2019). Pure: tensors in, tensors out.

A gradient M [rows, columns] is sent as P [rows, rank] and Q [columns, rank], with P Qᵀ ≈ M. One step of subspace iteration for each
gradient is enough, since it begins with the Q of the last one (warm start), and gradients change slowly:

    P = mean of M Q;  P̂ = P made orthonormal;  Q = mean of Mᵀ P̂;  mean of M ≈ P̂ Qᵀ

What a member loses by that, M − P̂ (Mᵀ P̂)ᵀ = (1 − P̂ P̂ᵀ) M, it adds to its next gradient (error feedback): so nothing is lost for good,
and the mean of what the members keep is exactly what the result lacks.
"""

from __future__ import annotations

import torch

__all__ = ["as_matrix", "first_q", "is_smaller", "orthonormal", "residual"]

SEED = 7


def as_matrix(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The first dimension by all others, as the paper has it; a copy."""
    return tensor.detach().reshape(tensor.shape[0], -1).to(dtype, copy=True)


def is_smaller(shape: torch.Size, rank: int) -> bool:
    """Whether a tensor has at least two dimensions, and P and Q together fewer elements than it."""
    if len(shape) < 2 or not shape.numel():
        return False
    rows = shape[0]
    columns = shape.numel() // rows
    return (rows + columns) * rank < rows * columns


def first_q(columns: int, rank: int, like: torch.Tensor) -> torch.Tensor:
    """The same at every member: drawn from a fixed seed."""
    random = torch.Generator().manual_seed(SEED)
    return orthonormal(torch.randn(columns, rank, generator=random, dtype=torch.float64)).to(like)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Columns of length 1 at right angles that span what those of `matrix` do, and more where these are too few.

    A matrix with inf or NaN in it gives NaN.
    """
    if not bool(torch.isfinite(matrix).all()):
        return torch.full_like(matrix, torch.nan)
    columns: torch.Tensor = torch.linalg.qr(matrix).Q
    return columns


def residual(matrix: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What P Qᵀ lacks of a matrix."""
    return torch.addmm(matrix, p, q.T, alpha=-1)
