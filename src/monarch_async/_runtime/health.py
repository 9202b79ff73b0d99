"""The agent's side of health: it knows each process's state at any time, and looks after those that are stuck.

Theory: a process's watchdog writes to its slot (see `pulse`), the zygotes tell who is halted, the launcher who has ended. A look every
`PACE` finds who is stuck:

* the watchdog is fresh, the loop has not called back for the option `stuck_after`: Python code blocks the loop, and the watchdog has
  written down the stack;
* the watchdog is silent for as long, asleep though nothing halts the process: other code keeps the interpreter's lock, mostly C code. The
  stack is taken from outside.

Rules:

* The time for which a process was frozen counts for nothing: neither is it stuck then, nor does it become so by it.
* An *incident* is one time of being stuck. What it leads to (a warning, a kill where the owner has asked for that) comes once for each.
* When the agent itself comes late to a look, as after the machine has slept, that look is left out: the processes have slept too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgpack

from monarch_async._core.events import Evidence
from monarch_async._runtime.asking import tell
from monarch_async._runtime.child import Child
from monarch_async._runtime.config import SpawnRequest
from monarch_async._runtime.context import Message
from monarch_async._runtime.pulse import NO_SLOT, NOW, STACK, Page, Pulse, Slot, inherited_page
from monarch_async._runtime.roster import read_roster
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.stacks import dump_from_outside, find_endpoint, last_place, read_dump, render, state_of
from monarch_async.health import Health, ProcState

__all__ = ["HealthWatch"]

PACE = 0.1
"""Seconds between two looks."""
TARDY = 0.3
"""Seconds by which the watchdog of a healthy process may be behind, beyond which it is called silent."""
STALE = 1.0
"""Seconds after which a stack that was taken from outside is taken anew for who asks."""
PATIENCE = 0.5
"""Seconds for which who asks waits for that."""
REMEMBERED = 4096
"""Ends that are kept for who asks later."""
FREEZES = 16
"""How many of the times for which a process was frozen are kept."""


class _Incident:
    """One time of being stuck."""

    __slots__ = ("actor", "began", "dump", "dumped", "endpoint", "silent", "stack", "task", "warned")

    def __init__(self, began: float) -> None:
        self.began = began
        self.silent = False  # the watchdog can't speak either
        self.stack = ""
        self.actor = self.endpoint = self.task = ""
        self.dumped = 0.0  # when the stack was last taken from outside
        self.dump: asyncio.Task[None] | None = None
        self.warned = False


class _Watched:
    """A process that was asked for."""

    def __init__(self, request: SpawnRequest, number: int, slot: Slot | None, now: float) -> None:
        self.request = request
        self.number = number
        self.slot = slot
        self.started = now
        self.child: Child | None = None  # once it exists
        self.end_wanted = False
        self.follows = False  # another, in whose place it is
        self.frozen = 0.0  # since when; 0: it is not
        self.freezes: deque[tuple[float, float]] = deque(maxlen=FREEZES)
        self.incident: _Incident | None = None
        self.well = 0.0  # when the last one was over
        self.doubted = 0.0, 0.0  # the last beat of a watchdog that seemed to be silent, and when that was first seen
        self.killed = ""  # why it was killed from here
        self.unjudged = 0  # who wants it to be taken for frozen; see `as_if_frozen`

    def since(self, start: float, now: float) -> float:
        """Seconds since `start` in which it was not frozen."""
        spans = [*self.freezes, (self.frozen, now)] if self.frozen else self.freezes
        return now - start - sum(max(0.0, min(end, now) - max(begin, start)) for begin, end in spans)

    def freeze(self, frozen: bool, now: float) -> None:
        if frozen and not self.frozen:
            self.frozen = now
        elif not frozen and self.frozen:
            self.freezes.append((self.frozen, now))
            self.frozen = 0.0

    def recover(self, now: float) -> None:
        """It is not stuck, or not any more."""
        if self.incident is not None:
            self.incident = None
            self.well = now


class HealthWatch:
    """Bind it to the agent's runtime."""

    def __init__(self) -> None:
        self._runtime: Runtime
        self._page: Page | None = inherited_page()
        self._watched: dict[str, _Watched] = {}
        self._gone: dict[str, tuple[Health, float]] = {}  # how processes ended, and when
        self._next: dict[str, str] = {}  # who is there in the place of one that ended, or may come to be
        self._awaited: dict[str, str] = {}  # those of them that have not been asked for yet, and in whose place
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when the next look should come

    def bind(self, runtime: Runtime) -> None:
        self._runtime = runtime

    # What the agent tells.

    def expect(self, request: SpawnRequest) -> int:
        """A process will be started; returns the number of its slot."""
        number = self._page.take() if self._page is not None else NO_SLOT
        slot = self._page.slot(number) if self._page is not None and number != NO_SLOT else None
        watched = self._watched[request.me.uid] = _Watched(request, number, slot, time.monotonic())
        watched.follows = self._awaited.pop(request.me.uid, "") != ""
        return number

    def watch(self, uid: str, child: Child) -> None:
        """It exists."""
        watched = self._watched[uid]
        watched.child = child
        child.on_halt = lambda: _see(watched, child)
        child.on_halt()
        if self._timer is None:
            self._look_later()

    def expect_end(self, uids: Sequence[str]) -> None:
        """Processes are being told to stop, or killed."""
        for uid in uids:
            if uid in self._watched:
                self._watched[uid].end_wanted = True

    def ended(self, uid: str, evidence: Evidence) -> Evidence:
        """It is gone, or was never there; returns the evidence, with what is known here of the reason."""
        watched = self._watched.pop(uid)
        if self._page is not None:
            self._page.give_back(watched.number)
        if watched.incident is not None and watched.incident.dump is not None:
            watched.incident.dump.cancel()
        if watched.killed:
            evidence = evidence._replace(text=f"{evidence.text} on request: {watched.killed}")
        wanted = watched.end_wanted or evidence.code == 0
        pid = watched.child.pid if watched.child is not None else 0
        self._gone[uid] = Health(ProcState.STOPPED if wanted else ProcState.FAILED, pid=pid, why=evidence.text), time.monotonic()
        if len(self._gone) > REMEMBERED:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._next.pop(oldest, None)
        return evidence

    def expect_successor(self, uid: str, following: str) -> None:
        """In the place of one that has ended there may be another."""
        self._next[uid] = following
        self._awaited[following] = uid

    def give_up(self, following: str) -> None:
        """There will not."""
        uid = self._awaited.pop(following, "")
        if uid in self._gone:
            del self._next[uid]
            self._gone[following] = self._gone[uid]

    # What others ask for.

    def glance(self, uid: str) -> Health:
        """What is known of a process now; unlike `tell`, nothing is waited for."""
        uid = self._latest(uid)
        if uid in self._watched:
            self._judge(self._watched[uid], time.monotonic())
        return self._health(uid, time.monotonic())

    def requests(self) -> list[SpawnRequest]:
        """The processes that there are, or that are being started, as they were asked for."""
        return [watched.request for watched in self._watched.values()]

    def actors_of(self, uid: str) -> list[str]:
        """The actors that a process lists; one whose list is full is not complete."""
        slot = self.slot_of(uid)
        return sorted({actor for actor, _, _ in read_roster(slot)} - {""}) if slot is not None else []

    def slot_of(self, uid: str) -> Slot | None:
        """What a process shows of itself."""
        watched = self._watched.get(uid)
        return watched.slot if watched is not None else None

    @contextlib.contextmanager
    def as_if_frozen(self, uid: str) -> Iterator[None]:
        """Meanwhile a process counts as what it is now, though it may be let go on for a moment and halted again."""
        watched = self._watched[uid]
        child = watched.child
        assert child is not None
        watched.unjudged += 1
        try:
            yield
        finally:
            watched.unjudged -= 1
            _see(watched, child)

    def kill(self, uid: str, why: str) -> None:
        """SIGKILL a process; its evidence will say why."""
        watched = self._watched.get(uid)
        if watched is not None and watched.child is not None:
            watched.killed = why
            watched.child.kill()

    async def tell(self, message: Message | None, uids: list[str]) -> list[Health]:
        """The health of processes of this host."""
        dumps = []
        uids = [self._latest(uid) for uid in uids]
        for watched in (self._watched[uid] for uid in uids if uid in self._watched):
            now = time.monotonic()
            self._judge(watched, now)
            incident = watched.incident
            if incident is not None and incident.silent and now - incident.dumped > STALE:
                dumps.append(self._take_stack(watched, incident))
        if dumps:
            await asyncio.wait(dumps, timeout=PATIENCE)
        now = time.monotonic()
        return [self._health(uid, now) for uid in uids]

    def _latest(self, uid: str) -> str:
        """Who is in the place of this process now, or was last."""
        while self._next.get(uid, "") in self._watched or self._next.get(uid, "") in self._gone:
            uid = self._next[uid]
        return uid

    def _health(self, uid: str, now: float) -> Health:
        watched = self._watched.get(uid)
        if watched is None:
            uid = self._awaited.get(uid, uid)
            if uid not in self._gone:
                return Health(ProcState.STARTING, why="its host has not been asked to start it yet, or it ended long ago")
            end, when = self._gone[uid]
            if self._next.get(uid) in self._awaited:
                end = end._replace(state=ProcState.RESTARTING, pid=0)
            return end._replace(since=now - when)
        child = watched.child
        pid = child.pid if child is not None else 0
        pulse = watched.slot.read() if watched.slot is not None else Pulse()
        actor, endpoint, task = _texts(watched.slot)
        running = watched.since(pulse.began, now) if pulse.began else 0.0
        health = Health(ProcState.READY, pid=pid, actor=actor, endpoint=endpoint, running=running if endpoint else 0.0)
        if watched.frozen:
            return health._replace(state=ProcState.FROZEN, since=now - watched.frozen, why="halted by a signal; SIGCONT lets it go on")
        if watched.slot is None:
            return health._replace(since=now - watched.started, why="it is not watched: too many processes on this host")
        if pulse.ending:
            return health._replace(state=ProcState.BUSY, since=now - pulse.beat, why="it is ending")
        if not pulse.beat:
            state = ProcState.RESTARTING if watched.follows else ProcState.STARTING
            return health._replace(state=state, since=watched.since(watched.started, now))
        incident = watched.incident
        if incident is None:
            return health._replace(
                state=ProcState.BUSY if pulse.busy else ProcState.READY, since=watched.since(max(pulse.changed, watched.well), now)
            )
        age = watched.since(incident.began, now)
        why = "code that keeps the interpreter's lock" if incident.silent else "Python code"
        inside = f" in task {task!r}" if task and not incident.silent and not actor else ""
        stuck = health._replace(state=ProcState.STUCK, since=age, why=f"{why} blocks its event loop{inside}")
        if incident.silent:  # what the slot says is from before
            if not endpoint or endpoint != incident.endpoint:
                stuck = stuck._replace(actor=incident.actor, endpoint=incident.endpoint, running=age)
            return stuck._replace(stack=incident.stack)
        return stuck._replace(stack=watched.slot.read_text(STACK).decode(errors="replace") if pulse.stacked > incident.began else "")

    # Looking after them.

    def _look_later(self) -> None:
        self._due = time.monotonic() + PACE
        self._timer = self._runtime.loop.call_later(PACE, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._watched or self._runtime.closing:
            return
        now = time.monotonic()
        if now - self._due < TARDY:
            for uid, watched in list(self._watched.items()):
                self._judge(watched, now)
                if watched.incident is not None:
                    self._look_after(uid, watched, watched.incident, now)
        self._look_later()

    def _judge(self, watched: _Watched, now: float) -> None:
        """Find out whether a process is stuck."""
        child, slot = watched.child, watched.slot
        if child is None or slot is None or child.exited.done() or watched.unjudged:
            return
        if watched.frozen:
            if state_of(child.pid) != "T":  # its zygote will tell, but may be busy
                watched.freeze(False, now)
            return
        pulse = slot.read()
        if not pulse.beat or pulse.ending:
            watched.recover(now)
            return
        limit = self._runtime.options.stuck_after
        silent = watched.since(pulse.beat, now) >= (TARDY if pulse.held else max(limit, TARDY) + PACE)
        if silent:
            state = state_of(child.pid)
            if state == "T":
                watched.freeze(True, now)
                return
            if state in "ZXt":  # it has ended, as has one without state, and its zygote will tell; or a debugger holds it
                return
            if state_of(child.pid, pulse.watchdog) == "R":  # it waits for a CPU, and not for the lock
                return
            if pulse.beat != watched.doubted[0]:  # if it was this host that stood still for a moment, it will beat before the next look
                watched.doubted = pulse.beat, now
            if now - watched.doubted[1] < PACE / 2:
                return
        began = pulse.held or pulse.beat + PACE  # on average, since the watchdog looks half as often
        if not (pulse.held or silent) or watched.since(began, now) < limit:
            watched.recover(now)
            return
        incident = watched.incident
        if incident is None or (not silent and not incident.silent and began > incident.began):
            incident = watched.incident = _Incident(began)
        incident.silent = silent

    def _look_after(self, uid: str, watched: _Watched, incident: _Incident, now: float) -> None:
        """Take the stack of a process that can't do that itself; warn; kill where that is wanted."""
        if incident.silent and not incident.dumped:
            self._take_stack(watched, incident)
        age = watched.since(incident.began, now)
        options = self._runtime.options
        if age >= options.stuck_warn and not incident.warned:
            incident.warned = True
            health = self._health(uid, now)
            where = f"{watched.request.me} (pid {health.pid})"
            text = f"{where} has been stuck for {age:.1f} s{_inside(health)}: {health.why}. Its stack, innermost call last:\n{health.stack}"
            tell(self._runtime, self._runtime.client, "warn", text)
        if watched.request.kill_stuck and age >= options.stuck_kill_after and not watched.killed and watched.child is not None:
            health = self._health(uid, now)
            place = last_place(health.stack)
            watched.killed = f"stuck for {age:.1f} s{_inside(health)}{f' ({place})' if place else ''}"
            watched.child.kill()

    def _take_stack(self, watched: _Watched, incident: _Incident) -> asyncio.Task[None]:
        """Take the stack from outside, in the background, unless that is under way."""
        if incident.dump is None or incident.dump.done():
            incident.dumped = time.monotonic()
            incident.dump = self._runtime.tasks.start(self._dump(watched, incident), name=f"taking the stack of {watched.request.me}")
        return incident.dump

    async def _dump(self, watched: _Watched, incident: _Incident) -> None:
        assert watched.child is not None
        assert watched.slot is not None
        pulse = watched.slot.read()
        frames = read_dump(await dump_from_outside(watched.child.pid, pulse), pulse.main)
        if frames:
            incident.stack = render(frames)
            incident.actor, incident.endpoint = find_endpoint(frames, read_roster(watched.slot))


def _see(watched: _Watched, child: Child) -> None:
    """Note whether it is halted. That it went on is old news where the kernel says that it stands again."""
    if not watched.unjudged and not child.exited.done():
        watched.freeze(state_of(child.pid) == "T", time.monotonic())


def _inside(health: Health) -> str:
    return f" in {health.place}" if health.place else ""


def _texts(slot: Slot | None) -> tuple[str, str, str]:
    packed = slot.read_text(NOW) if slot is not None else b""
    if not packed:
        return "", "", ""
    actor, endpoint, task = msgpack.unpackb(packed)
    return actor, endpoint, task
