"""A client's job file, written in a thread: what that needs, a module of the standard library and a disk, need not hold up a program."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from importlib import import_module

from monarch_async._runtime.jobfile import JobFile

__all__ = ["Announcer"]

_WRITING = "monarch_async._runtime.jobfiles"


class Announcer:
    """Use it in its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: logging.Logger) -> None:
        self._loop = loop
        self._log = log
        self._next: JobFile | None = None
        self._writing: asyncio.Future[None] | None = None  # while a thread runs

    def announce(self, file: JobFile) -> None:
        """Have it written, after the one that is being written now."""
        self._next = file
        if self._writing is None:
            self._write()

    def _write(self) -> None:
        file, self._next = self._next, None
        if file is None:
            self._writing = None
            return
        self._writing = self._loop.create_future()
        try:
            threading.Thread(target=self._work, args=(file, self._writing), name="job file", daemon=True).start()
        except RuntimeError as error:  # this process may have no more threads
            self._loop.call_soon(self._written, self._writing, str(error))

    def _work(self, file: JobFile, written: asyncio.Future[None]) -> None:
        text = "see above"
        try:
            import_module(_WRITING).write_job_file(file)
            text = ""
        except OSError as error:
            text = str(error)
        finally:  # whatever it is: who closes waits for this
            self._tell(written, text)

    def _tell(self, written: asyncio.Future[None], text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._written, written, text)

    def _written(self, written: asyncio.Future[None], text: str) -> None:
        if text:
            self._log.info("nobody can look into this job: its file can't be written: %s", text)
        self._write()
        if not written.done():
            written.set_result(None)

    async def close(self) -> None:
        """Write nothing more; returns when nothing is being written."""
        self._next = None
        while self._writing is not None:
            await asyncio.shield(self._writing)
