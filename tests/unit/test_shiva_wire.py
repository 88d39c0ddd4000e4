"""How Shiva's records are written as bytes: what is written is read again, all else is told apart."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rebalanser.core.allocation import MAX_AMOUNT, Capacity, Requests
from rebalanser.core.shiva.messages import CaughtUp, PartRead, StartRead, Unreadable
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import (
    CHANGE_KEYS,
    AssignmentDocument,
    DocumentChange,
    Heard,
    KeptCommand,
    LeaderAnnouncement,
    OutputAnswer,
    OutputRequest,
    Ping,
    Pong,
    Progress,
    RunReport,
    ScaleCommand,
    StartCommand,
    StopCommand,
    WorkerCommand,
)
from rebalanser.core.shiva.types import (
    MAX_REPLICAS,
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Cordon,
    Epoch,
    Incarnation,
    Leaving,
    Mode,
    RunState,
    SetAside,
    WorkerEntry,
)
from rebalanser.core.shiva.worker import Worker
from rebalanser.errors import InvalidName, InvalidSettings
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.records import LogRecord
from rebalanser_kafka.shiva import decoding as reading
from rebalanser_kafka.shiva import last_records
from rebalanser_kafka.shiva.decoding import (
    RECORD_OVERHEAD_BYTES,
    ReplayedCommands,
    command_event,
    control_record,
    output_answer,
    output_request,
)
from rebalanser_kafka.shiva.last_records import heard_in, last_document, newest, read_on
from rebalanser_kafka.shiva.wire import (
    FORMAT,
    MAX_PARTS,
    MAX_VALUE_BYTES,
    NotReadable,
    PartKey,
    decode,
    decode_part_key,
    encode,
    key_of,
    peek_epoch,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from rebalanser.core.shiva.messages import CommandEvent
    from rebalanser_kafka.connection import Connection
    from rebalanser_kafka.shiva.wire import Written

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,6}[A-Za-z0-9_-]", fullmatch=True)
texts = st.text(max_size=20)
numbers = st.integers(0, 2**53)
seconds = st.floats(0, 1e9, allow_nan=False)
applications = st.builds(ApplicationId, names, names, names)
replicas = st.builds(ApplicationId, names, names, names, st.just(0) | st.integers(0, MAX_REPLICAS - 1))
replica_counts = st.just(1) | st.integers(1, MAX_REPLICAS)
commands = st.uuids().map(lambda each: each.hex)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
archives = st.builds(Archive, digests, numbers, st.integers(0, 1000))
tags = st.frozensets(names, max_size=3)
modes = st.sampled_from(Mode)
epochs = st.builds(Epoch, numbers, numbers)
incarnations = st.builds(Incarnation, names, numbers)
amounts = st.integers(0, MAX_AMOUNT)
requests = st.none() | st.builds(Requests, amounts, amounts)
capacities = st.none() | st.builds(Capacity, st.none() | amounts, st.none() | amounts)
starts = st.builds(StartCommand, applications, commands, archives, modes, tags, requests, replica_counts)
leavings = st.builds(Leaving, names, incarnations, epochs, modes, requests)
workers = st.builds(WorkerEntry, incarnations, tags, texts, capacities)


def mappings(keys: st.SearchStrategy[Any], values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(keys, values, max_size=3).map(MappingProxyType)


entries = st.builds(
    ApplicationEntry,
    command=commands,
    archive=archives,
    mode=modes,
    tags=tags,
    state=st.sampled_from(ApplicationState),
    worker=st.none() | names,
    reason=texts,
    failed_on=mappings(names, texts),
    offset=numbers,
    timestamp_ms=numbers,
    restarts=numbers,
    leaving=st.none() | leavings,
    kept_for=st.none() | names,
    requests=requests,
    replicas=replica_counts,
)
documents = st.builds(
    AssignmentDocument,
    epoch=epochs,
    leader=names,
    consumed=st.integers(-1, 2**53),
    deadline_s=seconds,
    workers=mappings(names, workers),
    applications=mappings(replicas, entries),
    set_aside=st.lists(st.builds(SetAside, numbers, texts, texts), max_size=2).map(tuple),
    cordons=mappings(names, st.sampled_from(Cordon)),
    reads_changes=st.booleans(),
)
pings = st.builds(
    Ping, numbers, names, numbers, epochs, seconds, mappings(names, st.builds(Heard, incarnations, numbers))
)
reports = st.builds(RunReport, commands, st.sampled_from(RunState), numbers, texts)
pongs = st.builds(
    Pong,
    worker=names,
    incarnation=incarnations,
    sequence=numbers,
    round=numbers,
    term=st.integers(-1, 2**53),
    seen=st.none() | epochs,
    tags=tags,
    host=texts,
    leaving=st.booleans(),
    applications=mappings(replicas, reports),
    reads_changes=st.booleans(),
    capacity=capacities,
    reads_replicas=st.booleans(),
)
changes = st.builds(
    DocumentChange,
    epoch=epochs,
    base=epochs,
    consumed=st.integers(-1, 2**53),
    deadline_s=seconds,
    workers=mappings(names, st.none() | workers),
    applications=mappings(replicas, st.none() | entries),
    progress=mappings(
        replicas,
        st.builds(
            Progress,
            state=st.sampled_from(ApplicationState),
            worker=st.none() | names,
            leaving=st.none() | leavings,
            reason=texts,
            failed_on=mappings(names, texts),
            offset=numbers,
            timestamp_ms=numbers,
            restarts=numbers,
            kept_for=st.none() | names,
        ),
    ),
    cordons=mappings(names, st.none() | st.sampled_from(Cordon)),
    set_aside=st.none() | st.lists(st.builds(SetAside, numbers, texts, texts), max_size=2).map(tuple),
)
records = st.one_of(
    starts,
    st.builds(StopCommand, applications, commands, st.booleans()),
    st.builds(ScaleCommand, applications, commands, replica_counts),
    st.builds(WorkerCommand, names, commands, st.none() | st.sampled_from(Cordon)),
    st.builds(OutputRequest, names, commands, replicas, numbers, seconds),
    st.builds(OutputAnswer, names, commands, st.lists(texts, max_size=3).map(tuple), texts, numbers),
    st.builds(KeptCommand, starts, numbers),
    st.builds(LeaderAnnouncement, names),
    documents,
    changes,
    pings,
    pongs,
)

CONNECTION = Connection.from_url("kafka://127.0.0.1:1/c")
START = StartCommand(ApplicationId("t", "c", "a"), "1", Archive("0" * 64, 3, 1), Mode.AVAILABLE)


def read(key: bytes | None, value: bytes | None) -> LogRecord:
    """A record as it was read from offset 7."""
    size_bytes = len(key or b"") + len(value or b"")
    return LogRecord(
        offset=7, timestamp_ms=1, log_append_time=True, key=key, value=value, size_bytes=size_bytes
    )


@pytest.mark.rule("SH-2")
@given(records)
def test_a_record_is_read_as_it_was_written(record: Written) -> None:
    assert decode(key_of(record).encode(), encode(record)) == record


@pytest.mark.rule("SH-2")
@given(applications, digests, st.integers(0, MAX_PARTS - 1))
def test_the_key_of_a_part_is_read_as_it_was_written(
    application: ApplicationId, sha256: str, number: int
) -> None:
    key = PartKey(application, sha256, number)
    assert decode_part_key(str(key).encode()) == key


@pytest.mark.rule("SH-2")
@given(st.lists(records, min_size=2, max_size=3))
def test_kinds_and_applications_have_keys_of_their_own(some: list[Written]) -> None:
    for record in some:
        for other in some:
            if key_of(record) == key_of(other):
                both = {type(record), type(other)}
                assert len(both) == 1 or both == {StartCommand, StopCommand}


@pytest.mark.rule("SH-16")
@settings(max_examples=3 * settings().max_examples)
@given(st.none() | st.binary(max_size=40), st.binary(max_size=60))
def test_bytes_of_anybody_are_set_aside_with_offset_and_reason(key: bytes | None, value: bytes) -> None:
    for event in (command_event(read(key, value)), control_record(read(key, value))):
        assert isinstance(event, Unreadable)
        assert event.at.offset == 7
        assert event.reason


@pytest.mark.rule("SH-16")
@given(starts, st.data())
def test_a_record_with_one_byte_changed_is_another_record_or_set_aside(
    start: StartCommand, data: st.DataObject
) -> None:
    value = bytearray(encode(start))
    place = data.draw(st.integers(0, len(value) - 1))
    value[place] ^= data.draw(st.integers(1, 255))
    event = command_event(read(key_of(start).encode(), bytes(value)))
    assert isinstance(event, StartRead | Unreadable)


def with_record(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The start command with its JSON changed."""
    content = json.loads(encode(START))
    change(content)
    return json.dumps(content).encode()


@pytest.mark.rule("SH-27")
def test_what_an_earlier_version_wrote_requests_nothing_and_has_no_limit() -> None:
    value = with_record(lambda content: content["record"].pop("requests"))
    assert decode(b"cmd:t/c/a", value) == START
    pong = Pong("w", Incarnation("l", 1), 1, 1, 1, None)
    content = json.loads(encode(pong))
    del content["record"]["capacity"]
    assert decode(b"pong:w", json.dumps(content).encode()) == pong


def with_archive(**changed: object) -> bytes:
    return with_record(lambda content: content["record"]["archive"].update(changed))


@pytest.mark.rule("SH-16")
@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        pytest.param(None, encode(START), "does not belong under the key ''", id="no key"),
        pytest.param(b"cmd:t/c/other", encode(START), "belongs under the key 'cmd:t/c/a'", id="another key"),
        pytest.param(b"keep:t/c/a", encode(START), "kind 'start' does not belong", id="another kind of key"),
        pytest.param(b"\xff", encode(START), "the key is not text", id="no text"),
        pytest.param(b"cmd:t/c/a", b"{", "not JSON", id="half"),
        pytest.param(b"cmd:t/c/a", b"", "not JSON", id="empty"),
        pytest.param(b"cmd:t/c/a", b"\x78\x9c\x00", "not JSON", id="half compressed"),
        pytest.param(b"cmd:t/c/a", b"[" * 100_000, "not JSON", id="deep but no object"),
        pytest.param(b"cmd:t/c/a", b'{"a":' * 100_000, "not JSON", id="deep"),
        pytest.param(b"cmd:t/c/a", zlib.compress(b"[]"), "not a JSON object", id="a list"),
        pytest.param(b"cmd:t/c/a", with_record(lambda c: c.update(format=9)), "format 9", id="format"),
        pytest.param(b"cmd:t/c/a", with_record(lambda c: c.update(kind="x")), "kind 'x'", id="kind"),
        pytest.param(
            b"cmd:t/c/a", with_record(lambda c: c.update(record=1)), "not a JSON object", id="record"
        ),
        pytest.param(
            b"cmd:t/c/a", with_record(lambda c: c["record"].pop("archive")), "archive", id="field missing"
        ),
        pytest.param(
            b"cmd:t/c/a",
            with_record(lambda c: c["record"].update(application="../x/y")),
            "cannot be a tenant",
            id="a path for a tenant",
        ),
        pytest.param(
            b"cmd:t/c/a", with_record(lambda c: c["record"].update(application=7)), "", id="no name"
        ),
        pytest.param(b"cmd:t/c/a", with_archive(sha256="../../etc"), "sha256 is", id="a path for a sha256"),
        pytest.param(b"cmd:t/c/a", with_archive(parts=10**12), "at most 100000", id="endless parts"),
        pytest.param(b"cmd:t/c/a", with_archive(parts=-1), "-1 parts", id="parts below none"),
        pytest.param(
            b"cmd:t/c/a", with_archive(size_bytes=-(10**12)), "bytes", id="a size that gives budget"
        ),
        pytest.param(
            b"cmd:t/c/a",
            with_record(lambda c: c["record"].update(requests={"cpu_milli": -1})),
            "cpu_milli is -1",
            id="requests that give room",
        ),
        pytest.param(b"part:t/c/a:00:1", b"x", "names no part", id="part without a sha256"),
        pytest.param(b"part:t/c/a:" + b"0" * 64 + b":100000", b"x", "names no part", id="a part beyond all"),
        pytest.param(b"part:../c/a:" + b"0" * 64 + b":0", b"x", "cannot be a tenant", id="part of a path"),
    ],
)
def test_what_is_no_command_is_set_aside_with_its_key_and_the_reason(
    key: bytes | None, value: bytes, reason: str
) -> None:
    event = command_event(read(key, value))
    assert isinstance(event, Unreadable)
    assert reason in event.reason
    assert event.key == (key or b"").decode(errors="backslashreplace")


@pytest.mark.rule("SH-16")
def test_a_value_that_unpacks_to_too_much_is_not_unpacked() -> None:
    bomb = zlib.compress(b" " * (MAX_VALUE_BYTES + 1))
    with pytest.raises(NotReadable, match="unpacks to more than"):
        decode(b"cmd:t/c/a", bomb)


def test_a_large_record_is_compressed_and_says_its_format() -> None:
    tagged = StartCommand(START.application, "1", START.archive, START.mode, frozenset(map(str, range(900))))
    value = encode(tagged)
    assert json.loads(zlib.decompress(value))["format"] == FORMAT
    assert decode(key_of(tagged).encode(), value) == tagged


def test_the_bytes_of_a_part_are_not_looked_at() -> None:
    key = PartKey(START.application, "0" * 64, 3)
    event = command_event(read(str(key).encode(), b"\x00{"))
    assert isinstance(event, PartRead)
    assert event.number == 3
    assert event.at.size_bytes == len(str(key)) + 2 + RECORD_OVERHEAD_BYTES
    tombstone = command_event(read(str(key).encode(), None))
    assert isinstance(tombstone, PartRead)
    assert tombstone.at.size_bytes == 0
    assert command_event(read(b"keep:t/c/a", None)) is None


@pytest.mark.rule("SH-16")
def test_records_of_one_topic_are_set_aside_on_the_other() -> None:
    pong = Pong("w", Incarnation("l", 1), 1, 1, 1, None)
    assert isinstance(command_event(read(b"pong:w", encode(pong))), Unreadable)
    assert isinstance(control_record(read(b"cmd:t/c/a", encode(START))), Unreadable)


@pytest.mark.rule("SH-7", "SH-11")
def test_a_reader_of_status_takes_the_greatest_epoch_wherever_it_stands() -> None:
    def document(term: int, number: int) -> LogRecord:
        return read(b"assignement", encode(AssignmentDocument(Epoch(term, number), f"l{term}", 0, 1.0)))

    late = [document(5, 1), document(9, 1), document(5, 2), read(b"assignement", b"poison")]
    chain = newest(late)
    found = chain.document
    assert found is not None
    assert found.epoch == Epoch(9, 1)
    assert not read_on(chain, [document(5, 3)])
    assert chain.document is found


@pytest.mark.rule("SH-7")
@given(records, st.booleans())
def test_the_epoch_of_a_document_is_found_without_reading_all_of_it(record: Written, packed: bool) -> None:
    value = encode(record)
    if packed and value.startswith(b"{"):
        value = zlib.compress(value)
    found = peek_epoch(value)
    assert found == (record.epoch if isinstance(record, AssignmentDocument) else None)


def test_what_does_not_begin_as_a_document_has_no_epoch_to_be_found() -> None:
    value = encode(AssignmentDocument(Epoch(5, 1), "l", 0, 1.0))
    for other in (b"", b"\x00", b"poison", value[:40], value.replace(b'"format":1', b'"format":9')):
        assert peek_epoch(other) is None


Published = AssignmentDocument | DocumentChange


def whole(term: int, number: int, reads_changes: bool = True) -> AssignmentDocument:
    return AssignmentDocument(Epoch(term, number), "l", 0, 1.0, reads_changes=reads_changes)


def change(term: int, number: int) -> DocumentChange:
    return DocumentChange(Epoch(term, number), Epoch(term, number - 1), 0, 1.0)


def told(written: Sequence[LeaderAnnouncement | Published], replayed: bool) -> Worker:
    """A worker that was told what leaders wrote, decoding all of it or as a replay does."""
    worker, log = Worker("w", Incarnation("l", 1)), ReplayedCommands()
    events: list[CommandEvent] = []
    for offset, record in enumerate(written):
        found = replace(read(key_of(record).encode(), encode(record)), offset=offset)
        events += log.events(found) if replayed else filter(None, [command_event(found)])
    events += log.end()
    assert len(events) == len(written), "each record is told of once"
    for event in [*events, CaughtUp()]:
        worker.handle(event, 1.0)
    return worker


places = st.tuples(st.integers(0, 8), st.integers(1, 4))


@pytest.mark.rule("SH-7", "SH-24")
@given(
    st.lists(
        st.just(LeaderAnnouncement("l"))
        | places.map(lambda place: whole(*place))
        | places.map(lambda place: whole(*place, reads_changes=False))
        | places.map(lambda place: change(*place)),
        max_size=9,
    )
)
@example([whole(1, 1), change(1, 2), whole(2, 1, reads_changes=False)])
def test_a_replay_that_decodes_few_documents_ends_at_the_same_one(
    written: list[LeaderAnnouncement | Published],
) -> None:
    """Announcements, documents and changes of leaders that are deposed or not, in any order."""
    assert told(written, replayed=True).seen == told(written, replayed=False).seen


def decoded_keys(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[bytes | None]:
    """The keys of the records that a module decodes from now on."""
    decoded: list[bytes | None] = []

    def noted(key: bytes | None, value: bytes) -> Written:
        decoded.append(key)
        return decode(key, value)

    monkeypatch.setattr(module, "decode", noted)
    return decoded


@pytest.mark.rule("SH-24")
def test_of_each_leader_one_document_and_what_follows_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = decoded_keys(monkeypatch, reading)
    written: list[LeaderAnnouncement | Published] = []
    for term in (0, 301):
        written.append(LeaderAnnouncement("l"))
        for first in range(1, 301, 3):
            written += [whole(term, first), change(term, first + 1), change(term, first + 2)]
    assert told(written, replayed=True).seen == Epoch(301, 300)
    assert decoded.count(b"assignement") == 2
    assert len(decoded) == 2 * (1 + 1 + 2)


class Topic:
    """ASSIGNEMENT as a list, with what was read of it."""

    def __init__(self, *values: tuple[bytes, bytes]) -> None:
        self.values = list(values)
        self.read: set[int] = set()

    def reader(self, _connection: object, _topic: str, start: int | str) -> TopicReader:
        return TopicReader(self, start if isinstance(start, int) else 0)


class TopicReader:
    def __init__(self, topic: Topic, position: int) -> None:
        self._topic = topic
        self.position = position
        self.trouble = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def bounds(self, _timeout_s: float) -> tuple[int, int]:
        return 0, len(self._topic.values)

    def poll(self, _timeout_s: float) -> list[LogRecord]:
        offset = self.position
        self.position += 1
        self._topic.read.add(offset)
        return [LogRecord(offset, 1, True, *self._topic.values[offset])]


def written_as(*records: Published | None) -> list[tuple[bytes, bytes]]:
    """Keys and values of records; None for one that nobody can read."""
    return [
        (b"assignement", b"poison") if record is None else (key_of(record).encode(), encode(record))
        for record in records
    ]


@pytest.mark.rule("SH-11", "SH-24")
@pytest.mark.parametrize(
    ("records", "found", "read_from"),
    [
        pytest.param([], None, 0, id="empty"),
        pytest.param([whole(5, n) for n in range(1, 2001)], Epoch(5, 2000), 1984, id="the tail is enough"),
        pytest.param([*[whole(5, n) for n in range(1, 1901)], *[None] * 99], Epoch(5, 1900), 1743, id="back"),
        pytest.param([whole(5, 1), *[None] * 2999], Epoch(5, 1), 0, id="at the very beginning"),
        pytest.param(
            [*[whole(5, n) for n in range(1, 1901)], *[change(5, n) for n in range(1901, 2001)]],
            Epoch(5, 2000),
            1744,
            id="changes",
        ),
        pytest.param([change(4, 7), whole(5, 1), change(5, 2)], Epoch(5, 2), 0, id="leftovers"),
        pytest.param([whole(5, 1), whole(5, 2), whole(4, 9)], Epoch(5, 2), 0, id="a deposed leader's"),
        pytest.param([whole(5, 1), change(5, 2), whole(9, 1, False)], Epoch(5, 2), 0, id="overlooked"),
    ],
)
def test_the_last_document_is_found_by_reading_back_from_the_end(
    monkeypatch: pytest.MonkeyPatch, records: list[Published | None], found: Epoch | None, read_from: int
) -> None:
    topic = Topic(*written_as(*records))
    monkeypatch.setattr(last_records, "LogReader", topic.reader)
    chain, end = last_document(CONNECTION, "c-assignement", 5.0)
    assert (chain.document and chain.document.epoch, chain.missed, end) == (found, False, len(records))
    assert min(topic.read, default=0) == read_from


@pytest.mark.rule("SH-24")
def test_one_document_and_what_follows_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = decoded_keys(monkeypatch, last_records)
    records = [whole(5, 1), change(5, 2), whole(5, 3), change(5, 4), change(5, 5)]
    monkeypatch.setattr(last_records, "LogReader", Topic(*written_as(*records)).reader)
    last_document(CONNECTION, "c-assignement", 5.0)
    assert decoded == [b"assignement", b"change:4", b"change:5"]


@pytest.mark.rule("SH-24")
@pytest.mark.parametrize("overlooked", [True, False])
def test_a_new_leader_looks_for_changes_that_one_of_an_earlier_version_overlooked(
    monkeypatch: pytest.MonkeyPatch, overlooked: bool
) -> None:
    records = [whole(5, 1), change(5, 2), *[whole(9, n, reads_changes=False) for n in range(1, 101)]]
    monkeypatch.setattr(last_records, "LogReader", Topic(*written_as(*records)).reader)
    chain, _ = last_document(CONNECTION, "c-assignement", 5.0, overlooked=overlooked)
    assert chain.document is not None
    assert chain.document.epoch == (Epoch(5, 2) if overlooked else Epoch(9, 100))


@pytest.mark.rule("SH-24")
def test_where_a_change_is_lost_the_reader_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [whole(5, 1), change(5, 2), change(5, 4)]
    monkeypatch.setattr(last_records, "LogReader", Topic(*written_as(*records)).reader)
    chain, _ = last_document(CONNECTION, "c-assignement", 5.0)
    assert chain.missed
    assert chain.document is not None
    assert chain.document.epoch == Epoch(5, 2)
    assert read_on(chain, [read(b"assignement", encode(whole(5, 5)))])
    assert not chain.missed


@pytest.mark.rule("SH-24", "SH-2")
def test_compaction_drops_no_change_that_follows_the_last_whole_document() -> None:
    last_whole = 2 * CHANGE_KEYS - 7
    numbers = range(last_whole + 1, last_whole + 1 + LeaderOptions().snapshot_changes)
    assert len({key_of(change(5, number)) for number in numbers}) == len(numbers)
    with pytest.raises(InvalidSettings, match="snapshot_changes 1000 must be below the 1000 keys"):
        LeaderOptions(snapshot_changes=CHANGE_KEYS).check()


def as_before(record: Any, *fields: str) -> bytes:
    """A record as a version wrote it that had not these fields."""
    content = json.loads(encode(record))
    for name in fields:
        del content["record"][name]
    return json.dumps(content).encode()


@pytest.mark.rule("SH-24")
def test_what_an_earlier_version_wrote_says_that_it_reads_no_changes() -> None:
    pong = Pong("w", Incarnation("l", 1), 1, 1, 1, None, reads_changes=True)
    document = whole(5, 1)
    for record in (pong, document):
        found = decode(key_of(record).encode(), as_before(record, "reads_changes"))
        assert found == replace(record, reads_changes=False)


@pytest.mark.rule("SH-28")
def test_what_an_earlier_version_wrote_says_that_it_reads_no_replicas() -> None:
    pong = Pong("w", Incarnation("l", 1), 1, 1, 1, None, reads_replicas=True)
    found = decode(key_of(pong).encode(), as_before(pong, "reads_replicas"))
    assert found == replace(pong, reads_replicas=False)


@pytest.mark.rule("SH-20")
def test_the_age_of_what_was_heard_is_counted_from_when_the_broker_took_it() -> None:
    ping = Ping(5, "l", 1, Epoch(5, 1), 30.0)
    pong, late = (Pong(worker, Incarnation("l", 1), 1, 1, 1, None) for worker in ("w1", "w2"))
    records = [
        LogRecord(offset, timestamp_ms, True, key_of(record).encode(), encode(record))
        for offset, (timestamp_ms, record) in enumerate([(7_000, ping), (8_500, pong), (9_900, late)])
    ]
    heard = heard_in([*records, read(b"pong:w3", b"poison"), read(b"pong:w1", None)], wall_s=9.5)
    assert heard.ping == (ping, 2.5)
    assert heard.pongs == {"w1": (pong, 1.0), "w2": (late, 0.0)}


class _Topic:
    """CONTROL as a reader finds it, in place of the reader itself."""

    def __init__(self, records: list[LogRecord]) -> None:
        self.records = records
        self.read: list[int] = []

    def __call__(self, *_: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def bounds(self, _timeout_s: float) -> tuple[int, int]:
        return 0, len(self.records)

    def records_from(self, _connection: object, _topic: str, start: int, *_: object) -> Iterator[LogRecord]:
        self.read.append(start)
        return iter(self.records[start:])


@pytest.mark.rule("SH-20")
@pytest.mark.parametrize("pongs", [0, 4_990, 30_000])
def test_the_last_ping_is_found_however_many_pongs_came_since(
    pongs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while thousands of applications start, with rounds of 30 s."""
    ping, pong = Ping(5, "l", 1, Epoch(5, 1), 30.0), Pong("w1", Incarnation("l", 1), 1, 1, 1, None)
    early, late, many = (
        LogRecord(0, at_ms, True, key_of(record).encode(), encode(record))
        for at_ms, record in ((1_000, ping), (2_000, ping), (3_000, pong))
    )
    worker = replace(early, key=b"pong:w2", value=encode(replace(pong, worker="w2")))
    topic = _Topic([*[many] * 50_000, early, worker, late, *[many] * pongs])
    monkeypatch.setattr(last_records, "LogReader", topic)
    monkeypatch.setattr(last_records, "_records", topic.records_from)
    heard = last_records.last_heard(cast("Connection", None), "control", 60.0)
    assert heard.ping is not None
    assert heard.ping[0] == ping
    assert heard.pongs.keys() >= {"w2"}
    assert topic.read[0] == len(topic.records) - 5_000
    assert topic.read[-1] > 0
    last_records.last_pongs(cast("Connection", None), "control", 60.0)
    assert topic.read[-1] == topic.read[0]


@pytest.mark.rule("SH-17")
def test_requests_for_output_and_answers_are_nothing_to_leaders_and_workers_machines() -> None:
    request = OutputRequest("w1", "r1", ApplicationId("t", "c", "a"), 10)
    answer = OutputAnswer("w1", "r1", ("one", "two"))
    asked = read(key_of(request).encode(), encode(request))
    answered = read(key_of(answer).encode(), encode(answer))
    assert (command_event(asked), output_request(asked), output_answer(asked)) == (None, request, None)
    assert (control_record(answered), output_answer(answered)) == (None, answer)
    assert isinstance(command_event(answered), Unreadable)
    assert isinstance(control_record(asked), Unreadable)
    assert output_request(read(b"output:w1", b"not JSON")) is None


@pytest.mark.rule("SH-28")
class TestReplicas:
    """Records that name replicas have a format of their own, which earlier versions refuse."""

    A = ApplicationId("t", "c", "a")
    ENTRY = ApplicationEntry("s", ApplicationState.RUNNING, Mode.AVAILABLE, Archive("0" * 64, 1, 1))

    def records(self, replicas: int) -> list[Written]:
        start = replace(START, replicas=replicas)
        entries = {
            self.A.numbered(number): replace(self.ENTRY, replicas=replicas) for number in range(replicas)
        }
        document = AssignmentDocument(Epoch(1, 1), "l", 3, 4.0, applications=MappingProxyType(entries))
        change = DocumentChange(Epoch(1, 2), Epoch(1, 1), 3, 4.0, applications=MappingProxyType(entries))
        return [start, KeptCommand(start, 7), document, change]

    def test_without_them_bytes_are_as_an_earlier_version_writes_them(self) -> None:
        for record in self.records(1):
            text = encode(record)
            assert b"replica" not in text
            assert json.loads(text)["format"] == FORMAT == 1

    def test_with_them_an_earlier_version_refuses_the_record(self) -> None:
        for record in self.records(2):
            text = encode(record)
            assert json.loads(text)["format"] == 2
            assert decode(key_of(record).encode(), text) == record

    def test_one_that_is_being_scaled_away_counts_too(self) -> None:
        second = {self.A.numbered(1): replace(self.ENTRY, state=ApplicationState.STOPPING)}
        document = AssignmentDocument(Epoch(1, 1), "l", 3, 4.0, applications=MappingProxyType(second))
        assert json.loads(encode(document))["format"] == 2
        progress = MappingProxyType(
            {
                self.A.numbered(1): Progress(
                    ApplicationState.STOPPING, None, None, "", MappingProxyType({}), 1, 1, 0, None
                )
            }
        )
        change = DocumentChange(Epoch(1, 2), Epoch(1, 1), 3, 4.0, progress=progress)
        assert json.loads(encode(change))["format"] == 2
        assert decode(b"change:2", encode(change)) == change

    def test_the_epoch_of_such_a_document_is_found_without_reading_all_of_it(self) -> None:
        assert peek_epoch(encode(self.records(2)[2])) == Epoch(1, 1)

    def test_a_number_has_a_key_of_its_own(self) -> None:
        scale = ScaleCommand(self.A, "c", 3)
        assert key_of(scale) == "scale:t/c/a"
        assert decode(b"scale:t/c/a", encode(scale)) == scale

    @pytest.mark.parametrize("name", ["t/c/a#", "t/c/a#0", "t/c/a#01", "t/c/a#1000", "t/c/a#x", "t/c/a#-1"])
    def test_what_names_no_replica_is_refused(self, name: str) -> None:
        with pytest.raises(InvalidName, match="is not a replica"):
            ApplicationId.parse(name)

    def test_a_replica_is_read_as_it_was_written_and_has_no_commands(self) -> None:
        second = self.A.numbered(1)
        assert ApplicationId.parse(str(second)) == second
        assert second.whole == self.A
        for make in (
            lambda: StopCommand(second, "c"),
            lambda: ScaleCommand(second, "c", 2),
            lambda: replace(START, application=second),
        ):
            with pytest.raises(
                InvalidName, match=r"t/c/a#1 is a replica, which can't .* alone: give t/c/a for all"
            ):
                make()
        for number in (0, 1001):
            with pytest.raises(InvalidName, match=f"1 to 1000 replicas, not {number}"):
                ScaleCommand(self.A, "c", number)
