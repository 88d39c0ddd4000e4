"""SQLite's result codes as errors that say what the caller must do."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from rebalanser.errors import (
    InternalError,
    OutcomeUnknown,
    QuotaExceeded,
    RebalanserError,
    RegistryUnavailable,
    RequestTooLarge,
    UnusableStore,
)

if TYPE_CHECKING:
    from pathlib import Path

_PRIMARY = 0xFF
_WAIT = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_NO_SPACE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
_NO_EFFECT_AT_COMMIT = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE})
"""The commit frame, written last, did not get into the log whole. Any other failure may come after it."""
_UNUSABLE = {
    sqlite3.SQLITE_NOTADB: "is not an SQLite database; name another file",
    sqlite3.SQLITE_CORRUPT: "is a damaged SQLite database; restore it or name another file",
    sqlite3.SQLITE_READONLY: "is read-only; change the permissions of it and its folder",
    sqlite3.SQLITE_PERM: "may not be opened; change its permissions",
    sqlite3.SQLITE_AUTH: "may not be opened; change its permissions",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; check the permissions of it and its folder",
}


def code_of(error: BaseException) -> int:
    """SQLite's extended result code, or 0 for an error that is not SQLite's own."""
    code = getattr(error, "sqlite_errorcode", None)
    return code if isinstance(code, int) else 0


def is_busy(error: BaseException) -> bool:
    """Whether another connection holds a lock that will be given back, so that waiting helps."""
    return code_of(error) & _PRIMARY in _WAIT


def failure(error: sqlite3.Error, path: Path) -> RebalanserError:
    """What an error before ``COMMIT`` means: the transaction had no effect."""
    code = code_of(error)
    primary = code & _PRIMARY
    if primary in _WAIT:
        return RegistryUnavailable(
            f"{path} stayed locked by another process until the time was up; try again"
        )
    if code in _NO_SPACE or primary in _NO_SPACE:
        return QuotaExceeded(f"no space to write {path} ({error}); free space on its disk or raise the quota")
    if primary in _UNUSABLE:
        return UnusableStore(f"{path} {_UNUSABLE[primary]}")
    if primary == sqlite3.SQLITE_TOOBIG:
        return RequestTooLarge(f"a value is larger than SQLite allows ({error})")
    if primary in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT}:
        return RegistryUnavailable(f"{path} could not be read or written ({error}); check its disk")
    return InternalError(f"SQLite refused a statement on {path}: {error}")


def commit_failure(error: sqlite3.Error, path: Path) -> RebalanserError:
    """What an error of ``COMMIT`` itself means: only a full disk is known to have had no effect."""
    code = code_of(error)
    if is_busy(error) or code in _NO_EFFECT_AT_COMMIT:
        return failure(error, path)
    return OutcomeUnknown(f"the disk of {path} failed while committing ({error}); read back what was written")
