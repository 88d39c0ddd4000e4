"""Golden stories of NELI: what is done to a group, and what must come of it, in files a person can read.

``python tests/simulation/test_neli_scenarios.py`` writes the stories anew, to be read before they are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from rebalanser.core.neli.messages import Fact, FactKind
from rebalanser.core.neli.settings import GroupProtocol, Mode
from simulation.kernel.stories import Words, files_in, play, read, write_anew
from simulation.kernel.trace import Trace
from simulation.neli import Fault, Process, Scenario, World, settings_of

FOLDER = Path(__file__).with_name("neli_scenarios")
_LEFT_OUT = {FactKind.COMMIT_FAILED}


class Story(World):
    """A quiet world in which only what a script says befalls anybody, and that tells what happens."""

    def __init__(self, mode: str, protocol: str, tell: Callable[[str], None] = lambda _: None) -> None:
        settings = settings_of(Mode(mode), GroupProtocol(protocol))
        scenario = Scenario(2, 1, 1, settings, settings, loss_ratio=0.0)
        super().__init__(scenario, Random(1), Trace(None))
        self.tell = tell
        self.led_at: dict[str, float] = {}

    def report(self, process: Process, fact: Fact) -> None:
        super().report(process, fact)
        if fact.kind not in _LEFT_OUT:
            reason = f": {fact.detail['reason']}" if fact.kind is FactKind.FENCED else ""
            self.tell(f"{process.name} {fact.kind.replace('_', ' ')}{reason}")
        if fact.kind is FactKind.INDUCED:
            self.led_at[process.name] = self.now

    def named(self, name: str) -> Process:
        return next(process for process in self.processes if process.name == name)

    def wait(self, seconds: float) -> None:
        self.scheduler.run_until(self.now + seconds)

    def strike(self, fault: Fault, name: str, for_s: float = 0.0) -> None:
        self.befall(fault, self.named(name), for_s)


def _words(world: Story) -> Words:
    return {
        "start": world.start,
        "wait": lambda seconds: world.wait(float(seconds)),
        "stop": lambda name: world.strike(Fault.STOP, name),
        "kill": lambda name: world.strike(Fault.CRASH, name),
        "pause": lambda name, seconds: world.strike(Fault.PAUSE_LONG, name, float(seconds)),
        "cut-coordinator": lambda name, seconds: world.strike(Fault.CUT_COORDINATOR, name, float(seconds)),
        "cut-log": lambda name, seconds: world.strike(Fault.CUT_LOG, name, float(seconds)),
        "add-partition": lambda: world.befall(Fault.ADD_PARTITIONS, None, 0.0),
    }


def begin(first: str, tell: Callable[[str], None]) -> Words:
    """A world of one mode and group protocol."""
    return _words(Story(*first.split(), tell=tell))


@pytest.mark.parametrize("path", files_in(FOLDER), ids=lambda path: path.stem)
@pytest.mark.rule("NE-4", "NE-5", "NE-8", "NE-9", "NE-10", "NE-16")
def test_the_story_is_as_it_was(path: Path) -> None:
    script, story = read(path)
    assert play(script, begin) == story


@pytest.mark.rule("NE-9")
@pytest.mark.parametrize("protocol", GroupProtocol)
def test_an_orderly_hand_over_does_not_wait(protocol: GroupProtocol) -> None:
    world = Story("fast", protocol)
    world.start()
    world.wait(2.0)
    world.start()
    world.wait(2.0)
    asked_at = world.now
    world.strike(Fault.STOP, "p1")
    world.wait(2.0)
    handler_s, poll_s = 0.15, world.scenario.poll_s
    rounds_s = 2 * world.scenario.settings.alive_interval_s + 5 * poll_s
    assert world.led_at["p2"] - asked_at < handler_s + rounds_s


@pytest.mark.rule("NE-8", "NE-9")
@pytest.mark.parametrize("protocol", GroupProtocol)
@pytest.mark.parametrize("mode", [Mode.FAST, Mode.EXCLUSIVE])
def test_fail_over_takes_a_session_a_rebalance_and_a_deadline(mode: Mode, protocol: GroupProtocol) -> None:
    """The worst transition of exclusive stays below 2T more than the rebalance itself."""
    world = Story(mode, protocol)
    world.start()
    world.wait(2.0)
    world.start()
    world.wait(2.0)
    killed_at = world.now
    world.strike(Fault.CRASH, "p1")
    world.wait(4.0)
    settings = world.scenario.settings
    rebalance_s = 3 * settings.alive_interval_s + 5 * world.scenario.poll_s
    took_s = world.led_at["p2"] - killed_at
    assert settings.wait_s / (1 + settings.clock_drift_ratio) < took_s
    assert (
        took_s < settings.session_timeout_s + settings.wait_s / (1 - settings.clock_drift_ratio) + rebalance_s
    )


if __name__ == "__main__":
    write_anew(FOLDER, begin)
