"""What people call actors, and what is drawn of collapsed stacks: the parts that need no job."""

from __future__ import annotations

import importlib.util
import resource
import xml.etree.ElementTree as ET

import pytest

from monarch_async.observe.doctor import doctor
from monarch_async.observe.flame import flame_graph
from monarch_async.observe.names import concerns, parse, unknown
from monarch_async.observe.waits import frames_in


@pytest.mark.parametrize(
    ("target", "name"),
    [("trainer", ("trainer", -1)), ("trainer[3]", ("trainer", 3)), (7, ("7", -1)), ("a[b][2]", ("a[b]", 2)), ("a[b]", ("a[b]", -1))],
)
def test_targets(target: str | int, name: tuple[str, int]) -> None:
    """A mesh, or a member of one."""
    assert name == parse(target)


@pytest.mark.parametrize(
    ("subject", "rank", "expected"),
    [
        ("w[0–3,5]", 2, True),
        ("w[0–3,5]", 5, True),
        ("w[0–3,5]", 4, False),
        ("w[0–3,5]", -1, True),
        ("v[0]", 0, False),
        ("w", 0, False),
    ],
)
def test_subjects_of_events(subject: str, rank: int, expected: bool) -> None:
    """As failures name their members."""
    assert expected == concerns(subject, "w", rank)


def test_suggestions() -> None:
    """Another rank of the same mesh; the nearest mesh; else what there is."""
    known = ["trainer[0]", "trainer[1]", "feeder[0]"]
    assert ("trainer[0]", "trainer[1]") == unknown("trainer[7]", "actor", known).nearest
    assert ("trainer[1]",) == unknown("trianer[1]", "actor", known).nearest
    assert "there is no actor xyz; there are feeder, trainer" == str(unknown("xyz", "actor", known))
    assert "there is no actor xyz; there are none" == str(unknown("xyz", "actor", []))


def test_a_flame_graph_is_an_svg_with_the_shares() -> None:
    """Each call is a box as wide as its share; names are escaped."""
    root = ET.fromstring(flame_graph("main;<run>;a 30\nmain;<run>;b 10\n", "title"))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert ["main: 40 (100.0 %)", "<run>: 40 (100.0 %)", "a: 30 (75.0 %)", "b: 10 (25.0 %)"] == titles
    widths = [float(box.attrib["width"]) for box in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert [1200.0, 1200.0, 900.0, 300.0] == widths
    assert "0 samples" in flame_graph("", "nothing")


def test_frames_of_a_rendered_stack() -> None:
    """As they stand in the text."""
    assert [("/a b.py", 12, "f"), ("c.py", 3, "<lambda>")] == [
        tuple(frame) for frame in frames_in('x:\n  File "/a b.py", line 12, in f\n  File "c.py", line 3, in <lambda>')
    ]


def test_the_doctor_knows_this_machine() -> None:
    """Each check has a name of its own, and each lack a fix."""
    checks = doctor()
    assert len(checks) == len({check.name for check in checks})
    assert {"uvloop", "memfd", "pidfd", "process_vm_readv", "cuda", "nccl", "ucx", "open files"} <= {check.name for check in checks}
    assert [] == [check.name for check in checks if not check.ok and not check.fix]
    found = {check.name: check for check in checks}
    assert {"pidfd": True, "memfd": True} == {name: found[name].ok for name in ("pidfd", "memfd")}
    for name in ("uvloop", "torch"):
        assert (importlib.util.find_spec(name) is not None) is found[name].ok
    assert str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) == found["open files"].found
