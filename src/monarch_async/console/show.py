"""How values and errors are shown at the prompt. Pure: values in, text out.

* The result of a call on a mesh is a table by rank, with equal values in one row. A group of ranks that is a block of the mesh also says
  which one, by dimension.
* A future says whether it is done, and how to get at what it will hold.
* An error is shown with the lines that were typed, then what happened at the other side. The runtime's own frames are left out.
"""

from __future__ import annotations

import asyncio
import os
import pprint
import traceback
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from monarch_async.errors import ActorError, MonarchError, fold_ranks
from monarch_async.future import Future
from monarch_async.shape import Extent
from monarch_async.value_mesh import ValueMesh

__all__ = ["INNER", "describe_error", "format_error", "format_value", "table"]

INNER = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, os.path.dirname(os.path.abspath(asyncio.__file__)) + os.sep)
"""Where the runtime's own code is, and asyncio's."""
WIDTH = 120
ROWS = 64
"""Rows of a table that are shown; a larger one says how many more there are."""


def format_value(value: object, width: int = WIDTH) -> str:
    """What is printed for the value of an expression."""
    if isinstance(value, ValueMesh):
        return _value_mesh(value, width)
    if isinstance(value, asyncio.Future) and not isinstance(value, asyncio.Task):
        return _future(value, width)
    text = repr(value)
    return text if len(text) <= width or "\n" in text else pprint.pformat(value, width=width)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Text in columns, the last one as wide as it likes; a cell of several lines goes on below itself."""
    lines: list[list[str]] = [list(heads)]
    for row in rows:
        cells = [cell.split("\n") for cell in row]
        height = max(map(len, cells))
        lines += [[cell[at] if at < len(cell) else "" for cell in cells] for at in range(height)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _value_mesh(mesh: ValueMesh[Any], width: int) -> str:
    extent = mesh.extent
    groups = _group([_cell(value, width) for value in mesh.values()])
    dims = list(extent.labels) if len(extent.labels) > 1 else []
    label = extent.labels[0] if len(extent.labels) == 1 else "rank"
    rows = []
    for text, ranks in groups[:ROWS]:
        block = _block(extent, ranks) if dims else []
        rows.append([fold_ranks(ranks), *block, text])
    shown = table([label, *dims, "value"], rows)
    return shown if len(groups) <= ROWS else f"{shown}\n… {len(groups) - ROWS} more values"


def _cell(value: object, width: int) -> str:
    return describe_error(value) if isinstance(value, BaseException) else format_value(value, width)


def _group(texts: Sequence[str]) -> list[tuple[str, list[int]]]:
    """What looks the same is the same to the reader."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    return list(groups.items())


def _block(extent: Extent, ranks: list[int]) -> list[str]:
    """For each dimension the coordinates of these ranks; empty where the ranks are not all combinations of those."""
    points = [extent.point(rank) for rank in ranks]
    sides = [sorted({point[label] for point in points}) for label in extent.labels]
    if len(ranks) != len(list(product(*sides))):
        return ["" for _ in sides]
    return [fold_ranks(side) for side in sides]


def _future(future: asyncio.Future[Any], width: int) -> str:
    kind = type(future).__name__
    if not future.done():
        return f"<{kind} pending; `await _` waits for it>" if isinstance(future, Future) else repr(future)
    if future.cancelled():
        return f"<{kind} cancelled>"
    error = future.exception()
    if error is not None:
        return f"<{kind} failed: {describe_error(error)}>"
    return f"<{kind} done>\n{format_value(future.result(), width)}"


def describe_error(error: BaseException) -> str:
    """One line: type and message."""
    name = getattr(error, "type_name", "").removeprefix("builtins.") or type(error).__name__
    text = getattr(error, "text", "") or (str(error.args[0]) if error.args else str(error))
    text = text.partition("\n")[0]
    return f"{name}: {text}" if text else name


def format_error(error: BaseException) -> str:
    """What is printed for an error: where it was raised, in what was typed, and what it says, with the remote traceback if there is one."""
    if isinstance(error, SyntaxError) and not error.__traceback__:
        return "".join(traceback.format_exception_only(error)).rstrip()
    if isinstance(error, ActorError) and error.type_name:
        own = _own_frames(error)
        return "\n".join([*own, str(error)])
    if isinstance(error, MonarchError):
        said = "".join(traceback.format_exception_only(error)).rstrip()
        return "\n".join([*_own_frames(error), said.removeprefix(f"{type(error).__module__}.")])
    if error.__cause__ is None and error.__context__ is None and not _own_frames(error):
        return "".join(traceback.format_exception_only(error)).rstrip()
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    while part is not None:
        part.stack = traceback.StackSummary.from_list([frame for frame in part.stack if not _is_runtime(frame.filename)])
        part = part.__cause__ or part.__context__
    return "".join(shown.format()).rstrip()


def _own_frames(error: BaseException) -> list[str]:
    """The frames in the user's code; none where there is just the line that was typed, which still stands above."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_runtime(frame.filename)]
    if all(frame.name.startswith("<") and frame.lineno == 1 for frame in frames):
        return []
    return ["Traceback (most recent call last):", *"".join(traceback.format_list(frames)).rstrip().split("\n")]


def _is_runtime(filename: str) -> bool:
    return filename.startswith(INNER) or f"{os.sep}IPython{os.sep}" in filename
