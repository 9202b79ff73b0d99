"""The thread that operations run in, and how it waits.

Rules:

* One operation of a lane at a time, in the order of their starts; those of different lanes take turns, block by block, so that none waits
  for one that needs it. Whoever drives them holds `_turn`.
* A small operation is tried where it starts, if its lane is free and nobody drives: it may end at once, and else it goes on in the thread.
* To wait is to sleep on the bell, an eventfd. A member that sleeps says until which word has which value; who sets that rings. So does who
  aborts or starts something. There is no spinning before: where cores are shared it takes time from those that are waited for, and to yield
  a core gives it away for much longer than it takes to be woken.
* Where there are enough, each member's thread has processors of its own: those of two members wake each other all the time, and the kernel
  likes to put them on one.
* The first error of any operation, and `abort`, end all of them and all later ones. After an operation has told its end nothing of its
  tensors is touched.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

import torch

from monarch_async.peering import keep_apart
from monarch_async.tensor.shm.pages import ANY, ASLEEP, Own, fence, until
from monarch_async.tensor.shm.transfers import Need, Transfer, is_met

__all__ = ["Job", "Worker"]

Told = Callable[[BaseException | None], None]


class Job:
    """An operation under way."""

    __slots__ = ("_lock", "_told", "ended", "error", "lane", "need", "small", "transfer")

    def __init__(self, lane: str, transfer: Transfer, *, small: bool) -> None:
        self.lane = lane
        self.transfer = transfer
        self.small = small
        self.need: Need | None = None
        self.ended = False
        self.error: BaseException | None = None
        self._told: Told | None = None
        self._lock = threading.Lock()

    def when_done(self, told: Told) -> None:
        """Call `told` once it has ended, with its error if it failed: at once, or from the worker's thread."""
        with self._lock:
            if not self.ended:
                self._told = told
                return
        told(self.error)

    def end(self, error: BaseException | None) -> None:
        self.transfer.close()
        with self._lock:
            self.error, self.ended = error, True
            told, self._told = self._told, None
        if told is not None:
            told(error)


class Worker:
    """See the module's text."""

    def __init__(self, own: Own, name: str) -> None:
        self._own = own
        self._name = name
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()
        self._new: deque[Job] = deque()
        self._lanes: dict[str, deque[Job]] = {}  # only lanes that have jobs
        self._parked = False  # the thread sleeps
        self._over: BaseException | None = None
        self._stopping = False

    def start(self, job: Job) -> Job:
        """Run it. Returns at once; from one thread."""
        if job.small and not self._new and self._turn.acquire(blocking=False):
            try:
                if self._over is None and job.lane not in self._lanes:
                    self._lanes[job.lane] = deque((job,))
                    self._drive(job)
                    if job.ended:
                        return job
                else:
                    self._new.append(job)
            finally:
                self._turn.release()
        else:
            self._new.append(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        elif self._parked:
            self._own.mine.ring()
        return job

    def abort(self, error: BaseException) -> None:
        """End all there is, and all that comes. Returns at once; from any thread."""
        self._over = self._over or error
        self._own.mine.ring()

    def close(self) -> None:
        """Wait for the thread's end. Everything has been aborted, or has ended."""
        self._stopping = True
        self._own.mine.ring()
        if self._thread is not None:
            self._thread.join()
        with self._turn:
            self._end_all()

    def _drive(self, job: Job) -> None:
        """Take an operation as far as it goes for now."""
        try:
            job.need = next(job.transfer)
        except StopIteration:
            self._leave(job, None)
        except Exception as error:  # members that differ, or what torch does not do: nothing can follow
            self._over = self._over or error
            self._leave(job, error)

    def _leave(self, job: Job, error: BaseException | None) -> None:
        lane = self._lanes[job.lane]
        lane.popleft()
        if not lane:
            del self._lanes[job.lane]
        job.end(error)

    def _end_all(self) -> None:
        while self._new:
            job = self._new.popleft()
            self._lanes.setdefault(job.lane, deque()).append(job)
        for job in [job for lane in self._lanes.values() for job in lane]:
            self._leave(job, self._over)

    def _run(self) -> None:
        # Torch's threads for reductions run on what this one has.
        keep_apart(self._own.me, len(self._own.members), torch.get_num_threads())
        while not self._stopping:
            with self._turn:
                moved = self._go_round()
            if not moved:
                self._sleep()

    def _go_round(self) -> bool:
        """Whether anything could be done."""
        if self._over is not None:
            self._end_all()
            return False
        while self._new:
            job = self._new.popleft()
            self._lanes.setdefault(job.lane, deque()).append(job)
        moved = False
        for lane in [*self._lanes.values()]:
            job = lane[0]
            if job.need is None or is_met(job.need):
                moved = True
                self._drive(job)
        return moved

    def _sleep(self) -> None:
        words = self._own.words
        with self._turn:  # so that what is tried elsewhere is seen here
            needs = [lane[0].need for lane in self._lanes.values()]
            self._parked = True
            if needs:
                first = needs[0]
                if len(needs) == 1 and first is not None:
                    words[ASLEEP] = until(first.word, first.value)
                else:
                    words[ASLEEP] = ANY
            fence()
            ready = self._new or (self._over is not None and self._lanes) or any(need is None or is_met(need) for need in needs)
        if not ready and not self._stopping:
            os.eventfd_read(self._own.mine.bell)
        self._parked = False
        if needs:
            words[ASLEEP] = 0
