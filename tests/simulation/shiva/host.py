"""A machine: its clock and its link to the broker outlive the processes that run on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from simulation.kernel.clock import LocalClock, Spans
from simulation.shiva.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebalanser.core.shiva.types import ApplicationId
    from simulation.shiva.scenario import HostPlan


class Living(Protocol):
    """A process of a machine."""

    alive: bool


LeaderT = TypeVar("LeaderT", bound=Living)
WorkerT = TypeVar("WorkerT", bound=Living)
ApplicationT = TypeVar("ApplicationT")


class Surroundings(Protocol):
    """The world of a machine."""

    def hit(self, kind: Fault, sentence: str) -> None:
        """Count a fault that took effect."""


class Machine(Generic[LeaderT, WorkerT, ApplicationT]):
    """A machine with a leader, a worker or both; both are one daemon, and die and pause together."""

    def __init__(self, world: Surroundings, plan: HostPlan, start: float) -> None:
        self.world = world
        self.plan = plan
        self.clock = LocalClock(0.0, start)
        self.leader: LeaderT | None = None
        self.worker: WorkerT | None = None
        self.paused = False
        self.cut = False
        self.lag_s: dict[str, float] = {}
        self.armed: list[Fault] = []
        """Faults that the next requests, stored files and processes meet."""
        self.files: set[tuple[ApplicationId, str]] = set()
        """The unpacked archives on its disk, by application and sha256."""
        self.incarnations = 0
        self.processes: list[ApplicationT] = []
        """The application processes that exist."""
        self.off_clock = Spans()
        """When its clock ran further off true time than the bound allows."""
        self.disturbed = Spans()
        """When it was paused or cut off."""
        self.unknown = Spans()
        """When its worker was not known any more."""
        self.waits_for_lock = False
        self.stopping = False
        """Whether what runs on it was asked to stop."""

    @property
    def worker_id(self) -> str | None:
        """The id of its worker."""
        return self.plan.worker

    @property
    def lineage(self) -> str:
        """The name of its data folder."""
        return f"folder-{self.plan.name}"

    @property
    def roles(self) -> Iterator[LeaderT | WorkerT]:
        """The processes that live."""
        for process in (self.leader, self.worker):
            if process is not None and process.alive:
                yield process

    @property
    def up(self) -> bool:
        """Whether it runs, or is about to."""
        return self.waits_for_lock or any(True for _ in self.roles)

    def strikes(self, kind: Fault, *, told: bool = True) -> bool:
        """Whether this fault was armed; it strikes once, and is told of here unless somebody else does."""
        if kind not in self.armed:
            return False
        self.armed.remove(kind)
        if told:
            self.world.hit(kind, f"{self.plan.name}: {kind}")
        return True

    def fault_of_request(self) -> Fault | None:
        """What befalls the next request."""
        for kind in (Fault.REQUEST_LOST, Fault.REQUEST_LATE, Fault.REPLY_LOST):
            if self.armed and self.strikes(kind):
                return kind
        return None
