"""Ids of tasks: 160 bits in the order of time, never twice, whatever crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import zlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebalanser.core.tasks.ids import (
    MAX_HOST,
    MAX_PROCESS,
    Generator,
    created_at,
    is_task_id,
    partition_of_id,
)
from rebalanser.errors import UnusableFolder
from rebalanser.tasks import id_files
from rebalanser.tasks.id_files import RESERVE_MS, IdSource, host_bits, take_slot
from rebalanser.testing.waiting import PATIENCE_S

KNOWN_CRC = 0x9186B227
"""As another program computes it: this must never change, as tasks lie where it says."""


class Wall:
    """A wall clock that shows what it is told to."""

    def __init__(self, ms: int) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms


@pytest.mark.rule("SK-1")
def test_an_id_is_milliseconds_counter_host_and_process() -> None:
    flakes = Generator(Wall(0x1122334455667788), 0xAABBCCDDEEFF, 0x1234)
    assert flakes.next() == "1122334455667788" + "00000000" + "aabbccddeeff" + "1234"
    assert flakes.next() == "1122334455667788" + "00000001" + "aabbccddeeff" + "1234"


def test_when_an_id_was_made_is_told_in_seconds() -> None:
    assert created_at(Generator(Wall(1_700_000_000_123), 1, 2).next()) == 1_700_000_000.123


def test_what_is_no_id_is_seen() -> None:
    assert is_task_id(Generator(Wall(5), 1, 2).next())
    for text in ("", "0" * 39, "0" * 41, "g" * 40, "A" * 40, "0" * 40 + "\n"):
        assert not is_task_id(text)


def test_host_and_process_must_fit() -> None:
    for host, process in ((MAX_HOST + 1, 0), (-1, 0), (0, MAX_PROCESS + 1), (0, -1)):
        with pytest.raises(ValueError, match="fit"):
            Generator(Wall(0), host, process)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 60))
@pytest.mark.rule("SK-1")
def test_ids_strictly_grow_whatever_the_wall_clock_does(shown: list[int], floor: int) -> None:
    wall = Wall(0)
    flakes = Generator(wall, 7, 9, floor)
    made = []
    for wall.ms in shown:
        made += [flakes.next(), flakes.next()]
    assert made == sorted(set(made))
    assert all(int(each[:16], 16) >= floor for each in made)
    assert Generator(Wall(0), 7, 9, flakes.floor).next() > made[-1]


@pytest.mark.rule("SK-1")
def test_a_full_counter_goes_on_in_the_next_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rebalanser.core.tasks.ids._MAX_COUNTER", 1)
    flakes = Generator(Wall(5), 1, 2)
    assert [each[12:24] for each in (flakes.next(), flakes.next(), flakes.next())] == [
        "000500000000",
        "000500000001",
        "000600000000",
    ]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=40))
@pytest.mark.rule("SK-1")
def test_a_ceiling_is_reserved_before_the_id_that_needs_it(steps: list[tuple[int, int]]) -> None:
    """A crash at any moment: who begins with what was reserved makes greater ids only."""
    wall, marks, made = Wall(0), [0], [""]

    def reserve(ms: int) -> int:
        marks.append(ms + 4)
        return marks[-1]

    for ms, number in steps:
        wall.ms = ms
        mark = marks[-1]
        flakes = Generator(wall, 1, 2, mark, ceiling=mark, reserve=reserve)
        for _ in range(number):
            made.append(flakes.next())
            assert int(made[-1][:16], 16) < marks[-1]
    assert made == sorted(set(made))


def test_what_can_not_be_reserved_leaves_the_generator_as_it_was() -> None:
    def full(_: int) -> int:
        raise OSError("no space left")

    flakes = Generator(Wall(5), 1, 2, ceiling=6, reserve=full)
    first = flakes.next()
    flakes._wall_ms = Wall(6)
    for _ in range(2):
        with pytest.raises(OSError, match="no space"):
            flakes.next()
    assert flakes.floor == 6
    assert first[:16] == f"{5:016x}"


@pytest.mark.rule("SK-2")
def test_a_partition_is_the_crc_of_the_bytes_and_spreads_evenly() -> None:
    wall = Wall(1_700_000_000_000)
    flakes = Generator(wall, 1, 2)
    ids = []
    for _ in range(100):
        ids += [flakes.next() for _ in range(40)]
        wall.ms += 7
    for partitions in (1, 2, 7, 16, 60):
        counts = Counter(partition_of_id(each, partitions) for each in ids)
        assert set(counts) == set(range(partitions))
        mean = len(ids) / partitions
        assert max(counts.values()) < mean + 5 * mean**0.5 + 1
    known = "0123456789abcdef" * 2 + "01234567"
    assert partition_of_id(known, 1 << 32) == zlib.crc32(bytes.fromhex(known)) == KNOWN_CRC


@pytest.mark.rule("SK-1")
def test_two_at_once_have_a_slot_each_and_a_slot_is_used_again(tmp_path: Path) -> None:
    wall = Wall(1000)
    with IdSource(tmp_path, wall) as one, IdSource(tmp_path, wall) as two:
        first, second = one.next(), two.next()
        assert (first[36:], second[36:]) == ("0000", "0001")
        assert first[:36] == second[:36]
    with IdSource(tmp_path, Wall(0)) as later:
        third = later.next()
        assert third > first
        assert third[36:] == "0000"


@pytest.mark.rule("SK-1")
def test_after_an_orderly_end_nothing_is_skipped_and_after_a_crash_what_was_reserved(tmp_path: Path) -> None:
    one = IdSource(tmp_path, Wall(1000))
    one.next()
    one.close()
    one.close()
    assert take_slot(tmp_path).mark == 1001
    crashed = IdSource(tmp_path / "other", Wall(1000))
    crashed.next()
    assert crashed._slot is not None
    crashed._slot.forget()
    crashed._slot = None
    assert IdSource(tmp_path / "other", Wall(0)).next()[:16] == f"{1000 + RESERVE_MS:016x}"


@pytest.mark.rule("SK-1")
def test_threads_share_a_slot(tmp_path: Path) -> None:
    flakes, made = IdSource(tmp_path), []
    threads = [
        threading.Thread(target=lambda: made.extend(flakes.next() for _ in range(500))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(set(made)) == 2000
    assert {each[36:] for each in made} == {"0000"}
    flakes.close()


_MAKER = """
import os, sys
from pathlib import Path
from rebalanser.tasks.id_files import IdSource

flakes = IdSource(Path(sys.argv[1]), lambda: 5000)
print(flakes.next(), flush=True)
if os.fork() == 0:
    print(flakes.next(), flush=True)
    os._exit(0)
os.wait()
print(flakes.next(), flush=True)
sys.stdin.read()
"""


@pytest.mark.rule("SK-1")
def test_a_forked_child_has_a_slot_of_its_own_and_a_killed_process_leaves_its_mark(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _MAKER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as maker:
        assert maker.stdout is not None
        parent, child, again = (maker.stdout.readline().strip() for _ in range(3))
        assert (parent[36:], child[36:], again[36:]) == ("0000", "0001", "0000")
        assert parent < again
        maker.send_signal(signal.SIGKILL)
    with IdSource(tmp_path, Wall(5000)) as successor:
        after = successor.next()
    assert after[36:] == "0000"
    assert after > again


def test_the_host_is_of_machine_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    assert host_bits(one) == host_bits(one) != host_bits(two)
    assert 0 <= host_bits(one) <= MAX_HOST
    machine = tmp_path / "machine-id"
    machine.write_text("0123\n")
    before = host_bits(one)
    monkeypatch.setattr(id_files, "_MACHINE_IDS", (tmp_path / "missing", machine))
    assert host_bits(one) != before
    monkeypatch.setattr(id_files, "_MACHINE_IDS", (tmp_path / "missing",))
    assert 0 <= host_bits(one) <= MAX_HOST


def test_a_torn_mark_is_not_read_and_the_one_before_is(tmp_path: Path) -> None:
    slot = take_slot(tmp_path)
    for ms in (10, 20, 30):
        slot.reserve(ms)
    slot.forget()
    path = tmp_path / "slot-00000"
    content = bytearray(path.read_bytes())
    content[4096 + 10] ^= 1
    path.write_bytes(content)
    torn = take_slot(tmp_path)
    assert torn.mark == 20 + RESERVE_MS
    assert torn.reserve(40) == 40 + RESERVE_MS
    torn.forget()
    assert take_slot(tmp_path).mark == 40 + RESERVE_MS


def test_a_first_mark_that_was_torn_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "slot-00000").write_bytes(bytes(4096) + b"torn")
    assert take_slot(tmp_path).mark == 0


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "slot-00000").write_bytes(b"x" * 5000)
    with pytest.raises(UnusableFolder, match="slot 0"):
        IdSource(tmp_path).next()
    (tmp_path / "file").write_text("")
    with pytest.raises(UnusableFolder, match="file"):
        IdSource(tmp_path / "file").next()


def test_when_all_slots_are_taken_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_files, "MAX_PROCESS", 0)
    with IdSource(tmp_path) as one:
        one.next()
        with pytest.raises(UnusableFolder, match="all 1 slots"):
            IdSource(tmp_path).next()
