"""Selects control records, those of leaders, allocations and gaps, and the checks that apply to them.

A sound history needs next to no queries, and planning them would take longer than running them. So the
records of leaders, of allocations and of gaps are selected once, in one pass over all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.caching import observed
from rebalanser.audit.sequences import has_duplicates, processes_of
from rebalanser.history import GAP, HistoryStep, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from rebalanser.audit.caching import Keep

STEPS: Final = (
    HistoryStep.GROUP_READ,
    HistoryStep.PUBLISHED,
    HistoryStep.COMPLETED,
    HistoryStep.ELECTED,
    HistoryStep.ADOPTED,
)
"""Steps that a process takes a few times in a rebalance, at any number of resources."""


def control_records(records: DataFrame) -> DataFrame:
    """The records of ``STEPS``, and the ``gap`` records."""
    is_control = F.coalesce(F.col("step").isin(*STEPS), F.lit(False)) | (F.col("kind") == GAP)
    return records.where(is_control)


def looked_at(
    records: DataFrame, counted: DataFrame, keep: Keep
) -> tuple[DataFrame, DataFrame, dict[str, bool]]:
    """``PROCESSES``, ``control_records``, both kept, and the presence flags for ``Presence``.

    ``counted`` is the result of ``process_counts``, and should be persisted.
    """
    processes, of_processes = observed(
        keep,
        "counting the records of each process",
        processes_of(counted),
        tasks=F.count_if(F.col("protocol") == str(Protocol.SKULD)),
    )
    controls, of_steps = observed(
        keep,
        "looking for leaders",
        control_records(records),
        elections=F.count_if(F.col("step") == HistoryStep.ELECTED),
        allocations=F.count_if(F.col("step") == HistoryStep.ADOPTED),
    )
    there = {name: found > 0 for name, found in (of_steps | of_processes).items()}
    return processes, controls, there | {"twice": has_duplicates(counted)}
