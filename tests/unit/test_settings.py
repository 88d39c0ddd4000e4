"""Settings: their defaults, where they come from, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from mypy import api
from pydantic import ValidationError

from rebalanser import Settings
from rebalanser.core.group import Mode, OnOverrun
from rebalanser.errors import InvalidName, InvalidSettings
from rebalanser.settings import Values

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.rule("RB-21")
@pytest.mark.parametrize("lease_ttl_s", [0.1, 1.0, 10.0, 3600.0])
def test_the_lease_alone_sets_all_timings_that_keep_it(lease_ttl_s: float) -> None:
    settings = Settings(lease_ttl_s=lease_ttl_s)
    assert settings.heartbeat_interval_s == pytest.approx(lease_ttl_s / 6)
    assert settings.stop_timeout_s == pytest.approx(lease_ttl_s * 0.4)
    assert settings.safety_margin_s == pytest.approx(lease_ttl_s * 0.1)
    assert settings.registry_timeout_s == pytest.approx(lease_ttl_s * 0.125)
    timings = settings.timings
    assert timings.detect_s + timings.stop_timeout_s == pytest.approx(timings.access_s)
    assert timings.access_s < lease_ttl_s
    assert timings.detect_s >= 2 * settings.heartbeat_interval_s + settings.registry_timeout_s


@pytest.mark.rule("RB-21")
@pytest.mark.lesson(5)
def test_timings_that_can_not_hold_are_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidSettings) as raised:
        Settings(lease_ttl_s=10, stop_timeout_s=6)
    assert str(raised.value) == (
        "OnStop could not return before the lease ends: two heartbeats and a time-out "
        "(2 x heartbeat_interval_s 1.66667 + registry_timeout_s 1.25) + stop_timeout_s 6 + "
        "safety_margin_s 1 + clock drift 0.1 = 11.6833 s, but lease_ttl_s is 10"
    )


@pytest.mark.rule("RB-21")
@pytest.mark.parametrize(
    "timings",
    [
        {"heartbeat_interval_s": 3.0},
        {"registry_timeout_s": 2.0},
        {"safety_margin_s": 3.0},
        {"clock_drift_ratio": 0.2},
    ],
)
def test_each_timing_counts(timings: dict[str, float]) -> None:
    with pytest.raises(InvalidSettings, match="OnStop could not return before the lease ends"):
        Settings(lease_ttl_s=10.0, **timings)


def test_timings_that_just_hold_are_accepted() -> None:
    Settings(
        lease_ttl_s=10.0,
        heartbeat_interval_s=1.0,
        registry_timeout_s=1.0,
        stop_timeout_s=5.9,
        safety_margin_s=1.0,
        clock_drift_ratio=0.01,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lease_ttl_s": 0}, "lease_ttl_s: Input should be greater than 0 (got 0)"),
        ({"lease_ttl_s": "ten"}, "lease_ttl_s: Input should be a valid number"),
        ({"lease_ttl_s": float("inf")}, "lease_ttl_s: Input should be a finite number (got inf)"),
        ({"lease_ttl_s": float("nan")}, "lease_ttl_s"),
        ({"settle_time_s": -1}, "settle_time_s: Input should be greater than or equal to 0 (got -1)"),
        ({"clock_drift_ratio": 0.5}, "clock_drift_ratio: Input should be less than 0.5 (got 0.5)"),
        ({"mode": "lazy"}, "mode: Input should be 'cooperative' or 'eager' (got 'lazy')"),
        ({"lease_ttl": 5}, "lease_ttl: there is no such setting; is lease_ttl_s meant? (got 5)"),
        ({"xyzzy": 5}, "xyzzy: there is no such setting (got 5)"),
        ({"history_max_bytes": 1}, "history_max_bytes"),
        ({"fenced": "perhaps"}, "fenced"),
        ({"retry_initial_s": 2}, "retry_initial_s 2 is over retry_max_s 1"),
        ({"rejoin_initial_s": 60}, "rejoin_initial_s 60 is over rejoin_max_s 30"),
    ],
)
def test_what_is_out_of_range_is_refused_by_its_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings) as raised:
        Settings(**values)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_several_faults_are_told_at_once() -> None:
    with pytest.raises(InvalidSettings, match=r"lease_ttl_s: .*; start_timeout_s: "):
        Settings(lease_ttl_s=-1, start_timeout_s=0)


def test_attributes_that_can_not_be_stored_are_refused() -> None:
    with pytest.raises(InvalidName, match="node attribute"):
        Settings(attributes={"zone": "x" * 5000})


def test_what_a_node_offers_is_kept_for_its_record() -> None:
    settings = Settings(capacity=8, tags=["gpu", "a b"], zone="eu-1")
    assert (settings.capacity, settings.tags, settings.zone) == (8.0, {"gpu", "a b"}, "eu-1")
    assert (Settings().capacity, Settings().tags, Settings().zone) == (None, frozenset(), "")
    assert Settings(tags="gpu, ssd").tags == {"gpu", "ssd"}


def test_the_environment_has_tags_between_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REBALANSER_TAGS", "gpu,ssd")
    monkeypatch.setenv("REBALANSER_CAPACITY", "2.5")
    monkeypatch.setenv("REBALANSER_ZONE", "eu-1")
    assert (Settings().capacity, Settings().tags, Settings().zone) == (2.5, {"gpu", "ssd"}, "eu-1")
    monkeypatch.setenv("REBALANSER_TAGS", "")
    assert Settings().tags == frozenset()
    monkeypatch.setenv("REBALANSER_TAGS", "gpu,,ssd")
    with pytest.raises(InvalidSettings, match=r"a tag name must not be empty .*REBALANSER_TAGS"):
        Settings()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"capacity": 0}, r"capacity: Input should be greater than 0 \(got 0\)"),
        ({"capacity": -1}, "capacity: Input should be greater than 0"),
        ({"capacity": float("nan")}, "capacity: Input should be a finite number"),
        ({"capacity": float("inf")}, "capacity: Input should be a finite number"),
        ({"tags": ["gpu", "gpu"]}, "tags: tag 'gpu' is given twice"),
        ({"tags": [""]}, "tags: a tag name must not be empty"),
        ({"tags": {"gpu": False}}, "tags: give a list of tags, not a mapping"),
        ({"tags": ["a\nb"]}, "tags: tag name 'a\\\\nb' has an unprintable character"),
        ({"tags": [1]}, "tags: a tag name is text, not int"),
        ({"tags": ["gpu,ssd"]}, "tags: tag 'gpu,ssd' has a comma or a semicolon: give each tag by itself"),
        ({"tags": "gpu;ssd"}, "tags: tag 'gpu;ssd' has a comma or a semicolon: give each tag by itself"),
        ({"tags": 1}, "tags: Input should be a valid"),
        ({"zone": "x" * 513}, "zone: zone name .* has 513 bytes; the limit is 512"),
        ({"zone": None}, "zone: Input should be a valid string"),
    ],
)
def test_what_a_node_can_not_offer_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        Settings(**values)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REBALANSER_LEASE_TTL_S", "4")
    monkeypatch.setenv("REBALANSER_MODE", "eager")
    monkeypatch.setenv("REBALANSER_ON_OVERRUN", "kill")
    monkeypatch.setenv("REBALANSER_ATTRIBUTES", '{"zone": "z1"}')
    monkeypatch.setenv("REBALANSER_REGISTRY", "memory://for-the-command-line")
    settings = Settings()
    assert (settings.lease_ttl_s, settings.stop_timeout_s) == (4.0, 1.6)
    assert (settings.mode, settings.on_overrun) == (Mode.EAGER, OnOverrun.KILL)
    assert settings.attributes == {"zone": "z1"}
    assert Settings(lease_ttl_s=8).lease_ttl_s == 8.0, "what is given counts more"


@pytest.mark.parametrize(
    ("name", "value"), [("LEASE_TTL_S", "soon"), ("ATTRIBUTES", "zone=z1"), ("MAY_LEAD", "perhaps")]
)
def test_an_environment_that_can_not_be_read_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"REBALANSER_{name}", value)
    with pytest.raises(InvalidSettings, match=f"{name.lower()}.*REBALANSER_{name}"):
        Settings()


def test_only_what_came_from_the_environment_is_looked_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("rebalanser_lease_ttl_s", "soon")
    monkeypatch.setenv("REBALANSER_STOP_TIMEOUT_S", "never")
    with pytest.raises(InvalidSettings) as raised:
        Settings(stop_timeout_s=-1)
    assert str(raised.value) == (
        "lease_ttl_s: Input should be a valid number, unable to parse string as a number (got 'soon' from "
        "REBALANSER_LEASE_TTL_S); stop_timeout_s: Input should be greater than 0 (got -1)"
    )


@pytest.mark.rule("RB-21")
def test_timings_of_the_environment_that_can_not_hold_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REBALANSER_LEASE_TTL_S", "4")
    monkeypatch.setenv("REBALANSER_START_TIMEOUT_S", "5")
    with pytest.raises(InvalidSettings, match=r"lease_ttl_s is 4 \(from REBALANSER_LEASE_TTL_S\)$"):
        Settings(stop_timeout_s=6)
    monkeypatch.setenv("REBALANSER_STOP_TIMEOUT_S", "6")
    message = r"lease_ttl_s is 4 \(from REBALANSER_LEASE_TTL_S, REBALANSER_STOP_TIMEOUT_S\)$"
    with pytest.raises(InvalidSettings, match=message):
        Settings()


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().lease_ttl_s = 5  # type: ignore[misc]


def test_the_protocol_gets_what_was_set() -> None:
    settings = Settings(lease_ttl_s=8, settle_time_s=0.5, start_in_batches=False, on_overrun=OnOverrun.KILL)
    timings, options = settings.timings, settings.node_options
    assert {name: getattr(settings, name) for name in timings.__slots__} == {
        name: getattr(timings, name) for name in timings.__slots__
    }
    assert (options.start_in_batches, options.on_overrun) == (False, OnOverrun.KILL)


def test_where_the_history_goes_is_told_without_its_password() -> None:
    topic = "kafka://ann:hunter2@h:9092/history"
    settings = Settings(history_topic=topic)
    assert settings.history_topic == topic
    assert "hunter2" not in repr(settings)
    with pytest.raises(InvalidSettings) as raised:
        Settings(history_topic=[topic])
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(("value", "fenced"), [(None, False), ("true", True), ("0", False)])
def test_that_writes_are_fenced_is_said_by_a_person(
    value: str | None, fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("REBALANSER_FENCED", value)
    assert Settings().fenced is fenced


def test_type_checkers_know_every_setting() -> None:
    assert list(Values.__annotations__) == list(Settings.model_fields)


def test_a_mistyped_setting_fails_the_type_check(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "from rebalanser import Mode, Settings\n"
        "Settings(lease_ttl_s=5, mode='eager', on_overrun='kill', history_dir='h', attributes={'a': 'b'})\n"
        "Settings(mode=Mode.EAGER)\n"
        "Settings(lease_ttl=5)\n"
        "Settings(lease_ttl_s='5')\n"
        "Settings(mode='lazy')\n"
    )
    out, err, code = api.run(["--strict", "--no-error-summary", f"--cache-dir={tmp_path}", str(file)])
    assert (err, code) == ("", 1), out
    assert [line.split(":")[1] for line in out.splitlines() if ": error:" in line] == ["4", "5", "6"], out


def test_what_attributes_look_like_in_the_environment_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REBALANSER_ATTRIBUTES", "zone=eu-1")
    with pytest.raises(InvalidSettings, match="REBALANSER_ATTRIBUTES is a JSON object, such as"):
        Settings()
