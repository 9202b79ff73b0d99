"""The raw limit: what the parts we build on can do with nothing around them.

The echo is a forked process on uvloop that takes length-prefixed msgpack frames with a pickled body over a unix socket, and answers each
with another. There is no actor in it, no lane, no session: it is what a call can't be faster than in Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import msgpack
import uvloop

from perf.measure import Samples, memcpy_rates, on_core, rate_of, time_calls, two_cores
from perf.systems.interpreters import import_seconds, start_seconds

__all__ = ["System"]

_REQUEST, _ANSWER = 0, 1
_ARGUMENTS: tuple[tuple[()], dict[str, Any]] = ((), {})
_BIG = 1 << 26


class _Frames(asyncio.Protocol):
    """Frames on a stream socket: four bytes of length, then msgpack."""

    def __init__(self) -> None:
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        offset, end = 0, len(data)
        while end - offset >= 4:
            begin = offset + 4
            stop = begin + int.from_bytes(data[offset:begin], "little")
            if stop > end:
                break
            self.took(msgpack.unpackb(data[begin:stop]))
            offset = stop
        self._rest = data[offset:]

    def write(self, message: list[Any]) -> None:
        frame = msgpack.packb(message)
        self.transport.write(len(frame).to_bytes(4, "little") + frame)

    def took(self, message: list[Any]) -> None:
        raise NotImplementedError


class _Server(_Frames):
    """Answers every request, if it wants an answer."""

    def took(self, message: list[Any]) -> None:
        _, number, _, body = message
        pickle.loads(body)
        if number:
            self.write([_ANSWER, number, 0, pickle.dumps(None)])

    def connection_lost(self, exc: Exception | None) -> None:
        os._exit(0)


class _Client(_Frames):
    def __init__(self) -> None:
        super().__init__()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._last = 0

    def call(self) -> asyncio.Future[Any]:
        self._last += 1
        future = self._pending[self._last] = asyncio.get_running_loop().create_future()
        self.write([_REQUEST, self._last, "nop", pickle.dumps(_ARGUMENTS)])
        return future

    def cast(self) -> None:
        self.write([_REQUEST, 0, "nop", pickle.dumps(_ARGUMENTS)])

    def took(self, message: list[Any]) -> None:
        self._pending.pop(message[1]).set_result(pickle.loads(message[3]))


def _fork_server() -> tuple[socket.socket, int]:
    """The near end of a socket to a new process that answers, and its pid."""
    near, far = socket.socketpair()
    if pid := os.fork():
        far.close()
        return near, pid
    near.close()
    uvloop.run(_answer(far))
    os._exit(0)


async def _answer(sock: socket.socket) -> None:
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(_Server, sock=sock)
    await loop.create_future()


def _sleeper() -> subprocess.Popen[bytes]:
    """A process to kill."""
    return subprocess.Popen(["sleep", "60"])


class System:
    """See `perf.worker`."""

    def __init__(self, procs: int) -> None:
        self.versions = {name: version(name) for name in ("uvloop", "msgpack")}
        servers = [_fork_server() for _ in range(procs)]
        self._sockets = [sock for sock, _ in servers]
        self._pids = [pid for _, pid in servers]
        self._clients: list[_Client] = []

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """This process and the first echo on a core each."""
        cores = two_cores()
        if cores is None:
            yield
            return
        before = os.sched_getaffinity(self._pids[0])
        os.sched_setaffinity(self._pids[0], {cores[1]})
        try:
            with on_core(cores[0]):
                yield
        finally:
            os.sched_setaffinity(self._pids[0], before)

    async def _connected(self) -> list[_Client]:
        for sock in self._sockets[len(self._clients) :]:
            sock.setblocking(False)
            _, client = await asyncio.get_running_loop().create_unix_connection(_Client, sock=sock)
            self._clients.append(client)
        return self._clients

    async def close(self) -> None:
        for client in self._clients:
            client.transport.close()
        for sock in self._sockets[len(self._clients) :]:
            sock.close()

    async def call(self, count: int) -> Samples:
        return {"call": await self._echo(count)}

    async def actor_to_actor(self, count: int) -> Samples:
        """The same echo, in turns with the workload that it stands beside."""
        return {"actor_to_actor": await self._echo(count)}

    async def call_def(self, count: int) -> Samples:
        """The same."""
        return {"call_def": await self._echo(count)}

    async def _echo(self, count: int) -> list[float]:
        client = (await self._connected())[0]
        with self._apart():
            return await time_calls(count, client.call, warm_up=count // 10)

    async def mesh(self, count: int) -> Samples:
        clients = await self._connected()
        return {"mesh": await time_calls(count, lambda: asyncio.gather(*(client.call() for client in clients)), warm_up=count // 10)}

    async def pipelined(self, count: int) -> Samples:
        client = (await self._connected())[0]
        with self._apart():
            return {"pipelined": await rate_of(count, lambda: asyncio.gather(*(client.call() for _ in range(count))))}

    async def broadcast(self, count: int) -> Samples:
        client = (await self._connected())[0]

        async def run() -> None:
            for _ in range(count):
                client.cast()
            await client.call()

        with self._apart():
            return {"broadcast": await rate_of(count, run)}

    async def local(self, count: int) -> Samples:
        loop = asyncio.get_running_loop()

        def call() -> asyncio.Future[None]:
            future: asyncio.Future[None] = loop.create_future()
            loop.call_soon(future.set_result, None)
            return future

        return {"local": await time_calls(count, call, warm_up=count // 10)}

    async def payload(self, count: int) -> Samples:
        return {"memcpy": memcpy_rates(_BIG, count)}

    async def kill(self, count: int) -> Samples:
        """From the signal to the process's pidfd being readable in the loop."""
        loop = asyncio.get_running_loop()
        samples = []
        for _ in range(count):
            process = _sleeper()
            descriptor = os.pidfd_open(process.pid)
            ended = loop.create_future()
            loop.add_reader(descriptor, lambda ended=ended: ended.done() or ended.set_result(None))  # type: ignore[misc]
            start = time.perf_counter()
            os.kill(process.pid, signal.SIGKILL)
            await ended
            samples.append(time.perf_counter() - start)
            loop.remove_reader(descriptor)
            os.close(descriptor)
            process.wait()
        return {"kill": samples}

    async def start_interpreter(self, count: int) -> Samples:
        """A bare interpreter that does nothing."""
        return {"start_interpreter": start_seconds("", count)}

    async def import_torch(self, count: int) -> Samples:
        return {"import_torch": import_seconds("torch", count)}
