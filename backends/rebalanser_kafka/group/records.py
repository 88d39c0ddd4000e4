"""Records of a group's log: requests, each executed at its offset, and snapshots of their results.

A record's value begins with two letters and its format; then comes JSON, compressed if it is long. A value in
a newer format is never skipped: this reader's replica would differ from all others from there on. No
Rebalanser wrote a value that is unreadable for another reason: all replicas fail to read it, and set it
aside.

A record has the lowest format that can hold it. Format 2 has what replicas that know only format 1 would
ignore: capacity, tags, zone and grace of a member, the members that a plan remembers, needs and spread of a
resource, also in a snapshot, and the policy. So such replicas stop at it instead of placing resources against
their needs (RB-37).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias, get_args

from pydantic import TypeAdapter, ValidationError

from rebalanser.core.group.messages import Command
from rebalanser.core.group.types import SPEC_FIELDS, Policy, ResourceSpec
from rebalanser.errors import InvalidName, RequestTooLarge, UnusableStore

FORMAT: Final = 2
_MAGIC: Final = b"RG"
_PLAIN: Final = b"j"
_COMPRESSED: Final = b"z"
_COMPRESS_OVER_BYTES: Final = 1024
MAX_REQUEST_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of one request as JSON, before compression."""


@dataclass(frozen=True, slots=True)
class PutResources:
    """An operator adds resources, or changes the fields ``said`` of existing ones (RB-29)."""

    specs: tuple[ResourceSpec, ...]
    said: frozenset[str] = SPEC_FIELDS


@dataclass(frozen=True, slots=True)
class WeighResources:
    """An operator changes the weights of existing resources, and nothing else of them (AU-7)."""

    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RemoveResources:
    """An operator removes resources (RB-29)."""

    resources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetDrained:
    """An operator drains a node, or ends its drain (RB-30)."""

    label: str
    drained: bool


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """An operator changes the fields ``said`` of the group's policy (RB-38)."""

    policy: Policy
    said: frozenset[str]


@dataclass(frozen=True, slots=True)
class ReadAll:
    """A client reads the group as of this record's offset (RB-19)."""


@dataclass(frozen=True, slots=True)
class Expire:
    """A connection has counted a lease's time to live since it read the renewal at this revision (RB-20).

    Takes effect only while that renewal is still the last one.
    """

    lease: int
    renewal: int


@dataclass(frozen=True, slots=True)
class Fed:
    """The running applications of a Shiva cluster, from a document of this epoch (SH-19).

    Takes effect only if no document of this or a later epoch was fed before.
    """

    epoch: tuple[int, int]
    resources: frozenset[str]


@dataclass(frozen=True, slots=True)
class Rebase:
    """Revisions continue after ``revision``: offsets that were handed out as tokens came again."""

    revision: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of every replica after the record at offset ``as_of``.

    A reader that continues from it needs the records from ``needs_from`` on. That may be a little earlier, at
    the first part of a large value that was not whole.
    """

    as_of: int
    needs_from: int
    state: Mapping[str, Any]


Change: TypeAlias = (
    PutResources
    | WeighResources
    | RemoveResources
    | SetDrained
    | SetPolicy
    | ReadAll
    | Expire
    | Fed
    | Rebase
    | Snapshot
)
Wish: TypeAlias = Command | Change
"""A request of a record."""


@dataclass(frozen=True, slots=True)
class Request:
    """A record of the log: the request, and an id by which its writer recognises it.

    ``born_ms`` names the log it was written for: the time at which the first record of that log was appended,
    or 0 if its writer knew of none yet. It is executed in no other log.

    ``epoch`` is the revision at which an operator's request last took effect, or 0 if none did. This one is
    executed only while that is so, or at any time if ``epoch`` is None (RB-44).
    """

    id: str
    wish: Wish
    born_ms: int = 0
    epoch: int | None = None


class UnreadableValue(ValueError):
    """The value is not one that a Rebalanser writes into a group's log."""


_KINDS: Final[Mapping[str, TypeAdapter[Any]]] = MappingProxyType(
    {kind.__name__: TypeAdapter(kind) for kind in (*get_args(Command), *get_args(Change))}
)


def encode(request: Request) -> bytes:
    """Return a request as a record's value.

    Raises:
        InvalidName: a text or number in it cannot be stored.
        RequestTooLarge: it is over ``MAX_REQUEST_BYTES``.
    """
    kind = type(request.wish).__name__
    # A default of the protocol's types is a read-only mapping, of which pydantic would warn.
    body = _KINDS[kind].dump_python(request.wish, warnings=False)
    head = _MAGIC + bytes([_least_format(request.wish, body)])
    whole = {"id": request.id, "born_ms": request.born_ms, "epoch": request.epoch, "kind": kind, "body": body}
    try:
        text = json.dumps(
            whole, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_as_json
        ).encode()
    except ValueError as error:
        raise InvalidName(f"what cannot be written as JSON in UTF-8 cannot be stored: {error}") from error
    if len(text) > MAX_REQUEST_BYTES:
        raise RequestTooLarge(f"a request of {len(text)} bytes; the limit is {MAX_REQUEST_BYTES}")
    if len(text) <= _COMPRESS_OVER_BYTES:
        return head + _PLAIN + text
    return head + _COMPRESSED + zlib.compress(text)


_NEW_IN_2: Final[Mapping[str, object]] = MappingProxyType(
    {
        "capacity": None,
        "tags": frozenset(),
        "zone": "",
        "rejoin_grace_s": 0.0,
        "registered": 0,
        "needs": frozenset(),
        "spread": None,
        "remember": {},
        "forget": frozenset(),
    }
)
"""Fields of members, resources and plans that format 1 does not have, with their defaults."""


def _least_format(wish: Wish, body: dict[str, Any]) -> int:
    """Return the lowest format that can hold a request; drop new fields that have their defaults."""
    described = [*body.get("specs", ()), *(body[name] for name in ("member", "plan") if name in body)]
    described += [member for plan in described for member in plan.get("remember", {}).values()]
    for each in described:
        for name, default in _NEW_IN_2.items():
            if name in each and each[name] == default:
                del each[name]
    is_new = any(_NEW_IN_2.keys() & each.keys() for each in described)
    match wish:
        case PutResources(said=said):
            is_new = is_new or not said.isdisjoint(_NEW_IN_2)
        case Snapshot(state=state):
            is_new = state.get("format", 1) > 1
        case SetPolicy():
            is_new = True
        case _:
            pass
    return FORMAT if is_new else 1


def _as_json(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no place in a request")


def is_request(value: bytes) -> bool:
    """True if the value begins as a request does, in any format."""
    return value.startswith(_MAGIC)


def decode(value: bytes | None) -> Request:
    """Return the request of a record's value.

    Raises:
        UnusableStore: it is in a newer format; nothing after it may be executed.
        UnreadableValue: no Rebalanser wrote it.
    """
    if value is None or not is_request(value) or len(value) < len(_MAGIC) + 2:
        raise UnreadableValue("it does not begin as a request does")
    version, packing, rest = value[2], value[3:4], value[4:]
    if version > FORMAT:
        raise UnusableStore(
            f"the group's log was written by a newer Rebalanser (format {version}, this one knows {FORMAT}): "
            "upgrade this node"
        )
    try:
        whole = json.loads(_inflated(rest) if packing == _COMPRESSED else rest)
        wish: Wish = _KINDS[whole["kind"]].validate_python(whole["body"], strict=False)
        epoch = whole.get("epoch")
        return Request(
            _text(whole["id"]), wish, int(whole.get("born_ms", 0)), None if epoch is None else int(epoch)
        )
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError, zlib.error) as error:
        raise UnreadableValue(f"{type(error).__name__}: {error}"[:200]) from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("an id is text")
    return value


def _inflated(packed: bytes) -> bytes:
    inflater = zlib.decompressobj()
    text = inflater.decompress(packed, MAX_REQUEST_BYTES)
    if inflater.unconsumed_tail or not inflater.eof:
        raise ValueError(f"it is cut off, or longer than {MAX_REQUEST_BYTES} bytes")
    return text
