"""The jobs that there are, and which one is meant. Nothing of the runtime is loaded for that."""

from __future__ import annotations

import os

from monarch_async._core.handshake import PROTOCOL_VERSION
from monarch_async._runtime.jobfile import JobFile, jobs_folder, remove_job_file, state_folder
from monarch_async._runtime.jobfiles import job_files, read_job_file
from monarch_async.observe.errors import JobError
from monarch_async.observe.records import JobInfo

__all__ = ["find_job", "jobs", "state_folder"]


def jobs() -> list[JobInfo]:
    """The jobs of this user, the newest first. Files that jobs of this machine have left are removed.

    Raises `JobError` where the folder of job files can't be used.
    """
    found = []
    for file in _files():
        state = "elsewhere" if not file.is_here else "running" if file.runs else "ended"
        if state == "ended":
            remove_job_file(file.id)
        agent = file.agent
        address = str(agent.get("tcp") or agent.get("unix", ""))
        found.append(JobInfo(file.name, file.id, file.pid, file.started, file.version, state, file.path, address))
    return found


def _files() -> list[JobFile]:
    try:
        return job_files()
    except OSError as error:
        raise JobError(f"no job can be found: {error}") from error


def find_job(job: str = "") -> JobFile:
    """The file of a job: by its name, the beginning of its id, the pid of its client, or its path; ``""`` where only one runs.

    Raises `JobError` where it is none, none any more, or not clear which.
    """
    if os.sep in job or job.endswith(".json"):
        return _check(_read(job))
    files = _files()
    alive = [file for file in files if file.runs or not file.is_here]
    named = [file for file in alive if job in (file.name, str(file.pid)) or (len(job) > 3 and file.id.startswith(job))] if job else alive
    if len(named) == 1:
        return _check(named[0])
    if named:
        several = ", ".join(f"{file.name} ({file.id}, pid {file.pid})" for file in named)
        raise JobError(f"several jobs fit: {several}; say which by its id")
    if any(job in (file.name, file.id, str(file.pid)) for file in files):
        raise JobError(f"the job {job!r} has ended")
    there = ", ".join(sorted({file.name for file in alive}))
    if job and there:
        raise JobError(f"no job {job!r} runs; there are {there}")
    raise JobError(f"no job runs here (looked in {jobs_folder()})")


def _read(path: str) -> JobFile:
    try:
        return read_job_file(os.path.realpath(path))
    except FileNotFoundError:
        raise JobError(f"there is no job file {path}: the job has ended") from None
    except (OSError, ValueError) as error:
        raise JobError(f"the job's file can't be used: {error}") from error


def _check(file: JobFile) -> JobFile:
    if file.is_here and not file.runs:
        raise JobError(f"the job {file.name!r} has ended, and left its file behind: its client (pid {file.pid}) is gone")
    if file.protocol != PROTOCOL_VERSION:
        ours = f"this is {PROTOCOL_VERSION}"
        raise JobError(
            f"the job {file.name!r} speaks version {file.protocol} of the protocol, {ours}: use the monarch-async of its program"
        )
    return file
