"""Descriptors given from process to process: by whom, under which name, and what becomes of those that nobody wants."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_async._channel.descriptors import Inbox
from monarch_async._channel.gifts import MOST, Gifts
from monarch_async._channel.segment import Segment, Window

KEY = b"k" * 32


@pytest.fixture
def gifts() -> Iterator[Gifts]:
    there = Gifts()
    yield there
    there.close()


def closed(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


def never() -> bool:
    return False


def test_a_gift_arrives_with_all_its_descriptors(tmp_path: Path, gifts: Gifts) -> None:
    """A segment and an eventfd, in one gift: the segment shows what its owner writes afterwards, and the bell rings on both sides."""
    inbox = Inbox(str(tmp_path / "inbox"), KEY, lambda *segment: None, gifts.add)
    other = Inbox(str(tmp_path / "other"), KEY, lambda *segment: None, gifts.add)
    segment, bell = Segment(1, 4096), os.eventfd(0)
    reader = segment.open_reader()
    other.give(str(tmp_path / "inbox"), "giver", "a name", [reader, bell])
    inbox.receive()
    fds = gifts.take("giver", "a name", 0.0, never)
    assert fds is not None
    window = Window(fds[0])
    segment.write(8, b"later")
    assert b"later" == ctypes.string_at(window.address + 8, 5)
    os.eventfd_write(fds[1], 3)
    assert 3 == os.eventfd_read(bell)
    assert gifts.take("giver", "a name", 0.0, never) is None
    for fd in (reader, bell, fds[1]):
        os.close(fd)
    inbox.close()
    other.close()


def test_a_gift_of_another_job_is_not_taken(tmp_path: Path, gifts: Gifts) -> None:
    """What is sealed with another key is closed, and nobody hears of it."""
    inbox = Inbox(str(tmp_path / "inbox"), KEY, lambda *segment: None, gifts.add)
    other = Inbox(str(tmp_path / "other"), b"o" * 32, lambda *segment: None, gifts.add)
    before = set(os.listdir("/proc/self/fd"))
    bell = os.eventfd(0)
    other.give(str(tmp_path / "inbox"), "giver", "a name", [bell])
    os.close(bell)
    inbox.receive()
    assert gifts.take("giver", "a name", 0.0, never) is None
    assert before == set(os.listdir("/proc/self/fd"))
    inbox.close()
    other.close()


def test_who_takes_waits_for_the_giver(gifts: Gifts) -> None:
    """`take` returns when the gift comes, and when `over` begins to say so."""
    bell, over = os.eventfd(0), threading.Event()
    found: list[list[int] | None] = []
    waiting = threading.Thread(target=lambda: found.append(gifts.take("giver", "a name", 30.0, never)))
    waiting.start()
    gifts.add("giver", "a name", [bell])
    waiting.join()
    assert [[bell]] == found
    os.close(bell)
    waiting = threading.Thread(target=lambda: found.append(gifts.take("giver", "none", 30.0, over.is_set)))
    waiting.start()
    over.set()
    gifts.look_again()
    waiting.join()
    assert found[1] is None


@pytest.mark.parametrize("way", ["forget", "refuse", "refuse before", "close", "close before", "again", "too many"])
def test_what_nobody_takes_is_closed(gifts: Gifts, way: str) -> None:
    """When its giver is gone, its name refused, the process ends, another one comes in its place, or too many do."""
    bell, others = os.eventfd(0), []
    if way == "refuse before":
        gifts.refuse("a name")
    if way == "close before":
        gifts.close()
    gifts.add("giver", "a name", [bell])
    if way == "forget":
        gifts.forget("another")
        assert not closed(bell)
        gifts.forget("giver")
    elif way == "refuse":
        gifts.refuse("a name")
    elif way == "close":
        gifts.close()
    elif way == "again":
        others.append(os.eventfd(0))
        gifts.add("giver", "a name", others)
    elif way == "too many":
        for index in range(MOST):
            gifts.add("giver", f"name {index}", [])
    assert closed(bell)
    assert not any(map(closed, others))
