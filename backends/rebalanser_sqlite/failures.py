"""Maps SQLite's result codes to errors that say what the caller must do."""

from __future__ import annotations

import errno
import os
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
_NOT_WRITTEN = frozenset({sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
"""SQLite says so of every error of a write but ``ENOSPC``, and keeps the error's number to itself."""
_NO_EFFECT_AT_COMMIT = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE})
"""The commit frame, written last, did not get into the log whole. Any other failure may come after it."""
_UNUSABLE = {
    sqlite3.SQLITE_NOTADB: "is not an SQLite database; name another file",
    # SQLite says so of a page that the disk fails to read, too.
    sqlite3.SQLITE_CORRUPT: "is damaged, or its disk fails to read it: see the kernel's log for errors "
    "of the disk; if there are none restore the file, or name another one",
    sqlite3.SQLITE_READONLY: "is read-only; change the permissions of it and its folder",
    sqlite3.SQLITE_PERM: "may not be opened; change its permissions",
    sqlite3.SQLITE_AUTH: "may not be opened; change its permissions",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; check the permissions of it and its folder",
}


OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})


def code_of(error: BaseException) -> int:
    """SQLite's extended result code, or 0 for an error that is not SQLite's own."""
    code = getattr(error, "sqlite_errorcode", None)
    return code if isinstance(code, int) else 0


def is_busy(error: BaseException) -> bool:
    """Return True if another connection holds a lock that it will release, so that waiting helps."""
    return code_of(error) & _PRIMARY in _WAIT


def out_of_files(path: Path | str) -> RegistryUnavailable:
    """Return the error for a file that can't be opened now because no descriptor is left."""
    return RegistryUnavailable(
        f"{path} could not be opened: this process or this host has no file descriptor left; "
        "try again, close some, or raise the limit (ulimit -n)"
    )


def _is_out_of_files(path: Path) -> bool:
    """Return True if no descriptor is left; SQLite gives no reason, so this opens another file to see."""
    try:
        os.close(os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in OUT_OF_FILES
    return False


def failure(error: sqlite3.Error, path: Path) -> RebalanserError:
    """Return the error for a failure before ``COMMIT``: the transaction had no effect."""
    code = code_of(error)
    primary = code & _PRIMARY
    if primary in _WAIT:
        return RegistryUnavailable(f"{path} stayed locked by another process until the time limit; try again")
    if primary == sqlite3.SQLITE_FULL:
        return QuotaExceeded(f"no space to write {path} ({error}); free space on its disk or raise the quota")
    if code in _NOT_WRITTEN:
        return RegistryUnavailable(
            f"{path} or a file beside it could not be written ({error}): its disk fails, a quota is used up, "
            "or a limit on the size of files is reached; see the kernel's log"
        )
    if primary == sqlite3.SQLITE_CANTOPEN and _is_out_of_files(path):
        return out_of_files(path)
    if primary in _UNUSABLE:
        return UnusableStore(f"{path} {_UNUSABLE[primary]}")
    if primary == sqlite3.SQLITE_TOOBIG:
        return RequestTooLarge(f"a value is larger than SQLite allows ({error})")
    if primary in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT}:
        return RegistryUnavailable(f"{path} could not be read or written ({error}); check its disk")
    return InternalError(f"SQLite refused a statement on {path}: {error}")


def commit_failure(error: sqlite3.Error, path: Path) -> RebalanserError:
    """Return the error for a failure of ``COMMIT`` itself; only a full disk certainly had no effect."""
    code = code_of(error)
    if is_busy(error) or code in _NO_EFFECT_AT_COMMIT:
        return failure(error, path)
    return OutcomeUnknown(f"the disk of {path} failed while committing ({error}); read back what was written")
