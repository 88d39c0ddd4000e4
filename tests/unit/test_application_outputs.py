"""Reading an application's output: the last lines, and what follows, over files that are rotated (SH-17)."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebalanser.core.shiva.records import OutputAnswer, OutputRequest
from rebalanser.core.shiva.types import ApplicationId
from rebalanser.errors import FixConfiguration
from rebalanser.runtime.output_logger import RotatedFile
from rebalanser.shiva.data_folder import output_file
from rebalanser.shiva.outputs import LONGEST_LINE_BYTES, newest_lines, tail
from rebalanser.testing.clock import FakeClock
from rebalanser_kafka.shiva.outputs import FOLLOWED_BYTES, MAX_BYTES, MAX_FOLLOWED, PAUSE_S, OutputServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.rule("SH-17")

APP = ApplicationId("tenant", "channel", "app")


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    path = output_file(tmp_path, APP)
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def output(newest: Path) -> Iterator[RotatedFile]:
    file = RotatedFile(str(newest), file_bytes=20, files=4)
    yield file
    file.close()


def test_where_nothing_is_kept_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(FixConfiguration, match=r"no output of tenant/channel/app .* look on the worker"):
        tail(tmp_path, APP)


def test_the_last_lines_come_from_as_many_files_as_it_takes(
    tmp_path: Path, newest: Path, output: RotatedFile
) -> None:
    assert list(tail(tmp_path, APP)) == []
    for number in range(10, 20):
        output.write(b"line %d\n" % number)
    assert len(list(newest.parent.iterdir())) == 4
    assert list(tail(tmp_path, APP, 0)) == []
    assert list(tail(tmp_path, APP, 1)) == ["line 19"]
    assert list(tail(tmp_path, APP, 3)) == ["line 17", "line 18", "line 19"]
    assert list(tail(tmp_path, APP, 100)) == [f"line {number}" for number in range(12, 20)]


def test_every_byte_is_kept_and_shown_as_well_as_it_can_be(tmp_path: Path, newest: Path) -> None:
    with newest.open("wb") as file:
        file.write("ünï\r\n".encode() + b"\xff\x00\n" + b"x" * (LONGEST_LINE_BYTES + 5) + b"\nno end")
    assert list(tail(tmp_path, APP)) == ["ünï\r", "\ufffd\x00", "x" * LONGEST_LINE_BYTES, "xxxxx"]


def test_what_is_written_later_is_followed_across_files(tmp_path: Path, output: RotatedFile) -> None:
    output.write(b"line 10\n")
    waits: list[float] = []

    def go_on(seconds: float) -> None:
        waits.append(seconds)
        first = 10 + 5 * len(waits)
        for number in range(first, first + 5):
            output.write(b"line %d\n" % number)

    following = tail(tmp_path, APP, follow=True, wait=go_on)
    expected = ["line 10", *(f"line {number}" for number in range(15, 30))]
    assert list(islice(following, 16)) == expected
    assert len(waits) == 3
    following.close()


def test_following_goes_on_with_the_oldest_that_is_left(tmp_path: Path, output: RotatedFile) -> None:
    output.write(b"line 10\n")

    def flood(_seconds: float) -> None:
        for number in range(11, 40):
            output.write(b"line %d\n" % number)

    following = tail(tmp_path, APP, follow=True, wait=flood)
    assert next(following) == "line 10"
    assert list(islice(following, 9)) == ["line 11", *(f"line {number}" for number in range(32, 40))]
    following.close()


def test_following_begins_before_anything_is_printed(tmp_path: Path, newest: Path) -> None:
    following = tail(tmp_path, APP, follow=True, wait=lambda _seconds: newest.write_text("first\n"))
    assert next(following) == "first"
    following.close()


def test_a_line_that_is_still_being_written_is_not_shown_in_two(tmp_path: Path, newest: Path) -> None:
    newest.write_text("half ")

    def finish(_seconds: float) -> None:
        with newest.open("a") as file:
            file.write("a line\n")

    following = tail(tmp_path, APP, follow=True, wait=finish)
    assert next(following) == "half a line"
    following.close()


def test_what_cannot_be_written_is_counted_and_said_later(newest: Path) -> None:
    file = RotatedFile(str(newest), file_bytes=65_536, files=2)
    newest.mkdir()
    file.write(b"0123456789\n")
    file.write(b"0123456789\n")
    newest.rmdir()
    file.write(b"again\n")
    file.close()
    assert newest.read_text() == "[22 bytes of output were lost: they could not be written]\nagain\n"


def test_an_answer_takes_the_newest_lines_that_fit(tmp_path: Path, newest: Path) -> None:
    newest.write_text("".join(f"line {number}\n" for number in range(10)))
    assert newest_lines(tmp_path, APP, 3, 10_000) == (["line 7", "line 8", "line 9"], 0)
    assert newest_lines(tmp_path, APP, 3, 2 * len('"line 8"')) == (["line 8", "line 9"], 1)
    assert newest_lines(tmp_path, APP, 3, 1) == ([], 3)


class Followed:
    """A worker's answers in a thread of the test: what it waits for lets time pass, and something happen."""

    def __init__(self, folder: Path) -> None:
        self.answers: list[OutputAnswer] = []
        self.clock = FakeClock()
        self.happens: list[Callable[[], object]] = []
        self.outputs = OutputServer("w1", folder, self.answers.append, self.clock)
        self.outputs._closing = self  # type: ignore[assignment]
        self.outputs._begin = self.outputs._follow  # type: ignore[method-assign]
        self.is_set = lambda: False

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        if self.happens:
            self.happens.pop(0)()

    def follow(self, lines: int = 10, follow_s: float = 30.0, request: str = "r1") -> list[OutputAnswer]:
        self.outputs.follow(OutputRequest("w1", request, APP, lines, follow_s))
        return self.answers


def test_who_follows_gets_the_last_lines_and_then_what_is_printed(tmp_path: Path, newest: Path) -> None:
    newest.write_bytes(b"one\ntwo\nthree\n")
    followed = Followed(tmp_path)

    def prints(text: bytes) -> None:
        with newest.open("ab") as file:
            file.write(text)

    followed.happens += [lambda: None] * 10 + [lambda: prints(b"four\nfive\n")]
    assert [answer.lines for answer in followed.follow(2)] == [("two", "three"), ("four", "five")]
    assert all((answer.request, answer.worker) == ("r1", "w1") for answer in followed.answers)


def test_an_answer_comes_even_if_nothing_was_printed_and_to_who_asks_again(
    tmp_path: Path, newest: Path
) -> None:
    newest.touch()
    followed = Followed(tmp_path)
    began = followed.clock.now()
    followed.happens += [lambda: followed.follow(0)] * 20
    assert [answer.lines for answer in followed.follow()] == [()] * 21
    assert 30.0 <= followed.clock.now() - began < 40.0


def test_what_prints_faster_than_is_sent_loses_its_oldest_lines_which_are_counted(
    tmp_path: Path, newest: Path
) -> None:
    line, count = "x" * 998, 2000
    newest.write_bytes(f"{line}\n".encode() * count)
    followed = Followed(tmp_path)
    reading = followed.clock.now

    def takes_time() -> float:
        followed.clock.advance(PAUSE_S / 400)
        return reading()

    followed.clock.now = takes_time  # type: ignore[method-assign]
    answers = followed.follow(count)
    assert sum(answer.omitted for answer in answers) > 0
    assert sum(len(answer.lines) + answer.omitted for answer in answers) == count
    assert max(len(answer.lines) for answer in answers[:1]) <= MAX_BYTES // 1000
    assert all(len(answer.lines) <= FOLLOWED_BYTES // 1000 for answer in answers[1:])
    assert len(answers) > 2


def test_so_many_are_followed_at_a_time_and_nothing_where_nothing_is_kept(
    tmp_path: Path, newest: Path
) -> None:
    followed = Followed(tmp_path)
    assert [answer.lines for answer in followed.follow()] == [()]
    newest.parent.rmdir()
    followed.answers.clear()
    assert "no output of tenant/channel/app" in followed.follow()[0].error
    followed.outputs._begin = lambda _request: None  # type: ignore[method-assign]
    for number in range(MAX_FOLLOWED + 1):
        followed.follow(request=f"many-{number}")
    assert f"the output of {MAX_FOLLOWED} applications" in followed.answers[-1].error
    assert len(followed.answers) == 2
