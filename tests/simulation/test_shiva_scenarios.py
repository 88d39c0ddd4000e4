"""Golden scenarios of Shiva: what is done to a cluster, and the story that must come of it, as text files.

``python tests/simulation/test_shiva_scenarios.py`` writes the stories anew, to be read before they are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from rebalanser.core.shiva.messages import Fact, FactKind
from rebalanser.core.shiva.types import ApplicationId, Mode
from simulation.group import Trace
from simulation.kernel.stories import Words, files_in, play, read, write_anew
from simulation.shiva import (
    Fault,
    HostPlan,
    Scenario,
    World,
    change_leader,
    settle,
    stay,
)

FOLDER = Path(__file__).with_name("shiva_scenarios")
_LEFT_OUT = {
    FactKind.DOCUMENT_ADOPTED,
    FactKind.PROCESS_STARTING,
    FactKind.FILES_STORED,
    FactKind.COMMANDS_KEPT,
}


def _plan(name: str) -> HostPlan:
    name, _, tag = name.partition("+")
    return HostPlan(
        name,
        worker=name if name[0] in "wd" else None,
        leads=name[0] in "ld",
        tags=frozenset({tag} if tag else ()),
    )


def _settle(world: World) -> None:
    settle(world)
    stay(world)


def _words(world: World) -> Words:
    def start(application: str, mode: str, *tags: str) -> None:
        world.clients.start(ApplicationId.parse(application), Mode(mode), frozenset(tags))

    def up(*names: str) -> None:
        for name in names:
            world.start(world.host(name))

    return {
        "up": up,
        "start": start,
        "start-too-large": lambda application: world.clients.start_oversize(
            ApplicationId.parse(application), Mode.AVAILABLE
        ),
        "stop": lambda application: world.clients.stop(ApplicationId.parse(application)),
        "settle": lambda: _settle(world),
        "wait": lambda seconds: world.run_for(float(seconds)),
        "leave": lambda name: world.stop(world.host(name)),
        "crash": lambda name: world.crash(world.host(name)),
        "pause": lambda name, seconds: world.pause(world.host(name), float(seconds), Fault.PAUSE_LONG),
        "cut-off": lambda name, seconds: world.cut(world.host(name), float(seconds)),
        "read-slowly": lambda name, seconds: world.lag(
            world.host(name), "COMMAND", float(seconds), float(seconds)
        ),
        "change-leader": lambda: change_leader(world),
        "compact": lambda: world.compact(),
        "zombie-document": lambda: world.forge(),
    }


def begin(first: str, tell: Callable[[str], None]) -> Words:
    """A world of hosts by their names."""

    def on_fact(process: str, fact: Fact) -> None:
        if fact.kind not in _LEFT_OUT:
            about = f" {fact.application or ''}{fact.worker if process.endswith('leader') else ''}".rstrip()
            tell(f"{process}: {fact.kind.value.replace('_', ' ')}{about}")

    plans = tuple(_plan(name) for name in first.split())
    return _words(World(Scenario(plans), Random(3), Trace(None), on_fact))


@pytest.mark.parametrize("path", files_in(FOLDER), ids=lambda path: path.stem)
@pytest.mark.rule("SH-4", "SH-5", "SH-7", "SH-9", "SH-12", "SH-13", "SH-14")
def test_the_story_is_as_written(path: Path) -> None:
    script, story = read(path)
    assert play(script, begin) == story


def test_there_are_stories() -> None:
    assert len(files_in(FOLDER)) >= 5


if __name__ == "__main__":
    write_anew(FOLDER, begin)
