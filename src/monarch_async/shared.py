"""Memory that is not copied when it is sent to another process of this host.

    batch = shared_empty(1024, 1024)
    batch.normal_()
    await actor.train.call_one(batch)  # takes as long as a small call

Rules:

* What is sent is a look at the same memory: what is written to it later shows at the receiver, as long as that has not written there
  itself. So fill it, send it, and fill it again only when the receiver is done, or fill another one meanwhile.
* The receiver may write to what it gets; neither the sender nor another receiver sees that.
* A view of it (a slice, a reshaped tensor) is sent in the same way. To other hosts, and within a process, it is copied as anything else.
* The memory is given back when neither the sender nor a receiver refers to it any more. It counts towards the option `segment_bytes`.
* Where a system has no such memory (anything but Linux) it is ordinary memory, and is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch_async._channel.pool import allocate
from monarch_async._channel.segment import SUPPORTED
from monarch_async._channel.tensors import tensor_over
from monarch_async.ambient import current_runtime

if TYPE_CHECKING:
    from monarch_async._channel import tensors

__all__ = ["shared_buffer", "shared_empty"]


def shared_buffer(size: int) -> memoryview:
    """`size` bytes of such memory, with any content; ``numpy.frombuffer`` makes an array of it. Raises `ValueError` and `MemoryError`."""
    if size < 1:
        raise ValueError(f"shared memory has at least one byte, got size={size}")
    if not SUPPORTED:
        return allocate(size)
    block = current_runtime().lending.share(size)
    if isinstance(block, str):
        raise MemoryError(f"no shared memory of {size} bytes: {block}")
    return block.view()[:size]


def shared_empty(*size: int | Sequence[int], dtype: tensors.dtype | None = None) -> tensors.Tensor:
    """A CPU tensor in such memory, with any content; arguments as those of `torch.empty`. Raises `MemoryError`.

    Args:
        size: the shape, as integers or as one sequence.
        dtype: of the elements; torch's default if `None`.
    """
    shape = [*size[0]] if len(size) == 1 and isinstance(size[0], Sequence) else [*size]
    return tensor_over(shared_buffer, shape, dtype)
