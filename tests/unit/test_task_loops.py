"""The policy for errors of loops: which pause, which are told, which end the process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rebalanser.core.tasks.failures import (
    LONGEST_PAUSE_S,
    PERSISTS_ATTEMPTS,
    PERSISTS_S,
    REPORT_S,
    SHORTEST_PAUSE_S,
    ErrorKind,
    LoopFailure,
    kind_of,
)
from rebalanser.errors import (
    InternalError,
    InvalidArgument,
    OutcomeUnknown,
    QuotaExceeded,
    RegistryUnavailable,
    RequestTooLarge,
    TaskExists,
    UnusableStore,
)
from rebalanser.tasks import loops
from rebalanser.tasks.loops import ErrorPolicy, Loop
from rebalanser.testing.waiting import PATIENCE_S

BUG = KeyError("what nobody foresaw")
AWAY = RegistryUnavailable("away")


class Stand:
    """A policy, its clock, and whether it had the process end."""

    def __init__(self) -> None:
        self.at = 0.0
        self.ended = 0
        self.errors = ErrorPolicy("work", self, self._end)

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return 1e9 + self.at

    def _end(self) -> None:
        self.ended += 1

    def loop(self, *raised: BaseException | None) -> Loop:
        """A loop whose steps raise these one after the other; the last of them is its last step."""
        left = list(raised)

        def step() -> bool:
            error = left.pop(0)
            if error is not None:
                raise error
            return bool(left)

        return Loop("claims", step, self.errors)

    def fail(self, error: BaseException, times: int, pause_s: float) -> None:
        for _ in range(times):
            self.errors.failed("claims", error)
            self.at += pause_s


@pytest.fixture
def stand() -> Stand:
    return Stand()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestTooLarge("4 MB"), ErrorKind.POISON),
        (TaskExists("other content"), ErrorKind.POISON),
        (InvalidArgument("no bytes"), ErrorKind.POISON),
        (AWAY, ErrorKind.OUTAGE),
        (OutcomeUnknown("no answer"), ErrorKind.OUTAGE),
        (QuotaExceeded("full"), ErrorKind.OUTAGE),
        (UnusableStore("read-only"), ErrorKind.OUTAGE),
        (OSError("no space"), ErrorKind.OUTAGE),
        (InternalError("a broken invariant"), ErrorKind.BUG),
        (BUG, ErrorKind.BUG),
        (SystemExit(3), ErrorKind.BUG),
    ],
)
def test_an_error_is_of_one_task_of_the_store_or_a_bug(error: BaseException, kind: ErrorKind) -> None:
    assert kind_of(error) is kind


def test_a_loop_goes_on_whatever_its_steps_raise(stand: Stand) -> None:
    loop = stand.loop(AWAY, BUG, SystemExit(3), None, None)
    pauses = [loop.take_step() for _ in range(5)]
    assert pauses == [SHORTEST_PAUSE_S, 2 * SHORTEST_PAUSE_S, 4 * SHORTEST_PAUSE_S, 0.0, None]


def test_a_thread_that_only_logged_its_error_would_be_dead(stand: Stand) -> None:
    """Also where claim_history of the error fails."""

    def broken(_loop: str, _error: BaseException, **_named: object) -> float:
        raise MemoryError

    stand.errors.failed = broken  # type: ignore[assignment, method-assign]
    loop = stand.loop(AWAY, None)
    assert [loop.take_step(), loop.take_step()] == [LONGEST_PAUSE_S, None]


def test_pauses_grow_up_to_a_limit_and_are_short_again_after_a_success(stand: Stand) -> None:
    pauses = [stand.errors.failed("claims", AWAY) for _ in range(10)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    stand.errors.worked("claims")
    assert stand.errors.failed("claims", AWAY) == SHORTEST_PAUSE_S


def test_a_trouble_is_seen_until_the_loop_works_again(stand: Stand) -> None:
    stand.fail(AWAY, 3, 1.0)
    assert stand.errors.troubles == (
        LoopFailure("claims", ErrorKind.OUTAGE, "RegistryUnavailable('away')", 1e9, 3),
    )
    stand.errors.worked("claims")
    assert stand.errors.troubles == ()


def test_an_outage_ends_no_process_however_long_it_lasts(stand: Stand) -> None:
    stand.fail(AWAY, 1000, LONGEST_PAUSE_S)
    assert stand.ended == 0


def test_a_bug_that_persists_ends_the_process_once(stand: Stand) -> None:
    pause_s = PERSISTS_S / PERSISTS_ATTEMPTS
    stand.fail(BUG, PERSISTS_ATTEMPTS, pause_s)
    assert stand.ended == 0
    stand.fail(BUG, 3, pause_s)
    assert stand.ended == 1


@pytest.mark.rule("SK-15")
def test_a_bug_of_a_loop_in_a_process_of_the_host_application_ends_nothing(stand: Stand) -> None:
    def step() -> bool:
        raise BUG

    loop = Loop("outbox", step, stand.errors, ends_process=False)
    for _ in range(2 * PERSISTS_ATTEMPTS):
        loop.take_step()
        stand.at += PERSISTS_S / PERSISTS_ATTEMPTS
    assert stand.ended == 0
    assert [(each.loop, each.kind) for each in stand.errors.troubles] == [("outbox", ErrorKind.BUG)]


@pytest.mark.rule("SK-15")
def test_a_loop_that_ends_leaves_no_trouble_and_claims_no_success(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    loop = stand.loop(AWAY, None)
    with caplog.at_level(logging.INFO, "rebalanser"):
        loop.take_step()
        assert [each.loop for each in stand.errors.troubles] == ["claims"]
        assert loop.take_step() is None
    assert not stand.errors.troubles
    assert [each.action for each in caplog.records] == ["tasks_engine_away"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("between", [AWAY, None])
def test_bugs_with_something_else_between_them_do_not_persist(
    stand: Stand, between: BaseException | None
) -> None:
    for _ in range(3 * PERSISTS_ATTEMPTS):
        stand.fail(BUG, PERSISTS_ATTEMPTS - 1, PERSISTS_S / PERSISTS_ATTEMPTS)
        if between is None:
            stand.errors.worked("claims")
        else:
            stand.fail(between, 1, 1.0)
    assert stand.ended == 0


def test_two_bugs_in_an_hour_do_not_persist(stand: Stand) -> None:
    stand.fail(BUG, 2, 3600.0)
    assert stand.ended == 0


def test_each_loop_has_its_own_errors(stand: Stand) -> None:
    for _ in range(PERSISTS_ATTEMPTS + 1):
        for loop in ("claims", "writer", "ticks"):
            stand.errors.failed(loop, BUG)
        stand.errors.worked("writer")
        stand.at += PERSISTS_S / PERSISTS_ATTEMPTS / 2
    assert [each.loop for each in stand.errors.troubles] == ["claims", "ticks"]
    assert stand.ended == 0


def test_errors_are_logged_once_in_a_while_and_bugs_with_their_traceback(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rebalanser"):
        stand.fail(AWAY, 100, REPORT_S / 50)
        stand.fail(BUG, 1, 0.0)
        stand.errors.worked("claims")
    told = [(each.levelname, each.action) for each in caplog.records]  # type: ignore[attr-defined]
    assert told == [
        ("WARNING", "tasks_engine_away"),
        ("WARNING", "tasks_engine_away"),
        ("ERROR", "tasks_loop_failed"),
        ("INFO", "tasks_work_again"),
    ]
    assert caplog.records[2].getMessage().endswith("\nKeyError: 'what nobody foresaw'")


def test_an_error_that_is_ignored_is_logged_once_in_a_while(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rebalanser"):
        for _ in range(100):
            stand.errors.ignored("middleware", BUG)
            stand.errors.ignored("another", BUG)
            stand.at += REPORT_S / 100
        stand.errors.ignored("middleware", BUG)
    assert len(caplog.records) == 3
    assert stand.errors.troubles == ()


@pytest.fixture
def started() -> Iterator[Callable[[Loop], Loop]]:
    loops: list[Loop] = []

    def start(loop: Loop) -> Loop:
        loops.append(loop)
        loop.start()
        return loop

    yield start
    for each in loops:
        each.end_soon()
        each.join(PATIENCE_S)


def test_a_pause_is_cut_short_when_the_loop_is_to_end(stand: Stand, started: Callable[[Loop], Loop]) -> None:
    failed, may_end = threading.Event(), threading.Event()

    def noted(_loop: str, _error: BaseException, **_named: object) -> float:
        failed.set()
        return 3600.0

    stand.errors.failed = noted  # type: ignore[assignment, method-assign]

    def step() -> bool:
        if not may_end.is_set():
            raise AWAY
        return False

    loop = started(Loop("claims", step, stand.errors))
    assert failed.wait(PATIENCE_S)
    may_end.set()
    loop.end_soon()
    loop.join(PATIENCE_S)
    assert not loop._thread.is_alive()


THREADS = {
    "child_process.py": (2, "in a process of its own, whose end its worker notices"),
    "processes.py": (1, "it serves one process and ends with it, claim_history who waits for a body"),
    "http/serving.py": (1, "it runs the server, whose end is that of the command"),
    "loops.py": (1, "a loop"),
    "queue.py": (1, "it ends the process"),
}
"""How many threads each module of tasks starts, and why it may where it is no loop."""


def test_every_thread_that_goes_on_is_a_loop() -> None:
    folder = Path(loops.__file__).parent
    started = {
        str(path.relative_to(folder)): count
        for path in folder.rglob("*.py")
        if (count := path.read_text().count("threading.Thread("))
    }
    assert started == {module: count for module, (count, _) in THREADS.items()}
