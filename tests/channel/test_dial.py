"""Reaching a process: the routing prelude on both ends, addresses, and what each thing that can be wrong is called."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from monarch_async._channel.dial import (
    PASSED,
    Gone,
    connect,
    listen_tcp,
    listen_unix,
    parse_tcp,
    peer_is_me,
    query,
    read_route,
    refuse,
    usable_addresses,
)
from monarch_async.errors import AddressError, ChannelError, ProtocolError
from monarch_async.ids import ProcAddress

ME = ProcAddress("d1a1e5000001", "host", "/nowhere")
Serve = Callable[[socket.socket], Awaitable[None]]


def pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


async def serving(listener: socket.socket, serve: Serve) -> None:
    """Serve one connection as an agent would."""
    loop = asyncio.get_running_loop()
    with listener:
        sock, _ = await loop.sock_accept(listener)
    sock.setblocking(False)
    with sock:
        await serve(sock)


async def ask(tmp_path: Path, serve: Serve, *, question: Callable[..., Awaitable[Any]] = connect) -> Any:
    """The outcome of asking an agent that answers by `serve`."""
    path = str(tmp_path / "agent")
    agent = asyncio.ensure_future(serving(listen_unix(path), serve))
    try:
        return await question(ME, ProcAddress("acce9700000f", "host", path, name="trainers", rank=3))
    finally:
        await agent


async def test_a_connection_is_passed(tmp_path: Path) -> None:
    """The agent reads whom the dialer wants and no byte more; what both write after the answer reaches the other."""
    routes = []

    async def serve(sock: socket.socket) -> None:
        routes.append(await read_route(sock))
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, PASSED + b"first words")
        assert await loop.sock_recv(sock, 100) == b""

    sock = await ask_and_read(tmp_path, serve)
    assert b"first words" == sock
    assert [("acce9700000f", False)] == routes


async def ask_and_read(tmp_path: Path, serve: Serve) -> bytes:
    async def question(me: ProcAddress, peer: ProcAddress) -> bytes:
        with await connect(me, peer) as sock:
            return await asyncio.get_running_loop().sock_recv(sock, 100)

    found: bytes = await ask(tmp_path, serve, question=question)
    return found


async def test_a_query(tmp_path: Path) -> None:
    """A query is told from a connection, and returns when the process is there."""
    routes = []

    async def serve(sock: socket.socket) -> None:
        routes.append(await read_route(sock))
        await asyncio.get_running_loop().sock_sendall(sock, PASSED)

    await ask(tmp_path, serve, question=query)
    assert [("acce9700000f", True)] == routes


@pytest.mark.parametrize("question", [connect, query])
async def test_gone_comes_with_evidence(tmp_path: Path, question: Callable[..., Awaitable[Any]]) -> None:
    """What the agent knows of a process's end arrives whole, and a text without end arrives cut."""

    async def serve(sock: socket.socket) -> None:
        await read_route(sock)
        await refuse(sock, {"text": "killed by signal 9 " + "x" * 1_000_000, "code": None, "signal": 9})

    with pytest.raises(Gone, match="killed by signal 9") as caught:
        await ask(tmp_path, serve, question=question)
    assert (9, None) == (caught.value.evidence["signal"], caught.value.evidence["code"])


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        (b"", ChannelError, "without an answer"),
        (b"H", AddressError, "no agent"),
        (b"-", ChannelError, "evidence that is none"),
        (b"-\xc1", ChannelError, "evidence that is none"),
        (b"-\x91\x01", ChannelError, "a list"),
        (b"-" + msgpack.packb({"text": "x"})[:-1], ChannelError, "evidence that is none"),
        (b"-" + b"\x80" * 100_000, ChannelError, "without end"),
        (b"-\x81\x90\x01", ChannelError, "evidence that is none"),
    ],
)
async def test_answers_that_are_none(tmp_path: Path, answer: bytes, error: type[ChannelError], match: str) -> None:
    """No answer, another service's answer and garbage for evidence are typed errors, none of them `Gone`."""

    async def serve(sock: socket.socket) -> None:
        await read_route(sock)
        try:
            await asyncio.get_running_loop().sock_sendall(sock, answer)
        except ConnectionError:
            pass  # the dialer had enough

    with pytest.raises(error, match=match) as caught:
        await ask(tmp_path, serve)
    assert not isinstance(caught.value, Gone)


async def test_no_agent(tmp_path: Path) -> None:
    """On the same host a missing agent is `Gone`; a closed port elsewhere is an `AddressError` that lists what was tried."""
    with pytest.raises(Gone, match="gone"):
        await connect(ME, ProcAddress("acce9700000f", "host", str(tmp_path / "nobody")))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(AddressError, match=f"tried 127.0.0.1:{port}: "):
        await connect(ME, ProcAddress("acce9700000f", "elsewhere", "", f"127.0.0.1:{port}"))
    with pytest.raises(AddressError, match="listens on no network address"):
        await connect(ME, ProcAddress("acce9700000f", "elsewhere", ""))
    with pytest.raises(AddressError, match="does not resolve"):
        await connect(ME, ProcAddress("acce9700000f", "elsewhere", "", f"{'x' * 70}.invalid:1"))
    with pytest.raises(AddressError, match="id"):
        await connect(ME, ProcAddress("x" * 256, "host", str(tmp_path / "nobody")))


async def test_a_host_that_does_not_answer() -> None:
    """A TCP address that swallows connections is given up after the bound, with its name."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        host, port = full.getsockname()
        peer = ProcAddress("acce9700000f", "elsewhere", "", f"{host}:{port}")
        taken = socket.create_connection((host, port))  # the only place in the queue
        with taken, pytest.raises(AddressError, match=r"no answer within 0\.05 s"):
            await connect(ME, peer, 0.05)


@pytest.mark.parametrize("step", [1, 3, 100])
async def test_a_prelude_in_pieces(step: int) -> None:
    """A prelude is read whatever pieces it comes in, and what follows it stays in the socket."""
    data = b"MAR1\x05abcde" + b"rest"
    reader, writer = pair()
    with reader, writer:
        reading = asyncio.ensure_future(read_route(reader))
        for start in range(0, len(data), step):
            writer.send(data[start : start + step])
            await asyncio.sleep(0)
        assert ("abcde", False) == await reading
        assert b"rest" == reader.recv(100)


@pytest.mark.parametrize(
    "data",
    [b"", b"M", b"MAR1", b"MAR1\x05abc", b"MAR2\x01a", b"GET / HTTP/1.1\r\n", b"MAR1\x00", b"MAQ1\x02\xff\xfe", bytes(100)],
    ids=repr,
)
async def test_preludes_that_are_none(data: bytes) -> None:
    """Strangers, cut preludes and nameless ones are told apart from a prelude, whole or byte by byte."""
    reader, writer = pair()
    with reader, writer:
        writer.send(data)
        writer.shutdown(socket.SHUT_WR)
        with pytest.raises(ProtocolError):
            await read_route(reader)


def test_listening_on_a_path(tmp_path: Path) -> None:
    """The socket is for this user alone, and the process's umask is as it was."""
    mask = os.umask(0o22)
    try:
        with listen_unix(str(tmp_path / "a")):
            assert 0o600 == (tmp_path / "a").stat().st_mode & 0o777
        assert 0o22 == os.umask(0o22)
    finally:
        os.umask(mask)


@pytest.mark.parametrize(("name", "advice"), [("taken", "remove it"), ("missing/a", "make its directory"), ("x" * 200, "shorter path")])
def test_paths_that_can_not_be_had(tmp_path: Path, name: str, advice: str) -> None:
    """Each error says what to do."""
    (tmp_path / "taken").touch()
    with pytest.raises(AddressError, match=advice):
        listen_unix(str(tmp_path / name))


def test_listening_on_tcp() -> None:
    """Port 0 takes a free one; a port in use, a strange address, a strange name and a strange port each say what to do."""
    with listen_tcp("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        for host, number, advice in [
            ("127.0.0.1", port, "choose another port, or 0"),
            ("192.0.2.1", 0, "give an address of this host"),
            ("nothing.invalid", 0, "give an address of this host"),
            ("x" * 70 + ".invalid", 0, "give an address of this host"),
            ("127.0.0.1", 70_000, "up to 65535"),
            ("127.0.0.1", -1, "up to 65535"),
        ]:
            with pytest.raises(AddressError, match=advice):
                listen_tcp(host, number).close()
    with listen_tcp("", 0) as everywhere:
        assert everywhere.getsockname()[0] in ("0.0.0.0", "::")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("tcp://node1:80", ("node1", 80)),
        ("node1:0", ("node1", 0)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("tcp://[fe80::1]:7", ("fe80::1", 7)),
        ("[::]:7", ("::", 7)),
    ],
)
def test_addresses(text: str, parsed: tuple[str, int]) -> None:
    """Names, IPv4 and bracketed IPv6, with and without the scheme."""
    assert parsed == parse_tcp(text)


@pytest.mark.parametrize(
    "text",
    [
        ":",
        "node1",
        "node1:",
        ":80",
        "node1:x",
        "node1:-1",
        "node1:65536",
        "node1:²",
        "node1:٣",
        "http://node1:80",
        "tcp://a/b:80",
        "::1:80",
        "[::1:80",
        "::1]:80",
        "[]:80",
        "[node1]:80",
        "node1:80/",
        "u@h:1",
    ],
    ids=repr,
)
def test_addresses_that_are_none(text: str) -> None:
    """Anything else is refused, with how to write it."""
    with pytest.raises(AddressError, match="tcp://HOST:PORT"):
        parse_tcp(text)


@pytest.mark.parametrize("text", ["", "a b:80", "a\0:80", "node1:" + "9" * 5000], ids=["nothing", "space", "zero", "digits"])
def test_odd_texts_are_no_addresses(text: str) -> None:
    """Nor is what can't be written in a table of words."""
    with pytest.raises(AddressError, match="tcp://HOST:PORT"):
        parse_tcp(text)


def resolver(*addresses: str) -> Callable[..., list[Any]]:
    return lambda host, port, type: [(0, 0, 0, "", (address, port)) for address in addresses]


@pytest.mark.parametrize(
    ("host", "found", "usable"),
    [
        ("node1", ["127.0.1.1", "10.0.0.5"], ["10.0.0.5"]),
        ("node1", ["fe80::1%eth0", "2001:db8::5", "10.0.0.5", "10.0.0.5"], ["2001:db8::5", "10.0.0.5"]),
        ("localhost", ["127.0.0.1", "::1"], ["127.0.0.1", "::1"]),
        ("127.0.0.1", ["127.0.0.1"], ["127.0.0.1"]),
        ("::1", ["::1"], ["::1"]),
    ],
)
def test_usable_addresses(host: str, found: list[str], usable: list[str]) -> None:
    """What other hosts can use is told, each once; loopback only to who asked for it by name."""
    assert usable == usable_addresses(host, resolver(*found))


@pytest.mark.parametrize(
    ("found", "reasons"),
    [
        (["127.0.1.1"], ["127.0.1.1 (loopback"]),
        (["169.254.3.4", "febf::1"], ["169.254.3.4 (link-local", "febf::1 (link-local"]),
        (["0.0.0.0", "::ffff:127.0.0.1", "224.0.0.1"], ["0.0.0.0 (unspecified", "::ffff:127.0.0.1 (loopback", "224.0.0.1 (multicast"]),
        ([], ["rejected nothing"]),
    ],
)
def test_no_usable_address(found: list[str], reasons: list[str]) -> None:
    """A name that resolves to 127.0.1.1, or only to link-local, fails at once; the error lists what was rejected, why, and what to do."""
    with pytest.raises(AddressError, match="advertise") as caught:
        usable_addresses("node1", resolver(*found))
    assert all(reason in str(caught.value) for reason in reasons)


def test_a_name_that_does_not_resolve() -> None:
    """The real resolver's refusals, of kinds that it raises differently, are one typed error."""
    for name in ("nothing.invalid", "x" * 70 + ".invalid", "a\0b"):
        with pytest.raises(AddressError, match="does not resolve"):
            usable_addresses(name)


def test_whose_socket() -> None:
    """The other end of a pair made here is this user's."""
    one, other = socket.socketpair()
    with one, other:
        assert peer_is_me(one)
