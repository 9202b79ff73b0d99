"""Seals: the MACs of frames on one connection.

A seal is keyed BLAKE2b over the count of frames before, prelude, header and a digest of the bulk. A bulk goes in by its digest because
that can be had faster: by Poly1305 under a key of its own, derived from the connection's key and the count, where both sides have it; else
by SHA-256, which both always have. Which, the hellos of the handshake say (`offer`, `agreed`); they are under the proof of the job key, so
that nobody in between can talk the sides down.

Rules:

* The keys are those of one direction of one connection. What is sent again over another one is sealed anew, with other keys: no key of
  Poly1305 is ever used for two bulks, whatever is resent.
* The tag of Poly1305 never travels: it is input of the BLAKE2b.
* The lengths in the prelude make the input unambiguous.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import blake2b, sha256
from typing import Any, Protocol

from monarch_async._core.poly1305 import KEY_SIZE, Poly1305, available
from monarch_async.errors import ProtocolError

__all__ = ["POLY1305", "SEAL_SIZE", "SHA256", "BulkDigest", "Seal", "agreed", "offer"]

SEAL_SIZE = 16
POLY1305, SHA256 = "poly1305", "sha256"
_OFFER = "digests"


class BulkDigest(Protocol):
    """Takes a bulk in any pieces."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def digest(self) -> bytes:
        """Of all of it; once."""


def offer() -> dict[str, Any]:
    """What a hello says of the digests that this process has."""
    return {_OFFER: [POLY1305, SHA256] if available() else [SHA256]}


def agreed(hello: Mapping[str, Any]) -> str:
    """The best digest that this process and the peer with this hello both have."""
    theirs = hello.get(_OFFER)
    return POLY1305 if isinstance(theirs, list) and POLY1305 in theirs and available() else SHA256


class Seal:
    """The seals of one direction of one connection, in order; bulks are digested by `digest`."""

    def __init__(self, key: bytes, digest: str = SHA256) -> None:
        self._key = key
        self._digest = digest
        self._count = 0

    def begin_bulk(self) -> BulkDigest:
        """Takes the bulk of the next frame; to be called once for a frame that has one."""
        if self._digest == POLY1305:
            count = self._count.to_bytes(8, "little")
            # Another purpose and another length: no seal's input gives the same.
            return Poly1305(blake2b(count, digest_size=KEY_SIZE, key=self._key, person=b"key of a bulk").digest())
        return sha256()

    def sign(self, head: bytes, digest: bytes = b"") -> bytes:
        """The seal of the next frame: `head` is prelude and header, `digest` that of the bulk (empty if there is none)."""
        count = self._count
        self._count = count + 1
        return blake2b(count.to_bytes(8, "little") + head + digest, digest_size=SEAL_SIZE, key=self._key).digest()

    def sign_bulk(self, head: bytes, bulk: bytes | memoryview) -> bytes:
        """The seal of the next frame, which has a bulk."""
        digest = self.begin_bulk()
        digest.update(bulk)
        return self.sign(head, digest.digest())

    def check(self, seal: bytes, head: bytes, digest: bytes = b"") -> None:
        """`ProtocolError` unless `seal` is the next frame's."""
        if not hmac.compare_digest(seal, self.sign(head, digest)):
            raise ProtocolError("a frame's seal is wrong: it was changed, replayed or lost on the way")
