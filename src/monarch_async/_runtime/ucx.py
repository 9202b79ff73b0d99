"""The backend ``ucx``: both ends of a copy are posted to UCX, which moves the bytes.

The accessor tells the owner by a message which parts and under which tags. The owner posts its ends and answers, then the accessor posts
its own; so nothing is posted for a copy that is refused. A write is done when the owner says so. Where an accessor can't post its end the
owner is told, or its own would wait for ever, and hold the memory.

It is never chosen by itself, only by name: what travels over it is not covered by the key of the job (see `fabric`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from monarch_async._channel.fabric import Fabric, finished
from monarch_async._channel.memory import view_of
from monarch_async._runtime.asking import ask
from monarch_async._runtime.buffers import Buffers, Part, Registration
from monarch_async._runtime.context import Message
from monarch_async._runtime.direct import Unusable
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import MonarchError, RDMAError
from monarch_async.ids import ProcAddress

__all__ = ["Ucx"]

SLICE = 16 << 20
"""Bytes in one request to UCX."""
WINDOW = 4
"""Slices of a batch that are under way at the same time."""


class _Serving(NamedTuple):
    """The owner's end of a copy: who has asked for it; and its task, whose result is what went wrong."""

    uid: str
    task: asyncio.Task[str]


class Ucx:
    """Both halves, in one process."""

    def __init__(self, runtime: Runtime, buffers: Buffers) -> None:
        self._runtime = runtime
        self._buffers = buffers
        self._fabric: Fabric | None = None
        self._peers: dict[str, bytes] = {}  # addresses on the fabric, by uid
        self._serving: dict[int, _Serving] = {}  # by tag: what accessors have asked for, until it is done; of what failed, until it is told
        runtime.on_peer_gone.append(self._peer_gone)

    @property
    def table(self) -> Mapping[str, Callable[..., Any]]:
        return {"buffer_ucx": self.meet, "buffer_ucx_post": self.post, "buffer_ucx_wait": self.wait, "buffer_ucx_end": self.end}

    def _start(self) -> Fabric:
        if self._fabric is None:
            self._fabric = Fabric()
        return self._fabric

    async def open(self, owner: ProcAddress, jobs: Sequence[Any], alone: bool) -> Callable[[], Coroutine[Any, Any, None]]:
        """See `transfers.Backend`."""
        try:
            fabric = self._start()
            self._peers[owner.uid] = await ask(self._runtime, owner, "buffer_ucx", self._runtime.me.uid, fabric.address)
        except ImportError as error:
            raise Unusable(f"UCX is needed at both ends, and one has none ({error}): pip install 'monarch-async[ucx]'") from error
        await ask(self._runtime, owner, "buffer_open", [job.ref.key for job in jobs], False)
        return lambda: self._run(fabric, owner, jobs)

    async def _run(self, fabric: Fabric, owner: ProcAddress, jobs: Sequence[Any]) -> None:
        under_way: deque[asyncio.Task[None]] = deque()
        try:
            for job in jobs:
                for start in range(0, job.size, SLICE):
                    if len(under_way) == WINDOW:
                        await under_way.popleft()
                    size = min(SLICE, job.size - start)
                    part = (job.ref.key, job.offset + start, size)
                    copy = self._copy(fabric, owner, job.write, part, view_of(job.memory, start, size))
                    under_way.append(asyncio.ensure_future(copy))
            while under_way:
                await under_way.popleft()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _copy(self, fabric: Fabric, owner: ProcAddress, write: bool, part: Part, view: memoryview) -> None:
        tag = int.from_bytes(os.urandom(8), "little")
        posted = ask(self._runtime, owner, "buffer_ucx_post", self._runtime.me.uid, write, part, tag)
        try:
            await asyncio.shield(posted)
        except asyncio.CancelledError:
            # The owner's end is posted, or will be: it shall not wait for this one for ever.
            room = view if write else memoryview(bytearray(len(view)))
            self._runtime.tasks.start(self._answer(fabric, owner, write, tag, room, posted), name="UCX: ending what was given up")
            raise
        await self._post(fabric, owner, write, tag, view)
        if write:
            await ask(self._runtime, owner, "buffer_ucx_wait", tag)

    async def _post(self, fabric: Fabric, owner: ProcAddress, write: bool, tag: int, view: memoryview) -> None:
        try:
            peer = self._peers[owner.uid]
            request = fabric.send(peer, tag, view) if write else fabric.receive(peer, tag, view)
            await finished(request, lambda: fabric.forget(peer))
        except Exception as error:
            await ask(self._runtime, owner, "buffer_ucx_end", tag)  # if its process is gone, that is why
            raise RDMAError(f"UCX: {error}") from error

    async def _answer(
        self, fabric: Fabric, owner: ProcAddress, write: bool, tag: int, view: memoryview, posted: asyncio.Future[Any]
    ) -> None:
        with contextlib.suppress(MonarchError):  # it was refused, or its process is gone
            await posted
            await self._post(fabric, owner, write, tag, view)
            await ask(self._runtime, owner, "buffer_ucx_end", tag)

    # What accessors ask for.

    def meet(self, message: Message, uid: str, address: bytes) -> bytes:
        """Where another process is on the fabric; returns where this one is."""
        self._peers[uid] = address
        return self._start().address

    def post(self, message: Message, uid: str, write: bool, part: Part, tag: int) -> None:
        """Take part in a copy, from now on."""
        key, offset, size = part
        registration = self._buffers.find(key, write=write, end=offset + size)
        fabric, peer = self._start(), self._peers.get(uid)
        if peer is None:
            raise RDMAError(f"UCX: process {uid} is gone")
        view = view_of(registration.memory, offset, size)
        request = fabric.receive(peer, tag, view) if write else fabric.send(peer, tag, view)
        registration.enter()
        task = self._runtime.tasks.start(_serve(registration, request, lambda: fabric.forget(peer)), name="UCX")
        self._serving[tag] = _Serving(uid, task)
        task.add_done_callback(lambda done: self._served(tag, write, done))

    def _served(self, tag: int, write: bool, task: asyncio.Task[str]) -> None:
        if not write or task.cancelled() or not task.result():
            self._serving.pop(tag, None)

    async def wait(self, message: Message, tag: int) -> None:
        """Until what was written is in memory."""
        serving = self._serving.get(tag)
        if serving is None:
            return
        await asyncio.wait([serving.task])
        self._serving.pop(tag, None)
        why = "it was given up" if serving.task.cancelled() else serving.task.result()
        if why:
            raise RDMAError(f"UCX: {why}")

    def end(self, message: Message, tag: int) -> None:
        """The accessor's end is not there, or nobody wants to know any more."""
        serving = self._serving.pop(tag, None)
        if serving is not None:
            serving.task.cancel()

    def _peer_gone(self, peer: Peer) -> None:
        address = self._peers.pop(peer.address.uid, None)
        if address is not None and self._fabric is not None:
            self._fabric.forget(address)
        for tag in [tag for tag, serving in self._serving.items() if serving.uid == peer.address.uid]:
            del self._serving[tag]

    def close(self) -> None:
        """Let go of the fabric."""
        if self._fabric is not None:
            self._fabric.close()


async def _serve(registration: Registration, request: Any, abandon: Callable[[], None]) -> str:
    try:
        await finished(request, abandon)
    except Exception as error:  # UCX's own are derived from nothing else
        return str(error) or type(error).__name__
    finally:
        registration.leave()
    return ""
