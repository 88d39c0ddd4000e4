"""Findings of records, for batch and stream alike (AU-4).

A stream evaluates small batches often, and most of that time goes into planning queries whose result is
known: records without a task give no finding about tasks. ``Presence`` says which queries can be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.caching import count, observed, once
from rebalanser.audit.clocks import clocks, host_errors
from rebalanser.audit.invariants import (
    ALL,
    Case,
    barrier_overlap,
    claim_twice,
    overlap,
    stale_write,
    start_without_barrier,
    step_order,
    token_order,
    two_leaders,
    unowned,
    update_gap,
)
from rebalanser.audit.invariants.steps import first_wrong_step, is_unguarded
from rebalanser.audit.owner_pairs import doubts, suspects, suspects_in_order
from rebalanser.audit.sequences import conflicts

if TYPE_CHECKING:
    from rebalanser.audit.caching import Keep
    from rebalanser.audit.options import Options


@dataclass(frozen=True, slots=True)
class Presence:
    """Flags for records that some findings are made of: without them there are no such findings."""

    allocations: bool
    elections: bool
    tasks: bool
    twice: bool
    """True if a number of a process comes twice."""
    starts: bool
    """True if ``is_unguarded`` holds of an access."""
    steps: bool
    """True if an access has a ``first_wrong_step``."""


@once
def of_accesses() -> dict[str, Column]:
    """Conditions on accesses, for ``Presence``, evaluated as the accesses are put together."""
    return {"starts": is_unguarded(), "steps": first_wrong_step().isNotNull()}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Findings of the invariants, and the clocks that they rest on."""

    found: DataFrame | None
    """Rows of ``FINDINGS`` whose witnesses have a name only; None if there is nothing to find."""
    clocks: DataFrame | None
    """The table ``CLOCKS``; None if these records prove nothing of clocks."""


def evaluate(
    records: DataFrame,
    accesses: DataFrame,
    options: Options,
    keep: Keep,
    *,
    there: Presence,
    proven: DataFrame | None = None,
) -> Evaluation:
    """Evaluate the invariants on ``records`` and on the ``accesses`` made of them.

    ``there`` says what these records have; the suspects are found here. ``proven`` are rows of ``CLOCKS``
    that other records have proven.
    """
    contradicting, seen = observed(keep, "comparing owners", suspects(accesses, options), **_doubted(options))
    doubted = {name: found > 0 for name, found in seen.items()}
    apart = None
    if doubted["causes"] or there.allocations:
        apart = _apart(clocks(records, contradicting, options), keep)
    known = [frame for frame in (apart, proven) if frame is not None]
    errors = None
    if known and any(doubted.values()):
        errors = keep("comparing clocks", host_errors(reduce(DataFrame.unionByName, known)))
    in_order = None
    if doubted["hidden"]:
        in_order = keep("comparing owners in order", suspects_in_order(accesses, options))
    case = Case(records, accesses, contradicting, in_order, errors, options)
    found = [invariant(case) for invariant in _asked(there, doubted)]
    if there.twice:
        found.append(conflicts(records))
    return Evaluation(reduce(DataFrame.unionByName, found) if found else None, apart)


@once
def _doubted(options: Options) -> dict[str, Column]:
    return {name: F.count_if(doubt) for name, doubt in doubts(options).items()}


def _apart(clocks: DataFrame, keep: Keep) -> DataFrame | None:
    apart, seen = observed(keep, "comparing clocks", clocks, rows=count())
    return apart if seen["rows"] else None


def _asked(there: Presence, doubted: Mapping[str, bool]) -> Iterator[Callable[[Case], DataFrame]]:
    """The invariants that can find something."""
    needed: dict[Callable[[Case], DataFrame], bool] = {
        overlap: doubted["overlaps"],
        barrier_overlap: doubted["barriers"],
        unowned: doubted["unowned"],
        token_order: doubted["tokens"],
        start_without_barrier: there.starts,
        step_order: there.steps,
        two_leaders: there.elections,
        claim_twice: there.tasks,
        update_gap: there.tasks,
        stale_write: there.tasks,
    }
    return (invariant for invariant in ALL if needed[invariant])
