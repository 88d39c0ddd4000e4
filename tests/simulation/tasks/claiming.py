"""Processes that claim tasks, with the product's policy for errors of their loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from rebalanser.core.tasks.claims import (
    Claimed,
)
from rebalanser.core.tasks.failures import LoopFailures
from rebalanser.core.tasks.model import ClaimTerm, Stored
from simulation.kernel.reports import Violation
from simulation.tasks.network import Resume, Unanswered, Wish, once
from simulation.tasks.process import Host, Process, Script, Surroundings
from simulation.tasks.scenario import SLOT_LEASE_S, TTL_S
from simulation.tasks.writing import Writer

ROUNDED_S: Final = 1e-6


class Signal:
    """An event that a process's scripts wait for."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_set = False
        self._resumes: list[Resume] = []

    def set(self) -> None:
        """Set it, and resume the waiting scripts."""
        self._is_set = True
        resumes, self._resumes = self._resumes, []
        for resume in resumes:
            self._process.world.after(0.0, partial(resume, None))

    def wait(self, seconds: float | None) -> Wish:
        """Resume once it is set or the time has passed on the process's clock; then clear it."""

        def wish(resume: Resume) -> None:
            def go_on(_: Any) -> None:
                self._is_set = False
                resume(None)

            finish = once(go_on)
            if self._is_set:
                self._process.world.after(0.0, lambda: finish(None))
                return
            self._resumes.append(finish)
            if seconds is not None:
                self._process.world.after(max(0.0, seconds) / self._process.host.rate, lambda: finish(None))

        return wish


class Retiring(Protocol):
    """A source of claims that can be left."""

    def retire(self) -> Script:
        """Withdraw what it offers."""
        ...


class ClaimingProcess(Process):
    """A process that claims tasks, and has loops with the product's policy for errors."""

    def __init__(self, world: Surroundings, name: str, host: Host) -> None:
        super().__init__(world, name, host)
        self.writer = Writer(self)
        self.failures = LoopFailures()
        self.bug_until = 0.0
        self.drops_until = 0.0
        self.stopping = False
        self._holders = 0
        self._woken = Signal(self)

    def term(self) -> ClaimTerm:
        """Return the term of a claim made now."""
        return ClaimTerm(TTL_S, self.host.clock, self.now + TTL_S)

    def new_holder(self) -> str:
        """Return a name that no claim has."""
        self._holders += 1
        return f"{self.name}-{self._holders}"

    def wake(self) -> None:
        """Look for claims."""
        self._woken.set()

    def drop_changes(self, until: float) -> None:
        """Break the watch; once it is back it reports that changes were lost."""
        self.drops_until = until

    def asked(self, serve: Callable[[], Any]) -> Script:
        """Call the engine; raise as its client does."""
        return (yield from self.answered(self.world.network.request(self, serve)))

    def answered(self, wish: Wish) -> Script:
        """Wait for an answer of the engine; raise as its client does."""
        if self.world.now < self.bug_until:
            self.world.oracle.counts["bugs"] += 1
            raise KeyError("a bug")
        answer = yield wish
        if isinstance(answer, Unanswered):
            raise answer.error
        return answer

    def take(self, claimed: Claimed) -> None:
        """Take in a claim."""
        self.world.oracle.granted(claimed.stored.head.id, claimed.held)
        judge_time(self, claimed.stored, claimed.sent_at)

    def payloads(self, claimed: Sequence[Claimed]) -> Script:
        """Return the payloads of claimed tasks: those that came with the claims, and the others, read now."""
        known = {each.stored.head.id: each.payload for each in claimed if each.payload is not None}
        ids, stored = [each.stored.head.id for each in claimed], self.world.engine.payloads
        missing = [each for each in ids if each not in known]
        if not missing:
            return known
        read = yield from self.asked(lambda: {each: stored[each] for each in missing if each in stored})
        return {**known, **read}

    def leave(self, source: Retiring, offers_end: Signal) -> Script:
        """Withdraw the offered room once the loop that offers it has ended, and end the process."""
        yield offers_end.wait(SLOT_LEASE_S)
        try:
            yield from source.retire()
        except Exception:  # slots and claims end by themselves
            self.world.oracle.counts["slots left to their lease"] += 1
        yield self.sleep(1.0)
        self.world.replace(self)

    def loop(self, name: str, step: Callable[[], Script], end: Signal | None = None) -> Script:
        """Repeat steps, whatever they raise, until one returns that it was the last."""
        while True:
            try:
                goes_on = yield from step()
            except Violation:
                raise
            except Exception as error:
                self.world.oracle.counts[f"errors of the loop {name}"] += 1
                failed = self.failures.failed(name, error, self.now, self.wall)
                if failed.gives_up:
                    self.world.oracle.counts["processes that gave up"] += 1
                    self.world.replace(self)
                yield self.sleep(failed.pause_s)
            else:
                self.failures.ended(name)
                if not goes_on:
                    break
        if end is not None:
            end.set()


def judge_time(process: Process, stored: Stored, counted_from: float) -> None:
    """Judge that a claim ends for its holder no later than by the clock of its host in the store (SK-8)."""
    claim = stored.state.claim
    is_own_clock = claim is not None and claim.term.clock == process.host.clock
    if claim is not None and is_own_clock and counted_from + TTL_S > claim.term.ends_at_s + ROUNDED_S:
        raise Violation("SK-8", f"{process.name} takes a claim to last for longer than is stored")
