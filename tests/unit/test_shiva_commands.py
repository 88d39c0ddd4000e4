"""Start commands of many applications: packed once, checked first, and written many at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from rebalanser.core.allocation import Requests
from rebalanser.core.shiva.types import ApplicationId
from rebalanser.errors import InvalidArchive, InvalidManifest, InvalidName, InvalidSettings, OutcomeUnknown
from rebalanser.shiva import Packed, Start
from rebalanser_kafka.log import LogWriter, NewRecord
from rebalanser_kafka.records import FRAMING_BYTES
from rebalanser_kafka.shiva import commands
from rebalanser_kafka.shiva.commands import Publication, packed_starts

PART_BYTES = 1000
MESSAGE_BYTES = PART_BYTES + FRAMING_BYTES


@dataclass
class Writer:
    """Takes records, and fails once it has taken ``fails_at`` of them."""

    fails_at: int | None = None
    keys: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def append_all(
        self,
        records: Iterable[NewRecord],
        *,
        timeout_s: float,
        under_way_bytes: int,
        on_written: Callable[[NewRecord], None] = lambda _record: None,
    ) -> list[int]:
        assert under_way_bytes == MESSAGE_BYTES, "records that are sent together are a message of this size"
        first = len(self.keys)
        for record in records:
            if len(self.keys) == self.fails_at:
                raise OutcomeUnknown(f"not answered within {timeout_s:g} s")
            self.keys.append((record.key or b"").decode())
            on_written(record)
        self.calls.append(len(self.keys) - first)
        return list(range(first, len(self.keys)))


def application(number: int) -> ApplicationId:
    return ApplicationId("t", "c", f"a{number:04}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "shiva.json").write_text(json.dumps({"command": ["true"], "tags": ["gpu"]}))
    return folder


def publish(
    starts: list[Start], packed: list[Packed], writer: Writer, told: list[tuple[int, int]] | None = None
) -> tuple[list[str], list[int]]:
    def tell(done: int, total: int) -> None:
        if told is not None:
            told.append((done, total))

    publication = Publication(cast("LogWriter", writer), "command", 30.0, MESSAGE_BYTES, tell)
    return publication.publish(starts, packed)


@pytest.mark.rule("SH-6", "SH-18")
def test_parts_of_many_applications_are_written_before_their_start_commands(source: Path) -> None:
    starts = [Start(application(number), source) for number in range(1200)]
    packed = packed_starts(starts)
    writer, told = Writer(), list[tuple[int, int]]()
    ids, offsets = publish(starts, packed, writer, told)
    assert writer.calls == [500, 500, 500, 500, 200, 200], "a call for many, not for each"
    assert len(set(ids)) == 1200
    for number, offset in enumerate(offsets):
        name = str(application(number))
        assert writer.keys[offset] == f"cmd:{name}"
        assert writer.keys.index(f"part:{name}:{packed[0].sha256}:0") < offset
    assert [done for done, _ in told] == [packed[0].size_bytes * n for n in range(1, 1201)]
    assert told[-1] == (told[-1][1], told[-1][1])


def test_a_large_archive_is_cut_and_a_batch_of_its_own(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_BATCH_BYTES", 3000)
    large = tmp_path / "large"
    large.mkdir()
    (large / "shiva.json").write_text((source / "shiva.json").read_text())
    (large / "noise").write_bytes(bytes(range(256)) * 20 + json.dumps(list(range(2000))).encode())
    starts = [Start(application(number), large if number == 1 else source) for number in range(3)]
    packed = packed_starts(starts)
    assert packed[1].size_bytes > 3000
    writer = Writer()
    publish(starts, packed, writer)
    parts = -(-packed[1].size_bytes // PART_BYTES)
    assert writer.calls == [1, 1, parts, 1, 1, 1]


def test_a_source_that_many_have_is_packed_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs: list[Path] = []
    pack = commands.pack

    def count(source: Path, environment: dict[str, str]) -> Packed:
        packs.append(source)
        return pack(source, environment=environment)

    monkeypatch.setattr(commands, "pack", count)
    starts = [Start(application(number), source) for number in range(20)]
    starts += [Start(application(20 + n), source, environment={"N": str(n % 2)}) for n in range(20)]
    packed = packed_starts(starts)
    assert len(packs) == 3
    assert len({each.sha256 for each in packed}) == 3


def test_what_cannot_be_started_is_named_before_anything_is_sent(source: Path, tmp_path: Path) -> None:
    good = Start(application(0), source)
    with pytest.raises(InvalidSettings, match="t/c/a0000 is given twice"):
        packed_starts([good, good])
    with pytest.raises(InvalidName, match="tag"):
        packed_starts([good, Start(application(1), source, tags=["a b"])])
    with pytest.raises(InvalidArchive, match=r"t/c/a0001: .*cannot be read"):
        packed_starts([good, Start(application(1), tmp_path / "nowhere")])
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "shiva.json").write_text("{}")
    with pytest.raises(InvalidManifest, match=r"t/c/a0001: .*command"):
        packed_starts([good, Start(application(1), bad)])
    with pytest.raises(InvalidManifest, match=r"^(?!t/c/a0001)"):
        packed_starts([Start(application(1), bad)])


def test_an_error_says_how_many_were_started(source: Path) -> None:
    starts = [Start(application(number), source) for number in range(600)]
    with pytest.raises(OutcomeUnknown, match="the first 500 of 600 applications were started"):
        publish(starts, packed_starts(starts), Writer(fails_at=1150))
    with pytest.raises(OutcomeUnknown, match=r"^not answered within 30 s$"):
        publish(starts[:1], packed_starts(starts[:1]), Writer(fails_at=1))


def test_tags_of_the_manifest_and_of_the_start_are_required(source: Path) -> None:
    start = Start(application(0), source, tags=["ssd"])
    (packed,) = packed_starts([start])
    publication = Publication(cast("LogWriter", Writer()), "command", 30.0, MESSAGE_BYTES, print)
    assert publication._command(start, packed).tags == {"gpu", "ssd"}


@pytest.mark.rule("SH-27")
def test_requests_of_the_manifest_are_in_the_start_command(source: Path) -> None:
    manifest = json.loads((source / "shiva.json").read_text())
    (source / "shiva.json").write_text(json.dumps({**manifest, "requests": {"cpu": 0.5, "memory_mb": 256}}))
    start = Start(application(0), source)
    (packed,) = packed_starts([start])
    publication = Publication(cast("LogWriter", Writer()), "command", 30.0, MESSAGE_BYTES, print)
    assert publication._command(start, packed).requests == Requests(500, 256)


@pytest.mark.rule("SH-28")
def test_replicas_are_those_of_the_manifest_unless_given(source: Path) -> None:
    manifest = json.loads((source / "shiva.json").read_text())
    (source / "shiva.json").write_text(json.dumps({**manifest, "replicas": 3}))
    publication = Publication(cast("LogWriter", Writer()), "command", 30.0, MESSAGE_BYTES, print)
    for given, expected in ((None, 3), (1, 1), (5, 5)):
        start = Start(application(0), source, replicas=given)
        (packed,) = packed_starts([start])
        assert publication._command(start, packed).replicas == expected
    with pytest.raises(InvalidName, match="is a replica"):
        Start(application(0).numbered(1), source)
    with pytest.raises(InvalidName, match="not 0"):
        Start(application(0), source, replicas=0)


def test_a_topic_that_takes_no_part_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidSettings, match=r"command takes records of 100 bytes"):
        Publication(cast("LogWriter", Writer()), "command", 30.0, 100, print)
