"""Reading the stacks of Python code, own and of others."""

from __future__ import annotations

import asyncio
import os
import sys

from monarch_async._runtime import stacks

LIBRARY = stacks.__file__
DUMP = f"""Current thread 0x00000000000000aa (most recent call first):
  File "{LIBRARY}", line 15 in _watch
  File "/lib/python3.11/threading.py", line 982 in run

Thread 0x00000000000000bb (most recent call first):
  File "/job/train step.py", line 12 in step
  File "{LIBRARY}", line 50 in _work
  File "/lib/python3.11/threading.py", line 982 in run

Thread 0x00000000000000cc (most recent call first):
  File "/lib/re.py", line 166 in match
  File "/job/main.py", line 7 in <lambda>
  File "{LIBRARY}", line 120 in _first_step
  File "{asyncio.__file__}", line 118 in run
  File "<string>", line 1 in <module>
"""


def test_the_loops_own_stack_is_taken_from_a_dump() -> None:
    """Innermost call first, up to where it began."""
    frames = stacks.read_dump(DUMP, 0xCC)
    assert [("/lib/re.py", 166, "match"), ("/job/main.py", 7, "<lambda>")] == frames[:2]
    assert 5 == len(frames)


def test_where_the_loop_only_waits_the_thread_that_does_not_counts() -> None:
    """The watchdog and the loop are in this library's code; the thread is in the user's."""
    dump = DUMP.replace('  File "/lib/re.py", line 166 in match\n  File "/job/main.py", line 7 in <lambda>\n', "")
    assert ("/job/train step.py", 12, "step") == stacks.read_dump(dump, 0xCC)[0]


def test_a_dump_that_breaks_off_is_read_as_far_as_it_goes() -> None:
    """At every length, without an error."""
    for length in range(len(DUMP)):
        stacks.read_dump(DUMP[:length], 0xCC)
    assert [] == stacks.read_dump("", 0xCC)


def test_a_stack_is_shown_without_what_led_to_the_users_code() -> None:
    """And as tracebacks are, the innermost call last, so that its place is found at the end."""
    text = stacks.render(stacks.read_dump(DUMP, 0xCC))
    assert '  File "/job/main.py", line 7, in <lambda>\n  File "/lib/re.py", line 166, in match' == text
    assert "re.py:166" == stacks.last_place(text)
    assert "" == stacks.last_place("")


def test_a_stack_of_nothing_but_plumbing_is_shown_whole() -> None:
    """It is better than none."""
    assert 1 == len(stacks.render([(LIBRARY, 1, "f")]).splitlines())


def test_the_endpoint_is_the_outermost_call_that_is_one() -> None:
    """Of those with its name in its file the last that begins before the line; without an actor where two have it."""
    frames = [("/job/a.py", 30, "helper"), ("/job/a.py", 22, "step"), (LIBRARY, 1, "_drain")]
    one, two = ("one[0]", "step", ("/job/a.py", 20, "step")), ("two[0]", "step", ("/job/a.py", 20, "step"))
    earlier, later = ("early[0]", "step", ("/job/a.py", 10, "step")), ("late[0]", "step", ("/job/a.py", 23, "step"))
    assert ("one[0]", "step") == stacks.find_endpoint(frames, [earlier, one, later])
    assert ("", "step") == stacks.find_endpoint(frames, [earlier, one, two])
    assert ("", "step") == stacks.find_endpoint(frames, [])
    assert ("", "") == stacks.find_endpoint([], [one])


def test_the_own_stack() -> None:
    """From here outwards."""
    frames = stacks.frames_of(sys._getframe())
    assert (__file__, "test_the_own_stack") == frames[0][::2]


def test_the_state_of_a_process() -> None:
    """By the kernel; of one that is not there, nothing."""
    assert "R" == stacks.state_of(os.getpid())
    assert "" == stacks.state_of(2**22 + 1)
