"""Proves or refutes, from the history that all nodes wrote, that no resource ever had two owners.

**Theory of operation.** The history is a set of records, ``(process, sequence)`` naming each (AU-2). Nothing
is assumed of their order, their files or their number: a record may come twice, late, or not at all. So every
query is one whose result neither order nor duplicates change: minima, maxima and sets of bits, which Spark
computes where the data lies, before any exchange.

1. *Ingest* (``audit.ingest``) makes records of JSONL, Parquet and Kafka. All else goes to quarantine with its
   reason; nothing is discarded (AU-1).
2. *Sequences* (``audit.sequences``). The numbers of a process are cut into words of 64; a word of records
   becomes one number whose bits say which were seen. Missing bits are gaps, a count above the bits is
   duplicates. A million records are sixteen thousand words, spread over all tasks.
3. *Accesses* (``audit.accesses``). All steps that one process took with one token of one resource are one
   row: barrier added, OnStart entered, ..., barrier removed, each with its number and times (AU-3). From here
   on there is one row where there were six or more records.
4. *Clocks* (``audit.clocks``). Cause precedes effect: an allocation is adopted after it was published, a
   barrier added after its predecessor's was removed. Wall times that contradict it prove a least difference
   between two hosts' clocks. That and the stated ``clock_error_s`` are the uncertainty of a comparison
   between two hosts; times of one boot are of one clock and compare exactly (AU-5).
5. *Invariants* (``audit.invariants``), one function each (AU-4). An access that ended before its barrier was
   removed, at a revision before the next owner's token, cannot have overlapped the next one whatever the
   clocks say: revisions decide. Only the rest, those whose lease ended, is compared by time. A resource is
   ordered along its tokens with a running maximum in two levels (``audit.running_max``), so that a resource
   with a million accesses is no single task's burden.
6. *Findings* are given their evidence, the records that show them with file and line or partition and offset,
   and the gaps that could hide or explain them (``audit.evidence``).
7. *Metrics* and *weights* are aggregates of the same tables; the *report* draws from aggregates only.

**Certainty.** ``certain`` findings follow from order within one process, one clock, or revisions, or exceed
the uncertainty of the clocks. ``possible`` ones don't, or a gap could explain them. An access without a
recorded end is taken to last until the last record of its node: a killed process accesses nothing, and one
that hung shows it by its next record.

**As a stream** (``audit.streaming``) each micro-batch runs the same functions over new records and those
carried over (``audit.stream_state``), which belong to all that is not over.

``audit(spark, history)`` does all of it and returns an ``Audit``; it needs the extra ``spark``.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from rebalanser.errors import MissingExtra

if TYPE_CHECKING:
    from rebalanser.audit.options import Options
    from rebalanser.audit.result import Audit, audit, judge
    from rebalanser.audit.tables import Tables
    from rebalanser.audit.verdict import Conclusion, Verdict

__all__ = ["Audit", "Conclusion", "Options", "Tables", "Verdict", "audit", "judge"]

NEEDED: Final = ("pyspark", "plotly", "jinja2")

_HOMES: Final = MappingProxyType(
    {
        "Audit": "result",
        "Conclusion": "verdict",
        "Options": "options",
        "Tables": "tables",
        "Verdict": "verdict",
        "audit": "result",
        "judge": "result",
    }
)


def _check_extra() -> None:
    """Check that the packages of the extra are installed.

    Raises:
        MissingExtra: one is missing; the message says how to install it.
    """
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise MissingExtra(
            f"the audit needs {', '.join(missing)}, which is not installed: pip install 'rebalanser[spark]'"
        )


_check_extra()


def __getattr__(name: str) -> Any:
    """Load a public name at its first use: importing PySpark takes long."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"rebalanser.audit.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
