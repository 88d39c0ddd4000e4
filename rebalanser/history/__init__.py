"""The ownership history: what each node did and when, for people and for the audit.

Group, Shiva, NELI and Skuld write what happens as an ``Event`` into a ``Journal``, which makes it a
``Record`` and gives it to a ``HistorySink``. Writing history never blocks or fails the writer; what
is dropped shows as a gap.
"""

from rebalanser.history.journal import Journal, author_here
from rebalanser.history.kinds import GAP, KINDS, KindNote, Protocol, SkuldKind, Step
from rebalanser.history.reader import Unreadable, UnreadableReason, read_line, read_records
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
    "Journal",
    "JsonlSink",
    "KindNote",
    "MemorySink",
    "NullSink",
    "Protocol",
    "Record",
    "SkuldKind",
    "Step",
    "TeeSink",
    "Unreadable",
    "UnreadableReason",
    "author_here",
    "describe",
    "event_of",
    "json_schema",
    "open_sinks",
    "read_line",
    "read_records",
]
