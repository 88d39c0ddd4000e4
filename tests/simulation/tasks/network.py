"""Requests and their faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final, Protocol, TypeAlias

from rebalanser.core.tasks.model import TaskId
from rebalanser.core.tasks.rules import ClaimKey
from rebalanser.core.tasks.store import Write
from rebalanser.errors import (
    OutcomeUnknown,
    QuotaExceeded,
    RebalanserError,
    RegistryUnavailable,
    RequestTooLarge,
    UnusableStore,
)
from simulation.kernel.trace import Trace, text
from simulation.tasks.engine import SimulatedEngine
from simulation.tasks.scenario import OF_REQUESTS, Fault, Scenario

Resume: TypeAlias = Callable[[Any], None]
Wish: TypeAlias = Callable[[Resume], None]
"""A wait of a process: a function that is given the callback that resumes the process."""
TIMEOUT_S: Final = 0.4
_LATEST_S: Final = 2.5


class Unanswered:
    """Outcomes in place of an answer."""

    def __init__(self, name: str, error: RebalanserError) -> None:
        self.name = name
        self.error = error
        """The error that the engine's client raises."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply that arrives, in addition to the usual time."""

    slow_s: float = 0.0


def once(resume: Resume) -> Resume:
    """Resume with the first outcome; later ones are dropped."""
    is_answered = False

    def finish(answer: Any) -> None:
        nonlocal is_answered
        if not is_answered:
            is_answered = True
            resume(answer)

    return finish


LOST: Final = Unanswered("nothing: it took effect, or will, or never", OutcomeUnknown("no answer"))
AWAY: Final = Unanswered("that the engine is away: no effect", RegistryUnavailable("away"))
TOO_LARGE: Final = Unanswered("that a write is too large: no effect", RequestTooLarge("too large"))
REFUSALS: Final = {
    Fault.FULL: Unanswered("that the disk is full: no effect", QuotaExceeded("full")),
    Fault.READ_ONLY: Unanswered("that the store is read-only: no effect", UnusableStore("read-only")),
    Fault.LOCKED: Unanswered("that the store is locked: no effect", RegistryUnavailable("locked")),
}
"""The engine's answer to writes while it takes none."""


class Sender(Protocol):
    """A process that sends requests."""

    name: str

    @property
    def is_cut(self) -> bool:
        """True if it can't reach the engine."""
        ...


class Ends(Protocol):
    """The world at both ends of the network: time, chance and the engine."""

    scenario: Scenario
    random: Random
    trace: Trace
    engine: SimulatedEngine
    hits: Counter[Fault]

    @property
    def now(self) -> float:
        """True time, in seconds."""
        ...

    def say(self, where: str, sentence: str) -> None:
        """Write a line of the trace."""

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        """Call a function later."""

    def delay(self) -> float:
        """Return the delay of a message, in seconds."""
        ...


class Network:
    """The network between processes, and to the engine."""

    def __init__(self, world: Ends) -> None:
        self.world = world
        self.fault_ratio = world.scenario.request_fault_ratio
        self.engine_away_until = 0.0
        self.refuses_until = 0.0
        self.refusal = AWAY
        self._kinds = [fault for fault in OF_REQUESTS if fault in world.scenario.faults]

    def write(self, process: Sender, write: Write) -> Wish:
        """Send a write to the engine; resume with its answer, or an ``Unanswered``."""

        def serve() -> Any:
            answers = self._applied(process, [write], [None])
            return answers if isinstance(answers, Unanswered) else answers[0]

        return self.request(process, serve)

    def apply(
        self, process: Sender, writes: Sequence[Write], authors: Sequence[ClaimKey | None] | None = None
    ) -> Wish:
        """Send writes to the engine, in order; resume with their answers, or an ``Unanswered``.

        ``authors`` are the claims that request them, for the oracle only. Each write is a
        transaction of its own: an engine that restarts meanwhile has applied the first of them.
        """
        return self.request(process, lambda: self._applied(process, writes, authors or [None] * len(writes)))

    def _applied(
        self, process: Sender, writes: Sequence[Write], authors: Sequence[ClaimKey | None]
    ) -> list[Any] | Unanswered:
        world = self.world
        if world.now < self.refuses_until:
            return self.refusal
        if any(world.engine.is_too_large(write) for write in writes):
            return TOO_LARGE
        answers: list[Any] = []
        for write, author in zip(writes, authors, strict=True):
            if self._restarts():
                world.say("engine", f"restarts after {len(answers)} writes of {process.name}")
                return LOST
            answers.append(world.engine.apply(write, author))
            if world.trace:
                world.say("engine", f"{text(write)} of {process.name}: {text(answers[-1])}")
        return answers

    def claim(self, process: Sender, serve: Callable[[Callable[[Callable[[], Any]], Any]], Any]) -> Wish:
        """Claim from the engine's index; ``serve`` gets a function that writes all claims or none."""

        def write(carry_out: Callable[[], Any]) -> Any:
            if self.world.now < self.refuses_until:
                return self.refusal
            if self._restarts():
                if self.world.random.random() < 0.5:
                    carry_out()
                return LOST
            return carry_out()

        return self.request(process, lambda: serve(write))

    def refuse(self, fault: Fault, until: float) -> None:
        """Refuse writes until then, for this reason."""
        self.refusal, self.refuses_until = REFUSALS[fault], until

    def read(self, process: Sender, ids: list[TaskId]) -> Wish:
        """Read tasks; resume with a mapping, LOST or AWAY."""
        return self.request(process, lambda: self.world.engine.read(ids))

    def request(self, process: Sender, serve: Callable[[], Any]) -> Wish:
        """Run ``serve`` at the engine."""

        def guarded() -> Any:
            return AWAY if self.world.now < self.engine_away_until else serve()

        return self._exchange(guarded, lambda: process.is_cut)

    def _exchange(self, serve: Callable[[], Any], is_cut: Callable[[], bool]) -> Wish:
        world = self.world

        def wish(resume: Resume) -> None:
            finish = once(resume)
            before: list[Any] = []

            def arrive(reply: Reply | None) -> None:
                # The second of two copies gets the answer of the first: a refused write has no effect.
                if not before or not isinstance(before[0], Unanswered):
                    answer = serve()
                    if before and isinstance(answer, Unanswered):
                        answer = LOST
                    before.append(answer)
                answer = before[-1]
                if reply is not None and not is_cut():
                    world.after(world.delay() + reply.slow_s, lambda: finish(answer))

            world.after(TIMEOUT_S, lambda: finish(LOST))
            if not is_cut():
                for arrives_after_s, reply in self._arrivals():
                    world.after(arrives_after_s, partial(arrive, reply))

        return wish

    def _arrivals(self) -> list[tuple[float, Reply | None]]:
        """Return when a request arrives, if it does, and the fate of the reply."""
        random = self.world.random
        soon_s, late_s = self.world.delay(), random.uniform(TIMEOUT_S, _LATEST_S)
        prompt = Reply()
        match self._strikes():
            case Fault.REQUEST_LOST:
                return []
            case Fault.REPLY_LOST:
                return [(soon_s, None)]
            case Fault.REPLY_SLOW:
                return [(soon_s, Reply(slow_s=TIMEOUT_S * 0.7))]
            case Fault.REQUEST_LATE:
                return [(late_s, None)]
            case Fault.REQUEST_DOUBLED if random.random() < 0.5:
                return [(soon_s, prompt), (late_s, None)]
            case Fault.REQUEST_DOUBLED:
                return [(soon_s, None), (soon_s + self.world.delay(), prompt)]
        return [(soon_s, prompt)]

    def _restarts(self) -> bool:
        is_struck = Fault.ENGINE_DOWN in self.world.scenario.faults and self.fault_ratio > 0
        if is_struck and self.world.random.random() < self.fault_ratio:
            self.world.hits[Fault.ENGINE_DOWN] += 1
            return True
        return False

    def _strikes(self) -> Fault | None:
        if self.fault_ratio and self.world.random.random() < self.fault_ratio:
            fault = self.world.random.choice(self._kinds)
            self.world.hits[fault] += 1
            return fault
        return None
