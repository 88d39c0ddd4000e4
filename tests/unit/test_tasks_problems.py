"""What each error becomes over HTTP, and who is given a claim when the engine is away."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import pytest

from rebalanser import errors
from rebalanser.tasks import Queue

pytest.importorskip("fastapi", reason="the HTTP interface needs the extra web")

from rebalanser.core.tasks.dispensing import ClaimForClient, Dispensing
from rebalanser.tasks.http import problems
from rebalanser.tasks.http.dispenser import Dispenser
from rebalanser.tasks.http.problems import ProblemRaised
from rebalanser.testing.waiting import PATIENCE_S


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize(
    ("error", "status", "name"),
    [
        (errors.Fenced("x"), 409, "fenced"),
        (errors.TaskExists("x"), 409, "exists"),
        (errors.UnknownTask("x"), 404, "unknown"),
        (errors.UnknownQueue("x"), 404, "unknown"),
        (errors.DependencyCycle("x"), 422, "invalid"),
        (errors.InvalidTask("x"), 422, "invalid"),
        (errors.InvalidName("x"), 422, "invalid"),
        (errors.RequestTooLarge("x"), 413, "too-large"),
        (errors.QuotaExceeded("x"), 507, "full"),
        (errors.UnusableStore("x"), 503, "unusable-store"),
        (errors.UnusableFolder("x"), 503, "unusable-store"),
        (errors.AccessDenied("x"), 503, "unusable-store"),
        (errors.OutcomeUnknown("x"), 504, "outcome-unknown"),
        (errors.RegistryUnavailable("x"), 503, "engine-away"),
        (errors.InternalError("x"), 500, "internal"),
    ],
)
def test_every_error_is_a_problem(error: errors.RebalanserError, status: int, name: str) -> None:
    answer = problems.document(problems.kind_of(error), "one\nline")
    told = json.loads(bytes(answer.body))
    assert (answer.status_code, told["status"], told["type"]) == (status, status, f"/problems/{name}")
    assert told["detail"] == "one line"
    assert answer.headers["content-type"] == "application/problem+json"
    assert ("retry-after" in answer.headers) == (name == "engine-away")


class Partitions:
    """Partitions that tell what they are asked, and answer as they are told."""

    def __init__(self, answer: Exception | None = None) -> None:
        self.answer = answer
        self.asked: list[tuple[int, str]] = []

    def claim(self, limit: int, names: Any, worker: str = "") -> list[Any]:
        self.asked.append((limit, worker))
        if self.answer is not None:
            raise self.answer
        return []

    def offer(self, rooms: Any) -> None:
        """No other process claims for it."""

    def claim_for_others(self) -> None:
        """Nobody else has room."""

    def next_wakeup(self, names: Any) -> None:
        return None

    def owns(self, number: int) -> bool:
        return number < 3


@pytest.fixture
def dispenser(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    with Queue("work", f"memory://{request.node.nodeid}", state_folder=tmp_path) as queue:
        dispenser = Dispenser(queue.context)
        yield dispenser
        dispenser.stop()


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize(
    "error", [errors.RegistryUnavailable("away"), errors.OutcomeUnknown("lost"), RuntimeError("a fault")]
)
def test_who_asks_while_the_engine_is_away_is_told(dispenser: Dispenser, error: Exception) -> None:
    dispenser.start(Partitions(error))  # type: ignore[arg-type]
    for _ in range(2):  # it goes on after an error
        assert dispenser.request("a", 3, PATIENCE_S).future.exception(timeout=PATIENCE_S) is error
    assert dispenser.owned(16) == 3


@pytest.mark.rule("SK-16")
def test_who_does_not_wait_gets_nothing_at_once(dispenser: Dispenser) -> None:
    partitions = Partitions()
    dispenser.start(partitions)  # type: ignore[arg-type]
    assert dispenser.request("a", 3, 0.0).future.result(timeout=PATIENCE_S) == []
    assert partitions.asked[0] == (3, "a")


@pytest.mark.rule("SK-16")
def test_who_waits_when_the_server_stops_gets_nothing(dispenser: Dispenser) -> None:
    dispenser.start(Partitions())  # type: ignore[arg-type]
    client = dispenser.request("a", 1, 1000.0)
    dispenser.stop()
    dispenser.stop()
    assert client.future.result(timeout=0) == []
    with pytest.raises(errors.RetryLater, match="stops"):
        dispenser.request("b", 1, 0.0)


@pytest.mark.rule("SK-16")
def test_not_all_connections_are_of_those_who_wait(dispenser: Dispenser) -> None:
    dispenser = Dispenser(dispenser._context, max_waiting=2)
    waiting = [dispenser.request("a", 1, 1000.0) for _ in range(2)]
    with pytest.raises(ProblemRaised, match="2 clients wait for a task already") as refused:
        dispenser.request("b", 1, 0.1)
    dispenser.request("b", 1, 0.0)
    dispenser.forget(waiting[0])
    dispenser.forget(waiting[1])
    dispenser.request("b", 1, 0.1)
    answer = problems.document(refused.value.kind, str(refused.value))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


@pytest.mark.rule("SK-16")
def test_who_has_hung_up_is_forgotten(dispenser: Dispenser) -> None:
    gone = dispenser.request("gone", 1, 1000.0)
    dispenser.forget(gone)
    partitions = Partitions()
    dispenser.start(partitions)  # type: ignore[arg-type]
    assert dispenser.request("here", 1, 0.0).future.result(timeout=PATIENCE_S) == []
    assert {worker for _, worker in partitions.asked} == {"here"}


@pytest.mark.rule("SK-16")
def test_the_server_goes_on_whatever_was_raised(
    dispenser: Dispenser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside the claims, where nobody who asks could be told."""
    faults = [KeyError("a bug"), SystemExit(3)]
    end_over = dispenser.claim_history.end_over

    def fault() -> float | None:
        if faults:
            raise faults.pop()
        return end_over()

    monkeypatch.setattr(dispenser.claim_history, "end_over", fault)
    dispenser.start(Partitions())  # type: ignore[arg-type]
    for _ in range(3):
        assert dispenser.request("a", 3, 0.0).future.result(timeout=PATIENCE_S) == []
    assert not faults


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize("answer", [None, errors.QuotaExceeded("full")])
def test_who_hangs_up_while_being_served_stops_nothing(
    dispenser: Dispenser, answer: Exception | None
) -> None:
    gone = dispenser.request("gone", 1, 0.0)
    here = dispenser.request("here", 1, 0.0)
    assert gone.future.cancel()
    partitions = Partitions(answer)
    dispenser.start(partitions)  # type: ignore[arg-type]
    assert here.future.exception(timeout=PATIENCE_S) is answer
    dispenser.forget(gone)


@pytest.mark.rule("SK-16", "SK-20")
def test_nothing_is_claimed_for_a_client_that_hung_up_as_nothing_was_found() -> None:
    dispensing = Dispensing(lambda: 0.0, Future)
    gone, here = (dispensing.add(name, 1, 10.0, ["send"]) for name in ("gone", "here"))
    step = dispensing.step()
    assert next(step) == ClaimForClient(gone)
    assert dispensing.forget(gone) == []
    while step.send([]) != ClaimForClient(here):
        pass
    step.close()
    assert dispensing.clients == [here]


@pytest.mark.rule("SK-16", "SK-19")
def test_a_client_whose_claim_ends_by_an_exit_waits_on() -> None:
    dispensing = Dispensing(lambda: 0.0, Future)
    client = dispensing.add("a", 1, 10.0, None)
    step = dispensing.step()
    next(step)
    with pytest.raises(SystemExit):
        step.throw(SystemExit(3))
    assert dispensing.clients == [client]


def _answered(dispenser: Dispenser) -> type[object]:
    return type(dispenser.request("here", 1, 0.0).future.exception(timeout=PATIENCE_S))


@pytest.mark.rule("SK-16")
def test_that_nothing_can_be_claimed_is_seen_until_it_can(dispenser: Dispenser) -> None:
    context, partitions = dispenser._context, Partitions(errors.QuotaExceeded("full"))
    dispenser.start(partitions)  # type: ignore[arg-type]
    assert _answered(dispenser) is errors.QuotaExceeded
    assert [each.loop for each in context.errors.troubles] == ["claims"]
    partitions.answer = None
    assert _answered(dispenser) is type(None)
    assert context.errors.troubles == ()
