"""Where things lie in memory, and how long that is held."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy
import pytest
import torch

from monarch_async._channel.memory import memory_of, view_of
from monarch_async.errors import BufferMismatch


def backed() -> mmap.mmap:
    memory = mmap.mmap(-1, 4096)
    memory[:4] = b"mmap"
    return memory


MEMORIES: dict[str, tuple[Any, bytes, bool, str, tuple[int, ...]]] = {
    "bytes": (b"bytes", b"bytes", True, "", ()),
    "a bytearray": (bytearray(b"array"), b"array", False, "", ()),
    "nothing": (bytearray(), b"", False, "", ()),
    "a part of a view": (memoryview(bytearray(b"0123456789"))[3:7], b"3456", False, "", ()),
    "a part of a read-only view": (memoryview(b"0123456789")[3:7], b"3456", True, "", ()),
    "a view of numbers": (memoryview(array.array("H", [1, 2])), b"\1\0\2\0", False, "", ()),
    "a ctypes array": ((ctypes.c_uint16 * 2)(3, 4), b"\3\0\4\0", False, "", ()),
    "a view of an mmap": (memoryview(backed())[:4], b"mmap", False, "", ()),
    "a tensor": (torch.tensor([[1, 2], [3, 4]], dtype=torch.int8), b"\1\2\3\4", False, "int8", (2, 2)),
    "a row of a tensor": (torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)[1], b"\3\4", False, "int8", (2,)),
    "a scalar tensor": (torch.tensor(7, dtype=torch.int16), b"\7\0", False, "int16", ()),
    "an empty tensor": (torch.zeros(0, 3), b"", False, "float32", (0, 3)),
    "a tensor of bfloat16": (torch.ones(1, dtype=torch.bfloat16), b"\x80\x3f", False, "bfloat16", (1,)),
    "an array": (numpy.array([5, 6], dtype=numpy.int16), b"\5\0\6\0", False, "int16", (2,)),
    "an array of dates": (numpy.zeros(1, dtype="datetime64[s]"), bytes(8), False, "datetime64[s]", (1,)),
    "a read-only array": (numpy.frombuffer(b"\1\2", dtype=numpy.uint8), b"\1\2", True, "uint8", (2,)),
}


@pytest.mark.parametrize("what", MEMORIES)
def test_memory(what: str) -> None:
    """Address, size, whether it can be written to, dtype and shape."""
    thing, content, readonly, dtype, shape = MEMORIES[what]
    memory = memory_of(thing)
    assert (len(content), readonly, dtype, shape) == (memory.size, readonly and memory.readonly, memory.dtype, memory.shape)
    assert content == view_of(memory, 0, memory.size)
    assert content[1:3] == view_of(memory, 1, len(content[1:3])) if content else True
    assert "" == memory.check()


def test_a_view_writes_to_the_memory_and_holds_it() -> None:
    """What is written through it is in the array; the array lives as long as the view does."""
    target = numpy.zeros(4, dtype=numpy.uint8)
    there = weakref.ref(target)
    view = view_of(memory_of(target), 1, 2)
    view[:] = b"\1\2"
    assert [0, 1, 2, 0] == target.tolist()
    del target
    gc.collect()
    assert there() is not None
    del view
    gc.collect()
    assert there() is None


def test_a_tensor_that_lost_its_memory() -> None:
    """It is noticed when it is looked at again, and refused when it is looked at first."""
    tensor = torch.zeros(100)
    memory = memory_of(tensor[10:20])
    tensor.untyped_storage().resize_(60)
    assert "freed, moved or shrunk to 60 bytes" in memory.check()
    with pytest.raises(BufferMismatch, match="storage of the tensor was freed"):
        memory_of(tensor)
