"""Key files and descriptors: what is written can be read by its owner only, and what is wrong is refused with the command that helps."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_async._channel.keys import MAX_KEY_BYTES, generate_key, read_key, read_key_fd, write_key
from monarch_async.errors import UsageError


def test_generated_keys() -> None:
    """Keys are 32 bytes, and no two are the same."""
    keys = {generate_key() for _ in range(100)}
    assert 100 == len(keys)
    assert {32} == {len(key) for key in keys}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_file_round_trip(tmp_path: Path, umask: int) -> None:
    """What is written is read, and the file has mode 0600 whatever the umask: never more, never less."""
    path, key = tmp_path / "job.key", generate_key()
    before = os.umask(umask)
    try:
        write_key(path, key)
    finally:
        os.umask(before)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert key == read_key(path)


def test_every_byte_of_a_file_counts(tmp_path: Path) -> None:
    """White space at the ends belongs to the key, so equal files are equal keys and unequal ones are not."""
    path = tmp_path / "job.key"
    key = b"\n" + b"k" * 32 + b" \n"
    write_key(path, key)
    assert key == read_key(str(path))


def test_never_overwritten(tmp_path: Path) -> None:
    """An existing file, and a link that points nowhere yet, are left as they are; the error says how to remove the file."""
    path, link = tmp_path / "job.key", tmp_path / "link.key"
    write_key(path, b"a" * 32)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=f"rm {path}"):
        write_key(path, b"b" * 32)
    with pytest.raises(UsageError, match="exists"):
        write_key(link, b"b" * 32)
    assert b"a" * 32 == read_key(path)
    assert not (tmp_path / "elsewhere").exists()


def test_half_written_file_is_removed(tmp_path: Path) -> None:
    """When the disk refuses the bytes, no short file stays behind to be taken for a key."""
    path = tmp_path / "job.key"
    script = (
        "import resource, signal, sys; from monarch_async._channel.keys import write_key;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16));"
        "write_key(sys.argv[1], b'k' * 32)"
    )
    run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60)
    assert "File too large" in run.stderr
    assert not path.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o666, 0o601])
def test_open_to_others(tmp_path: Path, mode: int) -> None:
    """Any permission of group or others is refused with the mode and the chmod, in which the path is quoted for the shell."""
    path = tmp_path / "my job.key"
    write_key(path, generate_key())
    path.chmod(mode)
    with pytest.raises(UsageError) as caught:
        read_key(path)
    assert f"mode {mode:04o}" in str(caught.value)
    assert f"`chmod 600 '{path}'`" in str(caught.value)


def test_remedy_works(tmp_path: Path) -> None:
    """The command that the error for a missing file shows, run by a shell as it stands, makes a key that can be read."""
    path = tmp_path / "it's a key"
    with pytest.raises(UsageError) as caught:
        read_key(path)
    subprocess.run(["sh", "-c", str(caught.value).split("`")[1]], check=True, timeout=60)
    assert 32 == len(read_key(path))


def test_link_is_followed(tmp_path: Path) -> None:
    """A link to a good file is a good file: that is how Kubernetes mounts secrets. The mode that counts is the file's."""
    write_key(tmp_path / "real", b"k" * 32)
    (tmp_path / "link").symlink_to("real")
    assert b"k" * 32 == read_key(tmp_path / "link")
    (tmp_path / "real").chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_key(tmp_path / "link")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_no_regular_file(tmp_path: Path, make: object) -> None:
    """A directory and a FIFO, whose writer would be waited for, are refused at once."""
    path = tmp_path / "odd"
    assert callable(make)
    make(path, 0o600)
    with pytest.raises(UsageError, match="no regular file"):
        read_key(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"", "has 0 bytes"), (b"secret" * 5, "has 30 bytes"), (b"secret" * MAX_KEY_BYTES, "more than 1024 bytes")],
    ids=["empty", "short", "long"],
)
def test_wrong_length(tmp_path: Path, content: bytes, text: str) -> None:
    """Too short and too long are refused by reading and by writing, with the figures and without the bytes."""
    path = tmp_path / "job.key"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(UsageError, match=text) as read:
        read_key(path)
    with pytest.raises(UsageError, match=text) as written:
        write_key(tmp_path / "new.key", content)
    assert "secret" not in str(read.value) + str(written.value)
    assert not (tmp_path / "new.key").exists()


def test_longest_key(tmp_path: Path) -> None:
    """A key of exactly the greatest length passes, through a file and through a descriptor."""
    key = os.urandom(MAX_KEY_BYTES)
    write_key(tmp_path / "job.key", key)
    assert key == read_key(tmp_path / "job.key")
    assert key == read_key_fd(os.open(tmp_path / "job.key", os.O_RDONLY))


def test_inherited_by_a_process() -> None:
    """A child reads the key from the pipe it was given; the key is in neither its arguments nor its environment."""
    key = generate_key()
    reader, writer = os.pipe()
    script = (
        "import pathlib, sys; from monarch_async._channel.keys import read_key_fd; key = read_key_fd(int(sys.argv[1]));"
        "seen = b''.join(pathlib.Path('/proc/self', name).read_bytes() for name in ('cmdline', 'environ'));"
        "print(key.hex(), key in seen or key.hex().encode() in seen)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(reader)], pass_fds=(reader,), stdout=subprocess.PIPE, text=True)
    os.close(reader)
    with open(writer, "wb") as pipe:
        pipe.write(key)
    output, _ = child.communicate(timeout=60)
    assert f"{key.hex()} False\n" == output


def test_pieces_through_a_socket() -> None:
    """A key that comes in pieces is whole once the other end closes, and the descriptor is closed here."""
    near, far = socket.socketpair()
    with far:
        far.sendall(b"a" * 20)
        far.sendall(b"b" * 20)
    fd = near.detach()
    assert b"a" * 20 + b"b" * 20 == read_key_fd(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_writer_that_never_closes() -> None:
    """An end that stays open is not waited for for ever: the error says what the writer must do, and the descriptor is closed."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b"k" * 32)
        with pytest.raises(UsageError, match=r"within 0\.05 s: .* close it"):
            read_key_fd(reader, timeout=0.05)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(reader)
    finally:
        os.close(writer)


def test_no_descriptor() -> None:
    """A number that is no open descriptor is a UsageError that tells how one is passed."""
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    with pytest.raises(UsageError, match=f"file descriptor {reader}: Bad file descriptor; .*pass_fds"):
        read_key_fd(reader)


def test_descriptor_with_too_little() -> None:
    """A parent that died while writing leaves a short key, which is refused."""
    reader, writer = os.pipe()
    os.write(writer, b"k" * 31)
    os.close(writer)
    with pytest.raises(UsageError, match=f"file descriptor {reader} has 31 bytes, a key has at least 32"):
        read_key_fd(reader)
