"""Keeping links connected: dialing, accepting, reconnecting, and finding out that there is no use.

Who made a link dials again when its connection is lost; the other side asks the peer's agent meanwhile. Either stops when the agent says
that the process is gone, or when the lease is over.

Between hosts:

* The lease counts from when the other host was last known to be there, not from when its silence was noticed. A peer that is too busy to
  read is not silent: its kernel acknowledges what is sent to it.
* Who gives up first does not matter, since both ends count from the same silence.
* A host that answers and refuses the connection for `REFUSED_FOR` seconds has no agent of this job any more.
* Links are secured by the key of the network, and TLS where that was given; inside a host by that host's own key, over unix sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from monarch_async._channel.base import Middle
from monarch_async._channel.dial import Gone, connect, parse_tcp, query
from monarch_async._channel.stream import Stream, authenticate, open_stream
from monarch_async._core.events import Evidence
from monarch_async._core.handshake import NONCE_BYTES, Established, Handshake
from monarch_async._core.seal import Seal, agreed, offer
from monarch_async._runtime.config import Network
from monarch_async._runtime.link import Link
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.supervisor import Home
from monarch_async._runtime.tasks import TaskSet
from monarch_async._runtime.visiting import VISITOR, Visited, admit
from monarch_async.errors import AuthenticationError, ChannelError, HandshakeError, MonarchError, ProtocolError, VersionMismatch
from monarch_async.ids import ProcAddress, slot
from monarch_async.options import Options

__all__ = [
    "DATA",
    "Party",
    "accept",
    "address_fields",
    "address_of",
    "data_takers",
    "join_network",
    "keep",
    "patience",
    "seals_of",
    "where",
]

FIRST_DELAY, MAX_DELAY = 0.01, 0.5
REFUSED_FOR = 1.0
DATA = "data"
"""The field of a hello that says that this is to be no link's connection, but one for data (`data`): its number."""
HEARSAY = 0.5
"""Seconds for which others may have better evidence of an agent's end than that its socket is gone."""


class Party(Visited, Protocol):
    """What connecting needs of a runtime: who it is, what it knows, and its peers and links."""

    loop: asyncio.AbstractEventLoop
    me: ProcAddress
    client: ProcAddress
    key: bytes
    network_key: bytes | None
    options: Options
    log: logging.Logger
    tasks: TaskSet
    tls_client: ssl.SSLContext | None
    tls_server: ssl.SSLContext | None
    hosts_up: dict[str, asyncio.Future[None]]
    homes: dict[str, Home]
    closing: bool
    wrap_connection: Callable[[Link, Stream, bool], Middle] | None
    hello: dict[str, Any]

    def peer(self, address: ProcAddress) -> Peer: ...

    def new_link(self, peer: Peer, session: str) -> Link: ...

    def peer_of(self, link: Link) -> Peer: ...


data_takers: MutableMapping[Party, Callable[[Established, Stream], Awaitable[None]]] = WeakKeyDictionary()
"""What takes connections for data, in runtimes that have something to do with any."""


def join_network(runtime: Party, network: Network) -> None:
    """From now on this process can have links with other hosts. Raises `UsageError` when the files of TLS can't be used."""
    runtime.tls_client = network.tls.client() if network.tls is not None else None
    runtime.tls_server = network.tls.server() if network.tls is not None else None
    runtime.network_key = network.key


def patience(options: Options) -> float:
    """Seconds for which another host may leave unacknowledged what is sent to it, until the connection counts as lost."""
    return min(3 * options.heartbeat, options.lease / 2)


def keep(runtime: Party, peer: Peer, link: Link, *, dialed: bool) -> None:
    """See to it that `link` gets its connection again whenever it loses it."""

    def lost(error: Exception | None) -> None:
        if link.ended or runtime.closing:
            return
        peer = runtime.peer_of(link)
        if link.broken is not None:  # it is the peer that sends what is no frame, and would over the next connection
            peer.ended(link, Evidence(f"no use in a link to {peer.address}: {link.broken}"))
            return
        if link.said_goodbye and peer.address.uid == peer.address.host != runtime.me.host:  # of other processes the agent knows better
            peer.gone(Evidence("its process ended"))
            return
        again = _dial(runtime, peer, link) if dialed else _await_dialer(runtime, peer, link)
        runtime.tasks.start(again, name=f"reconnecting to {peer.address}")

    link.on_lost = lost
    if dialed:
        runtime.tasks.start(_dial(runtime, peer, link), name=f"connecting to {peer.address}")
    if peer.address.host != runtime.me.host:
        # Whether the peer is busy does not matter here: it is the kernels that acknowledge.
        runtime.tasks.start(_probe(runtime, link), name=f"probing {peer.address}")


class _Attempts:
    """When to try again, and when to give up."""

    def __init__(self, runtime: Party, link: Link) -> None:
        self._now = runtime.loop.time
        self._options = runtime.options
        now = self._now()
        # What is lost by silence was silent for as long as it takes to notice.
        known = max(link.last_heard, now - patience(runtime.options)) if link.connections else now
        self._deadline = known + self._options.lease
        self._delay = FIRST_DELAY
        self._refused_since: float | None = None

    def answered(self) -> None:
        """The host is there, and so is the process, however long it is too busy to answer."""
        self._deadline = max(self._deadline, self._now() + self._options.lease)
        self._refused_since = None

    def failed(self, error: Exception, *, abroad: bool) -> Evidence | None:
        """One more failure; returns why it is no use to go on, if it is none."""
        now = self._now()
        if abroad and isinstance(error.__cause__, ConnectionRefusedError):
            self._refused_since = self._refused_since or now
            if now - self._refused_since >= REFUSED_FOR:
                return Evidence(f"its host's agent is gone: {error}")
        else:
            self._refused_since = None
        if now + self._delay > self._deadline:
            text = str(error) or type(error).__name__
            return Evidence(f"unreachable for the lease of {self._options.lease:g} s (option lease): {text}")
        return None

    async def pause(self) -> None:
        await asyncio.sleep(self._delay)
        self._delay = min(2 * self._delay, MAX_DELAY)

    @property
    def timeout(self) -> float:
        """Seconds that one attempt may take to reach the host: a lost packet may cost one, one must not outlast the lease."""
        return max(0.1, min(patience(self._options), self._deadline - self._now()))


async def _dial(runtime: Party, peer: Peer, link: Link) -> None:
    up = runtime.hosts_up.get(peer.address.host)
    if up is not None:
        try:
            await asyncio.shield(up)
        except MonarchError as error:
            peer.gone(Evidence(str(error)))
            return
    abroad = peer.address.host != runtime.me.host
    attempts = _Attempts(runtime, link)
    while not link.ended and not runtime.closing:
        place = where(runtime, peer.address)
        try:
            sock = await connect(runtime.me, place, attempts.timeout)
            attempts.answered()
            await _greet(runtime, peer, link, sock, place)
            return
        except Gone as gone:
            if link.ended:  # the process that took its place has been heard of meanwhile, which has told all that waited
                return
            how = Evidence.from_map(gone.evidence)
            if not how.next or link.connections or slot(peer.address) in runtime.homes:
                await _report(peer, gone)
                return
            peer = peer.hand_on(link, how)
            continue
        except (AuthenticationError, VersionMismatch, ProtocolError) as error:
            peer.ended(link, Evidence(f"no link to {peer.address}: {error}"))
            return
        except (OSError, ChannelError) as error:
            evidence = attempts.failed(error, abroad=abroad)
            if evidence is not None:
                peer.ended(link, evidence)
                return
        await attempts.pause()


async def _report(peer: Peer, gone: Gone) -> None:
    """A process is gone. Where not even its agent answers, who has started that may know why, and soon say so."""
    if "code" not in gone.evidence:
        await asyncio.sleep(HEARSAY)
    peer.gone(Evidence.from_map(gone.evidence))


def where(runtime: Party, address: ProcAddress) -> ProcAddress:
    """An address with what is known here of how to reach it: who made it may not have been on a network yet, or is on another host."""
    if address.host == runtime.me.host:
        return address._replace(unix=runtime.me.unix)
    tcp = runtime.client.tcp if address.host == runtime.client.host and runtime.client.tcp else address.tcp
    # The host is named too, since one port may serve the agents of several jobs.
    return address._replace(tcp=tcp, uid=f"{address.host}/{address.uid}")


async def _greet(runtime: Party, peer: Peer, link: Link, sock: socket.socket, place: ProcAddress) -> None:
    """Authenticate on a socket that is in the peer's hands, and go on with the session over it."""
    address = peer.address
    remote = address.host != runtime.me.host
    options = runtime.options
    key = runtime.network_key if remote else runtime.key
    if key is None:
        sock.close()
        raise ChannelError(f"{runtime.me} has no key for links with other hosts")
    tls = runtime.tls_client if remote else None
    host = parse_tcp(place.tcp)[0] if remote else ""
    stream = await open_stream(sock, tls=tls, server=False, host=host, patience=patience(options))
    hello = runtime.hello | address_fields(runtime.me)
    hello |= (offer() if remote and tls is None else {}) | {
        "session": link.session,
        "received": link.last_received,
        "resume": link.connections > 0,
    }
    handshake = Handshake.dial(
        key,
        hello,
        os.urandom(NONCE_BYTES),
        runtime.loop.time(),
        timeout=options.handshake_timeout,
        limit=options.handshake_bytes,
    )
    done = await authenticate(stream, handshake)
    try:
        if done.peer.get("uid") != address.uid:
            raise ProtocolError(f"{address} was dialed, {done.peer.get('uid')} answered")
        if not done.welcome.get("known"):
            raise ProtocolError("the session was forgotten at the other side, so what was under way may be lost")
        if link.ended:
            stream.abort()
            return
        _attach(runtime, link, stream, done, done.welcome.get("received"), sealed=remote and tls is None)
    except ProtocolError:
        stream.abort()
        raise


async def accept(runtime: Party, sock: socket.socket) -> None:
    """Authenticate whoever connected, and hand the connection to its link. Failures are logged: strangers knock."""
    remote = sock.family != socket.AF_UNIX
    options = runtime.options
    found: list[Link] = []

    def decide(hello: dict[str, Any]) -> dict[str, Any]:
        if DATA in hello:
            plain = remote and runtime.tls_server is None and runtime.wrap_connection is None
            return {"known": plain and runtime in data_takers and VISITOR not in hello}
        link = _find_link(runtime, hello)
        if link is None:
            return {"known": False, "received": 0}
        found.append(link)
        return {"known": True, "received": link.last_received}

    key = runtime.network_key if remote else runtime.key
    if key is None:
        sock.close()
        runtime.log.warning("a connection from another host was refused: this job has no other hosts")
        return
    sealed = remote and runtime.tls_server is None
    try:
        stream = await open_stream(sock, tls=runtime.tls_server if remote else None, server=True, patience=patience(options))
        handshake = Handshake.accept(
            key,
            address_fields(runtime.me) | (offer() if sealed else {}),
            os.urandom(NONCE_BYTES),
            runtime.loop.time(),
            decide,
            timeout=options.handshake_timeout,
            limit=options.handshake_bytes,
        )
        done = await authenticate(stream, handshake)
    except (HandshakeError, OSError) as error:
        # On this host it is only this user that knocks: whoever goes away in the middle is most likely just ending.
        level = logging.WARNING if remote or isinstance(error, AuthenticationError | VersionMismatch) else logging.INFO
        runtime.log.log(level, "a connection was refused: %s", error)
        return
    if done.welcome["known"] and DATA in done.peer and not runtime.closing:
        await data_takers[runtime](done, stream)
        return
    if not found or found[0].ended or runtime.closing:
        stream.close()
        return
    try:
        _attach(runtime, found[0], stream, done, done.peer.get("received"), sealed=sealed)
    except ProtocolError as error:
        stream.abort()
        runtime.log.warning("a connection was refused: %s", error)


def _find_link(runtime: Party, hello: dict[str, Any]) -> Link | None:
    """The link of the session that a dialer wants, made if it is a new one."""
    session = hello.get("session")
    if not isinstance(session, str) or not session:
        raise HandshakeError("a hello without a session")
    address = address_of(hello)
    if address is None:
        raise HandshakeError("a hello without a proper address")
    peer = runtime.peer(address)
    link = next((link for link in peer.links if link.session == session), None)
    if link is None and not hello.get("resume") and peer.evidence is None:
        link = runtime.new_link(peer, session)
        if VISITOR in hello:
            admit(runtime, peer, link, str(hello[VISITOR]))
        else:
            keep(runtime, peer, link, dialed=False)
    return link


def _attach(runtime: Party, link: Link, stream: Stream, done: Established, received: Any, *, sealed: bool) -> None:
    if not isinstance(received, int):
        raise ProtocolError("the peer did not say what it has received")
    seals = seals_of(done) if sealed else None
    middle = runtime.wrap_connection(link, stream, sealed) if runtime.wrap_connection is not None else None
    link.attach(middle or stream, received, seals)
    stream.bind(middle or link, done.rest)


def seals_of(done: Established) -> tuple[Seal, Seal]:
    """For sending and for receiving over a connection that has no TLS."""
    digest = agreed(done.peer)
    return Seal(done.send_key, digest), Seal(done.receive_key, digest)


def address_fields(address: ProcAddress) -> dict[str, Any]:
    """An address as it stands in a hello."""
    return address._asdict()


def address_of(hello: object) -> ProcAddress | None:
    """The address in a hello, if there is a proper one."""
    match hello:
        case {"uid": str(uid), "host": str(host), "unix": str(unix), "tcp": str(tcp), "name": str(name), "rank": int(rank)} if uid:
            return ProcAddress(uid, host, unix, tcp, name, rank)
    return None


async def _await_dialer(runtime: Party, peer: Peer, link: Link) -> None:
    """The side that was dialed: wait for the peer to come back, as long as it may exist."""
    abroad = peer.address.host != runtime.me.host
    attempts = _Attempts(runtime, link)
    connections = link.connections
    while not link.ended and link.connections == connections and not runtime.closing:
        try:
            await query(runtime.me, where(runtime, peer.address), attempts.timeout)
            error: Exception = ChannelError("it lives, but did not come back")
        except Gone as gone:
            await _report(peer, gone)
            return
        except (OSError, ChannelError) as failed:
            error = failed  # its host can't be reached from here; it may still reach this one
        if link.connections != connections:
            return
        evidence = attempts.failed(error, abroad=abroad)
        if evidence is not None:
            peer.ended(link, evidence)
            return
        await attempts.pause()


async def _probe(runtime: Party, link: Link) -> None:
    """Between hosts, keep something on the wire, so that the kernel notices a connection that died without a word."""
    while not link.ended and not runtime.closing:
        await asyncio.sleep(runtime.options.heartbeat)
        link.ping()
