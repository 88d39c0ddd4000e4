"""After which errors a task is tried again, and when (SK-15)."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator

from rebalanser.errors import InvalidTask, TaskFailed
from rebalanser.tasks import Claim, GiveUp, Queue, Retry, Status
from rebalanser.tasks import child_process as child
from rebalanser.tasks import processes as caller
from rebalanser.tasks.child_process import BodyFailed
from rebalanser.tasks.execution import bodies
from rebalanser.tasks.execution.outcomes import MAX_ERROR, BodyLost, raised
from rebalanser.tasks.functions import EnqueueOptions, TaskOptions
from rebalanser.testing import FakeClock

HOUR_S = 3600.0
pytestmark = pytest.mark.rule("SK-15")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def tasks(clock: FakeClock, tmp_path: Path) -> Iterator[Queue]:
    with Queue("memory://", clock=clock, state_folder=tmp_path) as queue:
        yield queue


@pytest.mark.parametrize(
    ("retry_on", "error", "tries"),
    [
        (None, ValueError("it"), 3),
        (OSError, ConnectionResetError("it"), 3),
        ([OSError, ValueError], ValueError("it"), 3),
        ((OSError, LookupError), ValueError("it"), 1),
        (OSError, Retry(delay_s=1.0), 3),
        (GiveUp, GiveUp("it"), 1),
        (OSError, SystemExit(1), 3),
        (OSError, BodyLost("its process has ended"), 3),
    ],
)
def test_a_task_is_tried_again_after_stated_errors_only(
    tasks: Queue, retry_on: Any, error: BaseException, tries: int
) -> None:
    ran: list[int] = []

    @tasks.task(retries=2, retry_on=retry_on)
    def fails(claim: Claim) -> None:
        ran.append(claim.number)
        raise error

    task = fails.enqueue()
    assert tasks.run_until_idle(advance_s=HOUR_S) == tries
    assert ran == list(range(tries))
    assert tasks.get(task).state.status is Status.DEAD
    with pytest.raises(TaskFailed, match=type(error).__name__):
        tasks.wait(task)


@pytest.mark.parametrize(
    ("backoff_s", "due"),
    [
        (10.0, [0.0, 10.0, 30.0, 70.0, 130.0]),
        (lambda failures: 5.0 * failures, [0.0, 5.0, 15.0, 30.0, 50.0]),
        (lambda failures: [0, 0, 1e9, math.inf][failures - 1], [0.0, 0.0, 0.0, 60.0, 120.0]),
    ],
)
def test_pauses_double_or_are_those_of_a_function_up_to_a_maximum(
    tasks: Queue, clock: FakeClock, backoff_s: float | Callable[[int], float], due: list[float]
) -> None:
    began, at = clock.now(), []

    @tasks.task(retries=4, backoff_s=backoff_s, max_backoff_s=60.0, jitter=0)
    def fails(claim: Claim) -> None:
        at.append(clock.now() - began)
        raise ValueError("again")

    fails.enqueue()
    assert tasks.run_until_idle(advance_s=HOUR_S) == 5
    assert at == pytest.approx(due, abs=1e-3)


@pytest.mark.parametrize("given", [-1.0, math.nan, None, "5", True, KeyError("a bug")])
def test_a_function_that_gives_no_pause_stops_no_task(
    tasks: Queue, clock: FakeClock, given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def backoff_s(failures: int) -> Any:
        if isinstance(given, Exception):
            raise given
        return given

    @tasks.task(retries=1, backoff_s=backoff_s, max_backoff_s=60.0, jitter=0)
    def fails(claim: Claim) -> None:
        raise ValueError("again")

    task, began = fails.enqueue(), clock.wall()
    assert tasks.run_until_idle() == 1
    assert tasks.get(task).state.due == pytest.approx(began + 60.0)
    assert "backoff_s of fails" in caplog.text
    assert tasks.run_until_idle(advance_s=60.0) == 1


def test_more_is_added_at_random_up_to_the_jitter(tasks: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        asked.append((low, high))
        return high

    monkeypatch.setattr(bodies.random, "uniform", uniform)
    began = FakeClock().wall()

    @tasks.task(retries=1, backoff_s=100.0, jitter=0.5)
    def fails(claim: Claim) -> None:
        raise ValueError("again")

    task = fails.enqueue()
    assert tasks.run_until_idle() == 1
    assert asked == [(0, 0.5)]
    assert tasks.get(task).state.due == pytest.approx(began + 150.0)


@pytest.mark.parametrize(
    "options",
    [{"retry_on": ()}, {"retry_on": "OSError"}, {"retry_on": [int]}, {"jitter": 1.5}, {"backoff_s": "soon"}],
)
def test_options_that_are_none_are_refused(tasks: Queue, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidTask):
        tasks.task(**options)


def test_an_error_that_can_not_be_sent_is_known_by_its_types() -> None:
    class Local(OSError):
        pass

    failed = child._sendable(raised(Local("it")), 1000)
    assert isinstance(failed, BodyFailed)
    assert failed.error is None, "a local class can't be pickled"
    outcome = caller._raised(pickle.loads(pickle.dumps(failed)))
    assert isinstance(outcome.error, BodyLost)
    assert outcome.is_retried(None)
    assert outcome.is_retried([LookupError, OSError])
    assert outcome.is_retried([Local])
    assert not outcome.is_retried([LookupError])


def test_an_error_of_a_script_is_known_in_its_processes() -> None:
    here = type("Own", (Exception,), {"__module__": "__main__"})
    there = type("Own", (Exception,), {"__module__": "__mp_main__"})
    assert raised(there()).is_retried([here])
    assert not raised(there()).is_retried([OSError])


def test_all_errors_are_retried_unless_it_is_said() -> None:
    assert TaskOptions().retry_on is None


@pytest.mark.rule("SK-21")
def test_a_task_that_can_not_be_read_waits_by_how_often_that_was_so(tasks: Queue, clock: FakeClock) -> None:
    """And not by how many claims it had: those that failed before a requeue, or were given back."""
    known = ["a", "b"]

    def check(to: str) -> str:
        if to not in known:
            raise ValueError("unknown here")
        return to

    def send(claim: Claim, to: str) -> None:
        if to in known[1:]:
            raise OSError("away")

    send.__annotations__["to"] = Annotated[str, AfterValidator(check)]
    register = tasks.task(retries=9, backoff_s=1.0, max_backoff_s=600.0, jitter=0.0)
    task = register(send).enqueue("b")
    assert tasks.run_until_idle(advance_s=HOUR_S) == 10
    assert tasks.get(task).state.status is Status.DEAD
    tasks.requeue(task)
    known.remove("b")
    waits: list[float] = []
    for _ in range(12):
        tasks.run_until_idle()
        waits.append(round(tasks.get(task).state.due - clock.wall(), 3))
        clock.advance(waits[-1])
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 600.0, 600.0]
    state = tasks.get(task).state
    assert state.failures == 0
    assert "unknown here" in state.error
    assert state.error.endswith("(unread 12 times)")
    known[:] = ["b"]
    assert tasks.run_until_idle() == 1
    assert tasks.get(task).state.status is Status.COMPLETED


@pytest.mark.rule("SK-21")
def test_the_reason_why_a_task_can_not_be_read_is_bounded(tasks: Queue) -> None:
    @tasks.task
    def send(claim: Claim) -> None: ...

    named = b'{"%s": 1}' % (b"x" * 10_000)
    (task,) = tasks.commit([tasks.build_raw_enqueue("send", named, EnqueueOptions())])
    tasks.run_until_idle()
    error = tasks.get(task).state.error
    assert len(error) <= MAX_ERROR
    assert error.endswith("(unread once)")
