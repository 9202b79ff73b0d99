"""A worker: what waits on a host until jobs come, and gives each an agent there.

Rules:

* It runs no code of any job and unpickles nothing: it authenticates, starts agents, and hands connections on by what their prelude names.
* Each job has an agent of its own, a fresh interpreter, so that no job sees what another has imported, and each goes by its client's
  settings.
* An agent ends when its client is gone, when it is out of reach for the lease, or with the worker. The worker goes on whatever happens to
  agents.
* Who can't prove within `handshake_timeout` that it holds the key is cut off, and so is who comes when `WAITING` others are being looked
  at.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys

from monarch_async._channel.dial import PASSED, Route, listen_tcp, read_route, refuse, usable_addresses
from monarch_async._channel.keys import generate_key
from monarch_async._core.events import Evidence
from monarch_async._runtime.attach import WORKER, Job, receive
from monarch_async._runtime.config import AgentConfig, Network
from monarch_async._runtime.control import ROUTE, STOP, ControlWriter, pack_route
from monarch_async._runtime.start import make_directory, remove_directory, start_agent
from monarch_async._runtime.tasks import TaskSet
from monarch_async.errors import ChannelError
from monarch_async.ids import ProcAddress
from monarch_async.options import Options

__all__ = ["Worker"]

LONGEST_STOP = 30.0
"""Seconds that the jobs of a worker which is told to stop are given at most, whatever their clients have set."""
WAITING = 256
"""Connections that may be under examination at once."""


class _Agent:
    """The agent of one job."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, directory: str, options: Options) -> None:
        self.process = process
        self.sock = sock
        self.control = ControlWriter(asyncio.get_running_loop(), sock)
        self.directory = directory
        self.options = options
        self.ended = asyncio.Event()


class Worker:
    """Serves in the running loop from `start` to `stop`. `told` is the ``host:port`` that its agents give to others.

    Args:
        host, port: where to listen; port 0 takes a free one.
        network: the key that clients must hold, and TLS where it is wanted.
        advertise: the name or address of this host for others, if not `host`; needed where that is a wildcard and the host's name
            resolves to nothing that others can use.
    """

    def __init__(self, host: str, port: int, network: Network, advertise: str = "") -> None:
        self._host, self._port = host, port
        self._network = network
        self._advertise = advertise
        self._options = Options()
        self._agents: dict[str, _Agent] = {}
        self._log = logging.getLogger("monarch_async.worker")
        self._room = asyncio.Semaphore(WAITING)
        self.told = ""

    def start(self) -> None:
        """Listen.

        Raises `AddressError` if the address can't be had or can't be told to others, `UsageError` for TLS files that can't be
        used.
        """
        wildcard = self._host in ("", "*", "0.0.0.0", "::")
        name = usable_addresses(self._advertise or (socket.gethostname() if wildcard else self._host))[0]
        if self._network.tls is not None:
            self._network.tls.server()
        listener = listen_tcp("0.0.0.0" if self._host in ("", "*") else self._host, self._port)
        self.told = f"{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"
        self._tasks = TaskSet(asyncio.get_running_loop(), self._log)
        self._tasks.start(self._serve(listener), name="listening")

    async def stop(self) -> None:
        """End every job here, politely, and listen no more."""
        agents = list(self._agents.values())
        for agent in agents:
            agent.control.send(STOP)
        for agent in agents:
            try:
                async with asyncio.timeout(min(agent.options.stop_timeout, LONGEST_STOP) + 2.0):
                    await agent.ended.wait()
            except TimeoutError:
                agent.process.kill()
                await agent.ended.wait()
        await self._tasks.close()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                await self._room.acquire()
                try:
                    sock, peer = await loop.sock_accept(listener)
                except OSError as error:
                    self._room.release()
                    self._log.warning("a connection could not be accepted: %s", error)
                    await asyncio.sleep(0.1)  # out of descriptors, most likely: let some be closed
                    continue
                except BaseException:
                    self._room.release()
                    raise
                sock.setblocking(False)
                self._tasks.start(self._route(sock, str(peer[0])), name="routing a connection")

    async def _route(self, sock: socket.socket, peer: str) -> None:
        try:
            try:
                async with asyncio.timeout(self._options.handshake_timeout):
                    route = await read_route(sock)
            except BaseException:
                sock.close()
                raise
            if route.target == WORKER:
                await self._receive(sock, peer)
            else:
                await self._pass_on(sock, route)
        except (OSError, ChannelError, TimeoutError) as error:
            self._log.warning("a connection from %s was refused: %s", peer, str(error) or type(error).__name__)
        finally:
            self._room.release()

    async def _pass_on(self, sock: socket.socket, route: Route) -> None:
        """To the agent that it names."""
        agent = self._agents.get(route.target.partition("/")[0])
        with sock:
            if agent is None:
                await refuse(sock, Evidence("its host's agent is gone").to_map())
            else:
                agent.control.send(ROUTE + pack_route(route), sock)

    async def _receive(self, sock: socket.socket, peer: str) -> None:
        """A client, if it holds the key: start an agent for it."""
        await asyncio.get_running_loop().sock_sendall(sock, PASSED)
        await receive(sock, self._network, self._options, self._start)

    def _start(self, job: Job) -> str:
        """Start an agent; returns why not, or ``""``."""
        if job.agent in self._agents:
            return "there is an agent of that id already"
        directory = make_directory()
        address = ProcAddress(job.agent, job.agent, os.path.join(directory, "agent"), self.told, name=f"agent of tcp://{self.told}")
        config = AgentConfig(
            address, job.client, generate_key(), self._network, job.options, directory, tuple(map(os.path.abspath, sys.path)), os.getpid()
        )
        try:
            process, control = start_agent(config)
        except OSError as error:
            remove_directory(directory)
            return f"no agent could be started: {error}"
        agent = self._agents[job.agent] = _Agent(process, control, directory, job.options)
        self._tasks.start(self._bury(job, agent), name=f"watching the agent of {job.client}")
        self._log.info("job of %s attached", job.client.tcp)
        return ""

    async def _bury(self, job: Job, agent: _Agent) -> None:
        """When an agent has ended, forget it. Its procs ended with it."""
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(agent.process.pid)
        gone = asyncio.Event()
        loop.add_reader(pidfd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            agent.control.close()
            agent.sock.close()
        code = agent.process.wait()
        del self._agents[job.agent]
        remove_directory(agent.directory)
        agent.ended.set()
        self._log.info("job of %s ended (exit status %d)", job.client.tcp, code)
