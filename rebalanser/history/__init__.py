"""The ownership history: each node's actions and their times, for people and for the audit.

Group, Shiva, NELI and Skuld write each ``Event`` to a ``Journal``, which makes it a ``Record`` and passes it
to a ``HistorySink``. Writing history never blocks or fails the writer; dropped records show as a gap.
"""

from rebalanser.history.journal import Journal, author_here
from rebalanser.history.kinds import GAP, KINDS, HistoryStep, KindNote, Protocol, SkuldKind
from rebalanser.history.reader import UnreadableLine, UnreadableReason, read_line, read_records
from rebalanser.history.records import (
    SCHEMA_VERSION,
    UNLIMITED_S,
    Author,
    Event,
    Record,
    event_of,
    json_schema,
)
from rebalanser.history.reference import describe
from rebalanser.history.sinks import HistorySink, JsonlSink, MemorySink, NullSink, TeeSink, open_sinks

__all__ = [
    "GAP",
    "KINDS",
    "SCHEMA_VERSION",
    "UNLIMITED_S",
    "Author",
    "Event",
    "HistorySink",
    "HistoryStep",
    "Journal",
    "JsonlSink",
    "KindNote",
    "MemorySink",
    "NullSink",
    "Protocol",
    "Record",
    "SkuldKind",
    "TeeSink",
    "UnreadableLine",
    "UnreadableReason",
    "author_here",
    "describe",
    "event_of",
    "json_schema",
    "open_sinks",
    "read_line",
    "read_records",
]
