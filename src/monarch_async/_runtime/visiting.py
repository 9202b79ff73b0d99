"""Visitors: processes that join a running job to look into it, or, where they say so, to change something.

Theory: a visitor is a runtime of its own, with a link to each process that it asks. In the hello of its handshake, which proves that it
holds the job's key, stands what it may do. The process that accepts puts a `Visit` between that link and its own `deliver`; other links
have none and pay nothing.

Rules:

* A visitor with the rights `READ` may ask ``inspect``, with plain arguments, and nothing else: of what it sends nothing is unpickled that
  could run code. It is kept from mistakes so; whoever holds the key of a job can join it as anything.
* What one with the rights `WRITE` sends is taken as from any other process. Audited are: the first call of each endpoint of each actor,
  also of many at once through the tree; each call of a service that does more than look; and whatever ``alter`` does by that.
* A visitor that goes away, however it does, is forgotten at once: its requests are cancelled, and it is not waited for.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn, Protocol

from monarch_async._core.events import Evidence, Identity
from monarch_async._core.faults import encode_fault
from monarch_async._core.framing import CALL, CANCEL, CLOSED, CREDIT, FAIL, LIFE, TREE, pack_message
from monarch_async._runtime.history import History, fold_members
from monarch_async._runtime.link import Link
from monarch_async._runtime.peer import Peer
from monarch_async.errors import ReadOnlyError
from monarch_async.ids import ProcAddress

__all__ = ["READ", "VISITOR", "WRITE", "Visit", "Visited", "admit", "visit_of"]

VISITOR = "visitor"
"""The field of a hello: the rights, a colon, and who it is."""
READ, WRITE = "read", "write"
_LOOKS = (CANCEL, CREDIT, CLOSED, LIFE)
"""What a visitor sends beside its questions."""
AUDITED = 1000
"""Endpoints that are told apart in one visit."""
_LOOKING = frozenset(("inspect", "ping", "watch", "dead_letters", "is_waiting", "health", "output_text"))
"""Services that change nothing."""


class Visited(Protocol):
    """What this needs of the runtime that is visited."""

    me: ProcAddress
    history: History
    parts: dict[str, Any]
    peers: dict[str, Peer]

    def deliver(self, link: Link, messages: list[list[Any]], buffers: list[memoryview] | None) -> None: ...


class Visit:
    """One visitor's link with this process; `who` is for people."""

    def __init__(self, runtime: Visited, link: Link, rights: str, who: str) -> None:
        self.who = who
        self.writes = rights == WRITE
        self._runtime = runtime
        self._link = link
        self._audited: set[tuple[int, str]] = set()

    def deliver(self, link: Link, messages: list[list[Any]], buffers: list[memoryview] | None) -> None:
        """In place of the runtime's."""
        if self.writes:
            for fields in messages:
                if fields[0] == CALL:
                    self._note_call(fields[1], str(fields[2]))
                elif fields[0] == TREE:
                    self._note_tree(fields[1], str(fields[2]), fields[3])
            self._runtime.deliver(link, messages, buffers)
            return
        allowed = []
        for fields in messages:
            if fields[0] == CALL:
                if why := _refusal(fields, buffers):
                    if fields[3]:
                        link.send_control(pack_message((FAIL, fields[3], encode_fault(ReadOnlyError(why), actor=""))))
                    continue
            elif fields[0] not in _LOOKS:
                continue
            allowed.append(fields)
        if allowed:
            self._runtime.deliver(link, allowed, None)

    def _note_call(self, key: int, endpoint: str) -> None:
        if not key:
            if endpoint not in _LOOKING and endpoint != "alter":  # which does that itself
                self._audit(str(self._runtime.me), f"asks for {endpoint}")
        elif self._is_first(key, endpoint):
            cells: Any = getattr(self._runtime, "cells", {})
            actor = str(cells[key].identity) if key in cells else f"actor {key:#x}"
            self._audit(actor, f"calls {actor}.{endpoint}")

    def _note_tree(self, key: int, endpoint: str, members: list[Any]) -> None:
        """To many at once, by way of this agent, which knows no actors but processes."""
        if self._is_first(key, endpoint):
            agent: Any = self._runtime.parts.get("agent")
            uids = [member[0] for member in members if isinstance(member, list) and member]
            known = [agent.procs[uid].request.me for uid in uids if uid in agent.procs] if agent is not None else []
            where = fold_members(Identity(me.name, "", me.rank) for me in known)
            self._audit(where, f"calls {endpoint} of {len(uids)} members of actor {key:#x}, in {where or 'no process of this host'}")

    def _is_first(self, key: int, endpoint: str) -> bool:
        if (key, endpoint) in self._audited or len(self._audited) > AUDITED:
            return False
        self._audited.add((key, endpoint))
        if len(self._audited) > AUDITED:
            self._audit("", f"calls more than {AUDITED} endpoints, of which no further ones are told")
            return False
        return True

    def _audit(self, subject: str, text: str) -> None:
        self._runtime.parts["audit"](self.who, subject, text)


def admit(runtime: Visited, peer: Peer, link: Link, visitor: str) -> None:
    """Let a visitor in, over a link that has just been made for it."""
    rights, _, who = visitor.partition(":")
    visit = Visit(runtime, link, rights, who[:100] or "a visitor")
    link.take_by(visit.deliver)
    link.lend = None  # it has no inbox for descriptors
    visits: dict[Link, Visit] = runtime.parts.setdefault("visits", {})
    visits[link] = visit

    def lost(error: Exception | None) -> None:
        visits.pop(link, None)
        if not link.ended:
            peer.gone(Evidence("the visitor has left"))
        if runtime.peers.get(peer.address.uid) is peer:
            del runtime.peers[peer.address.uid]

    link.on_lost = lost
    if visit.writes and "agent" in runtime.parts:  # which every visitor asks first
        runtime.history.note("visitor", visit.who, "looks in, and may change something")


def visit_of(runtime: Visited, origin: object) -> Visit | None:
    """Whose visit a message from `origin` belongs to."""
    visits: dict[Link, Visit] = runtime.parts.get("visits", {})
    link = getattr(origin, "link", None)
    return visits.get(link) if link is not None else None


def _refusal(fields: list[Any], buffers: object) -> str:
    """Why a visitor that only looks can't have this; empty if it can."""
    _, key, endpoint, _, _, body, *_ = fields
    if not key and endpoint in ("inspect", "ping") and not buffers and _is_plain(body):
        return ""
    what = ", and calls actors" if key else "" if endpoint == "alter" else f", and asks for {endpoint!r}"
    return f"this visit is read-only{what}: to change something needs --write (write=True)"


class _Plain(pickle.Unpickler):
    """Of values that run no code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError("only plain values are taken")


def _is_plain(body: bytes) -> bool:
    try:
        if body:
            _Plain(io.BytesIO(body)).load()
    except Exception:  # whatever the bytes are, they are not what was asked for
        return False
    return True
