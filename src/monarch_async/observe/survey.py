"""Asking the processes of a job, all at once and in bounded time.

Rules:

* Agents are asked first: they say which processes there are and how they are. Only those whose event loops come round are asked themselves.
* A process that does not answer within `patience` seconds is left out; its request is withdrawn.
* What another process refuses is raised here as the error that it is there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from monarch_async._runtime.asking import Answer, ask_many, cancel
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import ActorDied, ActorError, MonarchError, ReadOnlyError, UsageError
from monarch_async.health import Health, ProcState
from monarch_async.ids import ProcAddress

__all__ = ["NoAnswer", "Proc", "Survey", "label"]

SILENT = frozenset(ProcState) - {ProcState.READY, ProcState.BUSY}
"""States in which a process would not answer."""


SPARED = 5.0
"""Seconds for which a client that did not answer is not asked again."""


class NoAnswer(MonarchError):
    """A process did not answer in time, or is gone."""


class Proc(NamedTuple):
    """A process of the job, as its agent sees it; `usage` is resident memory, processor time, threads."""

    address: ProcAddress
    kind: str
    pid: int
    health: Health
    usage: tuple[int, float, int] | None
    host: str
    agent: ProcAddress

    @property
    def uid(self) -> str:
        return self.address.uid

    @property
    def name(self) -> str:
        return label(self.address)

    @property
    def answers(self) -> bool:
        """Whether it can be expected to."""
        return self.health.state not in SILENT


def label(address: ProcAddress) -> str:
    """What a process is called: ``gpus[3]``, ``client``, ``agent``."""
    alone = address.uid == address.host or address.name in ("client", "visitor", "agent")
    return address.name or address.uid if alone else str(address)


def _answering(proc: Proc) -> ProcAddress:
    if not proc.answers:
        raise NoAnswer(f"{proc.name} does not answer, for it is {proc.health.state}: `stack {proc.name}` tells where it is")
    return proc.address


class Survey:
    """One job, by way of a runtime that belongs to it or visits it."""

    def __init__(self, runtime: Runtime, agents: Sequence[ProcAddress], patience: float) -> None:
        self.runtime = runtime
        self.patience = patience
        self._agents = {agent.uid: agent for agent in (runtime.agent, *agents)}
        self._client_silent = 0.0  # until when it is not asked again

    async def inspect(self, address: ProcAddress, name: str, *args: Any, limit: float | None = None) -> Any:
        """Ask one process. Raises `NoAnswer`, or what the process does."""
        return await self._ask(address, "inspect", (name, *args), self.patience if limit is None else limit)

    async def inspect_proc(self, proc: Proc, name: str, *args: Any, limit: float | None = None) -> Any:
        """Ask one that is needed for an answer. Raises `NoAnswer` at once where it is known not to give any."""
        return await self.inspect(_answering(proc), name, *args, limit=limit)

    async def alter_proc(self, proc: Proc, name: str, subject: str, note: str, *args: Any, limit: float | None = None) -> Any:
        """The same for `alter`."""
        return await self.alter(_answering(proc), name, subject, note, *args, limit=limit)

    async def alter(self, address: ProcAddress, name: str, subject: str, note: str, *args: Any, limit: float | None = None) -> Any:
        """Have one process change something; `subject` and `note` are for its log. Raises `ReadOnlyError` where this visit only looks."""
        return await self._ask(address, "alter", (name, subject, note, *args), self.patience if limit is None else limit)

    async def _ask(self, address: ProcAddress, service: str, args: tuple[Any, ...], limit: float) -> Any:
        runtime = self.runtime
        answer, request = Answer(runtime.loop), next(runtime.requests)
        try:
            async with asyncio.timeout(limit):
                ask_many(runtime, [address], service, args, answer, [0], [request])
                return await answer.future
        except TimeoutError:
            cancel(runtime, address, request)
            raise NoAnswer(f"{label(address)} does not answer within {limit:g} s") from None
        except ActorDied as error:
            raise NoAnswer(f"{label(address)} does not answer: {error.reason or error}") from error
        except ActorError as error:
            if error.type_name.endswith("CancelledError"):
                raise NoAnswer(f"{label(address)} has ended meanwhile") from None
            for kind in (ReadOnlyError, UsageError):
                if error.type_name.endswith(kind.__name__):
                    raise kind(error.text) from None
            raise
        except (UsageError, ReadOnlyError) as error:
            error.__notes__ = []  # what was asked for is wrong: where that was found is of no interest
            raise
        except asyncio.CancelledError:
            cancel(runtime, address, request)  # which is nothing where the answer has come
            raise

    async def procs(self, others: Sequence[str] = ()) -> list[Proc]:
        """Every process of the job, agents and the client too; and `others`, by uid, as far as they are remembered."""
        agents = list(self._agents.values())
        known, *answers = await asyncio.gather(self._known_agents(), *(self._procs_of(agent, others) for agent in agents))
        new = [agent for agent in known or () if agent.uid not in self._agents]  # the longer a job runs, the more hosts it may have
        self._agents.update({agent.uid: agent for agent in new})
        answers += await asyncio.gather(*(self._procs_of(agent, others) for agent in new))
        found: dict[str, Proc] = {}
        for agent, answer in zip((*agents, *new), answers, strict=True):
            if answer is None:
                lost = Health(ProcState.UNREACHABLE, why=f"the agent does not answer within {self.patience:g} s")
                found[agent.uid] = Proc(agent, "agent", 0, lost, None, agent.tcp, agent)
                continue
            host, rows = answer
            for address, kind, pid, health, usage in rows:
                if address.uid not in found or health.pid:
                    found[address.uid] = Proc(address, kind, pid, health, usage, host, agent)
        self._judge_client(found, answered=known is not None)
        return list(found.values())

    def _judge_client(self, found: dict[str, Proc], *, answered: bool) -> None:
        """Nobody watches the client's event loop: whether it answers is all that is known of it."""
        client, me = self.runtime.client, self.runtime.me
        if client.uid not in found:
            pid = os.getpid() if client.uid == me.uid else 0
            found[client.uid] = Proc(client, "client", pid, Health(ProcState.READY, pid=pid), None, "", self.runtime.agent)
        proc = found[client.uid]
        if not answered and proc.answers:
            why = f"its event loop does not answer: py-spy dump --pid {proc.pid} on its host tells where it is"
            found[client.uid] = proc._replace(health=Health(ProcState.UNREACHABLE, pid=proc.pid, why=why))

    async def _procs_of(self, agent: ProcAddress, others: Sequence[str]) -> Any:
        up = self.runtime.hosts_up.get(agent.host)
        if up is not None and not up.done():
            return None
        try:
            return await self.inspect(agent, "procs", list(others))
        except NoAnswer:
            return None

    async def _known_agents(self) -> list[ProcAddress] | None:
        """The client knows of all hosts; `None` where it does not answer, and for some time after that."""
        loop = self.runtime.loop
        if loop.time() < self._client_silent:
            return None
        try:
            known: list[ProcAddress] = await self.inspect(self.runtime.client, "known_agents")
        except NoAnswer:
            self._client_silent = loop.time() + SPARED
            return None
        return known

    async def everywhere(self, procs: Iterable[Proc], name: str, *args: Any, agents: bool = False) -> dict[str, Any]:
        """Ask those of these processes that run actors, and `agents` too where wanted; the answers by uid, of those that give one."""
        asked = [proc for proc in procs if proc.answers and (agents or proc.kind != "agent")]
        answers = await asyncio.gather(*(self._try(proc.address, name, args) for proc in asked))
        return {proc.uid: answer for proc, answer in zip(asked, answers, strict=True) if not isinstance(answer, NoAnswer)}

    async def _try(self, address: ProcAddress, name: str, args: tuple[Any, ...]) -> Any:
        try:
            return await self.inspect(address, name, *args)
        except NoAnswer as error:
            return error
