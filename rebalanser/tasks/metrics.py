"""Metrics of a queue in one process, and a Prometheus collector for them.

=========================================  =========  ====================================================
metric                                     type       labels beside ``queue``
=========================================  =========  ====================================================
``rebalanser_tasks_enqueued_total``        counter    ``name`` (of the function)
``rebalanser_tasks_started_total``         counter    ``name``
``rebalanser_tasks_ended_total``           counter    ``name``, ``outcome`` (``ClaimOutcome``)
``rebalanser_tasks_run_seconds``           histogram  ``name``
``rebalanser_tasks_oldest_ready_seconds``  gauge      none: age of the oldest task that waits for a worker
``rebalanser_tasks_errors_total``          counter    ``loop``, ``kind``
``rebalanser_tasks_troubles``              gauge      ``loop``, ``kind``: 1 as long as the loop fails
=========================================  =========  ====================================================

All counters are this process's since it opened the queue: sum them over the processes. A count takes no lock:
each thread has counts of its own, which a scrape adds up.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Protocol

from rebalanser.core.tasks.failures import LoopFailure
from rebalanser.core.tasks.model import Status
from rebalanser.core.tasks.rules import Reason, Refused
from rebalanser.errors import MissingExtra

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from rebalanser.core.tasks.model import Stored

BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
"""Upper bounds of the buckets of run times, in seconds."""
MAX_NAMES: Final = 200
"""Maximum number of functions that are counted by name."""
OTHER: Final = "(other)"
"""Name under which all further functions are counted."""
_FOLDED_AT: Final = 64
"""Number of threads with counts of their own above which those of ended threads are added up."""


class ClaimOutcome(StrEnum):
    """Outcome of a claim."""

    COMPLETED = "completed"
    FAILED = "failed"
    """The try failed, and another one follows."""
    DEAD = "dead"
    """The last try failed."""
    RELEASED = "released"
    """The task was given back, its try not counted."""
    FENCED = "fenced"
    """The store refused the end, as the claim was over or the task cancelled."""
    UNKNOWN = "unknown"
    """Unknown, as the store was away. If the claim has not ended, it ends with its time."""


def claim_outcome(settled: Stored | Refused, failures: int) -> ClaimOutcome:
    """Return the outcome of a settled claim; ``failures`` is the number before it.

    A task that is complete already was completed by this claim, in a transaction of its body.
    """
    if isinstance(settled, Refused):
        return ClaimOutcome.COMPLETED if settled.reason is Reason.FINISHED else ClaimOutcome.FENCED
    match settled.state.status:
        case Status.COMPLETED:
            return ClaimOutcome.COMPLETED
        case Status.DEAD:
            return ClaimOutcome.DEAD
        case _:
            return ClaimOutcome.FAILED if settled.state.failures > failures else ClaimOutcome.RELEASED


@dataclass(slots=True)
class RunTimes:
    """A histogram of run times: the number in each bucket, the last one being those over all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def add(self, run_s: float) -> None:
        """Count a run."""
        self.counts[bisect_left(BUCKETS_S, run_s)] += 1
        self.sum_s += run_s

    def merge(self, other: RunTimes) -> None:
        """Add the counts of another histogram."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s


@dataclass(slots=True)
class TaskCounts:
    """Counts of tasks by function."""

    enqueued: Counter[str] = field(default_factory=Counter)
    started: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, ClaimOutcome]] = field(default_factory=Counter)
    run_times: dict[str, RunTimes] = field(default_factory=dict)

    def merge(self, other: TaskCounts) -> None:
        """Add other counts, which their thread may be changing."""
        self.enqueued.update(other.enqueued.copy())
        self.started.update(other.started.copy())
        self.ended.update(other.ended.copy())
        for name, times in other.run_times.copy().items():
            self.run_times.setdefault(name, RunTimes()).merge(times)


class TaskMetrics:
    """Counts the tasks of a queue in this process. May be used from any thread."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._own = threading.local()
        self._lock = threading.Lock()
        self._threads: list[tuple[threading.Thread, TaskCounts]] = []
        self._ended = TaskCounts()
        """Counts of the threads that have ended."""
        self._folded_at = _FOLDED_AT

    def enqueued(self, name: str) -> None:
        """Count a task of a function that was enqueued."""
        self._counts().enqueued[self._known(name)] += 1

    def started(self, name: str) -> None:
        """Count a try whose body begins, or that is handed to a client."""
        self._counts().started[self._known(name)] += 1

    def ran(self, name: str, run_s: float) -> None:
        """Count the run time of a body."""
        name, times = self._known(name), self._counts().run_times
        found = times.get(name)
        if found is None:
            found = times[name] = RunTimes()
        found.add(run_s)

    def ended(self, name: str, outcome: ClaimOutcome) -> None:
        """Count a claim that has ended."""
        self._counts().ended[self._known(name), outcome] += 1

    def total(self) -> TaskCounts:
        """Return the counts of all threads."""
        total = TaskCounts()
        with self._lock:
            total.merge(self._ended)
            for _, counts in self._threads:
                total.merge(counts)
        return total

    def _counts(self) -> TaskCounts:
        try:
            counts: TaskCounts = self._own.counts
        except AttributeError:
            counts = self._own.counts = TaskCounts()
            with self._lock:
                self._threads.append((threading.current_thread(), counts))
                if len(self._threads) >= self._folded_at:
                    self._fold()
        return counts

    def _fold(self) -> None:
        """Add up the counts of ended threads. With the lock."""
        alive = []
        for thread, counts in self._threads:
            if thread.is_alive():
                alive.append((thread, counts))
            else:
                self._ended.merge(counts)
        self._threads = alive
        self._folded_at = max(_FOLDED_AT, 2 * len(alive))

    def _known(self, name: str) -> str:
        """Return the name to count under: clients of a server may enqueue tasks of any name."""
        if name not in self._names:
            if len(self._names) >= MAX_NAMES:
                return OTHER
            self._names.add(name)
        return name


@dataclass(frozen=True, slots=True)
class Measurement:
    """Metrics of one process at one moment."""

    queue: str
    counts: TaskCounts
    errors: Mapping[tuple[str, str], int]
    """Number of errors of each loop, by kind."""
    troubles: tuple[LoopFailure, ...]
    oldest_ready_s: float | None
    """Seconds for which the oldest ready task has waited, as far as this process knows; 0 for no such task.

    None if it does not know, as for a producer on etcd, or while the store is away.
    """


class Measurable(Protocol):
    """A ``Queue`` or ``AsyncQueue``."""

    def measure(self) -> Measurement:
        """Measure now."""


class QueueCollector:
    """A collector of queues for a registry of ``prometheus_client``.

    A scrape reads the store at most once for each queue, for the age of the oldest ready task.

    Raises:
        MissingExtra: ``prometheus_client`` is not installed.
    """

    def __init__(self, *queues: Measurable) -> None:
        try:
            from prometheus_client import metrics_core  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise MissingExtra(
                f"metrics need a package that is not installed ({error}); pip install 'rebalanser[metrics]'"
            ) from error
        self._families = metrics_core
        self._queues = queues

    def describe(self) -> Iterable[Metric]:
        """Return no families: registering reads no store."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Measure the queues; for the registry."""
        measured = [each.measure() for each in self._queues]
        counts = [(now.queue, now.counts) for now in measured]
        named = ("name",)
        enqueued: dict[tuple[str, ...], int] = {
            (queue, name): n for queue, each in counts for name, n in each.enqueued.items()
        }
        yield self._counter("enqueued", "Tasks enqueued.", named, enqueued)
        started: dict[tuple[str, ...], int] = {
            (queue, name): n for queue, each in counts for name, n in each.started.items()
        }
        yield self._counter("started", "Tries begun.", named, started)
        ended: dict[tuple[str, ...], int] = {
            (queue, name, str(outcome)): n
            for queue, each in counts
            for (name, outcome), n in each.ended.items()
        }
        yield self._counter("ended", "Claims ended, by outcome.", ("name", "outcome"), ended)
        errors: dict[tuple[str, ...], int] = {
            (now.queue, *loop_and_kind): n for now in measured for loop_and_kind, n in now.errors.items()
        }
        yield self._counter("errors", "Errors of loops.", ("loop", "kind"), errors)
        runs = self._families.HistogramMetricFamily(
            "rebalanser_tasks_run_seconds", "Run time of bodies.", labels=("queue", "name")
        )
        for queue, each in counts:
            for name, times in each.run_times.items():
                bounds = [*map(str, BUCKETS_S), "+Inf"]
                buckets = list(zip(bounds, map(float, accumulate(times.counts)), strict=True))
                runs.add_metric((queue, name), buckets, times.sum_s)
        yield runs
        troubles = self._families.GaugeMetricFamily(
            "rebalanser_tasks_troubles", "Loops that fail now.", labels=("queue", "loop", "kind")
        )
        oldest = self._families.GaugeMetricFamily(
            "rebalanser_tasks_oldest_ready_seconds", "Age of the oldest ready task.", labels=("queue",)
        )
        for now in measured:
            for trouble in now.troubles:
                troubles.add_metric((now.queue, trouble.loop, trouble.kind), 1.0)
            if now.oldest_ready_s is not None:
                oldest.add_metric((now.queue,), now.oldest_ready_s)
        yield troubles
        yield oldest

    def _counter(
        self, what: str, text: str, labels: tuple[str, ...], counts: Mapping[tuple[str, ...], int]
    ) -> Metric:
        family = self._families.CounterMetricFamily(
            f"rebalanser_tasks_{what}", text, labels=("queue", *labels)
        )
        for values, count in counts.items():
            family.add_metric(values, count)
        return family
