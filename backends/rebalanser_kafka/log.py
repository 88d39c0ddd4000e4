"""One topic partition as a log: reads in order to its end, appends, and atomic writes of several records.

**Threads.** A ``LogReader`` belongs to one thread at a time. A ``LogWriter`` may be used from every thread,
and calls ``on_done`` in a thread of its own. A ``TransactionalWriter`` may be used from every thread, one
transaction at a time.

**The end.** A transaction leaves a control record, and an aborted one leaves invisible records, so the last
record read may be far from the end. ``LogReader.position`` moves over them: read until it has reached an
``end_offset`` that was requested before.
"""

from __future__ import annotations

from rebalanser_kafka.failures import LogTruncated, OnDone
from rebalanser_kafka.reader import LogReader
from rebalanser_kafka.records import MAX_RECORD_BYTES, LogRecord, NewRecord
from rebalanser_kafka.transactions import GroupOffsets, StaleMembership, TransactionalWriter
from rebalanser_kafka.writer import LogWriter

__all__ = [
    "MAX_RECORD_BYTES",
    "GroupOffsets",
    "LogReader",
    "LogRecord",
    "LogTruncated",
    "LogWriter",
    "NewRecord",
    "OnDone",
    "StaleMembership",
    "TransactionalWriter",
]
