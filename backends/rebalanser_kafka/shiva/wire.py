"""Shiva's records as keys and values of Kafka records.

A value is JSON with its ``kind`` and ``format``. From 1 KiB on it is compressed (zlib): its first byte is not
``{``. A part of an archive is its bare bytes. Any other value raises ``NotReadable``, with a reason for
people.
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from pydantic import TypeAdapter, ValidationError

from rebalanser.core.shiva.records import (
    AssignmentDocument,
    CommandRecord,
    ControlRecord,
    DocumentChange,
    KeptCommand,
    LeaderAnnouncement,
    OutputAnswer,
    OutputRequest,
    Ping,
    Pong,
    ScaleCommand,
    StartCommand,
    StopCommand,
    WorkerCommand,
)
from rebalanser.core.shiva.types import ApplicationId, Archive, Epoch
from rebalanser.errors import InvalidName

FORMAT: Final = 1
FORMAT_WITH_REPLICAS: Final = 2
"""Format of records that a version without replicas would misread (SH-28)."""
MAX_VALUE_BYTES: Final = 64 * 2**20
"""Maximum bytes of an unpacked value."""
MAX_PARTS: Final = 100_000
"""Maximum parts of an archive, which also limits the digits of a part's number."""
_COMPRESSED_FROM_BYTES: Final = 1024
_COMPRESSION: Final = 1
"""The fastest level: a document of 10,000 applications is encoded several times a second."""
_COMPRESSION_OF_CHANGES: Final = 6
_SHOWN_CHARS: Final = 200
_KNOWN_APPLICATIONS: Final = 50_000
"""Maximum applications whose ids are kept from record to record."""
_PART: Final = re.compile(r"part:([^:]+):([0-9a-f]{64}):([0-9]{1,5})")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_PEEKED_BYTES: Final = 256
_EPOCH: Final = re.compile(
    rb'\{"kind":"assignement","format":[12],"record":\{"epoch":\{"term":([0-9]{1,18}),"number":([0-9]{1,18})\},'
)

ASSIGNEMENT_KEY: Final = "assignement"
CHANGE_KEY: Final = "change:"
"""Prefix of the keys of changes."""
LEADER_KEY: Final = "leader"
PING_KEY: Final = "ping"


class NotReadable(ValueError):
    """The record is not one of Shiva's; the message says why (SH-16)."""


@dataclass(frozen=True, slots=True)
class PartKey:
    """A part of an archive of an application."""

    application: ApplicationId
    sha256: str
    number: int

    def __str__(self) -> str:
        return f"part:{self.application}:{self.sha256}:{self.number}"


Written: TypeAlias = CommandRecord | ControlRecord

_KINDS: Final[Mapping[str, type[Written]]] = MappingProxyType(
    {
        "start": StartCommand,
        "stop": StopCommand,
        "scale": ScaleCommand,
        "worker": WorkerCommand,
        "output": OutputRequest,
        "printed": OutputAnswer,
        "keep": KeptCommand,
        "leader": LeaderAnnouncement,
        "assignement": AssignmentDocument,
        "change": DocumentChange,
        "ping": Ping,
        "pong": Pong,
    }
)
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}
_KINDS_OF_KEY: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "cmd": frozenset({"start", "stop"}),
        "keep": frozenset({"keep"}),
        "scale": frozenset({"scale"}),
        "worker": frozenset({"worker"}),
        "output": frozenset({"output"}),
        "printed": frozenset({"printed"}),
        LEADER_KEY: frozenset({"leader"}),
        ASSIGNEMENT_KEY: frozenset({"assignement"}),
        "change": frozenset({"change"}),
        PING_KEY: frozenset({"ping"}),
        "pong": frozenset({"pong"}),
    }
)


_ADAPTERS: Final = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


def key_of(record: Written) -> str:
    """Return the key of a record (SH-2)."""
    match record:
        case StartCommand(application=application) | StopCommand(application=application):
            return f"cmd:{application}"
        case KeptCommand(start=start):
            return kept_key(start.application)
        case ScaleCommand(application=application):
            return f"scale:{application}"
        case LeaderAnnouncement():
            return LEADER_KEY
        case AssignmentDocument() | DocumentChange():
            return ASSIGNEMENT_KEY if isinstance(record, AssignmentDocument) else record.key
        case Ping():
            return PING_KEY
        case WorkerCommand() | OutputRequest() | OutputAnswer() | Pong():
            return f"{_NAMES[type(record)]}:{record.worker}"


def kept_key(application: ApplicationId) -> str:
    """Return the key of a kept start command of the application (SH-15)."""
    return f"keep:{application}"


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _plain(value: object) -> object:
    """Convert types that the JSON library lacks."""
    if isinstance(value, ApplicationId):
        return str(value)
    if is_dataclass(value):
        kind: type = type(value)
        plain = {name: _with_text_keys(getattr(value, name)) for name in _field_names(kind)}
        if plain.get("replicas") == 1:
            del plain["replicas"]  # without replicas a record is as an earlier version writes it
        return plain
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _with_text_keys(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): inner for key, inner in value.items()}
    return value


def encode(record: Written) -> bytes:
    """Return a record's value."""
    replicated = _has_replicas(record)
    content = {
        "kind": _NAMES[type(record)],
        "format": FORMAT_WITH_REPLICAS if replicated else FORMAT,
        "record": record,
    }
    text = json.dumps(content, default=_plain, separators=(",", ":"), allow_nan=False).encode()
    level = _COMPRESSION_OF_CHANGES if isinstance(record, DocumentChange) else _COMPRESSION
    return text if len(text) < _COMPRESSED_FROM_BYTES else zlib.compress(text, level)


def _has_replicas(record: Written) -> bool:
    match record:
        case StartCommand(replicas=replicas):
            return replicas > 1
        case KeptCommand(start=start):
            return start.replicas > 1
        case AssignmentDocument(applications=applications) | DocumentChange(applications=applications):
            progress = record.progress if isinstance(record, DocumentChange) else {}
            return any(
                application.replica or (entry is not None and entry.replicas > 1)
                for application, entry in applications.items()
            ) or any(application.replica for application in progress)
        case _:
            return False


def decode_part_key(key: bytes | None) -> PartKey | None:
    """Return the part of an archive that has the key; None for a key of another kind.

    Raises:
        NotReadable: it begins like such a key, but is invalid.
    """
    if key is None or not key.startswith(b"part:"):
        return None
    found = _PART.fullmatch(_text(key))
    if found is None:
        raise NotReadable("the key names no part of an archive")
    return PartKey(_application(found[1]), found[2], int(found[3]))


def decode(key: bytes | None, value: bytes) -> Written:
    """Decode a record from its key and value.

    Raises:
        NotReadable: they are no record, or one of a later format.
    """
    name = _text(key or b"")
    kind, record = _envelope(value)
    if kind not in _KINDS_OF_KEY.get(name.partition(":")[0], ()):
        raise NotReadable(f"a record of kind {kind!r} does not belong under the key {name[:_SHOWN_CHARS]!r}")
    try:
        read: Written = _ADAPTERS[kind].validate_python(_with_applications(record))
    except (ValidationError, InvalidName, AttributeError, TypeError) as error:
        raise NotReadable(_one_line(error)) from error
    if key_of(read) != name:
        raise NotReadable(f"the record belongs under the key {key_of(read)!r}")
    if isinstance(read, StartCommand | KeptCommand):
        _check_archive((read.start if isinstance(read, KeptCommand) else read).archive)
    return read


def peek_epoch(value: bytes) -> Epoch | None:
    """Return the epoch of a document as ``encode`` writes it, without decoding the rest; else None.

    Decoding a whole document of 2,000 applications takes 20 ms of processor time.
    """
    begins = value[:_PEEKED_BYTES]
    if not begins.startswith(b"{"):
        try:
            begins = zlib.decompressobj().decompress(begins, _PEEKED_BYTES)
        except zlib.error:
            return None
    found = _EPOCH.match(begins)
    return Epoch(int(found[1]), int(found[2])) if found else None


def _check_archive(archive: Archive) -> None:
    """Refuse an archive that no client packs: leaders and workers iterate over its parts (SH-16)."""
    if not _SHA256.fullmatch(archive.sha256):
        raise NotReadable(f"the archive's sha256 is {archive.sha256[:_SHOWN_CHARS]!r}")
    if archive.size_bytes < 0:
        raise NotReadable(f"the archive has {archive.size_bytes} bytes")
    if not 0 <= archive.parts <= MAX_PARTS:
        raise NotReadable(f"the archive has {archive.parts} parts, and at most {MAX_PARTS} are read")


def _envelope(value: bytes) -> tuple[str, Any]:
    try:
        content = json.loads(value if value.startswith(b"{") else _unpacked(value))
    except (ValueError, RecursionError, zlib.error) as error:
        raise NotReadable(f"the value is not JSON: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise NotReadable("the value is not a JSON object")
    if content.get("format") not in (FORMAT, FORMAT_WITH_REPLICAS):
        raise NotReadable(
            f"format {content.get('format')!r}; this version reads formats {FORMAT} and "
            f"{FORMAT_WITH_REPLICAS}"
        )
    return str(content.get("kind")), content.get("record")


def _unpacked(value: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(value, MAX_VALUE_BYTES)
    if unpacking.unconsumed_tail:
        raise NotReadable(f"the value unpacks to more than {MAX_VALUE_BYTES} bytes")
    return text


def _with_applications(record: Any) -> Any:
    """Return the record with application ids in place of their texts."""
    if not isinstance(record, dict):
        raise NotReadable("the record is not a JSON object")
    if "application" in record:
        record["application"] = _application(record["application"])
    for name in ("applications", "progress"):
        if name in record:
            record[name] = {_application(text): inner for text, inner in record[name].items()}
    if "start" in record:
        record["start"] = _with_applications(record["start"])
    return record


@functools.lru_cache(_KNOWN_APPLICATIONS)
def _application(text: str) -> ApplicationId:
    """Return the application of a text; each pong and document has the same ones again."""
    try:
        return ApplicationId.parse(text)
    except InvalidName as error:
        raise NotReadable(str(error)) from error


def _text(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise NotReadable("the key is not text") from None


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        told = (
            f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}"
            for each in error.errors(include_url=False, include_input=False)[:3]
        )
        return "; ".join(told)
    return " ".join(str(error).split())[:_SHOWN_CHARS]
