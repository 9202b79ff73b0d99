"""Keeping links connected: dialing, accepting, reconnecting, and finding out that there is no use.

Who made a link dials again when its connection is lost; the other side asks the peer's agent meanwhile. Either stops when the agent says
that the process is gone, or when the lease is over without a connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from typing import Any, Protocol

from monarch_async._channel.dial import Gone, connect, query
from monarch_async._channel.stream import Stream, authenticate, open_stream
from monarch_async._core.events import Evidence
from monarch_async._core.framing import Seal
from monarch_async._core.handshake import NONCE_BYTES, Established, Handshake
from monarch_async._runtime.link import Link
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.tasks import TaskSet
from monarch_async.errors import AuthenticationError, ChannelError, HandshakeError, ProtocolError, SpawnError, VersionMismatch
from monarch_async.ids import ProcAddress
from monarch_async.options import Options

__all__ = ["Party", "accept", "keep"]

FIRST_DELAY, MAX_DELAY = 0.01, 0.5


class Party(Protocol):
    """What connecting needs of a runtime: who it is, what it knows, and its peers and links."""

    loop: asyncio.AbstractEventLoop
    me: ProcAddress
    key: bytes
    options: Options
    log: logging.Logger
    tasks: TaskSet
    tls_client: ssl.SSLContext | None
    tls_server: ssl.SSLContext | None
    agent_up: asyncio.Future[None] | None
    closing: bool

    def peer(self, address: ProcAddress) -> Peer: ...

    def new_link(self, peer: Peer, session: str) -> Link: ...


def keep(runtime: Party, peer: Peer, link: Link, *, dialed: bool) -> None:
    """See to it that `link` gets its connection again whenever it loses it."""

    def lost(error: Exception | None) -> None:
        if link.ended or runtime.closing:
            return
        if link.said_goodbye and peer.address.host != runtime.me.host:  # on this host the agent knows better
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


async def _dial(runtime: Party, peer: Peer, link: Link) -> None:
    loop, options = runtime.loop, runtime.options
    if runtime.agent_up is not None and peer.address.host == runtime.me.host:
        try:
            await asyncio.shield(runtime.agent_up)
        except SpawnError as error:
            peer.gone(Evidence(str(error)))
            return
    deadline = loop.time() + options.lease
    delay = FIRST_DELAY
    while not link.ended and not runtime.closing:
        try:
            sock = await connect(runtime.me, peer.address)
            # Its agent answered, so its host is there, and so is the process, however long it is too busy to answer.
            deadline = max(deadline, loop.time() + options.lease)
            await _greet(runtime, peer, link, sock)
            return
        except Gone as gone:
            peer.gone(Evidence.from_map(gone.evidence))
            return
        except (AuthenticationError, VersionMismatch, ProtocolError) as error:
            peer.ended(link, Evidence(f"no link to {peer.address}: {error}"))
            return
        except (OSError, ChannelError) as error:
            if loop.time() + delay > deadline:
                peer.ended(link, Evidence(f"{peer.address} can't be reached: {error}"))
                return
        await asyncio.sleep(delay)
        delay = min(2 * delay, MAX_DELAY)


async def _greet(runtime: Party, peer: Peer, link: Link, sock: socket.socket) -> None:
    """Authenticate on a socket that is in the peer's hands, and go on with the session over it."""
    address = peer.address
    remote = address.host != runtime.me.host
    tls = runtime.tls_client if remote else None
    patience = 3 * runtime.options.heartbeat
    stream = await open_stream(sock, tls=tls, server=False, host=address.tcp.rpartition(":")[0], patience=patience)
    hello = _hello(runtime) | {"session": link.session, "received": link.last_received, "resume": link.connections > 0}
    options = runtime.options
    handshake = Handshake.dial(
        runtime.key,
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
        _attach(link, stream, done, done.welcome.get("received"), sealed=remote and tls is None)
    except ProtocolError:
        stream.abort()
        raise


async def accept(runtime: Party, sock: socket.socket) -> None:
    """Authenticate whoever connected, and hand the connection to its link. Failures are logged: strangers knock."""
    remote = sock.family != socket.AF_UNIX
    options = runtime.options
    found: list[Link] = []

    def decide(hello: dict[str, Any]) -> dict[str, Any]:
        link = _find_link(runtime, hello)
        if link is None:
            return {"known": False, "received": 0}
        found.append(link)
        return {"known": True, "received": link.last_received}

    try:
        stream = await open_stream(sock, tls=runtime.tls_server if remote else None, server=True, patience=3 * options.heartbeat)
        handshake = Handshake.accept(
            runtime.key,
            _hello(runtime),
            os.urandom(NONCE_BYTES),
            runtime.loop.time(),
            decide,
            timeout=options.handshake_timeout,
            limit=options.handshake_bytes,
        )
        done = await authenticate(stream, handshake)
    except (HandshakeError, OSError) as error:
        runtime.log.warning("a connection was refused: %s", error)
        return
    if not found or found[0].ended or runtime.closing:
        stream.close()
        return
    try:
        _attach(found[0], stream, done, done.peer.get("received"), sealed=remote and runtime.tls_server is None)
    except ProtocolError as error:
        stream.abort()
        runtime.log.warning("a connection was refused: %s", error)


def _find_link(runtime: Party, hello: dict[str, Any]) -> Link | None:
    """The link of the session that a dialer wants, made if it is a new one."""
    session = hello.get("session")
    if not isinstance(session, str) or not session:
        raise HandshakeError("a hello without a session")
    peer = runtime.peer(_address_of(hello))
    link = next((link for link in peer.links if link.session == session), None)
    if link is None and not hello.get("resume") and peer.evidence is None:
        link = runtime.new_link(peer, session)
        keep(runtime, peer, link, dialed=False)
    return link


def _attach(link: Link, stream: Stream, done: Established, received: Any, *, sealed: bool) -> None:
    if not isinstance(received, int):
        raise ProtocolError("the peer did not say what it has received")
    seals = (Seal(done.send_key), Seal(done.receive_key)) if sealed else None
    link.attach(stream, received, seals)
    stream.bind(link, done.rest)


def _hello(runtime: Party) -> dict[str, Any]:
    me = runtime.me
    return {"uid": me.uid, "host": me.host, "unix": me.unix, "tcp": me.tcp, "name": me.name, "rank": me.rank}


def _address_of(hello: dict[str, Any]) -> ProcAddress:
    """The address in a hello. `HandshakeError` if it is none."""
    match hello:
        case {"uid": str(uid), "host": str(host), "unix": str(unix), "tcp": str(tcp), "name": str(name), "rank": int(rank)} if uid:
            return ProcAddress(uid, host, unix, tcp, name, rank)
    raise HandshakeError("a hello without a proper address")


async def _await_dialer(runtime: Party, peer: Peer, link: Link) -> None:
    """The side that was dialed: wait for the peer to come back, as long as it may exist."""
    loop = runtime.loop
    deadline = loop.time() + runtime.options.lease
    delay = FIRST_DELAY
    connections = link.connections
    while not link.ended and link.connections == connections and not runtime.closing:
        try:
            await query(runtime.me, peer.address)
        except Gone as gone:
            peer.gone(Evidence.from_map(gone.evidence))
            return
        except (OSError, ChannelError):
            pass  # its host can't be reached from here; it may still reach this one
        if loop.time() + delay > deadline:
            peer.ended(link, Evidence(f"{peer.address} did not come back within the option lease={runtime.options.lease:g} s"))
            return
        await asyncio.sleep(delay)
        delay = min(2 * delay, MAX_DELAY)


async def _probe(runtime: Party, link: Link) -> None:
    """Between hosts, keep something on the wire, so that the kernel notices a connection that died without a word."""
    while not link.ended and not runtime.closing:
        await asyncio.sleep(runtime.options.heartbeat)
        link.ping()
