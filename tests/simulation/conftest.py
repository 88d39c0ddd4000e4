"""A quiet world for scripts, and what the tests of all simulators do alike."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from rebalanser.core.group import Fact, FactKind
from simulation.group import Host, HostPlan, Scenario, Trace, World, settle, stay


@dataclass
class Script:
    """A world with its facts, and the words that scripts are written in."""

    world: World
    facts: list[tuple[float, str, Fact]] = field(default_factory=list)

    def __getitem__(self, index: int) -> Host:
        return self.world.hosts[index]

    def settle(self) -> None:
        """All is well soon, and stays so."""
        settle(self.world)
        stay(self.world)

    def start(self, *indices: int) -> None:
        """Start hosts, all of them if none is named, and let them settle."""
        for index in indices or range(len(self.world.hosts)):
            self.world.start(self[index])
        self.settle()

    def owned(self, index: int) -> set[str]:
        """What really is accessed on a host."""
        label = self[index].plan.label
        return {
            resource
            for resource, accesses in self.world.oracle.accesses.items()
            if any(access.process.label == label for access in accesses.values())
        }

    def times(self, kind: FactKind, index: int, since: float = 0.0) -> list[float]:
        """When something happened on a host."""
        label = self[index].plan.label
        return [at for at, where, fact in self.facts if where == label and fact.kind is kind and at >= since]

    def run_until(self, condition: Callable[[], bool], within_s: float = 10.0) -> None:
        """Let time pass in small steps until the condition holds."""
        ends = self.world.now + within_s
        while not condition():
            assert self.world.now < ends, "it did not happen"
            self.world.run_for(0.001)


@pytest.fixture
def script() -> Callable[..., Script]:
    """``script(hosts=2, resources=4, **scenario)``: none is started yet."""

    def make(
        hosts: int = 2, resources: int = 4, plans: tuple[HostPlan, ...] | None = None, **scenario: object
    ) -> Script:
        chosen = plans or tuple(HostPlan(f"host-{index}") for index in range(hosts))
        made: list[Script] = []

        def on_fact(host: str, fact: Fact, _: float, __: float) -> None:
            made[0].facts.append((made[0].world.now, host, fact))

        world = World(
            Scenario(chosen, resources, **scenario),  # type: ignore[arg-type]
            Random(1),
            Trace(None),
            on_fact,
        )
        made.append(Script(world))
        return made[0]

    return make


def _run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def digest() -> Callable[[str, str], str]:
    """``digest(simulator, hash_seed)``: that of the traces of its first seeds, in a process of its own."""

    def taken(simulator: str, hash_seed: str) -> str:
        program = f"""
import hashlib
from simulation.{simulator} import PROFILES, run_seed

digest = hashlib.sha256()
for seed in range(2):
    for profile in PROFILES.values():
        run_seed(seed, profile, lambda line: digest.update(line.encode()))
print(digest.hexdigest())
"""
        ran = _run_python("-c", program, PYTHONHASHSEED=hash_seed)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return taken


@pytest.fixture
def command_line() -> Callable[..., tuple[int, str]]:
    """``command_line(simulator, *arguments)``: the status of its command, and all that it has printed."""

    def run(simulator: str, *arguments: str) -> tuple[int, str]:
        ran = _run_python("-m", "simulation", simulator, *arguments, NO_COLOR="1", TERM="dumb", COLUMNS="200")
        return ran.returncode, ran.stdout + ran.stderr

    return run
