"""What libraries need to have processes of one host share memory: segments, descriptors given from one to another, and processors for the
threads that use them.

Each process fills segments of its own, and looks at those of others through windows (`segment`). A `Peering` hands the descriptors of a
segment, and of the eventfds that others are to ring, from process to process, under a name that both know.

Rules:

* A name is used once: who meets again agrees on another one, so that nothing of a former meeting is taken for one of this.
* All is for threads other than the loop's, which is what takes in what comes.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence

from monarch_async._channel.descriptors import inbox_path
from monarch_async._channel.processors import keep_apart
from monarch_async._channel.segment import SUPPORTED, Segment, Window
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import ChannelError
from monarch_async.ids import ProcAddress

__all__ = ["SUPPORTED", "Peering", "Segment", "Window", "keep_apart"]

_RETRY = 0.002
_FULL = {errno.EAGAIN, errno.ENOBUFS, errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS}


class Peering:
    """Gives descriptors to processes of this host, and takes what they give, for one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._borrowing = runtime.lending.borrowing
        self.me = runtime.me

    def reaches(self, address: ProcAddress) -> bool:
        """Whether a process is on this host."""
        return SUPPORTED and bool(self.me.unix) and address.host == self.me.host

    def give(self, to: ProcAddress, name: str, fds: Sequence[int], timeout: float, over: Callable[[], bool]) -> None:
        """Give a process copies of up to four descriptors. Waits up to `timeout` seconds for room in its inbox, and while not `over`.

        Raises `ChannelError`.
        """
        limit = time.monotonic() + timeout
        while True:
            try:
                inbox = self._borrowing.inbox
                if inbox is None:
                    raise OSError(errno.EOPNOTSUPP, "this process shares no memory with others")
                inbox.give(inbox_path(self.me, to.uid), self.me.uid, name, fds)
                return
            except OSError as error:
                if error.errno not in _FULL or over() or time.monotonic() > limit:
                    raise ChannelError(f"{to} can't be given descriptors: {error.strerror or error}") from error
                time.sleep(_RETRY)

    def take(self, giver: ProcAddress, name: str, timeout: float, over: Callable[[], bool]) -> list[int]:
        """The descriptors that a process gives to this one, now the caller's; waits up to `timeout` seconds, and while not `over`.

        Raises `ChannelError`.
        """
        fds = self._borrowing.gifts.take(giver.uid, name, timeout, over)
        if fds is None:
            raise ChannelError(f"{giver} has given no descriptors under the name {name!r} within {timeout:g} s")
        return fds

    def refuse(self, name: str) -> None:
        """Take nothing under a name any more: what has come and what still comes is dropped."""
        self._borrowing.gifts.refuse(name)

    def look_again(self) -> None:
        """An `over` has changed. From any thread."""
        self._borrowing.gifts.look_again()
