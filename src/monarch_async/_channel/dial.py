"""Reaching a process: the routing prelude that every connection opens with, on both its ends.

The dialer connects to the agent of the process's host, by its unix socket on the same host and by TCP from elsewhere, and says
whom it wants. The agent answers one byte: `PASSED` when the socket is now in that process's hands, or `REFUSED` with a msgpack
map of evidence behind it. A *query* only asks whether the process is there. Nothing said here is trusted; who is who
is settled by the handshake that follows.

An agent may take its time to answer, for a process that is being started; that its host does not answer at all is known after
`REACH` seconds for each of its addresses.
"""

from __future__ import annotations

import asyncio
import errno
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
    "give_up_silence",
    "listen_tcp",
    "listen_unix",
    "parse_tcp",
    "peer_is_me",
    "query",
    "read_route",
    "refuse",
    "usable_addresses",
]

PASSED = b"+"
REACH = 5.0
_REFUSED = b"-"
_DIAL = b"MAR1"
_QUERY = b"MAQ1"
_EVIDENCE = 1 << 16
_TEXT = 1 << 13


class Gone(ChannelError):
    """The agent says that the process does not exist (any more); `evidence` says what is known of its end."""

    def __init__(self, evidence: dict[str, Any]) -> None:
        super().__init__(str(evidence.get("text", "gone")))
        self.evidence = evidence


class Route(NamedTuple):
    """What a connection asks for: the uid of the process, whether it only asks."""

    target: str
    query: bool


async def connect(me: ProcAddress, peer: ProcAddress, reach: float = REACH) -> socket.socket:
    """A socket in the hands of `peer`.

    Another host may leave each of its addresses unanswered for `reach` seconds, and be silent that long later.

    Raises `Gone`; `AddressError` when its agent can't be reached or is none; `ChannelError` when the connection breaks.
    """
    return await _ask(_DIAL, me, peer, reach)


async def query(me: ProcAddress, peer: ProcAddress, reach: float = REACH) -> None:
    """Return if the agent of `peer` holds it to be alive; raises as `connect`."""
    (await _ask(_QUERY, me, peer, reach)).close()


async def _ask(magic: bytes, me: ProcAddress, peer: ProcAddress, reach: float) -> socket.socket:
    loop = asyncio.get_running_loop()
    uid = peer.uid.encode("ascii", "replace")
    if not 0 < len(uid) < 256:
        raise AddressError(f"no process can have the id {peer.uid[:40]!r}: take the address from the process itself")
    sock = await _reach(me, peer, reach)
    try:
        await loop.sock_sendall(sock, magic + bytes((len(uid),)) + uid)
        answer = await loop.sock_recv(sock, 1)
        if answer == PASSED:
            return sock
        if not answer:
            raise ChannelError(f"the agent of {peer}'s host closed the connection without an answer")
        if answer != _REFUSED:
            raise AddressError(f"what answers at {peer.tcp or peer.unix} is no agent: it says {answer!r}; check the address of {peer}")
        raise Gone(await _evidence(loop, sock, peer))
    except OSError as error:
        sock.close()
        if isinstance(error, ChannelError):
            raise
        raise ChannelError(f"the connection to the agent of {peer}'s host broke: {_why(error)}") from error
    except BaseException:
        sock.close()
        raise


async def _evidence(loop: asyncio.AbstractEventLoop, sock: socket.socket, peer: ProcAddress) -> dict[str, Any]:
    data = bytearray()
    while more := await loop.sock_recv(sock, 4096):
        data += more
        if len(data) > _EVIDENCE:
            raise ChannelError(f"the agent of {peer}'s host gives evidence without end")
    try:
        evidence = msgpack.unpackb(data, unicode_errors="replace")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ChannelError(f"the agent of {peer}'s host gives evidence that is none: {error}") from error
    if not isinstance(evidence, dict):
        raise ChannelError(f"the agent of {peer}'s host gives evidence that is none: a {type(evidence).__name__}")
    return evidence


async def _reach(me: ProcAddress, peer: ProcAddress, reach: float) -> socket.socket:
    loop = asyncio.get_running_loop()
    if peer.host == me.host:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await loop.sock_connect(sock, peer.unix)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            sock.close()
            raise Gone({"text": f"the agent of {peer}'s host is gone ({peer.unix}: {error.strerror})"}) from error
        except OSError as error:
            sock.close()
            raise AddressError(f"the agent of {peer}'s host can't be reached at {peer.unix}: {_why(error)}") from error
        except BaseException:
            sock.close()
            raise
        return sock
    if not peer.tcp:
        raise AddressError(f"{peer} is on another host, whose agent listens on no network address: start that agent with a TCP address")
    host, port = parse_tcp(peer.tcp)
    try:
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError) as error:
        raise AddressError(f"the agent of {peer}'s host can't be reached: {host} does not resolve: {_why(error)}") from error
    tried = []
    last: OSError | None = None
    for family, kind, _, _, address in infos:
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(reach):
                await loop.sock_connect(sock, address)
            give_up_silence(sock, reach)
        except OSError as error:
            sock.close()
            last = error
            tried.append(f"{address[0]!s}:{port}: {_why(error, reach)}")
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise AddressError(f"the agent of {peer}'s host can't be reached; tried {'; '.join(tried) or 'nothing'}") from last


def give_up_silence(sock: socket.socket, limit: float) -> None:
    """Have the kernel give up a TCP connection whose other host is silent for `limit` seconds, also when this side has nothing to send."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_USER_TIMEOUT", max(1, int(limit * 1000)))):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _why(error: Exception, limit: float = REACH) -> str:
    if isinstance(error, TimeoutError) and not error.args:
        return f"no answer within {limit:g} s"
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
        return os.strerror(error.errno)  # asyncio has words of its own, which say less
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


async def read_route(sock: socket.socket) -> Route:
    """The agent's side: what the connection asks for. Reads no byte more. `ProtocolError` for anything else."""
    loop = asyncio.get_running_loop()
    head = await _exactly(loop, sock, len(_DIAL))
    if head not in (_DIAL, _QUERY):
        raise ProtocolError("a connection did not open with a routing prelude")
    size = (await _exactly(loop, sock, 1))[0]
    target = await _exactly(loop, sock, size)
    if not size or not target.isascii():
        raise ProtocolError("a routing prelude names no process")
    return Route(target.decode("ascii"), head == _QUERY)


async def refuse(sock: socket.socket, evidence: dict[str, Any]) -> None:
    """Answer that the process isn't there, and close. Texts are cut to what a dialer reads."""
    short = {name: value[:_TEXT] if isinstance(value, str) else value for name, value in evidence.items()}
    try:
        await asyncio.get_running_loop().sock_sendall(sock, _REFUSED + msgpack.packb(short, unicode_errors="replace"))
    finally:
        sock.close()


async def _exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            more = await loop.sock_recv(sock, size - len(data))
        except OSError as error:
            raise ProtocolError(f"a connection broke within its routing prelude: {_why(error)}") from error
        if not more:
            raise ProtocolError("a connection closed within its routing prelude")
        data += more
    return data


def listen_unix(path: str) -> socket.socket:
    """A listening unix socket that only this user can reach. Its directory must be private (mode 0700). Raises `AddressError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)  # before `listen` nobody gets in
        sock.listen(512)
    except OSError as error:
        sock.close()
        advice = {
            errno.EADDRINUSE: "something is there already; remove it, or choose another path",
            errno.ENOENT: "make its directory first",
            errno.EACCES: "choose a directory that this user may write to",
            None: "choose a shorter path: it may have 107 bytes",  # raised by Python itself, without a number
        }.get(error.errno, "choose another path")
        raise AddressError(f"can't listen on {path}: {_why(error)}; {advice}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def peer_is_me(sock: socket.socket) -> bool:
    """Whether the other end of a unix socket belongs to this user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


def listen_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. `AddressError` says what to do when it can't be had."""
    if not 0 <= port <= 65535:
        raise AddressError(f"can't listen on {host}:{port}: ports go up to 65535; choose another, or 0 for a free one")
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, ValueError) as error:
        raise AddressError(f"can't listen on {host}:{port}: {_why(error)}; give an address of this host") from error
    troubles = []
    for family, kind, _, _, address in infos:
        try:
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK)
        except OSError as error:  # a family that this system does not have
            troubles.append(f"{address[0]}: {_why(error)}")
            continue
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(512)
        except OSError as error:
            sock.close()
            advice = {
                errno.EADDRNOTAVAIL: "give an address of this host",
                errno.EACCES: "ports below 1024 need privileges; choose another, or 0 for a free one",
            }.get(error.errno or 0, "choose another port, or 0 for a free one")
            troubles.append(f"{address[0]}: {_why(error)}; {advice}")
        else:
            return sock
    raise AddressError(f"can't listen on {host}:{port}: {', '.join(troubles)}")


def parse_tcp(address: str) -> tuple[str, int]:
    """``"tcp://host:port"`` or ``"host:port"`` (IPv6 in brackets) → host and port. `AddressError` for anything else."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    plain = name and not any(char in "[]/@" or char.isspace() or not char.isprintable() for char in name)
    if not colon or not plain or (":" in name) != bracketed or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise AddressError(f"not an address: {address!r}; write it as tcp://HOST:PORT, an IPv6 address as tcp://[ADDRESS]:PORT")
    return name, int(port[:6])


def usable_addresses(host: str, resolve: Callable[..., list[Any]] = socket.getaddrinfo) -> list[str]:
    """Addresses of `host` that other hosts can be told. `AddressError` lists what was rejected and why, if none is left.

    Loopback stands only if `host` itself names loopback; link-local addresses are never told, since they need a zone.
    """
    try:
        infos = resolve(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError) as error:
        raise AddressError(f"{host} does not resolve: {_why(error)}; {_ADVERTISE}") from error
    rejected = []
    usable = []
    for address in dict.fromkeys(info[4][0] for info in infos):
        reason = _unusable(address, wants_loopback=_names_loopback(host))
        if reason:
            rejected.append(f"{address} ({reason})")
        else:
            usable.append(address)
    if not usable:
        raise AddressError(f"no usable address for {host}; rejected {', '.join(rejected) or 'nothing'}; {_ADVERTISE}")
    return usable


_ADVERTISE = "say which address other hosts reach this one by (advertise)"


def _packed(address: str) -> bytes:
    """4 or 16 bytes, an IPv4 address in IPv6 clothes as 4. `OSError` if it is no address."""
    address = address.partition("%")[0]
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    return packed.removeprefix(b"\0" * 10 + b"\xff\xff")


def _is_loopback(packed: bytes) -> bool:
    return packed[0] == 127 if len(packed) == 4 else packed == b"\0" * 15 + b"\1"


def _names_loopback(host: str) -> bool:
    try:
        return _is_loopback(_packed(host))
    except OSError:
        return host in ("localhost", "ip6-localhost")


def _unusable(address: str, *, wants_loopback: bool) -> str:
    """Why other hosts can't be told this address; empty if they can."""
    packed = _packed(address)
    if _is_loopback(packed):
        return "" if wants_loopback else "loopback: another host can't reach it"
    if packed[:2] == b"\xa9\xfe" or (len(packed) == 16 and packed[0] == 0xFE and packed[1] & 0xC0 == 0x80):
        return "link-local: it holds on one network segment only"
    if not any(packed):
        return "unspecified: it is no address to connect to"
    if (len(packed) == 4 and packed[0] & 0xF0 == 0xE0) or packed[0] == 0xFF:
        return "multicast: nobody can connect to it"
    return ""
