"""When a document is published: not without need, not too often, one at a time (SH-8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from rebalanser.errors import InternalError
from rebalanser.shiva.changes import change_between
from rebalanser.shiva.options import LeaderOptions
from rebalanser.shiva.records import AssignmentDocument, DocumentChange
from rebalanser.shiva.types import ApplicationEntry, ApplicationId

ENTRIES_RATIO: Final = 4
"""Times as many entries as a document has that changes may have before the next whole one."""
LEAST_ENTRIES: Final = 50
"""Entries of changes that are not worth a whole document, however small that is."""


class Publisher:
    """The document that is known, the one under way, and whether another one is due."""

    def __init__(self, options: LeaderOptions) -> None:
        self.document: AssignmentDocument | None = None
        """The last one that is published; at first that of a predecessor."""
        self.under_way: AssignmentDocument | None = None
        self._options = options
        self._issued_at: float | None = None
        self._changed_at: float | None = None
        self._commanded = -1
        """The offset of the last command that a document must take into account."""
        self._whole_due = False
        self._whole_at = 0.0
        self._changes = 0
        self._changed_entries = 0

    @property
    def newest(self) -> AssignmentDocument | None:
        """The document under way, or else the last one published."""
        return self.under_way or self.document

    @property
    def settled(self) -> bool:
        """Whether the published document says all that there is to say."""
        return self.under_way is None and self._changed_at is None

    def changed(self, now: float) -> None:
        """Something is to be said that no document has said yet."""
        if self._changed_at is None:
            self._changed_at = now

    def commanded(self, offset: int, now: float) -> None:
        """Publish that the command at ``offset`` was read, even if it changes nothing (SH-18).

        The client of the second of two stops waits for that.
        """
        self._commanded = offset
        self.changed(now)

    def want_whole(self, now: float) -> None:
        """A worker does not follow: publish a whole document after changes, though nothing is new (SH-24)."""
        if self._changes:
            self._whole_due = True
            self.changed(now)

    def next_is_whole(self) -> None:
        """Publish the next document as a whole, whenever that is (SH-24)."""
        self._whole_due = True

    def due_at(self, applications: int) -> float | None:
        """When (monotonic seconds) a document of so many applications is due; None while none is."""
        if self._changed_at is None or self.under_way is not None:
            return None
        at = self._changed_at + self._options.settle_time_s
        if self._issued_at is None:
            return at
        return max(at, self._issued_at + self._options.publish_interval_s(applications))

    def issue(self, document: AssignmentDocument, now: float) -> bool:
        """Whether this is worth publishing: something is new in it beside what was read.

        The first document of a term always is, as it says who leads now (SH-20), and so is one that a client
        waits for. What is worth publishing is under way from now on.
        """
        self._changed_at = None
        if self._is_known(document) and not self._whole_due:
            return False
        self.under_way = document
        self._issued_at = now
        return True

    def change_under_way(self, now: float, all_read_changes: bool) -> DocumentChange | None:
        """What to write for the document under way; None for all of it (SH-24).

        The first document of a term is whole, as it may follow one of a leader that reads no changes. So a
        change and its base are of one leader.

        Raises:
            InternalError: no document is under way.
        """
        base, document = self.document, self.under_way
        if document is None:
            raise InternalError("no document is under way")
        if base is not None and base.epoch.term == document.epoch.term:
            change = change_between(base, document)
            if all_read_changes and not self._is_whole_due(document, change.entries, now):
                self._changes += 1
                self._changed_entries += change.entries
                return change
        self._whole_due, self._whole_at = False, now
        self._changes = self._changed_entries = 0
        return None

    def _is_whole_due(self, document: AssignmentDocument, entries: int, now: float) -> bool:
        """True if readers would have to read too much, or go back too far, without a whole document."""
        size = ENTRIES_RATIO * (len(document.applications) + len(document.workers))
        return (
            self._whole_due
            or self._changes >= self._options.snapshot_changes
            or self._changed_entries + entries > max(LEAST_ENTRIES, size)
            or now - self._whole_at >= self._options.snapshot_s
        )

    def _is_known(self, document: AssignmentDocument) -> bool:
        known = self.document
        return (
            known is not None
            and known.consumed >= self._commanded
            and document.epoch.term == known.epoch.term
            and document.deadline_s == known.deadline_s
            and document.round_s == known.round_s
            and document.set_aside == known.set_aside
            and document.workers == known.workers
            and document.cordons == known.cordons
            and _say_the_same(document.applications, known.applications)
        )

    def published(self) -> AssignmentDocument:
        """The document under way is published.

        Raises:
            InternalError: none is under way.
        """
        if self.under_way is None:
            raise InternalError("Published, but no document is under way")
        self.document, self.under_way = self.under_way, None
        return self.document


def _say_the_same(
    some: Mapping[ApplicationId, ApplicationEntry], others: Mapping[ApplicationId, ApplicationEntry]
) -> bool:
    """Whether two documents say the same of applications, wherever their start commands stand by now."""
    return len(some) == len(others) and all(
        entry is (other := others.get(application))
        or (
            other is not None
            and entry == replace(other, offset=entry.offset, timestamp_ms=entry.timestamp_ms)
        )
        for application, entry in some.items()
    )
