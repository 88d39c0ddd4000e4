"""Content of a report, as plain numbers and texts: aggregates of the tables, each of a bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rebalanser.audit.options import ReportLimits

Facts: TypeAlias = Mapping[str, Any]
"""One row, its values by the names of its columns."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The history in numbers; times are seconds since 1970."""

    groups: tuple[tuple[str, str], ...]
    """Protocol and name of the largest groups."""
    group_count: int
    nodes: int
    processes: int
    hosts: int
    records: int
    resources: int
    accesses: int
    first_wall: float | None
    last_wall: float | None


@dataclass(frozen=True, slots=True)
class Findings:
    """The worst findings, and counts of all by kind and certainty."""

    shown: tuple[Facts, ...]
    kinds: tuple[Facts, ...]
    """Rows of kind, certainty, count, longest duration, and number of fenced ones."""

    @property
    def certain(self) -> int:
        """Number of certain findings."""
        return sum(row["count"] for row in self.kinds if row["certainty"] == "certain")

    @property
    def possible(self) -> int:
        """Number of possible findings."""
        return self.total - self.certain

    @property
    def certain_unfenced(self) -> int:
        """Number of certain findings on resources whose receivers don't check tokens."""
        return sum(row["count"] - row["fenced"] for row in self.kinds if row["certainty"] == "certain")

    @property
    def total(self) -> int:
        """Number of all findings."""
        return sum(row["count"] for row in self.kinds)


@dataclass(frozen=True, slots=True)
class UnreadSummary:
    """Lines that could not be read, and records that are missing."""

    quarantined: int
    doubtful: int
    """Number of lines that could be a record that counts: not the last line of a writer that died."""
    reasons: tuple[Facts, ...]
    examples: tuple[Facts, ...]
    gap_count: int
    missing: int
    """Missing records, without those that rotation deleted."""
    rotated: int
    """Processes whose oldest records were deleted."""
    gaps: tuple[Facts, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """One span of one owner in row ``row`` of the timeline; ``node`` is its name for people."""

    row: int
    node: str
    begins: float
    ends: float
    tooltip: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Owners over time: ``resources`` are the names of the rows, the first on top."""

    resources: tuple[str, ...]
    bars: tuple[Bar, ...]
    marks: tuple[Bar, ...]
    """Spans of findings."""
    left_out: int
    """Number of resources that are not drawn."""
    slot_s: float | None
    """Seconds of a slot if accesses are too many to be drawn one by one, else None."""


@dataclass(frozen=True, slots=True)
class Heat:
    """Numbers of resources by the owned share of each stretch of time: ``counts[level][column]``."""

    begins: float
    width_s: float
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of some durations, in seconds."""

    name: str
    count: int
    p50_s: float | None
    p99_s: float | None
    max_s: float | None


@dataclass(frozen=True, slots=True)
class Rebalances:
    """The longest rebalances in the order of time, those with the most needless moves, and totals."""

    count: int
    completed: int
    moves: int
    least_moves: int
    counted_moves: int
    """Number of rebalances with a known number of moves."""
    spreads: tuple[Spread, ...]
    longest: tuple[Facts, ...]
    moving: tuple[Facts, ...]


@dataclass(frozen=True, slots=True)
class Unavailability:
    """The resources that were unowned longest, and the distribution of all."""

    resources: int
    accesses: int
    affected: int
    spread: Spread
    worst: tuple[Facts, ...]
    histogram: tuple[tuple[int, int], ...]
    """(third of a power of ten of seconds, number of resources) pairs."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The largest groups with their points in the order of time, and the number of groups left out."""

    groups: tuple[tuple[str, tuple[Facts, ...]], ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class Leaders:
    """The newest terms in the order of time, and the number of all."""

    term_count: int
    changes: int
    newest: tuple[Facts, ...]


@dataclass(frozen=True, slots=True)
class Loads:
    """The resources with the greatest weights, and the number of resources by weight (AU-7)."""

    resources: int
    """Number of resources that reported a load."""
    groups: int
    samples: int
    heaviest: tuple[Facts, ...]
    weights: tuple[tuple[float, int], ...]
    """(weight, number of resources) pairs; a weight has one decimal."""


@dataclass(frozen=True, slots=True)
class ReportContent:
    """The content of a report."""

    verdict: str
    limits: ReportLimits
    summary: Summary
    findings: Findings
    unread: UnreadSummary
    timeline: Timeline | None
    heat: Heat | None
    rebalances: Rebalances
    unavailability: Unavailability
    balance: Balance
    handler_count: int
    handlers: tuple[Facts, ...]
    leaders: Leaders
    loads: Loads
    clock_count: int
    clocks: tuple[Facts, ...]
