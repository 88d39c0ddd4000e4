"""The few records that are looked at one by one, and what there is to find anything of.

Of a history that is sound next to nothing need be asked: planning the questions would take longer than the
answers. So the records of leaders, of allocations and of gaps are put aside once, in one pass over all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.judgement import There
from rebalanser.audit.sequences import has_duplicates
from rebalanser.history import GAP, Protocol, Step

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STEPS: Final = (Step.GROUP_READ, Step.PUBLISHED, Step.COMPLETED, Step.ELECTED, Step.ADOPTED)
"""Those that a process takes a few times in a rebalance, whatever the number of resources."""


def seldom_of(records: DataFrame) -> DataFrame:
    """The records of :data:`STEPS`, and those that stand for missing ones."""
    is_seldom = F.coalesce(F.col("step").isin(*STEPS), F.lit(False)) | (F.col("kind") == GAP)
    return records.where(is_seldom)


def there_is(processes: DataFrame, seldom: DataFrame, counted: DataFrame) -> There:
    """What there is, of ``PROCESSES``, :func:`seldom_of` and :func:`~rebalanser.audit.sequences.tallies`.

    It is looked for at once, so all three should be persisted.
    """
    (of_steps,) = seldom.agg(
        F.count_if(F.col("step") == Step.ELECTED).alias("elections"),
        F.count_if(F.col("step") == Step.ADOPTED).alias("allocations"),
    ).collect()
    return There(
        allocations=of_steps["allocations"] > 0,
        elections=of_steps["elections"] > 0,
        tasks=not processes.where(F.col("protocol") == str(Protocol.SKULD)).isEmpty(),
        twice=has_duplicates(counted),
    )
