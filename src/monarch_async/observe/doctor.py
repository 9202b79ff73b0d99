"""What this machine offers to a job, and what to do about what it lacks."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from monarch_async.observe.records import Check

__all__ = ["PY_SPY", "doctor", "find_py_spy"]

PY_SPY = "py-spy"

FILES = 4096
"""Descriptors that a client of a large job needs: one for each process that it talks to, and some."""
PROCESSES = 4096


def doctor() -> list[Check]:
    """Every check, in the order of importance. Imports nothing heavy, and takes some milliseconds."""
    return [check for make in _CHECKS for check in make()]


def _python() -> Iterator[Check]:
    found = sys.version.split()[0]
    yield Check("python", sys.version_info >= (3, 11), found, "install Python 3.11 or later")
    yield Check("linux", sys.platform == "linux", sys.platform, "run on Linux: other systems lack pidfd and memfd")


def _packages() -> Iterator[Check]:
    for name, fix in (
        ("uvloop", "pip install uvloop: without it event loops are about half as fast"),
        ("torch", "pip install torch, where tensors are to be sent"),
    ):
        spec = importlib.util.find_spec(name)
        yield Check(name, spec is not None, (spec.origin if spec is not None else "") or "not installed", fix)
    where = find_py_spy()
    yield Check(PY_SPY, bool(where), where or "not installed", "pip install py-spy: native stacks, and profiles without a signal")


def find_py_spy() -> str:
    """Where it is: on the path, or beside this Python; empty if it is not installed."""
    return shutil.which(PY_SPY) or shutil.which(PY_SPY, path=os.path.dirname(sys.executable)) or ""


def _kernel() -> Iterator[Check]:
    release = f"Linux {os.uname().release}"
    rule = "no seccomp rule against it"
    yield Check("pidfd", _works(lambda: os.close(os.pidfd_open(os.getpid()))), release, f"a kernel from 5.3 on, and {rule}")
    yield Check("memfd", _works(lambda: os.close(os.memfd_create("doctor"))), release, f"a kernel from 3.17 on, and {rule}")
    yield Check("process_vm_readv", _reads_memory(), release, f"{rule}; in a container: --cap-add SYS_PTRACE")
    scope = _read("/proc/sys/kernel/yama/ptrace_scope") or "0"
    fix = "sysctl kernel.yama.ptrace_scope=0, or 1 for children only: py-spy and one-sided reads between processes need it"
    yield Check("ptrace", scope in ("0", "1"), f"ptrace_scope {scope}", fix)


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except (OSError, AttributeError):
        return False
    return True


def _reads_memory() -> bool:
    """Whether a process may read its own memory by the call for that."""

    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

    source, target = ctypes.create_string_buffer(b"doctor"), ctypes.create_string_buffer(6)
    ours, theirs = Vector(ctypes.addressof(target), 6), Vector(ctypes.addressof(source), 6)
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return False
    return bool(call(os.getpid(), ctypes.byref(ours), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), ctypes.c_ulong(0)) == 6)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _gpus() -> Iterator[Check]:
    version = _read("/proc/driver/nvidia/version").partition("\n")[0]
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    found = f"{count} devices, {version}" if version else "no driver"
    yield Check("cuda", bool(version) and count > 0, found, "install the NVIDIA driver; in a container: --gpus all")
    for name, library, fix in (
        ("nccl", "libnccl.so.2", "comes with torch for CUDA; else install libnccl2"),
        ("ucx", "libucp.so.0", "pip install ucxx, or install libucx0: one-sided transfers between hosts"),
    ):
        where = _library(library)
        yield Check(name, bool(where), where or "not found", fix)


def _library(name: str) -> str:
    """Where a shared library is, without loading it: among the packages of Python, or where the linker looks."""
    for path in sys.path:
        for pattern in (f"nvidia/*/lib/{name}", f"*/lib/{name}", f"*.libs/{name}"):
            found = next(Path(path).glob(pattern), None) if path and os.path.isdir(path) else None
            if found is not None:
                return str(found)
    machine = f"{os.uname().machine}-linux-gnu"
    for folder in (f"/lib/{machine}", f"/usr/lib/{machine}", "/usr/lib64", "/usr/local/lib", "/usr/lib"):
        if os.path.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    return ""


def _limits() -> Iterator[Check]:
    for name, kind, wanted, option in (
        ("open files", resource.RLIMIT_NOFILE, FILES, "n"),
        ("processes", resource.RLIMIT_NPROC, PROCESSES, "u"),
    ):
        soft, hard = resource.getrlimit(kind)
        enough = soft == resource.RLIM_INFINITY or soft >= wanted
        found = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        yield Check(name, enough, found, f"ulimit -{option} {wanted} (the hard limit is {hard})")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{soft >> 10} KiB"
    yield Check("locked memory", unlimited, found, "ulimit -l unlimited: pinned memory and RDMA need it")
    limit = _read("/sys/fs/cgroup/memory.max")
    yield Check("memory limit", True, limit if limit and limit != "max" else "none", "")


_CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (_python, _packages, _kernel, _gpus, _limits)
