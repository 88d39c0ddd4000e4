"""The published suite for engines sees faults, and quotes the contract truly."""

from __future__ import annotations

import inspect
import re
import sqlite3
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from rebalanser.core.tasks import store
from rebalanser.core.tasks.store import (
    Applied,
    ChangesLost,
    ClaimAnswer,
    Collect,
    Enqueue,
    EnqueueAll,
    Exists,
    Move,
    Skip,
    TakeOver,
    Unknown,
)
from rebalanser.errors import RequestTooLarge
from rebalanser.tasks import engine
from rebalanser.testing.engine_suite import (
    OTHER_QUEUE,
    PARTITIONS,
    QUEUE,
    EngineHarness,
    EngineSuite,
    StateRecorder,
)
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_sqlite.tasks import SqliteEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rebalanser.core.tasks.model import Status, Stored, TaskId, Update
    from rebalanser.core.tasks.store import Answer, ChangeFilter, ClaimAnswer, ClaimQuery, Page, Write
    from rebalanser.tasks.engine import Engine, EngineWatch, Sink

TESTS = dict(inspect.getmembers(EngineSuite, inspect.isfunction))


def plain(text: str) -> str:
    return " ".join(re.sub(r"``[\w.]*?(\w+)``", r"\1", text).replace("`", "").replace("**", "").split())


CONTRACT = plain(" ".join(map(inspect.getsource, (engine, store)))).lower()


@pytest.mark.parametrize("name", sorted(name for name in TESTS if name.startswith("test_")))
def test_every_quotation_is_in_the_contract(name: str) -> None:
    quoted = re.findall(r'"([^"]+)"', inspect.getdoc(TESTS[name]) or "")
    assert quoted, f"{name} does not say what it holds"
    for quotation in quoted:
        assert plain(quotation).lower() in CONTRACT


class Faulty(EngineHarness):
    """Connections to a file by engines of the given class."""

    def __init__(self, make: Callable[[Path], Engine], path: Path, patience_s: float) -> None:
        self.patience_s = patience_s
        self._make = make
        self._path = path

    def open(self) -> Engine:
        return self._make(self._path)


def run(name: str, harness: EngineHarness) -> None:
    with ExitStack() as stack:

        def connect() -> Engine:
            engine = stack.enter_context(closing(harness.open()))
            for queue in (QUEUE, OTHER_QUEUE):
                engine.define(queue, PARTITIONS, 10)
            return engine

        values: dict[str, Callable[[], object]] = {
            "harness": lambda: harness,
            "connect": lambda: connect,
            "engine": connect,
            "recorder": lambda: StateRecorder(harness.patience_s),
        }
        test = getattr(EngineSuite(), name)
        test(**{parameter: values[parameter]() for parameter in inspect.signature(test).parameters})


class Rewriting(SqliteEngine):
    """Writes something else than it is asked to."""

    def rewritten(self, write: Write) -> Write:
        raise NotImplementedError

    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        return super().apply([self.rewritten(write) for write in writes], timeout_s)


class IgnoresRevisions(Rewriting):
    def rewritten(self, write: Write) -> Write:
        if isinstance(write, Move) and write.id in (present := self.read(write.queue, [write.id], 10)):
            return replace(write, revision=present[write.id].revision)
        return write


class LooksFirst(SqliteEngine):
    """Looks at the condition of a move before the transaction that writes it."""

    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        (write,) = writes
        if not isinstance(write, Move) or self._now(write) != write.revision:
            return super().apply(writes, timeout_s)
        while True:
            (answer,) = super().apply([replace(write, revision=self._now(write))], timeout_s)
            if isinstance(answer, Applied):
                return [answer]

    def _now(self, write: Move) -> int:
        return self.read(write.queue, [write.id], 10)[write.id].revision


class IgnoresEpochs(Rewriting):
    def rewritten(self, write: Write) -> Write:
        return replace(write, epoch=None) if isinstance(write, Move) else write


class WaitsForAll(Rewriting):
    def rewritten(self, write: Write) -> Write:
        return replace(write, waits_for_unknown=True) if isinstance(write, Enqueue) else write


class MakesDuplicates(Rewriting):
    def rewritten(self, write: Write) -> Write:
        if not isinstance(write, Enqueue):
            return write
        return replace(write, task=replace(write.task, head=replace(write.task.head, unique_key="")))


class ForgetsTheTime(Rewriting):
    """Keeps a duplicate out while the earlier one is open, and no longer."""

    def rewritten(self, write: Write) -> Write:
        if not isinstance(write, Enqueue):
            return write
        return replace(write, task=replace(write.task, head=replace(write.task.head, unique_for_s=0.0)))


class DropsUpdates(Rewriting):
    def rewritten(self, write: Write) -> Write:
        return replace(write, update=None) if isinstance(write, Move) else write


class KeepsDependents(Rewriting):
    """Forgets what a task depends on."""

    def rewritten(self, write: Write) -> Write:
        if not isinstance(write, Enqueue) or not write.waits_for_unknown:
            return write
        return replace(write, task=replace(write.task, head=replace(write.task.head, after=())))


class CollectsInParts(SqliteEngine):
    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        answers: list[Answer] = []
        for write in writes:
            parts: list[Write] = [write]
            if isinstance(write, Collect):
                parts = [Collect(write.queue, {task: place}) for task, place in write.tasks.items()]
            answers.append(list(super().apply(parts, timeout_s))[-1])
        return answers


class EnqueuesInParts(SqliteEngine):
    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        answers: list[Answer] = []
        for write in writes:
            parts: Sequence[Write] = write.enqueues if isinstance(write, EnqueueAll) else [write]
            found = super().apply(parts, timeout_s)
            answers.append(next((each for each in found if not isinstance(each, Applied)), found[-1]))
        return answers


class LetsOlderOwnersIn(SqliteEngine):
    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        answers = super().apply(writes, timeout_s)
        return [
            Applied(1) if isinstance(write, TakeOver) else answer
            for write, answer in zip(writes, answers, strict=True)
        ]


class TakesTakenIds(SqliteEngine):
    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        answers = super().apply(writes, timeout_s)
        return [
            Applied(answer.stored.revision) if isinstance(answer, Exists) else answer for answer in answers
        ]


class AnswersInAnyOrder(SqliteEngine):
    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        return super().apply(writes, timeout_s)[::-1]


class FailsTogether(SqliteEngine):
    """Writes of a batch that comes before one that is too large are done."""

    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        try:
            return super().apply(writes, timeout_s)
        except RequestTooLarge:
            super().apply(writes[:1], timeout_s)
            raise


class ReadsOnce(SqliteEngine):
    """Remembers what it has read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._known: dict[TaskId, Stored] = {}

    def read(
        self, queue: str, ids: Sequence[TaskId], timeout_s: float, *, at_least: int = 0
    ) -> Mapping[TaskId, Stored]:
        found = dict(super().read(queue, ids, timeout_s, at_least=at_least))
        self._known = {**found, **self._known}
        return {task: self._known[task] for task in found}


class AnswersAnyRevision(SqliteEngine):
    def read(
        self, queue: str, ids: Sequence[TaskId], timeout_s: float, *, at_least: int = 0
    ) -> Mapping[TaskId, Stored]:
        return super().read(queue, ids, timeout_s)


class SkipsBetweenPages(SqliteEngine):
    def page(
        self,
        queue: str,
        timeout_s: float,
        *,
        partition: int | None = None,
        statuses: frozenset[Status] | None = None,
        after: TaskId | None = None,
        limit: int = 1000,
        at_least: int = 0,
    ) -> Page:
        page = super().page(
            queue,
            timeout_s,
            partition=partition,
            statuses=statuses,
            after=after,
            limit=limit,
            at_least=at_least,
        )
        return replace(page, items=page.items[:-1]) if page.next else page


class PagesFromTheFuture(SqliteEngine):
    """A page says that it has seen more than it has."""

    def page(self, queue: str, timeout_s: float, **named: object) -> Page:
        page = super().page(queue, timeout_s, **named)  # type: ignore[arg-type]
        return replace(page, revision=page.revision + 1000)


class ForgetsLogs(SqliteEngine):
    """Only the last claim's log is kept."""

    def updates(
        self,
        queue: str,
        task: TaskId,
        timeout_s: float,
        *,
        claim: int | None = None,
        first: int = 0,
        limit: int = 1000,
    ) -> Sequence[Update]:
        found = super().updates(queue, task, timeout_s, claim=claim, first=first, limit=limit)
        last = max((update.claim for update in found), default=0)
        return [update for update in found if update.claim == last]


class TellsBackwards(SqliteEngine):
    def watch(
        self, queue: str, from_revision: int, sink: Sink, wants: ChangeFilter | None = None
    ) -> EngineWatch:
        return super().watch(
            queue,
            from_revision,
            lambda told: sink(told if isinstance(told, ChangesLost) else told[::-1]),
            wants,
        )


class TellsOnlyTheLast(SqliteEngine):
    def watch(
        self, queue: str, from_revision: int, sink: Sink, wants: ChangeFilter | None = None
    ) -> EngineWatch:
        return super().watch(
            queue,
            from_revision,
            lambda told: sink(told if isinstance(told, ChangesLost) else told[-1:]),
            wants,
        )


class TellsTheUnwanted(SqliteEngine):
    def watch(
        self, queue: str, from_revision: int, sink: Sink, wants: ChangeFilter | None = None
    ) -> EngineWatch:
        return super().watch(queue, from_revision, sink)


class TellsFromTheStart(SqliteEngine):
    def watch(
        self, queue: str, from_revision: int, sink: Sink, wants: ChangeFilter | None = None
    ) -> EngineWatch:
        return super().watch(queue, 0, sink, wants)


class KeepsNoTallies(Rewriting):
    def rewritten(self, write: Write) -> Write:
        return replace(write, forwarded=None) if isinstance(write, Enqueue) else write


class ForgetsTalliesWithTasks(SqliteEngine):
    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        answers = super().apply(writes, timeout_s)
        if any(isinstance(write, Collect) for write in writes):
            self._committer._store.connection.execute("DELETE FROM skuld_outboxes")
        return answers


class CountsRefusals(SqliteEngine):
    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        answers: list[Answer] = []
        for write in writes:
            answers += super().apply([write], timeout_s)
            if isinstance(write, Enqueue) and write.forwarded and isinstance(answers[-1], Exists | Unknown):
                super().apply([Skip(write.task.head.queue, write.forwarded)], timeout_s)
        return answers


class TakesLaterEntriesFirst(SqliteEngine):
    """A gap is filled by skipping what was not sent yet."""

    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        for write in writes:
            if isinstance(write, Enqueue) and write.forwarded:
                for number in range(1, write.forwarded.number):
                    entry = replace(write.forwarded, number=number)
                    super().apply([Skip(write.task.head.queue, entry)], timeout_s)
        return super().apply(writes, timeout_s)


class Asks(SqliteEngine):
    """Claims something else than it is asked to."""

    changes: ClassVar[dict[str, Any]]

    def claim(self, request: ClaimQuery, timeout_s: float) -> ClaimAnswer:
        return super().claim(replace(request, **self.changes), timeout_s)


class ClaimsWhatNobodyKnows(Asks):
    changes: ClassVar[dict[str, Any]] = {"names": None}


class ClaimsAnyAhead(Asks):
    changes: ClassVar[dict[str, Any]] = {"ahead": 0}


class KeepsOthersToItself(SqliteEngine):
    def claim(self, request: ClaimQuery, timeout_s: float) -> ClaimAnswer:
        return replace(super().claim(request, timeout_s), others_ready=False)


class ClaimsBeforeItIsDue(Asks):
    changes: ClassVar[dict[str, Any]] = {"wall": 1e12}


class ClaimsWithoutBuffer(Asks):
    changes: ClassVar[dict[str, Any]] = {"buffer_s": 0.0}


class HandsOutBackwards(SqliteEngine):
    def claim(self, request: ClaimQuery, timeout_s: float) -> ClaimAnswer:
        answer = super().claim(request, timeout_s)
        return replace(answer, claimed=tuple(reversed(answer.claimed)))


class HandsOutTwice(SqliteEngine):
    """Two look at the index before either of them writes."""

    def claim(self, request: ClaimQuery, timeout_s: float) -> ClaimAnswer:
        answer = super().claim(request, timeout_s)
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute("UPDATE skuld_tasks SET ready = 1 WHERE status = 1 AND number % 7 = 0")
        return answer


class BlocksNothing(SqliteEngine):
    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        answers = super().apply(writes, timeout_s)
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute("UPDATE skuld_tasks SET ready = 1, blocked = 0 WHERE status = 0")
        return answers


class RunsWhatFails(SqliteEngine):
    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        answers = super().apply(writes, timeout_s)
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute("UPDATE skuld_tasks SET after_failure = 1 WHERE after_failure = 2")
        return answers


class WatchesNoCommits(SqliteEngine):
    def watch_commits(self, wake: Callable[[], None]) -> EngineWatch:
        return super().watch_commits(lambda: None)


class PutsNotesUnseen(SqliteEngine):
    def put_note(self, queue: str, content: bytes, version: int, timeout_s: float) -> bool:
        return super().put_note(queue, content, self.note(queue, timeout_s).version or version, timeout_s)


class PutsPausesUnseen(SqliteEngine):
    """Claims look at no pause."""

    def pauses(self, queue: str, timeout_s: float) -> Mapping[str, bytes]:
        return dict(self._kept)

    def put_pause(self, queue: str, schedule: str, pause: bytes | None, timeout_s: float) -> None:
        self._kept[schedule] = pause or b""

    _kept: ClassVar[dict[str, bytes]] = {}


class PausesAllQueues(SqliteEngine):
    def claim(self, request: ClaimQuery, timeout_s: float) -> ClaimAnswer:
        pause = self.pauses("mail", timeout_s).get("")
        return super().claim(request, timeout_s) if pause is None else ClaimAnswer((), pause=pause)


class WatchesNoPauses(SqliteEngine):
    def watch_pauses(self, queue: str, from_revision: int, wake: Callable[[], None]) -> EngineWatch:
        return super().watch_pauses(queue, from_revision, lambda: None)


FAULTS = [
    (PutsPausesUnseen, "test_pauses_are_stored_until_they_are_deleted"),
    (PutsPausesUnseen, "test_nothing_is_claimed_in_a_paused_queue"),
    (PausesAllQueues, "test_an_index_hands_out_nothing_while_the_queue_is_paused"),
    (WatchesNoPauses, "test_a_watch_of_pauses_hears_of_other_connections"),
    (MakesDuplicates, "test_a_duplicate_is_answered_the_task_that_keeps_it_out"),
    (MakesDuplicates, "test_of_many_that_enqueue_with_a_key_one_makes_a_task"),
    (ForgetsTheTime, "test_a_task_keeps_others_out_for_its_time"),
    (PutsNotesUnseen, "test_a_note_is_put_in_place_of_the_one_that_was_read"),
    (ClaimsWhatNobodyKnows, "test_an_index_hands_out_tasks_of_functions_that_are_asked_for"),
    (KeepsOthersToItself, "test_an_index_hands_out_tasks_of_functions_that_are_asked_for"),
    (KeepsOthersToItself, "test_an_index_hands_out_what_is_due"),
    (ClaimsBeforeItIsDue, "test_an_index_hands_out_what_is_due"),
    (ClaimsWithoutBuffer, "test_an_index_hands_out_a_claim_that_is_over_once"),
    (ClaimsAnyAhead, "test_an_index_claims_no_task_of_a_rate_ahead"),
    (HandsOutBackwards, "test_an_index_hands_out_the_best_first"),
    (HandsOutTwice, "test_of_many_only_one_is_handed_a_task"),
    (BlocksNothing, "test_an_index_hands_out_what_depends_on_nothing_more"),
    (RunsWhatFails, "test_an_index_settles_what_depends_on_what_is_dead_or_cancelled"),
    (RunsWhatFails, "test_a_task_is_stored_as_it_was_enqueued"),
    (WatchesNoCommits, "test_a_watch_of_commits_hears_of_other_connections"),
    (KeepsNoTallies, "test_an_entry_of_an_outbox_is_taken_once"),
    (KeepsNoTallies, "test_of_many_that_send_an_entry_one_has_it_taken"),
    (ForgetsTalliesWithTasks, "test_an_entry_is_not_taken_again_once_its_task_was_collected"),
    (CountsRefusals, "test_an_entry_that_is_refused_is_not_counted"),
    (TakesLaterEntriesFirst, "test_no_entry_is_taken_before_another"),
    (IgnoresRevisions, "test_a_move_of_another_revision_changes_nothing"),
    (LooksFirst, "test_of_many_only_one_moves_a_task"),
    (IgnoresEpochs, "test_only_the_present_owner_claims"),
    (IgnoresEpochs, "test_no_claim_of_an_older_owner_follows_a_takeover"),
    (LetsOlderOwnersIn, "test_an_older_owner_does_not_take_over"),
    (WaitsForAll, "test_an_unknown_dependency_is_refused"),
    (DropsUpdates, "test_an_update_is_written_with_its_state"),
    (ForgetsLogs, "test_the_logs_of_earlier_claims_stay"),
    (KeepsDependents, "test_what_others_depend_on_is_not_collected"),
    (EnqueuesInParts, "test_of_tasks_that_are_enqueued_together_none_is_if_one_is_refused"),
    (CollectsInParts, "test_all_or_none_are_collected"),
    (TakesTakenIds, "test_an_id_that_is_taken_is_answered_with_what_it_is_taken_by"),
    (AnswersInAnyOrder, "test_a_refused_write_leaves_the_others_alone"),
    (FailsTogether, "test_a_payload_over_the_limit_is_refused"),
    (ReadsOnce, "test_reads_see_what_was_answered_before"),
    (AnswersAnyRevision, "test_a_read_asks_for_a_revision"),
    (SkipsBetweenPages, "test_a_page_begins_after_an_id"),
    (PagesFromTheFuture, "test_a_watch_from_a_page_misses_nothing"),
    (TellsBackwards, "test_a_watch_tells_a_large_batch"),
    (TellsOnlyTheLast, "test_a_watch_tells_what_has_changed_since"),
    (TellsFromTheStart, "test_a_watch_tells_what_has_changed_since"),
    (TellsTheUnwanted, "test_a_watch_tells_only_what_is_wanted"),
    (TellsTheUnwanted, "test_a_watch_of_statuses_tells_changes_to_them"),
]


@pytest.mark.rule("SK-2", "SK-3", "SK-4", "SK-5", "SK-6", "SK-9", "SK-11", "SK-12", "SK-13", "SK-14", "SK-18")
@pytest.mark.parametrize(
    ("engine", "name"),
    FAULTS,
    ids=[f"{engine.__name__}-{name}" for engine, name in FAULTS],
)
def test_the_suite_sees_a_fault(engine: Callable[[Path], Engine], name: str, tmp_path: Path) -> None:
    run(name, Faulty(SqliteEngine, tmp_path / "good.db", patience_s=PATIENCE_S))
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        run(name, Faulty(engine, tmp_path / "faulty.db", patience_s=0.5))
