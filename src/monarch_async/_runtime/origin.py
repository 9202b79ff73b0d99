"""Where answers go: back over a link, or to a waiter in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch_async._core.codec import copy_value, dumps, is_plain
from monarch_async._core.faults import encode_fault
from monarch_async._core.framing import CREDIT, FAIL, REPLY, STARTED, pack_message
from monarch_async._runtime.link import INLINE, Link
from monarch_async.errors import FrameTooLarge

if TYPE_CHECKING:
    from monarch_async._runtime.context import Message
    from monarch_async._runtime.runtime import Runtime

__all__ = ["LinkOrigin", "LocalOrigin"]

_NONE = {request: None for request in ()}


class LinkOrigin:
    """The far end of a link."""

    __slots__ = ("link",)

    def __init__(self, link: Link) -> None:
        self.link = link

    def answer(self, message: Message, value: Any) -> None:
        link = self.link
        link.inbound_calls.pop(message.request, None)
        if value is None:
            link.send_control(pack_message((REPLY, message.request, b"")))
            return
        try:
            body, buffers = dumps(value)
            if buffers or len(body) > INLINE:
                link.send_large([REPLY, message.request, b""], body, buffers)
            else:
                link.send_control(pack_message((REPLY, message.request, body)))
        except (TypeError, FrameTooLarge) as error:
            error.add_note(f"this was the result of {message.cell.identity}.{message.endpoint}")
            self.refuse(message, error)

    def refuse(self, message: Message, error: BaseException) -> None:
        self.link.inbound_calls.pop(message.request, None)
        if message.request:
            actor = str(message.cell.identity) if message.cell is not None else ""
            self.link.send_control(pack_message((FAIL, message.request, encode_fault(error, actor=actor))))

    def credit(self, key: int, messages: int, size: int) -> None:
        self.link.send_control(pack_message((CREDIT, key, messages, size)))

    def tell_started(self, message: Message) -> None:
        self.link.send_control(pack_message((STARTED, message.request)))


class LocalOrigin:
    """This process. Values are copied on the way unless they are immutable."""

    __slots__ = ("runtime",)

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def answer(self, message: Message, value: Any) -> None:
        waiter = self._close(message)
        if waiter is not None:
            if not is_plain(value):
                try:
                    value = copy_value(value)
                except TypeError as error:
                    waiter.fail(message.request, error)
                    return
            waiter.settle(message.request, value)

    def refuse(self, message: Message, error: BaseException) -> None:
        waiter = self._close(message)
        if waiter is not None:
            waiter.fail(message.request, self.runtime.as_fault(error, message))

    def _close(self, message: Message) -> Any:
        message.lane.credit(1, 0)
        waiter, message.waiter = message.waiter, None
        self.runtime.local_calls.pop(message.request, None)
        return waiter

    def credit(self, key: int, messages: int, size: int) -> None:
        lane = self.runtime.local_lanes.get(key)
        if lane is not None:
            lane.credit(messages, 0)

    def tell_started(self, message: Message) -> None:
        """Nothing to tell: caller and handler die together."""
