"""Requests, and what can befall them on their way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rebalanser.tasks.asks import Ask
from rebalanser.tasks.engine import Write
from rebalanser.tasks.model import Stored, TaskId
from rebalanser.tasks.rules import Held, Reason, Refused
from rebalanser.testing.simulation.trace import text
from rebalanser.testing.tasks_simulation.process import Process, Resume, Script, Wish
from rebalanser.testing.tasks_simulation.scenario import OF_REQUESTS, Fault

if TYPE_CHECKING:
    from rebalanser.testing.tasks_simulation.world import World

TIMEOUT_S: Final = 0.4
_LATEST_S: Final = 2.5


class Unanswered:
    """What a sender gets in place of an answer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply that arrives, in addition to the usual time."""

    slow_s: float = 0.0


def once(resume: Resume) -> Resume:
    """Resume with what comes first; all that comes later is too late."""
    is_answered = False

    def finish(answer: Any) -> None:
        nonlocal is_answered
        if not is_answered:
            is_answered = True
            resume(answer)

    return finish


LOST: Final = Unanswered("nothing: it took effect, or will, or never")
AWAY: Final = Unanswered("that the engine is away: no effect")


class Network:
    """Between processes and the engine, and from process to process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.fault_ratio = world.scenario.request_fault_ratio
        self.engine_away_until = 0.0
        self._kinds = [fault for fault in OF_REQUESTS if fault in world.scenario.faults]

    def write(self, process: Process, write: Write, author: Held | None = None) -> Wish:
        """Have the engine apply a write; what comes is its answer, LOST or AWAY."""

        def serve() -> Any:
            answer = self.world.engine.apply(write, author)
            if self.world.trace:
                self.world.say("engine", f"{text(write)} of {process.name}: {text(answer)}")
            return answer

        return self.request(process, serve)

    def write_all(self, process: Process, writes: Sequence[Write]) -> Wish:
        """Have the engine apply writes in their order; what comes is their answers, LOST or AWAY.

        Each is a transaction of its own: an engine that restarts meanwhile has applied the first of them.
        """

        def serve() -> Any:
            answers: list[Any] = []
            for write in writes:
                if self._restarts():
                    self.world.say("engine", f"restarts after {len(answers)} writes of {process.name}")
                    return LOST
                answers.append(self.world.engine.apply(write, None))
                if self.world.trace:
                    self.world.say("engine", f"{text(write)} of {process.name}: {text(answers[-1])}")
            return answers

        return self.request(process, serve)

    def read(self, process: Process, ids: list[TaskId]) -> Wish:
        """Read tasks; what comes is a mapping, LOST or AWAY."""
        return self.request(process, lambda: self.world.engine.read(ids))

    def request(self, process: Process, serve: Callable[[], Any]) -> Wish:
        """Have ``serve`` done at the engine."""

        def guarded() -> Any:
            return AWAY if self.world.now < self.engine_away_until else serve()

        return self._exchange(guarded, lambda: process.is_cut)

    def see_through(self, process: Process, ask: Ask[Any], author: Held | None = None) -> Script:
        """Write until it is settled, as the ledger of the product does."""
        while (write := ask.write()) is not None:
            answer = yield self.write(process, write, author)
            if answer is AWAY:
                yield process.sleep(0.1)
                continue
            if answer is LOST:
                yield from self.lost(process, ask)
            else:
                ask.answered(answer)
                if not ask.settled:
                    yield from self._read_back(process, ask)
            if ask.settled:
                return

    def lost(self, process: Process, ask: Ask[Any]) -> Script:
        """Nobody knows what became of a write: read it back."""
        yield from self._read_back(process, ask)

    def given_up(self, process: Process, ask: Ask[Any]) -> Script:
        """What must not be done instead: taking it for a failure."""
        yield process.sleep(0.0)
        ask.future.set_result(Refused(Reason.HELD))

    def _read_back(self, process: Process, ask: Ask[Any]) -> Script:
        while True:
            found: Mapping[TaskId, Stored] | Unanswered = yield self.read(process, [ask.task])
            if not isinstance(found, Unanswered):
                ask.found(found.get(ask.task))
                return
            yield process.sleep(0.1)

    def _exchange(self, serve: Callable[[], Any], is_cut: Callable[[], bool]) -> Wish:
        world = self.world

        def wish(resume: Resume) -> None:
            finish = once(resume)

            def arrive(reply: Reply | None) -> None:
                answer = serve()
                if reply is not None and not is_cut():
                    world.after(world.delay() + reply.slow_s, lambda: finish(answer))

            world.after(TIMEOUT_S, lambda: finish(LOST))
            if not is_cut():
                for arrives_after_s, reply in self._arrivals():
                    world.after(arrives_after_s, partial(arrive, reply))

        return wish

    def _arrivals(self) -> list[tuple[float, Reply | None]]:
        """When a request arrives, if it does, and what becomes of the reply."""
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
