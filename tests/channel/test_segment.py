"""Segments: nobody but the owner can change one, no access ends in SIGBUS, and what is written to a mapping can be forgotten."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import subprocess
import sys
import threading

import pytest

from monarch_async._channel import segment as segments
from monarch_async._channel.segment import PAGE, SUPPORTED, Mapping, Segment, address_of

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
SIZE = 16 * PAGE


def at(address: int, size: int = SIZE) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def new_segment() -> Segment:
    made = Segment(1, SIZE)
    made.commit(0, SIZE)
    at(made.address)[:] = b"o" * SIZE
    return made


def test_a_mapping_shows_what_the_owner_writes_until_it_is_written_to() -> None:
    """Pages that were not written to are the owner's; one that was is this mapping's own, and the owner does not see it."""
    segment = new_segment()
    mapping = Mapping(segment.open_reader(), SIZE)
    mine, private = at(segment.address), at(mapping.address)
    assert private == mine
    private[PAGE] = 1
    mine[0], mine[PAGE + 1] = 2, 3
    assert (2, 1, ord("o")) == (private[0], private[PAGE], private[PAGE + 1])
    assert ord("o") == mine[PAGE]


def test_renewing_forgets_what_was_written() -> None:
    """Of the range alone; what its owner wrote shows again, and what it writes from now on."""
    segment = new_segment()
    mapping = Mapping(segment.open_reader(), SIZE)
    mine, private = at(segment.address), at(mapping.address)
    private[:] = b"x" * SIZE
    mine[PAGE] = 7
    mapping.renew(PAGE, 2 * PAGE)
    assert b"x" * PAGE == private[:PAGE]
    assert mine[PAGE : 3 * PAGE] == private[PAGE : 3 * PAGE]
    assert b"x" * (SIZE - 3 * PAGE) == private[3 * PAGE :]
    mine[2 * PAGE] = 8
    assert 8 == private[2 * PAGE]


@pytest.mark.parametrize("kernel", ["new", "old"])
@pytest.mark.parametrize("touched", [None, 0, 7, 15])
def test_only_what_was_written_to_is_dropped(touched: int | None, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was read, or never looked at, is not taken for written; one among many that was is found. On old kernels too."""
    if kernel == "old":
        monkeypatch.setattr(segments, "_PAGEMAP_SCAN", 0)
    segment = new_segment()
    mapping = Mapping(segment.open_reader(), SIZE)
    private = at(mapping.address)
    assert 16 * ord("o") == sum(private[::PAGE])
    if touched is not None:
        private[touched * PAGE] = 1
    assert (touched is not None) == segments._was_written(mapping.address, SIZE)
    mapping.renew(0, SIZE)
    assert not segments._was_written(mapping.address, SIZE)
    assert b"o" * SIZE == private


def test_without_a_descriptor_left_all_is_dropped() -> None:
    """Where the kernel can't be asked which pages were written to, renewing is right all the same."""
    segment = new_segment()
    mapping = Mapping(segment.open_reader(), SIZE)
    private = at(mapping.address)
    private[5] = 1
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert segments._was_written(mapping.address, SIZE)
        mapping.renew(0, SIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert b"o" * SIZE == private


def test_the_original_can_be_copied_whatever_was_written_to_the_mapping() -> None:
    """A second view of the same block in one process must be what the owner wrote."""
    segment = new_segment()
    mapping = Mapping(segment.open_reader(), SIZE)
    at(mapping.address)[:] = b"x" * SIZE
    copy = bytearray(3 * PAGE)
    mapping.copy_original(PAGE, memoryview(copy))
    assert b"o" * 3 * PAGE == copy


def test_a_reader_can_neither_write_nor_shrink() -> None:
    """Not by writing, truncating, punching holes, a shared writable mapping, or a private one made to reach the file."""
    segment = new_segment()
    reader = segment.open_reader()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(reader, b"x", 0)
    for size in (0, PAGE, 2 * SIZE):
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(reader, size)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.posix_fallocate(reader, 0, SIZE)
    with pytest.raises(PermissionError):
        mmap.mmap(reader, SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with mmap.mmap(reader, SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as shared, pytest.raises(TypeError):
        shared[0] = 1  # read-only
    os.close(reader)
    assert b"o" * SIZE == at(segment.address)


def test_the_owner_can_neither_shrink_nor_grow_it() -> None:
    """So that no access of anybody ever ends in SIGBUS."""
    segment = new_segment()
    for size in (0, SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(segment._fd, size)


def test_a_read_only_mapping_cannot_be_made_writable() -> None:
    """The kernel refuses to give a shared mapping of a read-only descriptor write access later."""
    segment = new_segment()
    mapping = Mapping(segment.open_reader(), SIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert -1 == libc.mprotect(mapping._original, SIZE, 1 | 2)
    assert errno.EACCES == ctypes.get_errno()


REOPEN = """
import os
from monarch_async._channel.segment import Segment
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    import ctypes
    ctypes.CDLL(None).prctl(4, 1)  # dumpable again, or its own /proc/self is closed to it
segment = Segment(1, 65536)
fd = segment.open_reader()
for flags in (os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
    try:
        os.open(f"/proc/self/fd/{fd}", flags)
    except PermissionError:
        print("refused")
"""


def test_a_reader_cannot_be_opened_again_for_writing() -> None:
    """By its name under /proc; for anybody but the superuser, whom no mode stops."""
    done = subprocess.run([sys.executable, "-c", REOPEN], capture_output=True, text=True, timeout=30)
    assert ("refused\n" * 3, "", 0) == (done.stdout, done.stderr, done.returncode)


def test_nothing_is_left_of_either() -> None:
    """A mapping keeps no descriptor; descriptor and both mappings go with the objects; the memory outlives its owner."""
    segment = new_segment()

    def state() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("/memfd:monarch-async" in line for line in maps)

    fds, maps = state()
    mapping = Mapping(segment.open_reader(), SIZE)
    assert (fds, maps + 2) == state()
    other = Segment(2, SIZE)
    other.write_fresh(0, b"later")
    kept = Mapping(other.open_reader(), SIZE)
    del other
    assert b"later" == bytes(at(kept.address, 5))
    del mapping, kept
    assert (fds, maps) == state()


def test_a_segment_smaller_than_announced_is_refused() -> None:
    """Mapped past its end it would end in SIGBUS; the descriptor is closed all the same."""
    segment = new_segment()
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="smaller than it was announced"):
        Mapping(segment.open_reader(), SIZE + PAGE)
    assert fds == len(os.listdir("/proc/self/fd"))


def test_memory_is_given_back_for_all_who_map_it() -> None:
    """Discarded pages read as zeros everywhere, never as SIGBUS, and can be had again."""
    segment = new_segment()
    mapping = Mapping(segment.open_reader(), SIZE)
    held = os.fstat(segment._fd).st_blocks
    segment.discard(PAGE, 3 * PAGE)
    assert held - 3 * PAGE // 512 == os.fstat(segment._fd).st_blocks
    assert bytes(3 * PAGE) == at(mapping.address)[PAGE : 4 * PAGE]
    segment.write_fresh(PAGE, b"again")
    assert b"again" == bytes(at(mapping.address)[PAGE : PAGE + 5])


def test_what_the_system_refuses_is_an_os_error() -> None:
    """A size no system has, and no descriptors left: an `OSError`, and nothing is kept."""
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"File too large|Invalid argument|memory"):
        Segment(1, 1 << 62)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Segment(1, PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert fds == len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "data",
    [b"abc", memoryview(b"abc"), memoryview(bytearray(b"abc")), memoryview(b""), b""],
    ids=["bytes", "read-only", "writable", "empty", "no bytes"],
)
def test_both_ways_to_write(data: bytes | memoryview) -> None:
    """From writable and read-only memory, and from none."""
    segment = new_segment()
    segment.write(3, data)
    segment.write_fresh(PAGE, data)
    for start in (3, PAGE):
        assert bytes(data) + b"o" == at(segment.address)[start : start + len(data) + 1]


def test_an_error_of_the_second_thread_is_raised() -> None:
    """Whatever it is: the second half was not copied, so the call must not end as if it were."""

    def copy(start: int, end: int) -> None:
        if start:
            raise MemoryError("in the second half")

    with pytest.raises(MemoryError, match="in the second half"):
        segments._in_parts(segments.TWO_FROM, copy)


def test_without_a_second_thread_the_first_copies_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process may have no more of them."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[tuple[int, int]] = []
    segments._in_parts(segments.TWO_FROM, lambda start, end: done.append((start, end)))
    assert [(0, segments.TWO_FROM)] == done


def test_the_address_of_a_view() -> None:
    """Of a slice its own; none of what is empty or can't be written to."""
    memory = bytearray(100)
    view = memoryview(memory)
    assert address_of(view) + 7 == address_of(view[7:])
    assert 0 == address_of(view[:0]) == address_of(view.toreadonly()) == address_of(memoryview(b"abc"))
    view.release()
    memory.append(1)  # nothing is kept that would forbid it
