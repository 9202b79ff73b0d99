"""Both ends of what happens before a job has an agent on another host: `attach` asks, a worker (`worker.py`) answers with `receive`.

Theory: the client chooses the id of the agent, so that addresses on its host are known before anything has happened there. It says what
it wants in the *hello* of a handshake, which proves that it holds the worker's key; nothing but the handshake passes over that
connection. The worker starts an agent of that id, and from then on hands it each connection that names it.

The key of a job: a worker has a key file, and whoever holds that key may run anything there. It is at the same time the key for all links
between the hosts of the job. Inside the client's host the job keeps the random key that it was born with.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from monarch_async._channel.dial import Gone, connect, parse_tcp
from monarch_async._channel.stream import authenticate, open_stream
from monarch_async._core.handshake import NONCE_BYTES, Handshake
from monarch_async._runtime.asking import ask
from monarch_async._runtime.config import Network
from monarch_async._runtime.connect import address_fields, address_of, join_network, patience
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import AddressError, ChannelError, HandshakeError, SpawnError
from monarch_async.ids import ProcAddress
from monarch_async.options import Options

__all__ = ["WORKER", "Job", "attach", "receive"]

WORKER = "worker"
"""What a connection asks for that is for the worker itself."""


class Job(NamedTuple):
    """What a client wants of a worker: an agent of that id, for that client, with those settings."""

    agent: str
    client: ProcAddress
    options: Options


async def attach(runtime: Runtime, agents: Sequence[ProcAddress], network: Network, advertise: str) -> ProcAddress:
    """Have the workers at the agents' addresses start them; returns this client's address, as other hosts can reach it.

    Raises `AddressError`, `AuthenticationError`, `VersionMismatch`, `HandshakeError` or `SpawnError`, each naming the worker. Then agents
    that others of them have started end with the lease, since no client comes.
    """
    socks: list[socket.socket] = []
    try:
        for outcome in await asyncio.gather(*(_reach(runtime, agent) for agent in agents), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            socks.append(outcome)
        join_network(runtime, network)
        me = await _be_reachable(runtime, socks, network, advertise)
        asked = [_ask(runtime, agent, sock, me, network) for agent, sock in zip(agents, socks, strict=True)]
        for failure in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure
    except BaseException:
        for sock in socks:
            sock.close()
        raise
    return me


async def _reach(runtime: Runtime, agent: ProcAddress) -> socket.socket:
    """A socket in the hands of the worker itself."""
    worker = ProcAddress(WORKER, "", "", agent.tcp)
    try:
        return await connect(runtime.me, worker, patience(runtime.options))
    except Gone as error:
        raise AddressError(
            f"{agent.tcp} is no worker but part of a running job: give the address that a worker says it listens on"
        ) from error
    except ChannelError as error:
        raise AddressError(f"the worker at {agent.tcp} can't be reached: {error}") from error


async def _be_reachable(runtime: Runtime, socks: Sequence[socket.socket], network: Network, advertise: str) -> ProcAddress:
    """Have the agent of this host listen where all of the workers can reach it, and this process know the key."""
    ours = list(dict.fromkeys(sock.getsockname()[0] for sock in socks))
    me = runtime.me
    listening = parse_tcp(me.tcp)[0] if me.tcp else ""
    if listening and (ours == [listening] or advertise or not _is_loopback(listening)):
        return me
    host, _, port = advertise.rpartition(":") if advertise else (next((name for name in ours if not _is_loopback(name)), ours[0]), "", "0")
    if advertise and not port.isdigit():
        host, port = advertise, "0"
    # One interface reaches them all, or all interfaces are needed.
    everywhere = "::" if any(":" in name for name in ours) else "0.0.0.0"
    bind = ours[0] if len(ours) == 1 and not advertise else everywhere
    tcp = await ask(runtime, runtime.agent, "listen", bind, int(port), host.strip("[]"), network)
    return me._replace(tcp=tcp)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


async def _ask(runtime: Runtime, agent: ProcAddress, sock: socket.socket, me: ProcAddress, network: Network) -> None:
    """One worker: the handshake in whose hello the job stands."""
    options = runtime.options
    where = f"the worker at {agent.tcp}"
    try:
        tls = network.tls.client() if network.tls is not None else None
        stream = await open_stream(sock, server=False, patience=patience(options), tls=tls, host=parse_tcp(agent.tcp)[0])
        hello = {"agent": agent.uid, "client": address_fields(me), "options": options._asdict()}
        handshake = Handshake.dial(
            network.key,
            hello,
            os.urandom(NONCE_BYTES),
            runtime.loop.time(),
            timeout=options.handshake_timeout,
            limit=options.handshake_bytes,
        )
        done = await authenticate(stream, handshake)
    except HandshakeError as error:
        raise type(error)(f"{where}: {error}") from error
    except (OSError, ChannelError, TimeoutError) as error:
        raise AddressError(f"{where} can't be attached to: {error}") from error
    stream.close()
    if done.welcome.get("refused"):
        raise SpawnError(f"{where} refused: {done.welcome['refused']}")


async def receive(sock: socket.socket, network: Network, options: Options, refuse: Callable[[Job], str]) -> Job:
    """The worker's side: authenticate who connected, and learn what it wants.

    `refuse(job)` returns why it can't be had, or ``""``. Raises `HandshakeError` for strangers and malformed wishes, and for a wish
    refused.
    """
    loop = asyncio.get_running_loop()
    jobs: list[Job] = []

    def decide(hello: dict[str, Any]) -> dict[str, Any]:
        job = _job(hello)
        reason: str = refuse(job)
        if not reason:
            jobs.append(job)
        return {"refused": reason}

    tls = network.tls.server() if network.tls is not None else None
    stream = await open_stream(sock, server=True, patience=patience(options), tls=tls)
    handshake = Handshake.accept(
        network.key,
        {},
        os.urandom(NONCE_BYTES),
        loop.time(),
        decide,
        timeout=options.handshake_timeout,
        limit=options.handshake_bytes,
    )
    await authenticate(stream, handshake)
    stream.close()
    if not jobs:
        raise HandshakeError("a job was refused")
    return jobs[0]


def _job(hello: dict[str, Any]) -> Job:
    client = address_of(hello.get("client"))
    agent, settings = hello.get("agent"), hello.get("options")
    if client is None or not isinstance(agent, str) or not agent.isalnum() or not isinstance(settings, dict):
        raise HandshakeError("a hello without a proper job")
    try:
        return Job(agent, client, Options(**{name: value for name, value in settings.items() if name in Options._fields}))
    except (TypeError, ValueError) as error:
        raise HandshakeError(f"a hello with bad options: {error}") from error
