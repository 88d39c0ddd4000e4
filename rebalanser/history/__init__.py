"""The ownership history: what each node did and when, for people and for the audit.

A runtime turns each :class:`~rebalanser.protocol.messages.Fact` into a :class:`Record` and gives it to a
:class:`HistorySink`. Writing history never blocks or fails the node; what is dropped shows as a gap.
"""

from rebalanser.history.records import (
    GAP,
    SCHEMA_VERSION,
    Record,
    Unreadable,
    UnreadableReason,
    json_schema,
    read_records,
)
from rebalanser.history.reference import describe
from rebalanser.history.sinks import HistorySink, JsonlSink, MemorySink, NullSink

__all__ = [
    "GAP",
    "SCHEMA_VERSION",
    "HistorySink",
    "JsonlSink",
    "MemorySink",
    "NullSink",
    "Record",
    "Unreadable",
    "UnreadableReason",
    "describe",
    "json_schema",
    "read_records",
]
