"""Record of a history, one JSON line, in the current version of the schema."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rebalanser.core.fields import fields_for
from rebalanser.core.group.messages import Fact, FactKind
from rebalanser.history.kinds import GAP, KINDS, Protocol
from rebalanser.redaction import HIDDEN, names_secret, redact

SCHEMA_VERSION: Final = 2
MAX_TEXT: Final = 4096
"""Maximum characters of one text in ``detail``; longer ones are cut off."""
UNLIMITED_S: Final = 1e12
"""An ``overlap_limit_s`` that allows any overlap."""

Value: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Author:
    """Writer of records: one process's part in one group, the same for all of its records."""

    protocol: Protocol
    group: str
    process: str
    label: str
    host: str | None = None
    boot: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """An event without number and time; the fields are those of ``Record``."""

    kind: str
    node: str
    incarnation: int = 0
    term: int = 0
    version: int = 0
    resource: str | None = None
    token: int | None = None
    revision: int | None = None
    value: float | None = None
    fenced: bool | None = None
    overlap_limit_s: float | None = None
    detail: Mapping[str, Value] = field(default_factory=dict)


class Record(BaseModel):
    """One event on one node. ``(process, sequence)`` names it for ever.

    Group, Shiva, NELI and Skuld write the same record; ``kind`` is one of the ``KINDS`` of ``protocol``.

    A ``gap`` record represents dropped records: it has the sequence number of the first of them, and in its
    detail their count (``dropped``), their numbers (``first``, ``last``) and the ``reason``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    schema_version: Literal[2] = Field(description="version of this schema")
    protocol: Protocol = Field(
        description="protocol that wrote the record: `group`, `shiva`, `neli` or `skuld`"
    )
    group: str = Field(description="name of the group; in Shiva of the cluster, in Skuld of the queue")
    process: str = Field(description="unique name of one run of a process; `sequence` counts its records")
    node: str = Field(description="id of the node; each incarnation has its own, never used again")
    label: str = Field(description="human-readable name of the node; several nodes may share it")
    incarnation: int = Field(ge=0, description="number of the node among the incarnations of its process")
    host: str | None = Field(default=None, description="name of the host, for display")
    boot: str | None = Field(
        default=None,
        description="id of one run of a host's kernel: monotonic times with the same `boot` are of one clock",
    )
    sequence: int = Field(
        ge=0,
        description="number of the record in its process, from 0, across incarnations; "
        "a number is missing only if a record was dropped",
    )
    kind: str = Field(description="what happened: one of the kinds of the protocol")
    term: int = Field(ge=0, description="latest term that the node knew; 0 before the first")
    version: int = Field(
        ge=0,
        description="latest allocation that the node had read or, as leader, committed; 0 before the first",
    )
    resource: str | None = Field(default=None, description="the resource, if the record concerns exactly one")
    token: int | None = Field(
        default=None, ge=0, description="fencing token of the resource, if the node holds one"
    )
    revision: int | None = Field(
        default=None, ge=0, description="registry revision at which the event happened or was seen"
    )
    value: float | None = Field(
        default=None, description="number whose meaning depends on the kind, such as a load"
    )
    fenced: bool | None = Field(
        default=None,
        description="true if the application declares that every receiver of its writes checks the token",
    )
    overlap_limit_s: float | None = Field(
        default=None,
        ge=0,
        description="how long the next owner may overlap with this one in the configured mode; "
        "null: not at all, 1e12: without limit",
    )
    wall_time: float = Field(description="Unix time in seconds by the host's clock, which may jump")
    monotonic_time: float = Field(
        description="seconds on the clock that times leases; comparable within one `boot`"
    )
    detail: dict[str, Value] = Field(default_factory=dict, description="further values, by kind")

    @model_validator(mode="after")
    def _kind_is_a_word_of_its_protocol(self) -> Self:
        if self.kind not in KINDS[self.protocol]:
            raise ValueError(f"{self.kind!r} is not a kind of {self.protocol}")
        return self

    @classmethod
    def of(cls, author: Author, event: Event, *, sequence: int, wall: float, monotonic: float) -> Self:
        """Make a record of an event: ``wall`` is Unix time, ``monotonic`` is on the lease clock.

        Accepts any text and number: invalid Unicode is escaped, long text is truncated, secrets are masked,
        and a number that JSON can't represent becomes text.
        """
        return cls(
            schema_version=SCHEMA_VERSION,
            protocol=author.protocol,
            group=_text(author.group),
            process=_text(author.process),
            node=_text(event.node),
            label=_text(author.label),
            incarnation=event.incarnation,
            host=None if author.host is None else _text(author.host),
            boot=author.boot,
            sequence=sequence,
            kind=event.kind,
            term=event.term,
            version=event.version,
            resource=None if event.resource is None else _text(event.resource),
            token=event.token,
            revision=event.revision,
            value=event.value,
            fenced=event.fenced,
            overlap_limit_s=event.overlap_limit_s,
            wall_time=wall,
            monotonic_time=monotonic,
            detail=_detail(event.detail),
        )

    @classmethod
    def gap(cls, first: Record, last: Record, *, dropped: int, reason: str) -> Self:
        """The record that replaces ``dropped`` records, from ``first`` to ``last``."""
        lost: dict[str, Value] = {
            "dropped": dropped,
            "first": first.sequence,
            "last": last.sequence,
            "reason": reason,
        }
        return cls.of(
            Author(**fields_for(Author, first)),
            Event(GAP, first.node, first.incarnation, first.term, first.version, detail=lost),
            sequence=first.sequence,
            wall=first.wall_time,
            monotonic=first.monotonic_time,
        )

    def to_line(self) -> bytes:
        """The record as one line of JSON, with its newline. Null fields are left out."""
        return self.__pydantic_serializer__.to_json(self, exclude_none=True) + b"\n"


def json_schema() -> dict[str, Any]:
    """The JSON schema of one line."""
    return Record.model_json_schema()


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _detail(detail: Mapping[str, Value]) -> dict[str, Value]:
    return {_text(name): HIDDEN if names_secret(name) else _value(value) for name, value in detail.items()}


def _value(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return _text(redact(str(value))[:MAX_TEXT])


def event_of(
    fact: Fact, *, fenced: bool | None = None, offers: Mapping[str, Value] = MappingProxyType({})
) -> Event:
    """The fact as an ``Event`` for a ``Journal``.

    ``fenced`` is the application's statement on the receivers of its writes; it is written where access
    begins. ``offers`` are the node's capacity, tags and zone; they are written where it joins.
    """
    event = Event(
        **fields_for(Event, fact),
        incarnation=incarnation_of(fact.node),
        fenced=fenced if fact.kind is FactKind.START_ENTERED else None,
    )
    return replace(event, detail={**fact.detail, **offers}) if fact.kind is FactKind.JOINED else event


def incarnation_of(node: str) -> int:
    """The number at the end of a node id ``STEM-N``; 0 if there is none."""
    suffix = node.rpartition("-")[2]
    return int(suffix) if suffix.isascii() and suffix.isdigit() and len(suffix) < 19 else 0
