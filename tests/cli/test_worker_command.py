"""``monarch-async worker`` on the command line: what it refuses, with which status, and that it ends as told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.workers import ENVIRONMENT, ROOT, command, make_key, worker


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=20, env=ENVIRONMENT, cwd=ROOT)


def test_help() -> None:
    """With --help it says what there is, for all and for one command."""
    assert "worker" in run("--help").stdout
    done = run("worker", "--help")
    assert (0, True) == (done.returncode, "--key-file" in done.stdout)


def test_help_imports_nothing_heavy() -> None:
    """Neither torch nor numpy nor aiohttp is imported for the command line."""
    code = "import sys, monarch_async.cli; print([name for name in ('torch', 'numpy', 'aiohttp', 'rich') if name in sys.modules])"
    assert "[]\n" == subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout


def test_beyond_loopback_without_a_key() -> None:
    """Refused, and the message names the option."""
    done = run("worker", "--listen", "tcp://0.0.0.0:0")
    assert 2 == done.returncode
    assert "--key-file" in done.stderr
    assert "Traceback" not in done.stderr


def test_key_file_that_others_can_read(tmp_path: Path) -> None:
    """Refused with the command that puts it right."""
    key = make_key(tmp_path)
    os.chmod(key, 0o644)
    done = run("worker", "--listen", "tcp://127.0.0.1:0", "--key-file", key)
    assert 2 == done.returncode
    assert "chmod 600" in done.stderr


def test_port_in_use(tmp_path: Path) -> None:
    """Status 1 and one line that says so."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        done = run("worker", "--listen", f"tcp://127.0.0.1:{sock.getsockname()[1]}", "--key-file", make_key(tmp_path))
    assert 1 == done.returncode
    assert "Address already in use" in done.stderr
    assert 1 == done.stderr.count("\n")


@pytest.mark.parametrize("listen", ["nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tcp://203.0.113.7:0"])
def test_address_that_cannot_be_had(listen: str, tmp_path: Path) -> None:
    """Status 1 and one line."""
    done = run("worker", "--listen", listen, "--key-file", make_key(tmp_path))
    assert 1 == done.returncode
    assert 1 == done.stderr.count("\n")


@pytest.mark.parametrize("name", ["169.254.7.7", "0.0.0.0"])
def test_advertising_what_nobody_can_use(name: str, tmp_path: Path) -> None:
    """Refused before anything listens, with what was rejected and why."""
    done = run("worker", "--listen", "tcp://0.0.0.0:0", "--key-file", make_key(tmp_path), "--advertise", name)
    assert 1 == done.returncode
    assert f"rejected {name}" in done.stderr


def test_half_of_tls(tmp_path: Path) -> None:
    """All three files or none."""
    done = run("worker", "--listen", "tcp://127.0.0.1:0", "--key-file", make_key(tmp_path), "--tls-cert", "c")
    assert (2, True) == (done.returncode, "--tls-ca" in done.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_by_signal(number: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM and Ctrl-C end it with status 0, within a second where no job runs."""
    with worker("--key-file", make_key(tmp_path)) as (_, process):
        start = time.monotonic()
        process.send_signal(number)
        assert 0 == process.wait(5)
        assert time.monotonic() - start < 1
