"""Output of processes as lines: bytes to lines, and equal lines of several ranks to one.

Theory: `LineAssembler` is where bytes come out of a pipe, one per stream. `OutputFolder` is where lines are shown: a line waits up to
`window` seconds for further ranks to print the same, and is then shown once, with the ranks that did.

Rules:

* Order is kept within a rank, its two streams taken together; between ranks it is that of arrival, as far as folding allows.
* No line is lost, and none is held longer than the window.
* Everything is bounded: a line without an end is cut into pieces, and a folder that holds too much shows the oldest first.
* Time is an argument.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Literal, NamedTuple

from monarch_async.errors import fold_ranks

__all__ = ["MAX_LINE", "LineAssembler", "OutputFolder", "Shown", "Stream"]

Stream = Literal["stdout", "stderr"]

MAX_LINE = 64 * 1024
"""Bytes after which a line is cut."""


class LineAssembler:
    """Bytes in, whole lines out, without their ends. What is not UTF-8 is shown as ``\\xNN``.

    A carriage return starts the line over, as on a terminal: of a progress bar the last state is the line. One that runs on is shown
    every `progress` seconds.
    """

    def __init__(self, max_line: int = MAX_LINE, progress: float = 10.0) -> None:
        self._max_line = max_line
        self._progress = progress
        self._rest = b""  # at most: one state of a progress bar, "\r", and less than max_line of the next
        self._last_progress: float | None = None

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines that `data` completes."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = []
        for line in whole:
            lines += self._finish(line)
            self._last_progress = None
        lines += self._show_progress(rest, now)
        return lines

    def close(self) -> list[str]:
        """The line that was never ended, if any."""
        rest, self._rest = self._rest, b""
        return self._finish(rest) if rest else []

    def _finish(self, line: bytes) -> list[str]:
        states = line.split(b"\r")
        last = line if len(states) == 1 else next((state for state in reversed(states) if state.strip()), b"")
        return [_decode(piece) for piece in self._cut(last)]

    def _show_progress(self, rest: bytes, now: float) -> list[str]:
        *states, current = rest.split(b"\r")
        last = next((state for state in reversed(states) if state.strip()), b"")
        lines: list[str] = []
        if last:
            if self._last_progress is None:
                self._last_progress = now
            elif now - self._last_progress >= self._progress:
                self._last_progress = now
                lines += [_decode(piece) for piece in self._cut(last)]
                last = b""
        if len(current) > self._max_line:
            # The beginning of a line this long takes the place of any state before it.
            *pieces, current = self._cut(current)
            lines += [_decode(piece) for piece in pieces]
            last = b""
        self._rest = last[: self._max_line] + b"\r" + current if states else current
        return lines

    def _cut(self, line: bytes) -> list[bytes]:
        """Pieces of at most `max_line` bytes; no character is cut in two."""
        pieces = []
        while len(line) > self._max_line:
            end = self._max_line
            while end > self._max_line - 3 and line[end] & 0xC0 == 0x80:  # a character has at most three such bytes
                end -= 1
            pieces.append(line[:end])
            line = line[end:]
        return [*pieces, line]


def _decode(line: bytes) -> str:
    return line.decode("utf-8", errors="backslashreplace")


class Shown(NamedTuple):
    """A line ready to be printed, and the stream it came from."""

    stream: Stream
    text: str


class _Held(NamedTuple):
    """A line that waits for more ranks, those in the list. `number` grows in the order of arrival."""

    number: int
    stream: Stream
    line: str
    size: int
    deadline: float
    ranks: list[int]


class _Mesh:
    """The lines held for one mesh: oldest first; by text; and for each rank the number of the last one that it is part of."""

    def __init__(self) -> None:
        self.held: deque[_Held] = deque()
        self.by_line: dict[tuple[Stream, str], deque[_Held]] = {}
        self.last: dict[int, int] = {}


class OutputFolder:
    """Equal lines of several ranks within `window` seconds are shown once, as ``[mesh 0–6,8] text``.

    `max_held` bounds the lines held for a mesh. A line that every rank has printed waits for nobody.
    """

    def __init__(self, window: float, max_held: int = 10_000) -> None:
        self._window = window
        self._max_held = max_held
        self._meshes: dict[str, _Mesh] = {}
        self._numbers = count(1)

    def add(self, mesh: str, rank: int, size: int, stream: Stream, line: str, now: float) -> None:
        """A line of one of the `size` ranks of `mesh` came in."""
        state = self._meshes.setdefault(mesh, _Mesh())
        same = state.by_line.setdefault((stream, line), deque())
        after = state.last.get(rank, 0)
        held = next((held for held in same if held.number > after), None)
        if held is None:
            held = _Held(next(self._numbers), stream, line, size, now + self._window, [])
            same.append(held)
            state.held.append(held)
        held.ranks.append(rank)
        state.last[rank] = held.number

    def poll(self, now: float) -> list[Shown]:
        """What is to be shown by now."""
        return [shown for name in list(self._meshes) for shown in self._take(name, now)]

    def flush(self) -> list[Shown]:
        """Everything that is held."""
        return self.poll(float("inf"))

    def next_deadline(self) -> float | None:
        """When to call `poll` next, unless a line comes in before; `None`: nothing is held."""
        return min((state.held[0].deadline for state in self._meshes.values()), default=None)

    def _take(self, name: str, now: float) -> list[Shown]:
        state = self._meshes[name]
        shown = []
        while state.held:
            held = state.held[0]
            if len(held.ranks) < held.size and held.deadline > now and len(state.held) <= self._max_held:
                break
            state.held.popleft()
            same = state.by_line[held.stream, held.line]
            same.popleft()
            if not same:
                del state.by_line[held.stream, held.line]
            shown.append(Shown(held.stream, f"[{name} {fold_ranks(held.ranks)}] {held.line}"))
        if not state.held:
            del self._meshes[name]
        return shown
