"""What is typed: when it is complete, what it completes to, and which lines are commands."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_async import Extent, UsageError
from monarch_async.console.commands import Commands
from monarch_async.console.compiling import Compiler
from monarch_async.console.completion import complete
from monarch_async.observe.job import Job

BLOCK = "class A:\n    x = 1"


@pytest.mark.parametrize(
    ("source", "complete"),
    [
        ("1 + 1", True),
        ("(1 +", False),
        ("'''text", False),
        (BLOCK, False),
        (BLOCK + "\n", True),
        ("await f()", True),
        ("async with f():\n    await g()", False),
        ("1 +* 2", True),
        (BLOCK + "\n\nclass B:\n    y = 2\n", True),
        ("x = 1\ny = 2", True),
        ("x = 1\ny = (", True),
        ("", True),
        ("# a remark", True),
    ],
)
def test_when_an_input_is_complete(source: str, complete: bool) -> None:
    """Lines that can't end here ask for more; what is wrong does not."""
    assert complete is Compiler().is_complete(source)


def test_several_statements_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pasted is one input, and all its expressions are displayed."""
    shown: list[object] = []
    monkeypatch.setattr("sys.displayhook", shown.append)
    exec(Compiler().compile("x = 1\nx + 1\nx + 2"), {})
    assert [2, 3] == shown


def test_future_statements_hold() -> None:
    """``from __future__`` in one input is in force in the next."""
    compiler = Compiler()
    compiler.compile("from __future__ import annotations")
    names: dict[str, Any] = {}
    exec(compiler.compile("def f(x: unknown): pass\n"), names)
    assert {"x": "unknown"} == names["f"].__annotations__


class Mesh:
    """What has dimensions."""

    extent = Extent(["gpus", "hosts"], [2, 3])

    @property
    def broken(self) -> int:
        raise RuntimeError("not now")


NAMES = {"mesh": Mesh(), "mess": 1, "box": SimpleNamespace(mesh=Mesh(), part=1), "_hidden": 2}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("me", ["memoryview", "mesh", "mess"]),
        ("mesh.ext", ["extent"]),
        ("print(box.pa", ["part"]),
        ("mesh.slice(", ["gpus=", "hosts="]),
        ("mesh.slice(g", ["gpus="]),
        ("mesh.slice(gpus=0, ", ["hosts="]),
        ("x = box.mesh.split(h", ["hosts="]),
        ("mesh.slice(me", ["memoryview", "mesh", "mess"]),
        ("mesh.broken.x", []),
        ("f().me", []),
        ("nothing.at.all", []),
        ("mesh._", [name for name in dir(Mesh()) if name.startswith("_")]),
        ("", []),
    ],
)
def test_completion(text: str, names: list[str]) -> None:
    """Names, attributes, dimensions that are not given yet; no call is made, and a property that raises offers nothing."""
    assert names == complete(text, NAMES).names


def test_completion_says_what_it_replaces() -> None:
    """From the last word's beginning to the cursor."""
    assert len("a + box.") == complete("a + box.pa", NAMES).start


COMMANDS = Commands(Job.here, {"pdb": lambda words: asyncio.sleep(0)})


@pytest.mark.parametrize(
    "source",
    [
        "ps",
        "ps trainer",
        "stack 3",
        "logs trainer --follow",
        "pdb trainer[3]",
        "  tree  ",
        "kill trainer[0]",
        "ps  # all",
        "eval a self.x + 1",
    ],
)
def test_lines_that_are_commands(source: str) -> None:
    """The name alone, or followed by what could not follow it in Python."""
    assert COMMANDS.find(source, dict(COMMANDS.functions)) is not None


@pytest.mark.parametrize(
    "source",
    ["ps()", "ps = 1", "ps.x", "ps in rows", "ps if x else y", "top - 1", "await ps()", "rows", "pstree", "ps, top", "stack == 3", "ps\n1"],
)
def test_lines_that_are_python(source: str) -> None:
    """Everything else."""
    assert COMMANDS.find(source, dict(COMMANDS.functions)) is None


def test_a_name_of_the_session_comes_first() -> None:
    """Who calls a variable `ps` gets that."""
    assert COMMANDS.find("ps", {"ps": 1}) is None
    assert COMMANDS.find("pdb", {"pdb": 1}) is None


def test_pythons_own_names_are_not_taken() -> None:
    """`eval` is a command, and no function of the session."""
    assert "eval" not in COMMANDS.functions
    assert {"ps", "tree", "why"} <= set(COMMANDS.functions)


@pytest.mark.parametrize(
    ("source", "text"),
    [("stack", "required"), ("ps --what", "unrecognized"), ("top --interval x", "number of seconds"), ("ps 'a", "quotation")],
)
async def test_a_wrong_command_says_how(source: str, text: str) -> None:
    """With `UsageError`, and never by ending the program."""
    run = COMMANDS.find(source, dict(COMMANDS.functions))
    assert run is not None
    with pytest.raises(UsageError, match=text):
        await run()
