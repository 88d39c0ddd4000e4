"""Partition of a role and slot of a key: the same in every process, at any time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from heapq import nlargest
from typing import TypeAlias

from rebalanser.errors import InvalidSettings

Role: TypeAlias = int | str
"""A role's name: a number, which is its own number (such as a hash slot), or any text."""
Roles: TypeAlias = Iterable[Role] | Mapping[Role, int]
"""Roles as a host application names them; a mapping has the number of each."""


def _stable_hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


def number_of(role: Role) -> int:
    """Return the number of a role without a given one: an int is its own, a text has a stable hash.

    It depends on the role only, never on its place in a list: two processes that know different
    lists, as in a roll-out, agree on every role that both know.
    """
    return role if isinstance(role, int) else _stable_hash(role.encode())


def hash_slot(key: str | bytes, slots: int) -> int:
    """Return the hash slot of a key, from 0 to ``slots`` - 1, for roles that are hash slots (NE-14).

    Text and its UTF-8 bytes have the same slot, in every process and version.

    Raises:
        InvalidSettings: ``slots`` is less than 1, or the key or ``slots`` is of another type.
    """
    if not isinstance(key, str | bytes):
        raise InvalidSettings(f"a key is a text or bytes, not {type(key).__name__}: str(key), for instance")
    if isinstance(slots, bool) or not isinstance(slots, int):
        raise InvalidSettings(f"{slots!r} hash slots: the number must be a whole one")
    if slots < 1:
        raise InvalidSettings(f"{slots} hash slots: there must be at least one")
    return _stable_hash(key.encode() if isinstance(key, str) else key) % slots


def numbered(roles: Roles) -> dict[Role, int]:
    """Return the number of each role.

    Raises:
        InvalidSettings: a role is neither a text nor a whole number, or its number is invalid; or ``roles``
            is no list, or one text, whose letters would be roles.
    """
    if isinstance(roles, str | bytes) or not isinstance(roles, Iterable):
        raise InvalidSettings(f"roles: a list of roles, such as ['a', 'b'] (got {roles!r})")
    named = dict(roles) if isinstance(roles, Mapping) else dict.fromkeys(roles)
    found: dict[Role, int] = {}
    for role, number in named.items():
        if isinstance(role, bool) or not isinstance(role, int | str):
            raise InvalidSettings(f"{role!r} is no role: a role is a text or a whole number")
        if isinstance(number, bool) or not isinstance(number, int | None):
            raise InvalidSettings(f"the number of role {role!r} is {number!r}: it must be a whole number")
        found[role] = number_of(role) if number is None else number
    return found


class RoleMap:
    """Roles of each of ``partitions`` partitions: a role's number mod partitions (NE-5)."""

    def __init__(self, roles: Roles, partitions: int) -> None:
        if partitions < 1:
            raise InvalidSettings(f"a topic of {partitions} partitions holds no role")
        self._partitions = partitions
        self._partition_of = {role: number % partitions for role, number in numbered(roles).items()}
        found: dict[int, list[Role]] = {}
        for role, partition in self._partition_of.items():
            found.setdefault(partition, []).append(role)
        self._roles_of = {partition: frozenset(names) for partition, names in found.items()}

    def partition_of(self, role: Role) -> int | None:
        """Return the partition whose leader leads ``role``; None for a role that is unknown here."""
        return self._partition_of.get(role)

    def roles_of(self, partition: int) -> frozenset[Role]:
        """Return the roles of a partition."""
        return self._roles_of.get(partition, frozenset())

    def __iter__(self) -> Iterator[Role]:
        return iter(self._partition_of)

    def imbalance(self) -> str | None:
        """State the figures if partitions differ by more than one role or some have none; None otherwise.

        Consumer groups share out partitions, and a partition's roles follow it. The partition of a role
        can't depend on the other roles: two processes that know different ones, as in a roll-out, would let
        two lead a role. So only numbers that are given to roles balance any names.
        """
        roles, loads = len(self._partition_of), [len(names) for names in self._roles_of.values()]
        empty = self._partitions - len(loads)
        if roles < 2 or (not empty and max(loads) - min(loads) <= 1):
            return None
        most = sum(nlargest((self._partitions + 1) // 2, loads))
        advice = "give them the numbers from 0 on in every process (NE-5)"
        if roles < self._partitions:
            advice += f" and the topic {roles} partitions"
        return (
            f"{roles} roles belong to {len(loads)} of {self._partitions} partitions, "
            f"up to {max(loads)} to one: a group shares out partitions, so one of two processes may lead "
            f"{most} roles and the other {roles - most}; to share roles evenly, stop all processes, {advice}"
        )
