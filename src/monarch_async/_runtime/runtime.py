"""A runtime: one process's half of the system. Its actors, its links, its pending calls; what comes in is sorted here.

Rules:

* Everything here runs on one loop. Other threads reach it through `call_soon_threadsafe`.
* Messages to key 0 are for the runtime itself: its *service*, whose functions are called at once, in order, not through a mailbox.
* A message for an actor that is not known is kept for a while (its spawn may be on another link); for one that was here and is
  gone, the answer says why.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from monarch_async._channel.base import Middle
from monarch_async._channel.pool import BufferPool
from monarch_async._channel.stream import Stream
from monarch_async._channel.torch_hook import install as install_tensor_reducers
from monarch_async._core.codec import loads
from monarch_async._core.events import Evidence, Failure
from monarch_async._core.framing import CALL, CANCEL, CLOSED, CREDIT, FAIL, PORT, REPLY, STARTED, pack_message
from monarch_async._runtime.absent import Absent, DeadLetters
from monarch_async._runtime.branch import Branch, RelayedOrigin
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.connect import keep
from monarch_async._runtime.context import Message, Origin, State, Waiter
from monarch_async._runtime.debt import Debt
from monarch_async._runtime.history import History
from monarch_async._runtime.lane import Lane
from monarch_async._runtime.lending import Lending
from monarch_async._runtime.link import Link
from monarch_async._runtime.lives import Lives
from monarch_async._runtime.local import LocalLane
from monarch_async._runtime.origin import LinkOrigin, LocalOrigin, PortSink, read_fault, take_port_message
from monarch_async._runtime.peer import Peer, end_predecessors
from monarch_async._runtime.serving import serve
from monarch_async._runtime.supervisor import Home, Ownership
from monarch_async._runtime.suspects import Step
from monarch_async._runtime.tasks import TaskSet
from monarch_async._runtime.tree import Handle, Tree
from monarch_async.ids import ProcAddress, new_uid
from monarch_async.options import Options

__all__ = ["SERVICE", "PortSink", "Runtime"]

SERVICE = 0
TICK = 0.05
NOT_OURS = -1  # in place of the kind of an answer, or a cancellation, that belongs to no request of this process


class Runtime:
    """See the module's docstring. `service` maps names to functions ``f(message, *args)``; a coroutine's result is the answer."""

    def __init__(self, me: ProcAddress, key: bytes, options: Options, service: Mapping[str, Callable[..., Any]]) -> None:
        install_tensor_reducers()
        self.loop = asyncio.get_running_loop()
        self.me = me
        self.key = key
        self.options = options
        self.service = service
        self.agent = self.client = me  # the agent of this host, once it is known, and the program that this process works for
        self.thread = threading.get_ident()
        self.posting, self.posted = threading.Lock(), 0  # how often other threads have handed something over
        self.log = logging.getLogger("monarch_async")
        self.tasks, self.pool = TaskSet(self.loop, self.log), BufferPool()
        self.network_key: bytes | None = None  # for links to other hosts; see `connect.join_network`
        self.tls_client: ssl.SSLContext | None = None
        self.tls_server: ssl.SSLContext | None = None
        self.hello: dict[str, Any] = {}  # what it says of itself in a handshake, beside who it is
        self.parts: dict[str, Any] = {}  # what else there is to look at in this process, by name: its watchdog, its agent…
        self.closing = False
        self.stopping: Evidence | None = None  # set when this runtime begins to close: nothing new may be started
        self.evidence: Evidence | None = None  # set when its actors have ended: why sends fail
        self.cells: dict[int, Cell] = {}
        self.peers: dict[str, Peer] = {}
        self.ports: dict[int, PortSink] = {}
        self.requests: Iterator[int] = itertools.count(1)
        self.names = itertools.count(1)  # for meshes that nobody named
        # Of handlers that make calls; unlike those of any other process, since ranks of one mesh share a key and go in step.
        self.numbers = itertools.count(int.from_bytes(os.urandom(5), "little") << 22)
        self.local_lanes: dict[int, LocalLane] = {}
        self._left_lanes = WeakValueDictionary[int, LocalLane]()  # of actors that are gone, unless they come back
        self.local_calls: dict[int, Message] = {}  # under way in this process, by request
        self.local = LocalOrigin(self.local_calls, self.local_lanes.get)
        self.busy: set[Cell] = set()  # those that have something to do
        self.indebted: set[Debt] = set()  # those that owe credit
        self.ticking = False
        self.dead_letters = DeadLetters(options.dead_letters)
        self.failed: Callable[[Cell, BaseException, str], None] = lambda cell, error, endpoint: None  # an actor here can't go on
        self.left: Callable[[Cell, str], None] = lambda cell, reason: None  # one that may come back has stopped itself
        self.others_wait: Callable[[Origin, Sequence[Step]], Coroutine[Any, Any, bool]]  # see `Observer`; set by the service
        self.on_life: list[Callable[[Any], None]] = []  # told of each life of an actor before it begins; may change its handlers
        self.wrap_connection: Callable[[Link, Stream, bool], Middle] | None = None  # puts something on the way of new ones; True: sealed
        self.on_cell_added: list[Callable[[Cell], None]] = []  # told of each actor, before its first life here
        self.on_peer_gone: list[Callable[[Peer], None]] = []
        self.on_link_ended: list[Callable[[Peer, Evidence], None]] = []
        self.on_session_over: list[Callable[[Peer, Link], None]] = []  # the same, for those who keep the links' books; called before
        self.kinds: dict[int, Handle] = {}  # who takes the kinds of messages that are not handled here
        self.unhandled: Callable[[Failure], None] = lambda failure: None  # nobody in this process handles it
        self.ownership = Ownership()
        self.homes: dict[str, Home] = {}  # the meshes of processes that this one owns, by the uid of the first life of each process
        self.handle: Callable[[int, Failure], None] = lambda owner, failure: None  # a failure in what an actor here, or 0, owns
        self.hosts_up: dict[str, asyncio.Future[None]] = {}  # for a client: nobody on a host can be dialed until this is done
        self._newest: dict[str, int] = {}  # of processes that have taken another's place, the last one known, by the uid of the first
        self._origins: dict[Link, tuple[Peer, LinkOrigin]] = {}
        self.absent = Absent(self.loop, self.dead_letters, options.unknown_grace)
        self.tree = Tree(self)
        self._lives = Lives(self)
        self.history = History()
        self.on_life += (self._lives.tell, self.history.lived)
        self.branch = Branch(self)
        self.lending = Lending(self)

    # Links and peers.

    def peer(self, address: ProcAddress) -> Peer:
        peer = self.peers.get(address.uid)
        if peer is None:
            peer = self.peers[address.uid] = Peer(self, address)
            end_predecessors(self.peers, self._newest, address.uid)
        return peer

    def new_link(self, peer: Peer, session: str) -> Link:
        o = self.options
        link = Link(self.loop, session, self.deliver, max_frame=o.max_frame, link_bytes=o.link_bytes, pool=self.pool)
        peer.links.add(link)
        self._origins[link] = (peer, LinkOrigin(link))
        self._lives.greet(link)
        self.lending.offer(peer, link)
        return link

    def moved(self, link: Link, peer: Peer) -> None:
        """A link that was never connected leads to another process now."""
        self._origins[link] = (peer, self._origins[link][1])

    def handed_on(self, before: Peer, following: ProcAddress) -> None:
        """All that was ever sent to a process goes to the one in its place: so what was spawned there is that one's."""
        self.ownership.move(before.address.uid, following)

    def dial(self, peer: Peer) -> Link:
        """A new link to a peer, connected in the background."""
        link = self.new_link(peer, new_uid())
        keep(self, peer, link, dialed=True)
        return link

    def link_ended(self, peer: Peer, link: Link, evidence: Evidence) -> None:
        """A session with a peer is over; the peer may live."""
        self._origins.pop(link, None)
        for heard in self.on_session_over:
            heard(peer, link)
        for told in self.on_link_ended:
            told(peer, evidence)

    def address_of(self, origin: Origin) -> ProcAddress | None:
        """The process that messages from `origin` come from; `None` if its link has ended."""
        if origin is self.local:
            return self.me
        if isinstance(origin, RelayedOrigin):
            return origin.address
        return next((peer.address for peer, other in self._origins.values() if other is origin), None)

    @property
    def links(self) -> list[Link]:
        return list(self._origins)

    def peer_of(self, link: Link) -> Peer:
        """The process at the other end."""
        return self._origins[link][0]

    def peer_gone(self, peer: Peer) -> None:
        """A process does not exist any more."""
        for told in self.on_peer_gone:
            told(peer)

    # What comes in.

    def deliver(self, link: Link, messages: list[list[Any]], buffers: list[memoryview] | None) -> None:
        """Messages that have come over a link, the buffers with the last of them."""
        cells = self.cells
        _, origin = self._origins[link]
        for fields in messages:
            kind = fields[0]
            try:
                if kind == CALL:
                    key = fields[1]
                    request = fields[3]
                    extras = fields[6] if len(fields) > 6 else None
                    message = Message(origin, fields[2], request, fields[4], fields[5], buffers, extras)
                    if request:
                        link.inbound_calls[request] = message
                    cell = cells.get(key)
                    if link.held:
                        self.branch.hold(link, key, message)
                    elif cell is not None:
                        cell.post(message)
                    elif key == SERVICE:
                        self.serve(message)
                    else:
                        self.absent.receive(key, message, self.stopping)
                elif kind == REPLY:
                    self.settle(link, fields[1], fields[2], buffers)
                else:
                    self._control(link, kind, fields, buffers)
            except (IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
                self.log.exception("a malformed message of kind %r from the other side was dropped: %s", kind, error)

    def settle(self, link: Link, request: int, body: bytes, buffers: list[memoryview] | None) -> None:
        """A request was answered with a value."""
        entry = link.pending.pop(request, None)
        if entry is None:
            self._control(link, NOT_OURS, [REPLY, request, body], buffers)
            return
        waiter, lane, size = entry
        if link.started:
            link.started.discard(request)
        lane.credit(1, size)
        if not body:
            waiter.settle(request, None)
            return
        try:
            value = loads(body, buffers or ())
        except Exception as error:  # whatever a result's own unpickling raises belongs to who asked for it
            waiter.fail(request, error)
        else:
            waiter.settle(request, value)

    def _control(self, link: Link, kind: int, fields: list[Any], buffers: list[memoryview] | None) -> None:
        if kind == FAIL:
            entry = link.pending.pop(fields[1], None)
            if entry is not None:
                waiter, lane, size = entry
                link.started.discard(fields[1])
                lane.credit(1, size)
                waiter.fail(fields[1], read_fault(fields[2]))
            else:
                self._control(link, NOT_OURS, fields, buffers)
        elif kind == CREDIT:
            peer, _ = self._origins[link]
            owed = peer.lanes.get(fields[1])
            if owed is not None:
                owed.credit(fields[2], fields[3])
        elif kind == PORT:
            take_port_message(self, link, self._origins[link][1], fields, buffers)
        elif kind == CLOSED:
            peer, _ = self._origins[link]
            closed = peer.lanes.get(fields[1])
            if closed is not None:
                closed.close()
        elif kind == CANCEL:
            message = link.inbound_calls.get(fields[1])
            if message is not None:
                self.cancel_message(message)
            else:
                self._control(link, NOT_OURS, fields, buffers)
        elif kind == STARTED:
            if fields[1] in link.pending:
                link.started.add(fields[1])
            else:
                self._control(link, NOT_OURS, fields, buffers)
        elif fields[0] in self.kinds:
            self.kinds[fields[0]](link, fields, buffers)
        elif kind != NOT_OURS:  # else it is about what has ended meanwhile
            self.log.warning("a message of unknown kind %r was dropped", kind)

    def serve(self, message: Message) -> None:
        """A message to this runtime itself."""
        serve(self.service, self.tasks, self.log, message)

    # Actors.

    def add_cell(self, cell: Cell) -> None:
        """An actor is here from now on; what was sent to it before goes to it first."""
        self.cells[cell.key] = cell
        for told in self.on_cell_added:
            told(cell)
        if (lane := self._left_lanes.pop(cell.key, None)) is not None:
            self.local_lanes[cell.key] = lane
        for heard in self.on_life:
            heard(cell)
        cell.start()
        for message in self.absent.arrived(cell.key):
            cell.post(message)

    def forget(self, cell: Cell) -> None:
        """An actor is gone. Why is remembered for a while."""
        assert cell.evidence is not None
        if self.cells.get(cell.key) is cell:
            del self.cells[cell.key]
        self._lives.tell(cell, over=True)
        if (lane := self.local_lanes.pop(cell.key, None)) is not None:
            self._left_lanes[cell.key] = lane
        self.absent.ended(cell.key, cell.identity, cell.evidence)

    def dead_letter(self, actor: object, endpoint: str, evidence: Evidence) -> None:
        """A message that wants no answer could not be delivered."""
        self.dead_letters.add(actor, endpoint, evidence)

    def local_lane(self, key: int, mesh: str, rank: int, limit: int) -> LocalLane:
        """The account with an actor of this process."""
        lane = self.local_lanes.get(key)
        if lane is None:
            lane = self.local_lanes[key] = LocalLane(self, key, mesh, rank, limit)
        return lane

    def post_local(self, key: int, message: Message) -> None:
        """Deliver a message from this process."""
        cell = self.cells.get(key)
        if cell is not None:
            cell.post(message)
        elif key == SERVICE:
            self.serve(message)
        else:
            self.absent.receive(key, message, self.stopping)

    # Requests.

    def find_waiter(self, request: int) -> Waiter | None:
        """Who waits for a request that this process made."""
        local = self.local_calls.get(request)
        if local is not None:
            return local.waiter
        for link in self._origins:
            entry = link.pending.get(request)
            if entry is not None:
                return entry[0]
        return None

    def cancel_request(self, request: int, lane: Lane | LocalLane, reason: str) -> None:
        """Tell the other side that the answer is not wanted any more. The answer, or an error, still comes."""
        if isinstance(lane, LocalLane):
            message = self.local_calls.get(request)
            if message is not None:
                self.cancel_message(message)
            return
        for link in lane.peer.links:
            if request in link.pending:
                link.send_control(pack_message((CANCEL, request, reason)))
        self.tree.cancel(request, lane, reason)

    def cancel_message(self, message: Message) -> None:
        """Whoever sent a message does not want the answer any more."""
        if message.cell is not None:
            message.cell.cancel(message)
        elif message.task is not None:
            message.task.cancel()
        elif message.state is State.QUEUED:  # it waits for an actor that is not here yet
            message.state = State.CANCELLED
            message.origin.refuse(message, asyncio.CancelledError())

    def start_ticking(self) -> None:
        self.ticking = True
        self.loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        """Pay what is owed, and tell callers of handlers that run for a while that they have begun."""
        if not (self.busy or self.indebted) or self.closing:
            self.ticking = False
            return
        self.loop.call_later(TICK, self._tick)
        for debt in list(self.indebted):
            debt.settle()
        for cell in list(self.busy):
            if cell.suspects:
                cell.look_for_deadlock()
            for message in (cell.current, *cell.overlapping):
                if message is not None and message.request and not message.told:
                    message.told = True
                    message.origin.tell_started(message)

    # The end.

    async def stop_cells(self, reason: str) -> None:
        await asyncio.gather(*(cell.stop(reason) for cell in list(self.cells.values())))

    async def close(self, reason: str) -> None:
        """Stop every actor, say goodbye on every link, end every task."""
        if self.closing:
            return
        self.stopping = self.stopping or Evidence(reason)
        await self.stop_cells(reason)
        self.evidence, self.closing = self.stopping, True
        self.absent.close()
        links = [link for link in self._origins if link.connection is not None]
        if links:
            await asyncio.wait({self.loop.create_task(link.drain()) for link in links}, timeout=1.0)
        for link in links:
            link.say_goodbye()
        for peer in list(self.peers.values()):
            for link in list(peer.links):
                peer.ended(link, self.evidence)
        await self.tasks.close()
        self.lending.close()
