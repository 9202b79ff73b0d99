"""The full prompt, by `prompt_toolkit`: editing over several lines, a menu of completions, history with search.

It runs in the session's own loop. What is printed meanwhile appears above it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.patch_stdout import patch_stdout

from monarch_async.console.completion import Completions
from monarch_async.console.prompts import history_file
from monarch_async.console.session import Session

__all__ = ["ToolkitPrompt"]

_INDENT = "    "
_ENDS_BLOCK = ("return", "pass", "raise", "break", "continue")


class _Completer(Completer):
    def __init__(self, complete: Callable[[str], Completions]) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        start, names = self._complete(text)
        return [Completion(name, start - len(text)) for name in names]


class ToolkitPrompt:
    """Reads inputs with all comfort."""

    def __init__(self, session: Session) -> None:
        self._of = session
        path = history_file("history.toolkit")
        self._session: PromptSession[str] = PromptSession(
            lambda: session.prompts[0],
            prompt_continuation=lambda width, line, wrapped: session.prompts[1],
            multiline=True,
            completer=_Completer(session.complete),
            complete_while_typing=False,
            history=FileHistory(str(path)) if path is not None else InMemoryHistory(),
            enable_history_search=False,
            key_bindings=self._keys(),
        )

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
        def _enter(event: KeyPressEvent) -> None:
            """Run what is complete; else begin the next line, where the one before suggests."""
            buffer = event.current_buffer
            document = buffer.document
            at_end = not document.text_after_cursor.strip()
            if at_end and (not buffer.text.strip() or self._of.is_complete(buffer.text)):
                buffer.validate_and_handle()
                return
            line = document.current_line_before_cursor
            indent = line[: len(line) - len(line.lstrip())]
            if line.rstrip().endswith(":"):
                indent += _INDENT
            elif line.strip().startswith(_ENDS_BLOCK):
                indent = indent[: -len(_INDENT)]
            buffer.insert_text("\n" + (indent if line.strip() else ""))

        @keys.add("tab", filter=has_focus(DEFAULT_BUFFER))
        def _tab(event: KeyPressEvent) -> None:
            """Indent at the beginning of a line, else complete."""
            buffer = event.current_buffer
            if not buffer.document.current_line_before_cursor.strip():
                buffer.insert_text(_INDENT)
            elif buffer.complete_state:
                buffer.complete_next()
            else:
                # What is certain is there before the next key, which may have been typed already; the menu comes after.
                text = buffer.document.text_before_cursor
                start, names = self._of.complete(text)
                buffer.insert_text(os.path.commonprefix(names)[len(text) - start :])  # noqa: RUF071  # of characters, as it says
                if len(names) > 1:
                    buffer.start_completion()

        return keys

    async def read(self) -> str:
        """See `Prompt`."""
        with patch_stdout():
            return await self._session.prompt_async(handle_sigint=False)

    def close(self) -> None:
        """The history is kept already."""
