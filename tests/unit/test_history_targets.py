"""Where the settings send the history: files, a topic, both or nowhere."""

from __future__ import annotations

import importlib.metadata
import os
import stat
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.errors import InvalidSettings, InvalidUrl, MissingExtra, UnknownScheme
from rebalanser.history import (
    Author,
    Event,
    JsonlSink,
    MemorySink,
    NullSink,
    Protocol,
    Record,
    TeeSink,
    open_sinks,
    read_records,
)
from rebalanser.settings import Settings
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

URL = "kafka://ann:hunter2@h1:9092,h2:9092/history"
opened: list[tuple[str, str, str]] = []
topic = MemorySink()


def open_topic(url: str, group: str, label: str) -> MemorySink:
    """Stands for the package that writes to Kafka."""
    opened.append((url, group, label))
    return topic


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``kafka://`` is this module's."""
    opened.clear()
    topic.records.clear()
    topic.closed = False
    _register(monkeypatch, f"{__name__}:open_topic")


def _register(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == "rebalanser.history"
        points = [EntryPoint("kafka", value, group)] if value else []
        for point in points:
            vars(point).update(dist=importlib.metadata.distribution("rebalanser"))
        return points

    monkeypatch.setattr("rebalanser.registry.urls.entry_points", entry_points)


def record(sequence: int) -> Record:
    author = Author(Protocol.GROUP, "orders", "w", "w")
    return Record.of(author, Event("joined", "w-1"), sequence=sequence, wall=1.0, monotonic=1.0)


def sinks_of(folder: Path | None, url: str | None) -> Any:
    return open_sinks(folder, url, "orders", "w", 1 << 20)


def test_nowhere_is_no_sink() -> None:
    assert isinstance(sinks_of(None, None), NullSink)


def test_a_folder_is_files(tmp_path: Path) -> None:
    sink = sinks_of(tmp_path, None)
    assert isinstance(sink, JsonlSink)
    sink.write(record(0))
    sink.close(PATIENCE_S)
    assert list(read_records(tmp_path)) == [record(0)]


@pytest.mark.usefixtures("installed")
@pytest.mark.rule("AU-1")
def test_a_topic_is_opened_by_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntryPoint, "load", lambda _point: open_topic)
    assert sinks_of(None, URL) is topic
    assert opened == [(URL, "orders", "w")]


@pytest.mark.usefixtures("installed")
@pytest.mark.rule("AU-1")
def test_both_get_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntryPoint, "load", lambda _point: open_topic)
    sink = sinks_of(tmp_path, URL)
    for sequence in range(3):
        sink.write(record(sequence))
    sink.close(PATIENCE_S)
    assert topic.records == list(read_records(tmp_path)) == [record(0), record(1), record(2)]
    assert topic.closed


def test_closing_several_takes_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("rebalanser.history.sinks.time", SimpleNamespace(monotonic=lambda: now))

    class Slow(MemorySink):
        def close(self, timeout_s: float) -> None:
            nonlocal now
            allowed.append(timeout_s)
            now += 0.5

    allowed: list[float] = []
    TeeSink([Slow(), Slow(), Slow()]).close(3.0)
    assert allowed == [1.0, 1.25, 2.0]


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, "no_such_package.history:open_sink [kafka]")
    with pytest.raises(MissingExtra, match=r"rebalanser\[kafka\]") as raised:
        sinks_of(None, URL)
    assert "hunter2" not in str(raised.value)


def test_an_unknown_scheme_and_a_broken_url_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, None)
    with pytest.raises(UnknownScheme, match="pulsar://"):
        sinks_of(None, "pulsar://h:1/t")
    with pytest.raises(InvalidUrl) as raised:
        sinks_of(None, "kafka://ann:hunter2@h1:x/history")
    assert "hunter2" not in str(raised.value)


def test_the_package_of_the_kafka_extra_is_registered() -> None:
    points = importlib.metadata.entry_points(group="rebalanser.history", name="kafka")
    assert {point.value for point in points} == {"rebalanser_kafka.history:open_sink [kafka]"}


@pytest.mark.parametrize(
    ("given", "file_mode", "folder_mode"), [({}, 0o600, 0o700), ({"file_mode": "0640"}, 0o640, 0o750)]
)
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_who_may_read_the_files(
    tmp_path: Path, given: dict[str, str], file_mode: int, folder_mode: int, umask: int
) -> None:
    before = os.umask(umask)
    try:
        sink = open_sinks(tmp_path / "new" / "history", None, "orders", "w", 1 << 20, **given)
        sink.write(record(0))
        sink.close(PATIENCE_S)
    finally:
        os.umask(before)
    (file,) = (tmp_path / "new" / "history").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == file_mode
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (file.parent, file.parent.parent)} == {
        folder_mode
    }


def test_a_mode_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSettings, match=r"^'x' is no mode of a file: write octal digits such as 0640$"):
        open_sinks(tmp_path, None, "orders", "w", 1 << 20, "x")
    for given, why in (
        ("0755", "'0755' lets the file be executed; 0644 does not"),
        ("0440", "'0440' keeps the owner from reading or writing the file; 0640 does not"),
        ("0050", "'0050' keeps the owner from reading or writing the file; 0640 does not"),
        ("u=rw", "'u=rw' is no mode of a file: write octal digits such as 0640"),
        (0o640, "416 is no mode of a file: write it as text, '0640'"),
    ):
        with pytest.raises(InvalidSettings) as raised:
            Settings(history_file_mode=given)  # type: ignore[arg-type]
        assert str(raised.value) == f"history_file_mode: {why} (got {given!r})"
    assert Settings(history_file_mode=640).history_file_mode == "640"  # type: ignore[arg-type]
    monkeypatch.setenv("REBALANSER_HISTORY_FILE_MODE", "0755")
    with pytest.raises(InvalidSettings, match=r"\(got '0755' from REBALANSER_HISTORY_FILE_MODE\)$"):
        Settings()
    monkeypatch.setenv("REBALANSER_HISTORY_FILE_MODE", "0640")
    assert Settings().history_file_mode == "0640"


def test_a_topic_that_is_no_url_is_refused_as_the_setting_that_it_is() -> None:
    with pytest.raises(InvalidUrl, match=r"^history_topic is 'records': write kafka://HOST:PORT/TOPIC$"):
        open_sinks(None, "records", "orders", "w", 1 << 20)
