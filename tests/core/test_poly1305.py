"""Poly1305 by libcrypto: the vectors of RFC 8439, any cut of the message, a reference in plain Python, no leak, misuse."""

from __future__ import annotations

import importlib.util
import resource
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_async._core import poly1305
from monarch_async._core.poly1305 import Poly1305
from monarch_async.errors import InternalError, UsageError

PRIME = (1 << 130) - 5
CLAMP = 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
FIGURE = bytes.fromhex("85d6be7857556d337f4452fe42d506a80103808afb0db2fd4abff6af4149f51b")

IETF = (
    b"Any submission to the IETF intended by the Contributor for publication as all or part of an IETF Internet-Draft or RFC and any "
    b'statement made within the context of an IETF activity is considered an "IETF Contribution". Such statements include oral '
    b"statements in IETF sessions, as well as written and electronic communications made at any time or place, which are addressed to"
)
S = bytes.fromhex("36e5f6b5c5e06070f0efca96227a863e")
VECTORS: dict[str, tuple[bytes, bytes, str]] = {
    "2.5.2": (FIGURE, b"Cryptographic Forum Research Group", "a8061dc1305136c6c22b8baf0c0127a9"),
    "A.3 #1": (bytes(32), bytes(64), "00" * 16),
    "A.3 #2": (bytes(16) + S, IETF, S.hex()),
    "A.3 #3": (S + bytes(16), IETF, "f3477e7cd95417af89a6b8794c310cf0"),
    "A.3 #7": (b"\2" + bytes(31), b"\xff" * 16, "03" + "00" * 15),
    "A.3 #8": (b"\2" + bytes(15) + b"\xff" * 16, b"\2" + bytes(15), "03" + "00" * 15),
    "A.3 #9": (b"\1" + bytes(31), b"\xff" * 16 + b"\xf0" + b"\xff" * 15 + b"\x11" + bytes(15), "05" + "00" * 15),
    "A.3 #10": (b"\1" + bytes(31), b"\xff" * 16 + b"\xfb" + b"\xfe" * 15 + b"\1" * 16, "00" * 16),
    "A.3 #11": (b"\2" + bytes(31), b"\xfd" + b"\xff" * 15, "fa" + "ff" * 15),
}


def reference(key: bytes, message: bytes) -> bytes:
    """RFC 8439, 2.5.1, as it stands there."""
    r, s = int.from_bytes(key[:16], "little") & CLAMP, int.from_bytes(key[16:], "little")
    total = 0
    for start in range(0, len(message), 16):
        total = (total + int.from_bytes(message[start : start + 16] + b"\1", "little")) * r % PRIME
    return ((total + s) & ((1 << 128) - 1)).to_bytes(16, "little")


def tag(key: bytes, *pieces: bytes | bytearray | memoryview) -> bytes:
    mac = Poly1305(key)
    for piece in pieces:
        mac.update(piece)
    return mac.digest()


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name: str) -> None:
    """The RFC's own, for the binding and for the reference of the test below."""
    key, message, expected = VECTORS[name]
    assert expected == tag(key, message).hex()
    assert expected == reference(key, message).hex()


@given(st.binary(min_size=32, max_size=32), st.lists(st.binary(max_size=200), max_size=8), st.sampled_from([bytes, bytearray, memoryview]))
def test_any_cut_gives_what_the_reference_does(key: bytes, pieces: list[bytes], kind: Any) -> None:
    """Whatever key and message, cut anywhere, empty pieces too, in bytes, a bytearray, or a view that may not be written to."""
    assert reference(key, b"".join(pieces)) == tag(key, *map(kind, pieces))


def test_views() -> None:
    """A part of writable memory goes in from where it begins, and is let go of."""
    memory = bytearray(range(256)) * 300
    view = memoryview(memory)[77:70_001]
    assert reference(FIGURE, bytes(view)) == tag(FIGURE, view)
    view.release()
    memory += b"more"  # raises `BufferError` for memory that is still held


def test_misuse() -> None:
    """A short key is the caller's fault; so is to go on after the tag."""
    with pytest.raises(UsageError, match="32 bytes"):
        Poly1305(b"short")
    mac = Poly1305(FIGURE)
    mac.digest()
    for again in (mac.digest, lambda: mac.update(b"x")):
        with pytest.raises(InternalError, match="taken"):
            again()


def test_contexts_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are freed as are made, each once: when the tag is taken, and when the object goes without that."""
    library = poly1305._library()
    assert library is not None
    made: list[int] = []
    freed: list[int] = []

    def new(algorithm: int) -> int:
        made.append(library.new(algorithm))
        return made[-1]

    def free(context: int) -> None:
        freed.append(context)
        library.free(context)

    monkeypatch.setattr(poly1305, "_library", lambda: library._replace(new=new, free=free))
    for number in range(20):
        mac = Poly1305(FIGURE)
        mac.update(b"some")
        if number % 2:
            mac.digest()
        del mac
    assert made == freed
    assert 20 == len(made)


def _resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_does_not_grow() -> None:
    """Ten thousand MACs, half of them given up, take no memory that stays."""
    for number in range(500):
        tag(FIGURE, b"warm") if number % 2 else Poly1305(FIGURE)
    before = _resident()
    for number in range(10_000):
        tag(FIGURE, b"warm") if number % 2 else Poly1305(FIGURE)
    assert _resident() - before < 1 << 20


def test_in_threads() -> None:
    """Different messages in different threads at the same time, in large pieces, during which the lock is released."""
    messages = [bytes([number]) * (1 << 20) for number in range(4)]
    found: dict[int, bytes] = {}

    def work(number: int) -> None:
        piece = memoryview(messages[number])
        found[number] = tag(FIGURE, *[piece[start : start + 40_000] for start in range(0, len(piece), 40_000)])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: tag(FIGURE, message) for number, message in enumerate(messages)} == found


@pytest.mark.parametrize(
    "spec",
    [None, ModuleSpec("_hashlib", None, origin="built-in"), importlib.util.spec_from_file_location("_hashlib", "/dev/null")],
    ids=["missing", "built in", "no library"],
)
def test_where_there_is_none(spec: ModuleSpec | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `_hashlib`, with one that is part of the interpreter, or one that has no such functions, it is said to be missing."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    poly1305._library.cache_clear()
    try:
        assert not poly1305.available()
        with pytest.raises(InternalError, match="no Poly1305"):
            Poly1305(FIGURE)
    finally:
        monkeypatch.undo()
        poly1305._library.cache_clear()
    assert poly1305.available()
