"""Sources of a process's claims: an index in the engine, or the partitions that the process owns.

=====================  ======================================================  ==============================
source                 claims are handed out by                                engines
=====================  ======================================================  ==============================
``IndexClaims``   the store: any process takes any ready task (SK-20)     with ``ClaimsFromIndex``
``Partitions``         the one fenced owner of each partition (SK-13)          all others
=====================  ======================================================  ==============================
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any

from rebalanser.core.tasks.claims import ClaimBest, Claimed, IndexRequest, IndexRequests, ReadQueuePause
from rebalanser.core.tasks.clocks import MAX_SKEW_S, ClockSkewDetector, SkewedClock
from rebalanser.core.tasks.model import TaskId
from rebalanser.core.tasks.slots import Rooms
from rebalanser.core.tasks.store import ClaimAnswer
from rebalanser.core.tasks.writes import ResultT, run_script
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import ClaimsFromIndex, EngineWatch
from rebalanser.tasks.pauses import QUEUE, Pause

_log = get_logger()


class ClaimSource(ABC):
    """Claims tasks of a queue for one process. All methods but ``close`` are for one thread at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._reported: set[str] = set()
        self.pause: Pause | None = None
        """Pause of the queue, as last read; None if it is not paused (SK-23)."""

    @abstractmethod
    def claim(
        self, limit: int, names: Collection[str] | None, worker: str | None = None, ahead: int = 0
    ) -> list[Claimed]:
        """Claim the best tasks of these functions, None being all, at most ``limit`` of them (SK-5).

        ``worker`` is the label of the claimant if it is not this process. The last ``ahead`` claims have no
        free thread yet. They are never of tasks with a rate limit, as a claim that is given back counts too.
        While the queue is paused nothing is claimed (SK-23).

        Raises:
            RebalanserError: the engine was away or takes no writes, and no claim is known. Unknown claims end
                with their time.
        """

    @abstractmethod
    def next_wakeup(self, names: Collection[str] | None = None) -> float | None:
        """Return when tasks of these functions may be ready, in seconds of the clock; None for all functions.

        None if only news can bring it.
        """

    @abstractmethod
    def owns(self, partition: int) -> bool:
        """True if claims of this partition's tasks are handed out here, as far as this process knows."""

    @abstractmethod
    def ready_since(self, wall: float) -> float | None:
        """Return since when the oldest ready task waits, of those claimed here; None if none is ready.

        See ``ready_since``. For any thread.
        """

    @abstractmethod
    def report_unknown(self, names: Collection[str]) -> None:
        """Log once, for each function that is not one of these, that its tasks wait for another worker."""

    @abstractmethod
    def close(self) -> None:
        """Stop watching for changes. Closing twice does nothing."""

    @abstractmethod
    def offer(self, rooms: Rooms) -> None:
        """Offer room for which ``claim`` finds no task, in place of what was offered before.

        ``claim`` returns the claims that other processes make for it.
        """

    @abstractmethod
    def retire(self) -> None:
        """Withdraw the room, and give back claims for this process that ``claim`` did not return."""

    @abstractmethod
    def claim_for_others(self) -> None:
        """Claim ready tasks for other processes that have room; raises what ``claim`` does.

        It also brings ``ClaimSource.pause`` up to date.
        """

    def payloads(self, claimed: Sequence[Claimed]) -> Mapping[TaskId, bytes]:
        """Return the payloads of claimed tasks: those that came with the claims, and the others, read now.

        Raises:
            RebalanserError: the engine was away, or can't be read.
        """
        known = {each.stored.head.id: each.payload for each in claimed if each.payload is not None}
        missing = [task for each in claimed if (task := each.stored.head.id) not in known]
        if not missing:
            return known
        engine, context = self._context.engine, self._context
        return {**known, **engine.payloads(context.queue, missing, context.timeout_s)}

    def _learn_pause(self, content: bytes | None) -> None:
        """Set the stored pause of the queue, None for none, and log a change."""
        before, self.pause = self.pause, None if content is None else Pause.of(content)
        if self.pause is not None and self.pause != before:
            _log.warning(
                "the queue is paused: nothing is claimed until it is resumed",
                action="queue_paused",
                queue=self._context.queue,
                since=self.pause.since,
                by=self.pause.by,
                reason=self.pause.reason,
            )
        if self.pause is None and before is not None:
            _log.info("the queue is resumed", action="queue_resumed", queue=self._context.queue)

    def _report_unknown(self, names: Iterable[str]) -> None:
        for name in sorted(set(names).difference(self._reported)):
            self._reported.add(name)
            _log.error(
                "no function of this name is registered here: its tasks are kept, for a worker that has it",
                action="task_unknown",
                queue=self._context.queue,
                name=name,
            )


class IndexClaims(ClaimSource):
    """Claims from the engine's index: no process owns a partition, and the store decides who gets a task.

    ``worker`` is a label for people, ``buffer_s`` is added to a claim's time (SK-8), ``wake`` is called
    whenever there may be something to claim, from ``open`` on. ``IndexRequests`` decides.
    """

    def __init__(
        self,
        context: Context,
        engine: ClaimsFromIndex,
        worker: str,
        buffer_s: float,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(context)
        self._engine = engine
        self._worker = worker
        self._wake = wake
        self._skew_detector = ClockSkewDetector()
        clock = context.clock
        self._requests = IndexRequests(
            context.queue, worker, secrets.token_hex(8), clock.now, clock.wall, context.term, buffer_s
        )
        self._watch: EngineWatch | None = None

    def open(self) -> None:
        """Watch for commits from now on."""
        self._watch = self._engine.watch_commits(self._wake)

    def claim(
        self, limit: int, names: Collection[str] | None, worker: str | None = None, ahead: int = 0
    ) -> list[Claimed]:
        """See ``ClaimSource.claim``; claims all or none."""
        claimed = self._run(self._requests.claim(limit, names, worker, ahead))
        self._check_clocks(claimed)
        return claimed

    def _run(self, script: Generator[IndexRequest, Any, ResultT]) -> ResultT:
        result = run_script(script, self._perform)
        self._learn_pause(self._requests.pause)
        return result

    def _perform(self, request: IndexRequest) -> ClaimAnswer | bytes | None:
        context = self._context
        match request:
            case ClaimBest(query=query):
                return self._engine.claim(query, context.timeout_s)
            case ReadQueuePause():
                return context.engine.pauses(context.queue, context.timeout_s).get(QUEUE)

    def next_wakeup(self, names: Collection[str] | None = None) -> float | None:
        """See ``ClaimSource.next_wakeup``; as of the last claim, for the functions of that claim."""
        return self._requests.next_wakeup(names)

    def owns(self, partition: int) -> bool:  # noqa: ARG002
        """Return True: any process claims from any partition."""
        return True

    def ready_since(self, wall: float) -> float | None:
        """See ``ClaimSource.ready_since``: of the whole queue, from the index."""
        context = self._context
        return context.engine.ready_since(context.queue, wall, context.timeout_s)

    def offer(self, rooms: Rooms) -> None:
        """No-op: the store hands out all claims."""

    def retire(self) -> None:
        """No-op: nothing is claimed for other processes."""

    def claim_for_others(self) -> None:
        """Only bring ``ClaimSource.pause`` up to date: any process claims for itself."""
        self._run(self._requests.read_pause())

    def report_unknown(self, names: Collection[str]) -> None:
        """See ``ClaimSource.report_unknown``; no-op if the last claim found no such task."""
        if not self._requests.others_ready:
            return
        ready = self._engine.ready_names(self._context.queue, self._context.timeout_s)
        self._report_unknown(set(ready).difference(names))

    def close(self) -> None:
        """Stop watching for commits. Closing twice does nothing."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _check_clocks(self, claimed: Sequence[Claimed]) -> None:
        """Warn of hosts whose ids come from the future; an old id may just have waited for long."""
        now, wall = self._context.clock.now(), self._context.clock.wall()
        for each in claimed:
            far = self._skew_detector.check(each.stored.head.id, now, wall, is_new=False)
            if far is not None:
                warn_of_skewed_clock(far, self._context.queue, self._worker)


def warn_of_skewed_clock(far: SkewedClock, queue: str, seen_by: str) -> None:
    """Log that a host's clock is far off (SK-18)."""
    _log.warning(
        "the clock of a host that makes tasks is far from this one's, and one of them is wrong: "
        "delays and periodic tasks come early or late by the difference; claims are as safe as ever",
        action="clock_far_off",
        queue=queue,
        task=far.task,
        host=far.host,
        process=far.process,
        ahead_s=round(far.ahead_s, 3),
        limit_s=MAX_SKEW_S,
        seen_by=seen_by,
    )
