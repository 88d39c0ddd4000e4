"""The tables that a report is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class ReportInput:
    """The tables of ``rebalanser.audit.tables`` under their names, and the verdict in words.

    Each is read several times: frames that are costly to compute should be cached or read from a file.
    """

    verdict: str
    findings: DataFrame
    gaps: DataFrame
    quarantine: DataFrame
    clocks: DataFrame
    processes: DataFrame
    accesses: DataFrame
    rebalances: DataFrame
    unavailability: DataFrame
    handlers: DataFrame
    balance: DataFrame
    leaders: DataFrame
    loads: DataFrame
