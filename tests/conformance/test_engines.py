"""The SQLite engine keeps the contract of engines."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from rebalanser.testing.engine_suite import EngineHarness, EngineSuite
from rebalanser_sqlite.tasks import SqliteEngine

if TYPE_CHECKING:
    from pathlib import Path

    from rebalanser.tasks.engine import Engine


class SqliteHarness(EngineHarness):
    """Connections to one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Engine:
        return SqliteEngine(self.path)

    def lose_history(self, revision: int) -> None:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute("DELETE FROM skuld_changes WHERE revision < ?", (revision,))
            connection.execute("UPDATE skuld_meta SET forgotten_to = ?", (revision - 1,))


class TestSqliteEngine(EngineSuite):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> EngineHarness:
        return SqliteHarness(tmp_path / "mail.db")
