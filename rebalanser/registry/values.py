"""The values of a group's keys: JSON, with a schema version where readers need it, and zlib for shares."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rebalanser.core.group.types import (
    POLICY_FIELDS,
    Header,
    Leadership,
    Member,
    Mode,
    Policy,
    ResourceSpec,
    Share,
    SpreadOver,
    Trouble,
)
from rebalanser.errors import UnusableStore
from rebalanser.registry.contract import KeyValue

SCHEMA_VERSION = 1
CAPACITY_SCHEMA: Final = 2
"""Schema of a member with a capacity. A leader that knows only schema 1 sets such a member aside, reports its
key and gives it nothing, so that it can't be given more than its capacity."""
NEWER_PIN: Final = "a node of a newer Rebalanser\n"
"""The pin of a resource with needs or a spread, as leaders read it that do not know these. No node can have
this label, so such a leader leaves the resource unowned instead of placing it against its needs (RB-37)."""
MAX_CHANGE_KEYS = 1_000
"""Maximum number of changed keys that a request names; if it changes more, leaders read the whole group."""

COMPRESSION_LEVEL = 4
"""Sorted names get no smaller above this level, and take twice the time."""


class _Value(BaseModel):
    """Base of the schemas; unknown fields are ignored."""

    newest: ClassVar[int] = SCHEMA_VERSION
    """The newest schema that is known."""

    version_of_schema: int = Field(SCHEMA_VERSION, alias="schema")


ValueT = TypeVar("ValueT", bound=_Value)
Weight = Annotated[float, Field(strict=True, gt=0.0, allow_inf_nan=False)]
"""A weight or a capacity."""
NotNegative = Annotated[float, Field(strict=True, ge=0.0, allow_inf_nan=False)]
MoveCount = Annotated[int, Field(strict=True, ge=0)]


class _Member(_Value):
    newest = CAPACITY_SCHEMA

    label: str
    mode: Mode
    may_lead: bool
    host: str
    pid: int
    attributes: dict[str, str]
    refused: frozenset[str] = frozenset()
    """The resources that the node has released."""
    capacity: Weight | None = None
    tags: frozenset[str] = frozenset()
    zone: str = ""
    rejoin_grace_s: NotNegative = 0.0


class _Leadership(_Value):
    term: int
    leader: str
    trouble: Trouble | None = None


class _Resource(_Value):
    weight: Weight = 1.0
    pin: str | None = None
    attributes: dict[str, str] = {}
    needs: frozenset[str] = frozenset()
    spread: str | None = None
    pinned: str | None = None
    """The pin, if ``pin`` is ``NEWER_PIN``."""


class _Policy(_Value):
    spread_over: SpreadOver = SpreadOver.NODE
    imbalance_band: NotNegative = 0.0
    max_moves: MoveCount | None = None
    move_interval_s: NotNegative = 0.0
    cooldown_s: NotNegative = 0.0


class _Header(_Value):
    version: int
    term: int
    void: list[int] = []
    """The aborted versions."""


# Names differ, so a cache of them only takes time.
_NAMES = TypeAdapter(list[str], config=ConfigDict(cache_strings="none"))
_encoded = json.JSONEncoder(separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode


def _dump(value: Mapping[str, Any]) -> bytes:
    return _encoded(value).encode()


_NEWER_PIN_IN_JSON: Final = b'"pin":' + _encoded(NEWER_PIN).encode()


class _Reading:
    """Turns an error of parsing into one that names the key, so that a person can repair it."""

    __slots__ = ("_key",)

    def __init__(self, key: str) -> None:
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, (ValueError, RecursionError, zlib.error)):
            raise UnusableStore(
                f"{self._key!r} holds what no Rebalanser wrote ({_reason(error)}): repair or delete it"
            ) from error


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return repr(error)
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}"


def _load(entry: KeyValue, kind: type[ValueT]) -> ValueT:
    """Parse a value; its fields must have exactly the types that they are written with.

    Raises:
        UnusableStore: a newer Rebalanser wrote it.
        ValidationError: no Rebalanser wrote it.
    """
    try:
        value = kind.model_validate_json(entry.value, strict=True)
    except ValidationError:
        with suppress(ValidationError):
            _check_schema(entry, _Value.model_validate_json(entry.value, strict=True), kind)
        raise
    _check_schema(entry, value, kind)
    return value


def _check_schema(entry: KeyValue, value: _Value, kind: type[_Value]) -> None:
    if value.version_of_schema > kind.newest:
        raise UnusableStore(
            f"{entry.key!r} was written by a newer Rebalanser (schema {value.version_of_schema}, "
            f"this one knows {kind.newest}): upgrade this node"
        )


def dump_member(member: Member) -> bytes:
    """Return the value of a member key."""
    value: dict[str, Any] = {
        "schema": SCHEMA_VERSION if member.capacity is None else CAPACITY_SCHEMA,
        "label": member.label,
        "mode": member.mode.value,
        "may_lead": member.may_lead,
        "host": member.host,
        "pid": member.pid,
        "attributes": dict(member.attributes),
    }
    if member.released:
        value["refused"] = sorted(member.released)
    if member.capacity is not None:
        value["capacity"] = member.capacity
    if member.tags:
        value["tags"] = sorted(member.tags)
    if member.zone:
        value["zone"] = member.zone
    if member.rejoin_grace_s:
        value["rejoin_grace_s"] = member.rejoin_grace_s
    return _dump(value)


def load_member(node: str, entry: KeyValue) -> Member:
    """Parse a member key."""
    with _Reading(entry.key):
        value = _load(entry, _Member)
        return Member(
            node=node,
            label=value.label,
            mode=value.mode,
            may_lead=value.may_lead,
            host=value.host,
            pid=value.pid,
            attributes=value.attributes,
            released=value.refused,
            capacity=value.capacity,
            tags=value.tags,
            zone=value.zone,
            rejoin_grace_s=value.rejoin_grace_s,
            registered=entry.create_revision,
        )


def dump_leadership(term: int, leader: str, trouble: Trouble | None) -> bytes:
    """Return the value of the term key."""
    value: dict[str, Any] = {"schema": SCHEMA_VERSION, "term": term, "leader": leader}
    if trouble is not None:
        value["trouble"] = {"term": trouble.term, "error": trouble.error}
    return _dump(value)


def load_leadership(entry: KeyValue) -> Leadership:
    """Parse the term key."""
    with _Reading(entry.key):
        value = _load(entry, _Leadership)
        return Leadership(
            term=value.term,
            leader=value.leader,
            revision=entry.mod_revision,
            trouble=value.trouble,
        )


def dump_resource(spec: ResourceSpec) -> bytes:
    """Return the value of a resource's key; empty if all fields have their defaults."""
    value: dict[str, Any] = {}
    if spec.weight != 1.0:
        value["weight"] = spec.weight
    if spec.pin is not None:
        value["pin"] = spec.pin
    if spec.needs:
        value["needs"] = sorted(spec.needs)
    if spec.spread is not None:
        value["spread"] = spec.spread
    if value.keys() & {"needs", "spread"}:
        if spec.pin not in {None, NEWER_PIN}:
            value["pinned"] = spec.pin
        value["pin"] = NEWER_PIN
    if spec.attributes:
        value["attributes"] = dict(spec.attributes)
    return _dump(value) if value else b""


def is_constrained(value: bytes) -> bool:
    """Return True if the value of a resource's key has needs or a spread."""
    return _NEWER_PIN_IN_JSON in value


def load_resource(resource: str, entry: KeyValue) -> ResourceSpec:
    """Parse a resource's key."""
    if not entry.value:
        return ResourceSpec(resource)
    with _Reading(entry.key):
        value = _load(entry, _Resource)
        is_constrained = value.needs or value.spread is not None
        return ResourceSpec(
            resource,
            weight=value.weight,
            pin=value.pinned if is_constrained and value.pin == NEWER_PIN else value.pin,
            attributes=value.attributes,
            needs=value.needs,
            spread=value.spread,
        )


def dump_policy(policy: Policy) -> bytes:
    """Return the value of the policy's key."""
    changed = asdict(policy).items() - asdict(Policy()).items()
    return _dump({"schema": SCHEMA_VERSION, **dict(changed)})


def load_policy(entry: KeyValue | None) -> Policy:
    """Parse the policy's key; the default policy if it is absent.

    Raises:
        UnusableStore: a newer Rebalanser wrote it, or none did.
    """
    if entry is None:
        return Policy()
    with _Reading(entry.key):
        value = _load(entry, _Policy)
        return Policy(**{name: getattr(value, name) for name in POLICY_FIELDS})


def dump_header(version: int, term: int, aborted: Iterable[int]) -> bytes:
    """Return the value of the header."""
    return _dump({"schema": SCHEMA_VERSION, "version": version, "term": term, "void": sorted(aborted)})


def load_header(entry: KeyValue) -> Header:
    """Parse the header of the committed allocation."""
    with _Reading(entry.key):
        value = _load(entry, _Header)
        return Header(value.version, value.term, entry.mod_revision, frozenset(value.void))


def _dump_names(names: Iterable[str]) -> bytes:
    return zlib.compress(_NAMES.dump_json(sorted(names)), COMPRESSION_LEVEL)


def dump_share(resources: Iterable[str], max_bytes: int) -> list[bytes]:
    """Return the values of a share's parts, of at most ``max_bytes`` each."""
    whole = _dump_names(resources)
    return [whole[start : start + max_bytes] for start in range(0, len(whole), max_bytes)]


def load_share(version: int, parts: Sequence[KeyValue]) -> Share:
    """Parse a share from its parts, at least one."""
    with _Reading(parts[0].key):
        whole = zlib.decompress(b"".join(part.value for part in parts))
        return Share(
            version=version,
            resources=frozenset(_NAMES.validate_json(whole)),
            parts=len(parts),
            revision=parts[0].mod_revision,
        )


def dump_changes(changes: int) -> bytes:
    """Return the value of the operators' key."""
    return str(changes).encode()


def load_changes(entry: KeyValue | None) -> int:
    """Return the number of operators' requests that changed anything.

    If the value is unreadable it is another number, which also grows with each request.
    """
    if entry is None:
        return 0
    try:
        return int(entry.value)
    except ValueError:
        return entry.mod_revision


def dump_change(keys: Collection[str]) -> bytes:
    """Return the value with the keys that a request changed; empty if there are too many."""
    return _dump_names(keys) if len(keys) <= MAX_CHANGE_KEYS else b""


def load_change(entry: KeyValue) -> list[str] | None:
    """Return the keys that a request changed; None if unknown."""
    try:
        return _NAMES.validate_json(zlib.decompress(entry.value))
    except (ValueError, zlib.error):
        return None


def load_acknowledgement(entry: KeyValue) -> int:
    """Parse an acknowledgement: the version that a node has completed."""
    with _Reading(entry.key):
        return int(entry.value)
