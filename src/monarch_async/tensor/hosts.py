"""Which members of a group share a host. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_async.ids import ProcAddress

__all__ = ["members_by_host"]


def members_by_host(addresses: Sequence[ProcAddress]) -> tuple[tuple[int, ...], ...]:
    """The members of each host, by index, in the order of these; hosts in the order of their first members. The same at every member."""
    hosts: dict[str, list[int]] = {}
    for index, address in enumerate(addresses):
        hosts.setdefault(address.host, []).append(index)
    return tuple(map(tuple, hosts.values()))
