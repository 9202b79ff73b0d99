"""The client's side of a job: start the agent, be a runtime in the running loop, end both.

The job's files are in a private directory, its key in memory and in the agent's, handed over a socket: never in an argument or an
environment variable.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from monarch_async._channel.keys import generate_key
from monarch_async._core.events import Evidence, describe_exit
from monarch_async._core.handshake import PROTOCOL_VERSION
from monarch_async._core.lines import OutputFolder, Stream
from monarch_async._runtime.ages import Ages, Looks
from monarch_async._runtime.announcing import Announcer
from monarch_async._runtime.asking import ask
from monarch_async._runtime.attach import attach
from monarch_async._runtime.config import AgentConfig, Network
from monarch_async._runtime.context import Message
from monarch_async._runtime.control import STOP, Control
from monarch_async._runtime.current import install, uninstall
from monarch_async._runtime.jobfile import RELEASE, JobFile, birth_of, default_name, remove_job_file, this_machine
from monarch_async._runtime.observing import from_environment
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import base_service
from monarch_async._runtime.start import READY, make_directory, remove_directory, start_agent
from monarch_async.errors import ActorDied, MonarchError, SpawnError, UsageError
from monarch_async.ids import ProcAddress, new_uid
from monarch_async.options import Options

__all__ = ["Client"]

ABANDONED = 5.0
"""Seconds that the agent may take to end what a loop that was closed has left."""


class Client:
    """A runtime for the program itself, and its agent. Make it in the loop that it shall live in; `close` ends the whole job."""

    guardian: asyncio.Task[None]
    """Ends the job when the loop does; see `ambient`."""

    def __init__(self, options: Options, key: bytes | None = None) -> None:
        options = from_environment(options)
        uid, host = new_uid(), new_uid()
        self.directory = make_directory()
        unix = os.path.join(self.directory, "agent")
        self.agent = ProcAddress(host, host, unix, name="agent")
        me = ProcAddress(uid, host, unix, name="client")
        self._folder = OutputFolder(options.fold_window)
        self._show_timer: asyncio.TimerHandle | None = None
        service, table = base_service()
        self.runtime = Runtime(me, key or generate_key(), options, {**table, **self.table})
        service.bind(self.runtime)
        self.runtime.agent, self.runtime.client = self.agent, me
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Control | None = None
        self.network: Network | None = None  # set once there are other hosts
        self.agents: dict[str, ProcAddress] = {}  # of other hosts
        self._attaching = asyncio.Lock()
        self._ready = self.runtime.hosts_up[host] = self.runtime.loop.create_future()
        self.runtime.on_link_ended.append(self._link_ended)
        self._closed = False
        self._started = time.time()
        ages = self.runtime.parts["ages"] = Ages(self.runtime.requests)
        self._looks = Looks(self.runtime, ages)
        self._announcer = Announcer(self.runtime.loop, self.runtime.log)
        self.runtime.parts["client"] = self
        install(self.runtime)

    def start_agent(self) -> None:
        """Start the agent of this host, if it was not started before. Raises `SpawnError` when the system refuses."""
        if self._process is not None or self._closed:
            return
        runtime = self.runtime
        config = AgentConfig(
            self.agent, runtime.me, runtime.key, None, self._options, self.directory, tuple(map(os.path.abspath, sys.path)), os.getpid()
        )
        try:
            self._process, self._ours = start_agent(config)
        except OSError as error:
            raise SpawnError(f"the host agent could not be started: {error}") from error
        runtime.loop.add_reader(self._ours.fileno(), self._first_answer)

    def attach(self, workers: Sequence[str], network: Network, advertise: str) -> list[ProcAddress]:
        """Have workers start agents for this job, in the background; returns the addresses these will have.

        What goes wrong is raised by `attached`. Raises `UsageError` if the job has another key already.
        """
        if self.network is not None and self.network != network:
            raise UsageError("this job is attached to workers with another key or TLS: all hosts of a job share one")
        self.start_agent()
        self.network = network
        runtime = self.runtime
        agents = []
        for worker in workers:
            uid = new_uid()
            agents.append(ProcAddress(uid, uid, "", worker.removeprefix("tcp://"), name="agent of " + worker))
        up: asyncio.Future[None] = runtime.loop.create_future()
        up.add_done_callback(lambda done: done.cancelled() or done.exception())
        for agent in agents:
            self.agents[agent.uid] = agent
            runtime.hosts_up[agent.host] = up
        runtime.tasks.start(self._attach(agents, advertise, up), name="attaching to workers")
        return agents

    async def _attach(self, agents: list[ProcAddress], advertise: str, up: asyncio.Future[None]) -> None:
        try:
            assert self.network is not None
            await self.ready()
            async with self._attaching:
                me = await attach(self.runtime, agents, self.network, advertise)
            self.runtime.me = self.runtime.client = me
            self._announce()
        except MonarchError as error:
            for agent in agents:
                del self.agents[agent.uid]
            up.set_exception(error)
        except asyncio.CancelledError:
            up.set_exception(SpawnError("the job has ended before its workers were attached to"))
            raise
        else:
            up.set_result(None)

    async def attached(self, agents: Iterable[ProcAddress]) -> None:
        """Wait until the hosts of these agents can be used. Raises what went wrong: `AddressError`, `AuthenticationError`, `SpawnError`…"""
        for up in {self.runtime.hosts_up[agent.host] for agent in agents if agent.host in self.runtime.hosts_up}:
            await asyncio.shield(up)

    @property
    def table(self) -> Mapping[str, Callable[..., Any]]:
        return {"output": self.output, "proc_exited": self.proc_exited, "warn": self.warn}

    def _first_answer(self) -> None:
        """The agent is up, or ended before it was."""
        loop = self.runtime.loop
        loop.remove_reader(self._ours.fileno())
        try:
            answer = self._ours.recv(1)
        except OSError:
            answer = b""
        if answer == READY:
            self._control = Control(self.runtime, self._ours, on_stop=lambda: None, on_end=self._agent_died)
            self._ready.set_result(None)
            self._announce()
            self._looks.start()
        else:
            self._ours.close()
            self._ready.set_exception(SpawnError("the host agent could not be started; its output above says why"))
            self._ready.exception()

    def _announce(self) -> None:
        """Let those who may look in find this job."""
        if self._closed:
            return
        runtime, network = self.runtime, self.network
        file = JobFile(
            id=self.agent.uid,
            name=self._options.job_name or default_name(),
            pid=os.getpid(),
            born=birth_of(os.getpid()),
            machine=this_machine(),
            started=self._started,
            version=RELEASE,
            protocol=PROTOCOL_VERSION,
            agent=self.agent._replace(tcp=runtime.me.tcp)._asdict(),
            client=runtime.me._asdict(),
            key=runtime.key.hex(),
            network={**network.to_map(), "key": network.key.hex()} if network is not None else None,
            agents=tuple(agent._asdict() for agent in self.agents.values()),
        )
        self._announcer.announce(file)

    async def ready(self) -> None:
        """Wait until the agent serves. Raises `SpawnError`."""
        await asyncio.shield(self._ready)

    def _agent_died(self) -> None:
        """The agent of this host has closed its socket, which only its end does."""
        if not self._closed and self._process is not None:
            self.runtime.tasks.start(self._bury_agent(self._process), name="burying the agent")

    async def _bury_agent(self, process: subprocess.Popen[bytes]) -> None:
        """Say what became of the agent, and with it of everything on this host."""
        await self._wait_for_agent(process)
        remove_directory(self.directory)
        remove_job_file(self.agent.uid)
        code = process.returncode
        how = self._control.reason if self._control is not None else ""
        how = how or describe_exit(code if code >= 0 else None, -code if code < 0 else None)
        evidence = Evidence(f"lost with the agent of this host: {how}")
        for peer in list(self.runtime.peers.values()):
            if peer.address.host == self.runtime.me.host:
                peer.gone(evidence)

    # What the agent tells.

    def proc_exited(self, message: Message, address: ProcAddress, evidence: Evidence) -> None:
        """A process that this runtime has started is gone."""
        self.runtime.peer(address).gone(evidence)

    def warn(self, message: Message, text: str) -> None:
        """What the user should know of, though nothing has failed."""
        self.runtime.log.warning("%s", text)

    def output(self, message: Message, mesh: str, rank: int, size: int, stream: Stream, lines: list[str]) -> None:
        """A process has printed something."""
        now = self.runtime.loop.time()
        for line in lines:
            self._folder.add(mesh, rank, size, stream, line, now)
        self._show()

    def _show(self) -> None:
        now = self.runtime.loop.time()
        if self._show_timer is not None:
            self._show_timer.cancel()
            self._show_timer = None
        self._print(self._folder.poll(now))
        deadline = self._folder.next_deadline()
        if deadline is not None:
            self._show_timer = self.runtime.loop.call_at(deadline, self._show)

    def show_all(self) -> None:
        """Print what waits for further ranks to say the same."""
        self._print(self._folder.flush())

    def _print(self, shown: list[Any]) -> None:
        if shown:
            # Not in the context of whoever has started the runtime: a notebook would show it in that cell for ever.
            contextvars.Context().run(self._write, shown)

    def _write(self, shown: list[Any]) -> None:
        for stream, text in shown:
            print(text, file=sys.stdout if stream == "stdout" else sys.stderr)
        sys.stdout.flush()

    # The end.

    async def close(self) -> None:
        """Stop everything that this client has started, on all hosts, the agents too; returns when it is gone."""
        if self._closed:
            return
        self._closed = True
        self._looks.close()
        runtime = self.runtime
        runtime.stopping = Evidence("the job has ended")
        await runtime.stop_cells("the job has ended")
        runtime.ownership.clear()
        await asyncio.gather(self._end_here(), *(self._end_there(agent) for agent in self.agents.values()))
        if self._show_timer is not None:
            self._show_timer.cancel()
        self.show_all()
        await runtime.close("the job has ended")
        if self._control is not None:
            self._control.close()
        remove_directory(self.directory)
        await self._announcer.close()
        remove_job_file(self.agent.uid)
        uninstall(runtime)

    async def _end_here(self) -> None:
        if self._process is None:
            return
        if self._control is not None:
            with contextlib.suppress(OSError):  # it may be gone already
                self._ours.send(STOP)
        else:
            self.runtime.loop.remove_reader(self._ours.fileno())
            self._ours.close()
            if not self._ready.done():
                self._ready.set_exception(SpawnError("the job has ended before its agent was up"))
                self._ready.exception()
        await asyncio.shield(self._wait_for_agent(self._process))

    async def _end_there(self, agent: ProcAddress) -> None:
        """On another host; what does not answer is left to its lease."""
        timeout = self._options.stop_timeout
        if not self.runtime.hosts_up[agent.host].done() or self.runtime.peer(agent).evidence is not None:
            return
        with contextlib.suppress(ActorDied, TimeoutError):
            async with asyncio.timeout(timeout + 2.0):
                await ask(self.runtime, agent, "end_job", timeout)

    def _link_ended(self, peer: Peer, evidence: Evidence) -> None:
        """A host that was out of reach for the lease has ended what it ran for this job."""
        if peer.address.uid in self.agents and not peer.links and not self._closed:
            for other in list(self.runtime.peers.values()):
                if other.address.host == peer.address.host:
                    other.gone(Evidence(f"its host ({peer.address.tcp}) is gone: {evidence.text}"))

    async def _wait_for_agent(self, process: subprocess.Popen[bytes]) -> None:
        """Until the agent has ended, by force if it takes longer than it may."""
        pidfd = os.pidfd_open(process.pid)
        loop = self.runtime.loop
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            async with asyncio.timeout(self.runtime.options.stop_timeout + 2.0):
                await ended.wait()
        except TimeoutError:
            process.kill()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        process.wait()

    def disown(self) -> None:
        """In a forked child: all of it is the parent's."""
        self._closed = True

    def abandon(self) -> None:
        """The loop is gone: let the agent see the end of the socket, which ends everything."""
        if not self._closed:
            self._closed = True
            uninstall(self.runtime)
            self.runtime.lending.abandon()
            if self._process is not None:
                self._ours.close()
                try:
                    self._process.wait(ABANDONED)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            remove_directory(self.directory)
            remove_job_file(self.agent.uid)
