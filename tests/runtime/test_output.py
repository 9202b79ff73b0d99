"""`OutputReader` on real pipes, and its ring."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest

from monarch_async._core.lines import MAX_LINE, Stream
from monarch_async._runtime.output import OutputReader, Ring


class Pipes:
    """The ends of a process's output: `write` is the process, `lines` what the reader handed on."""

    def __init__(self) -> None:
        self.reads, self.writes = zip(*(os.pipe() for _ in range(2)), strict=True)
        for fd in self.reads:
            os.set_blocking(fd, False)
        self.lines: list[tuple[Stream, str]] = []
        self.came = asyncio.Event()

    def reader(self, keep: int = 1 << 20) -> OutputReader:
        return OutputReader(asyncio.get_running_loop(), self.reads[0], self.reads[1], self.take, keep=keep)

    def take(self, stream: Stream, lines: list[str]) -> None:
        self.lines += [(stream, line) for line in lines]
        self.came.set()

    def end(self) -> None:
        for fd in self.writes:
            os.close(fd)
        self.writes = ()


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    pipes = Pipes()
    yield pipes
    pipes.end()
    for fd in pipes.reads:
        os.close(fd)


async def test_lines_of_both_streams(pipes: Pipes) -> None:
    """Whole lines come as they are written, the unfinished one when the pipes end, and `text()` has the bytes as they were."""
    reader = pipes.reader()
    out, err = pipes.writes
    os.write(out, b"one\ntwo \xe2\x82\xac\nunfini")
    os.write(err, b"warning\r\n")
    os.write(out, b"shed \xff")
    pipes.end()
    await reader.finished
    assert ["one", "two €", "unfinished \\xff"] == [line for stream, line in pipes.lines if stream == "stdout"]
    assert ["warning"] == [line for stream, line in pipes.lines if stream == "stderr"]
    assert len("one\ntwo €\nunfinished \\xffwarning\r\n") == len(reader.text())


async def test_noisy_process_does_not_starve_the_loop(pipes: Pipes) -> None:
    """While one pipe is always full, the loop's other work goes on between bounded reads."""
    reader = pipes.reader(keep=1000)
    out = pipes.writes[0]
    os.set_blocking(out, False)
    line = b"x" * 99 + b"\n"
    longest = 0.0
    written = 0
    while written < 4 << 20:
        try:
            written += os.write(out, line * 600)
        except BlockingIOError:
            start = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - start)
    pipes.end()
    await reader.finished
    assert written == reader.total == sum(len(text) + 1 for _, text in pipes.lines)
    assert longest < 0.25
    assert len(reader.text()) <= 1000


async def test_pause_holds_the_writer_up(pipes: Pipes) -> None:
    """A paused reader leaves everything in the pipe, and has it after `resume()`."""
    reader = pipes.reader()
    reader.pause()
    os.write(pipes.writes[0], b"later\n")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [] == pipes.lines
    reader.resume()
    pipes.end()
    await reader.finished
    assert [("stdout", "later")] == pipes.lines


async def test_close_hands_on_the_unfinished_line(pipes: Pipes) -> None:
    """Closing while the process still has its pipes shows what was read, and ends the reading."""
    reader = pipes.reader()
    os.write(pipes.writes[0], b"whole\nhalf a li")
    await pipes.came.wait()
    reader.close()
    reader.close()
    assert [("stdout", "whole"), ("stdout", "half a li")] == pipes.lines
    assert reader.finished.done()


async def test_endless_line(pipes: Pipes) -> None:
    """Bytes without an end of line come in pieces; nothing of them is lost."""
    reader = pipes.reader()
    os.set_blocking(pipes.writes[0], False)
    left = memoryview(b"y" * (3 * MAX_LINE + 5))
    while left:
        try:
            left = left[os.write(pipes.writes[0], left) :]
        except BlockingIOError:
            await asyncio.sleep(0)
    pipes.end()
    await reader.finished
    assert [MAX_LINE] * 3 + [5] == [len(line) for _, line in pipes.lines]


def test_ring_keeps_the_end() -> None:
    """The ring holds at most its size, and after a loss its text begins with a whole line."""
    ring = Ring(20)
    for number in range(100):
        ring.append(b"line %d\n" % number)
    assert "line 98\nline 99\n" == ring.text()
    assert 790 == ring.total
    ring.append(b"z" * 50)
    assert "z" * 20 == ring.text()
