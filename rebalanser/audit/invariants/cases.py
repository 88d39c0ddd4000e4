"""What the invariants judge: the tables made of a history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from rebalanser.audit.options import Options


@dataclass(frozen=True, slots=True)
class Case:
    """The tables that the invariants ask of. All are asked several times, and should be persisted."""

    records: DataFrame
    accesses: DataFrame
    suspects: DataFrame
    """``suspects`` of the accesses."""
    in_order: DataFrame | None
    """``suspects_in_order``; None where no access can hide another."""
    errors: DataFrame | None
    """``host_errors`` of the clocks; None if none is proven to be off."""
    options: Options
