"""The agent's switchboard: every connection to a process of this host comes in here and is handed on.

A connection names the process it wants. One that runs gets the socket, as a descriptor over its control socket; one that is being started
gets it when it is up; for one that is gone the answer says how it ended. A dying process is waited for, so that the answer has the
evidence: its sockets close a moment before the kernel tells its parent.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from monarch_async._channel.dial import PASSED, peer_is_me, read_route, refuse
from monarch_async._core.events import Evidence
from monarch_async._runtime.connect import accept
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import ChannelError

__all__ = ["Broker", "Target", "pass_socket"]

DYING = 2.0
"""Seconds that a process may take from closing its sockets to being reaped."""


class Target(Protocol):
    """A process as the broker sees it."""

    control: socket.socket
    ended: asyncio.Future[Evidence]


class Broker:
    """Routes connections to `targets`, by uid; the agent itself is one of them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._targets: dict[str, asyncio.Future[Target]] = {}  # done once the process runs; cancelled: it never will
        self._gone: dict[str, Evidence] = {}
        self._announced = asyncio.Event()  # set, and replaced, whenever there is a new one

    def announce(self, uid: str) -> None:
        """A process will run soon: connections to it wait."""
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

    async def _route(self, sock: socket.socket) -> None:
        options = self._runtime.options
        sock.setblocking(False)
        handed_over = False
        try:
            if sock.family == socket.AF_UNIX and not peer_is_me(sock):
                raise ChannelError("a connection from another user")
            async with asyncio.timeout(options.handshake_timeout):
                route = await read_route(sock)
            if route.target == self._runtime.me.uid:
                await self._runtime.loop.sock_sendall(sock, PASSED)
                if not route.query:
                    handed_over = True
                    await accept(self._runtime, sock)
                return
            target = await self._find(route.target)
            if isinstance(target, Evidence):
                await refuse(sock, target.to_map())
                return
            await self._runtime.loop.sock_sendall(sock, PASSED)
            if not route.query:
                await pass_socket(self._runtime.loop, target.control, sock)
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
        if _has_closed(target.control):
            done, _ = await asyncio.wait([target.ended], timeout=DYING)
            if done:
                return target.ended.result()
        return target


def _has_closed(control: socket.socket) -> bool:
    """Whether the other end of a control socket is closed, which a process does when it dies."""
    try:
        return control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def pass_socket(loop: asyncio.AbstractEventLoop, control: socket.socket, sock: socket.socket) -> None:
    """Give a connection to the process at the other end of a control socket."""
    while True:
        try:
            socket.send_fds(control, [b"c"], [sock.fileno()])
            return
        except BlockingIOError:
            writable: asyncio.Future[None] = loop.create_future()
            loop.add_writer(control.fileno(), _wake, writable)
            try:
                await writable
            finally:
                loop.remove_writer(control.fileno())
