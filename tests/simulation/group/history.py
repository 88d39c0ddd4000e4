"""The history of a simulated run, in the format of the product and written by its code.

What a process tells is written down as a Group does it: by a ``Journal`` of its own,
with the host's own clock. A process that dies writes nothing more. Beside the history stands what the oracle
knows to be true, so that an audit of the history can be compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rebalanser.history import Author, Journal, MemorySink, Protocol, Record, event_of
from simulation.group.oracle import Overlap
from simulation.group.runner import Report, run_seed
from simulation.group.scenario import ANYTHING, Profile
from simulation.group.world import World

if TYPE_CHECKING:
    from rebalanser.core.group.messages import Fact
    from simulation.group.process import Process

_NODES_IN_DETAIL = ("leader", "holder")


@dataclass(frozen=True)
class SimulatedHistory:
    """What the processes of one seed wrote, in the order in which it happened, and what really was."""

    records: list[Record]
    report: Report
    """What the run did and which rule it broke: ``violations``."""
    overlaps: list[Overlap]
    """Every time that two processes accessed one resource, also where the stated bound allows it."""


class Recorder:
    """Writes the history of one world, as that of ``group``: no other world's history has its names.

    Processes, nodes and hosts are called ``GROUP/NAME``, as the history's names are never used twice. Each
    host has a boot of its own, since each has a clock of its own. ``fenced`` is what the application is taken
    to say of the receivers of its writes.
    """

    def __init__(self, group: str, *, fenced: bool = False) -> None:
        self._group = group
        self._fenced = fenced
        self._sink = MemorySink()
        self._journals: dict[str, Journal] = {}
        self._world: World | None = None

    @property
    def records(self) -> list[Record]:
        """What was written so far, in the order in which it happened."""
        return self._sink.records

    @property
    def overlaps(self) -> list[Overlap]:
        """What the oracle of the world saw, with the names that the history has."""
        return [
            replace(overlap, older=self.name(overlap.older), newer=self.name(overlap.newer))
            for overlap in (self._world.oracle.overlaps if self._world else ())
        ]

    def name(self, inner: str) -> str:
        """What the history calls a process, a node or a host of the world."""
        return f"{self._group}/{inner}"

    def watch(self, world: World) -> World:
        """Write down what happens in this world."""
        self._world = world
        world.records = self._record
        return world

    def _record(self, process: Process, fact: Fact) -> None:
        event = event_of(fact, fenced=self._fenced)
        named = {key: self.name(str(event.detail[key])) for key in _NODES_IN_DETAIL if key in event.detail}
        self._journal(process).write(
            replace(event, node=self.name(event.node), detail={**event.detail, **named})
        )

    def _journal(self, process: Process) -> Journal:
        journal = self._journals.get(process.stem)
        if journal is None:
            host = self.name(process.label)
            journal = self._journals[process.stem] = Journal(
                Author(Protocol.GROUP, self._group, self.name(process.stem), process.label, host, host),
                self._sink,
                wall=process.world.scheduler.clock.wall,
                monotonic=lambda: process.now,
            )
        return journal


def history_of(
    seed: int,
    profile: Profile = ANYTHING,
    *,
    group: str,
    fenced: bool = False,
    make_world: Callable[..., World] = World,
) -> SimulatedHistory:
    """Run one seed as ``run_seed`` does, and write its history down as that of ``group``.

    Histories of many seeds make one history, as long as each has a group of its own. A run that breaks a
    rule ends there, and its history with it.
    """
    recorder = Recorder(group, fenced=fenced)
    report = run_seed(seed, profile, make_world=lambda *arguments: recorder.watch(make_world(*arguments)))
    return SimulatedHistory(recorder.records, report, recorder.overlaps)
