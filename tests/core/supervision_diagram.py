"""Puts the diagram of supervision's states into its page: ``python -m tests.core.supervision_diagram`` in the repository's root."""

from __future__ import annotations

from pathlib import Path

from monarch_async._core.supervision_states import diagram

PAGE = Path(__file__).parents[2] / "docs" / "supervision-states.md"
BEGIN, END = "<!-- diagram -->\n", "<!-- end of diagram -->\n"


def with_diagram(text: str) -> str:
    """The page as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}```mermaid\n{diagram()}```\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_diagram(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
