"""Functions that work on tasks: their arguments as JSON, and what is refused where it is written."""

from __future__ import annotations

import asyncio
import datetime
import enum
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any, assert_type
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mypy import api
from pydantic import BaseModel, Field, PlainSerializer, PlainValidator, SecretStr, ValidationError
from pydantic_core import from_json

from rebalanser.core.tasks.model import MAX_SECONDS, AfterFailure, Head, Status, Stored, TaskState
from rebalanser.errors import (
    DependencyCycle,
    InvalidArgument,
    InvalidHandlers,
    InvalidName,
    InvalidState,
    InvalidTask,
    InvalidUrl,
    TaskExists,
    TaskFailed,
    UnknownScheme,
    UnknownTask,
)
from rebalanser.tasks import (
    AsyncCall,
    AsyncClaim,
    AsyncQueue,
    AsyncQueues,
    Call,
    Claim,
    Enqueued,
    Middleware,
    Queue,
    Queues,
    Retention,
    Retry,
)
from rebalanser.tasks.functions import (
    FAR_FUTURE_S,
    MAX_AFTER,
    EnqueueOptions,
    GivenOptions,
    GivenTaskOptions,
    OtherArguments,
    TaskBody,
    TaskOptions,
    task_options,
)
from rebalanser.tasks.http.messages import Failure, NewTask
from rebalanser.tasks.results import FilledPayload, fill_results, sources_in, with_sources, without_sources
from rebalanser.tasks.waiting import value_of
from rebalanser.testing import FakeClock


class Address(BaseModel):
    street: str
    number: int = Field(gt=0)


class Parcel(BaseModel):
    weight_g: int = 5


def send(claim: Claim, to: str, copies: int = 1, *, at: Address | None = None) -> None:
    """What most tests register."""


def body(function: Any = send, name: str = "send") -> TaskBody:
    return TaskBody(function, name, TaskOptions())


def test_arguments_come_back_as_they_were() -> None:
    home = Address(street="High", number=3)
    payload = body().payload(("a@example.org",), {"at": home})
    assert body().arguments(payload) == {"to": "a@example.org", "copies": 1, "at": home}


@pytest.mark.rule("SK-21")
def test_what_is_not_given_is_not_stored_and_what_is_given_is_stored_whole() -> None:
    def ship(claim: Claim, parcel: Parcel, to: str = "home", copies: int = 1) -> None: ...

    registered = body(ship, "ship")
    assert registered.payload((Parcel(),), {"copies": 1}) == b'{"parcel":{"weight_g":5},"copies":1}'
    assert registered.arguments(registered.payload((Parcel(),), {}))["to"] == "home"


@given(st.text(), st.integers(-(2**40), 2**40))
def test_any_text_and_number_comes_back(to: str, copies: int) -> None:
    assert body().arguments(body().payload((to, copies), {})) == {"to": to, "copies": copies, "at": None}


def test_a_time_is_stored_with_its_zone() -> None:
    def wake(claim: Claim, at: datetime.datetime) -> None: ...

    at = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    registered = body(wake, "wake")
    assert registered.arguments(registered.payload((at,), {})) == {"at": at}


@pytest.mark.parametrize(
    ("arguments", "named", "told"),
    [
        ((), {}, "missing a required argument: 'to'"),
        (("a", 1, 2), {}, "too many positional arguments"),
        (("a",), {"bcc": "b"}, "bcc"),
        ((5,), {}, r"to: must be a valid string \(got 5\)"),
        (("a", "many"), {}, r"copies: must be a valid integer \(got 'many'\)"),
        (("a", "5"), {}, r"copies: must be a valid integer \(got '5'\)"),
        (("a", True), {}, r"copies: must be a valid integer \(got True\)"),
        (("a",), {"at": {"street": "High", "number": 0}}, r"at.number: must be greater than 0 \(got 0\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_where_they_are_given(
    arguments: tuple[Any, ...], named: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidTask, match=f"send: .*{told}"):
        body().payload(arguments, named)


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (b"{", r"^send: it is not JSON \(EOF while parsing an object at line 1 column 1\)$"),
        (b"[1]", "^send: it must be a JSON object with a field for each argument$"),
        (b'{"to": 5, "cc": 1}', r"^send: to: must be a valid string \(got 5\); cc: is no argument of it$"),
        (b"{}", "^send: to: is missing$"),
        (b'{"to": [1]}', r"^send: to: must be a valid string \(got list\)$"),
        (b'{"to": 1%s}' % (b"0" * 99), r"^send: to: must be a valid string \(got int\)$"),
    ],
)
def test_stored_arguments_that_do_not_fit_are_told_with_their_values(payload: bytes, told: str) -> None:
    with pytest.raises(InvalidTask, match=told):
        body().arguments(payload)


@pytest.mark.parametrize("call", [7, "ab", ((1,),), (1, {}), ("a", {}), (["a"], {1: 2}), (["a"], "b"), None])
def test_a_call_of_many_that_is_no_pair_is_refused_with_its_number(tmp_path: Path, call: Any) -> None:
    with Queue("mail", f"memory://{tmp_path}", state_folder=tmp_path) as queue:
        function = queue.task(send)
        with pytest.raises(
            InvalidArgument, match=r'^send: calls\[1\] is .*: give positional arguments and named .*"copies'
        ):
            function.enqueue_many([(("a",), {}), call])
        with pytest.raises(InvalidArgument, match=r"^send: calls are 5: give a list of "):
            function.enqueue_many(5)  # type: ignore[arg-type]
        assert not any(queue.count().values())
        assert len(function.enqueue_many(each for each in [(deque("a"), {}), [["b"], {}]])) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("claim", [7, "a@b", [1], {}])
def test_a_direct_call_without_a_claim_says_where_to_get_one(tmp_path: Path, claim: Any) -> None:
    with Queue("mail", f"memory://{tmp_path}", state_folder=tmp_path) as queue:
        function = queue.task(send)
        with pytest.raises(InvalidArgument, match=r"^send\(.*FakeClaim\(\).* use send\.enqueue\("):
            function(claim)


class Colour(enum.Enum):
    RED = "red"


class Own:
    """What only its parameter's type knows how to write."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.text == self.text

    __hash__ = None  # type: ignore[assignment]


OwnText = Annotated[
    Own,
    PlainValidator(lambda given: given if isinstance(given, Own) else Own(given)),
    PlainSerializer(lambda own: own.text),
]


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (float, 3.0),
        (dict[int, str], {1: "a"}),
        (set[str], {"a"}),
        (tuple[int, str], (1, "a")),
        (Colour, Colour.RED),
        (datetime.timedelta, datetime.timedelta(seconds=1.5)),
        (Decimal, Decimal("1.50")),
        (bytes, b"x"),
        (Path, Path("/a")),
        (OwnText, Own("a")),
        (Annotated[int, Field(gt=0)], 1),
    ],
    ids=range(11),
)
def test_what_json_has_no_type_for_comes_back_in_spite_of_strictness(type_: Any, value: Any) -> None:
    def take(claim: Claim, it): ...  # type: ignore[no-untyped-def]

    take.__annotations__["it"] = type_
    registered = body(take, "take")
    assert registered.arguments(registered.payload((value,), {})) == {"it": value}


def test_a_parameter_may_have_any_name() -> None:
    def odd(claim: Claim, _x: int, json: str = "", model_config: int = 0, *, copy: bool = False) -> None: ...

    registered = body(odd, "odd")
    payload = registered.payload((1,), {"json": "a", "copy": True})
    assert payload == b'{"_x":1,"json":"a","copy":true}'
    assert registered.arguments(payload) == {"_x": 1, "json": "a", "model_config": 0, "copy": True}
    with pytest.raises(InvalidTask, match="odd: _x: is missing"):
        registered.arguments(b"{}")


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_what_would_not_come_back_from_json_is_refused_at_once(weight: float) -> None:
    def weigh(claim: Claim, weight: float) -> None: ...

    with pytest.raises(InvalidTask, match="weigh: weight: must be a valid number"):
        body(weigh, "weigh").payload((weight,), {})


class Closed(BaseModel, extra="forbid"):
    street: str


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rate_limit": "5"}, r"^rate_limit: invalid rate '5': use [^()]*$"),
        ({"retry_on": ()}, r"^retry_on: must have at least 1 item \(got tuple\)$"),
        ({"retry_on": 5}, r"^retry_on: must be a list \(got 5\)$"),
    ],
)
def test_a_message_says_each_thing_once_and_in_the_words_of_the_user(
    options: GivenTaskOptions, told: str
) -> None:
    with pytest.raises(InvalidTask, match=told):
        task_options(options)


def test_what_a_type_does_not_have_is_called_a_field_in_a_result_and_within_an_argument() -> None:
    def move(claim: Claim, to: Closed) -> Closed: ...  # type: ignore[empty-body]

    moving = body(move, "move")
    more = b'{"street": "High", "zip": 1}'
    with pytest.raises(InvalidTask, match=r"its type: zip: is no field of it$"):
        moving.value(more)
    with pytest.raises(OtherArguments, match=r"^move: to\.zip: is no field of it; by: is no argument of it$"):
        moving.arguments(b'{"to": %b, "by": 1}' % more)


class Account(BaseModel):
    name: str
    password: SecretStr


def test_a_secret_is_refused_as_its_text_would_not_be_stored() -> None:
    """The body got asterisks in its place."""

    def log_in(claim: Claim, account: Account, note: str = "") -> None: ...

    account = Account(name="a", password=SecretStr("b"))
    with pytest.raises(InvalidTask, match="log_in: a secret is never stored"):
        body(log_in, "log_in").payload((account,), {})
    asterisks = Account(name="a", password=SecretStr("*" * 10))
    payload = body(log_in, "log_in").payload((asterisks, "*" * 10), {})
    assert body(log_in, "log_in").arguments(payload) == {"account": asterisks, "note": "*" * 10}


def test_an_iterator_loses_no_item_to_the_attempt_to_write_it() -> None:
    def visit(claim: Claim, zones: list[ZoneInfo], counts: list[int]) -> None: ...

    visiting = body(visit, "visit")
    rome, utc = ZoneInfo("Europe/Rome"), ZoneInfo("UTC")
    assert visiting.payload(([rome, utc], [1, 2]), {}) == b'{"zones":["Europe/Rome","UTC"],"counts":[1,2]}'
    with pytest.raises(InvalidTask, match="visit: zones can be read once only: give a list"):
        visiting.payload((iter([rome, utc]), [1]), {})

    def label(claim: Claim, zones: dict[str, list[ZoneInfo]]) -> None: ...

    with pytest.raises(InvalidTask, match="label: zones can be read once only: give a list"):
        body(label, "label").payload(({"a": iter([rome, utc])},), {})


@pytest.mark.rule("SK-21")
@pytest.mark.parametrize("payload", [b"{}", b'{"to": "a", "more": 1}', b'{"to": 5}'])
def test_arguments_of_another_version_are_told(payload: bytes) -> None:
    with pytest.raises(OtherArguments, match="send: "):
        body().arguments(payload)


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("payload", [b"", b"[]", b"null", b"\xff"])
def test_a_payload_that_no_version_can_read_is_told(payload: bytes) -> None:
    with pytest.raises(InvalidTask, match="send: ") as raised:
        body().arguments(payload)
    assert not isinstance(raised.value, OtherArguments)


def nothing() -> None: ...
def starred(claim: Claim, *to: str) -> None: ...
def doubly(claim: Claim, **to: str) -> None: ...
def first_is_text(to: str) -> None: ...
def unreadable(claim: Claim, to: Nowhere) -> None: ...  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (nothing, "the first parameter must be the claim"),
        (starred, "can't be stored by its name"),
        (doubly, "can't be stored by its name"),
        (first_is_text, "the first parameter is the claim"),
        (unreadable, "a type hint can't be read"),
    ],
)
def test_a_function_that_can_be_no_task_is_refused(function: Any, told: str) -> None:
    with pytest.raises(InvalidHandlers, match=told):
        body(function, "it")


def test_a_name_that_can_not_be_stored_is_refused() -> None:
    with pytest.raises(InvalidName):
        body(send, "")


@pytest.mark.parametrize(
    "options",
    [
        {"retries": -1},
        {"timeout_s": 0},
        {"timeout_s": math.inf},
        {"timeout_s": 1e300},
        {"max_backoff_s": 1e300},
        {"priority": 2**31},
        {"backoff_s": -1.0},
        {"colour": "red"},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        TaskOptions(**options)


def test_type_checkers_know_every_option() -> None:
    assert list(GivenTaskOptions.__annotations__) == list(TaskOptions.model_fields)
    assert list(GivenOptions.__annotations__) == list(EnqueueOptions.model_fields)


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("kind", [Queue, AsyncQueue])
def test_a_refused_schedule_registers_no_function(kind: type[Queue | AsyncQueue]) -> None:
    queue = kind("memory://")

    def sweep(claim: Claim) -> None: ...

    with pytest.raises(InvalidTask, match="sweep"):
        queue.periodic("every day")(sweep)
    assert queue.functions == {}
    queue.periodic("0 0 * * *")(sweep)
    with pytest.raises(InvalidHandlers, match="registered already"):
        queue.periodic("0 0 * * *")(sweep)
    assert len(queue.schedules) == 1
    if isinstance(queue, Queue):
        queue.close()


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("kind", [Queue, AsyncQueue])
def test_a_periodic_function_that_needs_arguments_is_refused(kind: type[Queue | AsyncQueue]) -> None:
    """Else each of its ticks would be logged, and no task would ever come."""
    queue = kind("memory://")

    def sweep(claim: Claim, folder: str, age_s: int = 5) -> None: ...

    with pytest.raises(InvalidHandlers, match=r"'sweep': a schedule gives no arguments, and folder has no d"):
        queue.periodic("0 0 * * *")(sweep)
    assert queue.functions == {}
    assert queue.schedules == ()
    if isinstance(queue, Queue):
        queue.close()


@pytest.mark.rule("SK-12", "SK-14")
@pytest.mark.parametrize("age_s", [-1.0, math.nan])
def test_an_age_that_is_none_chooses_no_tasks(tmp_path: Path, age_s: float) -> None:
    """It would choose all of them, to be cancelled or deleted."""
    with Queue("memory://", state_folder=tmp_path) as queue:
        queue.cancel(queue.task(send).enqueue("a"))
        with pytest.raises(InvalidArgument, match="older_than_s"):
            queue.requeue_all(queue.tasks(older_than_s=age_s))
        with pytest.raises(InvalidArgument, match="older_than_s"):
            queue.collect(age_s, statuses=frozenset({Status.CANCELLED}))
        with pytest.raises(InvalidArgument, match="older_than_s"):
            queue.newest(1, older_than_s=age_s)
        with pytest.raises(InvalidArgument, match="limit is -1"):
            queue.newest(-1)
        assert queue.count()[Status.CANCELLED] == 1


@pytest.mark.rule("SK-12")
def test_the_newest_tasks_are_found_without_reading_all_of_a_busy_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, read = FakeClock(), []
    with Queue("memory://", clock=clock, state_folder=tmp_path) as queue:
        made: list[str] = []
        for _ in range(30):
            made += queue.task(name=f"send{len(made)}")(send).enqueue_many([(("a",), {})] * 50)
            clock.advance(1.0)
        page = queue.context.engine.page

        def counted(*arguments: Any, **named: Any) -> Any:
            found = page(*arguments, **named)
            read.extend(found.items)
            return found

        monkeypatch.setattr(queue.context.engine, "page", counted)
        assert [each.head.id for each in queue.newest(20)] == made[:-21:-1]
    assert len(read) <= 9 * 50


def test_a_mistyped_option_fails_the_type_check(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "from rebalanser.tasks import AsyncQueue, Claim, Queue\n"
        "q, a = Queue('memory://'), AsyncQueue('memory://')\n"
        "@q.task(retries=5, retry_on=(OSError, ValueError), backoff_s=lambda n: 2.0 * n, timeout_s=None)\n"
        "def send(claim: Claim, to: str) -> str: return to\n"
        "send.options(priority=3).enqueue('a@example.org')\n"
        "@q.periodic('* * * * *', 'other', retry_on=OSError, jitter_s=3, jitter=0)\n"
        "def sweep(claim: Claim) -> None: ...\n"
        "q.task(retrys=5)\n"
        "q.task(timeout_s='5')\n"
        "q.periodic('* * * * *', timeout=5)\n"
        "q.task(retry_on=5)\n"
        "a.task(retrys=5)\n"
        "a.periodic('* * * * *', timeout=5)\n"
        "send.options(delay=5)\n"
        "send.enqueue(5)\n"
    )
    out, err, code = api.run(["--strict", "--no-error-summary", f"--cache-dir={tmp_path}", str(file)])
    assert (err, code) == ("", 1), out
    lines = [int(line.split(":")[1]) for line in out.splitlines() if ": error:" in line]
    assert lines == list(range(8, 16)), out


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("delay_s", [-1.0, math.inf, -math.inf, math.nan, 1e300, MAX_SECONDS + 1])
def test_a_delay_that_no_clock_can_wait_for_is_refused(tmp_path: Path, delay_s: float) -> None:
    with Queue("mail", f"memory://{tmp_path}", state_folder=tmp_path) as queue:
        send_later = queue.task(send)
        send_later.options(delay_s=MAX_SECONDS).enqueue("a")
        with pytest.raises(InvalidTask, match=r"^send: delay_s: must be [^\n]*$"):
            send_later.options(delay_s=delay_s).enqueue("a")
        assert sum(queue.count().values()) == 1
    with pytest.raises(ValueError, match="delay_s"):
        NewTask.model_validate({"name": "send", "payload": {"value": {}}, "delay_s": delay_s})
    with pytest.raises(ValueError, match="delay_s"):
        Failure.model_validate({"holder": "it", "error": "it", "delay_s": delay_s})


@pytest.mark.rule("SK-5")
def test_a_task_waits_for_a_stated_number_of_others_at_most(tmp_path: Path) -> None:
    ids = [f"{number:040x}" for number in range(MAX_AFTER + 1)]
    with Queue("mail", f"memory://{tmp_path}", state_folder=tmp_path) as queue:
        send_later = queue.task(send)
        send_later.options(after=ids[1:], waits_for_unknown=True).enqueue("a")
        with pytest.raises(InvalidTask, match=f"^send: after: must have at most {MAX_AFTER} items"):
            send_later.options(after=ids, waits_for_unknown=True).enqueue("a")
    asked = {"name": "send", "payload": {"value": {}}, "after": ids}
    with pytest.raises(ValueError, match=f"at most {MAX_AFTER} items"):
        NewTask.model_validate(asked)


@pytest.mark.rule("SK-1", "SK-14")
def test_an_id_of_the_far_future_is_refused(tmp_path: Path) -> None:
    """As of a hash: its task would never be old enough to be collected."""

    class Wall:
        at = 1e9

        def now(self) -> float:
            return self.at

        wall = now

    with Queue("mail", f"memory://{tmp_path}", state_folder=tmp_path) as queue:
        send_later = queue.task(send)
        queue._clock = clock = Wall()  # type: ignore[assignment]
        clock.at = int(queue.new_id()[:16], 16) / 1000
        late = f"{round((clock.at + FAR_FUTURE_S - 60) * 1000):016x}{0:024x}"
        assert send_later.options(task_id=late).enqueue("a") == late
        for made in (f"{round((clock.at + FAR_FUTURE_S + 3600) * 1000):016x}{0:024x}", "ab" * 20):
            with pytest.raises(InvalidTask, match=r"years ahead.*ids come from new_id\(\)"):
                send_later.options(task_id=made).enqueue("a")
        clock.at = 0.0  # as on a host that has just booted
        ours = queue.new_id()
        assert send_later.options(task_id=ours).enqueue("a") == ours


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("kind", [Queue, AsyncQueue])
def test_a_function_that_is_decorated_in_a_wrong_way_is_told_how(kind: type[Queue | AsyncQueue]) -> None:
    queue: Any = kind("mail", f"memory://decorated-{kind.__name__}")

    def sweep(claim: Claim) -> None: ...

    with pytest.raises(InvalidHandlers, match=r"needs a cron expression, such as @tasks\.periodic"):
        queue.periodic(sweep)
    registered = queue.task(retries=5)(sweep)
    for decorate in (queue.task, queue.periodic("* * * * *"), queue.periodic("* * * * *", name="other")):
        with pytest.raises(InvalidHandlers, match="'sweep' is a task function already: decorate it once"):
            decorate(registered)
    with pytest.raises(InvalidHandlers, match="type partial has no name: register a function"):
        queue.task(partial(sweep))
    assert not queue.schedules
    assert list(queue.functions) == ["sweep"]
    if isinstance(queue, Queue):
        queue.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"retry": 1}, r"^retry: there is no such option; there are: priority, retries, timeout_s, "),
        ({"backoff_s": -1}, r"^backoff_s: must be greater than 0 \(got -1\); backoff_s: must be callable "),
        ({"max_running": 1, "max_running_per_key": 1}, r"^give max_running or max_running_per_key, not both"),
    ],
)
def test_an_option_that_is_wrong_is_told_in_our_words(options: dict[str, Any], told: str) -> None:
    with Queue("memory://") as queue, pytest.raises(InvalidTask, match=told):
        queue.task(**options)


@pytest.mark.parametrize("kind", [Queue, AsyncQueue])
@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("priority", "5", "must be a valid integer"),
        ("priority", True, "must be a valid integer"),
        ("retries", "5", "must be a valid integer"),
        ("retries", True, "must be a valid integer"),
        ("retries", 5.0, "must be a valid integer"),
        ("timeout_s", "5", "must be a valid number"),
        ("timeout_s", True, "must be a valid number"),
        ("backoff_s", "5", "must be a valid number"),
        ("max_backoff_s", "5", "must be a valid number"),
        ("jitter", "0.5", "must be a valid number"),
        ("unique_for_s", "5", "must be a valid number"),
        ("max_running", "5", "must be a valid integer"),
        ("max_running_per_key", True, "must be a valid integer"),
        ("rate_limit", b"5/s", "must be a valid string"),
        ("rate_limit_per_key", 5, "must be a valid string"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_by_its_name(
    kind: type[Queue | AsyncQueue], option: str, value: Any, told: str
) -> None:
    queue = kind("memory://")
    for decorator in (queue.task, partial(queue.periodic, "* * * * *")):
        with pytest.raises(InvalidTask, match=rf"^{option}: {told}"):
            decorator(**{option: value})
    if isinstance(queue, Queue):
        queue.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("delay_s", "5"),
        ("delay_s", True),
        ("after", 5),
        ("after", [b"0" * 40]),
        ("after_failure", True),
        ("priority", "5"),
        ("priority", True),
        ("task_id", b"0" * 40),
        ("waits_for_unknown", "no"),
        ("waits_for_unknown", 1),
        ("unique_key", b"a"),
        ("unique_for_s", "5"),
        ("key", 7),
    ],
)
def test_an_option_of_a_task_of_a_wrong_type_is_refused_by_its_name(option: str, value: Any) -> None:
    with Queue("memory://") as queue:
        function = queue.task(send)
        with pytest.raises(InvalidTask, match=rf"^send: {option}(\.\d)?: must be "):
            function.options(**{option: value})
        function.options(after=(each for each in ()), after_failure="run", delay_s=5, priority=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", "5"), ("delay_s", "5"), ("delay_s", True), ("retries", "5"), ("retries", True),
        ("timeout_s", "5"), ("waits_for_unknown", "no"), ("unique_for_s", "5"), ("max_running", "5"),
        ("max_running_per_key", True), ("rate_limit", 5),
    ],
)  # fmt: skip
def test_an_option_of_a_wrong_type_is_refused_over_http(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        NewTask.model_validate({"name": "send", "payload": {"value": {}}, field: value})
    assert [each["loc"] for each in refused.value.errors()] == [(field,)]


@pytest.mark.parametrize("kind", [Queue, AsyncQueue])
def test_options_of_a_schedule_are_told_with_those_of_a_task(kind: type[Queue | AsyncQueue]) -> None:
    queue = kind("memory://")

    def sweep(claim: Claim) -> None: ...

    known = "priority, retries, .*rate_limit_per_key, time_zone, jitter_s, overlap"
    with pytest.raises(InvalidTask, match=f"^tz: there is no such option; there are: {known}$"):
        queue.periodic("* * * * *", tz="Europe/Rome")  # type: ignore[call-arg]
    with pytest.raises(InvalidTask, match=r"^overlap is 'no': give True or False$"):
        queue.periodic("* * * * *", overlap="no")  # type: ignore[arg-type]
    for jitter_s in ("5", True):
        with pytest.raises(InvalidTask, match=r"^sweep: jitter_s is "):
            queue.periodic("* * * * *", jitter_s=jitter_s)(sweep)  # type: ignore[arg-type]
    with pytest.raises(InvalidTask, match=r"^sweep: unknown time zone True"):
        queue.periodic("* * * * *", time_zone=True)(sweep)  # type: ignore[arg-type]
    with pytest.raises(InvalidHandlers, match=r"^the name of a task is text, not 5$"):
        queue.periodic("* * * * *", 5)(sweep)  # type: ignore[arg-type]
    assert queue.schedules == ()
    if isinstance(queue, Queue):
        queue.close()


@pytest.mark.rule("SK-3")
def test_of_many_calls_the_wrong_one_is_named_by_its_position(tmp_path: Path) -> None:
    for outbox in (None, tmp_path / "outbox"):
        with Queue("memory://", state_folder=tmp_path, outbox=outbox) as queue:
            function, other = queue.task(send), queue.task("other")(send)
            with pytest.raises(InvalidTask, match=r"^calls\[2\]: send: copies: must be a valid integer"):
                function.enqueue_many([(["a"], {}), (["b"], {}), (["c", "x"], {})])
            with pytest.raises(InvalidTask, match=r"^send: copies: must be "):
                function.enqueue("c", "x")  # type: ignore[arg-type]
            assert not any(queue.count().values())
            ids = [queue.new_id() for _ in range(2)]
            taken = function.options(task_id=ids[0])
            taken.enqueue("a")
            with pytest.raises(TaskExists, match=r"^calls\[1\]: .* exists with other content"):
                taken.enqueue_many([(["a"], {}), (["b"], {})])
            with pytest.raises(TaskExists, match=rf"^task {ids[0]} exists"):
                taken.enqueue("b")
            calls = [function.call("a"), function.call("x", "y").then(other)]  # type: ignore[arg-type]
            with pytest.raises(InvalidTask, match=r"^calls\[1\]: send: copies: must be "):
                queue.enqueue_all(calls)
            with pytest.raises(InvalidTask, match=r"^send: copies: must be "):
                calls[1].enqueue()
            with pytest.raises(InvalidTask, match=r"^calls\[1\] is 5: give a call .* send\.call"):
                queue.enqueue_all([calls[0], 5])  # type: ignore[list-item]


@pytest.mark.rule("SK-3")
def test_of_calls_that_the_store_refuses_together_the_one_is_named(tmp_path: Path) -> None:
    with Queue("memory://", state_folder=tmp_path) as queue:
        function, other = queue.task(send), queue.task("other")(send)
        ids = [queue.new_id() for _ in range(2)]
        function.options(task_id=ids[0]).enqueue("a")
        taken, unknown = function.options(task_id=ids[0]), function.options(after=[ids[1]])
        for wrong, kind, told in (
            (taken.call("b"), TaskExists, f"task {ids[0]} exists"),
            (unknown.call("b"), UnknownTask, "task .* is to come after"),
        ):
            with pytest.raises(kind, match=rf"^calls\[1\]: {told}"):
                queue.enqueue_all([function.call("a"), wrong.then(other)])
        loop = function.options(task_id=ids[1], after=[ids[1]])
        with pytest.raises(DependencyCycle, match=r"^calls\[1\]: "):
            queue.enqueue_all([function.call("a"), loop.call("b")])
        twice = function.options(task_id=ids[1])
        with pytest.raises(InvalidTask, match=f"have one id, {ids[1]}$"):
            queue.enqueue_all([twice.call("a"), twice.call("b")])
        assert sum(queue.count().values()) == 1


def test_what_is_no_call_and_no_list_of_calls_is_refused_with_a_hint(tmp_path: Path) -> None:
    async def awaited() -> None:
        async with AsyncQueue("memory://", state_folder=tmp_path) as queue:
            function = queue.task(send)
            with pytest.raises(InvalidTask, match=r"^enqueue_all takes a list of calls.* has enqueue\(\)$"):
                await queue.enqueue_all(function.call("a"))  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match=r"^then\(\) takes .* AsyncTaskFunction, not 5$"):
                function.call("a").then(5)  # type: ignore[arg-type]
            assert len(await queue.enqueue_all(function.call(each) for each in "ab")) == 2  # type: ignore[arg-type]
            with pytest.raises(InvalidTask, match=r"^calls\[1\]: send: copies: must be "):
                await function.enqueue_many([(["a"], {}), (["a", "x"], {})])
            with pytest.raises(InvalidTask, match=r"^send: copies: must be "):
                await function.enqueue("a", "x")  # type: ignore[arg-type]

    asyncio.run(awaited())
    with Queue("memory://", state_folder=tmp_path) as queue:
        function = queue.task(send)
        for wrong in (function.call("a"), "ab", 5, None):
            with pytest.raises(
                InvalidTask, match=r"^enqueue_all takes a list of calls, such as \[send\.call"
            ):
                queue.enqueue_all(wrong)  # type: ignore[arg-type]
        for wrong, told in ((5, "5"), (send, "'?.*send"), (function.call("b"), "Call")):
            with pytest.raises(InvalidArgument, match=rf"^then\(\) takes .* TaskFunction, not {told}"):
                function.call("a").then(wrong)  # type: ignore[arg-type]
        assert len(queue.enqueue_all(function.call(each) for each in "ab")) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"claim_ttl_s": 0}, "claim_ttl_s is how many seconds a claim lasts, more than 0, not 0"),
        ({"claim_ttl_s": math.nan}, "claim_ttl_s"),
        ({"claim_ttl_s": math.inf}, "claim_ttl_s"),
        ({"buffer_s": -1}, "buffer_s is a number of seconds, 0 or more, not -1"),
        ({"buffer_s": math.nan}, "buffer_s"),
        ({"claim_ttl_s": "30"}, "claim_ttl_s is how many seconds a claim lasts, more than 0, not '30'"),
        ({"buffer_s": "3"}, "buffer_s is a number of seconds, 0 or more, not '3'"),
        ({"timeout_s": -1}, "timeout_s is how many seconds a call may take, more than 0, not -1"),
        ({"retention": 7}, r"retention is 7: give Retention\(completed_s=…\), or None"),
        ({"retention": {"completed_s": 7}}, "retention is {'completed_s': 7}"),
        ({"middleware": [Middleware]}, r"middleware is \[<class .*Middleware'>\]: give a list of objects"),
        ({"middleware": Middleware()}, "middleware is .*: give a list of objects"),
        ({"outbox": "spool"}, "outbox is 'spool': give a folder as pathlib.Path"),
        ({"clock": FakeClock}, "clock is the class FakeClock: give a clock"),
        ({"clock": 5}, "clock is 5: give a clock"),
        ({"partitions": 0}, "partitions is 0: give a number of partitions, 1 or more"),
        ({"partitions": True}, "partitions is True"),
        ({"partitions": "16"}, "partitions is '16'"),
        ({"claim_ttl_s": True}, "claim_ttl_s"),
        ({"buffer_s": True}, "buffer_s"),
        ({"timeout_s": "10"}, "timeout_s is how many seconds"),
        ({"timeout_s": True}, "timeout_s is how many seconds"),
        ({"create": "no"}, "create is 'no': give True or False"),
        ({"node": 5}, "node is 5: give a text"),
        ({"settings": {}}, r"settings are {}: give rebalanser\.Settings"),
        ({"state_folder": "state"}, "state_folder is 'state': give a folder as pathlib.Path"),
    ],
)
@pytest.mark.parametrize("kind", [Queue, AsyncQueue])
def test_options_of_a_queue_that_can_not_be_are_refused(
    kind: type[Queue | AsyncQueue], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidArgument, match=told):
        kind("mail", "memory://", **options)


@pytest.mark.parametrize("kind", [Queue, AsyncQueue])
@pytest.mark.parametrize("name", [5, None, b"mail"])
def test_a_name_that_is_no_text_is_refused(kind: type[Queue | AsyncQueue], name: Any) -> None:
    for url in ((), ("memory://",)):
        with pytest.raises((InvalidName, InvalidUrl)):
            kind(name, *url)


@pytest.mark.parametrize("option", [field.name for field in fields(Retention)])
@pytest.mark.parametrize("value", ["5", True, -1, math.nan, math.inf])
def test_a_retention_of_a_wrong_type_is_refused_by_its_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"^{option} is "):
        Retention(**{option: value})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda queue, task: queue.get(None), "the task is None: give the id of one task"),
        (lambda queue, task: queue.payload(5), "the task is 5: give the id"),
        (lambda queue, task: queue.wait([task]), r"the task is \['.*'\]: give the id of one task"),
        (lambda queue, task: queue.wait(task, timeout_s="5"), "timeout_s is '5': give seconds from 0"),
        (lambda queue, task: queue.wait(task, timeout_s=-1), "timeout_s is -1: give seconds from 0"),
        (lambda queue, task: queue.wait(task, timeout_s=True), "timeout_s is True: give seconds from 0"),
        (lambda queue, task: queue.get(task, at_least="5"), "at_least is '5': give a revision"),
        (lambda queue, task: next(queue.tasks(page=True)), "page is True: give a number of tasks from 1"),
        (lambda queue, task: next(queue.tasks(at_least=-1)), "at_least is -1: give a revision"),
        (lambda queue, task: next(queue.tasks(after=5)), "after is 5: give a text"),
        (lambda queue, task: next(queue.tasks(name=5)), "name is 5: give a text"),
        (lambda queue, task: next(queue.tasks(older_than_s=True)), "older_than_s is True"),
        (lambda queue, task: queue.newest(True), "limit is True: give a number of tasks from 0"),
        (lambda queue, task: queue.collect(archive="a"), "archive is 'a': give a file as pathlib.Path"),
        (lambda queue, task: queue.start("4"), "concurrency is how many tasks .*, not '4'"),
        (lambda queue, task: queue.start(True), "concurrency is how many tasks .*, not True"),
        (lambda queue, task: queue.start(bodies="process"), 'bodies is \'process\': give "threads" or "proc'),
        (lambda queue, task: queue.stop("5"), "grace_s is '5': give seconds from 0, or None for 30"),
        (lambda queue, task: queue.run_until_idle(advance_s=True), "advance_s is True"),
        (lambda queue, task: Queues(queue).start("4"), "concurrency is how many tasks .*, not '4'"),
        (lambda queue, task: Queues(queue).stop(-1), "grace_s is -1"),
        (lambda queue, task: Queues([queue]), r"Queues\(…\) takes queues one by one, .* not \[Queue\("),
        (lambda queue, task: Queues("mail"), "takes queues one by one, .* not 'mail'"),
        (lambda queue, task: AsyncQueues(queue), r"made by AsyncQueue\(…\), not Queue\("),
        (lambda queue, task: Retry(delay_s=True), "delay_s is True"),
        (lambda queue, task: Retry(delay_s="5"), "delay_s is '5'"),
        (lambda queue, task: queue.newest("5"), "limit is '5': give a number of tasks from 0"),
        (lambda queue, task: queue.collect("1d"), "older_than_s is '1d': give seconds from 0"),
        (lambda queue, task: queue.cancel_all([task]), "'.*' is not a task: give what tasks"),
        (lambda queue, task: queue.requeue_all(task), "'0' is not a task: give what tasks"),
        (lambda queue, task: Queues(queue).start("4"), "concurrency is how many .* or more, not '4'"),
        (lambda queue, task: queue.start(1.5), "concurrency is how many tasks .* or more, not 1.5"),
    ],
)
def test_an_argument_of_a_wrong_type_is_told_with_its_value(
    call: Callable[[Queue, str], object], told: str
) -> None:
    with Queue("memory://") as queue:
        task = queue.task(send).enqueue("a")
        with pytest.raises(InvalidArgument, match=told):
            call(queue, task)


def test_waiting_in_a_loop_refuses_what_is_no_task_or_no_time() -> None:
    async def wait(task: Any, timeout_s: Any) -> None:
        async with AsyncQueue("memory://") as queue:
            await queue.wait(task, timeout_s)

    with pytest.raises(InvalidArgument, match="the task is None"):
        asyncio.run(wait(None, 1))
    with pytest.raises(InvalidArgument, match="timeout_s is '5'"):
        asyncio.run(wait("0" * 40, "5"))


def test_a_worker_that_runs_nothing_at_a_time_is_refused() -> None:
    with Queue("memory://") as queue:
        for each in (queue, Queues(queue)):
            with pytest.raises(
                InvalidArgument, match="concurrency is how many tasks run at a time, 1 or more"
            ):
                each.start(0)
        assert queue.run_until_idle() == 0, "it is not started"


def test_a_closed_queue_says_so(tmp_path: Path) -> None:
    queue = Queue("mail", f"memory://{tmp_path}", state_folder=tmp_path)
    queue.task(send)
    queue.close()
    queue.close()
    for call in (
        queue.start,
        queue.count,
        lambda: queue.start_claim_source(lambda: None),
        lambda: queue.wait("0" * 40),
    ):
        with pytest.raises(InvalidState, match="the queue is closed"):
            call()
    queue.stop()


def test_a_function_is_registered_with_parentheses_and_without(tmp_path: Path) -> None:
    with Queue("mail", "memory://parentheses", state_folder=tmp_path) as queue:

        @queue.task
        def plain(claim: Claim, to: str) -> str:
            return f"to {to}"

        @queue.task()
        def empty(claim: Claim, to: str) -> str:
            return f"to {to}"

        @queue.task("other", retries=1)
        def named(claim: Claim, to: str) -> str:
            return f"to {to}"

        assert [(each.name, each.body.options.retries) for each in (plain, empty, named)] == [
            ("plain", TaskOptions().retries), ("empty", TaskOptions().retries), ("other", 1)
        ]  # fmt: skip
        claim: Any = None
        assert [each(claim, "a") for each in (plain, empty, named)] == ["to a"] * 3
        with pytest.raises(TypeError):
            plain(claim)  # type: ignore[call-arg] # its parameters are known to type checkers too
        assert queue.get(plain.enqueue("a")).head.name == "plain"
        queue.task(send)
        with pytest.raises(InvalidHandlers, match="registered already"):
            queue.task(send)


def test_the_asyncio_twin_registers_functions_in_the_same_ways() -> None:
    queue = AsyncQueue("mail", "memory://parentheses")

    @queue.task
    async def coroutine(claim: AsyncClaim, to: str) -> str:
        return f"to {to}"

    @queue.task
    def plain(claim: Claim, to: str) -> str:
        return f"to {to}"

    @queue.task(name="other")
    async def named(claim: AsyncClaim) -> None: ...

    assert list(queue.functions) == ["coroutine", "plain", "other"]
    claim: Any = None
    assert asyncio.run(coroutine(claim, "a")) == plain(claim, "a") == "to a"
    with pytest.raises(TypeError):
        plain(claim)  # type: ignore[call-arg] # its parameters are known to type checkers too


def test_a_scheme_of_groups_only_is_told_from_an_unknown_one() -> None:
    with pytest.raises(UnknownScheme, match=r"^kafka:// keeps no tasks; known: etcd"):
        Queue("mail", "kafka://127.0.0.1:1/cluster").open()
    with pytest.raises(UnknownScheme, match=r"^no backend for redis://; known: etcd"):
        Queue("mail", "redis://127.0.0.1:1").open()


@pytest.mark.rule("SK-15")
def test_an_argument_may_have_the_name_of_an_option(tmp_path: Path) -> None:
    with Queue("mail", "memory://", state_folder=tmp_path) as queue:

        @queue.task
        def remind(claim: Claim, delay_s: float, after: str, options: str = "") -> None: ...

        task = remind.options(delay_s=60.0).enqueue(5.0, after="lunch", options="none")
        assert queue.payload(task) == b'{"delay_s":5.0,"after":"lunch","options":"none"}'
        assert queue.get(task).state.due > 0
        assert queue.get(remind.enqueue(5.0, after="lunch")).state.due == 0
        with pytest.raises(
            InvalidTask, match=r"^remind: colour: there is no such option; there are: delay_s, a"
        ):
            remind.options(colour="red")  # type: ignore[call-arg]


def test_what_is_enqueued_and_waited_for_has_types(tmp_path: Path) -> None:
    clock = FakeClock()
    with Queue("mail", "memory://", clock=clock, state_folder=tmp_path) as queue:

        @queue.task
        def count(claim: Claim, to: list[str], *, twice: bool = False) -> int:
            return len(to) * (1 + twice)

        @queue.task(retries=0)
        async def at(claim: Claim, day: datetime.date) -> datetime.datetime:
            return datetime.datetime(day.year, day.month, day.day, tzinfo=datetime.UTC)

        @queue.task("nothing")
        def none(claim: Claim) -> None: ...

        @queue.task
        def plain(claim: Claim):  # type: ignore[no-untyped-def] # as some bodies are
            return {"a": datetime.date(2026, 1, 2)}

        number = assert_type(count.enqueue(["a"], twice=True), Enqueued[int])
        day = at.options(delay_s=1.0).enqueue(datetime.date(2026, 1, 2))
        nothing_told, told = none.enqueue(), plain.enqueue()
        assert queue.run_until_idle(advance_s=1.0) == 4
        assert assert_type(queue.wait(number), int) == 2
        assert assert_type(queue.wait(day), datetime.datetime).isoformat() == "2026-01-02T00:00:00+00:00"
        assert queue.wait(nothing_told) is None
        assert queue.wait(told) == {"a": "2026-01-02"}
        assert queue.wait(str(number)) == 2
        with pytest.raises(InvalidTask):
            count.enqueue(5)  # type: ignore[arg-type]
        with pytest.raises(InvalidTask):
            count.options(priority=1).enqueue()  # type: ignore[call-arg]
        with pytest.raises(InvalidTask):
            count.enqueue([], delay_s=5.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("returns", "result", "value"),
    [
        (int, b"5", 5),
        (float, b"5", 5.0),
        (Any, b'{"a":[1]}', {"a": [1]}),
        (tuple[int, ...], b"[1,2]", (1, 2)),
        (object, b'"a"', "a"),
        (threading.Event, b'"a"', "a"),
        (None, None, None),
        (None, b'"completed in a transaction"', "completed in a transaction"),
        (int, None, None),
    ],
)
def test_a_result_comes_back_by_the_return_type(returns: Any, result: bytes | None, value: object) -> None:
    def function(claim: Claim) -> Any: ...

    function.__annotations__["return"] = returns
    found = body(function, "it").value(result)
    assert found == value
    assert type(found) is type(value)


def test_a_result_that_does_not_fit_the_return_type_is_told() -> None:
    def function(claim: Claim) -> int: ...  # type: ignore[empty-body]

    with pytest.raises(InvalidTask, match="the result does not fit its type"):
        body(function, "it").value(b'"many"')


@pytest.mark.rule("SK-19")
def test_a_result_that_is_no_json_is_told() -> None:
    """As a client in another language may have sent; whether the function is known here or not."""

    def untyped(claim: Claim): ...  # type: ignore[no-untyped-def]

    state = TaskState(Status.COMPLETED, result=b"\xff")
    stored = Stored(Head("0" * 40, "mail", "untyped"), state, 1, 0)
    for functions in ({}, {"untyped": body(untyped, "untyped")}):
        with pytest.raises(InvalidTask, match=r"^untyped: the result is not JSON: "):
            value_of(stored, functions)


@pytest.mark.rule("SK-5")
def test_a_single_task_may_be_waited_for(tmp_path: Path) -> None:
    with Queue("mail", "memory://single", state_folder=tmp_path) as queue:
        registered = queue.task(send)
        first = registered.enqueue("a")
        assert queue.get(registered.options(after=first).enqueue("b")).head.after == (first,)
        with pytest.raises(InvalidTask, match=r"^send: after\.0: a task id is 40 .* \(got 'first'\)$"):
            registered.options(after="first").enqueue("b")


@pytest.mark.rule("SK-21")
def test_a_name_that_no_function_here_has_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Queue("mail", "memory://misspelt", state_folder=tmp_path) as queue:
        queue.build_raw_enqueue("sned", b"{}", EnqueueOptions())
        assert not caplog.records, "a queue without functions only enqueues"
        queue.task(send)
        for name in ("send", "sned", "sned"):
            queue.build_raw_enqueue(name, b"{}", EnqueueOptions())
    (told,) = [each.getMessage() for each in caplog.records]
    assert "sned" in told
    assert "send" in told


def count(claim: Claim, page: str) -> int:
    return len(page)


def report(claim: Claim, total: float, unit: str = "") -> str:
    return f"{total:g}{unit}"


def report_all(claim: Claim, parts: list[int], *, at: datetime.date | None = None) -> dict[str, int]:
    return {"sum": sum(parts)}


@pytest.mark.rule("SK-5")
def test_calls_that_get_results_are_typed() -> None:
    with Queue("memory://", clock=FakeClock()) as queue:
        counting, reporting, summing = queue.task(count), queue.task(report), queue.task(report_all)
        page = assert_type(counting.call("abc"), Call[int])
        last = assert_type(page.then(reporting, unit="kg"), Call[str])
        summed = assert_type(summing.call([page.result, counting.call("ab").result]), Call[dict[str, int]])
        # An int is a float; a str is none, and an int is no list.
        wrong = last.then(reporting)  # type: ignore[arg-type]
        page.then(summing)  # type: ignore[arg-type]
        page.then(reporting, 5)  # type: ignore[arg-type]
        summing.call([last.result])  # type: ignore[list-item]
        told = assert_type(last.enqueue(), Enqueued[str])
        answers = assert_type(queue.enqueue_all([page, page]), list[Enqueued[int]])
        assert answers == [page.id, page.id]
        later = assert_type(reporting.enqueue(answers[0].result), Enqueued[str])
        refused, sums = wrong.enqueue(), summed.enqueue()
        assert queue.run_until_idle() == 6
        assert assert_type(queue.wait(told), str) == "3kg"
        assert queue.wait(later) == "3"
        assert queue.wait(sums) == {"sum": 5}
        with pytest.raises(TaskFailed, match=f"'3kg'.; total is the result of task {last.id}"):
            queue.wait(refused)


def test_what_is_enqueued_already_is_no_call() -> None:
    with Queue("memory://") as queue:
        given: Any = queue.task(count).enqueue("a")
        with pytest.raises(
            InvalidTask, match=r"^calls\[0\] is '[0-9a-f]{40}': give a call .* send\.call\(…\)$"
        ):
            queue.enqueue_all([given])


@pytest.mark.rule("SK-5")
def test_a_call_waits_for_those_whose_results_it_gets() -> None:
    with Queue("memory://") as queue:
        counting, summing = queue.task(count), queue.task(report_all)
        before = counting.enqueue("a")
        pages = [counting.call("abc"), counting.call("ab")]
        last = summing.options(after=before).call([page.result for page in (*pages, pages[0])]).enqueue()
        assert queue.get(last).head.after == (before, pages[0].id, pages[1].id)


@pytest.mark.rule("SK-5")
def test_calls_of_an_async_queue_pass_their_results_on() -> None:
    async def main() -> None:
        async with AsyncQueue("memory://", clock=FakeClock()) as queue:

            @queue.task
            async def fetch(claim: AsyncClaim, page: str) -> int:
                return len(page)

            reporting = queue.task(report)
            pages = [fetch.call("abc"), fetch.call("ab")]
            last = assert_type(pages[0].then(reporting, "kg"), AsyncCall[str])
            pages[0].then(fetch)  # type: ignore[arg-type]
            answers = await queue.enqueue_all([*pages, fetch.call("a")])
            told = assert_type(await last.enqueue(), Enqueued[str])
            assert [each.id for each in pages] == answers[:2]
            assert await queue.run_until_idle() == 4
            assert await queue.wait(told) == "3kg"

    asyncio.run(main())


@pytest.mark.rule("SK-5")
def test_results_where_they_can_not_be_are_refused() -> None:
    with Queue("memory://") as queue, Queue("memory://") as other:
        counting, reporting, summing = queue.task(count), queue.task(report), queue.task(report_all)
        free = queue.task("free")(lambda claim, anything: None)
        page, elsewhere = counting.call("abc"), other.task(count).call("ab")
        number: Any = page.result
        for call, reason in (
            (
                lambda: reporting.enqueue(number),
                "report: .* a call of 'count' that is not enqueued",
            ),
            (lambda: reporting.call(1.0, unti=number).enqueue(), "report: got an unexpected .*'unti'"),
            (lambda: summing.call([number, 5]).enqueue(), "a list with results can't have other values"),
            (lambda: summing.call([5, number]).enqueue(), "parts has a result within"),
            (lambda: free.call({"a": [number]}).enqueue(), "anything has a result within"),
            (lambda: reporting.call(number, 5).enqueue(), "unit: must be a valid string"),  # type: ignore[arg-type]
            (lambda: reporting.call(elsewhere.result).enqueue(), "is of Queue.*, not of Queue"),
        ):
            with pytest.raises(InvalidTask, match=reason):
                call()
        assert not any(queue.count().values())
        assert page.id is not None, "it has an id, and was not enqueued"
        with pytest.raises(UnknownTask):
            reporting.enqueue(number)
        at = datetime.date(2026, 1, 2)
        last = summing.call([page.result], at=at).enqueue()
        assert queue.payload(last) == b'{"$results":{"parts":["%b"]},"at":"2026-01-02"}' % page.id.encode()


@pytest.mark.rule("SK-5")
def test_a_payload_is_filled_with_results_as_they_are_stored() -> None:
    first, second, strange = ("0" * 39 + digit for digit in "123")
    head = Head("f" * 40, "work", "send", after=(first, second), after_failure=AfterFailure.RUN)
    payload = with_sources(b' {"a" : "\xc3\xa9"} ', {"one": first, "all": (second, first)})
    assert sources_in(payload) == {"one": first, "all": (second, first)}
    assert from_json(without_sources(payload)) == {"a": "é"}

    def read(ids: Sequence[str]) -> dict[str, Stored]:
        states = {
            first: TaskState(Status.COMPLETED, result=b'{"n": 1.10}'),
            second: TaskState(Status.CANCELLED, result=b"1"),
        }
        return {task: Stored(replace(head, id=task), states[task], 1, 0) for task in ids if task in states}

    got = fill_results(head, payload, read)
    assert got.payload == '{"one":{"n": 1.10},"all":[null,{"n": 1.10}],"a":"é"}'.encode()
    assert dict(got.without_result) == {second: "cancelled"}
    assert fill_results(head, b'{"a": 1}', read).payload == b'{"a": 1}'
    assert fill_results(head, b'["$results"]', read).payload == b'["$results"]'
    assert fill_results(head, b'"$results" is not JSON', read).payload == b'"$results" is not JSON'
    waiting = replace(head, after_failure=AfterFailure.WAIT)
    with pytest.raises(InvalidTask, match=f"result of task {second} is missing: it is cancelled"):
        fill_results(waiting, payload, read)
    gone = replace(head, after=(*head.after, strange))
    with pytest.raises(InvalidTask, match=f"result of task {strange} is missing: there is no such task"):
        fill_results(gone, with_sources(b"{}", {"one": strange}), read)


@pytest.mark.rule("SK-5", "SK-21")
def test_a_worker_of_another_version_leaves_a_task_with_results_to_others() -> None:
    """As it may be that another one has the parameter."""
    registered = TaskBody(report, "report", TaskOptions())
    got = FilledPayload(b'{"sum":5}', {"sum": "0" * 40}, {})
    with pytest.raises(OtherArguments, match=r"total: is missing; sum: is no argument of it"):
        registered.arguments(got.payload, got)
