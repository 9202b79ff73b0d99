"""Two thin matrices for one: orthonormal columns, exact results where they exist, and errors that are no larger than what was given."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_async.tensor.lowrank import as_matrix, first_q, is_smaller, orthonormal, residual


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_what_is_lost_is_no_more_than_was_given(seed: int, rows: int, columns: int, rank: int) -> None:
    """P̂ has orthonormal columns, and what remains of M is at right angles to them, so that it is no longer than M."""
    matrix = drawn(seed, rows, columns)
    p = orthonormal(matrix @ first_q(columns, rank, matrix))
    kept = min(rows, columns, rank)
    torch.testing.assert_close(torch.eye(p.shape[1], dtype=torch.float64), p.T @ p, atol=1e-12, rtol=0)
    lost = residual(matrix, p, matrix.T @ p)
    torch.testing.assert_close(torch.zeros(p.shape[1], columns, dtype=torch.float64), p.T @ lost, atol=1e-10, rtol=0)
    assert lost.norm() <= matrix.norm() * (1 + 1e-12)
    assert kept == p.shape[1] or p.shape[1] <= rank


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1000), st.integers(2, 12), st.integers(2, 12))
def test_a_matrix_of_the_rank_is_exact(seed: int, rows: int, columns: int) -> None:
    """A product of two thin matrices comes back, after one step from any start."""
    matrix = drawn(seed, rows, 2) @ drawn(seed + 1, 2, columns)
    p = orthonormal(matrix @ first_q(columns, 2, matrix))
    torch.testing.assert_close(torch.zeros_like(matrix), residual(matrix, p, matrix.T @ p), atol=1e-6, rtol=0)


def test_warm_start_finds_the_best_approximation() -> None:
    """With its own Q each time, the same matrix is soon approximated as well as its singular values allow."""
    matrix = drawn(5, 20, 15)
    singular = torch.linalg.svdvals(matrix)
    best = singular[2:].norm()
    q = first_q(15, 2, matrix)
    lost = []
    for _ in range(100):
        p = orthonormal(matrix @ q)
        q = matrix.T @ p
        lost.append(residual(matrix, p, q).norm().item())
    assert lost[0] > 1.02 * best
    assert lost[-1] < 1.001 * best
    assert sorted(lost, reverse=True) == lost or max(b - a for a, b in itertools.pairwise(lost)) < 1e-9


def test_awkward_matrices() -> None:
    """Zeros give zeros, more dimensions are one, inf gives NaN, and little or thin tensors are not worth it."""
    zeros = torch.zeros(6, 5)
    p = orthonormal(zeros @ first_q(5, 2, zeros))
    assert torch.equal(zeros, p @ (zeros.T @ p).T)
    assert (4, 6) == tuple(as_matrix(torch.ones(4, 2, 3, dtype=torch.bfloat16), torch.float32).shape)
    assert bool(orthonormal(torch.tensor([[torch.inf], [1.0]])).isnan().all())
    shapes = ((), (100,), (0, 5), (5, 0), (2, 3), (4, 1000), (5, 1000), (10, 10, 10))
    assert [False, False, False, False, False, False, True, True] == [is_smaller(torch.Size(shape), 4) for shape in shapes]
