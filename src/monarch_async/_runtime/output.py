"""Reads what a process prints: lines for those who watch, and the last bytes in full for those who ask later.

Rules: one bounded read per stream and turn of the loop, so that a process that prints without end delays nobody else's output by more
than that; what is not read stays in the pipe, and holds up its writer only. The end of both pipes, not the process's end, is the end of
its output: what it left in them is still read.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

from monarch_async._core.lines import LineAssembler, Stream

__all__ = ["OutputReader", "Ring"]

_READ = 64 * 1024
_CHUNK = 4 * 1024


class Ring:
    """The last `size` bytes of what was appended."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._chunks: deque[bytearray] = deque()
        self._held = 0
        self.total = 0  # bytes ever appended

    def append(self, data: bytes) -> None:
        self.total += len(data)
        data = data[-self._size :]
        self._held += len(data)
        # Small writes share a chunk, or each would cost more than it holds.
        if self._chunks and len(self._chunks[-1]) < _CHUNK:
            self._chunks[-1] += data
        else:
            self._chunks.append(bytearray(data))
        while (excess := self._held - self._size) > 0:
            drop = min(excess, len(self._chunks[0]))
            del self._chunks[0][:drop]
            self._held -= drop
            if not self._chunks[0]:
                self._chunks.popleft()

    def since(self, total: int, limit: int) -> tuple[bytes, int]:
        """What was appended after the first `total` bytes, at most `limit` of it, and the total with that.

        If some of it is lost already, from the first whole line on that is held.
        """
        start = max(total, self.total - self._held)
        pieces, wanted = deque[bytes](), self.total - start
        for chunk in reversed(self._chunks):
            if wanted <= 0:
                break
            pieces.appendleft(bytes(chunk[-wanted:]))
            wanted -= len(chunk)
        data = b"".join(pieces)
        lost = data.find(b"\n") + 1 if start > total else 0
        data = data[lost : lost + limit]
        return data, start + lost + len(data)

    def text(self) -> str:
        """What is held, as it was written; if the beginning is lost, from the first whole line on where there is one."""
        data = b"".join(self._chunks)
        if self.total > len(data):
            data = data[data.find(b"\n") + 1 :]
        return data.decode("utf-8", errors="backslashreplace")


class OutputReader:
    """Watches the two output pipes of a process until both have ended or `close()` is called.

    Args:
        loop: drives the reading.
        stdout, stderr: non-blocking descriptors; they stay their owner's, who closes them after `finished` or `close()`.
        on_lines: called with the stream and one or more lines.
        keep: how many bytes of both streams together `text()` keeps.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stdout: int,
        stderr: int,
        on_lines: Callable[[Stream, list[str]], object],
        *,
        keep: int,
    ) -> None:
        self._loop = loop
        self._on_lines = on_lines
        self._ring = Ring(keep)
        self._open: dict[Stream, int] = {"stdout": stdout, "stderr": stderr}
        self._assemblers: dict[Stream, LineAssembler] = {"stdout": LineAssembler(), "stderr": LineAssembler()}
        self._paused = False
        self.finished: asyncio.Future[None] = loop.create_future()
        self.resume()

    def text(self) -> str:
        """The last output in full, both streams in the order they were read."""
        return self._ring.text()

    def since(self, total: int, limit: int) -> tuple[bytes, int]:
        """What has come after the first `total` bytes, as far as it is kept, at most `limit` of it; and the total with that."""
        return self._ring.since(total, limit)

    @property
    def total(self) -> int:
        """Bytes read so far."""
        return self._ring.total

    def pause(self) -> None:
        """Read no more for now: the process will have to wait when its pipes are full."""
        self._paused = True
        for fd in self._open.values():
            self._loop.remove_reader(fd)

    def resume(self) -> None:
        """Read again."""
        self._paused = False
        for stream, fd in self._open.items():
            self._loop.add_reader(fd, self._read, stream, fd)

    def close(self) -> None:
        """Stop reading; an unfinished line is handed on. Nothing happens if it has ended."""
        for stream in list(self._open):
            self._end(stream)

    def _read(self, stream: Stream, fd: int) -> None:
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return
        if not data:
            self._end(stream)
            return
        self._ring.append(data)
        if lines := self._assemblers[stream].feed(data, self._loop.time()):
            self._on_lines(stream, lines)

    def _end(self, stream: Stream) -> None:
        self._loop.remove_reader(self._open.pop(stream))
        if lines := self._assemblers[stream].close():
            self._on_lines(stream, lines)
        if not self._open and not self.finished.done():
            self.finished.set_result(None)
