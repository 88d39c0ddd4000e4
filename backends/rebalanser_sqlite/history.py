"""The changes for watches, kept for a bounded number of revisions and bytes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rebalanser.errors import QuotaExceeded
from rebalanser.registry.contract import Changed

if TYPE_CHECKING:
    from collections.abc import Callable

    from rebalanser_sqlite.store import Deadline, Store

T = TypeVar("T")

MAX_REVISIONS = 10_000
MAX_BYTES = 64 << 20
FORGET_STEP = 1_000
"""Number of revisions that are deleted at once, so that most transactions delete none."""
REVISIONS_PER_READ = 500

_ADVANCE = "UPDATE meta SET revision = ?, history_bytes = history_bytes + ?"
_STATE = "SELECT revision, forgotten_revision, history_bytes FROM meta"
_SIZE = (
    "SELECT coalesce(sum(length(key) + coalesce(length(value), 0)), 0) FROM changes "
    "WHERE revision > ? AND revision <= ?"
)
_DELETE = "DELETE FROM changes WHERE revision > ? AND revision <= ?"
_FORGOTTEN = "UPDATE meta SET forgotten_revision = ?, history_bytes = history_bytes - ?"
_READ = (
    "SELECT key, revision, value FROM changes WHERE revision >= ? AND revision <= ? ORDER BY revision, key"
)


@dataclass(frozen=True, slots=True)
class Extent:
    """The revisions whose changes are kept: those after ``forgotten`` up to ``latest``."""

    latest: int
    forgotten: int


def extent(store: Store) -> Extent:
    """Return the kept revisions, as this transaction sees them."""
    latest, forgotten, _ = store.connection.execute(_STATE).fetchone()
    return Extent(latest, forgotten)


def record_size(store: Store, revision: int, size: int) -> None:
    """Make ``revision`` the latest; its recorded keys and values have ``size`` bytes."""
    store.connection.execute(_ADVANCE, (revision, size))


def trim(store: Store) -> None:
    """Delete the oldest changes if there are more than the bounds allow."""
    latest, forgotten, size = store.connection.execute(_STATE).fetchone()
    if latest - forgotten >= MAX_REVISIONS + FORGET_STEP:
        forget(store, latest - MAX_REVISIONS)
    elif size > MAX_BYTES:
        forget_part(store, 2)


def forget_part(store: Store, part: int) -> None:
    """Delete the oldest one ``part``-th of the changes."""
    kept = extent(store)
    forget(store, kept.forgotten + (kept.latest - kept.forgotten + part - 1) // part)


def forget(store: Store, up_to: int) -> None:
    """Delete the changes up to and including a revision."""
    latest, forgotten, _ = store.connection.execute(_STATE).fetchone()
    bounds = (forgotten, min(up_to, latest))
    if bounds[0] < bounds[1]:
        (size,) = store.connection.execute(_SIZE, bounds).fetchone()
        store.connection.execute(_DELETE, bounds)
        store.connection.execute(_FORGOTTEN, (bounds[1], size))


def with_room(store: Store, write: Callable[[], T], deadline: Deadline) -> T:
    """Execute a write; if the disk is full, empty the log first, and then trim the history.

    Raises:
        QuotaExceeded: that does not make enough room either.
    """
    try:
        return write()
    except QuotaExceeded:
        store.checkpoint()
    try:
        return write()
    except QuotaExceeded:
        _forget_some(store, deadline)
    return write()


def _forget_some(store: Store, deadline: Deadline) -> None:
    """Delete as much of the history as the log has room for, as a deletion takes room there too."""
    for part in (2, 8, 32):
        with suppress(QuotaExceeded), store.writing(deadline):
            forget_part(store, part)
            return
        store.checkpoint()


def changes(store: Store, first: int, last: int) -> list[Changed]:
    """Return the changes of these revisions, in order."""
    return [Changed(*row) for row in store.connection.execute(_READ, (first, last))]
