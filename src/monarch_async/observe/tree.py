"""The supervision tree of a job, put together from what each process owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_async.observe.records import TreeRow
from monarch_async.observe.survey import Proc, Survey

__all__ = ["tree_rows"]

_NO_POLICY: dict[str, Any] = {"policy": "", "used": 0, "budget": 0, "within": 0.0}


async def tree_rows(survey: Survey) -> list[TreeRow]:
    """From the program down: its meshes and supervisors, and below each mesh those of its members that own something."""
    procs = await survey.procs()
    owned: dict[str, list[dict[str, Any]]] = await survey.everywhere(procs, "wards")
    builder = _Builder(procs, owned)
    client = next(proc for proc in procs if proc.kind == "client")
    state = "" if client.uid in owned else "what it owns is not known: it does not answer"
    builder.add(0, "program", client.name, "", 1, client.name, {}, state)
    builder.below(1, client.uid, 0)
    return builder.rows


class _Builder:
    def __init__(self, procs: Sequence[Proc], owned: dict[str, list[dict[str, Any]]]) -> None:
        self.rows: list[TreeRow] = []
        self._procs = {proc.uid: proc for proc in procs}
        self._owned = owned

    def add(self, depth: int, kind: str, name: str, class_name: str, size: int, process: str, policy: dict[str, Any], state: str) -> None:
        of = {**_NO_POLICY, **policy}
        self.rows.append(TreeRow(depth, kind, name, class_name, size, process, of["policy"], of["used"], of["budget"], of["within"], state))

    def below(self, depth: int, uid: str, owner: int) -> None:
        """What one owner has, supervisors with what is in them first met first."""
        shown: set[int] = set()
        for ward in self._owned.get(uid, ()):
            if ward["owner"] != owner:
                continue
            at = depth
            for supervisor in ward["above"]:
                if supervisor["id"] not in shown:
                    shown.add(supervisor["id"])
                    self.add(at, "supervisor", supervisor["name"], "", 0, self._name(uid), supervisor, _state(supervisor))
                at += 1
            self._add_mesh(at, uid, ward)

    def _add_mesh(self, depth: int, uid: str, ward: dict[str, Any]) -> None:
        members = sorted(ward["members"])
        places = list(dict.fromkeys(self._name(process) for _, process, _, _ in members))
        where = places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
        lives = sum(incarnation for *_, incarnation in members)
        state = _state(ward) or (f"{lives} restarted" if lives else "")
        self.add(depth, ward["kind"], ward["name"], ward["class_name"], len(members), where, ward, state)
        for rank, process, key, _ in members:
            if key and any(below["owner"] == key for below in self._owned.get(process, ())):
                self.add(depth + 1, "actor", f"{ward['name']}[{rank}]", ward["class_name"], 1, self._name(process), {}, "")
                self.below(depth + 2, process, key)

    def _name(self, uid: str) -> str:
        proc = self._procs.get(uid)
        return proc.name if proc is not None else uid


def _state(policy: dict[str, Any]) -> str:
    return "" if policy["supervises"] else "restarts nothing any more"
