"""The watchdog of a process: a thread that sees whether the event loop comes round, and writes that to the process's slot.

Theory: it looks a few times a second. What the loop's thread is in the middle of it sees by that thread's innermost frame, so an idle
loop is left asleep. Where the loop is in some code, it is asked to call back; until it does, it is *held*, and when that lasts, the stack
is written down too. Which actor and endpoint that is comes from the current task, again from outside: nothing is added to
what a message costs.

Rules:

* The thread only reads what belongs to the loop, by steps that the interpreter's lock makes one, and keeps no frame of others.
* It is a daemon and ends with the loop. While it can't run, because C code holds the interpreter's lock, its silence tells the agent.
* A callback may sit directly in a loop that is written in C, and then shows no frame; so even an idle loop is asked now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import msgpack

from monarch_async._runtime.ages import Ages
from monarch_async._runtime.behavior import CellState
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.chains import story_of
from monarch_async._runtime.context import Message
from monarch_async._runtime.pulse import NOW, STACK, Pulse, Slot
from monarch_async._runtime.roster import Roster
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.stacks import frames_of, offer_dumps, render

__all__ = ["PACE", "Watchdog"]

PACE = 0.25
"""Seconds between two looks; half of that while the loop is held."""
ASK_ANYWAY = 10
"""How many looks at an idle loop until it is asked all the same."""
REFRESH = 0.5
"""Seconds after which the stack of a loop that is still stuck is written down again."""
_IDLE = frozenset((asyncio.Runner.run.__code__, selectors.DefaultSelector.select.__code__))
"""Where the innermost frame of a loop's thread is while it waits for something to happen."""


class Watchdog:
    """Start it on the loop's thread."""

    def __init__(self, runtime: Runtime, slot: Slot) -> None:
        self._runtime = runtime
        self._slot = slot
        self._main = threading.get_ident()
        self._file = offer_dumps()
        self._looks = 0
        self._last = time.monotonic()  # when that was
        self._held = 0.0  # since when the loop has not called back, 0 if it has; set here, cleared by the loop
        self._changed = time.monotonic()
        self._busy = False
        self._began: dict[Message, float] = {}  # the handlers that run, and when each was first seen
        self.ages = Ages(runtime.requests)
        self._stacked = 0.0  # when the stack was written
        self._now: tuple[str, str, str] = "", "", ""  # what the slot says
        self._roster = Roster(slot, runtime.cells)
        runtime.on_cell_added.append(self._roster.add)

    def began(self, message: Message) -> float | None:
        """When the handler of a message was first seen to run, by `time.monotonic`; `None` for one that has not been."""
        return self._began.get(message)

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        runtime, slot = self._runtime, self._slot
        watchdog = threading.get_native_id()
        quiet = False  # what the slot says is that nothing goes on
        while not runtime.loop.is_closed():
            now = time.monotonic()
            frame = sys._current_frames().get(runtime.thread)  # the loop's, or one that makes a step in turn with it
            idle = frame is not None and frame.f_code in _IDLE
            self._looks += 1
            if slot.asked:
                self._write_handlers(now)
                quiet = False
            if quiet and idle and self._looks % ASK_ANYWAY and not runtime.busy:
                self._last = now
                slot.beat(now)  # nothing else is to be told, and each instruction costs when caches are cold
            else:
                began = self._look(now, frame, idle)
                held, busy = self._held, self._busy
                slot.write(Pulse(now, held, self._changed, began, self._stacked, int(busy), 0, self._main, watchdog, self._file))
                quiet = not (held or busy)
            del frame  # or what it holds would live on
            time.sleep(PACE / 2 if self._held else PACE)
        slot.write(Pulse(time.monotonic(), ending=1))

    def _look(self, now: float, frame: FrameType | None, idle: bool) -> float:
        """Judge the loop, and write down what has changed; returns since when that which is shown has been running."""
        if not self._held and not (idle and self._looks % ASK_ANYWAY):
            self._ask(now if idle else self._last + PACE / 2)  # it came to where it is now after the last look, however late this one is
        self._last = now
        self._see_handlers(now)
        self.ages.look(now)
        if self._roster.is_outdated():
            self._post(self._roster.renew)
        held = self._held
        if held and now - held >= PACE:
            self._set_busy(True, now)
            if now - held >= self._runtime.options.stuck_after - PACE / 2 and now - self._stacked >= REFRESH:
                self._write_stack(frame, now)
            cell, message, task = self._held_in()
            endpoint = message.endpoint if message is not None else _outside_messages(cell)
            self._show(str(cell.identity) if cell is not None else "", endpoint, task)
            return held if message is None else min(held, self._began.get(message, held))
        if self._began:
            oldest = min(self._began, key=self._began.__getitem__)
            self._show(str(oldest.cell.identity), oldest.endpoint, "")
            return self._began[oldest]
        self._show("", "", "")
        return 0.0

    def _ask(self, since: float) -> None:
        self._held = since
        self._post(self._answer)

    def _post(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._runtime.loop.call_soon_threadsafe(callback)

    def _answer(self) -> None:
        self._held = 0.0
        self._stacked = 0.0

    def _see_handlers(self, now: float) -> None:
        cells = list(self._runtime.busy)
        running = [message for cell in cells for message in (cell.current, *list(cell.overlapping)) if message is not None]
        self._began = {message: self._began.get(message, now) for message in running}
        if not self._held or now - self._held < PACE:
            self._set_busy(bool(running) or any(cell.mailbox for cell in cells), now)

    def _set_busy(self, busy: bool, now: float) -> None:
        if busy != self._busy:
            self._busy, self._changed = busy, now

    def _held_in(self) -> tuple[Cell | None, Message | None, str]:
        """Whose step the loop is in: the actor, the message that it handles, and the name of the task, as far as there are such."""
        task = asyncio.current_task(self._runtime.loop)
        if task is None:
            return None, None, ""
        for cell in list(self._runtime.cells.values()):
            if cell.task is task:
                return cell, cell.current, task.get_name()
            for message in list(cell.overlapping):
                if message.task is task:
                    return cell, message, task.get_name()
        return None, None, task.get_name()

    def _show(self, actor: str, endpoint: str, task: str) -> None:
        if self._now != (actor, endpoint, task):
            self._now = actor, endpoint, task
            texts = [part.encode(errors="replace")[:120].decode(errors="ignore") for part in self._now]
            self._slot.write_text(NOW, msgpack.packb(texts))

    def _write_handlers(self, now: float) -> None:
        self._see_handlers(now)
        self._stacked = now
        stories = [story_of(message.cell, message, now - began) for message, began in self._began.items()]
        self._slot.write_text(STACK, "\n".join(stories).encode(errors="replace"))
        pulse = self._slot.read()
        self._slot.write(pulse._replace(stacked=now))

    def _write_stack(self, frame: FrameType | None, now: float) -> None:
        self._stacked = now
        self._slot.write_text(STACK, render(frames_of(frame)).encode(errors="replace"))


def _outside_messages(cell: Cell | None) -> str:
    return "__init__" if cell is not None and cell.state is CellState.STARTING else ""
