"""Golden scenarios: what is done to a group, and the story that must come of it, in files a person can read.

``python tests/simulation/test_scenarios.py`` writes the stories anew, to be read before they are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from rebalanser.core.group import Fact, FactKind
from simulation.group import (
    Armed,
    FaultKind,
    Host,
    HostPlan,
    Scenario,
    Trace,
    World,
    settle,
    stay,
)
from simulation.kernel.stories import Words, files_in, play, read, write_anew

FOLDER = Path(__file__).with_name("scenarios")
_LEFT_OUT = {FactKind.GROUP_READ, FactKind.START_RETURNED, FactKind.COMMAND_FAILED, FactKind.JOINING}


def _settle(world: World) -> None:
    settle(world)
    stay(world)


def _words(world: World) -> Words:
    def host(label: str) -> Host:
        return next(host for host in world.hosts if host.plan.label == label)

    return {
        "start": lambda label: world.start(host(label)),
        "settle": lambda: _settle(world),
        "wait": lambda seconds: world.run_for(float(seconds)),
        "stop": lambda label: world.stop(host(label)),
        "crash": lambda label: world.crash(host(label)),
        "pause": lambda label, seconds: world.pause(host(label), float(seconds), FaultKind.PAUSE_LONG),
        "cut-off": lambda label, seconds: world.cut(host(label), float(seconds), refuses=False),
        "next-handler": lambda label, *fault: host(label).handler_faults.append(FaultKind(" ".join(fault))),
        "request": lambda number, label, command, *fault: host(label).link.armed.append(
            Armed(FaultKind(" ".join(fault)), command, int(number) - 1)
        ),
        "add": lambda *names: world.add(names),
        "remove": lambda *names: world.remove(names),
        "drain": lambda label: world.set_drained(label, drained=True),
    }


def begin(first: str, tell: Callable[[str], None]) -> Words:
    """A world of so many hosts and resources."""
    hosts, resources = (int(word) for word in first.split() if word.isdigit())

    def on_fact(label: str, fact: Fact, _: float, __: float) -> None:
        if fact.kind not in _LEFT_OUT:
            about = f" {fact.resource}" if fact.resource else ""
            tell(f"{label}: {fact.kind.value.replace('_', ' ')}{about}")

    plans = tuple(HostPlan(f"host-{index}") for index in range(hosts))
    return _words(World(Scenario(plans, resources), Random(1), Trace(None), on_fact))


@pytest.mark.parametrize("path", files_in(FOLDER), ids=lambda path: path.stem)
@pytest.mark.lesson(1, 3, 5, 6, 8, 10)
def test_the_story_is_as_written(path: Path) -> None:
    script, story = read(path)
    assert play(script, begin) == story


def test_there_are_stories() -> None:
    assert len(files_in(FOLDER)) >= 5


if __name__ == "__main__":
    write_anew(FOLDER, begin)
