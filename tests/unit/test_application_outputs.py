"""Reading an application's output: the last lines, and what follows, over files that are rotated (SH-17)."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebalanser.applications.data_folder import output_file
from rebalanser.applications.outputs import LONGEST_LINE_BYTES, newest_lines, tail
from rebalanser.errors import FixConfiguration
from rebalanser.runtime.keeper import RotatedFile
from rebalanser.shiva.types import ApplicationId

if TYPE_CHECKING:
    from collections.abc import Iterator

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
