"""Simulated runs whose truth is known: what really was, what was written of it, and what that can show.

An oracle ends a run where a rule is broken, and what breaks it is the last that would have been written. Here
it only notes the first broken rule; the run, its history and the truth go on for ``AFTERMATH_S`` more.
"""

from __future__ import annotations

import gzip
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest import mock

from rebalanser.core.group.messages import FactKind, Perform, RemoveBarriers
from rebalanser.history import Record
from rebalanser.registry import values
from rebalanser.registry.contract import Changed, KeyValue
from simulation.group import PROFILES, Oracle, Process, Violation, history_of
from simulation.group import world as world_module
from simulation.group.duties import Duties
from simulation.kernel.mutants import Mutant, switched

MUTANTS_FILE: Final = Path(__file__).parents[1] / "simulation" / "test_mutants.py"
AFTERMATH_S: Final = 5.0
SOUND: Final = "seed"
ROUNDING_S: Final = 1e-6
"""How far a time may be off that is the difference of two, in seconds."""
SKEW_S: Final = 0.1
"""How far (seconds) each host's wall clock is off at most, where clocks are off."""


@dataclass
class Access:
    """One access as it really was. Moments count what happened in the run; no two are the same."""

    resource: str
    process: str
    node: str
    token: int
    begins: int
    begins_wall: float
    guarded: bool
    """Whether the registry once held the barrier with this token in the name of the node."""
    ends: int | None = None
    ends_wall: float | None = None
    stuck: bool = False
    given_up: bool = False
    """Whether the node asked for the removal of its barrier while it went on."""
    written: Written | None = None
    """What the records say of it; None where its start was not written."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.resource, self.process, self.node, self.token

    @property
    def name(self) -> tuple[str, int]:
        """Its process and the number of the record with which it began; or the moment, if nothing tells."""
        return self.process, self.written.start_sequence if self.written else -self.begins


@dataclass
class Barrier:
    """One barrier as the registry had it; ``ended_by`` is None where it ended with its lease."""

    resource: str
    node: str
    token: int
    ends: int | None = None
    end_revision: int | None = None
    ended_by: str | None = None
    how: str = ""


@dataclass
class Removal:
    """What the records say of the removal of a barrier."""

    sequence: int
    revision: int | None
    sent_monotonic: float


@dataclass
class Written:
    """What the records say of one access: one start and all that came of it."""

    node: str
    start_wall: float
    start_sequence: int
    stop_wall: float | None = None
    stop_sequence: int = -1
    stop_monotonic: float = 0.0
    failed_wall: float | None = None
    """When OnStop raised: from then on nothing tells until when access lasted."""
    last_wall: float = 0.0
    """The wall time of the last record of the node."""
    removal: Removal | None = None

    @property
    def sure_end_wall(self) -> float:
        """Until when the records show that access lasted."""
        if self.stop_wall is None and self.failed_wall is not None:
            return self.failed_wall
        return self.end_wall

    @property
    def end_wall(self) -> float:
        """Until when it may have lasted, by the records."""
        return self.last_wall if self.stop_wall is None else self.stop_wall

    @property
    def released(self) -> Removal | None:
        """The removal that was asked for after the access had ended, by the records."""
        removal = self.removal
        if removal is None or self.stop_wall is None or removal.sequence < self.stop_sequence:
            return None
        return removal if removal.sent_monotonic >= self.stop_monotonic - ROUNDING_S else None


@dataclass
class Run:
    """One seed: the truth, and what was written of it."""

    group: str
    violation: tuple[str, str] | None
    accesses: list[Access]
    barriers: list[Barrier]
    leaders: dict[int, set[str]]
    elected: dict[int, set[str]]
    removals: dict[tuple[str, int], set[int | None]]
    """The revisions at which somebody wrote to have removed the barrier of a resource with a token."""
    added: set[tuple[str, int]]
    """Resources and tokens of the barriers that somebody wrote to have added."""
    records: int
    ended: float


class Onlooker(Oracle):
    """An oracle that goes on looking after a rule was broken, and keeps what it saw."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.first: Violation | None = None
        self.seen: list[Access] = []
        self.log: dict[tuple[str, int], Barrier] = {}
        self.standing: dict[str, Barrier] = {}
        self.led: dict[int, set[str]] = defaultdict(set)
        self._moment = 0

    def _ask(self, judge: Any, *asked: Any) -> None:
        if self.first is not None:
            return
        try:
            judge(*asked)
        except Violation as violation:
            self.first = violation
            self._world.scheduler.at(self._now + AFTERMATH_S, self._end)

    def _end(self) -> None:
        assert self.first is not None
        raise self.first

    def _next(self) -> int:
        self._moment += 1
        return self._moment

    def _wall(self) -> float:
        return self._world.scheduler.clock.wall()

    def _going_on(self, **wanted: Any) -> Iterator[Access]:
        for access in self.seen:
            if access.ends is None and all(getattr(access, name) == value for name, value in wanted.items()):
                yield access

    def _close(self, access: Access) -> None:
        access.ends, access.ends_wall = self._next(), self._wall()

    def start_entered(self, process: Any, owned: Any, late: bool) -> None:
        for resource, token in owned.items():
            barrier = self.log.get((resource, token))
            node = process._last_node
            self.seen.append(
                Access(
                    resource,
                    process.stem,
                    node,
                    token,
                    self._next(),
                    self._wall(),
                    barrier is not None and barrier.node == node,
                )
            )
        self._ask(super().start_entered, process, owned, late)

    def stop_entered(self, process: Any, resources: Any) -> None:
        self._ask(super().stop_entered, process, resources)

    def stop_returned(self, process: Any, resources: Any, error: str | None) -> None:
        for resource in resources:
            for access in list(self._going_on(process=process.stem, resource=resource)):
                barrier = self.log.get((resource, access.token))
                if error is None or barrier is None or barrier.ends is not None:
                    self._close(access)
                else:
                    access.stuck = True
        self._ask(super().stop_returned, process, resources, error)

    def removing(self, process: Any, barriers: Mapping[str, int]) -> None:
        """A node asks for the removal of barriers."""
        for resource, token in barriers.items():
            for access in self._going_on(process=process.stem, resource=resource, token=token):
                access.given_up = True

    def died(self, process: Any) -> None:
        for access in list(self._going_on(process=process.stem)):
            self._close(access)
        self._ask(super().died, process)

    def changed(self, events: Any) -> None:
        for event in events:
            if isinstance(event, Changed):
                self._look(event)
        self._ask(super().changed, events)

    def _look(self, event: Changed) -> None:
        keys = self._keys
        if event.key == keys.term and event.value is not None:
            leadership = values.load_leadership(
                KeyValue(event.key, event.value, event.revision, event.revision)
            )
            self.led[leadership.term].add(leadership.leader)
        if not event.key.startswith(keys.barriers):
            return
        resource = keys.resource_of_barrier(event.key)
        former = self.standing.pop(resource, None)
        if former is not None:
            former.ends, former.end_revision = self._next(), event.revision
            former.ended_by = self._actor
            former.how = "overwritten" if event.value is not None else "ended"
            for access in list(self._going_on(resource=resource, token=former.token, stuck=True)):
                self._close(access)
        if event.value is not None:
            barrier = Barrier(resource, event.value.decode(), event.revision)
            self.standing[resource] = self.log[resource, event.revision] = barrier

    def check_shares(self) -> None:
        self._ask(super().check_shares)

    def write(self, process: Any, resource: Any, token: Any) -> None:
        self._ask(super().write, process, resource, token)

    def guarded(self, process: Any, deadline: float) -> None:
        self._ask(super().guarded, process, deadline)

    def acknowledging(self, process: Any, command: Any) -> None:
        self._ask(super().acknowledging, process, command)

    def told_completed(self, process: Any, version: int) -> None:
        self._ask(super().told_completed, process, version)

    def told_joined(self, session: Any) -> None:
        self._ask(super().told_joined, session)

    def told_session_lost(self, process: Any, session: Any) -> None:
        self._ask(super().told_session_lost, process, session)


AUDITED: Final = {"RB-1", "RB-5", "RB-11", "RB-15", "RB-16", "RB-21", "RB-34"}
"""The rules whose violation the audit finds, or that let one come about which it finds.

RB-12 is not among them: a node that takes another token for the barrier's writes that into its history too.
"""


@lru_cache
def mutants() -> dict[str, Mutant]:
    """The mutants that break what the audit proves, by name."""
    spec = importlib.util.spec_from_file_location("simulated_mutants", MUTANTS_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {mutant.name: mutant for mutant in module.MUTANTS if mutant.rules & AUDITED}


def run(seed: int, without: str | None = None) -> tuple[Run, list[Record]]:
    """One seed of the product, or of a mutant in the profile that shows it."""
    group = f"{without or SOUND}/{seed}"
    onlookers: list[Onlooker] = []
    made: list[Any] = []

    class Watched(world_module.World):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            super().__init__(*arguments)

        def run_for(self, seconds: float) -> None:
            try:
                super().run_for(seconds)
            except Exception as error:
                first = onlookers[0].first
                if first is None or isinstance(error, Violation):
                    raise
                raise first from error  # a group in which a rule was broken may break down altogether

    def look(world: Any) -> Onlooker:
        onlookers.append(Onlooker(world))
        return onlookers[-1]

    def carry_out(process: Process, effect: Any) -> None:
        match effect:
            case Perform(command=RemoveBarriers(barriers=barriers)):
                onlookers[0].removing(process, barriers)
        carried_out(process, effect)

    carried_out = Process._carry_out
    mutant = mutants()[without] if without else None
    switches = (*mutant.switches, *mutant.second_line) if mutant else ()
    profile = PROFILES[mutant.profile] if mutant else next(iter(PROFILES.values()))
    watched = (
        mock.patch.object(world_module, "Oracle", look),
        mock.patch.object(Process, "_carry_out", carry_out),
        # What a node owes ends no run: the audit judges what happened, and that goes on.
        *(mock.patch.object(Duties, judged) for judged in ("decides", "finishes", "killed")),
    )
    with ExitStack() as stack:
        for each in (*watched, switched(switches)):
            stack.enter_context(each)
        history = history_of(seed, profile, group=group, make_world=Watched)
    (onlooker,) = onlookers
    first = onlooker.first
    violation = (first.rule, str(first)) if first else None
    if violation is None and history.report.violations:
        violation = history.report.violations[0][1:]
    accesses = [replace(a, process=f"{group}/{a.process}", node=f"{group}/{a.node}") for a in onlooker.seen]
    tell_what_is_written(accesses, history.records)
    return (
        Run(
            group,
            violation,
            accesses,
            [
                replace(b, node=f"{group}/{b.node}", ended_by=b.ended_by and f"{group}/{b.ended_by}")
                for b in onlooker.log.values()
            ],
            {term: {f"{group}/{node}" for node in nodes} for term, nodes in onlooker.led.items()},
            elected(history.records),
            removals(history.records),
            {
                (record.resource, record.token)
                for record in history.records
                if record.kind == FactKind.BARRIER_ADDED
                and record.resource is not None
                and record.token is not None
            },
            len(history.records),
            made[0].scheduler.clock.wall(),
        ),
        history.records,
    )


def elected(records: Iterable[Record]) -> dict[int, set[str]]:
    """The nodes that wrote that they lead a term."""
    found: dict[int, set[str]] = defaultdict(set)
    for record in records:
        if record.kind == FactKind.ELECTED:
            found[record.term].add(record.node)
    return found


def removals(records: Iterable[Record]) -> dict[tuple[str, int], set[int | None]]:
    """At which revisions somebody wrote to have removed a barrier."""
    found: dict[tuple[str, int], set[int | None]] = defaultdict(set)
    for record in records:
        if record.kind == FactKind.BARRIER_REMOVED and record.resource and record.token is not None:
            found[record.resource, record.token].add(record.revision)
    return dict(found)


def tell_what_is_written(accesses: Sequence[Access], records: Sequence[Record]) -> None:
    """Put beside each access what the records say of it."""
    begun: dict[Any, list[Access]] = defaultdict(list)
    for access in accesses:
        begun[access.key].append(access)
    told = written(records)
    for key, of_key in begun.items():
        for access, tells in zip(of_key, told.get(key, []), strict=False):
            access.written = tells


def written(records: Sequence[Record]) -> dict[tuple[str, str, str, int], list[Written]]:
    """What the records say of each start of each process with a token of a resource."""
    found: dict[tuple[str, str, str, int], list[Written]] = defaultdict(list)
    last: dict[str, float] = {}
    removed: dict[tuple[str, str, str, int], Removal] = {}
    for record in records:
        last[record.node] = record.wall_time
        if record.resource is None or record.token is None:
            continue
        key = (record.resource, record.process, record.node, record.token)
        if record.kind == FactKind.START_ENTERED:
            found[key].append(Written(record.node, record.wall_time, record.sequence))
        elif record.kind == FactKind.BARRIER_REMOVED:
            assert record.value is not None
            removed[key] = Removal(record.sequence, record.revision, record.monotonic_time - record.value)
        elif record.kind == FactKind.STOP_RETURNED and found[key]:
            mine = found[key][-1]
            mine.stop_wall, mine.stop_sequence = record.wall_time, record.sequence
            mine.stop_monotonic = record.monotonic_time
        elif record.kind == FactKind.STOP_FAILED and found[key]:
            found[key][-1].failed_wall = record.wall_time
    for key, starts in found.items():
        for mine in starts:
            mine.last_wall, mine.removal = last[mine.node], removed.get(key)
    return dict(found)


def skewed(record: Record) -> Record:
    """The same, written on a host whose wall clock is off."""
    off_s = Random(record.host).uniform(-SKEW_S, SKEW_S)
    return record.model_copy(update={"wall_time": record.wall_time + off_s})


def write_runs(asked: tuple[str | None, range, Path]) -> list[Run]:
    """Run seeds and write their histories to two files, of right clocks and of wrong ones."""
    without, seeds, folder = asked
    runs = []
    name = f"{without or SOUND} {seeds.start}.jsonl.gz"
    right, wrong = (folder / clocks / name for clocks in ("right", "wrong"))
    for path in (right, wrong):
        path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(right, "wb", 1) as exact, gzip.open(wrong, "wb", 1) as off:
        for seed in seeds:
            found, records = run(seed, without)
            exact.writelines(record.to_line() for record in records)
            off.writelines(skewed(record).to_line() for record in records)
            runs.append(found)
    return runs
