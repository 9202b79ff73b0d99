"""Another process, as one that is lent to: its loans, and what becomes of them when a session with it is lost while it lives.

Such a session takes with it what was under way: a LENT that the process never sees, or a RETURNED that never comes back. So the owner asks
for its loans (RECALLED), and the process gives back (RETURNED) what nothing there looks at. See `lending` for the whole.

Rules:

* A loan that went over a link which goes on is asked for over that, behind it: whatever became of it is known where the question comes.
* One that went over a session which is over could still come after the question, so whoever is asked ends that session first. It is asked
  for over another link, or over the next there is; none is made for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from monarch_async._channel.block import Block
from monarch_async._core.framing import MAX_ITEMS, RECALLED, pack_message
from monarch_async._runtime.link import Link

__all__ = ["Tenant"]


class Tenant:
    """See the module's text."""

    __slots__ = ("introduced", "loans", "lost")

    def __init__(self) -> None:
        self.introduced: set[int] = set()  # numbers of segments
        # By the number of the loan, or less that of one on a device, which has no block here; and the link that it went over.
        self.loans: dict[int, tuple[Block | None, Link]] = {}
        self.lost: list[str] = []  # sessions that are over

    def recall(self, links: Sequence[Link]) -> None:
        """Ask for all loans that went over these links, which go on, and over others that don't."""
        ways: dict[Link, list[int]] = {}
        astray = []
        for number, (_, link) in self.loans.items():
            if link.ended:
                astray.append(number)
            elif link in links:
                ways.setdefault(link, []).append(number)
        for link, numbers in ways.items():
            self._ask(link, [], numbers)
        if astray and links:
            self._ask(links[0], self.lost, astray)

    def _ask(self, link: Link, sessions: Sequence[str], numbers: Sequence[int]) -> None:
        for start in range(0, len(numbers), MAX_ITEMS):
            link.send(pack_message((RECALLED, sessions, numbers[start : start + MAX_ITEMS])))
