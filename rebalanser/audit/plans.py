"""Keeps Spark's plans short."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def cut_off(frame: DataFrame) -> DataFrame:
    """The rows of ``frame``, computed now and cut off from the plan that made them.

    What is made of a frame is otherwise planned from the files on, each time anew, which for a plan as long
    as the audit's takes longer than the work. The columns are new ones, so that the result can be joined with
    what it was made of. Spark lets go of the rows once nobody has the result any more.
    """
    rows = frame.localCheckpoint(storageLevel=StorageLevel.MEMORY_AND_DISK)
    return rows.select(*(F.col(f"`{name}`").alias(name) for name in rows.columns))
