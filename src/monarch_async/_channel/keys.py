"""Job keys: where the secret that all processes of a job share comes from, and how it is handed over.

A key is at least 32 bytes, and every byte of a key file belongs to it: no newline is stripped and no hex decoded, so two hosts agree when
their files are equal. A key travels in a file that only its owner can read, or through an inherited descriptor; never in an argument
or an environment variable, which others on the host may be able to list.

Whatever is wrong with a file or a descriptor raises `UsageError`, which tells the command that puts it right and never any byte of the key.
"""

from __future__ import annotations

import os
import select
import shlex
import stat

from monarch_async._core.handshake import KEY_BYTES
from monarch_async.errors import UsageError

__all__ = ["MAX_KEY_BYTES", "generate_key", "read_key", "read_key_fd", "write_key"]

MAX_KEY_BYTES = 1024
"""A longer file is not a key: somebody gave the wrong path."""


def generate_key() -> bytes:
    """32 bytes from the system's random generator."""
    return os.urandom(KEY_BYTES)


def write_key(path: str | os.PathLike[str], key: bytes) -> None:
    """Writes a new key file that only the owner can read (mode 0600).

    Raises `UsageError` if the key is too short or too long, if the path exists (also as a dangling link) or can't be made.
    """
    name = os.fspath(path)
    _check_length(key, f"the key for {name}")
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        remedy = f"if no job uses it any more, `rm {shlex.quote(name)}` and write again"
        raise UsageError(f"{name} exists and a key is never overwritten: {remedy}") from error
    except OSError as error:
        raise UsageError(f"no key file can be made at {name}: {error.strerror}") from error
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)  # a umask may have taken the owner's bits too
            file.write(key)
    except BaseException:
        os.unlink(name)  # half a key must not be taken for one
        raise


def read_key(path: str | os.PathLike[str]) -> bytes:
    """Reads a key file, links followed.

    Raises `UsageError` if it is missing, no regular file, open to group or others in any way, or not 32 to 1024 bytes long.
    """
    name = os.fspath(path)
    quoted = shlex.quote(name)
    make = f"`(umask 077; head -c {KEY_BYTES} /dev/urandom > {quoted})` makes one, to be copied to every host of the job"
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # non-blocking: opening a FIFO would wait for its writer
    except FileNotFoundError as error:
        raise UsageError(f"no key file at {name}: {make}") from error
    except OSError as error:
        raise UsageError(f"the key file {name} can't be opened: {error.strerror}; `ls -l {quoted}` shows whose it is") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"the key file {name} is no regular file ({stat.filemode(status.st_mode)}): {make}")
        if status.st_mode & 0o077:
            mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
            remedy = f"`chmod 600 {quoted}`; if others may have read it, make a new key"
            raise UsageError(f"the key file {name} is open to other users ({mode}): {remedy}")
        key = _read(fd)
    finally:
        os.close(fd)
    _check_length(key, f"the key file {name}", make)
    return key


def read_key_fd(fd: int, timeout: float = 10.0) -> bytes:
    """Reads a key from an inherited pipe, socket or file up to its end, and closes `fd`. Blocks, at most `timeout` seconds for each piece.

    Raises `UsageError` if `fd` is not open, holds no key, or its writer neither writes nor closes it.
    """
    name = f"file descriptor {fd}"
    try:
        try:
            key = _read(fd, timeout)
        finally:
            os.close(fd)
    except TimeoutError as error:
        raise UsageError(f"no key on {name} within {timeout:g} s: who holds its other end must write the key and close it") from error
    except OSError as error:
        remedy = "pass it to the process with `pass_fds` and give its number"
        raise UsageError(f"no key can be read from {name}: {error.strerror}; {remedy}") from error
    _check_length(key, name)
    return key


def _read(fd: int, timeout: float = 10.0) -> bytes:
    """To the end of the stream, or one byte more than a key may have. Raises `TimeoutError` when nothing comes for `timeout` seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    data = b""
    while len(data) <= MAX_KEY_BYTES:
        if not poll.poll(timeout * 1000):
            raise TimeoutError
        piece = os.read(fd, MAX_KEY_BYTES + 1 - len(data))
        if not piece:
            break
        data += piece
    return data


def _check_length(key: bytes, what: str, remedy: str = "use `generate_key()`") -> None:
    if len(key) < KEY_BYTES:
        raise UsageError(f"{what} has {len(key)} bytes, a key has at least {KEY_BYTES}: {remedy}")
    if len(key) > MAX_KEY_BYTES:
        raise UsageError(f"{what} has more than {MAX_KEY_BYTES} bytes and can't be a key: check the path")
