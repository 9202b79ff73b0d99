"""The agent's side of the tree: what comes once for many processes of this host goes on to each, and their answers go back together.

Rules:

* Bodies are passed on as they came. Nothing of a user's is unpickled here.
* Every process gets what one sender has sent to it in the order of its numbers, over one link; what that link loses is told to it.
* Answers that come in one turn of the loop leave together, equal ones as one.
* When a process is gone, those who have sent to it through here are told; when one of those is, what it has called is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from monarch_async._core.events import Evidence
from monarch_async._core.framing import (
    CANCEL,
    CREDIT_FOR,
    FAIL,
    INTRODUCE,
    LOST,
    PASSED,
    RELAYED,
    REPLIES,
    REPLY,
    STARTED,
    TREE,
    pack_message,
)
from monarch_async._runtime.connect import address_fields
from monarch_async._runtime.link import INLINE, Link
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.runtime import Runtime
from monarch_async.ids import ProcAddress

__all__ = ["FanOut"]


class _Call(NamedTuple):
    """A request that was sent on: to where its answer goes, and under which number."""

    back: Link
    request: int


@dataclass(slots=True)
class _Passed:
    """How far what one process sends to another has come: the last number sent on; the last mark, and session, lost on the direct path."""

    number: int = 0
    mark: int = 0
    session: str = ""


class FanOut:
    """Sends on for one agent; `find` tells the address of a process of this host."""

    def __init__(self, runtime: Runtime, find: Callable[[str], ProcAddress]) -> None:
        self._runtime = runtime
        self._find = find
        self._calls: dict[Link, dict[int, _Call]] = {}  # by the link over which they were sent on, and the number they have there
        self._under_way: dict[Link, dict[int, tuple[Link, int]]] = {}  # the other way round
        self._passed: dict[str, dict[str, _Passed]] = {}  # by receiver and sender
        self._introduced: dict[Link, set[str]] = {}  # senders that a receiver knows, by the link with it
        self._answers: dict[tuple[Link, bytes], list[int]] = {}  # bodies that leave at the end of this turn, and the requests they answer
        runtime.kinds.update({TREE: self._tree, PASSED: self._take_passed, CREDIT_FOR: self._credit})
        runtime.kinds.update({REPLY: self._reply, FAIL: self._fail, STARTED: self._started, CANCEL: self._cancel})
        runtime.on_peer_gone.append(self._peer_gone)
        runtime.on_session_over.append(self._session_over)

    # Down.

    def _tree(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        _, key, endpoint, members, body, extras = fields
        source = self._runtime.peer_of(link).address
        size = len(body) + sum(view.nbytes for view in buffers or ())
        for uid, rank, request, number, after in members:
            peer = self._runtime.peer(self._find(uid))
            out = peer.connect()
            if out is None:
                assert peer.why_gone is not None
                self._tell_lost(link, uid, peer.why_gone, gone=True)
                continue
            passed = self._passed.setdefault(uid, {}).setdefault(source.uid, _Passed())
            if source.uid not in self._introduced.setdefault(out, set()):
                passed.number = max(passed.number, number - 1)
                self._introduce(out, source, passed)
            passed.number = max(passed.number, number)
            own = 0
            if request:
                own = next(self._runtime.requests)
                self._calls.setdefault(out, {})[own] = _Call(link, request)
                self._under_way.setdefault(link, {})[request] = (out, own)
            if extras is not None and "c" in extras:
                chain = extras["c"]
                extras = {**extras, "c": [*chain[:-1], [*chain[-1][:2], request, chain[-1][3]]]}
            if size > INLINE or buffers:
                out.send_large([RELAYED, key, endpoint, own, rank, b"", extras, source.uid, number, after], body, buffers or ())
            else:
                out.send(pack_message((RELAYED, key, endpoint, own, rank, body, extras, source.uid, number, after)))

    def _introduce(self, out: Link, source: ProcAddress, passed: _Passed) -> None:
        self._introduced.setdefault(out, set()).add(source.uid)
        out.send(pack_message((INTRODUCE, address_fields(source), passed.number, passed.mark, passed.session)))

    def _take_passed(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        _, uid, number, mark, session = fields
        source = self._runtime.peer_of(link).address
        out = self._runtime.peer(self._find(uid)).connect()
        if out is not None:
            passed = self._passed.setdefault(uid, {}).setdefault(source.uid, _Passed())
            passed.number, passed.mark, passed.session = max(passed.number, number), mark, session
            self._introduce(out, source, passed)

    def _cancel(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        sent = self._under_way.get(link, {}).get(fields[1])
        if sent is not None:
            out, own = sent
            out.send_control(pack_message((CANCEL, own, fields[2])))

    # Up.

    def _take(self, link: Link, own: int) -> _Call | None:
        """The call that is answered."""
        call = self._calls.get(link, {}).pop(own, None)
        if call is not None:
            self._under_way.get(call.back, {}).pop(call.request, None)
        return call

    def _reply(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        call = self._take(link, fields[1])
        if call is None:
            return
        body = fields[2]
        if buffers or len(body) > INLINE:
            call.back.send_large([REPLY, call.request, b""], body, buffers or ())
            return
        if not self._answers:
            self._runtime.loop.call_soon(self._flush)
        self._answers.setdefault((call.back, body), []).append(call.request)

    def _flush(self) -> None:
        answers, self._answers = self._answers, {}
        for (back, body), requests in answers.items():
            back.send_control(pack_message((REPLIES, requests, body) if len(requests) > 1 else (REPLY, requests[0], body)))

    def _fail(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        call = self._take(link, fields[1])
        if call is not None:
            call.back.send_control(pack_message((FAIL, call.request, fields[2])))

    def _started(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        call = self._calls.get(link, {}).get(fields[1])
        if call is not None:
            call.back.send_control(pack_message((STARTED, call.request)))

    def _credit(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        _, uid, key, messages, size = fields
        back = self._link_with(uid)
        if back is not None:
            back.send_control(pack_message((CREDIT_FOR, self._runtime.peer_of(link).address.uid, key, messages, size)))

    def _link_with(self, uid: str) -> Link | None:
        """Over which to tell a sender something; none if it has lost its session with this agent, and so knows."""
        peer = self._runtime.peers.get(uid)
        links = peer.links if peer is not None else ()
        return next((link for link in links if link.connection is not None), None) or next(iter(links), None)

    # What ends.

    def _tell_lost(self, link: Link, uid: str, evidence: Evidence, *, gone: bool) -> None:
        self._flush()  # what was answered before the end
        link.send_control(pack_message((LOST, uid, evidence.to_map(), gone)))

    def _peer_gone(self, peer: Peer) -> None:
        uid = peer.address.uid
        assert peer.evidence is not None
        told = [*self._passed.pop(uid, ())]  # whoever has sent to it
        for receiver, senders in self._passed.items():
            if senders.pop(uid, None) is not None:
                told.append(receiver)
        for other in told:
            link = self._link_with(other)
            if link is not None:
                self._tell_lost(link, uid, peer.evidence, gone=True)

    def _session_over(self, peer: Peer, link: Link) -> None:
        for out, own in self._under_way.pop(link, {}).values():
            self._calls.get(out, {}).pop(own, None)
            out.send_control(pack_message((CANCEL, own, "its caller is gone")))
        for call in self._calls.pop(link, {}).values():
            self._under_way.get(call.back, {}).pop(call.request, None)
        if self._introduced.pop(link, None) is None or peer.evidence is not None or self._runtime.closing:
            return
        senders = self._passed.get(peer.address.uid, {})
        for uid in senders:
            back = self._link_with(uid)
            if back is not None:
                self._tell_lost(back, peer.address.uid, Evidence("lost its session with the agent of its host"), gone=False)
        again = peer.connect() if link.connections else None
        for uid, passed in senders.items():
            if again is not None and uid in self._runtime.peers:
                self._introduce(again, self._runtime.peers[uid].address, passed)
