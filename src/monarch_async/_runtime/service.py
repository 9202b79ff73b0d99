"""What every runtime does for others: start and stop actors, hear of failures. See `asking` for how it is asked for.

These are the functions behind key 0. They are called at once, in the order of the messages, so that a message to an actor that was sent
after its spawn finds it. What takes time returns an awaitable.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from monarch_async._core.codec import loads
from monarch_async._core.events import Evidence, Failure, Identity
from monarch_async._runtime.absent import DeadLetters
from monarch_async._runtime.asking import ask, tell
from monarch_async._runtime.behavior import Behavior, CellState
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import Message, Origin, State, current_cell, current_message
from monarch_async._runtime.history import LONGEST, fold_members
from monarch_async._runtime.inspecting import alter_runtime, inspect_runtime
from monarch_async._runtime.observing import begin_observing
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.serving import LATER
from monarch_async._runtime.supervisor import Fate, Member
from monarch_async._runtime.suspects import Step, is_awaited
from monarch_async._runtime.visiting import visit_of
from monarch_async.errors import ActorError, SpawnError, UsageError
from monarch_async.ids import ProcAddress

__all__ = ["REFUSED", "Owner", "Place", "base_service"]

REFUSED = ", which was refused"
"""At the end of what is noted of an attempt to change something."""

Owner = tuple[ProcAddress, int]
"""Who is told of a failure: a process and the actor in it, 0 for the client's program itself."""


class Place(NamedTuple):
    """Where a mesh of actors is: the extent, processes and agents of the mesh of processes, its name, and who spawned the actors."""

    extent: Any
    agents: tuple[ProcAddress, ...]
    addresses: tuple[ProcAddress, ...]
    name: str
    spawner: ProcAddress


@functools.lru_cache(256)
def _read_place(data: bytes) -> Place:
    place: Place = loads(data)
    return place


class Service:
    """The functions; `base_service` makes the table."""

    def __init__(self) -> None:
        self.runtime: Runtime

    def bind(self, runtime: Runtime) -> None:
        self.runtime = runtime
        runtime.failed = self._report
        runtime.left = self._report_left
        runtime.handle = self.handle
        runtime.others_wait = self._others_wait
        runtime.parts["audit"] = self.audit
        runtime.on_peer_gone.append(self._peer_gone)
        begin_observing(runtime)

    def spawn(
        self,
        message: Message,
        key: int,
        mesh: str,
        class_name: str,
        behavior: Behavior | bytes,
        owner: int,
        limit: int,
        place: bytes,
        incarnation: int = 0,
        returns: bool = False,
        saved: bytes | None = None,
        save_every: float | None = None,
    ) -> object:
        """Start an actor, or its next life; the answer comes when it is constructed.

        `place` is a pickled `Place`, shared by all that are spawned there. One that `returns` waits for another `spawn` when it ends;
        `saved` is its last checkpoint, and another is taken each `save_every` seconds.
        """
        runtime = self.runtime
        if runtime.stopping is not None:
            raise SpawnError(f"{mesh} was not spawned: its process is stopping")
        given: Behavior = loads(behavior) if isinstance(behavior, bytes) else behavior

        def told(error: BaseException | None) -> None:
            message.state = State.DONE
            if error is None:
                message.origin.answer(message, None)
            else:
                message.origin.refuse(message, error)

        cell = runtime.cells.get(key)
        if cell is not None:
            runtime.tasks.start(cell.revive(given, incarnation, saved, told), name=f"starting {cell.identity} again")
            return LATER
        cell = Cell(runtime, key, Identity(mesh, class_name, message.rank, incarnation), given, limit)
        cell.place = _read_place(place)
        cell.owner = (cell.place.spawner, owner)
        cell.returns, cell.saved, cell.save_every = returns, saved, save_every
        cell.on_constructed = told
        runtime.add_cell(cell)
        return LATER

    async def suspend(self, message: Message, key: int, reason: str) -> None:
        """End the present life of an actor that may come back; the answer comes when it is over."""
        cell = self.runtime.cells.get(key)
        if cell is not None:
            await asyncio.shield(cell.suspend(reason))

    async def watch(self, message: Message, key: int) -> tuple[Identity, Evidence]:
        """Answers when the present life of an actor is over, at once if it is: with who it was and why.

        One that is not here, nor known to have ended, is waited for as messages to it are.
        """
        if key not in self.runtime.cells and self.runtime.stopping is None:
            await self.runtime.absent.wait(key)
        cell = self.runtime.cells.get(key)
        if cell is None or cell.state is CellState.RESTARTING:
            if cell is not None and cell.evidence is not None:
                return cell.identity, cell.evidence
            unknown = Identity(f"actor {key:#x}", "", message.rank), Evidence("is not here: it was never spawned, or ended long ago")
            return self.runtime.absent.why_ended(key) or unknown
        over: asyncio.Future[tuple[Identity, Evidence]] = self.runtime.loop.create_future()
        cell.watchers += (over,)
        try:
            return await over
        finally:
            cell.watchers = tuple(other for other in cell.watchers if other is not over)

    def dead_letters(self, message: Message) -> DeadLetters:
        """Messages that could not be delivered here."""
        return self.runtime.dead_letters

    def inspect(self, message: Message, name: str, *args: Any) -> Any:
        """Look at something here; see `inspecting`."""
        return inspect_runtime(self.runtime, name, args)

    def alter(self, message: Message, name: str, subject: str, note: str, *args: Any) -> Any:
        """Change something here for somebody who looks; `subject` and `note` say what, for people."""
        visit = visit_of(self.runtime, message.origin)
        who = visit.who if visit is not None else "the program"
        text = f"{name.partition('_')[0]} {subject}{f': {note}' if note else ''}"[:500]
        try:
            result = alter_runtime(self.runtime, name, (who, subject, *args))
        except UsageError:
            self.audit(who, subject, f"{text}{REFUSED}")
            raise
        self.audit(who, subject, text)
        return result

    def audit(self, who: str, subject: str, text: str) -> None:
        """Somebody changes something by hand: note it, and have the client log it."""
        self.runtime.history.note("write", subject, f"{who}: {text}")
        if who != "the program":
            tell(self.runtime, self.runtime.client, "warn", f"{who}: {text}")

    def expect(self, message: Message, key: int, who: Identity, owner: str) -> None:
        """An actor will be spawned here later, by the process `owner`."""
        if key not in self.runtime.cells:
            self.runtime.absent.expect(key, who, owner)

    def keep(self, message: Message, key: int) -> None:
        """From now on this actor may come back when it ends."""
        cell = self.runtime.cells.get(key)
        if cell is not None and cell.evidence is None:
            cell.returns = True

    async def stop(self, message: Message, key: int, reason: str) -> None:
        """Stop an actor; the answer comes when it has cleaned up. One that is gone already is no error."""
        cell = self.runtime.cells.get(key)
        if cell is not None:
            await cell.stop(reason)
        else:
            self.runtime.absent.never_spawned(
                key, Identity(f"actor {key:#x}", "?", message.rank), Evidence("stopped before it was spawned")
            )

    async def give_up(self, message: Message, key: int, evidence: Evidence, who: Identity | None = None) -> None:
        """The same for one that has lived already and is not started again, here or at all."""
        cell = self.runtime.cells.get(key)
        if cell is not None:
            await asyncio.shield(cell.give_up(evidence))
        else:
            self.runtime.absent.never_spawned(key, who or Identity(f"actor {key:#x}", "?", message.rank), evidence)

    def bury(self, message: Message, buried: dict[int, tuple[Identity, Evidence]]) -> None:
        """These will never be spawned here: they have ended in a process before this one."""
        for key, (who, evidence) in buried.items():
            self.runtime.absent.never_spawned(key, who, evidence)

    def ping(self, message: Message) -> None:
        """Answer."""

    def bootstrap(self, message: Message, function: Callable[[], Any]) -> Any:
        """Run a function before any actor is there."""
        result = function()
        return result if inspect.isawaitable(result) else None

    # Who waits for whom.

    async def is_waiting(self, message: Message, steps: Sequence[Step]) -> bool:
        """Whether the handler of the last step, which runs here, is suspended on its request, and so are those that led to it."""
        key, number, request, _ = steps[-1]
        cell = self.runtime.cells.get(key)
        handler = (
            next((running for running in (cell.current, *cell.overlapping) if running and running.number == number), None) if cell else None
        )
        if cell is None or handler is None:
            return False
        if not is_awaited(self.runtime.find_waiter(request), handler, handler.task or cell.task):
            return False
        return len(steps) == 1 or await self._others_wait(handler.origin, steps[:-1])

    async def _others_wait(self, origin: Origin, steps: Sequence[Step]) -> bool:
        address = self.runtime.address_of(origin)
        try:
            return address is not None and bool(await ask(self.runtime, address, "is_waiting", steps))
        except ActorError:
            return False  # it is gone, so nobody waits there

    # Failures.

    def failed(self, message: Message, owner: int, failure: Failure, process: str, key: int, normal: bool = False) -> None:
        """Actor `key` of `process`, which actor `owner` of this process (0: the program itself) has spawned, has failed, or left."""
        member = self.runtime.ownership.find(process, owner, key)
        self.runtime.history.note("ended" if normal else "failed", failure.member, failure.reason, failure.traceback[-LONGEST:])
        if member is not None and not member.ward.member_failed(failure, normal=normal) and not normal:
            self.handle(owner, failure)

    def save(self, message: Message, owner: int, process: str, key: int, incarnation: int, number: int, state: bytes) -> None:
        """Keep the checkpoint of a member that `owner` has spawned. One of a former life, or from before another, is dropped."""
        member = self.runtime.ownership.find(process, owner, key)
        if member is not None and member.identity.incarnation == incarnation:
            member.ward.save(member.identity, number, state)

    def failed_elsewhere(self, message: Message, failure: Failure) -> None:
        """Something that no actor owns has failed in another process of this program's."""
        self.handle(0, failure)

    def _report(self, cell: Cell, error: BaseException, endpoint: str) -> None:
        """An actor of this process failed: tell its owner."""
        if cell.owner is not None:
            address, key = cell.owner
            tell(self.runtime, address, "failed", key, Failure.of_actor(cell.identity, error, endpoint), self.runtime.me.uid, cell.key)

    def _report_left(self, cell: Cell, reason: str) -> None:
        if cell.owner is not None:
            address, key = cell.owner
            failure = Failure(cell.identity.mesh, cell.identity.class_name, (cell.identity.rank,), "stopped itself")
            failure = failure._replace(incarnation=cell.identity.incarnation, meshes=(cell.identity.mesh,))
            tell(self.runtime, address, "failed", key, failure, self.runtime.me.uid, cell.key, True)

    def _peer_gone(self, peer: Peer) -> None:
        """A process is gone: so is what it owned here. Tell the owners, in this process, of what was in it, each once."""
        assert peer.evidence is not None
        uid, why = peer.address.uid, f"the process of its owner {peer.evidence.text}"
        self.runtime.absent.owner_gone(uid, Evidence(why))
        for cell in list(self.runtime.cells.values()):
            if cell.owner is not None and cell.owner[0].uid == uid:
                cell.begin_stop(why)
        process = self.runtime.ownership.process(uid)
        owners = self.runtime.ownership.release(uid)
        if owners:
            lost = fold_members(member.identity for members in owners.values() for key, member in members.items() if key)
            self.runtime.history.note("exited", peer.address, peer.evidence.text, lost)
        returns = process is None and bool(peer.evidence.next)
        fates = {}
        if process is not None:
            fate = process.ward.process_ended(process.identity, _lost([process], peer), peer.evidence, returns=False)
            fates[process] = fate
            returns = fate is Fate.RETURNS
        for members in owners.values():
            failure = _lost(list(members.values()), peer)
            for key, member in members.items():
                if key:
                    identity, ward = member
                    told = failure._replace(ranks=(identity.rank,), mesh=identity.mesh, class_name=identity.class_name)
                    told = told._replace(incarnation=identity.incarnation)
                    fates[member] = ward.process_ended(identity, told, peer.evidence, returns=returns)
        wanted = Fate.RETURNS in fates.values()
        if process is not None and wanted:
            fates[process] = Fate.RETURNS
        elif process is not None:
            process.ward.give_up(process.identity, peer.evidence)
        for owner, members in owners.items():
            if any(fates[member] is Fate.LOST for member in members.values()):
                reason = next((member.ward.why_lost for member in members.values() if member.ward.why_lost), "")
                kinds = (Fate.LOST, Fate.ENDED) if reason else (Fate.LOST,)  # what its processes have given up is lost with them
                failure = _lost([member for member in members.values() if fates[member] in kinds], peer)
                self.handle(owner, failure._replace(reason=reason or failure.reason))
            for key, member in members.items():
                if key and fates[member] is not Fate.RETURNS:
                    self.runtime.ownership.bury(uid, key, member.identity, peer.evidence._replace(next=""))
        buried = self.runtime.ownership.unbury(uid, peer.evidence.next)
        following = peer.latest()
        if buried and (wanted or returns) and following.evidence is None:  # what is sent there to one of them shall not wait for it
            tell(self.runtime, following.address, "bury", buried)

    def handle(self, owner: int, failure: Failure) -> None:
        """Tell actor `owner` of this process, or the program itself, of a failure in what it owns."""
        runtime = self.runtime
        cell = runtime.cells.get(owner)
        told = cell.identity if cell is not None else "the program"
        runtime.history.note("escalated", failure.member, f"told to {told}: {failure.reason}")
        if cell is not None and cell.evidence is None:
            runtime.tasks.start(self._supervise(cell, failure), name=f"supervision by {cell.identity}")
        elif owner == 0 and runtime.stopping is None:
            if runtime.client.uid == runtime.me.uid:
                runtime.unhandled(failure)
            else:
                tell(runtime, runtime.client, "failed_elsewhere", failure)

    async def _supervise(self, cell: Cell, failure: Failure) -> None:
        """Ask the owner; what it does not handle, it fails of."""
        current_message.set(None)
        current_cell.set(cell)
        life = cell.identity
        trouble: BaseException | None = None
        try:
            if not await cell.behavior.supervise(cell.instance, failure, cell.thread):
                trouble = failure.as_error()
        except Exception as error:
            error.__cause__ = error.__cause__ or failure.as_error()
            trouble = error
        if trouble is not None and cell.identity == life:  # else it is another life's, and what had failed was ended with the one before
            cell.fail(trouble, "__supervise__")


def _lost(members: Sequence[Member], peer: Peer) -> Failure:
    """The failure of a process that has ended, and these with it. Meshes of actors say more than those of processes, owned first."""
    assert peer.evidence is not None
    meshes = tuple(dict.fromkeys(member.identity.mesh for member in members))
    return Failure.of_proc(members[-1].identity, meshes, str(peer.address), peer.evidence)


def base_service() -> tuple[Service, Mapping[str, Callable[..., Any]]]:
    """The service of a process that runs actors, and its table."""
    service = Service()
    names = "spawn stop give_up bury suspend expect keep save watch dead_letters ping bootstrap is_waiting failed failed_elsewhere"
    return service, {name: getattr(service, name) for name in (*names.split(), "inspect", "alter")}
