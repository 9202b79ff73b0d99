"""What an exception has to tell, as text: its type, its message, and where it came from."""

from __future__ import annotations

import os
import traceback
import types

__all__ = ["format_error", "type_name"]

_RUNTIME = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_runtime")


def type_name(kind: type) -> str:
    """``"builtins.KeyError"``."""
    return f"{kind.__module__}.{kind.__qualname__}"


def format_error(error: BaseException) -> tuple[str, str, str]:
    """Type name, `str()`, and traceback with chained causes. Never raises, whatever the exception's own methods do."""
    name = type_name(type(error))
    try:
        text = str(error)
    except Exception as trouble:
        text = f"<str() of it raised {type(trouble).__name__}>"
    try:
        story = "".join(traceback.format_exception(type(error), error, _frames(error)))
    except Exception as trouble:
        story = f"<the traceback could not be formatted: {type(trouble).__name__}>\n{name}: {text}\n"
    return name, text, story


def _frames(error: BaseException) -> types.TracebackType | None:
    """Where it was raised, from the first frame that is not the runtime's own: what called the user's code is no news to the user."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_RUNTIME):
        found = found.tb_next
    return found or error.__traceback__
