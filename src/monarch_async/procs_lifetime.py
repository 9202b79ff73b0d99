"""A mesh of processes, from its owner's side: starting them, what is done when one ends, stopping them.

Rules:

* The first start succeeds as a whole or leaves nothing: its errors belong to who awaits the mesh, or what was spawned on it; where nobody
  does within `UNOBSERVED` seconds, the owner is told.
* With a restart policy, a process that ends is started again as it was asked for: environment, import path, CPUs, bootstrap, rank. Without
  one, it is where a mesh of actors in it has a policy and belongs to the same process (`up`).
* Until it is decided that an ended process does not come back, whoever sends to it waits (see the agent): `_abandon` says so.
* A process that ends before all of the first start are up is started again by the policy, if it had been up; else the start has failed.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

from monarch_async._core.events import Evidence, Failure, Identity, died
from monarch_async._core.instructions import Cause, Exit, Life
from monarch_async._runtime.asking import ask, tell
from monarch_async._runtime.client import Client
from monarch_async._runtime.config import SpawnRequest
from monarch_async._runtime.restarts import Driver
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.supervisor import Fate, Guest
from monarch_async.errors import SpawnError
from monarch_async.ids import ProcAddress, slot
from monarch_async.lifetime import UNOBSERVED, Lifetime
from monarch_async.processes import Processes
from monarch_async.restart import Restart
from monarch_async.spawned import failure_from

__all__ = ["ProcsLifetime"]

STOPPED = Evidence("its process was stopped with its mesh")


class ProcsLifetime(Processes):
    """See the module's text. `begin` starts the processes. Its methods are called on the loop."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        owner: int,
        requests: Sequence[SpawnRequest],
        agents: Sequence[ProcAddress],
        bootstrap: Callable[[], Any] | None,
        restart: Restart | None,
    ) -> None:
        super().__init__(runtime, requests, agents, bootstrap)
        self._name = name
        self.owner = owner
        self._ups: list[asyncio.Future[ProcAddress]] = [runtime.loop.create_future() for _ in requests]
        self._revivals: dict[int, asyncio.Task[None]] = {}  # for meshes of actors, where there is no policy here
        self._driver: Driver | None = None
        if restart is not None:
            self._driver = Driver(runtime.loop, runtime.tasks, self, name, len(requests), restart)
        self._guests: set[Guest] = set()
        self.given_up = False
        self.why_lost = ""
        self._deciding = False  # about a process that has ended, and whose owners are about to be told
        self.users: list[Lifetime] = []  # of the meshes of actors that were spawned on it before it was up
        self.starting: asyncio.Future[None] = runtime.loop.create_future()
        self._awaited = False
        self._stopping: asyncio.Task[None] | None = None

    @property
    def returns(self) -> bool:
        """Whether processes may come back by a policy of their own."""
        return self._driver is not None

    def begin(self, client: Client | None) -> None:
        """Start them all."""
        runtime = self._runtime
        for rank, address in enumerate(self._addresses):
            self._own(rank)
            runtime.homes[address.uid] = self
        # Sent now, so that it comes, and is answered, before all that is sent to these processes without waiting for them.
        answers = {address.uid: self._greet(address) for address in self._addresses}
        self.starting.add_done_callback(self._started)
        runtime.tasks.start(self._start(client, answers), name=f"starting {self._name}")
        cell = runtime.cells.get(self.owner)
        if cell is not None:
            cell.owned[self] = self.stop

    def _own(self, rank: int) -> None:
        identity = Identity(self._name, "", rank, self._lives[rank])
        self._runtime.ownership.own(self._addresses[rank].uid, self.owner, 0, identity, self)

    # The first start.

    async def wait(self) -> None:
        """Until every process answers. Raises `SpawnError`, or `ActorDied` for one that ended before it did."""
        self._awaited = True
        await asyncio.shield(self.starting)

    @property
    def is_up(self) -> bool:
        """Whether the start has ended well, so that it does not matter any more who asks."""
        return self.starting.done() and not self.starting.cancelled() and self.starting.exception() is None

    @property
    def awaited(self) -> bool:
        """Whether somebody has asked for the outcome of the start, or of what was spawned on it."""
        return self._awaited or any(user.awaited for user in self.users)

    async def _start(self, client: Client | None, answers: dict[str, asyncio.Future[Any]]) -> None:
        """The end of a process that is not up yet is for those who wait for it, and no failure to be told to its owner."""
        runtime = self._runtime

        def release(peer: Any) -> None:
            answer = answers.get(peer.address.uid)
            if answer is not None and (not answer.done() or answer.cancelled() or answer.exception() is not None):
                runtime.ownership.release(peer.address.uid)

        runtime.on_peer_gone.insert(0, release)
        try:
            await self._start_all(client, answers)
        except asyncio.CancelledError:
            self.starting.cancel()
            raise
        except Exception as error:
            for address in self._addresses:
                runtime.ownership.release(address.uid)
            self.starting.set_exception(error)
        else:
            self.starting.set_result(None)
        finally:
            runtime.on_peer_gone.remove(release)

    async def _start_all(self, client: Client | None, answers: dict[str, asyncio.Future[Any]]) -> None:
        """Have every host start its processes, wait until all answer (that they have bootstrapped). If anything goes wrong none is left."""
        runtime = self._runtime
        by_agent = self._by_agent(range(len(self._requests)))
        limit = runtime.options.start_timeout
        try:
            if client is not None:
                await client.ready()
                await client.attached(by_agent)
            async with asyncio.timeout(limit):
                wishes = {agent: [self._requests[rank] for rank in ranks] for agent, ranks in by_agent.items()}
                started = [ask(runtime, agent, "spawn_procs", theirs) for agent, theirs in wishes.items()]
                await asyncio.gather(*started)
                await asyncio.gather(*answers.values())
        except BaseException as error:
            for agent, ranks in by_agent.items():
                tell(runtime, agent, "kill_procs", [self._addresses[rank].uid for rank in ranks])
                self._tell_given_up(agent, ranks, Evidence(f"was never started, since the mesh could not be: {error}"))
            if not isinstance(error, TimeoutError):
                raise
            late = [address for address in self._addresses if not answers[address.uid].done()]
            text = f"{', '.join(map(str, late))} did not answer within the option start_timeout={limit:g} s"
            raise SpawnError(text) from None

    def _started(self, start: asyncio.Future[None]) -> None:
        """The first start has ended; if it failed and nobody asks for the outcome, its owner is told."""
        runtime = self._runtime
        error = asyncio.CancelledError() if start.cancelled() else start.exception()
        if error is None:
            self.users.clear()
            if self._guests:
                self._tell_kept()
            for rank, address in enumerate(self._addresses):
                if runtime.peer(address).evidence is None and not self._lives[rank]:
                    self._ups[rank].set_result(address)
                    if self._driver is not None:
                        self._driver.started(rank)
            return
        if self._driver is not None:
            self._driver.shutdown()
        for rank, address in enumerate(self._addresses):
            runtime.homes.pop(slot(address), None)
            self._close_up(rank, SpawnError(f"{self._name} could not be started: {error}"))
        if start.cancelled():
            return

        def tell_owner() -> None:
            if not self.awaited and not runtime.closing and runtime.stopping is None and self._stopping is None:
                failure = failure_from(self._name, "", [0], error, "")
                runtime.handle(self.owner, failure._replace(reason=failure.reason.replace(" in :", " while it was started:", 1)))

        runtime.loop.call_later(UNOBSERVED, tell_owner)

    # What happens to processes.

    def member_failed(self, failure: Failure, *, normal: bool) -> bool:
        """Processes fail by ending only."""
        return False

    def process_ended(self, member: Identity, failure: Failure, evidence: Evidence, *, returns: bool) -> Fate:
        if self._stopping is not None or self.given_up:
            return Fate.ENDED
        rank, driver = member.rank, self._driver
        if self._ups[rank].done():
            self._ups[rank] = self._runtime.loop.create_future()
        if not evidence.next:
            self._fail(rank, evidence)
        if driver is not None and driver.supervises and evidence.next:
            self._deciding = True
            driver.exited(Life(rank, member.incarnation), Exit.NORMAL if evidence.code == 0 else Exit.ABNORMAL, failure)
            self._deciding = False
            if driver.supervises:
                return Fate.RETURNS if driver.comes_back(rank) else Fate.ENDED
        return Fate.LOST

    def moved(self, member: Identity, address: ProcAddress) -> None:
        """Processes are where they are."""

    def give_up(self, member: Identity, evidence: Evidence) -> None:
        if evidence.next:
            self._abandon(member.rank, evidence)

    def save(self, member: Identity, number: int, state: bytes) -> None:
        """Processes have no state."""

    # What meshes of actors in it ask for.

    def keep(self, guest: Guest) -> None:
        self._guests.add(guest)
        self._tell_kept()

    def leave(self, guest: Guest) -> None:
        self._guests.discard(guest)
        self._runtime.loop.call_soon(self._abandon_unwanted)  # others in them may not have heard of their end yet

    def _abandon_unwanted(self) -> None:
        for rank, address in enumerate(self._addresses):
            evidence = self._runtime.peer(address).evidence
            if evidence is not None and evidence.next:
                self._abandon(rank, evidence)

    def _tell_kept(self) -> None:
        if self._driver is None and self.is_up:
            for agent, ranks in self._by_agent(range(len(self._addresses))).items():
                tell(self._runtime, agent, "keep_procs", [self._addresses[rank].uid for rank in ranks])

    async def up(self, address: ProcAddress) -> ProcAddress:
        rank = address.rank
        await asyncio.wait([self.starting])  # an actor in it may have failed before all processes were up
        if self._driver is None and not self._ups[rank].done():
            revival = self._revivals.get(rank)
            if revival is None:
                revival = self._revivals[rank] = self._runtime.loop.create_task(self._again(rank, self._lives[rank] + 1))
                revival.add_done_callback(functools.partial(self._revived, rank))
            await asyncio.wait([revival])
            if not revival.cancelled():  # else the processes are being stopped
                revival.result()
        return await asyncio.shield(self._ups[rank])

    def _revived(self, rank: int, revival: asyncio.Task[None]) -> None:
        self._revivals.pop(rank, None)
        if not revival.cancelled() and revival.exception() is not None and self._stopping is None:
            self._abandon_unwanted()  # who had wanted it may have left meanwhile

    def _abandon(self, rank: int, evidence: Evidence) -> None:
        """Nobody needs the next life of a process that has ended, unless somebody does."""
        if self._ups[rank].done() or rank in self._revivals or (self._driver is not None and self._driver.comes_back(rank)):
            return
        if self._driver is None and any(guest.wants(self._addresses[rank]) for guest in self._guests):
            return
        text = evidence.text if self._driver is None else f"{evidence.text}, and is not started again"
        self._fail(rank, evidence._replace(text=text, next=""))

    def _fail(self, rank: int, evidence: Evidence) -> None:
        """A process that has ended does not come back."""
        self._close_up(rank, died(evidence, self._name, rank, started=False, incarnation=self._lives[rank]))
        last = self._runtime.peer(self._addresses[rank]).latest()
        if last.evidence is None:  # the one that was expected
            self._tell_given_up(self._agents[rank], [rank], evidence)
            last.gone(evidence)

    def _close_up(self, rank: int, error: BaseException) -> None:
        """Whoever waits for it need not do so any longer."""
        up = self._ups[rank]
        if not up.done():
            up.set_exception(error)
            up.exception()

    async def _again(self, rank: int, life: int) -> None:
        """Start the process of a rank again; `_ups` has it then. Raises what that failed of, and then it may be tried again."""
        runtime, agent = self._runtime, self._agents[rank]
        limit = runtime.options.start_timeout
        self._check_wanted(rank)
        before = runtime.peer(self._addresses[rank])
        if before.evidence is None or not before.evidence.next:
            text = before.evidence.text if before.evidence is not None else "it has not ended"
            raise SpawnError(f"{self._name}[{rank}] can't be started again: {text}")
        me = self._addresses[rank] = before.latest().address
        self._lives[rank] = life
        answer: asyncio.Future[Any] | None = None
        try:
            async with asyncio.timeout(limit):
                started = ask(runtime, agent, "spawn_procs", [self._requests[rank]._replace(me=me, returns=True)])
                answer = self._greet(me)
                await started
                await answer
        except BaseException as error:
            await ask(runtime, agent, "kill_procs", [me.uid], True)
            if answer is not None:
                await asyncio.gather(answer, return_exceptions=True)  # so that it is known here what comes after it
            if not isinstance(error, TimeoutError):
                raise
            raise SpawnError(f"{me} did not answer within the option start_timeout={limit:g} s") from None
        self._check_wanted(rank)
        after = runtime.peer(me).evidence
        if after is not None:  # it has answered, and ended before this was known here
            raise died(after, self._name, rank, started=False, incarnation=life)
        self._own(rank)
        if not self._ups[rank].done():
            self._ups[rank].set_result(me)

    def _check_wanted(self, rank: int) -> None:
        if self._stopping is not None or self.given_up:
            raise SpawnError(f"{self._name}[{rank}] is not started again: {self._name} is being stopped")

    # What a driver, or a supervisor, asks for.

    async def start_life(self, life: Life) -> None:
        await self._again(life.child, life.incarnation)

    async def stop_lives(self, lives: Sequence[Life]) -> None:
        again = self._driver is not None and self._driver.supervises
        ranks = [child for child, incarnation in lives if incarnation == self._lives[child]]
        for rank in ranks if again else ():  # who wants one from now on waits for the next
            if self._ups[rank].done():
                self._ups[rank] = self._runtime.loop.create_future()
        await self._end(ranks, returns=again)

    def failure_of(self, life: Life, error: BaseException) -> Failure:
        failure = failure_from(self._name, "", [life.child], error, "")
        text = failure.reason.replace(" in :", " while it was started again:", 1)
        return failure._replace(incarnation=life.incarnation, reason=text, process=str(self._addresses[life.child]))

    def escalated(self, failure: Failure) -> None:
        self.given_up = True
        self.why_lost = failure.reason
        runtime = self._runtime
        evidence = Evidence(failure.reason, failure.exit_code, failure.signal)
        for rank, address in enumerate(self._addresses):
            if rank in failure.ranks or not self._ups[rank].done():
                self._fail(rank, evidence)
            else:
                runtime.ownership.disown_all(address.uid, self.owner)
        self._tell_guests(failure)
        runtime.tasks.start(self._end_given_up(evidence), name=f"stopping {self._name}")
        if not self._deciding:
            runtime.handle(self.owner, failure)

    async def _end_given_up(self, evidence: Evidence) -> None:
        await self._end(range(len(self._addresses))[::-1], returns=False)
        self._none_follows(evidence)

    def _none_follows(self, evidence: Evidence) -> None:
        """All have ended, some perhaps before they were told to: whoever waits for another one is told why there is none."""
        for agent, ranks in self._by_agent(range(len(self._addresses))).items():
            self._tell_given_up(agent, ranks, evidence)
        for address in self._addresses:
            self._runtime.peer(address).latest().gone(evidence)

    def removed(self, life: Life, failure: Failure) -> None:
        """Whoever waits for it is told with the rest; see `give_up`."""

    def ended(self, cause: Cause) -> None:
        """Nothing to do."""

    def _tell_guests(self, failure: Failure | None) -> None:
        """Other owners hear of the end of the processes like of any other."""
        for guest in list(self._guests):
            if guest.owner == self.owner:
                guest.home_stopped(failure)

    # The end.

    async def stop(self, reason: str) -> None:
        """End every process for good; returns when all are gone."""
        if self._stopping is None:
            self._stopping = self._runtime.loop.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        runtime = self._runtime
        if self._driver is not None:
            self._driver.shutdown()
        self._tell_guests(None)
        for revival in self._revivals.values():
            revival.cancel()
        for rank, address in enumerate(self._addresses):
            runtime.ownership.disown_all(address.uid, self.owner)
            runtime.homes.pop(slot(address), None)
            self._close_up(rank, died(STOPPED, self._name, rank, started=False, incarnation=self._lives[rank]))
        await self._end(range(len(self._addresses)), returns=False)
        self._none_follows(STOPPED)
        for address in self._addresses:  # whoever calls them from now on is told that this was meant
            runtime.peer(address).latest().evidence = STOPPED
        owner = runtime.cells.get(self.owner)
        if owner is not None:
            owner.owned.pop(self, None)
