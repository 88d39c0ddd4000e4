"""Checks page by page that a queue's store holds only what the rules allow.

It keeps one page and the dependencies of open tasks in memory. Workers may go on: a task that changed during
its check is checked again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import Final

from rebalanser.core.tasks.ids import is_task_id, partition_of_task
from rebalanser.core.tasks.model import CLOSED_UNDONE, OPEN, AfterFailure, Status, Stored, TaskId, Update
from rebalanser.errors import InternalError
from rebalanser.tasks.engine import Engine

PAGE: Final = 500
LOG_PAGE: Final = 1000
MAX_LOOKS: Final = 20
"""Maximum number of looks at a task that changes all the time."""
MAX_CYCLES: Final = 100
"""Maximum number of cycles that are reported."""


class StoreFault(StrEnum):
    """Fault of a store."""

    INVALID_ID = "invalid_id"
    """The id is invalid (SK-1)."""
    WRONG_PARTITION = "wrong_partition"
    """The task is in another partition than its id gives (SK-2)."""
    CONTRADICTION = "contradiction"
    """The status does not go with the other fields of the state."""
    LOG_GAP = "log_gap"
    """A claim's updates are not numbered 0, 1, 2… (SK-9)."""
    LOG_COUNT = "log_count"
    """The last claim's log has more or fewer updates than its state counts (SK-9)."""
    UNKNOWN_CLAIM = "unknown_claim"
    """The log has an update of a claim that was never made (SK-6)."""
    UNKNOWN_DEPENDENCY = "unknown_dependency"
    """An open task waits for one that does not exist."""
    BLOCKED = "blocked"
    """A task waits for one that is dead or cancelled: until an operator requeues that one, it waits."""
    TOO_EARLY = "too_early"
    """The task was claimed before all its dependencies were complete (SK-5)."""
    CYCLE = "cycle"
    """Open tasks wait for each other."""
    COUNT = "count"
    """The counts of the store are wrong (SK-12)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, the task that has it, empty for the whole queue, and what was seen."""

    fault: StoreFault
    task: TaskId
    message: str


@dataclass(slots=True)
class Check:
    """One look at a whole queue; ``timeout_s`` is for each request.

    ``checked`` counts the tasks. ``counts_compared`` is False if the store changed too fast for its counts to
    be compared with the tasks.
    """

    engine: Engine
    queue: str
    partitions: int
    timeout_s: float
    checked: int = 0
    counts_compared: bool = True
    _waits: dict[TaskId, tuple[TaskId, ...]] = field(default_factory=dict)

    def findings(self) -> Iterator[Finding]:
        """Iterate over the faults as they are found.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """
        before = _without_zeros(self.engine.count(self.queue, self.timeout_s))
        counted: Counter[Status] = Counter()
        for page in self._pages():
            counted.update(each.state.status for each in page)
            self.checked += len(page)
            for stored in page:
                yield from self._of_task(stored)
            yield from self._of_dependencies(page)
        yield from self._of_cycles()
        yield from self._of_counts(before, counted)

    def _pages(self) -> Iterator[tuple[Stored, ...]]:
        after: TaskId | None = None
        while True:
            page = self.engine.page(self.queue, self.timeout_s, after=after, limit=PAGE)
            yield page.items
            after = page.next
            if after is None:
                return

    def _of_task(self, stored: Stored) -> Iterator[Finding]:
        task = stored.head.id
        if not is_task_id(task):
            yield Finding(StoreFault.INVALID_ID, task, "the id has not the format of a task id")
        elif stored.partition != (right := partition_of_task(stored.head, self.partitions)):
            yield Finding(StoreFault.WRONG_PARTITION, task, f"it lies in {stored.partition}, not in {right}")
        for what in contradictions(stored):
            yield Finding(StoreFault.CONTRADICTION, task, what)
        if stored.state.status in OPEN and stored.head.after:
            self._waits[task] = stored.head.after
        yield from self._of_log(stored)

    def _of_log(self, stored: Stored) -> list[Finding]:
        """Find faults in the log of a task that did not change while its log was read."""
        task = stored.head.id
        for _ in range(MAX_LOOKS):
            found = log_faults(stored, self._log(stored))
            if not found:
                return found
            now = self.engine.read(self.queue, [task], self.timeout_s).get(task)
            if now is None:
                return []
            if now.revision == stored.revision:
                return found
            stored = now
        return []

    def _log(self, stored: Stored) -> Iterator[Update]:
        """Read the whole log: in one request if it is short, else claim by claim."""
        task, claim = stored.head.id, stored.state.claim
        first = self.engine.updates(self.queue, task, self.timeout_s, limit=LOG_PAGE)
        if len(first) < LOG_PAGE:
            yield from first
            return
        for number in range(0 if claim is None else claim.number + 1):
            sequence = 0
            while page := self.engine.updates(
                self.queue, task, self.timeout_s, claim=number, first=sequence, limit=LOG_PAGE
            ):
                yield from page
                sequence = page[-1].sequence + 1

    def _of_dependencies(self, page: tuple[Stored, ...]) -> Iterator[Finding]:
        """Check the dependencies of a page's tasks, read later: one may have completed meanwhile."""
        needed = sorted({each for stored in page for each in stored.head.after})
        found: dict[TaskId, Stored] = {}
        for start in range(0, len(needed), PAGE):
            found.update(self.engine.read(self.queue, needed[start : start + PAGE], self.timeout_s))
        for stored in page:
            for each in stored.head.after:
                yield from _of_dependency(stored, each, found.get(each))

    def _of_cycles(self) -> Iterator[Finding]:
        for _ in range(MAX_CYCLES):
            try:
                TopologicalSorter(self._waits).prepare()
            except CycleError as error:
                cycle: list[TaskId] = error.args[1]
                yield Finding(
                    StoreFault.CYCLE, cycle[0], "it waits for itself: " + " for ".join(reversed(cycle))
                )
                for each in cycle:
                    self._waits.pop(each, None)
            else:
                return

    def _of_counts(self, before: Mapping[Status, int], counted: Mapping[Status, int]) -> Iterator[Finding]:
        """Compare the store's counts with the counted tasks, which may change meanwhile.

        Equal counts before and after prove nothing, as they may have changed and changed back. A difference
        is a fault if two counts in a row find it.
        """
        seen: tuple[Mapping[Status, int], Mapping[Status, int]] | None = None
        for _ in range(MAX_LOOKS):
            known = _without_zeros(self.engine.count(self.queue, self.timeout_s))
            if known == counted:
                return
            if known == before and seen == (known, counted):
                break
            seen = known, counted
            before = known
            counted = Counter(each.state.status for page in self._pages() for each in page)
        else:
            self.counts_compared = False
            return
        for status in Status:
            stated, found = known.get(status, 0), counted.get(status, 0)
            if stated != found:
                yield Finding(
                    StoreFault.COUNT, "", f"the store counts {stated} as {status}, there are {found}"
                )


def contradictions(stored: Stored) -> Iterator[str]:
    """Find contradictions in a state, which no sequence of requests can lead to."""
    head, state = stored.head, stored.state
    claim = state.claim
    if state.status in {Status.CLAIMED, Status.COMPLETED} and claim is None:
        yield f"it is {state.status} and has no claim"
    if claim is not None and (claim.number < 0 or claim.updates < 0 or not claim.holder):
        yield f"its claim {claim.number} has {claim.updates} updates and the holder {claim.holder!r}"
    if state.result is not None and state.status is not Status.COMPLETED:
        yield f"it is {state.status} and has a result"
    if state.failures < 0 or (state.status in OPEN and state.failures > head.retries):
        yield f"it is {state.status} after {state.failures} failures and {head.retries} retries"
    if state.status is Status.DEAD and not state.failures and not _fails_with_others(stored):
        yield "it is dead and no try has failed"
    if state.status is Status.CLAIMED and state.due:
        yield "it is claimed and waits for a time"


def _fails_with_others(stored: Stored) -> bool:
    """True if a task that was never claimed may be dead, as a dependency failed."""
    head = stored.head
    return stored.state.claim is None and bool(head.after) and head.after_failure is AfterFailure.FAIL


def log_faults(stored: Stored, log: Iterator[Update]) -> list[Finding]:
    """Find faults of a log that was read after the state."""
    task, claim = stored.head.id, stored.state.claim
    last = -1 if claim is None else claim.number
    written: Counter[int] = Counter()
    found = []
    for update in log:
        if not 0 <= update.claim <= last:
            found.append(
                Finding(StoreFault.UNKNOWN_CLAIM, task, f"claim {update.claim} of {last + 1} has updates")
            )
        elif update.sequence != written[update.claim]:
            message = f"claim {update.claim} goes on with {update.sequence}, not {written[update.claim]}"
            found.append(Finding(StoreFault.LOG_GAP, task, message))
        written[update.claim] = update.sequence + 1
    if claim is not None and written[last] != claim.updates:
        message = f"claim {last} counts {claim.updates} updates, its log has {written[last]}"
        found.append(Finding(StoreFault.LOG_COUNT, task, message))
    return found


def _of_dependency(stored: Stored, needed: TaskId, found: Stored | None) -> Iterator[Finding]:
    """A completed task may have outlived what it depended on, which was collected (SK-14).

    One that does not wait for what is dead or cancelled is judged by nothing that may have been requeued.
    """
    task, status = stored.head.id, stored.state.status
    after_failure = stored.head.after_failure
    if found is None:
        if status in OPEN:
            yield Finding(StoreFault.UNKNOWN_DEPENDENCY, task, f"it waits for {needed}, which does not exist")
    elif found.head.id != needed:
        raise InternalError(f"the task {found.head.id} was read for {needed}")
    elif (
        stored.state.claim is None
        and status in OPEN
        and found.state.status in CLOSED_UNDONE
        and after_failure is AfterFailure.WAIT
    ):
        message = f"it waits for {needed}, which is {found.state.status}: requeue that one or cancel this"
        yield Finding(StoreFault.BLOCKED, task, message)
    elif (
        stored.state.claim is not None
        and found.state.status is not Status.COMPLETED
        and after_failure is not AfterFailure.RUN
    ):
        yield Finding(StoreFault.TOO_EARLY, task, f"it was claimed, and {needed} is {found.state.status}")


def _without_zeros(counts: Mapping[Status, int]) -> dict[Status, int]:
    return {status: count for status, count in counts.items() if count}
