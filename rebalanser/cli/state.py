"""``rebalanser status`` and ``rebalanser watch``: the state of a group, once or as it changes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Final

import typer

from rebalanser.cli.face import Face, GroupArgument, JsonOption, LimitOption, RegistryOption
from rebalanser.cli.lines import first_nodes, plain
from rebalanser.errors import RetryLater
from rebalanser.group import open_coordinator
from rebalanser.protocol import Topic, TopicKind
from rebalanser.registry import Coordinator
from rebalanser.runtime.clock import SystemClock
from rebalanser.settings import Settings
from rebalanser.state import GroupState, describe

SHORTEST_PAUSE_S: Final = 0.1
"""How long changes are collected before the group is read again."""
WATCHED: Final = (TopicKind.GROUP, TopicKind.LEADERSHIP, TopicKind.ALLOCATION, TopicKind.ACKNOWLEDGEMENTS)


def status(
    group: GroupArgument,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="Exit with 1 unless it is balanced and every resource has an owner."
        ),
    ] = False,
    limit: LimitOption = None,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Show a group: its nodes, its leader, whether it is balanced, and what waits for an owner.

    With --limit the JSON has N nodes and N resources at most.
    """
    face = Face.of(registry, json)
    state = face.state(group)
    most = face.limit(limit)
    if face.on_terminal:
        from rebalanser.cli.table import render  # noqa: PLC0415 - slow to import

        face.draw(render(state, most_nodes=most))
    else:
        cut = {"nodes": tuple(first_nodes(state, most)), "resources": state.resources[:most]}
        face.answer(state.model_copy(update=cut), *plain(state, most))
    if exit_code and not state.all_owned:
        raise typer.Exit(1)


def watch(
    group: GroupArgument,
    interval: Annotated[
        float,
        typer.Option(min=SHORTEST_PAUSE_S, metavar="SECONDS", help="Read it again after this long anyway."),
    ] = 2.0,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Show a group as it changes, until Ctrl-C: a live table, or lines where there is no terminal.

    With --json each line is the whole state.
    """
    face = Face.of(registry, json)
    face.state(group)
    settings = Settings()
    with face.patience(settings):
        opened = open_coordinator(group, face.url, settings, SystemClock())
    with closing(opened) as coordinator:
        states = follow(coordinator, group, interval)
        if face.on_terminal:
            _show_live(states)
        else:
            _show_changes(face, states)


def follow(coordinator: Coordinator, group: str, interval_s: float) -> Iterator[GroupState | RetryLater]:
    """The group's state whenever it may have changed, and every ``interval_s`` seconds; without end.

    Where the registry could not be read there is the error instead; it is tried again.
    """
    changed = threading.Event()
    watching = False
    while True:
        changed.clear()
        try:
            state = describe(group, coordinator.read())
        except RetryLater as error:
            yield error
        else:
            if not watching:
                topics = {Topic(kind): state.revision + 1 for kind in WATCHED}
                coordinator.watch("", topics, lambda _notices: changed.set())
                watching = True
            yield state
        time.sleep(SHORTEST_PAUSE_S)
        changed.wait(interval_s - SHORTEST_PAUSE_S)


def _show_live(states: Iterator[GroupState | RetryLater]) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to import
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from rebalanser.cli.table import render  # noqa: PLC0415

    latest: GroupState | None = None
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for state in states:
            if isinstance(state, GroupState):
                latest = state
                live.update(render(state, height=console.height), refresh=True)
            elif latest is None:
                live.update(Text(str(state)), refresh=True)
            else:
                note = f"this may be out of date: {state}"
                height = console.height - len(note) // console.width
                live.update(render(latest, note, height), refresh=True)


def _show_changes(face: Face, states: Iterator[GroupState | RetryLater]) -> None:
    shown: dict[str, object] | str | None = None
    for state in states:
        if isinstance(state, GroupState):
            seen: dict[str, object] | str = state.model_dump(exclude={"revision"})
        else:
            seen = str(state)
        if seen == shown:
            continue
        shown = seen
        if isinstance(state, GroupState):
            face.answer(state, *plain(state))
            sys.stdout.flush()
        else:
            typer.echo(f"warning: {state}", err=True)
