"""The parts of a communicator by themselves: the ledger, the store of an epoch, breaking connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore

from monarch_async.tensor import CollectiveError, sockets
from monarch_async.tensor.ledger import KEPT, Ledger, callers_line
from monarch_async.tensor.sockets import Connections, break_connections, listening_sockets
from monarch_async.tensor.store import MemberStore


def test_a_ledger_is_bounded_and_tells_states() -> None:
    """The last entries are kept; an entry is done or failed, with its times; what was finished last is known in words."""
    ledger = Ledger()
    assert "" == ledger.last_done
    for number in range(KEPT + 5):
        entry = ledger.open("all_reduce", "(4,)", callers_line())
        entry.number = number
        ledger.close(entry, None if number % 2 else ValueError("no"))
    entries = ledger.entries()
    assert KEPT == len(entries)
    assert [5, 6] == [entry.number for entry in entries[:2]]
    assert ("failed", "ValueError: no") == (entries[-1].state, entries[-1].error)
    assert f"operation {KEPT + 3}, all_reduce" == ledger.last_done
    assert entries[0].line.startswith("test_parts.py:")
    assert entries[0].called <= entries[0].ended
    assert "operation 5 (all_reduce (4,) at test_parts.py:" in str(entries[0])


class Stores:
    """Two members' stores, which tell each other at once."""

    def __init__(self) -> None:
        self.both = [self._make(0), self._make(1)]

    def _make(self, me: int) -> MemberStore:
        def tell(what: str, key: str, value: Any) -> None:
            other = self.both[1 - me]
            answer = other.heard(me, what, key, value)
            if answer is not None:
                request, how, result = answer
                self.both[me].heard(1 - me, how, key, (request, result))

        return MemberStore(me, tell, tell, 5.0)


def test_a_store_is_the_same_for_all() -> None:
    """What one sets all have; counting and swapping are done one after the other; also below a prefix, as torch asks."""
    first, second = Stores().both
    first.set("a", "1")
    assert b"1" == second.get("a")
    assert [6, 7, 9] == [first.add("n", 6), second.add("n", 1), first.add("n", 2)]
    assert b"9" == second.get("n")
    assert b"x" == second.compare_set("c", "", "x")
    assert b"x" == first.compare_set("c", "y", "z")
    assert b"z" == second.compare_set("c", "x", "z")
    assert second.check(["a", "n"])
    assert not second.check(["a", "b"])
    below = PrefixStore("p", first)
    below.set("k", "v")
    assert b"v" == PrefixStore("p", second).get("k")
    assert second.delete_key("a")
    assert not first.check(["a"])
    second.multi_set(["x", "y"], ["1", "2"])
    assert [b"1", b"2"] == first.multi_get(["x", "y"])


def _caught(function: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except (CollectiveError, TimeoutError) as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_closing_a_store_ends_all_waiting() -> None:
    """Who waits for a key gets the reason, and so does who asks later; who waits too long without one is told which key."""
    first, second = Stores().both
    thread, errors = _caught(lambda: second.wait(["never"]))
    second.close(ValueError("over"))
    thread.join(5)
    assert ["the epoch that this store belongs to is over: over"] == [str(error) for error in errors]
    with pytest.raises(CollectiveError, match="is over"):
        second.get("more")
    with pytest.raises(TimeoutError, match=r"keys \['never'\] did not come within 0.01 s"):
        first.wait(["never"], timedelta(seconds=0.01))


def test_connections_of_one_listener_are_broken() -> None:
    """Both ends of what leads to it break at once, and nothing else does; the listener itself goes on."""
    with socket.create_server(("127.0.0.1", 0)) as mine, socket.create_server(("127.0.0.1", 0)) as other:
        assert {mine.getsockname(), other.getsockname()} <= listening_sockets()
        pairs = []
        for server in (mine, other):
            client = socket.create_connection(server.getsockname())
            pairs.append((client, server.accept()[0]))
        assert break_connections(mine.getsockname(), [("127.0.0.1", 1)])
        assert [b"", b""] == [end.recv(1) for end in pairs[0]]
        pairs[1][0].sendall(b"x")
        assert b"x" == pairs[1][1].recv(1)
        assert break_connections(("127.0.0.1", 1), [other.getsockname()])
        assert b"" == pairs[1][1].recv(1)
        later = socket.create_connection(mine.getsockname())
        for end in (*pairs[0], *pairs[1], mine.accept()[0], later):
            end.close()


def test_connections_are_of_whom_a_device_was_taken_for_last() -> None:
    """Who had it before breaks nothing of who has it now, whichever of them is told of it first; once both have let go nothing is kept."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        earlier, later = Connections(("127.0.0.1", 1)), Connections(("127.0.0.1", 2))
        later.may_lead_to(other.getsockname(), 7)
        earlier.may_lead_to(other.getsockname(), 5)
        with socket.create_connection(other.getsockname()) as client, other.accept()[0] as accepted:
            earlier.break_off()
            client.sendall(b"x")
            assert b"x" == accepted.recv(1)
            earlier.let_go()
            later.break_off()
            assert b"" == accepted.recv(1)
        later.let_go()
        assert other.getsockname() not in sockets._last_taken
