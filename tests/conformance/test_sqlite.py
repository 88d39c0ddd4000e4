"""The SQLite registry keeps the contract of registries."""

from __future__ import annotations

import sqlite3
import weakref
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from rebalanser.testing import FakeClock
from rebalanser.testing.registry_suite import RegistryConformance, RegistryHarness
from rebalanser_sqlite import SqliteRegistry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebalanser.registry.contract import Registry


class SqliteHarness(RegistryHarness):
    """Connections to one file, whose leases are counted on a fake clock."""

    can_restart = False  # there is no server; tests/unit/test_sqlite_registry.py opens the file again
    prefix = "conformance/"
    min_ttl_s = 1.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = FakeClock()
        self.opened: weakref.WeakSet[SqliteRegistry] = weakref.WeakSet()

    def open(self) -> Registry:
        registry = SqliteRegistry(self.path, clock=self.clock, boot_id="this boot")
        self.opened.add(registry)
        return registry

    def let_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for registry in self.opened:
            registry.wake()

    def lose_history(self, revision: int) -> None:
        with_it = SqliteRegistry(self.path, clock=self.clock, boot_id="this boot")
        with_it.forget_history(revision)
        with_it.close()

    @contextmanager
    def cut_answers(self) -> Iterator[None]:
        with ExitStack() as stack:
            for registry in self.opened:
                store = registry._store
                stack.enter_context(
                    mock.patch.object(store, "connection", _FailsAfterCommit(store.connection))
                )
            yield

    @contextmanager
    def replace(self) -> Iterator[None]:
        files = [self.path, *(Path(f"{self.path}{suffix}") for suffix in ("-wal", "-shm"))]
        for file in files:
            file.rename(f"{file}.away")
        with closing(SqliteRegistry(self.path, clock=self.clock, boot_id="this boot")):
            yield
        for file in files:
            file.with_name(f"{file.name}.away").rename(file)


class _FailsAfterCommit:
    """A connection whose disk reports an error once it has the commit."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)

    def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:
        done = self._connection.execute(sql, *parameters)
        if sql == "COMMIT":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return done


@pytest.mark.rule("RB-20", "RB-21", "RB-28", "RB-33")
@pytest.mark.lesson(16)
class TestSqlite(RegistryConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> RegistryHarness:
        return SqliteHarness(tmp_path / "groups.db")
