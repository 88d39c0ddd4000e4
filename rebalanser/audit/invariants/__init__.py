"""Invariants of every history, one function each (AU-4): a case in, findings out.

Each takes a ``Case`` and returns rows of the table ``FINDINGS``, whose witnesses have a name only:
``rebalanser.audit.evidence`` adds the rest, and the gaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rebalanser.audit.invariants.findings import Case
from rebalanser.audit.invariants.leaders import two_leaders
from rebalanser.audit.invariants.ownership import barrier_overlap, overlap, token_order, unowned
from rebalanser.audit.invariants.steps import start_without_barrier, step_order
from rebalanser.audit.invariants.tasks import claim_twice, stale_write, update_gap

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

ALL: Final[tuple[Callable[[Case], DataFrame], ...]] = (
    overlap,
    barrier_overlap,
    unowned,
    token_order,
    start_without_barrier,
    step_order,
    two_leaders,
    claim_twice,
    update_gap,
    stale_write,
)
"""All invariants; the findings are the union of their results."""

__all__ = [
    "ALL",
    "Case",
    "barrier_overlap",
    "claim_twice",
    "overlap",
    "stale_write",
    "start_without_barrier",
    "step_order",
    "token_order",
    "two_leaders",
    "unowned",
    "update_gap",
]
