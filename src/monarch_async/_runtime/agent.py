"""The agent: one for a client and host. It starts, watches and ends processes, brokers connections, and gathers output; no user code.

Rules:

* A process belongs to the process that asked for it. When that one is gone, or its link to here is over, what it had started is killed.
* A process that is told to stop gets the time it was given, then SIGKILL; an answer comes when it is gone.
* Its end is told to its owner, with the evidence, and remembered for whoever dials it later.
* Where one may come back, its successor is announced with the end: who dials that waits until its owner has decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from monarch_async._channel.descriptors import inbox_path
from monarch_async._channel.dial import listen_tcp, usable_addresses
from monarch_async._core.events import Evidence
from monarch_async._core.lines import Stream
from monarch_async._runtime.asking import ask, tell
from monarch_async._runtime.broker import Broker
from monarch_async._runtime.child import Child, ProcSpec
from monarch_async._runtime.config import Network, ProcConfig, SpawnRequest
from monarch_async._runtime.connect import join_network
from monarch_async._runtime.context import Message
from monarch_async._runtime.control import NETWORK, STOP, ControlWriter
from monarch_async._runtime.fanout import FanOut
from monarch_async._runtime.health import HealthWatch
from monarch_async._runtime.launcher import Launcher
from monarch_async._runtime.output import OutputReader
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.runtime import Runtime
from monarch_async.ids import ProcAddress, successor

__all__ = ["Agent", "Proc"]

ENTRY = "monarch_async.proc_entry:run"
OUTPUT_TAIL = 0.2
"""Seconds for which the output of a process that is gone may still come."""
GONE_TEXTS = 64
"""How many ended processes the output is kept of."""
OUTPUT_UNDER_WAY = 32
"""Batches of output that may be on their way to a client; past that the pipes are left to fill."""


class Proc:
    """A process that runs."""

    def __init__(self, request: SpawnRequest, child: Child, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.child = child
        self.control = ControlWriter(loop, child.control)
        self.ended: asyncio.Future[Evidence] = loop.create_future()
        self.output: OutputReader
        self.under_way = 0  # batches of its output that the client has not confirmed
        self.returns = request.returns  # unless it is ended for good


class _Start:
    """A process on its way."""

    def __init__(self, request: SpawnRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.returns = request.returns
        self.owner = request.owner.uid
        self.unwanted = False  # it is to be ended as soon as it is there
        self.over: asyncio.Future[None] = loop.create_future()  # done when it is there, and when it is clear that it will not be


class Agent:
    """Bind it to a runtime, whose service it is part of."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._procs: dict[str, Proc] = {}
        self._starts: dict[str, _Start] = {}
        self._texts: dict[str, Callable[[], str]] = {}  # output of processes, also of the last that are gone
        self.printed: dict[str, tuple[ProcAddress, OutputReader]] = {}  # the same in bytes, and whose it is
        self.on_output: list[Callable[[], object]] = []  # told of each line or more
        self._gone_texts: deque[str] = deque()  # which of them are gone, the oldest first
        self._expected: dict[str, str] = {}  # successors that nobody has started yet; whose owner each is, by uid
        self._network: Network | None = None
        self.health = HealthWatch()
        self.ending = asyncio.Event()  # the client wants this agent to end
        self.runtime: Runtime
        self.broker: Broker

    @property
    def table(self) -> Mapping[str, Callable[..., Any]]:
        """The functions for the runtime's service."""
        names = ("spawn_procs", "stop_procs", "kill_procs", "keep_procs", "give_up_procs", "output_text", "listen", "end_job")
        return {**{name: getattr(self, name) for name in names}, "health": self.health.tell}

    def bind(self, runtime: Runtime, network: Network | None) -> None:
        self.runtime = runtime
        runtime.parts["agent"] = self
        if network is not None:
            self._network = network
            join_network(runtime, network)
        self.broker = Broker(runtime)
        self.health.bind(runtime)
        FanOut(runtime, self._address)
        self._launcher.attach(runtime.loop)
        runtime.on_link_ended.append(self._link_ended)

    # What others ask for.

    def spawn_procs(self, message: Message, requests: list[SpawnRequest]) -> Any:
        """Start processes; the answer, their pids, comes when all exist. Raises `SpawnError`, and then none is left."""
        for request in requests:
            self.broker.announce(request.me.uid)
            self._expected.pop(request.me.uid, None)
            self._starts[request.me.uid] = _Start(request, self.runtime.loop)
        return self._start_all(requests)

    async def _start_all(self, requests: list[SpawnRequest]) -> list[int]:
        outcomes = await asyncio.gather(*(self._start(request) for request in requests), return_exceptions=True)
        failure = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        if failure is not None:
            await self.kill_procs(None, [request.me.uid for request in requests], requests[0].returns)
            raise failure
        return [outcome for outcome in outcomes if isinstance(outcome, int)]

    async def _start(self, request: SpawnRequest) -> int:
        start = self._starts[request.me.uid]
        try:
            return await self._start_one(request, start)
        finally:
            del self._starts[request.me.uid]
            start.over.set_result(None)

    async def _start_one(self, request: SpawnRequest, start: _Start) -> int:
        me = request.me
        runtime = self.runtime
        me = me._replace(unix=runtime.me.unix, tcp=runtime.me.tcp)
        network = self._network
        slot = self.health.expect(request)
        try:
            spec = ProcSpec(
                name=f"{me.name}-{me.rank}",
                entry=ENTRY,
                payload=ProcConfig(me, runtime.me, runtime.client, runtime.key, network, runtime.options, slot).pack(),
                env=request.env,
                cwd=request.cwd,
                sys_path=request.sys_path,
                preload=request.preload,
                cpus=request.cpus,
            )
            child = await self._launcher.spawn(spec)
        except Exception as error:  # whatever it is, who waits for this process must hear of it
            never = self.health.ended(me.uid, Evidence(f"was never started: {error}"))
            self._bury(request, never, returns=start.returns)
            raise
        self.health.watch(me.uid, child)
        proc = Proc(request, child, runtime.loop)
        proc.returns = start.returns
        if self._network is not network:  # it came meanwhile
            self._tell_network(proc)
        self._procs[me.uid] = proc
        proc.output = OutputReader(
            runtime.loop, child.stdout, child.stderr, lambda stream, lines: self._show(proc, stream, lines), keep=runtime.options.log_bytes
        )
        self._texts[me.uid] = proc.output.text
        self.printed[me.uid] = request.me, proc.output
        child.exited.add_done_callback(lambda _: runtime.tasks.start(self._exited(proc), name=f"burying {me}"))
        self.broker.started(me.uid, proc)
        if start.unwanted:
            child.kill()
        return child.pid

    async def stop_procs(self, message: Message | None, uids: list[str], timeout: float, returns: bool = False) -> None:
        """Ask processes to stop, kill those that have not after `timeout` seconds; the answer comes when all are gone.

        They may come back only if `returns`.
        """
        procs = [self._procs[uid] for uid in uids if uid in self._procs]
        self.health.expect_end(uids)
        for proc in procs:
            proc.returns = returns
            proc.control.send(STOP)
        await self._call_off(uids, returns)
        if procs:
            _, late = await asyncio.wait([proc.ended for proc in procs], timeout=timeout)
            if late:
                await self.kill_procs(None, [proc.request.me.uid for proc in procs if not proc.ended.done()], returns)

    async def kill_procs(self, message: Message | None, uids: list[str], returns: bool = False) -> None:
        """SIGKILL; the answer comes when all are gone. They may come back only if `returns`."""
        procs = [self._procs[uid] for uid in uids if uid in self._procs]
        self.health.expect_end(uids)
        for proc in procs:
            proc.returns = returns
            proc.child.kill()
        await self._call_off(uids, returns)
        if procs:
            await asyncio.wait([proc.ended for proc in procs])

    async def _call_off(self, uids: list[str], returns: bool) -> None:
        """End those that are on their way as soon as they are there; returns when they are gone."""
        starts = {uid: self._starts[uid] for uid in uids if uid in self._starts}
        for start in starts.values():
            start.returns, start.unwanted = returns, True
        if starts:
            await asyncio.wait([start.over for start in starts.values()])
            if procs := [self._procs[uid] for uid in starts if uid in self._procs]:
                await asyncio.wait([proc.ended for proc in procs])

    def keep_procs(self, message: Message, uids: list[str]) -> None:
        """From now on these may come back."""
        for uid in uids:
            if uid in self._procs:
                self._procs[uid].returns = True

    def give_up_procs(self, message: Message | None, uids: list[str], evidence: Evidence) -> None:
        """What was announced in the place of these processes will never be started."""
        for uid in uids:
            following = successor(uid)
            if self._expected.pop(following, None) is not None:
                self.broker.gone(following, evidence)
                self.health.give_up(following)

    def output_text(self, message: Message, uid: str) -> str:
        """All that a process has printed, as far as it is kept. `LookupError` for one that never was here, or is long gone."""
        if uid not in self._texts:
            raise LookupError(f"no output is kept of that process: it was not started here, or {GONE_TEXTS} have ended since")
        return self._texts[uid]()

    def listen(self, message: Message, host: str, port: int, advertise: str, network: Network) -> str:
        """Take connections from other hosts too, and tell all processes by which key; returns the ``host:port`` to tell the others.

        Raises `AddressError` if that can't be had, `UsageError` if the files of TLS can't be used.
        """
        names = usable_addresses(advertise or host)
        join_network(self.runtime, network)
        listener = listen_tcp(host, port)
        where = f"[{names[0]}]" if ":" in names[0] else names[0]
        told = f"{where}:{listener.getsockname()[1]}"
        self.runtime.me = self.runtime.me._replace(tcp=told)
        self.runtime.client = self.runtime.client._replace(tcp=told)
        self.runtime.tasks.start(self.broker.serve(listener), name=f"listening on {told}")
        self._network = network
        for proc in self._procs.values():
            self._tell_network(proc)
        return told

    def _tell_network(self, proc: Proc) -> None:
        """A process was started before the job had other hosts."""
        assert self._network is not None
        proc.control.send(NETWORK + self._network.pack())

    async def end_job(self, message: Message, timeout: float) -> None:
        """Stop every process; the answer comes when all are gone, and then this agent ends. For agents on other hosts than the client's."""
        await self.stop_procs(None, list(self._procs), timeout)
        self.ending.set()

    # For those who look in.

    @property
    def procs(self) -> Mapping[str, Proc]:
        """The processes that run here, by uid."""
        return self._procs

    # What happens to processes.

    def _address(self, uid: str) -> ProcAddress:
        """The address of a process of this host."""
        proc = self._procs.get(uid)
        me = proc.request.me if proc is not None else self.runtime.me
        return me._replace(uid=uid, unix=self.runtime.me.unix)

    async def _exited(self, proc: Proc) -> None:
        how = proc.child.exited.result()
        me = proc.request.me
        evidence = self.health.ended(me.uid, Evidence(how.describe(), how.code, how.signal))
        # Its last words come before the news of its end.
        proc.output.resume()
        try:
            async with asyncio.timeout(OUTPUT_TAIL):
                await proc.output.finished
        except TimeoutError:
            pass  # a descendant holds the pipes; it is being killed
        proc.output.close()
        del self._procs[me.uid]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(inbox_path(self.runtime.me, me.uid))
        evidence = self._bury(proc.request, evidence, returns=proc.returns)
        proc.ended.set_result(evidence)
        tell(self.runtime, proc.request.owner, "proc_exited", me, evidence)
        proc.control.close()
        proc.child.close()
        self._gone_texts.append(me.uid)
        if len(self._gone_texts) > GONE_TEXTS:
            oldest = self._gone_texts.popleft()
            self._texts.pop(oldest, None)
            self.printed.pop(oldest, None)
        await self._end_of_owner(me.uid)

    def _bury(self, request: SpawnRequest, evidence: Evidence, *, returns: bool) -> Evidence:
        """Remember how a process ended, and announce who may take its place; returns what to tell of it."""
        uid = request.me.uid
        if returns and not self.ending.is_set():
            evidence = evidence._replace(next=successor(uid))
            self.broker.announce(evidence.next)
            self._expected[evidence.next] = request.owner.uid
            self.health.expect_successor(uid, evidence.next)
        self.broker.gone(uid, evidence)
        return evidence

    def _link_ended(self, peer: Peer, evidence: Evidence) -> None:
        if not peer.links:
            self.runtime.tasks.start(self._end_of_owner(peer.address.uid), name=f"sweeping after {peer.address}")

    async def _end_of_owner(self, uid: str) -> None:
        """Whoever asked for processes is gone: so are they."""
        for following in [following for following, owner in self._expected.items() if owner == uid]:
            del self._expected[following]
            self.broker.gone(following, Evidence("was never started again: its owner is gone"))
        theirs = [proc.request.me.uid for proc in self._procs.values() if proc.request.owner.uid == uid]
        await self.kill_procs(None, [*theirs, *(following for following, start in self._starts.items() if start.owner == uid)])

    def _show(self, proc: Proc, stream: Stream, lines: list[str]) -> None:
        """Send output to the client, and let the pipe fill up while the client is slow."""
        for told in self.on_output:
            told()
        if not self.runtime.options.forward_output or self.runtime.closing:
            return
        request = proc.request
        proc.under_way += 1
        if proc.under_way == OUTPUT_UNDER_WAY:
            proc.output.pause()
        shown = ask(self.runtime, self.runtime.client, "output", request.me.name, request.me.rank, request.size, stream, lines)
        shown.add_done_callback(lambda done: self._shown(proc, done))

    def _shown(self, proc: Proc, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # the client is gone, and this process soon will be
        proc.under_way -= 1
        if proc.under_way == OUTPUT_UNDER_WAY - 1 and not proc.ended.done():
            proc.output.resume()

    async def close(self, timeout: float) -> None:
        """End every process, politely for `timeout` seconds."""
        if timeout > 0:
            await self.stop_procs(None, list(self._procs), timeout)
        self._launcher.close()
