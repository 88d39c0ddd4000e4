"""Logs: lines of facts, what is shown by default, the host's own logging, and secrets."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import sys
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import structlog

from rebalanser import redaction
from rebalanser.core.group.messages import Fact, FactKind, Report
from rebalanser.errors import RebalanserError
from rebalanser.redaction import hide_secret, redact
from rebalanser.registry.urls import open_registry, parse_url
from rebalanser.runtime import narration
from rebalanser.runtime.logs import (
    LEVELS,
    LOGGED_WHERE_IT_HAPPENS,
    LONGEST_LINE_CHARS,
    PIPE_BYTES,
    DefaultHandler,
    configure_cli_logging,
    get_logger,
    log_fact,
)
from rebalanser.runtime.narration import Narrator
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

PASSWORD = "hunter2/§"
FACT = Fact(
    FactKind.BARRIER_BLOCKED, "w-1", term=2, version=5, resource="p 1", revision=44, detail={"holder": "w-2"}
)


@pytest.fixture(autouse=True)
def _secrets_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", ())


def test_a_fact_is_logged_with_its_kind_as_action(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "rebalanser")
    log_fact(FACT, "orders")
    (line,) = caplog.records
    assert line.name == "rebalanser.facts"
    assert line.getMessage() == (
        "barrier blocked action=barrier_blocked group=orders node=w-1 "
        'holder=w-2 term=2 version=5 resource="p 1" revision=44'
    )
    assert line.__dict__["action"] == "barrier_blocked"
    assert line.__dict__["fields"]["revision"] == 44


@pytest.mark.parametrize("kind", sorted(set(FactKind) - LOGGED_WHERE_IT_HAPPENS))
def test_every_kind_is_logged_at_its_level(kind: FactKind, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "rebalanser")
    log_fact(Fact(kind, "w-1"), "orders")
    assert [(line.levelno, line.__dict__["action"]) for line in caplog.records] == [
        (LEVELS[kind], kind.value)
    ]


def test_trouble_is_seen_and_routine_is_not() -> None:
    seen = {kind for kind, level in LEVELS.items() if level >= logging.WARNING}
    assert seen == {
        FactKind.ISOLATED,
        FactKind.SESSION_LOST,
        FactKind.LAPSING,
        FactKind.START_REFUSED,
        FactKind.LOOP_SLOW,
        FactKind.RESIGNED,
        FactKind.UNREADABLE,
        FactKind.JOIN_FAILED,
        FactKind.HANDLER_OVERRAN,
        FactKind.START_FAILED,
        FactKind.STOP_FAILED,
        FactKind.WORKER_FAILED,
        FactKind.WORKER_RETURNED,
        FactKind.ENGINE_FAILED,
        FactKind.UNSAFE_REGISTRY,
    }
    details = {kind for kind, level in LEVELS.items() if level == logging.DEBUG}
    assert details == {kind for kind in FactKind if kind.value.startswith("barrier_")} | {
        FactKind.GROUP_READ,
        FactKind.LOAD_REPORTED,
    }


@pytest.mark.rule("AU-7")
def test_a_load_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "rebalanser")
    log_fact(Fact(FactKind.LOAD_REPORTED, "w-1", resource="p", value=2.5), "orders")
    assert "load=2.5" in caplog.text


@pytest.mark.rule("RB-21")
def test_the_seconds_of_a_slow_turn_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    log_fact(Fact(FactKind.LOOP_SLOW, "w-1", value=2.5, detail={"cause": "Wakeup"}), "orders")
    assert "took_s=2.5" in caplog.text
    assert "cause=Wakeup" in caplog.text


@pytest.mark.rule("RB-46")
def test_keys_that_can_not_be_read_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    log_fact(Fact(FactKind.UNREADABLE, "w-1", value=3, detail={"why": "'k' is foreign"}), "orders")
    (line,) = caplog.records
    assert line.getMessage() == (
        "keys of the group can't be read; docs/how-to/monitoring.md says how to delete them "
        """action=unreadable group=orders node=w-1 why="'k' is foreign" term=0 version=0 keys=3"""
    )


def test_what_is_below_the_level_is_not_made(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "rebalanser")
    monkeypatch.setattr("rebalanser.runtime.logs._fact_log", None)
    log_fact(FACT, "orders")
    assert not caplog.records


def test_the_host_applications_logging_is_left_alone(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = (logging.root.handlers[:], logging.root.level, structlog.get_config())
    get_logger().error("something", action="tried")
    log_fact(Fact(FactKind.STOP_FAILED, "w-1"), "orders")
    assert (logging.root.handlers[:], logging.root.level, structlog.get_config()) == before
    assert capsys.readouterr() == ("", "")
    assert len(caplog.records) == 2
    library = logging.getLogger("rebalanser")
    assert library.level == logging.NOTSET
    assert [type(handler) for handler in library.handlers] == [DefaultHandler]


def test_a_structlog_configuration_of_the_host_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    structlog.configure(processors=[lambda *_: pytest.fail("the host's processors are for the host")])
    try:
        get_logger("rebalanser.other").warning("something", action="tried")
    finally:
        structlog.reset_defaults()
    assert caplog.messages == ["something action=tried"]


def test_percent_signs_and_arguments(caplog: pytest.LogCaptureFixture) -> None:
    get_logger().warning("100 %% of %s", "it", action="tried")
    get_logger().warning("100 %s", action="tried")
    assert caplog.messages == ["100 % of it action=tried", "100 %s action=tried"]


def test_no_text_can_look_like_a_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    get_logger().warning("one\ntwo\x1b[2J", action="tried", resource="a\r\nERROR fake")
    assert caplog.messages == [r'one\ntwo\x1b[2J action=tried resource="a\\r\\nERROR fake"']


SECRETIVE = [
    f"etcd://ann:{PASSWORD}@h:2379/root",
    f"etcd+tls://ann:{PASSWORD}@h1:2379,h2:2379?ca=f",
    f"no etcd at etcd://ann:{PASSWORD}@h:1, nor at etcd://bob:{PASSWORD}@h:2",
    f"etcd:/ann:{PASSWORD}@h:2379",
    f"ann:{PASSWORD}@h:2379",
    f"etcd://ann:p@{PASSWORD}@h:2379",
    f"etcd://:{PASSWORD}@h:2379",
    f"Settings(password='{PASSWORD}', user='ann')",
    f'{{"user": "ann", "etcd_password": "{PASSWORD}"}}',
    f"?password={PASSWORD}&ca=f",
    f"Authorization: Bearer {PASSWORD}",
    f"REBALANSER_SECRET={PASSWORD}",
    f"api_key: {PASSWORD}",
]


@pytest.mark.parametrize("text", SECRETIVE)
def test_redacting_hides_the_secret_and_is_stable(text: str) -> None:
    hidden = redact(text)
    assert PASSWORD not in hidden
    assert "***" in hidden
    assert redact(hidden) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "etcd://127.0.0.1:2379/root",
        "etcd://ann:***@127.0.0.1:2379",
        "sqlite:////var/lib/groups.db",
        "[::1]:2379 refused at 10:30:00",
        "token=41 fencing token: 41",
        "ask ops@example.org",
        "password=None",
        "wrong user name or password",
    ],
)
def test_redacting_leaves_the_rest_alone(text: str) -> None:
    assert redact(text) == text


def test_what_form_does_not_tell_can_be_told_once() -> None:
    assert (
        redact("server: 'swordfish ä' is no good, nor is 7a") == "server: 'swordfish ä' is no good, nor is 7a"
    )
    for secret in ("swordfish ä", "7a", "", None):
        hide_secret(secret)
    assert redact("server: 'swordfish ä' is no good, nor is 7a") == "server: '***' is no good, nor is ***"
    assert redact("swordfish%20%C3%A4 in 17ab") == "*** in 17ab"


def fail(text: str) -> None:
    """Raise an error with a cause, both of which have the text."""
    raise RuntimeError(f"failed: {text}") from ConnectionError(text)


RAISED_AT = f"{__file__}:{fail.__code__.co_firstlineno + 2}"


@pytest.mark.parametrize("text", SECRETIVE)
@pytest.mark.parametrize("as_json", [True, False])
def test_no_secret_is_in_any_line_wherever_it_came_from(
    text: str, as_json: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    formatter = logging.Formatter("%(message)s %(action)s %(fields)s")

    def log_everything() -> None:
        log = get_logger()
        log.warning(text, action="tried")
        log.warning("it", action="tried", url=text, nested={"list": [text], "password": PASSWORD})
        log.warning("it", action="tried", password=PASSWORD)
        log_fact(Fact(FactKind.JOIN_FAILED, "w-1", detail={"error": text}), "orders")
        try:
            fail(text)
        except RuntimeError:
            log.exception("it", action="tried")

    log_everything()
    assert len(caplog.records) == 5
    shown = "\n".join(formatter.format(line) for line in caplog.records)
    assert PASSWORD not in shown
    assert json.dumps(PASSWORD)[1:-1] not in shown
    assert "RuntimeError: failed" in shown, "the traceback is there"
    configure_cli_logging(as_json, 2)
    log_everything()
    logging.getLogger("rebalanser.backend").error("standard library: %s", text)
    out, err = capsys.readouterr()
    assert out == ""
    assert "standard library" in err
    assert PASSWORD not in err
    assert json.dumps(PASSWORD)[1:-1] not in err


@pytest.mark.parametrize(
    "url",
    [
        f"etcd://ann:{PASSWORD}@127.0.0.1",
        f"etcd://ann:{PASSWORD}@127.0.0.1:99999",
        f"etcd:/ann:{PASSWORD}@127.0.0.1:2379",
        f"ectd://ann:{PASSWORD}@127.0.0.1:2379",
        f"ann:{PASSWORD}@127.0.0.1:2379",
        "etcd://ann:forgotten-host",
        "etcd://ann:forgotten%2Dhost127.0.0.1:2379",
        "etcd+tls://127.0.0.1:2379,ann:forgotten host",
        "etcd://ann:forgotten[host/path",
        "etcd+srv://ann:forgotten-domain",
    ],
)
def test_a_wrong_url_never_gets_its_password_into_a_log(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RebalanserError) as caught:
        open_registry(url, 0.1)
    get_logger().error(str(caught.value), action="open_failed", exc_info=caught.value)
    (line,) = caplog.records
    shown = logging.Formatter("%(message)s %(fields)s").format(line)
    assert PASSWORD not in shown
    assert "forgotten" not in shown
    assert "Traceback" in line.getMessage()


def test_a_parsed_url_shows_no_password() -> None:
    url = parse_url(f"etcd://ann:{PASSWORD}@127.0.0.1:2379/root?pw=a-secret")
    assert url.password == PASSWORD
    assert PASSWORD not in f"{url} {url!r}"
    assert "a-secret" not in f"{url} {url!r}"


def test_a_domain_of_srv_records_is_shown_without_a_port() -> None:
    url = parse_url(f"etcd+tls+srv://ann:{PASSWORD}@etcd.example.com./root?ca=f")
    assert (url.hosts, url.root, url.password) == ((("etcd.example.com", 0),), "root", PASSWORD)
    assert url.require_domain() == "etcd.example.com"
    assert str(url) == "etcd+tls+srv://ann:***@etcd.example.com/root"


def test_the_command_line_shows_lines_or_objects(capsys: pytest.CaptureFixture[str]) -> None:
    configure_cli_logging(True, 2)
    log_fact(FACT, "orders")
    logging.getLogger("rebalanser.history").warning("late", extra={"action": "history_failing"})
    fact, late = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert fact.pop("timestamp").endswith("Z")
    assert fact == {
        "event": "barrier blocked",
        "holder": "w-2",
        "action": "barrier_blocked",
        "group": "orders",
        "node": "w-1",
        "term": 2,
        "version": 5,
        "resource": "p 1",
        "revision": 44,
        "level": "debug",
    }
    assert (late["event"], late["action"], late["level"]) == ("late", "history_failing", "warning")
    configure_cli_logging(False, 2)
    log_fact(FACT, "orders")
    (line,) = capsys.readouterr().err.splitlines()
    assert "barrier blocked" in line
    assert "action=barrier_blocked" in line


@pytest.mark.parametrize(
    ("verbose", "shown"),
    [
        (0, ["error"]),
        (1, ["error", "info"]),
        (2, ["error", "info", "debug"]),
        (9, ["error", "info", "debug"]),
    ],
)
def test_the_command_line_shows_more_when_asked(
    verbose: int, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    configure_cli_logging(True, verbose)
    for kind in (FactKind.STOP_FAILED, FactKind.JOINED, FactKind.GROUP_READ):
        log_fact(Fact(kind, "w-1"), "orders")
    assert [json.loads(line)["level"] for line in capsys.readouterr().err.splitlines()] == shown


@contextmanager
def unconfigured_logging() -> Iterator[None]:
    """Remove the root logger's handlers, which pytest adds for each phase of a test."""
    handlers, logging.root.handlers = logging.root.handlers, []
    try:
        yield
    finally:
        logging.root.handlers = handlers


def log_failure(name: str = "rebalanser") -> None:
    try:
        fail("no\nmore")
    except RuntimeError:
        get_logger(name).exception("a worker raised", action="worker_failed", resource="p 1")


def test_warnings_and_errors_are_shown_on_one_line_each_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unconfigured_logging():
        log_failure("rebalanser.facts")
        get_logger().warning("late", action="tried", error="its own", exc_info=ValueError("no"))
        get_logger().info("well", action="joined")
        log_fact(Fact(FactKind.STOP_FAILED, "w-1"), "orders")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "ERROR rebalanser.facts: a worker raised action=worker_failed "
        f'resource="p 1" error="RuntimeError: failed: no more" raised_at={RAISED_AT}\n'
        'WARNING rebalanser: late action=tried error="its own"\n'
        "ERROR rebalanser.facts: stop failed action=stop_failed group=orders node=w-1 term=0 version=0\n"
    )


@pytest.mark.parametrize("name", ["rebalanser.history", "rebalanser.sqlite", "rebalanser.etcd"])
def test_standard_records_are_shown_on_one_line_by_default(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with unconfigured_logging():
        try:
            fail(f"password={PASSWORD}")
        except RuntimeError:
            logging.getLogger(name).exception("a sink\nraised", extra={"action": "sink_failed"})
        logging.getLogger(name).warning("plain")
        logging.getLogger(name).warning("late", exc_info=ValueError("no"))
    assert capsys.readouterr().err == (
        rf"ERROR {name}: a sink\nraised action=sink_failed "
        f'error="RuntimeError: failed: password=***" raised_at={RAISED_AT}\n'
        f"WARNING {name}: plain\n"
        f'WARNING {name}: late error="ValueError: no"\n'
    )


def test_a_level_alone_shows_no_more_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("rebalanser").setLevel(logging.DEBUG)
    with unconfigured_logging():
        get_logger().info("well", action="joined")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", SECRETIVE)
def test_no_secret_is_shown_by_default(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with unconfigured_logging():
        try:
            fail(text)
        except RuntimeError:
            get_logger().exception(text, action="tried")
            logging.getLogger("rebalanser.history").exception(text)
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 2
    assert PASSWORD not in shown


@pytest.mark.parametrize("name", ["", "rebalanser", "rebalanser.facts"])
def test_nothing_is_shown_by_default_where_the_host_has_a_handler(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logger, handler = logging.getLogger(name), logging.NullHandler()
    with unconfigured_logging():
        logger.addHandler(handler)
        try:
            log_failure("rebalanser.facts")
        finally:
            logger.removeHandler(handler)
        assert capsys.readouterr().err == ""
        log_failure("rebalanser.facts")
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_is_shown_by_default_where_the_host_switched_propagation_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("rebalanser"), "propagate", False)
    with unconfigured_logging():
        log_failure("rebalanser.facts")
    assert capsys.readouterr().err == ""


def test_nothing_is_shown_by_default_without_a_handler_of_last_resort(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "lastResort", None)
    with unconfigured_logging():
        log_failure()
    assert capsys.readouterr().err == ""


def test_a_configured_host_gets_the_traceback_and_the_error(caplog: pytest.LogCaptureFixture) -> None:
    log_failure()
    (record,) = caplog.records
    assert "Traceback" in record.getMessage()
    assert record.__dict__["error"] == "RuntimeError: failed: no more"
    assert record.__dict__["raised_at"] == RAISED_AT


def test_a_line_that_standard_error_cannot_take_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as source, os.fdopen(writer, "w", encoding="utf-8") as sink:
        size = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
        os.write(writer, b"x" * size)
        os.set_blocking(writer, False)  # a failure of this test is then no hang
        monkeypatch.setattr(sys, "stderr", sink)
        with unconfigured_logging():
            log_failure()
            assert source.read(size) == b"x" * size
            get_logger().error("ä" * 2 * LONGEST_LINE_CHARS, action="tried")
        shown = source.read(size).decode()
    assert shown.startswith("ERROR rebalanser: ää")
    assert len(shown) == LONGEST_LINE_CHARS + 1


@pytest.mark.parametrize("character", ["x", "ä", "🦊"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "utf-16-le", "utf-32-le"])
def test_a_line_is_as_long_as_a_pipe_takes_at_once(
    monkeypatch: pytest.MonkeyPatch, encoding: str, character: str
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace"))
    with unconfigured_logging():
        get_logger().error(character * 2 * LONGEST_LINE_CHARS, action="tried")
    assert PIPE_BYTES / 20 < len(raw.getvalue()) <= PIPE_BYTES


def test_a_broken_standard_error_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, object()):
        monkeypatch.setattr(sys, "stderr", stream)
        with unconfigured_logging():
            log_failure()


def test_the_command_line_shows_a_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    with unconfigured_logging():
        configure_cli_logging(True, 0)
        get_logger().error("it", action="tried")
    assert capsys.readouterr().err.count("\n") == 1


def narrated(narrator: Narrator, kind: FactKind, *resources: str, **detail: str | int) -> str:
    """Return what is said of a report, without what begins each line."""
    report, said = Report(Fact(kind, "w-1", detail=detail), resources or None), io.StringIO()
    with unconfigured_logging(), contextlib.redirect_stderr(said):
        assert narrator.narrate(report)
    return said.getvalue().removeprefix("rebalanser orders: n ").rstrip("\n")


def test_what_happens_is_told_in_sentences() -> None:
    told = partial(narrated, Narrator("orders", "n", "memory://x"))
    assert told(FactKind.JOINED) == "joined the group at memory://x"
    assert told(FactKind.ALLOCATION_ADOPTED, resources=0) == (
        "is to own nothing now; `rebalanser status orders` says why"
    )
    assert told(FactKind.ALLOCATION_ADOPTED, resources=0) == "", "it is no news"
    assert told(FactKind.ALLOCATION_ADOPTED, resources=7) == ""
    assert told(FactKind.BARRIER_BLOCKED, "g") == "waits for g, which other nodes have yet to give up"
    assert told(FactKind.BARRIER_BLOCKED, "g") == "", "it waits still"
    assert told(FactKind.START_ENTERED, *"abcdef") == "owns a, b, c, d, e and 1 more; it owns 6 resources now"
    assert told(FactKind.STOP_RETURNED, *"abcde") == "gave up a, b, c, d, e; it owns 1 resource now"
    assert told(FactKind.RELEASED, "f") == "releases f"
    assert told(FactKind.START_FAILED, error="OSError: full") == (
        "leaves, since OnStart raised OSError: full; it joins again after a delay"
    )
    assert told(FactKind.JOIN_FAILED, error="away", fatal=0) == "could not join: away; it tries again"
    assert told(FactKind.JOIN_FAILED, error="denied", fatal=1) == "could not join: denied"
    assert told(FactKind.JOINED) == "joined the group at memory://x"
    assert told(FactKind.GROUP_READ, resources=0) == ""
    assert "the group has no resources" in told(FactKind.ALLOCATION_ADOPTED, resources=0)
    assert told(FactKind.LEFT) == "left the group"


def test_a_handler_that_overran_is_told_with_its_resources_and_what_it_holds_up() -> None:
    told = partial(narrated, Narrator("orders", "n", "memory://x"))
    assert told(FactKind.START_ENTERED, "a", "b").startswith("owns a, b;")
    assert told(FactKind.HANDLER_OVERRAN, handler="on_start", limit_s=4) == (
        "still starts a, b after its limit of 4 s: OnStart has not returned, or the event loop is blocked"
    )
    assert told(FactKind.STOP_ENTERED, "b") == ""
    assert told(FactKind.HANDLER_OVERRAN, handler="on_stop", limit_s=4) == (
        "still stops b after its limit of 4 s: OnStop or a worker has not returned, "
        "and no other node starts them before"
    )


def test_a_kind_without_a_sentence_is_left_to_the_log() -> None:
    with unconfigured_logging():
        assert not Narrator("orders", "n", "memory://x").narrate(Report(Fact(FactKind.LOOP_SLOW, "n-1")))


def test_nothing_is_narrated_where_the_host_configured_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    narrator, left = Narrator("orders", "n", "memory://x"), Report(Fact(FactKind.LEFT, "n-1"))
    assert logging.root.handlers, "those of pytest"
    assert not narrator.narrate(left)
    with unconfigured_logging():
        assert narrator.narrate(left)
        logging.getLogger("rebalanser").setLevel(logging.ERROR)
        try:
            assert not narrator.narrate(left)
        finally:
            logging.getLogger("rebalanser").setLevel(logging.NOTSET)


def test_a_registry_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narration, "SILENCE_S", 0.0)
    said, told = threading.Event(), []

    def write(line: str) -> None:
        told.append(line)
        said.set()

    monkeypatch.setattr(narration, "write_default_line", write)
    with unconfigured_logging(), Narrator("orders", "n", "etcd://h:1").connecting():
        assert said.wait(PATIENCE_S)
    assert told == ["rebalanser orders: n is connecting to etcd://h:1"]
