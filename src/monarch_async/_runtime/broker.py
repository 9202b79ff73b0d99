"""The agent's switchboard: every connection to a process of this host comes in here and is handed on.

A connection names the process it wants. One that runs gets the socket, as a descriptor over its control socket; one that is being started
gets it when it is up; for one that is gone the answer says how it ended. A dying process is waited for, so that the answer has the
evidence: its sockets close a moment before the kernel tells its parent.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from monarch_async._channel.dial import PASSED, Route, peer_is_me, read_route, refuse
from monarch_async._core.events import Evidence
from monarch_async._runtime.connect import accept
from monarch_async._runtime.control import CONNECTION, ControlWriter
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import ChannelError

__all__ = ["Broker", "Target"]

DYING = 2.0
"""Seconds that a process may take from closing its sockets to being reaped."""
REMEMBERED = 100_000
"""How many ends are kept for who asks later."""


class Target(Protocol):
    """A process as the broker sees it."""

    control: ControlWriter
    ended: asyncio.Future[Evidence]


class Broker:
    """Routes connections to `targets`, by uid; the agent itself is one of them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._targets: dict[str, asyncio.Future[Target]] = {}  # done once the process runs; cancelled: it never will
        self._gone: dict[str, Evidence] = {}
        self._announced = asyncio.Event()  # set, and replaced, whenever there is a new one

    def announce(self, uid: str) -> None:
        """A process will run soon, or may: connections to it wait."""
        if uid not in self._targets:
            self._targets[uid] = self._runtime.loop.create_future()
        self._announced.set()
        self._announced = asyncio.Event()

    def started(self, uid: str, target: Target) -> None:
        """A process that was announced runs."""
        future = self._targets.get(uid)
        if future is not None and not future.done():
            future.set_result(target)

    def gone(self, uid: str, evidence: Evidence) -> None:
        """A process ended, or never came to be."""
        future = self._targets.pop(uid, None)
        if future is not None and not future.done():
            future.cancel()
        self._gone[uid] = evidence
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]

    async def serve(self, listener: socket.socket) -> None:
        """Take connections until cancelled. Owns the listener."""
        loop = self._runtime.loop
        with listener:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as error:
                    self._runtime.log.warning("a connection could not be accepted: %s", error)
                    await asyncio.sleep(0.1)  # out of descriptors, most likely: let some be closed
                    continue
                self._runtime.tasks.start(self._route(sock), name="routing a connection")

    def take(self, sock: socket.socket, route: Route) -> None:
        """A connection for this host, of which is known already what it asks for. Owns it."""
        self._runtime.tasks.start(self._route(sock, route), name="routing a connection")

    async def _route(self, sock: socket.socket, route: Route | None = None) -> None:
        options = self._runtime.options
        sock.setblocking(False)
        handed_over = False
        try:
            if sock.family == socket.AF_UNIX and not peer_is_me(sock):
                raise ChannelError("a connection from another user")
            if route is None:
                async with asyncio.timeout(options.handshake_timeout):
                    route = await read_route(sock)
            host, _, uid = route.target.rpartition("/")
            if host and host != self._runtime.me.host:
                await refuse(sock, Evidence("no agent of that job is here").to_map())
                return
            if uid == self._runtime.me.uid:
                await self._runtime.loop.sock_sendall(sock, PASSED)
                if not route.query:
                    handed_over = True
                    await accept(self._runtime, sock)
                return
            target = await self._find(uid)
            if isinstance(target, Evidence):
                await refuse(sock, target.to_map())
                return
            await self._runtime.loop.sock_sendall(sock, PASSED)
            if not route.query:
                target.control.send(CONNECTION, sock)
        except (OSError, ChannelError, TimeoutError) as error:
            self._runtime.log.info("a connection was not routed: %s", str(error) or type(error).__name__)
        finally:
            if sock.fileno() >= 0 and not handed_over:
                sock.close()

    async def _find(self, uid: str) -> Target | Evidence:
        """The process of that uid once it runs, or why there is none."""
        runtime = self._runtime
        deadline = runtime.loop.time() + runtime.options.unknown_grace
        while uid not in self._targets and uid not in self._gone:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._announced.wait()
            except TimeoutError:
                return Evidence("no such process was ever started on this host")
        if uid in self._gone:
            return self._gone[uid]
        await asyncio.wait([self._targets[uid]])
        if uid in self._gone:
            return self._gone[uid]
        target = self._targets[uid].result()
        if target.control.has_ended():
            done, _ = await asyncio.wait([target.ended], timeout=DYING)
            if done:
                return target.ended.result()
        return target
