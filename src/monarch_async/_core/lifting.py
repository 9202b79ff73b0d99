"""Large `bytes`, `bytearray` and `str` beside a pickle in place of in it: a copy less, since a pickle is put together from its parts.

The C pickler hands what it has written to its file in chunks, and a large value as a chunk of its own, uncopied. So that one can stay
beside the pickle as other large buffers do, if its place says that the next buffer is to be made what it was.

Rules:

* What a chunk is follows from the lengths of frames in those before it, never from what it looks like: it may be anything.
* Where a chunk is not what it should be nothing is lifted from there on; the pickle is right as it is.
* The receiver makes a value of its own of what comes, which takes a copy, the only one of its own. A `memoryview` or an array takes none.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["LIFTED", "Lifter"]

LIFTED = 1 << 18
"""Values of this many bytes and more are lifted."""

_PROTO, _FRAME, _FRAME_HEADER = 0x80, 0x95, 9
_UNFRAMED = 3  # opcodes of so many bytes or fewer have no frame
_LENGTH = {ord("B"): 4, 0x8E: 8, 0x96: 8, ord("X"): 4, 0x8D: 8}  # bytes of the length after an opcode
_CALL = b"\x97\x85R"  # with the next buffer
_MAKE = {
    ord("B"): b"cbuiltins\nbytes\n" + _CALL,
    0x8E: b"cbuiltins\nbytes\n" + _CALL,
    0x96: b"cbuiltins\nbytearray\n" + _CALL,
    ord("X"): b"c" + __name__.encode() + b"\ntext_of\n" + _CALL,
    0x8D: b"c" + __name__.encode() + b"\ntext_of\n" + _CALL,
}


class Lifter:
    """Follows the chunks of one pickle."""

    __slots__ = ("_followed", "_header", "_lost")

    def __init__(self) -> None:
        self._followed = 0  # chunks that were looked at
        self._header = -1  # the opcode that the last of them ended with, if what comes next is its value
        self._lost = False

    def lift(self, chunks: list[bytes | bytearray]) -> Iterator[memoryview]:
        """Take the large values out of the chunks that have come since the last time; they are the next buffers."""
        for index in range(self._followed, len(chunks)):
            if self._lost:
                return
            chunk = chunks[index]
            if self._header < 0:
                self._follow(chunk, first=not index)
            else:
                opcode, self._header = self._header, -1
                before, width = chunks[index - 1], _LENGTH[opcode]
                if int.from_bytes(before[-width:], "little") != len(chunk):
                    self._lost = True
                    return
                if len(chunk) >= LIFTED:
                    chunks[index - 1] = before[: -1 - width] + _MAKE[opcode]
                    chunks[index] = b""
                    yield memoryview(chunk)
            self._followed = index + 1

    def _follow(self, chunk: bytes | bytearray, first: bool) -> None:
        """Find out what comes after a chunk that is no value: frames, a few opcodes without, and perhaps the beginning of a large value."""
        place = 2 if first and chunk[:1] == bytes([_PROTO]) else 0
        while len(chunk) - place > _UNFRAMED and chunk[place] == _FRAME:
            place += _FRAME_HEADER + int.from_bytes(chunk[place + 1 : place + _FRAME_HEADER], "little")
        rest = len(chunk) - place
        if 0 <= rest <= _UNFRAMED:
            return
        width = 4 if rest <= 5 + _UNFRAMED else 8
        opcode = chunk[-1 - width] if 5 <= rest <= 9 + _UNFRAMED else -1
        if _LENGTH.get(opcode) == width:
            self._header = opcode
        else:
            self._lost = True


def text_of(buffer: memoryview) -> str:
    """A `str` again."""
    return str(buffer, "utf-8", "surrogatepass")
