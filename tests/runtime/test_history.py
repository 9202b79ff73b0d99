"""What is remembered of ends."""

from __future__ import annotations

from monarch_async._core.events import Identity
from monarch_async._runtime.history import KEPT, History, fold_members
from monarch_async.observe.names import concerns


def test_none_of_a_large_process_is_left_out() -> None:
    """Members are folded by mesh, and each is found in the text again."""
    members = [Identity(mesh, "W", rank) for rank in range(10_000) for mesh in ("worker", "feeder") if rank != 7]
    text = fold_members(members)
    assert "worker[0–6,8–9999], feeder[0–6,8–9999]" == text
    found = [concerns(part, "feeder", 9_999) for part in text.split(", ")]
    assert [False, True] == found
    assert not any(concerns(part, "worker", 7) for part in text.split(", "))


def test_details_are_kept_whole() -> None:
    """However many meshes a process had; only the number of entries is bounded."""
    history = History()
    text = fold_members(Identity(f"mesh{number}", "W", 0) for number in range(10_000))
    for _ in range(KEPT + 1):
        history.note("exited", "gpus[0]", "exited with code 3", text)
    assert KEPT == len(history.entries)
    assert text.startswith("mesh0[0], ")
    assert text == history.entries[-1].detail
