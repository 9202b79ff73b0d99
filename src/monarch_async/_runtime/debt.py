"""What a cell owes its senders: credit for the casts it has taken from its mailbox.

Credit is given in portions of an eighth of what a sender may have under way, and what is left over at the runtime's next tick; so it costs
little beside the messages, and a sender that waits for room, which is more than an eighth, is never left without it.
"""

from __future__ import annotations

from monarch_async._runtime.context import Message, Origin

__all__ = ["Debt"]

MANY_BYTES = 1 << 16
"""Credit for so many bytes does not wait."""


class Debt:
    """Owed to one sender at a time: when another one's message comes, the first is paid."""

    __slots__ = ("_bytes", "_indebted", "_key", "_messages", "_origin", "_step")

    def __init__(self, key: int, limit: int, indebted: set[Debt]) -> None:
        self._key = key
        self._indebted = indebted  # the debts of all cells of the runtime that owe something
        self._step = max(1, limit // 8)
        self._origin: Origin | None = None
        self._messages = 0
        self._bytes = 0

    def owe(self, message: Message) -> None:
        """A cast has left the mailbox."""
        if message.origin is not self._origin:
            self.settle()
            self._origin = message.origin
        if not self._messages:
            self._indebted.add(self)
        self._messages += 1
        self._bytes += len(message.body)
        if message.buffers:
            self._bytes += sum(view.nbytes for view in message.buffers)
        if self._messages >= self._step or self._bytes >= MANY_BYTES:
            self.settle()

    def settle(self) -> None:
        """Give what is owed."""
        if self._messages and self._origin is not None:
            self._origin.credit(self._key, self._messages, self._bytes)
            self._messages = self._bytes = 0
            self._indebted.discard(self)
