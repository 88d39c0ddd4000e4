"""Shortens Spark's plans and saves jobs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeAlias, TypeVar

from pyspark import SparkContext, StorageLevel
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

P = ParamSpec("P")
T = TypeVar("T")

KEPT: Final = StorageLevel.MEMORY_AND_DISK_DESER
"""Storage level of kept rows: deserialised, since serialising and reading costs more than most queries."""

Keep: TypeAlias = Callable[[str | None, DataFrame], DataFrame]
"""``keep(words, frame)``: returns the frame, kept by the caller because it is used several times.

With ``words``, a name of the step, it is computed at once, as by ``cut_off``; without, at its first use.
"""


def once(make: Callable[P, T]) -> Callable[P, T]:
    """Call ``make`` once for the same arguments: for columns, which only describe a computation.

    Each part of a column takes a call into the JVM: thousands for each micro-batch. The arguments must be
    hashable, and the result must not be changed.
    """

    @lru_cache(maxsize=64)
    def made(_jvm: object, *args: P.args, **named: P.kwargs) -> T:
        return make(*args, **named)

    @wraps(make)
    def kept(*args: P.args, **named: P.kwargs) -> T:
        jvm = SparkContext._gateway  # noqa: SLF001 - PySpark has no other name of it
        return made(jvm, *args, **named)  # type: ignore[arg-type]

    return kept


def cut_off(frame: DataFrame) -> DataFrame:
    """The rows of ``frame``, computed now and cut off from the plan that made them.

    Otherwise Spark plans every frame made of it from the files on, each time anew, which for a plan as long
    as the audit's takes longer than the work. The columns are new ones, so that the result can be joined with
    the frames it was made of. Spark frees the rows once the result is no longer referenced.
    """
    rows = frame.localCheckpoint(storageLevel=KEPT)
    return rows.select(*(F.col(f"`{name}`").alias(name) for name in rows.columns))


def computed(words: str | None, frame: DataFrame) -> DataFrame:
    """A ``Keep`` that computes named steps at once, and the others at their use."""
    return frame if words is None else cut_off(frame)


def observed(keep: Keep, words: str, frame: DataFrame, **asked: Column) -> tuple[DataFrame, dict[str, Any]]:
    """``keep(words, frame)``, and aggregates of its rows, collected as these are computed.

    A query of its own would take longer to plan than to run.
    """
    observation = Observation()
    columns = (column.alias(name) for name, column in asked.items())
    kept = keep(words, frame.observe(observation, *columns))
    return kept, observation.get


def limits(spark: SparkSession, **values: float | None) -> DataFrame:
    """One row with these columns, to be joined, for numbers that differ in each micro-batch.

    A literal is part of the code that Spark generates for a query: a new literal means compiling it again.
    """
    columns = ", ".join(f"cast(:{name} as double)" for name in values)
    named = ", ".join(values)
    query = f"select * from values ({columns}) as limits({named})"  # noqa: S608 - names of columns of ours
    return F.broadcast(spark.sql(query, args=values))


def count() -> Column:
    """Number of rows, for ``observed``."""
    return F.count(F.lit(1))
