"""What the invariants judge: the tables made of a history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebalanser.audit.clocks import clocks, host_errors
from rebalanser.audit.successions import suspects

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from rebalanser.audit.options import Options


@dataclass(frozen=True, slots=True)
class Case:
    """The tables that the invariants ask of."""

    records: DataFrame
    accesses: DataFrame
    suspects: DataFrame
    """:func:`~rebalanser.audit.successions.suspects` of the accesses."""
    clocks: DataFrame
    """The table ``CLOCKS``."""
    errors: DataFrame
    """:func:`~rebalanser.audit.clocks.host_errors` of the clocks."""
    options: Options


def case(records: DataFrame, accesses: DataFrame, options: Options) -> Case:
    """What is to be judged, made anew: for one whole audit call it once, with both frames persisted."""
    return judged(records, accesses, suspects(accesses, options), options)


def judged(
    records: DataFrame,
    accesses: DataFrame,
    suspects: DataFrame,
    options: Options,
    apart: DataFrame | None = None,
) -> Case:
    """The same of :func:`~rebalanser.audit.successions.suspects` that were persisted before.

    ``apart`` is what :func:`~rebalanser.audit.clocks.clocks` made of them and the records, persisted too, for
    several invariants ask how far the clocks are apart; without it, it is made anew for each.
    """
    apart = clocks(records, suspects, options) if apart is None else apart
    return Case(records, accesses, suspects, apart, host_errors(apart), options)
