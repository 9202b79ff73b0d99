"""Has the reducers for tensors loaded when there is torch, and not before."""

from __future__ import annotations

from monarch_async._core.codec import when_imported

__all__ = ["install"]


def install() -> None:
    """Make tensors cheap to send from this process, from the moment it has imported torch. Doesn't import torch."""
    when_imported("torch", _load)


def _load() -> bool:
    from monarch_async._channel.tensors import ensure_reducers

    return ensure_reducers()
