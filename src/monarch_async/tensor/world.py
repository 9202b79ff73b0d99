"""Making a group known to `torch.distributed`, so that DDP, FSDP, DTensor and `DeviceMesh` take it, and unknown again.

torch has one table of groups for a process, and one *default* group, whose ranks name the members of all others. The first group that is
entered while there is none becomes the default, until it is over, or until one is entered that has more members besides all of its own:
groups of a part of a mesh may form before that of the whole. Others say where their members are in the default one. One that the program
itself has made is left alone.

This is the only module that writes to torch's private tables. Rules: nothing here blocks or talks to other members, so that not all of them
need take part; an epoch's group is entered once and removed once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

__all__ = ["enter", "global_ranks", "remove"]

c10d: Any = distributed_c10d
_lock = threading.Lock()
_default: tuple[Any, tuple[str, ...]] | None = None
"""The default group, where it is one of ours, and the processes of its members."""
_entered: dict[dist.ProcessGroup, tuple[str, ...]] = {}
"""All of ours, and the processes of their members."""


def enter(group: dist.ProcessGroup, name: str, description: str, backend: str, store: Store, procs: Sequence[str]) -> None:
    """From now on torch knows the group. `procs` are the uids of its members' processes, in order."""
    global _default
    world = c10d._world
    config = str(c10d.BackendConfig(dist.Backend(backend)))
    with _lock:
        tables: Any = group
        tables._set_group_name(name)
        tables._set_group_desc(description)
        _entered[group] = tuple(procs)
        ours = _default is not None and world.default_pg is _default[0]
        if world.default_pg is None or (ours and _default is not None and set(_default[1]) < set(procs)):
            c10d._update_default_pg(group)
            _default = group, tuple(procs)
            for other, uids in _entered.items():
                world.pg_group_ranks[other] = _places(uids)
        else:
            world.pg_group_ranks[group] = _places(procs)
        world.pg_map[group] = (backend, store)
        world.pg_names[group] = name
        world.pg_backend_config[group] = config
        world.pg_to_tag[group] = f"ptd:{name}"
        for tag in ("", f"ptd:{name}"):
            world.tags_to_pg.setdefault(tag, []).append(group)
        c10d._register_process_group(name, group)


def _places(procs: Sequence[str]) -> dict[int, int]:
    """Indices in a group by ranks in the default one; by indices, where that has not all of its members."""
    places = {uid: place for place, uid in enumerate(_default[1])} if _default is not None else {}
    known = all(uid in places for uid in procs)
    return {places[uid] if known else index: index for index, uid in enumerate(procs)}


def remove(group: dist.ProcessGroup) -> None:
    """Torch knows it no more. Does nothing for one that the program has destroyed itself."""
    global _default
    world = c10d._world
    with _lock:
        if _default is not None and _default[0] is group:
            _default = None
            if world.default_pg is group:
                c10d._update_default_pg(None)
        _entered.pop(group, None)
        name = world.pg_names.pop(group, None)
        for table in (world.pg_map, world.pg_backend_config, world.pg_group_ranks, world.pg_coalesce_state):
            table.pop(group, None)
        own_tag = world.pg_to_tag.pop(group, None)
        for tag in ("", own_tag):
            with contextlib.suppress(KeyError, ValueError):
                world.tags_to_pg[tag].remove(group)
        if own_tag is not None:
            world.tags_to_pg.pop(own_tag, None)
        if name is not None:
            c10d._unregister_process_group(name)


def global_ranks(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a group's members in the default group, in their order."""
    table: dict[int, int] = c10d._world.pg_group_ranks[group]
    return sorted(table, key=table.__getitem__)
