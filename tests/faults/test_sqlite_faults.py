"""The SQLite registry among real processes that are killed, stopped, and out of space."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebalanser import Admin, Group, Settings
from rebalanser.errors import RegistryUnavailable, UnusableStore
from rebalanser.registry.contract import (
    Changed,
    Get,
    Grant,
    Granted,
    KeepAlive,
    KeyValue,
    Outcome,
    Put,
    Range,
    Target,
    Transaction,
)
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until
from rebalanser_sqlite import SqliteRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rebalanser.registry.contract import WatchEvent

PROLOGUE = """
import json, sys, time
from pathlib import Path
from rebalanser.errors import QuotaExceeded, RegistryUnavailable, UnusableStore
from rebalanser.registry.contract import *
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio
from rebalanser_sqlite import SqliteRegistry
registry = SqliteRegistry(Path(sys.argv[1]))
def commit(*then, guards=()):
    return registry.execute(Transaction(tuple(guards), then), PATIENCE_S)
"""
WRITER = """
for number in range(1, 1_000_000):
    print(commit(*(Put(f"{key}", b"%d" % number) for key in "abc")).revision, flush=True)
"""
LEASE_HOLDER = """
granted = registry.execute(Grant(2.0), PATIENCE_S)
print(commit(*(Put(f"node/{i}", b"", granted.lease) for i in range(3))).revision, flush=True)
while True:
    registry.execute(KeepAlive(granted.lease), PATIENCE_S)
    time.sleep(0.1)
"""
INCREMENTER = """
print("ready", flush=True)
sys.stdin.readline()
revisions, end = [], time.monotonic() + 1
while time.monotonic() < end or not revisions:
    current, = commit(Get("counter")).results
    done = commit(Put("counter", b"%d" % (int(current.value) + 1)),
                  guards=[Unchanged("counter", current.mod_revision)])
    if done.succeeded:
        revisions.append(done.revision)
print(json.dumps(revisions), flush=True)
"""
SIZE_LIMIT = """
import resource
commit(Put("first", b"1"))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
before, failures = 0, 0
for number in range(100):
    try:
        before = commit(Put(f"big/{number}", bytes(50_000))).revision
    except RegistryUnavailable as error:
        failures += 1
        assert "a limit on the size of files is reached" in str(error), error
        assert commit(Get("first")).revision == before, "a refused transaction had an effect"
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
after = commit(Put("last", b"2")).revision
print(json.dumps([failures, before, after]), flush=True)
"""
LOCK_HOLDER = """
connection = registry._store.connection
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
connection.execute("ROLLBACK")
"""


@contextmanager
def running(script: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with the registry at ``path`` open; killed at the end if it still runs."""
    command = [sys.executable, "-c", PROLOGUE + script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, f"the process ended with {process.wait()}"
    return text


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def read(registry: SqliteRegistry, key: str) -> KeyValue:
    outcome = registry.execute(Transaction(then=(Get(key),)), PATIENCE_S)
    assert isinstance(outcome, Outcome)
    (found,) = outcome.results
    assert isinstance(found, KeyValue)
    return found


class Told:
    """A sink that remembers what it was told and when."""

    def __init__(self) -> None:
        self._more = threading.Condition()
        self._events: list[tuple[float, WatchEvent]] = []

    def __call__(self, events: Sequence[WatchEvent]) -> None:
        with self._more:
            self._events += [(time.monotonic(), event) for event in events]
            self._more.notify_all()

    def wait_for(self, count: int) -> list[tuple[float, WatchEvent]]:
        with self._more:
            assert self._more.wait_for(lambda: len(self._events) >= count, timeout=PATIENCE_S), self._events
            return list(self._events)


@pytest.mark.rule("RB-28")
def test_a_writer_killed_in_the_middle_leaves_whole_transactions(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    with running(WRITER, path) as writer:
        for _ in range(100):
            line(writer)
        writer.kill()
        assert writer.stdout is not None
        answered = 100 + len(writer.stdout.read().split("\n")) - 1
    told = Told()
    with closing(SqliteRegistry(path)) as registry:
        outcome = registry.execute(Transaction(then=(Range(""),)), PATIENCE_S)
        assert isinstance(outcome, Outcome)
        revision, (found,) = outcome.revision, outcome.results
        assert revision in {answered, answered + 1}
        assert found == tuple(KeyValue(key, b"%d" % revision, 1, revision) for key in "abc")
        registry.watch(Target("", prefix=True), 1, told)
        changes = [event for _, event in told.wait_for(3 * revision)]
    assert changes == [
        Changed(key, number, b"%d" % number) for number in range(1, revision + 1) for key in "abc"
    ]


@pytest.mark.rule("RB-20")
def test_the_keys_of_a_killed_process_go_when_its_lease_ends(tmp_path: Path) -> None:
    path, told = tmp_path / "groups.db", Told()
    with running(LEASE_HOLDER, path) as holder, closing(SqliteRegistry(path)) as registry:
        put_at = int(line(holder))
        registry.watch(Target("node/", prefix=True), put_at + 1, told)
        time.sleep(2.5)
        assert read(registry, "node/0").create_revision == put_at, "a renewed lease ended"
        holder.kill()
        killed_at = time.monotonic()
        events = told.wait_for(3)
    assert 1.0 < events[0][0] - killed_at < 2.0 + patience_ratio()
    assert [event for _, event in events] == [Changed(f"node/{i}", put_at + 1, None) for i in range(3)]


def test_four_processes_lose_no_update(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    with (
        closing(SqliteRegistry(path)) as registry,
        running(INCREMENTER, path) as one,
        running(INCREMENTER, path) as two,
        running(INCREMENTER, path) as three,
        running(INCREMENTER, path) as four,
    ):
        registry.execute(Transaction(then=(Put("counter", b"0"),)), PATIENCE_S)
        processes = (one, two, three, four)
        for process in processes:
            line(process)
        for process in processes:
            tell(process)
        revisions = [json.loads(line(process)) for process in processes]
        total = int(read(registry, "counter").value)
    assert all(revisions), "a process was starved"
    assert sorted(chain.from_iterable(revisions)) == list(range(2, total + 2))


def test_processes_that_open_a_new_file_at_once_share_it(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    script = "print(commit(Put('k', b'')).revision, flush=True)"
    with (
        running(script, path) as one,
        running(script, path) as two,
        running(script, path) as three,
        running(script, path) as four,
    ):
        assert {int(line(process)) for process in (one, two, three, four)} == {1, 2, 3, 4}


def test_a_limit_on_file_sizes_is_refused_and_survived(tmp_path: Path) -> None:
    with running(SIZE_LIMIT, tmp_path / "groups.db") as process:
        failures, before, after = json.loads(line(process))
    assert failures > 50
    assert after == before + 1
    with closing(SqliteRegistry(tmp_path / "groups.db")) as registry:
        assert read(registry, "last").value == b"2"


@pytest.mark.parametrize("stopped", [False, True], ids=["holding", "holding-and-stopped"])
def test_a_lock_of_another_process_is_waited_for(tmp_path: Path, *, stopped: bool) -> None:
    path = tmp_path / "groups.db"
    with running(LOCK_HOLDER, path) as holder, closing(SqliteRegistry(path)) as registry:
        line(holder)
        if stopped:
            os.kill(holder.pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(RegistryUnavailable, match="locked by another process"):
            registry.execute(Transaction(then=(Put("k", b"refused"),)), 0.2)
        assert time.monotonic() - begun < 5.0 * patience_ratio()
        seen = registry.execute(Transaction(then=(Get("k"),)), 0.2)
        assert seen == Outcome(succeeded=True, revision=0, results=(None,)), (
            "a reader waited, or saw an effect"
        )
        threading.Timer(0.5, holder.kill if stopped else tell, () if stopped else (holder,)).start()
        done = registry.execute(Transaction(then=(Put("k", b"waited"),)), PATIENCE_S)
        assert time.monotonic() - begun > 0.5
        assert isinstance(done, Outcome)
        assert done.revision == 1


@pytest.mark.rule("RB-28")
def test_a_commit_whose_writer_died_before_it_rang_is_seen(tmp_path: Path) -> None:
    path, told = tmp_path / "groups.db", Told()
    silent = "import rebalanser_sqlite.store as s; s.Store.ring = lambda self: None\n"
    script = silent + "print('ready', flush=True); sys.stdin.readline(); commit(Put('k', b'v'))"
    with running(script, path) as writer, closing(SqliteRegistry(path)) as registry:
        line(writer)
        registry.watch(Target("k"), 1, told)
        tell(writer)
        assert [event for _, event in told.wait_for(1)] == [Changed("k", 1, b"v")]


HOLDER = """
while True:
    try:
        commit(Put("k", b"mine"))
        print("mine", flush=True)
    except UnusableStore as error:
        print(f"isolated: {error}", flush=True)
        sys.stdin.readline()
"""
OPENER = """
(found,) = commit(Get("k")).results
print("opened and found", found.value.decode() if found else "nothing", flush=True)
"""


@pytest.mark.rule("RB-1", "RB-21")
@pytest.mark.parametrize("suffixes", [("-wal", "-shm"), ("-wal",), ("-shm",)], ids=["both", "log", "memory"])
def test_a_log_that_is_removed_makes_no_second_history(tmp_path: Path, suffixes: tuple[str, ...]) -> None:
    path = tmp_path / "groups.db"
    with running(HOLDER, path) as holder:
        assert line(holder) == "mine\n"
        for suffix in suffixes:
            path.with_name(f"groups.db{suffix}").unlink()
        with pytest.raises(UnusableStore, match=r"another process has .* open, but .* is not there"):
            SqliteRegistry(path, 0.2)
        while (said := line(holder)) == "mine\n":
            pass
        assert said.startswith("isolated: ")
        assert "was removed or replaced while in use" in said
        with pytest.raises(UnusableStore, match="another process has"):
            SqliteRegistry(path, 0.2)
        holder.kill()
        holder.wait()
        with running(OPENER, path) as opener:
            assert line(opener) == f"opened and found {'nothing' if '-wal' in suffixes else 'mine'}\n"


def tokens_of_a_node(path: Path, meanwhile: Callable[[], object] = lambda: None) -> list[int]:
    """Run a node until it owns both resources of its group, and return their tokens."""
    group = Group("restored", f"sqlite:///{path}", settings=Settings(lease_ttl_s=2))
    group.on_start(lambda _: None)
    group.on_stop(lambda _: None)
    with group:
        wait_until(lambda: len(group.resources) == 2)
        meanwhile()
        return [owned.token for owned in group.resources.values()]


@pytest.mark.rule("RB-1", "RB-12")
@pytest.mark.parametrize("as_told", [True, False])
def test_tokens_only_grow_over_a_restore_as_the_guide_says(tmp_path: Path, as_told: bool) -> None:
    """They go back if only the file is put back. The backup has the lease of a node that has left since."""
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "sqlite.md").read_text()
    told = re.search(r'`sqlite3 orders.db "(UPDATE meta [^"]*)"`', guide)
    assert told is not None
    path, backup = tmp_path / "orders.db", tmp_path / "backup.db"

    def back_up() -> None:
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(backup)) as target:
            source.backup(target)

    with Admin("restored", f"sqlite:///{path}") as admin:
        admin.add("a", "b")
    tokens_of_a_node(path, back_up)
    forgotten = SqliteRegistry(path)
    for _ in range(100):
        forgotten.execute(Transaction(then=(Put("later", b""),)), PATIENCE_S)
    latest = max(tokens_of_a_node(path))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink()
    with pytest.raises(UnusableStore, match="removed or replaced while in use"):
        forgotten.execute(Transaction(then=(Get("later"),)), PATIENCE_S)
    forgotten.close()
    backup.replace(path)
    if as_told:
        with closing(sqlite3.connect(path)) as file, file:
            file.execute(told[1])
    assert (min(tokens_of_a_node(path)) > latest) == as_told


@pytest.mark.rule("RB-1")
def test_a_file_bind_mounted_alone_is_refused_and_its_folder_is_not(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "here" / "groups.db", tmp_path / "container"
    path.parent.mkdir()
    elsewhere.mkdir()
    (elsewhere / "groups.db").touch()
    isolated = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount --bind "$1" "$2" && shift 2 && "$@"',
        "sh",
    ]
    if subprocess.run([*isolated, str(path.parent), str(elsewhere), "true"], check=False).returncode:
        pytest.skip("this user may not mount in a namespace of its own")
    command = [sys.executable, "-c", PROLOGUE + OPENER, str(elsewhere / "groups.db")]
    with closing(SqliteRegistry(path)) as registry:
        registry.execute(Transaction(then=(Put("k", b"seen"),)), PATIENCE_S)
        file = subprocess.run(
            [*isolated, str(path), str(elsewhere / "groups.db"), *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "is a mount point itself" in file.stderr
        folder = subprocess.run(
            [*isolated, str(path.parent), str(elsewhere), *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert folder.stdout == "opened and found seen\n", folder.stderr


FULL_DISK = """
import os
lease = registry.execute(Grant(1000.0), PATIENCE_S).lease
def beat(times):
    for _ in range(times):
        registry.execute(KeepAlive(lease), PATIENCE_S)
def refusals(times, key, size):
    refused = 0
    for number in range(times):
        try:
            commit(Put(key(number), bytes(size)))
        except QuotaExceeded:
            refused += 1
    return refused
for number in range(200):
    commit(Put(f"k/{number % 5}", bytes(2000)))
folder = Path(sys.argv[1]).parent
with (folder / "filler").open("wb", buffering=0) as filler:
    try:
        while filler.write(bytes(4096)):
            pass
    except OSError:
        pass
beat(300)
changed = refusals(300, lambda number: f"k/{number % 5}", 2000)
beat(300)
new = refusals(300, lambda number: f"new/{number}", 10_000)
beat(300)
(folder / "filler").unlink()
commit(Put("new", bytes(1_000_000)))
print(json.dumps([changed, new]), flush=True)
"""
STOPPED_READER = """
connection = registry._store.connection
connection.execute("BEGIN")
connection.execute("SELECT * FROM meta").fetchall()
print("reading", flush=True)
sys.stdin.readline()
"""


@pytest.mark.rule("RB-21")
def test_heartbeats_go_on_while_the_disk_is_full(tmp_path: Path) -> None:
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mounted += ['mount -t tmpfs -o size=16m none "$1" && shift && "$@"', "sh", str(tmp_path)]
    if subprocess.run([*mounted, "true"], check=False).returncode:
        pytest.skip("this user may not mount in a namespace of its own")
    command = [*mounted, sys.executable, "-c", PROLOGUE + FULL_DISK, str(tmp_path / "groups.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    changed, new = json.loads(done.stdout)
    assert changed < 30, "the history made no room"
    assert new > 150


def test_a_stopped_reader_keeps_the_log_only_as_long_as_it_lives(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    log = path.with_name("groups.db-wal")
    with running(STOPPED_READER, path) as reader, closing(SqliteRegistry(path)) as registry:
        granted = registry.execute(Grant(1000.0), PATIENCE_S)
        assert isinstance(granted, Granted)

        def beat(times: int) -> int:
            for _ in range(times):
                registry.execute(KeepAlive(granted.lease), PATIENCE_S)
            return log.stat().st_size

        line(reader)
        os.kill(reader.pid, signal.SIGSTOP)
        short, long = beat(150), beat(450)
        assert long > 3 * short, "the log was emptied under a reader"
        reader.kill()
        reader.wait()
        beat(101)
        assert beat(300) <= long * 1.2
