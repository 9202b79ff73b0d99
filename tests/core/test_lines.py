"""Bytes to lines, and lines of several ranks to one: nothing is lost, order is kept, time and memory are bounded."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_async._core.lines import LineAssembler, OutputFolder, Shown


def assemble(chunks: list[bytes], **settings: int) -> list[str]:
    assembler = LineAssembler(**settings)
    lines = [line for chunk in chunks for line in assembler.feed(chunk, 0.0)]
    return lines + assembler.close()


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r")), st.data())
def test_lines_do_not_depend_on_chunks(text: str, data: st.DataObject) -> None:
    """However the bytes are cut, also within a character, the lines are those of the text."""
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    chunks = [raw[start:end] for start, end in itertools.pairwise([0, *cuts, len(raw)])]
    expected = text.split("\n")
    assert (expected if expected[-1] else expected[:-1]) == assemble(chunks)


@given(st.binary().filter(lambda raw: b"\r" not in raw), st.integers(4, 10))
def test_long_lines_are_cut_without_loss(raw: bytes, limit: int) -> None:
    """Pieces of a line are at most the limit and together are the line; characters stay whole."""
    lines = assemble([raw], max_line=limit)
    joined = "".join(line.decode(errors="backslashreplace") for line in raw.split(b"\n"))  # each by itself: halves don't join over its end
    assert joined == "".join(lines)
    assert all(len(re.sub(r"\\x..", "?", line)) <= limit for line in lines)
    assert 20 == sum(map(len, assemble([b"\x80" * 20], max_line=limit))) / 4  # no character, however far one looks back
    text = "é€𝄞" * 20
    assert text == "".join(assemble([text.encode()], max_line=limit))


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"dos\r\nline\r\n", ["dos", "line"]),
        (b"1%\r50%\r100%\n", ["100%"]),
        (b"1%\r50%\r100%\r\n", ["100%"]),
        (b"100%\r      \rdone\n", ["done"]),
        (b"\r1%\r50%", ["50%"]),
        (b"1%\r50%\r", ["50%"]),
        (b"\r\n\n", ["", ""]),
        (b"1%\r50%\r   \r", ["50%"]),
    ],
)
def test_carriage_return_starts_over(raw: bytes, expected: list[str]) -> None:
    """Of a progress bar the last state is the line, whole or byte by byte."""
    assert expected == assemble([raw])
    assert expected == assemble([raw[index : index + 1] for index in range(len(raw))])


def test_progress_is_shown_now_and_then() -> None:
    """A progress bar that runs on is shown once in each period, and takes bounded memory."""
    assembler = LineAssembler(max_line=100, progress=10.0)
    shown = {now: lines for now in range(35) if (lines := assembler.feed(b"%d s\r" % now, float(now)))}
    assert {10: ["10 s"], 20: ["20 s"], 30: ["30 s"]} == shown
    for _ in range(1000):
        assert [] == assembler.feed(b"z" * 50 + b"\r", 31.0)
    assert len(assembler._rest) <= 201
    assert ["end"] == assembler.feed(b"end\n", 32.0)


def test_equal_lines_fold() -> None:
    """What several ranks print within the window is shown once with their ranks; what one prints alone waits for the window only."""
    folder = OutputFolder(0.1)
    for rank in (0, 1, 2, 8):
        folder.add("mesh", rank, 9, "stdout", "loaded", 0.0)
    folder.add("mesh", 3, 9, "stderr", "loaded", 0.05)
    assert [] == folder.poll(0.09)
    assert 0.1 == folder.next_deadline()
    assert [Shown("stdout", "[mesh 0–2,8] loaded")] == folder.poll(0.1)
    assert [Shown("stderr", "[mesh 3] loaded")] == folder.flush()
    assert folder.next_deadline() is None


def test_complete_lines_do_not_wait() -> None:
    """A line that all ranks have printed is shown at once, and so is every line of a mesh of one."""
    folder = OutputFolder(10.0)
    folder.add("one", 0, 1, "stdout", "alone", 0.0)
    for rank in range(4):
        folder.add("four", rank, 4, "stdout", "all", 0.0)
    assert [Shown("stdout", "[one 0] alone"), Shown("stdout", "[four 0–3] all")] == folder.poll(0.0)


def test_repeated_lines_of_one_rank_stay() -> None:
    """A rank that prints a line twice is shown twice, folded with the other's first and second."""
    folder = OutputFolder(1.0)
    for rank in (0, 0, 1, 1):
        folder.add("m", rank, 3, "stdout", "tick", 0.0)
    assert ["[m 0–1] tick"] * 2 == [text for _, text in folder.flush()]


def test_held_lines_are_bounded() -> None:
    """Past the bound the oldest lines are shown although their window is open."""
    folder = OutputFolder(1000.0, max_held=5)
    for number in range(20):
        folder.add("m", 0, 2, "stdout", str(number), 0.0)
    assert [f"[m 0] {number}" for number in range(15)] == [text for _, text in folder.poll(0.0)]


def ranks_of(text: str) -> tuple[list[int], str]:
    """``"[m 0–2,5] line"`` → ranks and line."""
    match = re.fullmatch(r"\[m ([\d–,]+)\] (.*)", text)
    assert match is not None
    ranks: list[int] = []
    for part in match[1].split(","):
        first, _, last = part.partition("–")
        ranks += range(int(first), int(last or first) + 1)
    return ranks, match[2]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.floats(0, 0.2))))
def test_nothing_lost_and_order_kept(prints: list[tuple[int, str, float]]) -> None:
    """Whatever four ranks print when: each rank's lines are all shown, in its order, none later than the window allows."""
    folder = OutputFolder(0.1)
    now = 0.0
    shown: list[Shown] = []
    for rank, line, pause in prints:
        now += pause
        shown += folder.poll(now)
        deadline = folder.next_deadline()
        assert deadline is None or deadline > now
        folder.add("m", rank, 4, "stdout", line, now)
    shown += folder.flush()
    for rank in range(4):
        expected = [line for printer, line, _ in prints if printer == rank]
        assert expected == [line for ranks, line in map(ranks_of, (text for _, text in shown)) if rank in ranks]
