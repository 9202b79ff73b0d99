"""Data connections: one-sided copies between hosts over connections of their own, moved by threads straight from and to memory.

What is copied, and whether it may be, is said in messages, as ever; over a data connection pass only the bytes (`pieces`). So neither do
calls wait behind them, nor does the loop touch them. The accessor dials up to `CHANNELS` for an owner when it has much to copy, and keeps
them. Who accepts one knows it by the number in its hello, which the accessor names in its requests.

Rules:

* Authenticated by the same handshake as links, sealed in the same way; not used where links have TLS. A visitor has none.
* One request at a time is on its way over one connection, of up to `REQUEST` bytes. Anything that goes wrong is the end of the connection,
  never of the link. A copy whose connection was lost is made again from the start, by messages (`Lost`). Where a seal was wrong, somebody
  may have written to the memory while it was being sent: the request is made again, and from then on that owner's bytes are copied first.
* Each side runs up to `THREADS` threads for what it copies, and as many for what others copy. An accessor has its thread before it asks,
  so that no owner's thread waits for one that is not there.
* Whoever awaits a copy goes on only when its thread has left the memory; to cancel it, or to drop the buffer, is to break the connection.
* While faults are injected into links (`wrap_connection`) everything goes over these.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from monarch_async._channel.dial import connect, give_up_silence
from monarch_async._channel.memory import Memory, view_of
from monarch_async._channel.pieces import DataSocket
from monarch_async._channel.stream import Stream, authenticate, open_stream
from monarch_async._core.handshake import NONCE_BYTES, Established, Handshake
from monarch_async._core.seal import SEAL_SIZE, offer
from monarch_async._runtime.asking import ask
from monarch_async._runtime.buffers import Buffers, Part
from monarch_async._runtime.connect import DATA, address_fields, address_of, data_takers, patience, seals_of, where
from monarch_async._runtime.context import Message
from monarch_async._runtime.copying import run_all, settle
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import ActorDied, BufferGone, ChannelError, MonarchError, ProtocolError, RDMAError
from monarch_async.ids import ProcAddress

__all__ = ["Copy", "DataConnections", "Lost"]

REQUEST = 64 << 20
PARTS = 1024
"""So many bytes, and parts, are asked for at once: others that copy between the same two processes come between."""
SPLIT = 16 << 20
"""More than so many bytes go over all connections that there are for an owner."""
THREADS = 4
_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
CHANNELS = 2 if _CPUS > 2 else 1
"""Connections for one owner: one thread alone can't seal and copy all that a network takes. Two on two cores leave none for the loops."""
FEW = 16
"""Of so many registrations it is looked before each piece whether their memory is what it was; of more, before each request."""


class Lost(Exception):
    """The connection is lost, or could not be had; the copy may be made in another way."""


class _Spoiled(Exception):
    """A seal was wrong."""


class Copy(NamedTuple):
    """`size` bytes of registered memory from `offset` on, and the memory here, from `start` on."""

    key: int
    offset: int
    size: int
    memory: Memory
    start: int = 0


class Channel:
    """One data connection; `peer` is the uid of the process at the other end."""

    def __init__(self, pipe: DataSocket, peer: str, number: int) -> None:
        self.pipe = pipe
        self.peer = peer
        self.number = number
        self.lock = asyncio.Lock()  # held for a request
        self.broken = False
        self.busy = False  # a thread is in it

    def shut(self) -> None:
        """Of no use any more: a thread that is in it gets an error."""
        self.broken = True
        self.pipe.shut()
        if not self.busy:
            self.pipe.close()

    def check(self) -> None:
        """Raise an error if it was shut; in any thread. What has come before can still be read from the socket."""
        if self.broken:
            raise ConnectionResetError("the connection was shut")

    async def run(self, threads: ThreadPoolExecutor, work: Callable[[], None]) -> None:
        """Have a thread do it. Returns, or raises, when no thread is in it any more; what fails or is cancelled shuts it."""
        self.check()
        job = threads.submit(work)
        self.busy = True
        running = asyncio.wrap_future(job)
        try:
            await asyncio.wait([running])
            running.result()
        except BaseException:
            self.shut()
            if not job.cancel():
                await settle([running])
            raise
        finally:
            self.busy = False
            if self.broken:
                self.pipe.close()


class DataConnections:
    """Those of one runtime. Used on its loop only; `table` is what accessors ask of owners."""

    def __init__(self, runtime: Runtime, buffers: Buffers) -> None:
        self._runtime = runtime
        self._buffers = buffers
        self._dialed: dict[tuple[str, int], asyncio.Task[Channel | None]] = {}  # by the uid of the owner, and which of its channels
        self._refused: set[str] = set()  # owners that have none
        self._changing: set[str] = set()  # owners whose memory, or what was written to it, may change while it is sent
        self._accepted: dict[tuple[str, int], Channel] = {}  # by the accessor's uid, and its number
        self._slots = asyncio.Semaphore(THREADS)
        self._copying = ThreadPoolExecutor(THREADS, "monarch_async data")
        self._serving = ThreadPoolExecutor(THREADS, "monarch_async serve")
        self._closed = False
        data_takers[runtime] = self._take
        runtime.on_peer_gone.append(self._peer_gone)

    @property
    def table(self) -> Mapping[str, Callable[..., Any]]:
        return {"buffer_send": partial(self._serve, False), "buffer_receive": partial(self._serve, True)}

    def close(self) -> None:
        """Break all connections and let the threads end."""
        self._closed = True
        data_takers.pop(self._runtime, None)
        for channel in [*self._accepted.values(), *filter(None, map(_made, self._dialed.values()))]:
            channel.shut()
        self._accepted.clear()
        self._copying.shutdown(wait=False)
        self._serving.shutdown(wait=False)

    def reaches(self, owner: ProcAddress) -> bool:
        """Whether it is worth a try."""
        runtime = self._runtime
        alone = self._closed or runtime.tls_client is not None or runtime.wrap_connection is not None or runtime.network_key is None
        return not alone and owner.host != runtime.me.host and owner.uid not in self._refused

    # The accessor.

    async def copy(self, owner: ProcAddress, write: bool, copies: Sequence[Copy]) -> None:
        """Copy to, or from, memory here. Raises what the owner says, and `Lost`."""
        total = sum(copy.size for copy in copies)
        channels = CHANNELS if total > SPLIT else 1
        requests = _requests(copies, min(REQUEST, total // channels + 1))

        async def work(index: int) -> None:
            for request in requests:
                try:
                    await self._over(index, owner, write, request)
                except _Spoiled:
                    await self._over(index, owner, write, request)

        if channels > 1:
            await run_all([work(index) for index in range(channels)])
        else:
            await work(0)

    async def _over(self, index: int, owner: ProcAddress, write: bool, copies: Sequence[Copy]) -> None:
        while True:
            channel = await self._channel(owner, index)
            async with channel.lock, self._slots:
                if not channel.broken:  # by who had it before
                    await self._request(channel, owner, write, copies)
                    return

    async def _request(self, channel: Channel, owner: ProcAddress, write: bool, copies: Sequence[Copy]) -> None:
        parts = [(copy.key, copy.offset, copy.size) for copy in copies]
        views = [view_of(copy.memory, copy.start, copy.size) for copy in copies]
        copied, pipe = owner.uid in self._changing, channel.pipe
        answer = ask(self._runtime, owner, "buffer_receive" if write else "buffer_send", channel.number, parts, copied)

        def answered(done: asyncio.Future[Any]) -> None:
            if done.cancelled() or done.exception() is not None:
                channel.shut()  # so that the thread does not wait for what never comes

        answer.add_done_callback(answered)
        try:
            work = partial(pipe.send, views, channel.check, copied) if write else partial(pipe.receive, views, channel.check)
            await channel.run(self._copying, work)
            if write:
                await answer
        except asyncio.CancelledError:
            channel.shut()
            raise
        except (MonarchError, OSError) as error:
            await asyncio.wait([answer])
            why = answer.exception()
            if isinstance(why, RDMAError | ActorDied):
                raise why from None
            if not copied and isinstance(why if write else error, ProtocolError):
                self._changing.add(owner.uid)
                raise _Spoiled from error
            raise Lost(f"the data connection with {owner} was lost: {error}") from error

    async def _channel(self, owner: ProcAddress, index: int) -> Channel:
        dialing = self._dialed.get((owner.uid, index))
        if dialing is None or (dialing.done() and ((made := _made(dialing)) is None or made.broken)):
            dialing = self._dialed[owner.uid, index] = self._runtime.tasks.start(self._dial(owner), name=f"connecting to {owner} for data")
        channel = await asyncio.shield(dialing)
        if channel is None:
            raise Lost(f"no data connection with {owner} could be made")
        return channel

    async def _dial(self, owner: ProcAddress) -> Channel | None:
        runtime, options = self._runtime, self._runtime.options
        number = int.from_bytes(os.urandom(7), "little")
        hello = runtime.hello | address_fields(runtime.me) | offer() | {DATA: number}
        nonce = os.urandom(NONCE_BYTES)
        assert runtime.network_key is not None
        try:
            sock = await connect(runtime.me, where(runtime, owner), patience(options))
            stream = await open_stream(sock, server=False, patience=patience(options))
            handshake = Handshake.dial(
                runtime.network_key, hello, nonce, runtime.loop.time(), timeout=options.handshake_timeout, limit=options.handshake_bytes
            )
            done = await authenticate(stream, handshake)
            try:
                if done.peer.get("uid") != owner.uid or not done.welcome.get("known"):
                    self._refused.add(owner.uid)
                    raise ChannelError(f"{owner} takes no data connections")
                seals = seals_of(done)
                greeting = done.rest
                async with asyncio.timeout(options.handshake_timeout):
                    while len(greeting) < SEAL_SIZE:
                        if not (more := await stream.read()):
                            raise ChannelError("the connection was closed")
                        greeting += more
                pipe = DataSocket(await stream.detach(), seals)
            except BaseException:
                stream.abort()
                raise
        except (MonarchError, OSError) as error:
            runtime.log.info("no data connection with %s: %s", owner, error)
            return None
        channel = Channel(pipe, owner.uid, number)
        try:
            pipe.check_greeting(greeting)
        except ProtocolError as error:
            runtime.log.warning("no data connection with %s: %s", owner, error)
            channel.shut()
            return None
        return channel

    # The owner.

    async def _take(self, done: Established, stream: Stream) -> None:
        """A process has dialed one."""
        address, number = address_of(done.peer), done.peer[DATA]
        if address is None or type(number) is not int:
            stream.abort()
            return
        try:
            sock = await stream.detach()
        except OSError:
            return
        finally:
            stream.abort()
        give_up_silence(sock, patience(self._runtime.options))  # a thread that waits for bytes must hear that nobody sends them any more
        pipe = DataSocket(sock, seals_of(done))
        channel = Channel(pipe, address.uid, number)
        if self._closed:
            channel.shut()
            return
        for key, other in list(self._accepted.items()):  # what was given up when nothing was under way here
            if key[0] == address.uid and not other.busy and other.pipe.over:
                self._accepted.pop(key).shut()
        self._accepted[address.uid, number] = channel
        try:
            pipe.greet()
        except OSError:
            channel.shut()

    async def _serve(self, write: bool, message: Message, number: int, parts: Sequence[Part], copied: bool) -> None:
        """Send parts of memories over a connection, or receive them; the answer comes when that is done."""
        accessor = self._runtime.address_of(message.origin)
        channel = self._accepted.get((accessor.uid if accessor is not None else "", number))
        if channel is None:
            raise ChannelError("no such data connection")
        try:
            async with channel.lock:
                await self._move(channel, write, parts, copied)
                if channel.pipe.over:  # given up before this was known to be done
                    self._forget(channel)
        except BaseException:
            self._forget(channel)  # the accessor waits for bytes, or sends some
            raise

    def _forget(self, channel: Channel) -> None:
        channel.shut()
        self._accepted.pop((channel.peer, channel.number), None)

    async def _move(self, channel: Channel, write: bool, parts: Sequence[Part], copied: bool) -> None:
        found = [self._buffers.find(key, write=write, end=offset + size) for key, offset, size in parts]
        views = [view_of(user.memory, offset, size) for user, (_, offset, size) in zip(found, parts, strict=True)]
        users = set(found)

        def may() -> None:
            channel.check()
            if any(user.revoked for user in users):
                raise BufferGone("it was dropped meanwhile")
            if len(users) <= FEW and (why := next(filter(None, (user.memory.check() for user in users)), "")):
                raise BufferGone(why)

        for user in users:
            user.enter()
            user.stops.add(channel.shut)
        try:
            pipe = channel.pipe
            work = partial(pipe.receive, views, may) if write else partial(pipe.send, views, may, copied)
            await channel.run(self._serving, work)
        finally:
            for user in users:
                user.stops.discard(channel.shut)
                user.leave()

    def _peer_gone(self, peer: Peer) -> None:
        uid = peer.address.uid
        self._refused.discard(uid)
        self._changing.discard(uid)
        for key in [key for key in self._accepted if key[0] == uid]:
            self._accepted.pop(key).shut()
        for which in [which for which in self._dialed if which[0] == uid]:
            if (channel := _made(self._dialed.pop(which))) is not None:
                channel.shut()


def _made(dialing: asyncio.Task[Channel | None]) -> Channel | None:
    """What has come of it."""
    return dialing.result() if dialing.done() and not dialing.cancelled() and dialing.exception() is None else None


def _requests(copies: Sequence[Copy], limit: int) -> Iterator[list[Copy]]:
    """Copies of up to `limit` bytes, in all."""
    request: list[Copy] = []
    room = limit
    for copy in copies:
        done = 0
        while done < copy.size:
            taken = min(copy.size - done, room)
            request.append(Copy(copy.key, copy.offset + done, taken, copy.memory, copy.start + done))
            done, room = done + taken, room - taken
            if not room or len(request) == PARTS:
                yield request
                request, room = [], limit
    if request:
        yield request
