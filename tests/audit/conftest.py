"""Small histories worked out by hand: many cases, each a group of its own, judged in one job."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import pytest
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.schema import RECORDS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOON = 1_700_000_000.0
"""The wall time that times of the cases are counted from, in seconds since 1970."""


@dataclass
class Histories:
    """Records of many groups. ``at`` is in seconds after noon, by the clock of the process's host."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    _numbers: Counter[str] = field(default_factory=Counter)

    def tell(self, group: str, who: str, step: str | None, at: float, **fields: Any) -> Self:
        """The next record of the process ``who``, whose host and boot are its own unless said otherwise."""
        process = f"{group}/{who}"
        row = dict.fromkeys(RECORDS.fieldNames()) | {
            "schema_version": 2,
            "protocol": "group",
            "group": group,
            "process": process,
            "node": f"{who}-0",
            "label": who,
            "incarnation": 0,
            "host": f"host-{who}",
            "boot": f"boot-{who}",
            "sequence": self._numbers[process],
            "kind": step or "left",
            "step": step,
            "term": 0,
            "version": 0,
            "wall_time": NOON + at,
            "monotonic_time": 5000.0 + at,
            "detail": {},
            "source": "case",
        }
        self._numbers[process] += 1
        self.rows.append(row | fields)
        return self

    def own(
        self, group: str, who: str, token: int | None, start: float, stop: float | None, **fields: Any
    ) -> Self:
        """One access from ``start`` to ``stop``, in good order; without ``stop`` it ends in silence.

        ``removed`` is the revision at which the barrier is removed, None for never, and ``asked`` how many
        seconds before that was asked for; ``barrier`` is whether there is one at all. OnStop ``raised``
        instead of returning where that is a time.
        """
        removed, asked, raised = (fields.pop(name, None) for name in ("removed", "asked", "raised"))
        barrier = fields.pop("barrier", True)
        known = {"resource": "p", "token": token} | fields
        if barrier:
            self.tell(group, who, "barrier_added", start - 0.02, **known, revision=token)
        self.tell(group, who, "start_entered", start, **known)
        self.tell(group, who, "start_returned", start, **known)
        if stop is not None:
            self.tell(group, who, "stop_entered", stop, **known)
            self.tell(group, who, "stop_returned", stop, **known)
        if raised is not None:
            self.tell(group, who, "stop_entered", raised, **known)
            self.tell(group, who, "stop_failed", raised, **known)
        if removed is not None:
            at = (stop or raised or start) + 0.01
            self.tell(group, who, "barrier_removed", at, **known, revision=removed, value=asked)
        return self

    def records(self, spark: SparkSession) -> DataFrame:
        """The records as the audit's functions get them, in an order that means nothing, each twice."""
        rows = [tuple(row[name] for name in RECORDS.fieldNames()) for row in self.rows]
        return spark.createDataFrame([*reversed(rows), *rows], RECORDS)

    def processes(self, records: DataFrame) -> DataFrame:
        """The table ``PROCESSES`` of these records."""
        keys = ("protocol", "group", "process", "node", "label", "host", "boot")
        extremes = (
            F.min("sequence").alias("first_sequence"),
            F.max("sequence").alias("last_sequence"),
            F.min("wall_time").alias("first_wall"),
            F.max("wall_time").alias("last_wall"),
            F.max("monotonic_time").alias("last_monotonic"),
        )
        return records.groupBy(*keys).agg(*extremes)


@pytest.fixture(scope="session")
def new_histories() -> type[Histories]:
    """Makes histories; those of a module are told at once and judged in one job."""
    return Histories
