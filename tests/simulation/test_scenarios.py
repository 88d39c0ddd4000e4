"""Golden scenarios: what is done to a group, and the story that must come of it, in files a person can read.

Above the line of dashes stands what is done, one thing a line; below it what must happen, in this order.
``python tests/simulation/test_scenarios.py`` writes the stories anew, to be read before they are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from rebalanser.protocol import Fact, FactKind
from rebalanser.testing.simulation import (
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

FOLDER = Path(__file__).with_name("scenarios")
LINE = "-" * 40
_LEFT_OUT = {FactKind.GROUP_READ, FactKind.START_RETURNED, FactKind.COMMAND_FAILED, FactKind.JOINING}


def _settle(world: World) -> None:
    settle(world)
    stay(world)


def _words(world: World) -> dict[str, Callable[..., object]]:
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


def play(script: str) -> list[str]:
    """Do what a script says; what came of it, without times."""
    first, *lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    hosts, resources = (int(word) for word in first.split() if word.isdigit())
    story: list[str] = []

    def on_fact(label: str, fact: Fact, _: float, __: float) -> None:
        if fact.kind not in _LEFT_OUT:
            about = f" {fact.resource}" if fact.resource else ""
            story.append(f"{label}: {fact.kind.value.replace('_', ' ')}{about}")

    plans = tuple(HostPlan(f"host-{index}") for index in range(hosts))
    world = World(Scenario(plans, resources), Random(1), Trace(None), on_fact)
    words = _words(world)
    for line in lines:
        word, *arguments = line.split()
        story.append(f"> {line}")
        words[word](*arguments)
    return story


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
@pytest.mark.lesson(1, 3, 5, 6, 8, 10)
def test_the_story_is_as_written(path: Path) -> None:
    script, _, story = path.read_text().partition(f"{LINE}\n")
    assert play(script) == story.splitlines()


def test_there_are_stories() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 5


if __name__ == "__main__":
    for file in sorted(FOLDER.glob("*.txt")):
        wanted, _, _ = file.read_text().partition(f"{LINE}\n")
        file.write_text(wanted + f"{LINE}\n" + "\n".join(play(wanted)) + "\n")
