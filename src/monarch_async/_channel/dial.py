"""Reaching a process: the routing prelude that every connection opens with, on both its ends.

The dialer connects to the agent of the process's host, by its unix socket on the same host and by TCP from elsewhere, and says
whom it wants. The agent answers one byte: `PASSED` when the socket is now in that process's hands, or `REFUSED` with a msgpack
map of evidence behind it. A *query* only asks whether the process is there. Nothing said here is trusted; who is who
is settled by the handshake that follows.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from monarch_async.errors import AddressError, ChannelError, ProtocolError
from monarch_async.ids import ProcAddress

__all__ = [
    "PASSED",
    "Gone",
    "Route",
    "connect",
    "listen_tcp",
    "listen_unix",
    "parse_tcp",
    "query",
    "read_route",
    "refuse",
    "usable_addresses",
]

PASSED = b"+"
_REFUSED = b"-"
_DIAL = b"MAR1"
_QUERY = b"MAQ1"
_LIMIT = 4096


class Gone(ChannelError):
    """The agent says that the process does not exist (any more); `evidence` says what is known of its end."""

    def __init__(self, evidence: dict[str, Any]) -> None:
        super().__init__(str(evidence.get("text", "gone")))
        self.evidence = evidence


class Route(NamedTuple):
    """What a connection asks for: the uid of the process, whether it only asks."""

    target: str
    query: bool


async def connect(me: ProcAddress, peer: ProcAddress) -> socket.socket:
    """A socket in the hands of `peer`. Raises `Gone`, or `AddressError` when its agent can't be reached."""
    sock = await _ask(_DIAL, me, peer)
    return sock


async def query(me: ProcAddress, peer: ProcAddress) -> None:
    """Return if the agent of `peer` holds it to be alive; raises as `connect`."""
    (await _ask(_QUERY, me, peer)).close()


async def _ask(magic: bytes, me: ProcAddress, peer: ProcAddress) -> socket.socket:
    loop = asyncio.get_running_loop()
    sock = await _reach(me, peer)
    try:
        uid = peer.uid.encode()
        await loop.sock_sendall(sock, magic + bytes((len(uid),)) + uid)
        answer = await loop.sock_recv(sock, 1)
        if answer == PASSED:
            return sock
        if answer != _REFUSED:
            raise ChannelError(f"the agent of {peer} closed the connection without an answer")
        data = b""
        while len(data) < _LIMIT and (more := await loop.sock_recv(sock, _LIMIT)):
            data += more
        evidence = msgpack.unpackb(data)
        raise Gone(evidence if isinstance(evidence, dict) else {})
    except BaseException:
        sock.close()
        raise


async def _reach(me: ProcAddress, peer: ProcAddress) -> socket.socket:
    loop = asyncio.get_running_loop()
    if peer.host == me.host:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await loop.sock_connect(sock, peer.unix)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            sock.close()
            raise Gone({"text": f"the agent of {peer}'s host is gone ({peer.unix}: {error.strerror})"}) from error
        except BaseException:
            sock.close()
            raise
        return sock
    if not peer.tcp:
        raise AddressError(f"{peer} is on another host, whose agent listens on no network address")
    tried = []
    host, port = parse_tcp(peer.tcp)
    for family, kind, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK)
        try:
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            tried.append(f"{address[0]}:{address[1]}: {error.strerror or error}")
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise AddressError(f"the agent of {peer}'s host can't be reached; tried {'; '.join(tried) or 'nothing'}")


async def read_route(sock: socket.socket) -> Route:
    """The agent's side: what the connection asks for. Reads no byte more. `ProtocolError` for anything else."""
    loop = asyncio.get_running_loop()
    head = await _exactly(loop, sock, 5)
    magic, length = head[:4], head[4]
    if magic not in (_DIAL, _QUERY):
        raise ProtocolError("a connection did not open with a routing prelude")
    target = (await _exactly(loop, sock, length)).decode("ascii", "replace")
    return Route(target, magic == _QUERY)


async def refuse(sock: socket.socket, evidence: dict[str, Any]) -> None:
    """Answer that the process isn't there, and close."""
    try:
        await asyncio.get_running_loop().sock_sendall(sock, _REFUSED + msgpack.packb(evidence))
    finally:
        sock.close()


async def _exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await loop.sock_recv(sock, size - len(data))
        if not more:
            raise ProtocolError("a connection closed within its routing prelude")
        data += more
    return data


def listen_unix(path: str) -> socket.socket:
    """A listening unix socket that only this user can reach. Its directory must be private (mode 0700)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    mask = os.umask(0o177)
    try:
        sock.bind(path)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(mask)
    sock.listen(512)
    return sock


def peer_is_me(sock: socket.socket) -> bool:
    """Whether the other end of a unix socket belongs to this user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid == os.geteuid()


def listen_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. `AddressError` says what to do when it can't be had."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise AddressError(f"can't listen on {host}:{port}: {error.strerror}; give an address of this host") from error
    family, kind, _, _, address = infos[0]
    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(512)
    except OSError as error:
        sock.close()
        raise AddressError(f"can't listen on {host}:{port}: {error.strerror}; choose another port, or 0 for a free one") from error
    return sock


def parse_tcp(address: str) -> tuple[str, int]:
    """``"tcp://host:port"`` or ``"host:port"`` (IPv6 in brackets) → host and port. `AddressError` for anything else."""
    rest = address.removeprefix("tcp://")
    host, colon, port = rest.rpartition(":")
    if "://" in rest or not colon or not host or not port.isdigit() or int(port) > 65535:
        raise AddressError(f"not an address: {address!r}; write it as tcp://HOST:PORT")
    return host.strip("[]"), int(port)


def usable_addresses(host: str, resolve: Callable[..., list[Any]] = socket.getaddrinfo) -> list[str]:
    """Addresses of `host` that other hosts can be told. `AddressError` lists what was rejected and why, if none is left.

    Loopback stands only if `host` itself names loopback; link-local addresses are never told, since they need a zone.
    """
    wanted_loopback = host in ("localhost", "::1") or host.startswith("127.")
    rejected = []
    usable = []
    try:
        infos = resolve(host, 0, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise AddressError(f"{host} does not resolve: {error.strerror}") from error
    for info in infos:
        address = info[4][0]
        if address.startswith("127.") or address == "::1":
            if wanted_loopback:
                usable.append(address)
            else:
                rejected.append(f"{address} (loopback: another host can't reach it)")
        elif address.startswith(("169.254.", "fe80:")):
            rejected.append(f"{address} (link-local)")
        elif address in ("0.0.0.0", "::"):
            rejected.append(f"{address} (unspecified)")
        else:
            usable.append(address)
    if not usable:
        raise AddressError(f"no usable address for {host}; rejected {', '.join(rejected) or 'nothing'}; give one with --advertise")
    return usable
