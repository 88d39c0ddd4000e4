"""One topic partition as a log: read in order to its end, append to it, and write several records at once.

**Threads.** A ``LogReader`` belongs to one thread at a time. A ``LogWriter`` may be used from every
thread; it has a thread of its own, in which ``on_done`` is called. A ``TransactionalWriter`` may be used
from every thread, one transaction at a time.

**The end.** A transaction leaves a control record, and one that was aborted leaves records that nobody sees,
so the last record read may well be far from the end. ``LogReader.position`` moves over them: read until
it has reached the ``end_offset`` that was asked for before.
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
