"""``rebalanser tasks``, called in this process on a queue in memory: what each command answers or refuses."""

from __future__ import annotations

import gc
import getpass
import json
import math
import os
import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from rebalanser.cli import main
from rebalanser.cli.tasks_options import retained
from rebalanser.cli.tasks_running import GC_THRESHOLD, collect_rarely
from rebalanser.core.tasks import rules
from rebalanser.core.tasks.ids import created_at, partition_of_task
from rebalanser.core.tasks.model import (
    AfterFailure,
    ClaimState,
    ClaimTerm,
    Head,
    Status,
    Stored,
    Task,
    TaskState,
    Update,
)
from rebalanser.core.tasks.retention import Retention
from rebalanser.core.tasks.rules import ClaimKey
from rebalanser.core.tasks.store import Applied, Enqueue, Move, Page
from rebalanser.tasks import AsyncQueues, Queue, Queues
from rebalanser.tasks.checking import Check, StoreFault
from rebalanser.tasks.engine import Engine
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.tasks.http import operations
from rebalanser.tasks.http.messages import NewTask
from rebalanser.tasks.retention import Sweeper
from rebalanser.testing.clock import FakeClock
from rebalanser.testing.waiting import PATIENCE_S

UNKNOWN = "0" * 40
TERM = ClaimTerm(30.0, "a boot", 100.0)


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def documents(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


class Stage:
    """The command line and a queue at the same place."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.queue = Queue("work", url, partitions=4, state_folder=folder)
        self._capsys = capsys

    def cli(self, *arguments: str) -> Answer:
        code = main(["tasks", *arguments])
        return Answer(code, *self._capsys.readouterr())

    def enqueue(
        self, *after: str, task_id: str | None = None, retries: int = 0, unknown: bool = False
    ) -> str:
        options = EnqueueOptions(after=after, task_id=task_id, waits_for_unknown=unknown)
        (task,) = self.queue.commit(
            [self.queue.build_raw_enqueue("send", b'{"to": "a"}', options, retries=retries)]
        )
        return task

    def write(self, task: str, state: TaskState | rules.Refused, update: Update | None = None) -> None:
        """Put a state there, whatever the rules say of it."""
        assert isinstance(state, TaskState)
        stored = self.queue.get(task)
        move = Move(task, "work", stored.partition, stored.revision, state, update=update, head=stored.head)
        (answer,) = self.queue.context.engine.apply([move], 1.0)
        assert isinstance(answer, Applied)

    def claim(self, task: str) -> ClaimKey:
        stored = self.queue.get(task)
        number = 0 if stored.state.claim is None else stored.state.claim.number + 1
        held = ClaimKey(number, f"holder {number}")
        self.write(task, rules.claim(stored.head, stored.state, held.holder, "me", TERM, over=True))
        return held

    def update(self, task: str, held: ClaimKey, content: bytes) -> None:
        state = self.queue.get(task).state
        assert state.claim is not None
        sequence = state.claim.updates
        decision = rules.update(state, held, sequence, content, None)
        self.write(task, decision, Update(held.number, sequence, content))

    def kill(self, task: str) -> None:
        """End its last try."""
        held = self.claim(task)
        stored = self.queue.get(task)
        self.write(task, rules.fail(stored.head, stored.state, held, "broken", None))

    def complete(self, task: str, result: bytes | None = None) -> None:
        held = self.claim(task)
        self.write(task, rules.complete(self.queue.get(task).state, held, result))


@pytest.fixture
def stage(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> Iterator[Stage]:
    url = f"memory://{request.node.nodeid}"
    monkeypatch.setenv("REBALANSER_REGISTRY", url)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    stage = Stage(url, capsys, tmp_path)
    with stage.queue:
        yield stage


def refused(answer: Answer, code: int, *fragments: str) -> None:
    assert (answer.code, answer.out) == (code, ""), answer
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1, answer.err
    for fragment in fragments:
        assert fragment in answer.err


@pytest.mark.rule("SK-12")
def test_the_status_of_a_queue_has_its_tasks_its_workers_and_their_troubles(stage: Stage) -> None:
    stage.enqueue()
    assert "oldest ready: waits for 0 s\nworkers: 0\n" in stage.cli("status", "work").out
    wall = time.time()
    trouble = {"loop": "claims", "kind": "outage", "error": "away\x1b", "since": wall - 61.0, "attempts": 7}
    note = {
        "worker": "me", "host": "h", "pid": 5, "started": wall - 900.0, "seen": wall - 7500.0,
        "concurrency": 4, "running": 3, "troubles": [trouble],
    }  # fmt: skip
    engine = stage.queue.context.engine
    engine.note_worker("work", "a", json.dumps(note).encode(), 10.0)
    server = note | {"worker": "web", "seen": wall, "concurrency": None, "running": None, "troubles": []}
    engine.note_worker("work", "b", json.dumps(server).encode(), 10.0)
    out = stage.cli("status", "work").out
    assert "waiting: 1\n" in out
    assert "  me on h, pid 5: runs 3 of 4, seen 2 h ago, SILENT\n" in out
    assert "    claims: outage for 1 min, 7 failed: 'away" in out
    assert "\x1b" not in out
    assert "  web on h, pid 5: serves, seen " in out
    (document,) = stage.cli("status", "work", "--json").documents
    assert document["counts"]["waiting"] == 1
    assert [each["troubles"] for each in document["workers"]] == [[trouble], []]


def test_a_queue_and_its_schedules_are_paused_and_resumed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    stage.enqueue()
    paused = stage.cli("pause", "work", "--reason", "no\x1bmail")
    assert " by ann@" in paused.out
    assert paused.out.endswith(": 'no\\x1bmail'\n")
    (again,) = stage.cli("pause", "work", "--reason", "other", "--json").documents
    assert (again["queue"], again["schedule"], again["pause"]["reason"]) == ("work", None, "no\x1bmail")
    misspelt = stage.cli("pause", "work", "--schedule", "nigthly")
    assert misspelt.code == 2
    assert (
        "queue work has no task of this function; there are tasks of: send. Is the name misspelt?"
        in " ".join(misspelt.err.split())
    )
    coming = stage.cli("pause", "work", "--schedule", "nigthly", "--yes")
    assert coming.out.startswith("schedule nigthly of queue work is PAUSED for ")
    assert "misspelt" not in stage.cli("pause", "work", "--schedule", "send").err
    out = stage.cli("status", "work").out
    assert "\nthe queue is PAUSED for " in out
    assert "\nschedule nigthly is PAUSED for " in out
    (document,) = stage.cli("status", "work", "--json").documents
    assert document["pauses"]["queue"]["since"] == again["pause"]["since"]
    assert set(document["pauses"]["schedules"]) == {"nigthly", "send"}
    listed = stage.cli("list", "work")
    assert "the queue is paused for " in listed.err
    assert len(listed.out.splitlines()) == 1
    assert stage.cli("resume", "work").out == "queue work is resumed\n"
    (document,) = stage.cli("resume", "work", "--json").documents
    assert document == {"queue": "work", "schedule": None, "pause": None}
    assert stage.cli("resume", "work").out == "queue work is not paused\n"
    for name in ("send", "nigthly"):
        resumed = stage.cli("resume", "work", "--schedule", name).out
        assert resumed == f"schedule {name} of queue work is resumed\n"
    again = stage.cli("resume", "work", "--schedule", "nigthly")
    assert (again.code, again.out) == (0, "schedule nigthly of queue work is not paused\n")
    for name, near in (("nightly", "nigthly"), ("sent", "send")):
        unknown = stage.cli("resume", "work", "--schedule", name)
        assert (unknown.code, unknown.out) == (3, "")
        told = f"no schedule of queue 'work' has the name '{name}': "
        assert told in " ".join(unknown.err.split())
        assert f"did you mean {near}?" in " ".join(unknown.err.split())
    far = " ".join(stage.cli("resume", "work", "--schedule", "xyz").err.split())
    assert far.endswith("there is no task of it")
    assert "PAUSED" not in stage.cli("status", "work").out
    assert "paused" not in stage.cli("list", "work").err


@pytest.mark.parametrize(("given", "seconds"), [("5m", 300.0), ("90", 90.0), ("0.5", 0.5), ("2h", 7200.0)])
def test_times_of_a_task_are_durations_as_elsewhere(stage: Stage, given: str, seconds: float) -> None:
    told = stage.cli(
        "enqueue", "work", "send", "{}", "--delay", given, "--timeout", given, "--unique-for", given
    )
    stored = stage.queue.get(told.out.split()[0])
    assert stored.state.due - created_at(stored.head.id) == pytest.approx(seconds, abs=PATIENCE_S)
    assert (stored.head.timeout_s, stored.head.unique_for_s) == (seconds, seconds)


@pytest.mark.parametrize("option", ["--delay", "--timeout", "--unique-for"])
@pytest.mark.parametrize("given", ["5 minutes", "-5", "nan", "inf", "1e3", "5M", ""])
def test_what_is_no_duration_is_refused_with_examples(stage: Stage, option: str, given: str) -> None:
    refused = stage.cli("enqueue", "work", "send", "{}", option, given)
    assert refused.code == 2
    told = " ".join(refused.err.split())
    assert f"invalid duration {given!r}: use seconds such as 30 or 0.5, or 90s, 15m, 2h, 3d or 1w" in told


@pytest.mark.parametrize("given", ["0.05", "soon"])
def test_a_claim_of_no_time_is_refused(stage: Stage, given: str) -> None:
    assert stage.cli("serve", "work", "--claim-ttl", given).code == 2


def test_who_pauses_has_a_name_without_an_account(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(getpass, "getuser", unknown)
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    (document,) = stage.cli("pause", "work", "--json").documents
    assert document["pause"]["by"].startswith("1234@")


@pytest.mark.rule("SK-3", "SK-12")
def test_a_task_is_enqueued_shown_and_counted(stage: Stage) -> None:
    first = stage.cli("enqueue", "work", "send", '{"to": "a"}', "--priority", "2").out.strip()
    second = stage.cli(
        "enqueue", "work", "send", "--after", first, "--retries", "0", "--timeout", "9.5", "--json"
    )
    shown = stage.cli("show", "work", first).out
    assert shown.startswith(f"{first} send: waiting, priority 2\n")
    assert 'payload: {"to": "a"}\n' in shown
    (document,) = stage.cli("show", "work", second.documents[0]["id"], "--json").documents
    assert (document["after"], document["retries"], document["timeout_s"]) == ([first], 0, 9.5)
    assert document["payload"] == {"value": {}, "base64": None}
    assert stage.cli("count", "work").out.startswith("waiting: 2\nclaimed: 0\n")
    assert stage.cli("count", "work", "--json").documents[0]["counts"]["waiting"] == 2


@pytest.mark.rule("SK-3")
def test_enqueueing_one_id_again_is_harmless_and_with_other_content_refused(stage: Stage) -> None:
    task = stage.queue.new_id()
    for _ in range(2):
        assert stage.cli("enqueue", "work", "send", "[1]", "--id", task).out == f"{task}\n"
    refused(stage.cli("enqueue", "work", "send", "[2]", "--id", task), 3, "other content")
    assert stage.queue.count()[Status.WAITING] == 1


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("enqueue", "work", "send", "{"), ("the arguments are not JSON",)),
        (("enqueue", "work", "send", "[NaN]"), ("the arguments are not JSON", "NaN")),
        (("enqueue", "work", "send", "[" * 250 + "]" * 250), ("the arguments are not JSON", "recursion")),
        (
            ("enqueue", "work", "send", "[" * 30_000 + "]" * 30_000),
            ("the arguments are not JSON", "recursion"),
        ),
        (("enqueue", "work", "send", "--after", "x"), ("after", "40 hexadecimal digits")),
        (("enqueue", "work", "send", "--after", UNKNOWN), (UNKNOWN, "does not exist")),
        (("enqueue", "work", "send", "--priority", "9999999999"), ("priority",)),
        (("enqueue", "work", "se\tnd"), ("unprintable",)),
        (("show", "work", UNKNOWN), (f"there is no task {UNKNOWN}",)),
        (("log", "work", UNKNOWN), (f"there is no task {UNKNOWN}",)),
        (("cancel", "work", UNKNOWN), (f"there is no task {UNKNOWN}", "nothing was changed")),
        (("list", "wrok"), ("there is no queue 'wrok'", "there are: work")),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    stage: Stage, arguments: tuple[str, ...], fragments: tuple[str, ...]
) -> None:
    refused(stage.cli(*arguments), 3, *fragments)
    assert stage.cli("list", "work").out == ""


@pytest.mark.parametrize(
    "command",
    [
        ("list",), ("count",), ("check",), ("collect",), ("show", UNKNOWN), ("log", UNKNOWN),
        ("cancel", UNKNOWN), ("requeue", "--all-dead"), ("enqueue", "send"), ("serve", "--port", "0"),
    ],
)  # fmt: skip
def test_a_mistyped_queue_is_not_made(stage: Stage, command: tuple[str, ...]) -> None:
    name, *rest = command
    answer = stage.cli(name, "wrok", *rest)
    refused(answer, 3, "there is no queue 'wrok'", "there are: work", stage.queue._url, "--registry")
    assert set(stage.queue.context.engine.queues(1.0)) == {"work"}


def test_a_queue_is_made_where_that_is_asked_for(stage: Stage) -> None:
    assert stage.cli("enqueue", "more", "send", "--create").code == 0
    assert set(stage.queue.context.engine.queues(1.0)) == {"more", "work"}


def test_an_answer_that_is_empty_says_so_to_people(stage: Stage, tmp_path: Path) -> None:
    assert stage.cli("list", "work") == Answer(0, "", "no tasks\n")
    assert stage.cli("list", "work", "--status", "dead") == Answer(0, "", "no such tasks\n")
    assert stage.cli("list", "work", "--json") == Answer(0, "", "")
    task = stage.enqueue()
    assert stage.cli("list", "work").err == ""
    assert stage.cli("log", "work", task) == Answer(0, "", "no updates\n")
    assert stage.cli("log", "work", task, "--json") == Answer(0, "", "")


def test_a_status_that_is_none_is_told_in_our_words(stage: Stage) -> None:
    refused(stage.cli("list", "work", "--status", "ded"), 2, "'--status': 'ded' is not one of 'waiting'")


def test_a_function_that_no_other_task_has_is_warned_of(stage: Stage) -> None:
    assert stage.cli("enqueue", "work", "send").err == ""
    assert stage.cli("enqueue", "work", "send").err == ""
    answer = stage.cli("enqueue", "work", "sned")
    assert answer.code == 0
    assert "is it misspelt?" in answer.err
    assert "known=send" in answer.err


@pytest.mark.rule("SK-12")
def test_tasks_are_listed_page_by_page_as_they_are_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [stage.enqueue() for _ in range(5)]
    stage.kill(ids[1])
    lines = stage.cli("list", "work").out.splitlines()
    assert [line.split()[0] for line in lines] == ids
    assert lines[1] == f"{ids[1]} send: dead, claim 0 of me, failed 1 of 1 tries"
    documents = stage.cli("list", "work", "--status", "dead", "--status", "completed", "--json").documents
    assert [each["id"] for each in documents] == [ids[1]]
    asked: list[int] = []
    page = type(stage.queue.context.engine).page

    def counted(engine: Engine, *arguments: Any, **named: Any) -> Page:
        asked.append(named["limit"])
        return page(engine, *arguments, **named)

    monkeypatch.setattr(type(stage.queue.context.engine), "page", counted)
    assert len(stage.cli("list", "work", "--limit", "2").out.splitlines()) == 2
    assert asked == [2]


@pytest.mark.rule("SK-9")
def test_a_log_keeps_what_earlier_claims_wrote(stage: Stage) -> None:
    task = stage.enqueue(retries=3)
    stage.update(task, stage.claim(task), b'"half"')
    held = stage.claim(task)
    stage.update(task, held, b"\xff")
    stage.update(task, held, b"2")
    told = 'claim 0, update 0: "half"\nclaim 1, update 0: base64 /w==\nclaim 1, update 1: 2\n'
    assert stage.cli("log", "work", task).out == told
    documents = stage.cli("log", "work", task, "--json").documents
    assert [(each["claim"], each["sequence"]) for each in documents] == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.rule("SK-15")
def test_dead_letters_are_requeued_and_tasks_cancelled(stage: Stage) -> None:
    dead = [stage.enqueue() for _ in range(3)]
    for task in dead:
        stage.kill(task)
    done, waiting = stage.enqueue(), stage.enqueue()
    stage.complete(done)
    assert stage.cli("requeue", "work", dead[0], waiting).out == (
        "requeued 1 task; 1 was neither dead nor cancelled\n"
    )
    (document,) = stage.cli("requeue", "work", "--all-dead", "--json").documents
    assert document == {"queue": "work", "given": 2, "requeued": 2}
    assert stage.cli("cancel", "work", done, waiting).out == "cancelled 1 task; 1 was complete\n"
    assert {status: count for status, count in stage.queue.count().items() if count} == {
        Status.WAITING: 3, Status.COMPLETED: 1, Status.CANCELLED: 1,
    }  # fmt: skip
    assert stage.cli("requeue", "work").code == 2
    assert stage.cli("requeue", "work", waiting, "--all-dead").code == 2


@pytest.mark.rule("SK-14")
@pytest.mark.usefixtures("open_umask")
def test_what_is_complete_and_old_is_collected_into_a_file(stage: Stage, tmp_path: Path) -> None:
    done, needed = stage.enqueue(), stage.enqueue()
    depends = stage.enqueue(needed)
    for task in (done, needed):
        stage.complete(task, b"1")
    archive = tmp_path / "done.jsonl"
    assert stage.cli("collect", "work").out == "collected 0 tasks\n", "all of it is younger than a day"
    assert stage.cli("collect", "work", "--older-than", "1w").out == "collected 0 tasks\n"
    answer = stage.cli("collect", "work", "--older-than", "0s", "--archive", str(archive))
    assert answer.out == "collected 1 task\n", "what another task depends on stays"
    (line,) = archive.read_text().splitlines()
    assert json.loads(line)["head"]["id"] == done
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600, "it holds payloads"
    stage.complete(depends)
    (document,) = stage.cli("collect", "work", "--older-than", "0s", "--json").documents
    assert document == {"queue": "work", "collected": 2, "changed": 0}
    assert list(stage.queue.tasks()) == []
    archive.chmod(0o640)
    stage.complete(stage.enqueue())
    assert stage.cli("collect", "work", "--older-than", "0s", "--archive", str(archive)).code == 0
    assert stat.S_IMODE(archive.stat().st_mode) == 0o640, "one that is there keeps its mode"


@pytest.mark.rule("SK-14")
def test_nothing_is_collected_that_could_not_be_written_first(stage: Stage, tmp_path: Path) -> None:
    task = stage.enqueue()
    stage.complete(task)
    answer = stage.cli("collect", "work", "--older-than", "0s", "--archive", str(tmp_path / "no" / "file"))
    refused(answer, 3, "collected tasks can't be written to")
    assert stage.queue.get(task).state.status is Status.COMPLETED
    answer = stage.cli("collect", "work", "--older-than", "yesterday")
    assert (answer.code, answer.out) == (2, "")
    assert "invalid duration 'yesterday': use one such as 90s" in answer.err


def test_what_a_task_says_gives_no_orders_to_the_terminal(stage: Stage) -> None:
    task = stage.enqueue()
    held = stage.claim(task)
    stored = stage.queue.get(task)
    stage.write(task, rules.fail(stored.head, stored.state, held, "line\n\x1b[2J", None))
    assert "\x1b" not in stage.cli("show", "work", task).out
    assert "last error: line\n" in stage.cli("show", "work", task).out


@pytest.mark.rule("SK-6", "SK-9", "SK-10")
def test_a_sound_store_has_no_findings(stage: Stage) -> None:
    done = stage.enqueue()
    stage.complete(done, b"1")
    stage.kill(stage.enqueue(done))
    retried = stage.enqueue(done, retries=1)
    stage.update(retried, stage.claim(retried), b"a")
    stage.update(retried, stage.claim(retried), b"b")
    answer = stage.cli("check", "work")
    assert (answer.code, answer.out) == (0, "checked 3 tasks: 0 findings\n")


def faults(stage: Stage) -> dict[str, set[str]]:
    answer = stage.cli("check", "work", "--json")
    *findings, summary = answer.documents
    assert answer.code == (1 if findings else 0)
    assert summary["findings"] == len(findings)
    found: dict[str, set[str]] = {}
    for each in findings:
        found.setdefault(each["fault"], set()).add(each["task"])
    return found


@pytest.mark.rule("SK-9")
def test_a_log_with_a_gap_is_found(stage: Stage) -> None:
    task = stage.enqueue()
    held = stage.claim(task)
    state = stage.queue.get(task).state
    assert state.claim is not None
    claimed = replace(state, claim=replace(state.claim, updates=2))
    stage.write(task, claimed, Update(held.number, 1, b"second"))
    assert faults(stage) == {"log_gap": {task}}


@pytest.mark.rule("SK-6", "SK-9")
def test_a_log_that_its_state_does_not_count_is_found(stage: Stage) -> None:
    more, unclaimed = stage.enqueue(), stage.enqueue()
    held = stage.claim(more)
    stage.write(more, replace(stage.queue.get(more).state, error="x"), Update(held.number, 0, b"uncounted"))
    stage.write(unclaimed, TaskState(error="x"), Update(0, 0, b"of no claim"))
    assert faults(stage) == {"log_count": {more}, "unknown_claim": {unclaimed}}


@pytest.mark.rule("SK-10")
@pytest.mark.parametrize(
    "state",
    [
        TaskState(Status.COMPLETED),
        TaskState(Status.CLAIMED),
        TaskState(Status.DEAD),
        TaskState(result=b"1"),
        TaskState(failures=3),
        TaskState(failures=-1),
        TaskState(Status.CLAIMED, ClaimState(0, "holder", "me", TERM), due=5.0),
        TaskState(Status.CLAIMED, ClaimState(0, "", "me", TERM)),
        TaskState(Status.CANCELLED, ClaimState(-1, "holder", "me", TERM)),
    ],
)
def test_a_state_that_contradicts_itself_is_found(stage: Stage, state: TaskState) -> None:
    task = stage.enqueue()
    stage.write(task, state)
    assert faults(stage) == {"contradiction": {task}}


@pytest.mark.rule("SK-5")
def test_dependencies_that_can_never_be_complete_are_found(stage: Stage) -> None:
    lost = stage.enqueue(UNKNOWN, unknown=True)
    a, b = stage.queue.new_id(), stage.queue.new_id()
    engine = stage.queue.context.engine
    for task, needed in ((a, b), (b, a)):
        made = stage.queue.build_raw_enqueue(
            "send", b"{}", EnqueueOptions(task_id=task, after=(needed,), waits_for_unknown=True)
        )
        engine.apply([made], 1.0)
    early = stage.enqueue(a)
    stage.claim(early)
    found = faults(stage)
    assert found.pop("cycle") <= {a, b}
    assert found == {"unknown_dependency": {lost}, "too_early": {early}}


@pytest.mark.rule("SK-5")
def test_what_waits_for_a_dead_or_cancelled_task_says_so(stage: Stage) -> None:
    dead, cancelled, done = stage.enqueue(), stage.enqueue(), stage.enqueue()
    stage.kill(dead)
    stage.queue.cancel(cancelled)
    stage.complete(done)
    first = stage.enqueue(dead, done)
    second = stage.enqueue(first, cancelled)
    free = stage.enqueue(done)
    assert faults(stage) == {"blocked": {first, second}}
    listed = {each["id"]: each["blocked_by"] for each in stage.cli("list", "work", "--json").documents}
    assert {task: {each["id"] for each in blockers} for task, blockers in listed.items() if blockers} == {
        first: {dead},
        second: {dead, cancelled},
    }
    assert f"waits for {dead}, which is dead" in stage.cli("list", "work").out
    shown = stage.cli("show", "work", second).out
    assert f"waits for {dead} send, which is dead: requeue that one, or cancel this one" in shown
    assert f"waits for {cancelled} send, which is cancelled" in shown
    assert stage.cli("show", "work", free, "--json").documents[0]["blocked_by"] == []
    assert [each.id for each in operations.full_document(stage.queue, first).blocked_by] == [dead]
    over_http = {
        each.id: len(each.blocked_by)
        for each in operations.task_documents(stage.queue, None, after=None, limit=5)
    }
    assert over_http == {dead: 0, cancelled: 0, done: 0, first: 1, second: 2}
    stage.queue.requeue(dead)
    assert [each.id for each in operations.full_document(stage.queue, second).blocked_by] == [cancelled]


@pytest.mark.rule("SK-23")
def test_a_limited_task_says_what_holds_it_back(stage: Stage) -> None:
    refused(stage.cli("enqueue", "work", "send", "--key", "a"), 2, "--key needs --max-running-per")
    made = ("enqueue", "work", "send", "--max-running-per-key", "1", "--key", "customer 7")
    task = stage.cli(*made).out.strip()
    listed = stage.cli("list", "work").out
    assert listed == f"{task} send: waiting, its limit has room\n"
    shown = stage.cli("show", "work", task).out
    assert "limit: at most 1 of its name with key customer 7 run at once\n" in shown
    (told,) = stage.cli("list", "work", "--json").documents
    assert (told["limit_key"], told["max_running"]) == ("customer 7", 1)
    assert stage.queue.get(task).partition == partition_of_task(stage.queue.get(task).head, 4)
    assert faults(stage) == {}
    stage.claim(task)
    assert "held back" not in stage.cli("list", "work").out
    following = stage.cli(*made).out.strip()
    held = f"{following} send: waiting, held back while 1 of its name with key customer 7 run\n"
    assert held in stage.cli("list", "work").out
    assert held in stage.cli("show", "work", following).out
    told = operations.full_document(stage.queue, following).room
    assert told is not None
    assert (told.running, told.at) == (1, 0.0)
    few = stage.cli("enqueue", "work", "send", "--max-running", "2").out.strip()
    assert f"{few} send: waiting, its limit has room\n" in stage.cli("list", "work").out
    assert "limit: at most 2 of its name run at once\n" in stage.cli("show", "work", few).out
    refused(stage.cli(*made, "--max-running", "2"), 3, "not both")
    refused(stage.cli("enqueue", "work", "send", "--max-running", "0"), 3, "max_running")
    rate = ("enqueue", "work", "call", "--rate-limit-per-key", "100/m burst 20", "--key", "customer 7")
    called = stage.cli(*rate).out.strip()
    assert (
        "rate limit: 100/m burst 20 of its name with key customer 7\n"
        in stage.cli("show", "work", called).out
    )
    assert f"{called} call: waiting, its limit has room\n" in stage.cli("list", "work").out
    refused(stage.cli("enqueue", "work", "call", "--rate-limit", "100/d"), 3, "invalid rate '100/d'")


@pytest.mark.rule("SK-23")
def test_a_duplicate_says_that_it_is_one(stage: Stage) -> None:
    keyed = ("enqueue", "work", "send", "--unique-key", "customer 7", "--unique-for", "60")
    task = stage.cli(*keyed).out.strip()
    assert stage.cli(*keyed).out == f"{task}\nduplicate\n"
    (document,) = stage.cli(*keyed, "--json").documents
    assert document == {"queue": "work", "id": task, "answer": "duplicate"}
    shown = stage.cli("show", "work", task)
    assert "unique key: customer 7, while it is open, and for 60 s from when it was enqueued\n" in shown.out
    (told,) = stage.cli("show", "work", task, "--json").documents
    assert (told["unique_key"], told["unique_for_s"]) == ("customer 7", 60.0)
    by_arguments = [
        stage.cli("enqueue", "work", "send", each, "--unique-for", "0").out for each in ("{}", "[]")
    ]
    assert (
        stage.cli("enqueue", "work", "send", "{}", "--unique-for", "0").out == f"{by_arguments[0]}duplicate\n"
    )
    assert len(set(by_arguments)) == 2
    assert "and for" not in stage.cli("show", "work", by_arguments[0].strip()).out
    refused(stage.cli("enqueue", "work", "send", "--unique-for", "-1"), 2, "--unique-for")


@pytest.mark.rule("SK-5")
def test_a_task_says_whose_results_it_gets(stage: Stage) -> None:
    first, second = stage.enqueue(), stage.enqueue()
    given = ("--result", f"to={first}", "--result", f"copies={first},{second}")
    last = stage.cli("enqueue", "work", "send", '{"at": 1}', *given).out.strip()
    shown = stage.cli("show", "work", last).out
    assert f"after: {first}\nafter: {second}\n" in shown
    assert 'payload: {"at": 1}\n' in shown
    assert f"gets as to: the result of {first}\n" in shown
    assert f"gets as copies: the results of {first}, {second}\n" in shown
    (document,) = stage.cli("show", "work", last, "--json").documents
    assert document["results"] == {"to": first, "copies": [first, second]}
    refused(stage.cli("enqueue", "work", "send", "--result", "to"), 3, "--result 'to': write FIELD=ID")
    for ids in ("x", f"{first},x"):
        refused(stage.cli("enqueue", "work", "send", "--result", f"to={ids}"), 3, "'x' is not a task's id")
    refused(stage.cli("enqueue", "work", "send", "[]", *given), 3, "must be a JSON object")
    twice = stage.cli("enqueue", "work", "send", '{"to": "a"}', *given)
    refused(twice, 3, "already has a field that is to get a result: to")
    odd = Task(Head(stage.queue.new_id(), "work", "send"), b'{"$results": 7}')
    (task,) = stage.queue.commit([Enqueue(odd, 0)])
    assert 'payload: {"$results": 7}' in stage.cli("show", "work", task).out


@pytest.mark.rule("SK-5")
def test_what_runs_or_fails_after_a_failure_says_so(stage: Stage) -> None:
    dead = stage.enqueue()
    stage.kill(dead)
    made = [
        stage.cli("enqueue", "work", "send", "--after", dead, "--after-failure", choice).out.strip()
        for choice in AfterFailure
    ]
    waits, runs, fails = made
    assert stage.cli("enqueue", "work", "send", "--after-failure", "stop").code == 2
    found = {each["id"]: each for each in stage.cli("list", "work", "--json").documents}
    assert [found[task]["after_failure"] for task in made] == ["wait", "run", "fail"]
    assert [len(found[task]["blocked_by"]) for task in made] == [1, 0, 1]
    listed = stage.cli("list", "work").out
    assert f"{runs} send: waiting, after 1, else run\n" in listed
    shown = stage.cli("show", "work", fails).out
    assert f"after: {dead}, else fail\n" in shown
    assert "which is dead: a worker that has its function makes it dead" in shown
    assert faults(stage) == {"blocked": {waits}}
    stage.write(fails, TaskState(Status.DEAD, error="it depends on another"))
    stage.claim(runs)
    assert faults(stage) == {"blocked": {waits}}, "one was claimed, and one died, as they may"
    over_http = NewTask.model_validate(
        {"name": "send", "payload": {"value": {}}, "after": [dead], "after_failure": "fail"}
    )
    task = operations.enqueue(stage.queue, over_http)
    assert operations.full_document(stage.queue, task).after_failure is AfterFailure.FAIL


@pytest.mark.rule("SK-1", "SK-2")
def test_an_id_that_is_none_and_a_wrong_partition_are_found(stage: Stage) -> None:
    right = stage.queue.build_raw_enqueue("send", b"{}", EnqueueOptions())
    strange = Enqueue(Task(Head("no flake", "work", "send"), b"{}"), 0)
    stage.queue.context.engine.apply([replace(right, partition=(right.partition + 1) % 4), strange], 1.0)
    assert faults(stage) == {"wrong_partition": {right.task.head.id}, "invalid_id": {"no flake"}}


@pytest.mark.rule("SK-12")
def test_a_count_that_is_wrong_is_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.enqueue()
    engine = stage.queue.context.engine
    monkeypatch.setattr(engine, "count", lambda *_: {Status.WAITING: 2})
    (finding,) = Check(engine, "work", 4, 1.0).findings()
    assert (finding.fault, finding.task) == (StoreFault.COUNT, "")
    assert finding.message == "the store counts 2 as waiting, there are 1"


@pytest.mark.rule("SK-12")
def test_counts_that_changed_and_changed_back_are_no_fault(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.enqueue()
    engine = stage.queue.context.engine
    counts = [{Status.WAITING: 1}, {Status.WAITING: 2}, {Status.WAITING: 2}]
    monkeypatch.setattr(engine, "count", lambda *_: counts.pop())
    assert list(Check(engine, "work", 4, 1.0).findings()) == []
    assert counts == []


@pytest.mark.rule("SK-12")
def test_a_count_that_was_changed_in_the_file_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tasks.db"
    url = f"sqlite:///{path}"
    with Queue("work", url, partitions=4, state_folder=tmp_path) as queue:
        queue.commit([queue.build_raw_enqueue("send", b"{}", EnqueueOptions())])
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute("INSERT INTO skuld_counts VALUES (1, 0, 1)").rowcount == 1
    assert main(["tasks", "check", "work", "--registry", url]) == 1
    assert "the store counts 2 as waiting, there are 1" in capsys.readouterr().out


def test_each_fault_is_planted_by_a_test_here() -> None:
    source = Path(__file__).read_text()
    planted = {each for each in StoreFault if f'"{each}"' in source or f"StoreFault.{each.name}" in source}
    assert planted == set(StoreFault)


def test_a_task_that_changes_while_it_is_looked_at_is_looked_at_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = stage.enqueue()
    held = stage.claim(task)
    stale: list[Stored] = [stage.queue.get(task)]
    stage.update(task, held, b"meanwhile")
    engine = stage.queue.context.engine
    monkeypatch.setattr(engine, "page", lambda *_, **__: Page(tuple(stale), None, 1))
    assert list(Check(engine, "work", 4, 1.0).findings()) == []


def test_python_s_collector_takes_less_of_a_worker_s_time() -> None:
    before = gc.get_threshold()
    try:
        collect_rarely()
        assert gc.get_threshold() == (GC_THRESHOLD, *before[1:])
        assert gc.get_freeze_count() > 0
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@pytest.mark.parametrize(
    ("place", "code", "fragment"),
    [
        ("module", 2, "is not MODULE:QUEUE"),
        ("no_such_module:tasks", 3, "'no_such_module' can't be imported: ModuleNotFoundError"),
        ("broken_module:tasks", 3, "ZeroDivisionError: division by zero"),
        ("empty_module:tasks", 3, "'tasks' in empty_module is not a rebalanser.tasks.Queue; it has no Queue"),
    ],
)
def test_a_worker_says_what_is_wrong_with_its_module(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int, fragment: str
) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    (tmp_path / "empty_module.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    refused(stage.cli("worker", place), code, fragment)
    sys.modules.pop("empty_module", None)


@pytest.mark.rule("SK-23")
def test_a_trigger_that_makes_no_task_says_so(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "overlapping_module.py").write_text(
        "from rebalanser.tasks import Queue\n"
        f"tasks = Queue('work', 'sqlite:///{tmp_path / 'overlapping.db'}')\n"
        f"plain = Queue('plain', 'sqlite:///{tmp_path / 'overlapping.db'}')\n"
        "@tasks.periodic('30 4 1 1 *', overlap=False)\n"
        "def sweep(claim): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def answer(*arguments: str) -> Answer:
        sys.modules.pop("overlapping_module", None)
        return stage.cli(*arguments)

    task = answer("trigger", "overlapping_module:tasks", "sweep").out
    assert answer("trigger", "overlapping_module:tasks", "sweep").out == f"{task}duplicate\n"
    nothing = answer("schedules", "overlapping_module:plain")
    assert (nothing.code, nothing.out) == (0, "")
    assert nothing.err == "overlapping_module:plain has no periodic function\n"
    sys.modules.pop("overlapping_module", None)


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("kind", ["Queue", "AsyncQueue"])
def test_schedules_are_listed_and_triggered(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    url = f"sqlite:///{tmp_path / 'periodic.db'}"
    (tmp_path / "periodic_module.py").write_text(
        f"from rebalanser.tasks import {kind}\n"
        f"tasks = {kind}('work', {url!r})\n"
        "@tasks.periodic('30 4 1 1 *', time_zone='Asia/Tokyo', retries=7)\n"
        "def sweep(claim): ...\n"
        "@tasks.task\n"
        "def other(claim): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    place = "periodic_module:tasks"

    def answer(*arguments: str) -> Answer:
        sys.modules.pop("periodic_module", None)
        return stage.cli(*arguments)

    (listed,) = answer("schedules", place, "--json").documents
    following = listed.pop("next")
    assert listed == {
        "name": "sweep",
        "expression": "30 4 1 1 *",
        "time_zone": "Asia/Tokyo",
        "pause": None,
    }
    assert following.endswith("-01-01 04:30:00+09:00")
    assert answer("schedules", place).out == f"sweep: 30 4 1 1 * (Asia/Tokyo), next {following}\n"
    stage.cli("pause", "work", "--schedule", "sweep", "--yes", "--reason", "no need", "--registry", url)
    assert " next" in answer("schedules", place).out
    assert "\n  it is PAUSED for " in answer("schedules", place).out
    (paused,) = answer("schedules", place, "--json").documents
    assert paused["pause"]["reason"] == "no need"
    task = answer("trigger", place, "sweep").out.strip()
    (other,) = answer("trigger", place, "sweep", "--json").documents
    with Queue("work", url, state_folder=tmp_path) as queue:
        assert [each.head.id for each in queue.tasks()] == [task, other["id"]]
        assert queue.get(task).head.retries == 7
    refused(answer("trigger", place, "other"), 3, "no periodic function 'other'; there are: sweep")
    sys.modules.pop("periodic_module", None)


def test_bodies_of_an_asyncio_queue_run_in_no_processes(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "async_module.py").write_text(
        "from rebalanser.tasks import AsyncQueue\ntasks = AsyncQueue('work', 'memory://unused')\n"
    )
    (tmp_path / "plain_module.py").write_text(
        "from rebalanser.tasks import Queue\nhigh = Queue('high', 'memory://unused')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    place = "async_module:tasks"
    refused(stage.cli("worker", place, "--processes"), 2, f"{place} has an AsyncQueue")
    refused(stage.cli("worker", "async_module:other"), 3, "it has: tasks")
    mixed = stage.cli("worker", place, "plain_module:high")
    refused(mixed, 2, "all a Queue, or all an AsyncQueue")
    sys.modules.pop("async_module", None)


@pytest.mark.parametrize("kind", ["Queue", "AsyncQueue"])
def test_a_worker_runs_several_queues_in_the_order_that_is_given(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "several_module.py").write_text(
        f"from rebalanser.tasks import {kind}\n"
        f"low, high = ({kind}(name, 'memory://several', retention=None) for name in ('low', 'high'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    ran: list[Any] = []

    def run(worker: Any, concurrency: int, **options: Any) -> None:
        ran.append(([each.name for each in worker._queues], concurrency, options))
        assert {each.retention.completed_s for each in worker._queues} == {60.0}

    async def run_async(worker: Any, concurrency: int) -> None:
        run(worker, concurrency)

    monkeypatch.setattr(Queues, "run", run)
    monkeypatch.setattr(AsyncQueues, "run", run_async)
    options = ("--concurrency", "4", "--keep-completed", "60s")
    answer = stage.cli("worker", "several_module:high", "several_module:low", *options)
    assert answer.code == 0
    assert answer.out == "working on high, low at memory://several, 4 tasks at a time; Ctrl-C stops it\n"
    twice = stage.cli("worker", "several_module:high", "several_module:high")
    refused(twice, 3, "a queue comes twice in high, high")
    sys.modules.pop("several_module", None)
    assert ran == [(["high", "low"], 4, {"bodies": "threads"} if kind == "Queue" else {})]


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("--host", "0.0.0.0"), "0.0.0.0 can be reached from other hosts: give --token-file"),
        (("--rate", "many"), "'many' is not a rate such as 100/second"),
        (("--token-file", "/no/such/file"), "can't be read"),
        (("--token-file", "{short}"), "must have 16 printable ASCII characters"),
    ],
)
def test_a_server_is_refused_what_is_not_safe(
    stage: Stage, tmp_path: Path, arguments: tuple[str, ...], fragment: str
) -> None:
    pytest.importorskip("fastapi")
    short = tmp_path / "short"
    short.write_text("secret\n")
    given = [each.format(short=short) for each in arguments]
    refused(stage.cli("serve", "work", *given), 3, fragment)


@pytest.mark.rule("SK-16")
def test_a_missing_extra_is_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, forget_modules: Callable[[str], None]
) -> None:
    forget_modules("rebalanser.tasks.http")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    refused(stage.cli("serve", "work"), 3, "pip install 'rebalanser[web]'")


def _ids(answer: Answer) -> list[str]:
    return [document["id"] for document in answer.documents]


def test_tasks_are_listed_by_name_and_age_and_the_newest_first(stage: Stage) -> None:
    now = stage.queue.context.clock.wall()
    ages_s = [10.0, 100.0, 4000.0, 90_000.0, 10_000_000.0]
    made = [f"{int((now - age) * 1000):016x}{'0' * 24}" for age in ages_s]
    for task in made:
        stage.enqueue(task_id=task)
    other = stage.cli("enqueue", "work", "else").out.strip()
    assert _ids(stage.cli("list", "work", "--newest", "--json")) == [other, *made]
    assert _ids(stage.cli("list", "work", "--newest", "--limit", "3", "--json")) == [other, *made[:2]]
    assert _ids(stage.cli("list", "work", "--name", "else", "--json")) == [other]
    assert _ids(stage.cli("list", "work", "--older-than", "1h", "--json")) == made[:1:-1]
    newest = stage.cli("list", "work", "--newest", "--older-than", "1h", "--limit", "2", "--json")
    assert _ids(newest) == made[2:4]
    none = stage.cli("list", "work", "--newest", "--name", "send", "--status", "dead", "--json")
    assert none.out == ""


def test_many_tasks_are_cancelled_requeued_and_deleted_once_they_are_counted(stage: Stage) -> None:
    waits, dead, done = (stage.enqueue() for _ in range(3))
    stage.kill(dead)
    stage.complete(done)
    other = stage.cli("enqueue", "work", "else").out.strip()
    ids = "give ids of tasks, or "
    for verb, choice in (("cancel", ids), ("requeue", ids), ("delete", "")):
        refused(
            stage.cli(verb, "work"), 2, f"error: {choice}choose some with --status, --name or --older-than"
        )
        refused(stage.cli(verb, "work", "--name", "send"), 2, "this would", "give --yes")
    refused(stage.cli("delete", "work", "--status", "waiting", "--yes"), 2, "cancel them first")
    refused(
        stage.cli("list", "work", "--limit", "0"), 2, "'--limit': must be greater than or equal to 1 (got "
    )
    refused(stage.cli("cancel", "work", waits, "--name", "send"), 2, "ids can't be combined with")
    refused(
        stage.cli("requeue", "work", "--all-dead", "--name", "send"), 2, "--all-dead can't be combined with"
    )
    counted = {Status.WAITING: 2, Status.DEAD: 1, Status.COMPLETED: 1}
    assert stage.queue.count() == dict.fromkeys(Status, 0) | counted
    assert stage.cli("cancel", "work", "--name", "send", "--yes").out == "cancelled 1 task\n"
    assert stage.queue.get(waits).state.status is Status.CANCELLED
    assert stage.cli("requeue", "work", "--name", "send", "--yes").out == "requeued 1 task\n"
    assert stage.queue.get(dead).state.status is Status.WAITING, "dead ones, and no cancelled ones"
    answer = stage.cli("requeue", "work", "--status", "completed", "--yes").out
    assert answer == "requeued 0 tasks; 1 was neither dead nor cancelled\n"
    assert stage.cli("delete", "work", "--older-than", "1h", "--yes").out == "deleted 0 tasks\n"
    assert stage.cli("delete", "work", "--status", "cancelled", "--yes").out == "deleted 1 task\n"
    stage.enqueue(done)
    document = stage.cli("delete", "work", "--name", "send", "--yes", "--json").documents[0]
    assert document == {"queue": "work", "given": 1, "deleted": 0}, "another task depends on it"
    left = {each.head.id for each in stage.queue.tasks()}
    assert left >= {dead, done, other}
    assert waits not in left


def test_the_user_is_asked_how_many(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.enqueue()
    asked: list[str] = []

    def confirm(text: str, **_: object) -> None:
        asked.append(text)

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(typer, "confirm", confirm)
    assert stage.cli("cancel", "work", "--name", "send").out == "cancelled 1 task\n"
    assert stage.cli("cancel", "work", "--name", "send").out == "cancelled 0 tasks\n"
    assert asked == ["cancel 1 task?"]


@pytest.mark.rule("SK-22")
def test_the_status_says_what_was_deleted_as_its_time_was_over(stage: Stage) -> None:
    assert "deleted" not in stage.cli("status", "work").out
    clock = FakeClock(wall=stage.queue.context.clock.wall() + 3600.0)
    stage.queue.context.clock = clock
    stage.complete(stage.enqueue())
    Sweeper(stage.queue.context, stage.queue.tasks, Retention(completed_s=0.0), "me").sweep()
    assert "\ndeleted by retention: 1, looked " in stage.cli("status", "work").out
    document = stage.cli("status", "work", "--json").documents[0]
    assert (document["deleted"], document["swept"]) == (1, clock.wall())


@pytest.mark.rule("SK-22")
def test_the_command_line_says_how_long_tasks_are_kept() -> None:
    week = Retention()
    assert retained(week, None, None, None) is week
    assert retained(None, None, None, None) is None
    assert retained(week, 60.0, None, math.inf) == Retention(completed_s=60.0, cancelled_s=None)
    assert retained(None, None, 60.0, None) == Retention(completed_s=None, dead_s=60.0, cancelled_s=None)
