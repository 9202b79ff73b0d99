"""What the processes of the launcher's tests run."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading

from monarch_async._runtime import linux


def nothing(payload: bytes, control: socket.socket) -> None:
    """Return at once."""


def run_code(payload: bytes, control: socket.socket) -> None:
    """Run the payload as code."""
    exec(payload, {"control": control, "os": os, "sys": sys, "signal": signal, "atexit": atexit, "threading": threading})


def tell(payload: bytes, control: socket.socket) -> None:
    """Send the value of each expression of the payload, a JSON list."""
    scope = {"os": os, "sys": sys, "random": random, "signal": signal, "linux": linux, "payload": payload, "control": control}
    control.send(json.dumps([eval(expression, scope) for expression in json.loads(payload)]).encode())


def length(payload: bytes, control: socket.socket) -> None:
    """Send how long the payload is."""
    control.send(str(len(payload)).encode())


def wait(payload: bytes, control: socket.socket) -> None:
    """Say hello, then wait for ever."""
    control.send(b"ready")
    signal.pause()


def idle_loop(payload: bytes, control: socket.socket) -> None:
    """Say hello, then run an idle loop."""

    async def main() -> None:
        control.send(b"ready")
        await asyncio.Event().wait()

    asyncio.run(main())


def ignore_sigterm(payload: bytes, control: socket.socket) -> None:
    """As `wait`, but deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait(payload, control)


def family(payload: bytes, control: socket.socket) -> None:
    """Start a child in the group and one that left it, which has a child that left too; send their pids; then do as the payload says."""
    inside = subprocess.Popen(["sleep", "1000"])
    script = "sleep 1000 & sh -c 'setsid sleep 1000 & echo $!; echo $$; exec sleep 1000' & wait"
    outside = subprocess.Popen(["sh", "-c", script], start_new_session=True, stdout=subprocess.PIPE)
    assert outside.stdout is not None
    deeper = [int(outside.stdout.readline()) for _ in range(2)]
    control.send(json.dumps([inside.pid, outside.pid, *deeper]).encode())
    if payload == b"wait":
        signal.pause()


def daemon(payload: bytes, control: socket.socket) -> None:
    """Start a daemon, as daemons do: in a session of its own, its parent gone. Send its pid and wait for a message."""
    started = subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null & echo $!"], stdout=subprocess.PIPE, check=True)
    control.send(started.stdout.strip())
    control.recv(100)


def echo_descriptor(payload: bytes, control: socket.socket) -> None:
    """Take a descriptor from the control socket and write to it."""
    data, fds, _, _ = socket.recv_fds(control, 100, 1)
    os.write(fds[0], b"got " + data)
