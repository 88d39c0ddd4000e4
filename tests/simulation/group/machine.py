"""A machine of a simulated group: what outlives the processes that run on it."""

from __future__ import annotations

from random import Random
from typing import Any, Generic, Protocol, TypeVar

from rebalanser.core.group.messages import Handler
from simulation.group.faults import FaultKind
from simulation.group.network import Link
from simulation.group.scenario import HostPlan, Scenario
from simulation.kernel.clock import LocalClock


class Occupant(Protocol):
    """A process of a machine."""

    alive: bool
    finished: bool


OccupantT = TypeVar("OccupantT", bound=Occupant)


class Surroundings(Protocol):
    """The world of a machine."""

    scenario: Scenario
    random: Random

    def hit(self, kind: FaultKind, sentence: str) -> None:
        """Count a fault that took effect."""

    def pause(self, host: Machine[Any], seconds: float, kind: FaultKind) -> None:
        """Stop the process of a machine for a while."""


class Machine(Generic[OccupantT]):
    """A machine: its clock and its link outlive the processes that run on it one after another."""

    def __init__(self, world: Surroundings, plan: HostPlan, name: str, start: float) -> None:
        self.world = world
        self.plan = plan
        self.name = name
        """Its label, with a number where an earlier host has the same."""
        self.clock = LocalClock(0.0, start)
        self.link = Link()
        self.process: OccupantT | None = None
        self.generation = 0
        self.handler_faults: list[FaultKind] = []
        self.pause_at_entry_s = 0.0
        self.revoked_in_s: float | None = None
        """Seconds from the start of the next session until an operator ends its lease."""

    @property
    def running(self) -> OccupantT | None:
        """The process, if one lives and has not finished."""
        process = self.process
        return process if process is not None and process.alive and not process.finished else None

    def pauses_at_entry(self) -> bool:
        """Return True if the process is paused after it checked the clock, before it calls the handler."""
        duration_s, self.pause_at_entry_s = self.pause_at_entry_s, 0.0
        if not duration_s:
            return False
        self.world.pause(self, duration_s, FaultKind.PAUSE_AT_ENTRY)
        return True

    def behaviour(self, handler: Handler, has_work: bool) -> tuple[float | None, str | None]:
        """Return the seconds that a handler takes, None if it never returns, and the error that it raises."""
        random, timings = self.world.random, self.world.scenario.timings
        limit_s = timings.stop_timeout_s if handler is Handler.STOP else timings.start_timeout_s
        for fault in self.handler_faults:
            if fault is FaultKind.START_RAISES and handler is Handler.STOP:
                continue
            if fault is FaultKind.STOP_RAISES and handler is Handler.START:
                continue
            if not has_work:
                continue
            self.handler_faults.remove(fault)
            self.world.hit(fault, f"{self.name}: {fault} ({handler})")
            match fault:
                case FaultKind.HANDLER_SLOW:
                    return limit_s * random.uniform(0.3, 0.95), None
                case FaultKind.HANDLER_OVERRUN:
                    return limit_s * random.uniform(1.2, 4.0), None
                case FaultKind.HANDLER_HUNG:
                    return None, None
                case _:
                    return limit_s * random.uniform(0.0, 0.5), "the application raised"
        return random.random() * 0.03, None
