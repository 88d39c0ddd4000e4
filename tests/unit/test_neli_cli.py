"""``rebalanser neli``: how roles are written, in words and in a file that changes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rebalanser.cli import neli
from rebalanser.cli.neli import _lines, follow_roles, parse_roles
from rebalanser.core.neli.roles import Role, number_of
from rebalanser.core.neli.settings import NeliSettings, check
from rebalanser.errors import InvalidSettings
from rebalanser.neli.description import GroupDescription, MemberDescription, PartitionDescription


@pytest.mark.rule("NE-14")
def test_roles_are_names_numbers_ranges_and_names_with_numbers() -> None:
    assert parse_roles("0-1023") == {slot: slot for slot in range(1024)}
    assert parse_roles(" mail ,billing=3, 7, 9-9,mail,") == {
        "mail": number_of("mail"),
        "billing": 3,
        7: 7,
        9: 9,
    }
    assert parse_roles("a-b, 1-b") == {name: number_of(name) for name in ("a-b", "1-b")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" , ", "no roles: give"),
        ("9-3", "invalid range 9-3"),
        ("0-99999999999", "at most 100,000 roles"),
        ("0-99999,100000", "more than 100,000 roles"),
        ("mail=1,mail=2", "role mail has two numbers, 1 and 2"),
    ],
)
def test_roles_that_can_not_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        parse_roles(text)


@pytest.mark.parametrize("options", [[], ["--roles", "a", "--roles-file", "b"]])
@pytest.mark.parametrize("command", ["run", "status"])
def test_roles_are_named_in_one_way(command: str, options: list[str]) -> None:
    ended = CliRunner().invoke(neli.app, [command, "roles", "office", "--kafka", "127.0.0.1:1", *options])
    assert isinstance(ended.exception, InvalidSettings)
    assert "--roles-file FILE, not both" in str(ended.exception)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[NeliSettings]:
    """The settings with which a member is made, which then does not start."""
    made: list[NeliSettings] = []

    class Stopped(Exception):
        pass

    def refuse(*_arguments: object, settings: NeliSettings, **_options: object) -> None:
        made.append(settings)
        raise Stopped

    monkeypatch.setattr(neli, "Neli", refuse)
    return made


@pytest.mark.rule("NE-11", "NE-12")
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], NeliSettings()),
        (["--groups", "3"], NeliSettings(groups=3)),
        (["--heartbeat-interval", "0.5"], NeliSettings(heartbeat_interval_s=0.5)),
        (
            ["--session-timeout", "90", "--max-poll-interval", "120"],
            NeliSettings(session_timeout_s=90.0, max_poll_interval_s=120.0),
        ),
    ],
)
def test_options_are_settings(made: list[NeliSettings], options: list[str], settings: NeliSettings) -> None:
    arguments = ["run", "roles", "office", "--roles", "a", "--kafka", "127.0.0.1:1"]
    CliRunner().invoke(neli.app, [*arguments, *options])
    assert made == [settings]
    check(settings)


class Looks(threading.Event):
    """Ends after the last of these contents was looked at; sets the file before each look."""

    def __init__(self, file: Path, contents: list[str | None]) -> None:
        super().__init__()
        self.file = file
        self.contents = contents

    def wait(self, timeout: float | None = None) -> bool:
        if not self.contents:
            return True
        content = self.contents.pop(0)
        if content is None:
            self.file.unlink()
        else:
            self.file.write_text(content)
        return False


@pytest.mark.rule("NE-1")
def test_a_running_process_follows_a_file_of_roles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Mapping[Role, int]] = []
    file = tmp_path / "roles"
    contents = [
        "mail=0 # first\n\n# none\nbilling=1\n",
        "billing=1,mail=0",
        None,
        "3-1",
        "3-1",
        "billing=1,mail=0",
        "mail=0\n",
    ]
    follow_roles(file, {"mail": 0}, told.append, Looks(file, contents))
    assert told == [{"mail": 0, "billing": 1}, {"mail": 0}]
    assert len([each for each in caplog.records if "stay as they are" in each.message]) == 2


def test_status_counts_the_roles_of_each_process() -> None:
    member = MemberDescription(member="m", client="host-1", host="/127.0.0.1")
    described = GroupDescription(
        topic="roles",
        group="office",
        state="stable",
        protocol="classic",
        as_of=datetime.now(UTC),
        partitions=[
            PartitionDescription(
                partition=index,
                roles=list(roles),
                member=member if index < 2 else None,
                committed_offset=None,
                claim=None,
                committed_by=None,
                last_heartbeat_at=None,
            )
            for index, roles in enumerate([["a", "b"], ["c"], ["d"]])
        ],
    )
    assert _lines(described)[-1] == "roles by process: host-1 3, nobody 1"
