"""``rebalanser watch``: shows a group as it changes, on a terminal or as lines."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, Queue
from types import FrameType
from typing import Annotated, Final, TypeAlias

import typer

from rebalanser.cli.options import GroupArgument, RegistryOptions
from rebalanser.cli.output import Face
from rebalanser.cli.view import HeartbeatAges, Moves, Picture, View, changed_lines, changed_silence, keys_in
from rebalanser.core.group import Topic, TopicKind
from rebalanser.errors import FixConfiguration, RetryLater
from rebalanser.group import open_coordinator
from rebalanser.registry import Coordinator
from rebalanser.registry.contract import LeaseAge
from rebalanser.runtime.clock import SystemClock
from rebalanser.settings import Settings
from rebalanser.state import GroupState, describe

SHORTEST_PAUSE_S: Final = 0.1
"""Minimum seconds between two reads of the group, in which changes are collected."""
QUIET_READS: Final = 4
"""Minimum pause between two reads without a change, in durations of the last read."""
REDRAW_S: Final = 0.25
"""Seconds between two updates of the terminal; keys are handled at once."""
MOST_NEWS: Final = 16
"""Maximum number of reads that wait to be shown, on a terminal that is slow or stopped."""
MOST_KEY_BYTES: Final = 1024
ESCAPE: Final = b"\x1b"
ESCAPE_S: Final = 0.05
"""Seconds to wait for the rest of a key sequence that begins with Escape."""
SIGNALLED: Final = 128
"""Exit code of a command that a signal ends, less the signal's number, as shells report it."""
_WITHOUT_CURSOR: Final = ("dumb", "unknown")
"""Values of TERM for terminals, such as the shell in Emacs, on which nothing can be drawn anew."""
WATCHED: Final = (TopicKind.GROUP, TopicKind.LEADERSHIP, TopicKind.ALLOCATION, TopicKind.ACKNOWLEDGEMENTS)


@dataclass(frozen=True, slots=True)
class AgesRead:
    """The ages of the last heartbeats of the nodes in ``asked``."""

    asked: Sequence[str]
    ages: Mapping[str, LeaseAge]


News: TypeAlias = GroupState | AgesRead | RetryLater
Choose: TypeAlias = Callable[[Sequence[str]], Sequence[str]]
"""Chooses, of all nodes, those whose heartbeats are read."""


def watch(
    on: RegistryOptions,
    group: GroupArgument,
    interval: Annotated[
        float,
        typer.Option(
            min=SHORTEST_PAUSE_S,
            metavar="SECONDS",
            help="Seconds between two reads of the group, and of its heartbeats, while nothing changes.",
        ),
    ] = 2.0,
) -> None:
    """Show a group as it changes, until q or Ctrl-C: live lists on a terminal that can draw, else a line for
    each change.

    The lists are nodes, resources, moves since the watch began, and what waits. Arrows and PgUp/PgDn scroll,
    Tab shows the next list, / filters. With --json each line is the whole state.

    The column heartbeat has the age of the last heartbeat, such as "3 s ago". "6 of 10 s" in red: the node is
    silent, that is, it has sent none for 6 s, more than half of its lease of 10 s; others take over when the
    lease ends. "—": the age is not known now. Of more than 128 nodes, those in sight are read each time, and
    the others in turn.
    """
    face = on.face()
    face.refuse_missing_file(group)
    settings = Settings()
    with face.patience(settings):
        opened = face.opened_if_known(
            group, lambda: open_coordinator(group, face.url, settings, SystemClock(), create=False)
        )
    with closing(opened) as coordinator:
        face.refuse_unknown(group, coordinator)
        if face.on_terminal and os.environ.get("TERM") not in _WITHOUT_CURSOR:
            _show_live(coordinator, group, interval)
        elif face.json:
            _show_states(face, coordinator, group, interval)
        else:
            _show_changes(face, coordinator, group, interval)


def follow(
    coordinator: Coordinator, group: str, interval_s: float, choose: Choose | None = None
) -> Iterator[News]:
    """Yield the group's state whenever it may have changed, and every ``interval_s`` seconds; without end.

    A group that takes long to read is read less often while nothing seems to change. After each state, and
    every ``interval_s`` seconds, yield the heartbeats of the nodes that ``choose`` returns. If the registry
    can't be read, yield the error and try again.
    """
    changed = threading.Event()
    watching = False
    nodes: Sequence[str] = ()
    error: str | None = None
    while True:
        changed.clear()
        began = time.monotonic()
        try:
            state = describe(group, coordinator.read())
        except RetryLater as failed:
            if str(failed) != error:
                error = str(failed)
                yield failed
        else:
            error = None
            if not watching:
                topics = {Topic(kind): state.revision + 1 for kind in WATCHED}
                coordinator.watch("", topics, lambda _notices: changed.set())
                watching = True
            nodes = [node.node for node in state.nodes]
            yield state
        took_s = time.monotonic() - began
        due = time.monotonic() + max(interval_s, QUIET_READS * took_s)
        pause_s = max(SHORTEST_PAUSE_S, took_s)
        while True:
            if choose is not None and (heard := hear(coordinator, choose(nodes))) is not None:
                yield heard
            time.sleep(pause_s)
            pause_s = 0.0
            left_s = due - time.monotonic()
            if left_s <= 0 or changed.wait(min(interval_s, left_s)):
                break


def hear(coordinator: Coordinator, nodes: Sequence[str]) -> AgesRead | None:
    """Return the ages of these nodes' heartbeats; None while the registry is away."""
    try:
        return AgesRead(nodes, coordinator.heartbeats(nodes))
    except RetryLater:  # if it lasts, the next read of the group reports it
        return None
    except FixConfiguration:  # a user who may read the group may lack the right to read leases
        return AgesRead(nodes, {})


def _show_live(coordinator: Coordinator, group: str, interval_s: float) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to import
    from rich.live import Live  # noqa: PLC0415

    from rebalanser.cli.table import render_view  # noqa: PLC0415

    view = View()
    reader = _GroupReader(coordinator, group, interval_s, view)
    console = Console(highlight=False)
    drawing = Live(console=console, auto_refresh=False, screen=True)
    with _left_on_signals(), _keyboard() as pressed, drawing as live:
        drawn = None
        while True:
            if reader.take() or drawn != console.size:
                drawn = console.size
                live.update(render_view(view, console.height), refresh=True)
            keys = pressed(REDRAW_S)
            if not all(map(view.press, keys)):
                return
            if keys:
                drawn = None


class _GroupReader:
    """Reads a group in another thread, so that keys are handled meanwhile."""

    def __init__(self, coordinator: Coordinator, group: str, interval_s: float, view: View) -> None:
        self._news: Queue[Picture | AgesRead | Exception] = Queue(maxsize=MOST_NEWS)
        self._view = view
        self._in_sight: Sequence[str] = ()
        self._states = follow(coordinator, group, interval_s, self._choose)
        threading.Thread(target=self._run, name="rebalanser-watch", daemon=True).start()

    def _choose(self, nodes: Sequence[str]) -> Sequence[str]:
        return self._view.heartbeats.to_ask(nodes, self._in_sight)

    def _run(self) -> None:
        moves = Moves()
        try:
            for news in self._states:
                if isinstance(news, GroupState):
                    seen_at = time.time()
                    self._news.put(Picture.of(news, seen_at, moves.see(news, seen_at)))
                else:
                    self._news.put(news)
        except Exception as error:
            self._news.put(error)

    def take(self) -> bool:
        """Update the view with new reads. Return True if there were any."""
        changed = False
        while True:
            try:
                news = self._news.get_nowait()
            except Empty:
                self._in_sight = self._view.shown_nodes()
                return changed
            changed = True
            match news:
                case Picture():
                    self._view.update(news)
                case AgesRead(asked, ages):
                    self._view.hear(asked, ages)
                case RetryLater():
                    self._view.error = f"this may be out of date: {news}"
                case Exception():
                    raise news


@contextmanager
def _left_on_signals() -> Iterator[None]:
    """Exit on SIGTERM and SIGHUP, so that the terminal is restored, as ``timeout`` and ``kill`` send them."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(SIGNALLED + number)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _keyboard() -> Iterator[Callable[[float], list[str]]]:
    """Read single keys from standard input; return a function that waits some seconds for the next ones."""
    if not sys.stdin.isatty():
        yield _no_keys
        return
    import termios  # noqa: PLC0415 - only where there are terminals
    import tty  # noqa: PLC0415

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield partial(_keys, descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_keys(seconds: float) -> list[str]:
    time.sleep(seconds)
    return []


def _keys(descriptor: int, seconds: float) -> list[str]:
    sent = b""
    while select.select([descriptor], [], [], ESCAPE_S if sent else seconds)[0]:
        sent += os.read(descriptor, MOST_KEY_BYTES)
        if not sent.endswith(ESCAPE):  # else the rest of an arrow may still be coming
            break
    return keys_in(sent.decode(errors="ignore"))


def _show_states(face: Face, coordinator: Coordinator, group: str, interval_s: float) -> None:
    """Print the whole state as a line of JSON whenever it has changed."""
    shown: GroupState | None = None
    for news in follow(coordinator, group, interval_s):
        if isinstance(news, GroupState):
            if shown is None or news != shown.model_copy(update={"revision": news.revision}):
                shown = news
                face.answer(news)
                sys.stdout.flush()
        else:
            typer.echo(f"warning: {news}", err=True)


def _show_changes(face: Face, coordinator: Coordinator, group: str, interval_s: float) -> None:
    """Print all of the group once, and then a line for each change."""
    moves, heartbeats = Moves(), HeartbeatAges()
    picture: Picture | None = None
    labels: dict[str, str] = {}
    for news in follow(coordinator, group, interval_s, lambda nodes: heartbeats.to_ask(nodes, ())):
        lines: list[str] = []
        match news:
            case GroupState():
                before, seen_at = picture, time.time()
                picture = Picture.of(news, seen_at, moves.see(news, seen_at))
                labels = {node.node: node.label for node in news.nodes}
                lines = list(changed_lines(before, picture))
            case AgesRead(asked, ages):
                silent = heartbeats.silent
                heartbeats.take(labels, asked, ages)
                lines = list(changed_silence(labels, silent, heartbeats.silent))
            case error:
                typer.echo(f"warning: {error}", err=True)
        if lines:
            clock = time.strftime("%Y-%m-%d %H:%M:%S")
            face.answer({}, *(f"{clock}  {line}" for line in lines))
            sys.stdout.flush()
