"""What NELI's members and Shiva's machines tell the history, beside what they did, whatever fails."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from rebalanser.core.neli.messages import Fact as NeliFact
from rebalanser.core.neli.messages import FactKind as NeliKind
from rebalanser.core.neli.settings import Mode
from rebalanser.core.shiva.messages import Fact as ShivaFact
from rebalanser.core.shiva.messages import FactKind as ShivaKind
from rebalanser.core.shiva.types import ApplicationId
from rebalanser.history import KINDS, Event, HistoryStep, Protocol, Record, author_here
from rebalanser.neli.history import event_of as neli_event
from rebalanser_kafka.shiva.facts import event_of as shiva_event
from simulation.neli import World as NeliWorld
from simulation.neli import runner as neli_runner
from simulation.neli.process import Process as NeliProcess
from simulation.shiva import World as ShivaWorld
from simulation.shiva import run_seed as run_shiva_seed
from simulation.shiva.process import Process as ShivaProcess
from simulation.shiva.working import WorkerProcess

pytestmark = pytest.mark.full_size

NELI_SEEDS = 60
SHIVA_SEEDS = 15
EPSILON_S = 1e-6


def check_words(protocol: Protocol, event: Event) -> HistoryStep | None:
    """An event that can be a record, whose words are in the tables; its step."""
    author = author_here(protocol, "group", "process", "label")
    record = Record.of(author, event, sequence=0, wall=1.0, monotonic=1.0)
    note = KINDS[protocol][record.kind]
    assert record.detail.keys() <= set(note.detail), (record.kind, record.detail)
    return note.step


class LedWorld(NeliWorld):
    """Keeps, beside each member, what its facts say of its leadership."""

    made: LedWorld

    def __init__(self, *arguments: Any) -> None:
        type(self).made = self
        self.leading: dict[tuple[str, int], int] = {}
        self.open: dict[tuple[str, int], tuple[int, float]] = {}
        self.lapsed: dict[tuple[str, int], float] = {}
        self.spans: dict[int, list[tuple[float, float, str, int]]] = defaultdict(list)
        self.ends = 0
        super().__init__(*arguments)
        look = self.oracle.look

        def look_and_compare(process: NeliProcess) -> None:
            look(process)
            self.compare(process)

        self.oracle.look = look_and_compare  # type: ignore[method-assign]

    def compare(self, process: NeliProcess) -> None:
        for partition in range(self.topic.partitions):
            said = self.leading.get((process.name, partition))
            assert said == process.member.token_of(partition, process.now), (process.name, partition)

    def report(self, process: NeliProcess, fact: NeliFact) -> None:
        super().report(process, fact)
        step = check_words(Protocol.NELI, neli_event(fact, process.name, 0.0))
        assert fact.at <= process.now
        if step is None or fact.partition is None:
            return
        key, at = (process.name, fact.partition), self.true(process, fact.at)
        assert fact.token is not None
        if step is HistoryStep.START_ENTERED:
            assert key not in self.open, "the leadership before has not ended"
            self.open[key] = fact.token, at
            self.leading[key] = fact.token
            return
        token, begin = self.open[key]
        assert (token, begin) <= (fact.token, at + EPSILON_S)
        assert token == fact.token
        self.leading.pop(key, None)
        if step is HistoryStep.STOP_ENTERED:
            self.lapsed[key] = at
            return
        assert step is HistoryStep.STOP_RETURNED
        self.ends += 1
        del self.open[key]
        led_until = min(at, self.lapsed.pop(key, at))
        self.spans[fact.partition].append((begin, led_until, process.name, token))

    @staticmethod
    def true(process: NeliProcess, at: float) -> float:
        """An instant of a process's clock, in true time."""
        return process._born_at + (at - 100.0) / process._rate


@pytest.mark.rule("AU-3", "NE-4", "NE-10", "NE-15")
def test_a_members_history_is_what_it_would_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every event the facts say the same as ``is_leader``, and each leadership ends once, when it did."""
    monkeypatch.setattr(neli_runner, "World", LedWorld)
    ends = 0
    for seed in range(NELI_SEEDS):
        report = neli_runner.run_seed(seed)
        assert not report.violations
        world = LedWorld.made
        ends += world.ends
        alone = world.scenario.settings.mode is not Mode.NON_EXCLUSIVE
        if alone and world.topic.partitions == world.scenario.partitions:
            for spans in world.spans.values():
                check_apart(spans)
    assert ends > NELI_SEEDS


def check_apart(spans: list[tuple[float, float, str, int]]) -> None:
    """Whoever led, led alone: by the times and by the tokens."""
    last_until, last_token = 0.0, -1
    for begin, until, name, token in sorted(spans):
        assert begin >= last_until - EPSILON_S, (name, begin, last_until)
        assert token >= last_token, name
        last_until, last_token = max(last_until, until), token


class RunWorld(ShivaWorld):
    """Keeps what each worker and leader tells of its runs and documents."""

    made: RunWorld

    def __init__(self, *arguments: Any, **options: Any) -> None:
        type(self).made = self
        self.steps: dict[tuple[int, str], list[tuple[HistoryStep, int | None]]] = defaultdict(list)
        self.versions: dict[int, int] = defaultdict(int)
        self.tellers: list[ShivaProcess] = []
        self.published: dict[float, int] = {}
        self.adopted: set[float] = set()
        self.led: dict[int, int] = {}
        super().__init__(*arguments, **options)

    def report(self, process: ShivaProcess, fact: ShivaFact) -> None:
        super().report(process, fact)
        label = process.id if isinstance(process, WorkerProcess) else process.name
        event = shiva_event(fact, process.name, 1, label=label)
        step = check_words(Protocol.SHIVA, event)
        if process not in self.tellers:
            self.tellers.append(process)
        if isinstance(process, WorkerProcess):
            assert event.version >= self.versions[id(process)], "documents are acted on in their order"
            self.versions[id(process)] = event.version
        match step:
            case HistoryStep.ELECTED:
                assert self.led.setdefault(event.term, id(process)) == id(process), "a term has one leader"
            case HistoryStep.PUBLISHED:
                assert event.value == event.version
                assert self.published.setdefault(event.version, event.term) == event.term
            case HistoryStep.ADOPTED:
                self.adopted.add(event.version)
            case HistoryStep():
                assert event.resource is not None
                self.steps[id(process), event.resource].append((step, event.token))


@pytest.mark.rule("AU-3", "SH-7", "SH-13")
def test_a_clusters_history_has_whole_runs_with_one_token_each() -> None:
    """A run is left open only by a worker that died, or that runs it still."""
    runs = 0
    for seed in range(SHIVA_SEEDS):
        report = run_shiva_seed(seed, make_world=RunWorld)
        assert not report.violations
        world = RunWorld.made
        assert world.published.keys() & world.adopted, "workers act on what leaders have published"
        workers = {id(worker): worker for worker in world.tellers if isinstance(worker, WorkerProcess)}
        for (number, resource), steps in world.steps.items():
            worker = workers[number]
            runs_still = ApplicationId.parse(resource) in worker.machine.processes
            runs += check_runs(steps, may_be_cut=runs_still or not worker.alive)
    assert runs > SHIVA_SEEDS


def check_runs(steps: list[tuple[HistoryStep, int | None]], *, may_be_cut: bool) -> int:
    """One run after another, each of one token, in the order of the steps; how many runs there were."""
    runs, done, token = 0, HistoryStep.STOP_RETURNED, None
    for step, its_token in steps:
        assert step in FOLLOWS[done], (done, step)
        if step is HistoryStep.START_ENTERED:
            runs, token = runs + 1, its_token
        assert token is not None
        assert its_token == token, "a run has one token from its start to its end"
        done = step
    assert may_be_cut or done is HistoryStep.STOP_RETURNED
    return runs


FOLLOWS: Mapping[HistoryStep, set[HistoryStep]] = {
    HistoryStep.STOP_RETURNED: {HistoryStep.START_ENTERED},
    HistoryStep.START_ENTERED: {
        HistoryStep.START_RETURNED,
        HistoryStep.STOP_ENTERED,
        HistoryStep.STOP_RETURNED,
    },
    HistoryStep.START_RETURNED: {HistoryStep.STOP_ENTERED, HistoryStep.STOP_RETURNED},
    HistoryStep.STOP_ENTERED: {HistoryStep.STOP_RETURNED},
}


def test_a_history_that_is_not_whole_is_seen() -> None:
    """The checks above can fail."""
    with pytest.raises(AssertionError):
        check_runs([(HistoryStep.START_ENTERED, 1), (HistoryStep.STOP_RETURNED, 2)], may_be_cut=True)
    with pytest.raises(AssertionError):
        check_runs([(HistoryStep.STOP_ENTERED, 1)], may_be_cut=True)
    with pytest.raises(AssertionError):
        check_runs([(HistoryStep.START_ENTERED, 1)], may_be_cut=False)
    with pytest.raises(AssertionError):
        check_apart([(1.0, 3.0, "p1", 5), (2.0, 4.0, "p2", 6)])
    with pytest.raises(AssertionError):
        check_words(Protocol.NELI, Event(NeliKind.INDUCED, "p", detail={"unknown": 1}))
    assert check_words(Protocol.SHIVA, Event(ShivaKind.PROCESS_EXITED, "p")) is HistoryStep.STOP_RETURNED
