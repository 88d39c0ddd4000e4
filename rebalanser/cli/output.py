"""A command's access to its registry, and its answers for people and scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import typer
from pydantic import BaseModel

from rebalanser.admin import Admin
from rebalanser.errors import NotARegistry, UnknownGroup, UnusableFolder, UnusableStore, UnwritableAnswer
from rebalanser.folders import state_folder
from rebalanser.redaction import redact
from rebalanser.registry.registry_coordinator import groups_in
from rebalanser.registry.urls import REGISTRY_VARIABLE, open_registry, parse_url
from rebalanser.runtime.logs import configure_cli_logging
from rebalanser.runtime.narration import after_silence
from rebalanser.settings import Settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rebalanser.registry import Coordinator
    from rebalanser.state import GroupState

OpenedT = TypeVar("OpenedT")
SHOWN: Final = 100
"""Maximum number of nodes or resources on a terminal without ``--limit``."""

LONG_WORK: Final = 1_000
"""Number of items from which on a progress bar is shown."""


def default_url() -> str:
    """Return the default registry, a file in the user's state folder; create the folder.

    Raises:
        UnusableStore: the folder can't be created.
    """
    try:
        folder = state_folder()
    except UnusableFolder as error:
        raise UnusableStore(f"{error}; name a registry with --registry or {REGISTRY_VARIABLE}") from error
    return f"sqlite:///{folder / 'groups.db'}"


@dataclass(frozen=True, slots=True)
class Face:
    """A command's access to its registry, and its output for a person or a script."""

    url: str
    json: bool

    @classmethod
    def of(cls, registry: str | None, json: bool, verbose: int = 0) -> Face:
        """Create a face from options. Logs go to standard error, more of them with ``verbose``."""
        configure_cli_logging(json, verbose)
        return cls(default_url() if registry is None else registry, json)

    @contextmanager
    def admin(self, group: str, *, create: bool = True) -> Iterator[Admin]:
        """Open an operator's connection; wait at most ``connect_timeout_s`` for the registry.

        Raises:
            UnknownGroup: without ``create`` only: opening would have to make a log for the group.
        """
        settings = Settings()
        with self.patience(settings):
            admin = self.opened_if_known(
                group,
                lambda: Admin(
                    group,
                    self.url,
                    settings=settings,
                    timeout_s=settings.connect_timeout_s,
                    create=create,
                ),
            )
        with admin:
            yield admin

    @contextmanager
    def admin_of_known(self, group: str) -> Iterator[Admin]:
        """Open an operator's connection to an existing group, without creating a file.

        Raises:
            UnknownGroup: the group, or the registry's file, does not exist.
        """
        self.refuse_missing_file(group)
        with self.admin(group, create=False) as admin:
            try:
                yield admin
            except UnknownGroup:
                raise self._unknown(group) from None

    def state(self, group: str) -> GroupState:
        """Read the state of an existing group, without creating anything.

        Raises:
            UnknownGroup: the group, or the registry's file, does not exist.
        """
        self.refuse_missing_file(group)
        with self.admin(group, create=False) as admin:
            return self.known(admin.state())

    def opened_if_known(self, group: str, opened: Callable[[], OpenedT]) -> OpenedT:
        """Return what ``opened`` returns.

        Raises:
            UnknownGroup: the group does not exist; the message names those that do.
        """
        try:
            return opened()
        except UnknownGroup:
            raise self._unknown(group) from None

    def known(self, state: GroupState) -> GroupState:
        """Return the state itself if the group exists.

        Raises:
            UnknownGroup: the group does not exist.
        """
        if state.exists:
            return state
        raise self._unknown(state.group)

    def refuse_unknown(self, group: str, coordinator: Coordinator) -> None:
        """Refuse a group that does not exist, without reading all of it.

        Raises:
            UnknownGroup: the group does not exist.
        """
        if not coordinator.exists():
            raise self._unknown(group)

    def _unknown(self, group: str) -> UnknownGroup:
        there = ""
        with suppress(NotARegistry):
            others = self.groups()
            there = f"; there are: {', '.join(others)}" if others else "; it has no groups"
            if not others and parse_url(self.url).scheme == "memory":
                there += ", as memory:// exists in one process only"
        return UnknownGroup(f"no such group: {group!r} in {redact(self.url)}{there}")

    def refuse_missing_file(self, what: str) -> None:
        """Refuse a SQLite file that does not exist, as opening would create it.

        Raises:
            UnknownGroup: there is no such file.
        """
        file = self.missing_file
        if file is not None:
            raise UnknownGroup(f"no such group: {what!r}, as there is no file {file}")

    @property
    def missing_file(self) -> Path | None:
        """The file that opening the registry would create; None if it would create none."""
        parsed = parse_url(self.url)
        slash, name = parsed.path[:1], parsed.path[1:]
        if parsed.scheme != "sqlite" or parsed.hosts or slash != "/" or name == ":memory:":
            return None  # opening it creates nothing, or is refused
        file = Path(name).absolute()
        would_make = file.name and file.parent.is_dir() and not file.exists()
        return file if would_make else None

    def groups(self) -> list[str]:
        """Return the names of all groups in the registry.

        Raises:
            UnknownGroup: the registry's file does not exist.
            NotARegistry: the store can't list its groups.
        """
        if (file := self.missing_file) is not None:
            raise UnknownGroup(f"no groups, as there is no file {file}")
        settings = Settings()
        with self.patience(settings):
            opened = open_registry(self.url, settings.connect_timeout_s)
        with closing(opened) as registry:
            return sorted(groups_in(registry, parse_url(self.url).root, settings.registry_timeout_s))

    @contextmanager
    def patience(self, settings: Settings) -> Iterator[None]:
        """Print how long the registry's first answer can take, if it takes long."""
        if self.json or not sys.stderr.isatty():
            yield
            return
        words = f"connecting to {redact(self.url)}, for {settings.connect_timeout_s:g} s at most"
        with after_silence(lambda: typer.echo(words, err=True)):
            yield

    @property
    def on_terminal(self) -> bool:
        """True if the output goes to a terminal."""
        return not self.json and sys.stdout.isatty()

    def limit(self, asked: int | None) -> int | None:
        """Return the maximum number of items to show: the option, or on a terminal the default."""
        return SHOWN if asked is None and self.on_terminal else asked

    def answer(self, document: BaseModel | Mapping[str, Any], *lines: str) -> None:
        """Print the answer: the document as JSON, or else the lines.

        Raises:
            UnwritableAnswer: standard output can't be written, for a reason other than a closed pipe.
        """
        if self.json and isinstance(document, BaseModel):
            lines = (document.model_dump_json(),)
        elif self.json:
            lines = (json.dumps(document),)
        try:
            for line in lines:
                typer.echo(line)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UnwritableAnswer(f"the answer can't be written: {error.strerror}") from error

    def remark(self, line: str) -> None:
        """Tell people on standard error that an answer is empty; nothing with ``--json``."""
        if not self.json:
            typer.echo(line, err=True)

    def draw(self, picture: RenderableType) -> None:
        """Draw a picture on the terminal."""
        from rich.console import Console  # noqa: PLC0415 - slow to import

        Console(highlight=False).print(picture)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int, int], None]]:
        """Return a progress callback for a long change: a bar on standard error if that is a terminal."""
        if self.json or total < LONG_WORK or not sys.stderr.isatty():
            yield lambda _done, _total: None
            return
        from rich.console import Console  # noqa: PLC0415 - slow to import
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done, _total: bar.update(task, completed=done)


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, such as ``1 node`` or ``10,000 nodes``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str) -> str:
    """Return a stored text without control characters, which a terminal would obey."""
    return text if text.isprintable() else repr(text)
