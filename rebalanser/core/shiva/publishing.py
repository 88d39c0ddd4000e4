"""Timing of documents: only if needed, not too often, one at a time (SH-8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from rebalanser.core.shiva.changes import change_between
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import AssignmentDocument, DocumentChange
from rebalanser.core.shiva.types import ApplicationEntry, ApplicationId
from rebalanser.errors import InternalError

ENTRIES_RATIO: Final = 4
"""Maximum ratio of the entries of changes to those of a document before the next whole one."""
LEAST_ENTRIES: Final = 50
"""Number of entries of changes that are never worth a whole document, however small that is."""


class Publisher:
    """The last document, the one under way, and the time of the next one."""

    def __init__(self, options: LeaderOptions) -> None:
        self.document: AssignmentDocument | None = None
        """The last one published; at first that of a predecessor."""
        self.under_way: AssignmentDocument | None = None
        self._options = options
        self._issued_at: float | None = None
        self._changed_at: float | None = None
        self._commanded = -1
        """Offset of the last command that a document must take into account."""
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
        """True if the published document is up to date."""
        return self.under_way is None and self._changed_at is None

    def changed(self, now: float) -> None:
        """Note a change that no document has yet."""
        if self._changed_at is None:
            self._changed_at = now

    def commanded(self, offset: int, now: float) -> None:
        """Publish that the command at ``offset`` was read, even if it changes nothing (SH-18).

        Its client, such as that of a second stop, waits for this.
        """
        self._commanded = offset
        self.changed(now)

    def want_whole(self, now: float) -> None:
        """Publish a whole document for a worker that does not follow, if changes were published (SH-24)."""
        if self._changes:
            self._whole_due = True
            self.changed(now)

    def next_is_whole(self) -> None:
        """Write the next document whole, whenever it is published (SH-24)."""
        self._whole_due = True

    def due_at(self, applications: int) -> float | None:
        """Return when (monotonic seconds) a document of N applications is due; None if none is."""
        if self._changed_at is None or self.under_way is not None:
            return None
        at = self._changed_at + self._options.settle_time_s
        if self._issued_at is None:
            return at
        return max(at, self._issued_at + self._options.publish_interval_s(applications))

    def issue(self, document: AssignmentDocument, now: float) -> bool:
        """True if the document is worth publishing: more is new in it than the consumed offset.

        The first document of a term always is, as it names the new leader (SH-20), and so is one that a
        client waits for. A document that is worth publishing is under way from now on.
        """
        self._changed_at = None
        if self._is_known(document) and not self._whole_due:
            return False
        self.under_way = document
        self._issued_at = now
        return True

    def change_under_way(self, now: float, all_read_changes: bool) -> DocumentChange | None:
        """Return the change to write for the document under way; None to write the whole document (SH-24).

        The first document of a term is whole, as it may follow one of a leader that reads no changes. So one
        leader writes a change and its base.

        Raises:
            InternalError: no document is under way.
        """
        base, document = self.document, self.under_way
        if document is None:
            raise InternalError("no document is under way")
        if all_read_changes and base is not None and base.epoch.term == document.epoch.term:
            change = change_between(base, document)
            if not self._is_whole_due(document, change.entries, now):
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
        """Note that the document under way is published.

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
    """True if two documents differ at most in the offsets of start commands."""
    return len(some) == len(others) and all(
        entry is (other := others.get(application))
        or (
            other is not None
            and entry == replace(other, offset=entry.offset, timestamp_ms=entry.timestamp_ms)
        )
        for application, entry in some.items()
    )
