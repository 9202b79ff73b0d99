"""What inspections return: plain named tuples, and how they are written as JSON.

Rules: the fields are a schema that others rely on (`tests/console/schemas`): names are not changed or removed, new ones come last. Times
are in seconds, sizes in bytes; `when` is a time since the epoch. What is not known is `None`, or ``""``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = [
    "ActorRow",
    "CallRow",
    "Cause",
    "Check",
    "DeadLetterRow",
    "Done",
    "Evaluated",
    "Event",
    "Frame",
    "Hop",
    "JobInfo",
    "LinkRow",
    "LogLine",
    "ProcRow",
    "Profile",
    "Recorded",
    "StackRow",
    "StateRow",
    "TopRow",
    "Traced",
    "TreeRow",
    "to_json",
]


class ActorRow(NamedTuple):
    """One actor. `state` is that of its process where that says more: ``stuck``, ``frozen``, ``unreachable``.

    `since` is the age of the state; of one that is ready, the time since its life began. `mailbox` counts what waits, `in_flight` the
    handlers that run, `endpoint` is the one that has run for longest. `restarts` counts its lives before this one. `rss` is its process's
    memory.
    """

    actor: str
    class_name: str
    rank: int
    process: str
    host: str
    pid: int
    state: str
    since: float | None
    endpoint: str
    mailbox: int | None
    in_flight: int | None
    restarts: int
    rss: int | None


class ProcRow(NamedTuple):
    """One process of the job: kind is ``client``, ``agent``, ``proc`` or ``visitor``. `cpu` is the processor time that it has used."""

    process: str
    kind: str
    host: str
    pid: int
    state: str
    since: float | None
    place: str
    why: str
    rss: int | None
    cpu: float | None
    threads: int | None
    uid: str


class TreeRow(NamedTuple):
    """One line of the supervision tree, which is listed from the top down: `depth` says below which line it stands.

    `kind` is ``program``, ``actor``, ``processes``, ``actors`` or ``supervisor``. `policy` is its restart policy, ``""`` where it has none;
    of the `budget` restarts that are allowed within `within` seconds `used` have been made.
    """

    depth: int
    kind: str
    name: str
    class_name: str
    size: int
    process: str
    policy: str
    used: int
    budget: int
    within: float
    state: str


class TopRow(NamedTuple):
    """What an actor has done since the last look: messages handled per second; and its process: cores used, memory."""

    actor: str
    process: str
    pid: int
    state: str
    endpoint: str
    mailbox: int | None
    in_flight: int | None
    handled: float | None
    cpu: float | None
    rss: int | None


class CallRow(NamedTuple):
    """A call that waits for its answer: who waits (an actor, or the program) for which endpoint of whom, and for how long.

    `state` is ``queued`` (in the mailbox), ``running``, or ``sent`` where the other side does not say. `blocks` says whether the caller
    can't go on before the answer comes.
    """

    caller: str
    caller_process: str
    actor: str
    process: str
    endpoint: str
    state: str
    age: float | None
    blocks: bool


class Frame(NamedTuple):
    """One call: file, line, function."""

    file: str
    line: int
    function: str


class Hop(NamedTuple):
    """One handler in a chain of those that wait for each other: where it stands (outermost call first), what it waits for."""

    actor: str
    process: str
    endpoint: str
    state: str
    age: float | None
    frames: tuple[Frame, ...]
    waits_for: str


class StackRow(NamedTuple):
    """The Python stack of a process, innermost call last. `source` says who has told it.

    ``itself`` (its event loop), ``watchdog`` (its own thread for that), ``signal`` (from outside), ``py-spy``.
    """

    process: str
    pid: int
    state: str
    actor: str
    endpoint: str
    source: str
    text: str
    why: str


class LinkRow(NamedTuple):
    """One link, from its sender's side.

    `sent` and `received` count frames. `queued` are bytes that are sent and not acknowledged, or wait to be sent; `messages` and `bytes`
    what the receiver's mailboxes have not given credit for; `calls` those without an answer. `reconnects` counts lost connections, `silent`
    is the time since the other side was heard of. `sent_bytes` and `received_bytes` are all bytes so far: of what is sent each frame once,
    without acknowledgements; of what is received whatever was read.
    """

    process: str
    peer: str
    kind: str
    connected: bool
    reconnects: int
    sent: int
    received: int
    queued: int
    messages: int
    bytes: int
    calls: int
    silent: float | None
    sent_bytes: int
    received_bytes: int


class DeadLetterRow(NamedTuple):
    """A message that could not be delivered, and for whose answer nobody waits."""

    process: str
    actor: str
    endpoint: str
    reason: str
    when: float


class Event(NamedTuple):
    """Something in the life of a job: `kind` is ``failed``, ``ended``, ``restarted``, ``exited``, ``escalated``, ``visitor`` or ``write``.

    `subject` is an actor or a process, `process` where it was noted.
    """

    when: float
    process: str
    kind: str
    subject: str
    text: str
    detail: str = ""


class Cause(NamedTuple):
    """One step in the story of an end, the last one first: what happened to whom, and the traceback or last output that goes with it."""

    when: float
    subject: str
    what: str
    detail: str


class LogLine(NamedTuple):
    """A line of a process's output."""

    process: str
    rank: int
    text: str


class StateRow(NamedTuple):
    """The attributes of an actor's instance: name, type and ``repr``, each cut to a bounded length."""

    actor: str
    process: str
    attributes: tuple[tuple[str, str, str], ...]
    omitted: int


class Evaluated(NamedTuple):
    """What an expression came to in an actor: its ``repr``, or the error."""

    actor: str
    value: str
    type_name: str
    error: str


class Traced(NamedTuple):
    """One message that an actor has handled. `outcome` is ``ok``, ``cancelled`` or the error's type."""

    actor: str
    when: float
    endpoint: str
    sender: str
    size: int
    duration: float
    outcome: str


class Profile(NamedTuple):
    """Where a process has spent its time: collapsed stacks (``a;b;c 12``), and the same as a flame graph."""

    process: str
    pid: int
    seconds: float
    samples: int
    tool: str
    folded: str
    svg: str


class Recorded(NamedTuple):
    """A timeline that was written: seconds, processes that are in it, events, flows from calls to handlers.

    `dropped` are events that there was no room for, `silent` processes that did not answer.
    """

    file: str
    seconds: float
    processes: int
    events: int
    flows: int
    dropped: int
    silent: int


class Done(NamedTuple):
    """What a write has done to whom."""

    target: str
    text: str


class Check(NamedTuple):
    """One thing that this machine does or does not offer, and what to do about a lack."""

    name: str
    ok: bool
    found: str
    fix: str


class JobInfo(NamedTuple):
    """A job of this user: `state` is ``running``, ``ended`` for one that has left its file behind, or ``elsewhere``, on another machine."""

    name: str
    id: str
    pid: int
    started: float
    version: str
    state: str
    file: str
    address: str


def to_json(value: Any) -> Any:
    """A record, or any list of records, as what `json.dumps` takes."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_json(field) for name, field in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): to_json(field) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(field) for field in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value
