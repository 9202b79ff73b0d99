"""What libraries need to have the members of a mesh of actors work together: who these are, and small messages between them.

The messages go past the mailboxes of actors.

Rules:

* A library *offers* a name in its process; what others post to that name is handed to it at once, in the order in which each of them
  sent it.
* Where nobody offers the name (yet), what is posted is dropped in silence: who comes later introduces itself.
* A `Wire` leads to one process, or to the one that took its place when it was asked for. Nothing on it is bounded: it is for few and
  small messages.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from monarch_async._core.codec import dumps
from monarch_async._runtime.asking import ask
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import SYNC, Message, current_cell, current_message
from monarch_async._runtime.lane import Lane
from monarch_async._runtime.resumed import Resumed
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.stacks import Code, Frames, frames_of, render
from monarch_async.ids import ProcAddress
from monarch_async.mesh import ActorMesh
from monarch_async.shape import Extent, Shape

__all__ = ["Membership", "Runtime", "Wire", "enquire", "is_gone", "offer", "post", "this_membership", "wire_to"]

_LIMIT = 1 << 40
_SERVICE = 0

Wire = Lane


def offer(runtime: Runtime, name: str, function: Callable[..., Any]) -> None:
    """From now on what is posted to `name` is given to `function`, in the runtime's loop; its result, or error, answers an `enquire`."""

    def take(message: Message, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception:
            if not message.request:
                runtime.log.exception("a message to %s could not be handled", name)
            raise

    runtime.service = {**runtime.service, name: take}


def wire_to(runtime: Runtime, address: ProcAddress) -> Wire:
    """The way to another process. Raises nothing: what is posted to one that is gone is dropped."""
    peer = runtime.peer(address).latest()
    return peer.lane(_SERVICE, str(peer.address), peer.address.rank, _LIMIT, _LIMIT)


def post(wires: Iterable[Wire], name: str, *args: Any) -> None:
    """Send the same to several processes, pickled once. Called in the runtime's loop."""
    body, buffers = dumps((args, {}))
    for wire in wires:
        wire.cast(name, 0, body, buffers, None)


async def enquire(runtime: Runtime, address: ProcAddress, name: str, *args: Any, timeout: float) -> Any:
    """Ask what is offered under `name` in a process. Raises `TimeoutError` after so many seconds, `ActorDied`, `AttributeError`."""
    async with asyncio.timeout(timeout):
        return await ask(runtime, runtime.peer(address).latest().address, name, *args)


def is_gone(runtime: Runtime, address: ProcAddress) -> bool:
    """Whether a process has ended and none takes its place, as far as is known here."""
    peer = runtime.peers.get(address.uid)
    return peer is not None and peer.latest().evidence is not None


class Membership(NamedTuple):
    """One life of an actor as a member of its mesh.

    `rank` is its position in `extent`, at spawn; `addresses` and `agents` are the processes of all ranks, then, and those of their hosts.
    """

    runtime: Runtime
    key: int
    name: str
    rank: int
    incarnation: int
    extent: Extent
    addresses: tuple[ProcAddress, ...]
    agents: tuple[ProcAddress, ...]
    cell: Cell

    @property
    def why_over(self) -> str:
        """Why this life is over, or ends; empty while it does not."""
        cell = self.cell
        if cell.identity.incarnation != self.incarnation:
            return "another life of it has begun"
        return cell.evidence.text if cell.evidence is not None else ""

    @property
    def called(self) -> bool:
        """Whether a handler of it is under way, or is to be."""
        cell = self.cell
        return cell.current is not None or bool(cell.overlapping or cell.mailbox)

    def where(self) -> list[str]:
        """Where each handler that runs is, as a stack in words, the innermost call last. One in a thread may be in motion."""
        return [f"{message.endpoint}:\n{render(self._frames(message))}" for message in self._running()]

    def _running(self) -> list[Message]:
        return [message for message in (self.cell.current, *self.cell.overlapping) if message is not None]

    def _frames(self, message: Message) -> Frames:
        cell = self.cell
        if cell.thread is not None and cell.handlers[message.endpoint].kind == SYNC:
            return frames_of(sys._current_frames().get(cell.thread.thread.ident or 0))
        begun = cell._handover
        if begun is not None and message is cell.current:  # the task has not come to it yet
            return [*_awaited(begun._coroutine)][::-1]
        task = message.task or cell.task
        return [*_awaited(task.get_coro())][::-1] if task is not None else []

    def when_over(self, told: Callable[[str], None]) -> None:
        """Call `told` with the reason when this life has ended."""
        over = self.runtime.loop.create_future()
        over.add_done_callback(lambda over: told(over.result()[1].text))
        self.cell.watchers += (over,)

    def other(self, rank: int, address: ProcAddress) -> ActorMesh:
        """A reference to another member, which is, or was last, in the process at `address`."""
        limits = self.runtime.options.mailbox_messages, self.runtime.options.mailbox_bytes
        class_name = self.cell.identity.class_name
        return ActorMesh(self.runtime, self.key, self.name, class_name, (), [address], self.extent, Shape.of(), [rank], limits)


def _awaited(coroutine: Any) -> Iterator[Code]:
    """The calls that a suspended coroutine is in, outermost first."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name
        if frame.f_code is Resumed.__await__.__code__:
            coroutine = frame.f_locals["coroutine"]
        else:
            coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def this_membership() -> Membership | None:
    """Of the actor whose code this is; `None` where it is none's."""
    message = current_message.get()
    cell: Cell | None = message.cell if message is not None else current_cell.get()
    if cell is None or cell.place is None:
        return None
    identity, place = cell.identity, cell.place
    runtime: Any = cell.runtime
    return Membership(
        runtime, cell.key, identity.mesh, identity.rank, identity.incarnation, place.extent, place.addresses, place.agents, cell
    )
