"""Changes of documents, written in place of most whole documents (SH-24)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Final, TypeVar

from rebalanser.core.shiva.records import AssignmentDocument, DocumentChange, Progress
from rebalanser.core.shiva.types import ApplicationEntry
from rebalanser.errors import InternalError

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")
_PROGRESS: Final = tuple(field.name for field in fields(Progress))


def change_between(base: AssignmentDocument, document: AssignmentDocument) -> DocumentChange:
    """Return the change from the document published before, its base, to ``document`` of the same term."""
    known = base.applications
    differing = _difference(known, document.applications)
    progress = {
        application: _progress_of(entry)
        for application, entry in differing.items()
        if entry is not None and application in known and _with_progress(known[application], entry) == entry
    }
    applications = {
        application: entry for application, entry in differing.items() if application not in progress
    }
    return DocumentChange(
        epoch=document.epoch,
        base=base.epoch,
        consumed=document.consumed,
        deadline_s=document.deadline_s,
        workers=_difference(base.workers, document.workers),
        applications=MappingProxyType(applications),
        progress=MappingProxyType(progress),
        cordons=_difference(base.cordons, document.cordons),
        set_aside=None if document.set_aside == base.set_aside else document.set_aside,
    )


def changed(base: AssignmentDocument, change: DocumentChange) -> AssignmentDocument:
    """Return the document that a change makes of its base.

    Raises:
        InternalError: ``base`` is not the document that the change was made for.
    """
    if change.base != base.epoch:
        raise InternalError(f"a change of document {change.base} was applied to {base.epoch}")
    known = base.applications
    progressed = {
        application: _with_progress(known[application], progress)
        for application, progress in change.progress.items()
        if application in known
    }
    return replace(
        base,
        epoch=change.epoch,
        consumed=change.consumed,
        deadline_s=change.deadline_s,
        workers=_patched(base.workers, change.workers),
        applications=_patched(known, {**change.applications, **progressed}),
        cordons=_patched(base.cordons, change.cordons),
        set_aside=base.set_aside if change.set_aside is None else change.set_aside,
    )


def _progress_of(entry: ApplicationEntry) -> Progress:
    return Progress(**{name: getattr(entry, name) for name in _PROGRESS})


def _with_progress(entry: ApplicationEntry, progress: Progress | ApplicationEntry) -> ApplicationEntry:
    return replace(entry, **{name: getattr(progress, name) for name in _PROGRESS})


def _difference(before: Mapping[KeyT, ValueT], after: Mapping[KeyT, ValueT]) -> Mapping[KeyT, ValueT | None]:
    found: dict[KeyT, ValueT | None] = {}
    for key, value in after.items():
        known = before.get(key)
        if known is not value and known != value:
            found[key] = value
    found.update((key, None) for key in before if key not in after)
    return MappingProxyType(found)


def _patched(before: Mapping[KeyT, ValueT], change: Mapping[KeyT, ValueT | None]) -> Mapping[KeyT, ValueT]:
    if not change:
        return before
    after = dict(before)
    for key, value in change.items():
        if value is None:
            after.pop(key, None)
        else:
            after[key] = value
    return MappingProxyType(after)


class DocumentChain:
    """The newest document that a reader of a topic can rebuild from the records read so far.

    A leader of a version without changes goes on from the last whole document, although an application may
    run elsewhere by now. So its documents do not count once a change was read, until a leader that reads
    changes publishes a whole document.
    """

    def __init__(self) -> None:
        self.document: AssignmentDocument | None = None
        self.missed = False
        """True if a change was read without its base: the document is not the newest."""
        self._changes_read = False

    def read(self, record: AssignmentDocument | DocumentChange) -> bool:
        """Take in a record, in the order of the log; True if it makes a newer document."""
        known = self.document
        if known is not None and record.epoch <= known.epoch:
            return False
        if isinstance(record, DocumentChange):
            return self.take_change(record) is not None
        if not self.counts(record):
            return False
        self.take(record)
        return True

    def counts(self, document: AssignmentDocument) -> bool:
        """True if the document's leader cannot have overlooked a change."""
        return document.reads_changes or not self._changes_read

    def take(self, document: AssignmentDocument) -> None:
        """Go on from a whole document."""
        self.document = document
        self.missed = self._changes_read = False

    def follows(self, change: DocumentChange) -> bool:
        """True if the known document is the base of the change."""
        return self.document is not None and change.base == self.document.epoch

    def take_change(self, change: DocumentChange) -> AssignmentDocument | None:
        """Go on from the changed document and return it; None if the base was not read."""
        self._changes_read = True
        if self.document is None or not self.follows(change):
            self.missed = True
            return None
        self.document = changed(self.document, change)
        return self.document
