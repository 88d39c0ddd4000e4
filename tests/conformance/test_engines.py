"""The SQLite engine keeps the contract of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rebalanser_sqlite.tasks import SqliteEngine

from rebalanser.testing.engine_suite import EngineHarness, EngineSuite

if TYPE_CHECKING:
    from pathlib import Path

    from rebalanser.tasks.engine import Engine


class SqliteHarness(EngineHarness):
    """Connections to one file."""

    can_lose_history = False  # the present states are all there is, and they are all kept

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Engine:
        return SqliteEngine(self.path)


class TestSqliteEngine(EngineSuite):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> EngineHarness:
        return SqliteHarness(tmp_path / "mail.db")
