"""Slots of the page by which processes show that they are alive."""

from __future__ import annotations

import os

from monarch_async._runtime.pulse import HANDLERS, NO_SLOT, NOW, SLOTS, STACK, Page, Pulse, room


def test_a_slot_is_seen_by_both_sides_of_a_fork() -> None:
    """What the child writes, numbers and texts, the parent reads, without anything that the child would have to send."""
    page = Page()
    number = page.take()
    pulse = Pulse(1.5, 2.5, 3.5, 4.5, 5.5, 1, 0, 1 << 62, 7, 8)
    pid = os.fork()
    if pid == 0:
        page.slot(number).write(pulse)
        page.slot(number).write_text(NOW, b"what")
        os._exit(0)
    os.waitpid(pid, 0)
    assert pulse == page.slot(number).read()
    assert b"what" == page.slot(number).read_text(NOW)
    page.slot(number).beat(9.0)
    assert pulse._replace(beat=9.0) == page.slot(number).read()


def test_slots_and_texts_do_not_touch_each_other() -> None:
    """Each of the largest size, in neighbouring slots."""
    page = Page()
    slots = [page.slot(page.take()) for _ in range(2)]
    for index, slot in enumerate(slots):
        slot.write(Pulse(beat=float(index), file=index))
        for area in (NOW, HANDLERS, STACK):
            slot.write_text(area, bytes([index * 3 + area]) * room(area))
    for index, slot in enumerate(slots):
        assert Pulse(beat=float(index), file=index) == slot.read()
        for area in (NOW, HANDLERS, STACK):
            assert bytes([index * 3 + area]) * room(area) == slot.read_text(area)


def test_of_a_text_that_is_too_long_the_end_is_kept() -> None:
    """That is where the innermost calls of a stack are."""
    slot = Page().slot(0)
    slot.write_text(STACK, b"x" * room(STACK) + b"end")
    assert b"x" * (room(STACK) - 3) + b"end" == slot.read_text(STACK)


def test_a_torn_text_reads_as_none() -> None:
    """One byte of it that is not the writer's yet is enough."""
    slot = Page().slot(0)
    slot.write_text(STACK, b"a stack")
    slot._memory[4096:4097] = b"A"
    assert b"" == slot.read_text(STACK)


def test_a_slot_is_clear_when_it_is_taken_again() -> None:
    """The one that was freed longest ago comes first, and when there is none that is said."""
    page = Page()
    first, second = page.take(), page.take()
    page.slot(first).write(Pulse(1.0))
    page.slot(first).write_text(NOW, b"what")
    for number in (first, second):
        page.give_back(number)
    page.give_back(NO_SLOT)
    taken = [page.take() for _ in range(SLOTS + 1)]
    assert [first, second, NO_SLOT] == taken[-3:]
    assert Pulse(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0) == page.slot(first).read()
    assert b"" == page.slot(first).read_text(NOW)
