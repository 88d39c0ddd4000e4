"""Tables of the audit. Durations are in seconds; columns that end in ``_wall`` are Unix times."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TEXT: Final = StringType()
_WHOLE: Final = LongType()
_REAL: Final = DoubleType()
_FLAG: Final = BooleanType()


def _table(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


class EndedBy(StrEnum):
    """Evidence for the end of an access."""

    STOP = "stop"
    """OnStop's return was recorded."""
    SILENCE = "silence"
    """No return was recorded; the access is assumed to last until the last record of its node."""
    FAILURE = "failure"
    """OnStop raised: the access lasted until then, and possibly until the last record of its node."""


class FindingKind(StrEnum):
    """Kinds of findings (AU-4)."""

    OVERLAP = "overlap"
    """Two owners had access to one resource at the same time: RB-1, SH-13, NE-10, SK-6 by protocol."""
    BARRIER_OVERLAP = "barrier_overlap"
    """Two nodes held one barrier at the same time, by the revisions of the registry (RB-12)."""
    UNOWNED = "unowned"
    """No node owned the resource for longer than the limit: RB-2, SH-4, NE-6 by protocol."""
    TOKEN_ORDER = "token_order"  # noqa: S105 - no password
    """A later owner had the same or a smaller fencing token (RB-12, NE-15, SK-6)."""
    START_WITHOUT_BARRIER = "start_without_barrier"
    """OnStart was called without the barrier, or before it was added (RB-12)."""
    STEP_ORDER = "step_order"
    """A node performed the protocol's steps in the wrong order (RB-11)."""
    TWO_LEADERS = "two_leaders"
    """One term had two leaders (RB-5, SH-7)."""
    CLAIM_TWICE = "claim_twice"
    """Two workers held one claim number of a task (SK-6)."""
    UPDATE_GAP = "update_gap"
    """Updates of a claim are missing: their numbers must be 0, 1, 2... (SK-9)."""
    STALE_WRITE = "stale_write"
    """An update or completion of a superseded claim was accepted (SK-10)."""
    CONFLICT = "conflict"
    """Two different records have the same process and number (AU-2)."""


class Certainty(StrEnum):
    """Certainty of a finding."""

    CERTAIN = "certain"
    POSSIBLE = "possible"


SOURCE_COLUMNS: Final = _table(source=_TEXT, position=_WHOLE)
"""Location of a record: a file's URI or ``topic/partition``, and its line (from 1), row or offset.

``position`` is null for a line of a JSONL file until ``rebalanser.audit.evidence`` looks it up.
"""

QUARANTINE: Final = _table(source=_TEXT, position=_WHOLE, reason=_TEXT, detail=_TEXT, raw=_TEXT)
"""Lines, rows and messages that are not records. ``raw`` holds the first 4,096 characters."""

GAPS: Final = _table(
    protocol=_TEXT, group=_TEXT, process=_TEXT, label=_TEXT,
    first=_WHOLE, last=_WHOLE, missing=_WHOLE, after_wall=_REAL, before_wall=_REAL, reason=_TEXT,
)  # fmt: skip
"""Runs of missing numbers of a process, between the wall times of the records around them.

``after_wall`` is null if the first records of the process are missing. ``reason`` is that of a ``gap``
record, ``rotated`` if the first records are missing, else ``missing``.
"""

PROCESSES: Final = _table(
    protocol=_TEXT, group=_TEXT, process=_TEXT, node=_TEXT, label=_TEXT, host=_TEXT, boot=_TEXT,
    first_sequence=_WHOLE, last_sequence=_WHOLE, first_wall=_REAL, last_wall=_REAL, last_monotonic=_REAL,
    duplicates=_WHOLE,
)  # fmt: skip
"""One row for each incarnation (``node``) of a process; ``duplicates`` counts records read more than once."""

_STEPS: Final = (
    "barrier_added", "start_entered", "start_returned", "stop_entered", "stop_returned", "stop_failed",
    "barrier_removed",
)  # fmt: skip

ACCESSES: Final = StructType(
    [
        *_table(
            protocol=_TEXT, group=_TEXT, resource=_TEXT, token=_WHOLE, process=_TEXT, node=_TEXT, turn=_WHOLE,
            label=_TEXT, host=_TEXT, boot=_TEXT, version=_WHOLE, fenced=_FLAG, overlap_limit_s=_REAL,
        ),
        *(
            StructField(f"{step}_{part}", kind)
            for step in _STEPS
            for part, kind in (("sequence", _WHOLE), ("wall", _REAL), ("monotonic", _REAL))
        ),
        *_table(
            removal_sent_monotonic=_REAL, removed_revision=_WHOLE, claim=_WHOLE,
            end_wall=_REAL, end_monotonic=_REAL, ended_by=_TEXT,
        ),
    ]
)  # fmt: skip
"""One row for each barrier and access of a process to a resource under one token.

A node that lost contact may start a resource again with the same token: each start after a stop is a new
``turn``, counted from 0, with the same barrier columns. If a step is recorded twice in one turn, the first
start and barrier and the last stop count. ``token`` is the registry revision that added the barrier,
``removed_revision`` the one that removed it. The node last requested the removal at
``removal_sent_monotonic``. Both are null if they were not recorded. ``claim`` is the number of the claim in
Skuld. ``ended_by`` is the ``EndedBy`` of the end; it and ``start_entered_*`` are null if OnStart was never
called.
"""

PARTY: Final = _table(
    node=_TEXT, label=_TEXT, process=_TEXT, host=_TEXT, token=_WHOLE, begins=_REAL, ends=_REAL
)
"""Owner in a finding: ``begins`` and ``ends`` are wall times of its host."""

WITNESS: Final = _table(
    process=_TEXT,
    sequence=_WHOLE,
    kind=_TEXT,
    wall_time=_REAL,
    revision=_WHOLE,
    source=_TEXT,
    position=_WHOLE,
)
"""Record that is evidence of a finding."""

FINDINGS: Final = _table(
    id=_TEXT, kind=_TEXT, rule=_TEXT, certainty=_TEXT, protocol=_TEXT, group=_TEXT, resource=_TEXT,
    sentence=_TEXT, begins=_REAL, ends=_REAL, lasts_s=_REAL, uncertainty_s=_REAL, fenced=_FLAG,
    parties=ArrayType(PARTY), evidence=ArrayType(WITNESS), gap=_TEXT,
)  # fmt: skip
"""Broken rules. ``id`` depends only on the kind and the evidence, so batch and stream agree.

``lasts_s`` is the duration by the best available clock, ``uncertainty_s`` its maximum error. ``fenced`` is
true if the receivers check tokens and so prevented harm. ``gap`` describes missing records that could explain
the finding, and is null if no record is missing that could.
"""

CLOCKS: Final = _table(
    group=_TEXT, host=_TEXT, behind_host=_TEXT, behind_s=_REAL, seen_wall=_REAL, cause=_TEXT
)
"""Hosts (processes if the host is unknown) whose clock is at least ``behind_s`` behind another host's."""

REBALANCES: Final = _table(
    protocol=_TEXT, group=_TEXT, version=_WHOLE, term=_WHOLE, leader=_TEXT, published_wall=_REAL,
    completed_wall=_REAL, duration_s=_REAL, plan_s=_REAL, stop_s=_REAL, barrier_s=_REAL, start_s=_REAL,
    moves=_WHOLE, least_moves=_WHOLE, nodes=_WHOLE, resources=_WHOLE,
)  # fmt: skip
"""One row for each published allocation. ``plan_s`` is the time from reading the group to publishing;
``stop_s``, ``barrier_s`` and ``start_s`` are the times of the slowest node, by its own clock."""

UNAVAILABILITY: Final = _table(
    protocol=_TEXT, group=_TEXT, resource=_TEXT, accesses=_WHOLE, unowned_s=_REAL, longest_s=_REAL,
    longest_from=_REAL, first_wall=_REAL, last_wall=_REAL,
)  # fmt: skip
"""Seconds that each resource was unowned between its first and its last owner."""

HANDLERS: Final = _table(
    protocol=_TEXT,
    group=_TEXT,
    label=_TEXT,
    handler=_TEXT,
    calls=_WHOLE,
    p50_s=_REAL,
    p99_s=_REAL,
    max_s=_REAL,
)
"""Durations of OnStart and OnStop for a resource, on each node."""

BALANCE: Final = _table(
    protocol=_TEXT, group=_TEXT, at_wall=_REAL, nodes=_WHOLE, owned=_WHOLE, least=_WHOLE, most=_WHOLE
)
"""Minimum, maximum and total number of resources of the nodes at up to 500 times."""

LEADERS: Final = _table(
    protocol=_TEXT, group=_TEXT, term=_WHOLE, node=_TEXT, label=_TEXT, from_wall=_REAL, to_wall=_REAL
)
"""Leader of each term, until the next term or the last record of the leader."""

LOADS: Final = _table(
    protocol=_TEXT, group=_TEXT, resource=_TEXT, samples=_WHOLE, load=_REAL, weight=_REAL, last_wall=_REAL
)
"""Smoothed load of each resource and its weight (AU-7)."""


@dataclass(frozen=True, slots=True)
class Tables:
    """All tables of an audit."""

    findings: DataFrame
    accesses: DataFrame
    gaps: DataFrame
    clocks: DataFrame
    quarantine: DataFrame
    processes: DataFrame
    rebalances: DataFrame
    unavailability: DataFrame
    handlers: DataFrame
    balance: DataFrame
    leaders: DataFrame
    loads: DataFrame

    def folders(self) -> dict[str, DataFrame]:
        """Each table under the name of its folder."""
        tables = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"findings": tables.pop("findings"), "intervals": tables.pop("accesses"), **tables}
