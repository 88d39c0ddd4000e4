"""Simulated runs whose truth is known: what really was, what was written of it, and what that can show.

An oracle ends a run where a rule is broken, and what breaks it is the last that would have been written. Here
it only notes the first broken rule; the run, its history and the truth go on for :data:`AFTERMATH_S` more.
"""

from __future__ import annotations

import gzip
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest import mock

from rebalanser.history import Record
from rebalanser.protocol.messages import FactKind
from rebalanser.registry import values
from rebalanser.registry.contract import Changed, KeyValue
from rebalanser.testing.simulation import PROFILES, Oracle, Violation, history_of
from rebalanser.testing.simulation import world as world_module
from rebalanser.testing.simulation.safeguards import Safeguard, switched

SAFEGUARDS_FILE: Final = Path(__file__).parents[1] / "simulation" / "test_safeguards.py"
AFTERMATH_S: Final = 5.0
SOUND: Final = "seed"
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

    @property
    def name(self) -> tuple[str, str, int]:
        return self.resource, self.process, self.token


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
class Written:
    """What the records of one group say of one token of one resource of one process."""

    starts: int = 0
    start_wall: float | None = None
    stop_wall: float | None = None
    stop_sequence: int = -1
    start_sequence: int = -1
    removed_sequence: int | None = None
    removed_revision: int | None = None
    last_wall: float = 0.0
    """The wall time of the last record of the node."""
    stop_entered_sequence: int | None = None
    failed: bool = False
    """Whether OnStop was entered and raised: from then on nothing tells until when access lasted."""
    node: str = ""

    @property
    def end_wall(self) -> float:
        """Until when the records show that access lasted."""
        if self.stop_wall is None or self.stop_sequence < self.start_sequence:
            return self.last_wall
        return self.stop_wall


@dataclass
class Run:
    """One seed: the truth, and what was written of it."""

    group: str
    violation: tuple[str, str] | None
    accesses: list[Access]
    barriers: list[Barrier]
    leaders: dict[int, set[str]]
    elected: dict[int, set[str]]
    written: dict[tuple[str, str, int], Written]
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


@lru_cache
def safeguards() -> dict[str, Safeguard]:
    """What can be taken out of the protocol, by name."""
    spec = importlib.util.spec_from_file_location("simulated_safeguards", SAFEGUARDS_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {safeguard.name: safeguard for safeguard in module.SAFEGUARDS}


def run(seed: int, without: str | None = None) -> tuple[Run, list[Record]]:
    """One seed with all safeguards or without one of them, of the profile in which that one matters."""
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

    safeguard = safeguards()[without] if without else None
    switches = (*safeguard.switches, *safeguard.second_line) if safeguard else ()
    profile = PROFILES[safeguard.profile] if safeguard else next(iter(PROFILES.values()))
    with mock.patch.object(world_module, "Oracle", look), switched(switches):
        history = history_of(seed, profile, group=group, make_world=Watched)
    (onlooker,) = onlookers
    first = onlooker.first
    violation = (first.rule, str(first)) if first else None
    if violation is None and history.report.violations:
        violation = history.report.violations[0][1:]
    return (
        Run(
            group,
            violation,
            [replace(a, process=f"{group}/{a.process}", node=f"{group}/{a.node}") for a in onlooker.seen],
            [
                replace(b, node=f"{group}/{b.node}", ended_by=b.ended_by and f"{group}/{b.ended_by}")
                for b in onlooker.log.values()
            ],
            {term: {f"{group}/{node}" for node in nodes} for term, nodes in onlooker.led.items()},
            elected(history.records),
            written(history.records),
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


def written(records: Sequence[Record]) -> dict[tuple[str, str, int], Written]:
    """What the records say of each token of each resource of each process."""
    found: dict[tuple[str, str, int], Written] = defaultdict(Written)
    last: dict[str, float] = {}
    failed: dict[str, int] = {}
    for record in records:
        last[record.node] = record.wall_time
        if record.kind == FactKind.STOP_FAILED:
            failed[record.node] = record.sequence
        if record.resource is None or record.token is None:
            continue
        if record.kind == FactKind.START_ENTERED:
            mine = found[record.resource, record.process, record.token]
            mine.node = record.node
            mine.starts += 1
            mine.start_wall = record.wall_time if mine.start_wall is None else mine.start_wall
            mine.start_sequence = record.sequence
        elif record.kind == FactKind.STOP_RETURNED:
            mine = found[record.resource, record.process, record.token]
            if record.node == mine.node:
                mine.stop_wall, mine.stop_sequence = record.wall_time, record.sequence
        elif record.kind == FactKind.STOP_ENTERED:
            found[record.resource, record.process, record.token].stop_entered_sequence = record.sequence
        elif record.kind == FactKind.BARRIER_REMOVED:
            mine = found[record.resource, record.process, record.token]
            mine.removed_sequence, mine.removed_revision = record.sequence, record.revision
    for mine in found.values():
        mine.last_wall = last.get(mine.node, 0.0)
        stopping, raised = mine.stop_entered_sequence, failed.get(mine.node)
        mine.failed = stopping is not None and raised is not None and stopping < raised
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
