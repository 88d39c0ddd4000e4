"""What lies between a host and the registry: latency, loss, and requests that arrive when nobody waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from rebalanser.errors import LeaseNotFound, OutcomeUnknown, RebalanserError, RegistryUnavailable
from rebalanser.registry.contract import Done, KeepAlive, Reply, Request
from simulation.group.faults import RENEWAL_FAULTS, FaultKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from simulation.kernel.scheduler import Scheduler

Origin: TypeAlias = str
"""The incarnation that sent a request, or "operator"."""
Deliver: TypeAlias = "Callable[[Request, Origin], Reply | RebalanserError]"
Answered: TypeAlias = "Callable[[float, Reply | RebalanserError], None]"
"""Called with when (true seconds) the answer reaches the host, and the answer."""

LATENCY_S = (0.0004, 0.004)
SLOW_S = (0.02, 0.7)
LEADING = frozenset({"ReadGroup", "Publish"})
"""What a leader can't lead without."""
DEPOSED_TERM = -1
"""The term of a leader of the registry that was deposed; the memory store answers in term 0."""


@dataclass(slots=True)
class Armed:
    """A fault that waits for a request: the next one, or the next of a kind of command, after some others."""

    kind: FaultKind
    command: str | None = None
    skip: int = 0
    then: tuple[Armed, ...] = ()
    """What waits from then on."""


@dataclass(slots=True)
class Link:
    """One host's way to the registry."""

    cut: FaultKind | None = None
    refuses: bool = False
    """While it is cut: whether requests are refused at once, or vanish."""
    armed: list[Armed] = field(default_factory=list)
    storm: dict[FaultKind, float] = field(default_factory=dict)
    """How probable each fault is for every request, while a storm lasts."""
    leading_refused: bool = False
    watch_lag_s: float = 0.0
    watch_silent: bool = False

    @property
    def troubled(self) -> bool:
        """Whether a fault may strike a request."""
        return bool(self.cut or self.armed or self.storm or self.leading_refused)

    def calm(self, kind: FaultKind) -> None:
        """End a storm."""
        self.storm.pop(kind, None)

    def clear(self) -> None:
        """End every fault."""
        self.cut = None
        self.armed.clear()
        self.storm.clear()
        self.leading_refused = False
        self.watch_lag_s = 0.0
        self.watch_silent = False

    def fate(self, command: str, random: Random) -> FaultKind | None:
        """What becomes of a request."""
        if self.cut is not None:
            return FaultKind.REQUEST_REFUSED if self.refuses else FaultKind.REQUEST_LOST
        if self.leading_refused and command in LEADING:
            return FaultKind.LEADING_REFUSED
        for armed in self.armed:
            if armed.command is None or armed.command == command:
                if armed.skip == 0:
                    self.armed.remove(armed)
                    self.armed += armed.then
                    return armed.kind
                armed.skip -= 1
        for kind, probability in self.storm.items():
            if random.random() < probability:
                return kind
        return None


class Network:
    """Carries requests to the registry and answers back, each with a latency of its own."""

    def __init__(
        self,
        scheduler: Scheduler,
        random: Random,
        deliver: Deliver,
        hit: Callable[[FaultKind, str], None],
        late_s: tuple[float, float],
    ) -> None:
        self._scheduler = scheduler
        self._random = random
        self._deliver = deliver
        self._hit = hit
        self._late_s = late_s
        self.late_until = 0.0
        """When (true seconds) the last of what is under way, and nobody may be waiting for, arrives."""

    def latency(self) -> float:
        """How long (seconds) something takes from here to there."""
        low, high = LATENCY_S
        return low + self._random.random() * (high - low)

    def send(
        self, link: Link, host: str, command: str, origin: Origin, request: Request, answered: Answered
    ) -> bool:
        """Send a request; ``answered`` is called at most once. Whether that is certain to be soon."""
        fate = link.fate(command, self._random) if link.troubled else None
        if fate in RENEWAL_FAULTS and not isinstance(request, KeepAlive):
            fate = None
        arrives = self._scheduler.now + self.latency()
        if fate is None:
            self._arrive(arrives, request, origin, answered)
            return True
        if link.cut is None:
            self._hit(fate, f"{host}: {fate} ({command}, {type(request).__name__})")
        match fate:
            case FaultKind.REQUEST_REFUSED | FaultKind.LEADING_REFUSED:
                refused = RegistryUnavailable("connection refused")
                self._scheduler.at(arrives, answered, arrives, refused)
            case FaultKind.RENEWED_IN_VAIN | FaultKind.NOT_RENEWED:
                vain = Done(term=DEPOSED_TERM)
                untrue = LeaseNotFound("there is no such lease")
                reply = vain if fate is FaultKind.RENEWED_IN_VAIN else untrue
                self._scheduler.at(arrives, answered, arrives + self.latency(), reply)
            case FaultKind.REQUEST_LATE | FaultKind.PLAN_OVERTAKEN:
                self._arrive(self._late(), request, origin, None)
            case FaultKind.REPLY_LOST:
                self._arrive(arrives, request, origin, None)
            case FaultKind.REQUEST_DOUBLED:
                self._arrive(arrives, request, origin, None)
                self._arrive(self._late(), request, origin, None)
            case FaultKind.REPLY_SLOW:
                self._arrive(arrives, request, origin, answered, self._random.uniform(*SLOW_S))
            case _:
                pass
        return False

    def _late(self) -> float:
        return self._scheduler.now + self._random.uniform(*self._late_s)

    def _arrive(
        self, at: float, request: Request, origin: Origin, answered: Answered | None, slow_s: float = 0.0
    ) -> None:
        if answered is None:
            self.late_until = max(self.late_until, at)
        self._scheduler.at(at, self._reach, request, origin, answered, slow_s)

    def _reach(self, request: Request, origin: Origin, answered: Answered | None, slow_s: float) -> None:
        reply = self._deliver(request, origin)
        if answered is not None:
            answered(self._scheduler.now + slow_s + self.latency(), reply)


def no_answer() -> OutcomeUnknown:
    """What a sender concludes when its time runs out."""
    return OutcomeUnknown("no answer in time")
