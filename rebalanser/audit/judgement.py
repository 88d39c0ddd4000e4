"""The one way from records to what is found of them, which batch and stream have in common (AU-4).

A stream judges a little often, and what takes its time then is not the data but the planning of questions
whose answer is clear: of records without a task there is no finding about tasks. So whoever has looked
already what there is (:class:`There`) is spared those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Final, TypeAlias

from pyspark.sql import DataFrame

from rebalanser.audit.clocks import clocks
from rebalanser.audit.invariants import (
    ALL,
    barrier_overlap,
    claim_twice,
    judged,
    overlap,
    stale_write,
    token_order,
    two_leaders,
    unowned,
    update_gap,
)
from rebalanser.audit.sequences import conflicts
from rebalanser.audit.successions import suspects
from rebalanser.audit.tables import CLOCKS

if TYPE_CHECKING:
    from rebalanser.audit.invariants import Case
    from rebalanser.audit.options import Options

Keep: TypeAlias = Callable[[str | None, DataFrame], DataFrame]
"""``keep(words, frame)``: the frame, kept by whoever calls because it is used several times.

With words for what is being done it may be computed at once; without, only when it is asked for.
"""

_OF_SUSPECTS: Final = (overlap, barrier_overlap, unowned, token_order)
_OF_TASKS: Final = (claim_twice, update_gap, stale_write)


@dataclass(frozen=True, slots=True)
class There:
    """Whether there are records that some findings are made of; if not, there are no such findings."""

    suspects: bool = True
    """:func:`~rebalanser.audit.successions.suspects` gives a row."""
    allocations: bool = True
    elections: bool = True
    tasks: bool = True
    twice: bool = True
    """A number of a process comes twice."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the invariants say of a history."""

    found: DataFrame
    """Rows of ``FINDINGS`` whose witnesses have a name only."""
    clocks: DataFrame
    """The table ``CLOCKS``, and what was proven before."""
    compared: bool
    """Whether there was something to compare clocks by."""


def judgement(
    records: DataFrame,
    accesses: DataFrame,
    options: Options,
    keep: Keep,
    *,
    there: There | None = None,
    proven: DataFrame | None = None,
) -> Judgement:
    """All that is found of ``records``, the accesses made of them being ``accesses``.

    ``there`` is what has been looked for in the records; then whether there are suspects is found out here.
    ``proven`` are rows of ``CLOCKS`` that other records have proven.
    """
    contradicting = keep("comparing owners", suspects(accesses, options))
    there = There() if there is None else replace(there, suspects=not contradicting.isEmpty())
    apart = _apart(records, contradicting, options, keep, there, proven)
    asked = judged(records, accesses, contradicting, options, apart)
    if there.suspects:
        asked = replace(asked, errors=keep("comparing clocks", asked.errors))
    found = [invariant(asked) for invariant in _asked(there)]
    if there.twice:
        found.append(conflicts(records))
    return Judgement(reduce(DataFrame.unionByName, found), apart, there.suspects or there.allocations)


def _apart(
    records: DataFrame,
    contradicting: DataFrame,
    options: Options,
    keep: Keep,
    there: There,
    proven: DataFrame | None,
) -> DataFrame:
    """The table ``CLOCKS`` with what was proven before."""
    if not there.suspects and not there.allocations:
        return records.sparkSession.createDataFrame([], CLOCKS) if proven is None else proven
    apart = keep("comparing clocks", clocks(records, contradicting, options))
    return apart if proven is None else apart.unionByName(proven)


def _asked(there: There) -> Iterator[Callable[[Case], DataFrame]]:
    """The invariants of which something can be found."""
    for invariant in ALL:
        needs_suspects, needs_tasks = invariant in _OF_SUSPECTS, invariant in _OF_TASKS
        idle = (
            (needs_suspects and not there.suspects)
            or (needs_tasks and not there.tasks)
            or (invariant is two_leaders and not there.elections)
        )
        if not idle:
            yield invariant
