"""The SQLite engine among real processes that are killed at each of their steps, and out of space."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.core.tasks.model import Head, Task
from rebalanser.core.tasks.store import Applied, Enqueue
from rebalanser.errors import QuotaExceeded
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_sqlite.tasks import SqliteEngine
from rebalanser_sqlite.tasks.schema import STATUSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebalanser.core.tasks.model import Stored
    from rebalanser.core.tasks.store import ChangesLost

SCRIPT = Path(__file__).with_name("task_writer.py")
QUEUE = "mail"

FULL_DISK = """
import json, resource, sys
from pathlib import Path
from rebalanser.errors import RegistryUnavailable
from rebalanser.core.tasks.store import *
from rebalanser.core.tasks.model import *
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_sqlite.tasks import SqliteEngine
engine = SqliteEngine(Path(sys.argv[1]))
engine.define("mail", 1, PATIENCE_S)
def task(number):
    return Enqueue(Task(Head(f"{number:040x}", "mail", "send"), bytes(50_000)), 0)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
applied, failures = [], 0
for number in range(60):
    try:
        engine.apply([task(number), task(1000 + number)], PATIENCE_S)
        applied += [number, 1000 + number]
    except RegistryUnavailable as error:
        failures += 1
        assert "a limit on the size of files is reached" in str(error), error
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
engine.apply([task(5000)], PATIENCE_S)
print(json.dumps([failures, [*applied, 5000]]), flush=True)
"""
CLAIMER = """
import json, sys
from dataclasses import replace
from pathlib import Path
from rebalanser.core.tasks.store import *
from rebalanser.core.tasks.model import *
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_sqlite.tasks import SqliteEngine
engine, name = SqliteEngine(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
won = []
while True:
    present = engine.read("mail", [f"{1:040x}"], PATIENCE_S)[f"{1:040x}"]
    number = 0 if present.state.claim is None else present.state.claim.number + 1
    if number == 150:
        break
    claim = ClaimState(number, name, name, ClaimTerm(30.0, "boot", 1.0), 1)
    move = Move(present.head.id, "mail", 0, present.revision, TaskState(Status.CLAIMED, claim),
                update=Update(number, 0, name.encode()))
    answer, = engine.apply([move], PATIENCE_S)
    if isinstance(answer, Applied):
        won.append(number)
print(json.dumps(won), flush=True)
"""
SILENT = """
import sys
from pathlib import Path
from rebalanser.core.tasks.store import *
from rebalanser.core.tasks.model import *
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_sqlite import store
from rebalanser_sqlite.tasks import SqliteEngine
store.Store.ring = lambda self: None
engine = SqliteEngine(Path(sys.argv[1]))
engine.apply([Enqueue(Task(Head(f"{2:040x}", "mail", "send"), b""), 0)], PATIENCE_S)
print("done", flush=True)
"""


def writer() -> Any:
    """The module that the children run."""
    spec = importlib.util.spec_from_file_location("task_writer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(base: Path, folder: Path, kind: str, numbers: range) -> None:
    folder.mkdir()
    places = map(str, (numbers.start, numbers.stop, numbers.step))
    subprocess.run(
        [sys.executable, str(SCRIPT), str(base), str(folder), kind, *places], check=True, timeout=PATIENCE_S
    )


def dump(path: Path) -> object:
    """All that can be seen in a file, checked against itself."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        counted = connection.execute("SELECT status, count(*) FROM skuld_tasks GROUP BY status").fetchall()
        outputs = connection.execute("SELECT task, content FROM outputs ORDER BY task").fetchall()
        owners = connection.execute("SELECT partition, token FROM skuld_owners").fetchall()
        loose = connection.execute(
            "SELECT task FROM (SELECT task FROM skuld_contents UNION SELECT task FROM skuld_updates UNION "
            "SELECT task FROM skuld_dependents) WHERE task NOT IN (SELECT number FROM skuld_tasks)"
        ).fetchall()
    assert loose == []
    with closing(SqliteEngine(path)) as engine:
        assert dict(engine.count(QUEUE, PATIENCE_S)) == {STATUSES[code]: tasks for code, tasks in counted}
        page = engine.page(QUEUE, PATIENCE_S)
        ids = [item.head.id for item in page.items]
        payloads = engine.payloads(QUEUE, ids, PATIENCE_S)
        logs = [engine.updates(QUEUE, task, PATIENCE_S) for task in ids]
    return (page, payloads, logs, outputs, owners)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a queue and a table of the application's own."""
    path = tmp_path_factory.mktemp("base") / "mail.db"
    writer().prepare(path)
    return path


@pytest.fixture(scope="module")
def expected(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """What the file holds after no step, after the first one, and so on."""
    path = tmp_path_factory.mktemp("expected") / "mail.db"
    shutil.copy(base, path)
    states = [dump(path)]
    for step in writer().steps(path):
        step()
        states.append(dump(path))
    assert all(earlier != later for earlier, later in pairwise(states)), "a step changes nothing"
    return states


def check_killed(folder: Path, expected: list[object]) -> list[tuple[int, int]]:
    """Every step answered is there and the next one is whole or absent: how many were, of those killed."""
    seen = []
    for path in sorted(folder.glob("*.db"), key=lambda path: int(path.stem)):
        answered = path.with_suffix(".answered")
        steps = len(answered.read_text().splitlines()) if answered.exists() else 0
        found = dump(path)
        whole = [number for number, state in enumerate(expected) if state == found]
        assert whole, f"killed at {path.stem} after {steps} steps, and the file is as after none of them"
        assert whole[0] - steps in {0, 1}, f"killed at {path.stem}: {steps} answered and {whole[0]} there"
        if path.with_suffix(".ended").read_text() == "killed":
            seen.append((steps, whole[0]))
    return seen


@pytest.mark.rule("SK-4", "SK-6", "SK-9", "SK-10", "SK-14", "SK-17")
def test_a_writer_killed_at_any_statement_leaves_whole_writes(
    base: Path, expected: list[object], tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    for first in range(1, 1000, 40):
        numbers = range(first, first + 40)
        run(base, tmp_path / str(first), "statement", numbers)
        killed = check_killed(tmp_path / str(first), expected)
        seen += killed
        if len(killed) < len(numbers):
            break
    assert len(seen) > 100, "so many statements write"
    assert {steps for steps, _ in seen} >= set(range(len(expected) - 1)), "a step was never cut off"
    assert any(steps < whole for steps, whole in seen), "nobody was killed between a commit and its answer"


@pytest.mark.rule("SK-4", "SK-6", "SK-9", "SK-10", "SK-14", "SK-17")
def test_a_writer_killed_in_the_middle_of_a_write_to_the_disk_leaves_whole_writes(
    base: Path, expected: list[object], tmp_path: Path
) -> None:
    folder = tmp_path / "size"
    run(base, folder, "size", range(33, 180, 2))  # the shared memory beside the log has 32 KiB at once
    seen = check_killed(folder, expected)
    assert len(seen) > 15
    assert len({steps for steps, _ in seen}) > 3, "the log grows over the sizes tried"


@pytest.mark.rule("SK-3", "SK-17")
def test_a_limit_on_file_sizes_is_refused_and_survived(tmp_path: Path) -> None:
    path = tmp_path / "mail.db"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    failures, applied = json.loads(done.stdout)
    assert failures > 30
    with closing(SqliteEngine(path)) as engine:
        assert [int(item.head.id, 16) for item in engine.page(QUEUE, PATIENCE_S).items] == sorted(applied)
        assert sum(engine.count(QUEUE, PATIENCE_S).values()) == len(applied)
        assert len(engine.payloads(QUEUE, [f"{number:040x}" for number in applied], PATIENCE_S)) == len(
            applied
        )


@pytest.mark.rule("SK-3")
def test_a_store_over_its_quota_takes_nothing_half(tmp_path: Path) -> None:
    def task(number: int, size: int) -> Enqueue:
        return Enqueue(Task(Head(f"{number:040x}", QUEUE, "send"), bytes(size)), 0)

    with closing(SqliteEngine(tmp_path / "mail.db")) as engine:
        engine.define(QUEUE, 1, PATIENCE_S)
        connection = engine._committer._store.connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 10}")
        engine.apply([task(1, 10)], PATIENCE_S)
        with pytest.raises(QuotaExceeded):
            engine.apply([task(2, 10), task(3, 100_000)], PATIENCE_S)
        assert [item.head.id for item in engine.page(QUEUE, PATIENCE_S).items] == [f"{1:040x}"]
        (answer,) = engine.apply([task(4, 10)], PATIENCE_S)
        assert answer == Applied(2)
        assert engine.count(QUEUE, PATIENCE_S) == {"waiting": 2}


@pytest.mark.rule("SK-6", "SK-9")
def test_four_processes_never_share_a_claim(tmp_path: Path) -> None:
    path = tmp_path / "mail.db"
    with closing(SqliteEngine(path)) as engine:
        engine.define(QUEUE, 1, PATIENCE_S)
        engine.apply([Enqueue(Task(Head(f"{1:040x}", QUEUE, "send"), b""), 0)], PATIENCE_S)
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", CLAIMER, str(path), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in "abcd"
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            won = [json.loads(process.communicate("go\n", timeout=PATIENCE_S)[0]) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert sorted(number for numbers in won for number in numbers) == list(range(150))
        winners = {number: name for name, numbers in zip("abcd", won, strict=True) for number in numbers}
        log = engine.updates(QUEUE, f"{1:040x}", PATIENCE_S)
        assert {update.claim: update.content.decode() for update in log} == winners


@pytest.mark.rule("SK-11", "SK-13")
def test_a_commit_that_nobody_rang_for_is_told(tmp_path: Path) -> None:
    path, told, more = tmp_path / "mail.db", [], threading.Event()

    def sink(items: Sequence[Stored] | ChangesLost) -> None:
        told.append(items)
        more.set()

    with closing(SqliteEngine(path)) as engine:
        engine.define(QUEUE, 1, PATIENCE_S)
        engine.watch(QUEUE, 0, sink)
        subprocess.run([sys.executable, "-c", SILENT, str(path)], check=True, timeout=PATIENCE_S)
        assert more.wait(PATIENCE_S)
        assert told == [list(engine.page(QUEUE, PATIENCE_S).items)]
