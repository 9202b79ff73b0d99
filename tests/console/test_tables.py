"""Tables for people."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_async.console.tables import COLUMNS, age, render, render_hops, render_tree, size
from monarch_async.observe import records
from monarch_async.observe.records import CallRow, Frame, Hop, TreeRow


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (0.25, "0.2s"), (12.4, "12s"), (250, "4m10s"), (7500, "2h05m"), (273600, "3d04h"), (59.9, "60s")]
)
def test_ages(seconds: float | None, text: str) -> None:
    """Short, in the two largest units."""
    assert text == age(seconds)


@pytest.mark.parametrize(("count", "text"), [(None, ""), (0, "0 B"), (2048, "2 KiB"), (27 << 20, "27 MiB"), (3 << 40, "3.0 TiB")])
def test_sizes(count: int | None, text: str) -> None:
    """In the largest unit that leaves something before the point."""
    assert text == size(count)


def test_columns_without_anything_are_left_out() -> None:
    """And the rest is aligned."""
    rows = [
        CallRow("client", "client", "w[0]", "", "step", "running", 3.0, True),
        CallRow("w[0].step", "p", "v[1]", "", "x", "sent", 0.5, False),
    ]
    assert [
        "WAITS      FOR   ENDPOINT  AGE   STATE    BLOCKED",
        "client     w[0]  step      3.0s  running  yes",
        "w[0].step  v[1]  x         0.5s  sent     no",
    ] == render("calls", rows).splitlines()


def test_a_tree_is_indented() -> None:
    """By depth, with what is used of the budget."""
    rows = [
        TreeRow(0, "program", "client", "", 1, "client", "", 0, 0, 0.0, ""),
        TreeRow(1, "actors", "w", "W", 4, "p[0] and 3 more", "permanent, one_for_one", 1, 3, 5.0, "1 restarted"),
    ]
    lines = render_tree(rows).splitlines()
    assert lines[1].split() == ["client", "1", "client"]
    assert lines[2].startswith("  w (actors)  W")
    assert "1 of 3 in 5 s" in lines[2]


def test_hops_stand_below_each_other() -> None:
    """With the lines, and for what each waits."""
    hops = [Hop("a[0]", "p[0]", "f", "running", 2.0, (Frame("/x/a.py", 7, "f"),), "b[0]"), Hop("b[0]", "p[1]", "", "ready", None, (), "")]
    assert "a[0].f  running for 2.0s  in p[0]\n    a.py:7 in f\n    waits for b[0]\nb[0]  ready  in p[1]" == render_hops(hops)


RECORDS: dict[str, Any] = {
    "ps": records.ActorRow,
    "procs": records.ProcRow,
    "top": records.TopRow,
    "calls": records.CallRow,
    "links": records.LinkRow,
    "deadletters": records.DeadLetterRow,
    "events": records.Event,
    "jobs": records.JobInfo,
    "trace": records.Traced,
    "doctor": records.Check,
    "done": records.Done,
    "eval": records.Evaluated,
}


def test_every_column_is_a_field() -> None:
    """Of the record that the table is of; and each table is of one."""
    assert set(RECORDS) == set(COLUMNS)
    for kind, columns in COLUMNS.items():
        assert [] == [field for _, field, _ in columns if field not in RECORDS[kind]._fields], kind
        assert len(columns) == len({head for head, _, _ in columns}), kind
