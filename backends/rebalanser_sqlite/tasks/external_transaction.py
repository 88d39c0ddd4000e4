"""A move inside a transaction of the application's own connection."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rebalanser.errors import InvalidState
from rebalanser_sqlite.tasks.writer import Writing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebalanser.core.tasks.store import Answer, Move

_DATABASES = "PRAGMA database_list"
_SYNCHRONOUS = "PRAGMA synchronous"
_FULL = 2
_NO_CHECKPOINTS = "PRAGMA wal_autocheckpoint = 0"


def carry_out(connection: sqlite3.Connection, path: Path, move: Move) -> Answer:
    """Make the move in the open transaction of the connection.

    Raises:
        InvalidState: the connection can't take it.
        sqlite3.Error: unchanged; nothing of the move is left in the transaction.
    """
    with _plain_cursor(connection) as cursor:
        _check(cursor, path)
        cursor.execute(_NO_CHECKPOINTS)
        with _savepoint(cursor):
            writing = Writing(cursor)
            answer = writing.carry_out(move)
            writing.finish()
        return answer


@contextmanager
def _plain_cursor(connection: sqlite3.Connection) -> Iterator[sqlite3.Cursor]:
    """Return a cursor that gives tuples of str and bytes, whatever factories the connection has."""
    text_factory = connection.text_factory
    connection.text_factory = str
    try:
        with closing(connection.cursor()) as cursor:
            cursor.row_factory = None
            yield cursor
    finally:
        connection.text_factory = text_factory


def _check(cursor: sqlite3.Cursor, path: Path) -> None:
    connection = cursor.connection
    if not connection.in_transaction:
        raise InvalidState("the connection is in no transaction: execute BEGIN IMMEDIATE on it first")
    file = next(file for _, name, file in cursor.execute(_DATABASES).fetchall() if name == "main")
    if not file or not Path(file).samefile(path):
        raise InvalidState(f"the connection is to {file or 'no file'} and the tasks are in {path}")
    if cursor.execute(_SYNCHRONOUS).fetchone()[0] < _FULL:
        raise InvalidState("the connection does not fsync its commits: set PRAGMA synchronous = FULL on it")


@contextmanager
def _savepoint(cursor: sqlite3.Cursor) -> Iterator[None]:
    cursor.execute("SAVEPOINT skuld_move")
    try:
        yield
    except BaseException:
        # If SQLite has rolled back the whole transaction, the savepoint is gone, too.
        with suppress(sqlite3.Error):
            cursor.execute("ROLLBACK TO skuld_move")
            cursor.execute("RELEASE skuld_move")
        raise
    cursor.execute("RELEASE skuld_move")
