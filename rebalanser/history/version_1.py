"""Older versions of the schema, and the conversion of their records to the present version.

The data here is all that another reader, such as the audit's, needs to do the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from rebalanser.core.group.messages import FactKind
from rebalanser.history.kinds import Protocol
from rebalanser.history.records import SCHEMA_VERSION, Record, Value

OLDEST_VERSION: Final = 1
"""Oldest readable version."""

DEFAULTS_OF_VERSION_1: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        "protocol": Protocol.GROUP.value,
        "host": None,
        "boot": None,
        "fenced": None,
        "overlap_limit_s": None,
    }
)
"""Values of the fields that version 1 lacked: all of its records are a Group's."""

INCARNATION_OF_NODE: Final = "-[0-9]{1,18}$"
"""Regular expression (of Python and Java). In version 1 ``process`` is ``node`` without its match."""

VALUE_IN_DETAIL_OF_VERSION_1: Final[Mapping[str, str]] = MappingProxyType(
    {
        FactKind.ALLOCATION_PUBLISHED.value: "published_version",
        FactKind.REBALANCE_COMPLETED.value: "completed_version",
    }
)
"""Key of ``detail`` that has the ``value`` in version 1, by kind; other kinds have none."""


class Version1(BaseModel):
    """A record of version 1: a Group's, named by ``(node, incarnation, sequence)``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    schema_version: Literal[1]
    group: str
    node: str
    label: str
    incarnation: int = Field(ge=0)
    sequence: int = Field(ge=0)
    kind: str
    term: int = Field(ge=0)
    version: int = Field(ge=0)
    resource: str | None = None
    token: int | None = Field(default=None, ge=0)
    revision: int | None = Field(default=None, ge=0)
    wall_time: float
    monotonic_time: float
    detail: dict[str, Value] = Field(default_factory=dict)


def upgrade(old: Version1) -> Record:
    """The record in the present version of the schema.

    Raises:
        pydantic.ValidationError: its kind is none of a Group's.
    """
    return Record.model_validate(
        {
            **DEFAULTS_OF_VERSION_1,
            **old.model_dump(),
            "schema_version": SCHEMA_VERSION,
            "protocol": Protocol.GROUP,
            "process": re.sub(INCARNATION_OF_NODE, "", old.node),
            "value": _value(old),
        }
    )


def _value(old: Version1) -> float | None:
    value = old.detail.get(VALUE_IN_DETAIL_OF_VERSION_1.get(old.kind, ""))
    return float(value) if isinstance(value, int | float) else None
