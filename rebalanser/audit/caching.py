"""Keeps Spark's plans short, and its jobs few."""

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
"""Storage of kept rows: as they are. To serialise them and read them back takes longer than most queries."""

Keep: TypeAlias = Callable[[str | None, DataFrame], DataFrame]
"""``keep(words, frame)``: returns the frame, kept by the caller as it is used several times.

With ``words``, a name of the step, it is computed at once, as by ``cut_off``; without, at its first use.
"""


def once(make: Callable[P, T]) -> Callable[P, T]:
    """Call ``make`` once for the same arguments: for columns, which only describe a computation.

    Each part of a column is made in the JVM, by a call of its own: thousands for each micro-batch. The
    arguments must be hashable, and what it gives must not be changed.
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

    What is made of a frame is otherwise planned from the files on, each time anew, which for a plan as long
    as the audit's takes longer than the work. The columns are new ones, so that the result can be joined with
    what it was made of. Spark frees the rows once the result is no longer referenced.
    """
    rows = frame.localCheckpoint(storageLevel=KEPT)
    return rows.select(*(F.col(f"`{name}`").alias(name) for name in rows.columns))


def computed(words: str | None, frame: DataFrame) -> DataFrame:
    """A ``Keep`` that only does what has to be done at once."""
    return frame if words is None else cut_off(frame)


def observed(keep: Keep, words: str, frame: DataFrame, **asked: Column) -> tuple[DataFrame, dict[str, Any]]:
    """What ``keep(words, frame)`` gives, and aggregates of its rows, found out as these are computed.

    A job that asks afterwards would take longer to plan than to run.
    """
    observation = Observation()
    columns = (column.alias(name) for name, column in asked.items())
    kept = keep(words, frame.observe(observation, *columns))
    return kept, observation.get


def limits(spark: SparkSession, **values: float | None) -> DataFrame:
    """One row with these columns, to be joined with others, for numbers that each micro-batch has anew.

    A literal is part of the code that Spark makes of a question: with another one, all is compiled again.
    """
    columns = ", ".join(f"cast(:{name} as double)" for name in values)
    named = ", ".join(values)
    query = f"select * from values ({columns}) as limits({named})"  # noqa: S608 - names of columns of ours
    return F.broadcast(spark.sql(query, args=values))


def count() -> Column:
    """How many rows there are, to be asked of ``observed``."""
    return F.count(F.lit(1))
