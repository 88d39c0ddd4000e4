"""Leases: granting, renewal, and the end of those that are over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebalanser.errors import LeaseNotFound
from rebalanser.registry.contract import Granted, LeaseAge
from rebalanser_sqlite.history import record_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebalanser_sqlite.store import Store

MIN_TTL_S = 0.1

_OVER = "SELECT id FROM leases WHERE ends_at_s <= ? OR boot_id <> ? ORDER BY ends_at_s, id"
_NEXT_END = "SELECT min(CASE boot_id WHEN ? THEN ends_at_s ELSE 0 END) FROM leases"
_LIVING = "SELECT ttl_s, ends_at_s FROM leases WHERE id = ? AND ends_at_s > ? AND boot_id = ?"
_NEXT_ID = "UPDATE meta SET last_lease = last_lease + 1"
_LAST_ID = "SELECT last_lease FROM meta"
_GRANT = "INSERT INTO leases (id, ttl_s, ends_at_s, boot_id) VALUES (?, ?, ?, ?)"
_RENEW = "UPDATE leases SET ends_at_s = ? + ttl_s WHERE id = ?"
_SIZE_OF_KEYS = "SELECT count(*), coalesce(sum(length(key)), 0) FROM kv WHERE lease = ? AND lease <> 0"
_RECORD_KEYS = (
    "INSERT INTO changes (revision, key, value) SELECT ?, key, NULL FROM kv WHERE lease = ? AND lease <> 0"
)
_DELETE_KEYS = "DELETE FROM kv WHERE lease = ? AND lease <> 0"
_FORGET = "DELETE FROM leases WHERE id = ?"


def any_over(store: Store) -> bool:
    """Return True if a lease is over and not ended yet."""
    return store.connection.execute(_OVER, (store.clock.now(), store.boot_id)).fetchone() is not None


def end_those_over(store: Store) -> bool:
    """End every lease that is over, each at its own revision. Return True if a key was deleted."""
    over = store.connection.execute(_OVER, (store.clock.now(), store.boot_id)).fetchall()
    ended = [end(store, lease) for (lease,) in over]
    return any(ended)


def end(store: Store, lease: int) -> bool:
    """End one lease and delete its keys at one revision. Return True if it had any."""
    count, size = store.connection.execute(_SIZE_OF_KEYS, (lease,)).fetchone()
    if count:
        revision = store.revision() + 1
        store.connection.execute(_RECORD_KEYS, (revision, lease))
        store.connection.execute(_DELETE_KEYS, (lease,))
        record_size(store, revision, size)
    store.connection.execute(_FORGET, (lease,))
    return bool(count)


def next_end_s(store: Store) -> float | None:
    """Return the time on the store's clock at which the next lease is over; None without leases."""
    (ends_at_s,) = store.connection.execute(_NEXT_END, (store.boot_id,)).fetchone()
    return None if ends_at_s is None else float(ends_at_s)


def grant(store: Store, ttl_s: float) -> Granted:
    """Create a lease with an id that was never used."""
    granted_s = max(ttl_s, MIN_TTL_S)
    store.connection.execute(_NEXT_ID)
    (lease,) = store.connection.execute(_LAST_ID).fetchone()
    store.connection.execute(_GRANT, (lease, granted_s, store.clock.now() + granted_s, store.boot_id))
    return Granted(int(lease), granted_s)


def ages(store: Store, leases: Sequence[int]) -> dict[int, LeaseAge]:
    """Return the ages of these leases that live."""
    now = store.clock.now()
    found: dict[int, LeaseAge] = {}
    for lease in leases:
        for ttl_s, ends_at_s in store.connection.execute(_LIVING, (lease, now, store.boot_id)):
            found[lease] = LeaseAge(max(0.0, now + ttl_s - ends_at_s), ttl_s)
    return found


def keep_alive(store: Store, lease: int) -> None:
    """Renew a lease to its full time from now on.

    Raises:
        LeaseNotFound: it has ended.
    """
    if store.connection.execute(_RENEW, (store.clock.now(), lease)).rowcount == 0:
        raise LeaseNotFound(f"lease {lease} has ended")
