"""A lane: a thread that carries out commands, or computes plans, one at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from rebalanser.core.group import Answered, Command, MakePlan, PlanMade
from rebalanser.registry import Coordinator


class CommandThread:
    """Carries out the commands of one lane, at most one at a time, and answers each.

    ``failed`` gets an error that no outcome can express, that is, a fault of the library itself.
    """

    def __init__(
        self,
        name: str,
        coordinator: Coordinator,
        plan: Callable[[MakePlan], PlanMade],
        answer: Callable[[Answered | PlanMade], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._coordinator = coordinator
        self._plan = plan
        self._answer = answer
        self._failed = failed
        self._waiting: queue.Queue[Command | MakePlan | None] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def perform(self, command: Command) -> None:
        """Carry out a command as soon as the previous one has been answered."""
        self._waiting.put_nowait(command)

    def make_plan(self, asked: MakePlan) -> None:
        """Compute a plan as soon as the previous command has been answered."""
        self._waiting.put_nowait(asked)

    def close(self, timeout_s: float) -> None:
        """Stop after the running command; wait at most ``timeout_s`` seconds for that."""
        self._waiting.put_nowait(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (asked := self._waiting.get()) is not None:
            try:
                answer = self._answer_to(asked)
            except BaseException as error:
                self._failed(error)
                return
            self._answer(answer)

    def _answer_to(self, asked: Command | MakePlan) -> Answered | PlanMade:
        if isinstance(asked, MakePlan):
            return self._plan(asked)
        return Answered(asked, self._coordinator.perform(asked))
