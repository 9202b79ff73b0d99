"""How values and errors are shown: tables by rank, folded; futures; errors with what was typed and what happened elsewhere."""

from __future__ import annotations

import asyncio
from types import FunctionType

import pytest

from monarch_async import ActorError, Extent, UsageError, ValueMesh
from monarch_async.console.compiling import Compiler
from monarch_async.console.show import ROWS, describe_error, format_error, format_value, table


def mesh(extent: dict[str, int], values: list[object]) -> ValueMesh[object]:
    return ValueMesh(Extent(extent.keys(), extent.values()), values)


def test_equal_values_are_one_row() -> None:
    """Each distinct value stands once, with its ranks, in the order of first ranks."""
    shown = format_value(mesh({"gpus": 5}, ["a", "b", "a", "a", "c"]))
    assert ["gpus   value", "0,2–3  'a'", "1      'b'", "4      'c'"] == shown.split("\n")


def test_blocks_of_several_dimensions() -> None:
    """A group that is a block of the mesh says which; one that is none has its ranks only."""
    shown = format_value(mesh({"hosts": 2, "gpus": 3}, [1, 1, 1, 2, 3, 2])).split("\n")
    assert ["rank  hosts  gpus  value", "0–2   0      0–2   1", "3,5   1      0,2   2", "4     1      1     3"] == shown
    diagonal = format_value(mesh({"hosts": 2, "gpus": 2}, [1, 2, 2, 1])).split("\n")
    assert "0,3                1" == diagonal[1]


def test_a_single_value() -> None:
    """A mesh without dimensions has one row."""
    assert ["rank  value", "0     7"] == format_value(mesh({}, [7])).split("\n")


def test_values_of_several_lines_and_errors() -> None:
    """A long value goes on below itself; an error among the values is one line."""
    error = ActorError("KeyError: 'x'")
    error.type_name, error.text = "builtins.KeyError", "'x'"
    shown = format_value(mesh({"gpus": 2}, [list(range(60)), error])).split("\n")
    assert shown[1].startswith("0     [0,")
    assert shown[2].startswith("       ")
    assert "1     KeyError: 'x'" == shown[-1]


def test_a_large_table_ends() -> None:
    """So many rows are shown, and how many more there are."""
    lines = format_value(mesh({"gpus": ROWS + 3}, list(range(ROWS + 3)))).split("\n")
    assert ROWS + 2 == len(lines)
    assert "… 3 more values" == lines[-1]


async def test_futures() -> None:
    """Pending, done with its value, failed, cancelled."""
    loop = asyncio.get_running_loop()
    pending, done, failed, cancelled = [loop.create_future() for _ in range(4)]
    done.set_result(5)
    failed.set_exception(ValueError("bad"))
    cancelled.cancel()
    assert "pending" in format_value(pending)
    assert "<Future done>\n5" == format_value(done)
    assert "<Future failed: ValueError: bad>" == format_value(failed)
    assert "<Future cancelled>" == format_value(cancelled)
    pending.cancel()


def raised(source: str, names: dict[str, object] | None = None) -> BaseException:
    """What running an input raises."""
    code = Compiler().compile(source)
    with pytest.raises(BaseException) as info:  # noqa: PT011  # whatever it is
        FunctionType(code, dict(names or {}))()
    return info.value


def test_a_plain_error_has_the_lines_that_were_typed() -> None:
    """The traceback begins with the input, and shows its source."""
    shown = format_error(raised("def f(x):\n    return 1 / x\n\nf(0)"))
    assert shown.startswith("Traceback")
    assert "return 1 / x" in shown
    assert "pytest" not in shown.replace("test_show.py", "")
    assert shown.endswith("ZeroDivisionError: division by zero")


def test_a_wrong_call_is_one_line() -> None:
    """An error of the runtime's own about the line that was typed says just what is wrong."""

    def refuse() -> None:
        raise UsageError("do it otherwise")

    shown = format_error(raised("refuse()", {"refuse": refuse}))
    assert shown.endswith("UsageError: do it otherwise")
    assert "errors.UsageError" not in shown


def test_a_remote_error() -> None:
    """What it is, where, and the traceback from there; no local frames for a line that stands above anyway."""
    error = ActorError("x")
    error.type_name, error.text, error.actor, error.remote_traceback = "builtins.KeyError", "'k'", "m[1]", "Traceback …\nKeyError: 'k'\n"
    assert "KeyError: 'k' in m[1]\n\nRemote traceback:\nTraceback …\nKeyError: 'k'" == format_error(error)
    assert "KeyError: 'k'" == describe_error(error)


def test_tables() -> None:
    """Columns are aligned, cells of several lines go on below, nothing trails."""
    assert "a   b\n1   x\n    y\n22  z" == table(["a", "b"], [["1", "x\ny"], ["22", "z"]])
