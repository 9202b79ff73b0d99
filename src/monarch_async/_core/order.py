"""What comes from one process over two paths, put back in the order in which it was sent.

A process sends to another one over a link of their own, the *direct* path, or through an agent, which sends on to many: the *tree*. Each
path keeps its order; between them order is lost. So whoever sends says at each change of path what went before:

* The messages of the tree are numbered. A *gate* on the direct path names the last of them: what follows it waits for that.
* A *mark* on the direct path is numbered too, and a message of the tree names the last one: it waits for that.

What waits on one path was sent after all that it waits for, so the two never wait for each other, as long as what was sent arrives.
What never will is made up for by whoever knows that it was lost: `passed` and `lost`.

Rules:

* Numbers only grow, and stand for all before them: a message that was lost holds nothing up once a later one of its path is there.
* A message of the tree that comes after it was said to be lost is late, and has to be dropped.
* A path that was never left costs nothing: no gate, no mark, no state.

Pure: what comes in is an argument, what may be delivered is returned, in order. Items are whatever the caller wants back.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

__all__ = ["Order"]

T = TypeVar("T")
_GATE, _MARK, _ITEM = 0, 1, 2


class Order(Generic[T]):
    """What one process holds back of what another one has sent."""

    __slots__ = ("_direct", "_known", "_marks", "_tree", "_trees")

    def __init__(self) -> None:
        self._marks = 0  # the last mark that was reached
        self._trees = 0  # the last message of the tree that was delivered, or is known to be lost
        self._known = 0  # the last that came, or is known to be lost
        self._direct: deque[tuple[int, int, T | None]] = deque()  # which of the above, its number, the item
        self._tree: deque[tuple[int, int, list[T]]] = deque()  # number, the mark it waits for, the item if it is one

    @property
    def blocked(self) -> bool:
        """Whether what comes over the direct path has to wait."""
        return bool(self._direct)

    @property
    def held(self) -> list[T]:
        """What waits, in no order."""
        return [item for kind, _, item in self._direct if kind == _ITEM and item is not None] + [
            item for _, _, items in self._tree for item in items
        ]

    def direct(self, item: T) -> list[T]:
        """A message came over the direct path."""
        self._direct.append((_ITEM, 0, item))
        return self._run()

    def gate(self, number: int) -> list[T]:
        """What follows on the direct path waits for message `number` of the tree."""
        self._direct.append((_GATE, number, None))
        return self._run()

    def mark(self, number: int) -> list[T]:
        """Mark `number` of the direct path."""
        self._direct.append((_MARK, number, None))
        return self._run()

    def is_late(self, number: int) -> bool:
        """Whether message `number` of the tree was said to be lost, or one after it came: to take it now would be out of order."""
        return number <= self._known

    def tree(self, number: int, after: int, item: T) -> list[T]:
        """Message `number` of the tree came, and is not late; it was sent after mark `after`."""
        self._known = number
        self._tree.append((number, after, [item]))
        return self._run()

    def passed(self, number: int) -> list[T]:
        """Said in the order of the tree: of its messages up to `number` none comes any more."""
        self._known = max(self._known, number)
        self._tree.append((self._known, 0, []))
        return self._run()

    def lost(self, mark: int) -> list[T]:
        """The direct path was lost: what stood before `mark` on it, and has not come, never will."""
        self._marks = max(self._marks, mark)
        return self._run()

    def skipped(self, number: int) -> list[T]:
        """The tree was lost before it began to carry anything: its messages up to `number`, and what has not come, never will."""
        self._known = max(self._known, number)
        self._trees = max(self._trees, number)
        return self._run()

    def _run(self) -> list[T]:
        ready: list[T] = []
        direct, tree = self._direct, self._tree
        while True:
            if direct:
                kind, number, item = direct[0]
                if kind != _GATE or self._is_past(number):
                    direct.popleft()
                    if kind == _MARK:
                        self._marks = max(self._marks, number)
                    elif item is not None:
                        ready.append(item)
                    continue
            if tree and tree[0][1] <= self._marks:
                number, _, items = tree.popleft()
                self._trees = max(self._trees, number)
                ready += items
                continue
            return ready

    def _is_past(self, number: int) -> bool:
        """Whether message `number` of the tree was delivered or never will be, as one behind it waits and none before that."""
        return number <= self._trees or (bool(self._tree) and number < self._tree[0][0])

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant is broken. For tests."""
        assert not self._direct or (self._direct[0][0] == _GATE and not self._is_past(self._direct[0][1]))
        assert not self._tree or self._tree[0][1] > self._marks
        numbers = [number for number, _, _ in self._tree]
        assert numbers == sorted(numbers)
