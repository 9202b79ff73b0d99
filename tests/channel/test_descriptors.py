"""Inboxes: descriptors come from processes of this job alone, nothing waits, and a process at its limit of open files still gets one."""

from __future__ import annotations

import array
import contextlib
import os
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest

from monarch_async._channel.descriptors import Inbox
from monarch_async._channel.segment import SUPPORTED, Mapping, Segment

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
SIZE = 1 << 16
KEY = b"k" * 32


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


class Pair:
    """Two inboxes of one job, and what the second was told."""

    def __init__(self, folder: Path, key: bytes = KEY) -> None:
        self.found: dict[tuple[str, int], Mapping] = {}
        self.path = str(folder / "inbox-b")
        self.sender = Inbox(str(folder / "inbox-a"), key, lambda owner, number, mapping: None, lambda giver, name, fds: None)
        self.receiver = Inbox(self.path, KEY, self._take, lambda giver, name, fds: None)
        self.segment = Segment(1, SIZE)
        self.segment.write_fresh(0, b"content")

    def _take(self, owner: str, number: int, mapping: Mapping) -> None:
        self.found[owner, number] = mapping

    def send(self, number: int = 1, size: int = SIZE) -> None:
        fd = self.segment.open_reader()
        try:
            self.sender.send(self.path, "a", number, size, fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.found.clear()
        del self.segment


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def test_a_descriptor_arrives(pair: Pair) -> None:
    """With whose it is, its number and its size, mapped, and none is left open."""
    before = fds()
    pair.send(7)
    pair.receiver.receive()
    assert [("a", 7)] == [*pair.found]
    copy = bytearray(7)
    pair.found["a", 7].copy_original(0, memoryview(copy))
    assert b"content" == copy
    assert before == fds()
    pair.receiver.receive()  # nothing more


Forgery = Callable[[Pair, bytes], bytes]
FORGED: dict[str, Forgery] = {
    "no seal": lambda pair, body: body,
    "a wrong seal": lambda pair, body: bytes(16) + body,
    "a seal of something else": lambda pair, body: pair.sender._seal(body + b"x") + body,
    "nothing": lambda pair, body: b"",
    "short": lambda pair, body: b"abc",
    "a seal alone": lambda pair, body: pair.sender._seal(b"")[:15],
    "too long": lambda pair, body: pair.sender._seal(body) + body + bytes(5000),
}


@pytest.mark.parametrize("kind", FORGED)
def test_what_is_not_sealed_is_dropped(pair: Pair, kind: str) -> None:
    """Without a word, the descriptors it brought are closed, however many, and what comes after it is taken."""
    before = fds()
    body = msgpack.packb(("a", 1, SIZE))
    fd = pair.segment.open_reader()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * 20))]
        stranger.sendmsg([FORGED[kind](pair, body)], control, 0, pair.path)
    os.close(fd)
    pair.send(2)
    pair.receiver.receive()
    assert [("a", 2)] == [*pair.found]
    assert before == fds()


def test_a_process_of_another_job_is_dropped(tmp_path: Path) -> None:
    """It has another key."""
    pair = Pair(tmp_path, b"x" * 32)
    pair.send()
    pair.receiver.receive()
    assert {} == pair.found
    pair.close()


def test_a_smaller_segment_than_announced_is_told(pair: Pair) -> None:
    """Whoever knows the key may still be wrong: an `OSError`, after everything else has been taken."""
    before = fds()
    pair.send(1, 2 * SIZE)
    pair.send(2)
    with pytest.raises(OSError, match="smaller"):
        pair.receiver.receive()
    assert [("a", 2)] == [*pair.found]
    assert before == fds()


def test_a_full_inbox_refuses(pair: Pair) -> None:
    """At once, and takes more when it has been looked at."""
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            pair.send(sent)
            sent += 1
    pair.receiver.receive()
    assert sent == len(pair.found) > 0
    pair.send(sent)
    pair.receiver.receive()
    assert sent + 1 == len(pair.found)


def test_an_inbox_that_is_gone_refuses(pair: Pair) -> None:
    """Its name goes with it."""
    pair.receiver.close()
    assert not os.path.exists(pair.path)
    with pytest.raises(FileNotFoundError):
        pair.send()


def test_a_dead_process_s_inbox_refuses(pair: Pair) -> None:
    """A name that nobody is behind any more, as after SIGKILL."""
    pair.receiver._sock.close()
    with pytest.raises(ConnectionRefusedError):
        pair.send()


def test_an_inbox_cannot_be_made_twice(pair: Pair) -> None:
    """The first one stays as it is."""
    before = fds()
    with pytest.raises(OSError, match="Address already in use"):
        Inbox(pair.path, KEY, lambda owner, number, mapping: None, lambda giver, name, fds: None)
    assert before == fds()
    pair.send()
    pair.receiver.receive()
    assert 1 == len(pair.found)


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Those on open files; put back afterwards."""
    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield found
    resource.setrlimit(resource.RLIMIT_NOFILE, found)


def test_at_the_limit_of_open_files_the_reserve_is_used(pair: Pair, limits: tuple[int, int]) -> None:
    """Again and again, and afterwards there is a reserve again."""
    for number in range(5):
        pair.send(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 + max(map(int, os.listdir("/proc/self/fd"))), limits[1]))
    fillers = []
    with contextlib.suppress(OSError):
        while True:
            fillers.append(os.open("/dev/null", os.O_RDONLY))
    pair.receiver.receive()
    assert 5 == len(pair.found)
    assert pair.receiver._reserve >= 0
    for filler in fillers:
        os.close(filler)


def test_without_a_reserve_it_is_told_and_the_next_one_is_taken(pair: Pair, limits: tuple[int, int]) -> None:
    """What was lost can be sent again; the reserve is back as soon as there is a descriptor for it."""
    pair.send(1)
    pair.receiver._release_reserve()
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    with pytest.raises(OSError, match="a descriptor of shared memory was lost"):
        pair.receiver.receive()
    assert -1 == pair.receiver._reserve
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    pair.send(1)
    pair.receiver.receive()
    assert [("a", 1)] == [*pair.found]
    assert pair.receiver._reserve >= 0


def test_an_error_of_the_socket_ends_the_turn(pair: Pair) -> None:
    """It is raised, and not met again and again for ever."""
    fd = os.dup(pair.receiver.fileno())
    os.close(pair.receiver.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        pair.receiver.receive()
    # Its number may be the reserve's now.
    pair.receiver._release_reserve()
    os.dup2(fd, pair.receiver.fileno())
    os.close(fd)
    pair.send()
    pair.receiver.receive()
    assert 1 == len(pair.found)
