"""Golden scenarios of Skuld: what is done to a queue, and the story that must come of it, as text files.

What claims is the product's index of an owner, what writes is the product's batches, and workers run the
product's decisions. The first line says how many partitions there are, and names the processes that may own
some; ``index`` instead says that the engine hands out claims itself.

``python tests/simulation/test_tasks_scenarios.py`` writes the stories anew, to be read before they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.claims import Claimed
from rebalanser.core.tasks.model import AfterFailure, Head, Stored, Task, TaskId, TaskState, Update
from rebalanser.core.tasks.rules import Refused
from rebalanser.core.tasks.store import Enqueue
from rebalanser.core.tasks.worker import Try
from rebalanser.core.tasks.writes import PendingMove
from rebalanser.errors import RebalanserError
from simulation.group import Trace
from simulation.kernel.stories import Words, files_in, play, read, write_anew
from simulation.tasks import Fault, Scenario, World
from simulation.tasks.executing import PoolClaim, PoolWorker
from simulation.tasks.network import Network
from simulation.tasks.owning import QUEUE, OwnerProcess, Tenancy
from simulation.tasks.process import Process, Script, Wish
from simulation.tasks.scenario import MAX_CONTENT_BYTES
from simulation.tasks.writing import Writer

FOLDER = Path(__file__).with_name("tasks_scenarios")
_QUIET = Scenario(
    partitions=1,
    hosts=1,
    owners=0,
    workers=0,
    producers=0,
    tasks=0,
    faults=(Fault.PAUSE_QUEUE,),
    request_fault_ratio=0.0,
    strikes_per_s=1.0,
    dependent_ratio=0.0,
    is_collecting=False,
)
_FAULTS = {"full": Fault.FULL, "read-only": Fault.READ_ONLY, "locked": Fault.LOCKED}


class Quiet(World):
    """A world in which nothing happens by chance."""

    def assign(self, partition: int, *, is_told: bool) -> None:
        """Leave partitions to the script."""


class SlowNetwork(Network):
    """A network on which some processes wait for each answer."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.slow_s: dict[str, float] = {}

    def request(self, process: Process, serve: Callable[[], Any]) -> Wish:
        """Have something done at the engine; the answer is late."""
        wish, slow_s = super().request(process, serve), self.slow_s.get(process.name, 0.0)
        return lambda resume: wish(lambda answer: self.world.after(slow_s, lambda: resume(answer)))


class ToldWorker(PoolWorker):
    """A worker whose bodies take as long as the script says, and which tells what it does."""

    def __init__(self, stage: Stage, name: str, concurrency: int) -> None:
        self._stage = stage
        super().__init__(stage.world, name, stage.world.hosts[0], concurrency)

    def begins(self, held: Try[PoolClaim]) -> bool:
        """Begin a body, unless its claim is over."""
        begins = super().begins(held)
        task = self._stage.name_of(held.head.id)
        self._stage.tell(f"{self.name}: begins {task}" if begins else f"{self.name}: does not begin {task}")
        return begins

    def body_s(self, task: TaskId) -> float:
        """Seconds that a body takes."""
        return self._stage.body_s[self._stage.name_of(task)]

    def finish(self, held: Try[PoolClaim]) -> None:
        """Complete it."""
        self._stage.tell(f"{self.name}: ends {self._stage.name_of(held.head.id)}")
        held.claim.complete(b"done")

    def give_back(self, tries: Sequence[Try[PoolClaim]]) -> None:
        """Give back what has not begun."""
        for each in tries:
            self._stage.tell(f"{self.name}: gives back {self._stage.name_of(each.head.id)}")
        super().give_back(tries)

    def kill(self) -> None:
        """End it."""
        self._stage.tell(f"{self.name}: is gone")
        super().kill()


class Stage:
    """A queue with its actors by their names; what becomes of a task is told."""

    def __init__(self, first: str, tell: Callable[[str], None]) -> None:
        partitions, *owners = first.split()
        self.tell = tell
        has_index = partitions == "index"
        scenario = replace(_QUIET, partitions=1 if has_index else int(partitions), has_index=has_index)
        self.world = Quiet(scenario, Random(3), Trace(None))
        self.network = self.world.network = SlowNetwork(self.world)
        host = self.world.hosts[0]
        host.rate, host.origin_s, host.skew_s = 1.0, 0.0, 0.0
        self.owners = {name: OwnerProcess(self.world, name, host) for name in owners}
        self.tenancies: dict[int, Tenancy] = {}
        self.bodies = Process(self.world, "worker", host)
        self.writer = Writer(self.bodies)
        self.workers: dict[str, ToldWorker] = {}
        self.body_s: dict[str, float] = {}
        """Seconds that the body of each task takes."""
        self.ids: dict[str, TaskId] = {}
        self.claims: dict[str, Claimed] = {}
        self._told: dict[str, str] = {}
        self.world.engine.followers.append(self._follow)

    def _follow(self, stored: Stored) -> None:
        name = self.name_of(stored.head.id)
        claim = stored.state.claim
        number = "" if claim is None else f", claim {claim.number} with {claim.updates} updates"
        told = f"{stored.state.status.value}{number}"
        if self._told.get(name) != told:
            self.tell(f"{name}: {told}")
        self._told[name] = told

    def name_of(self, task: TaskId) -> str:
        """What a task is called."""
        return next(name for name, each in self.ids.items() if each == task)

    def work(self, name: str, concurrency: str) -> None:
        """A worker starts, which runs so many bodies at once."""
        self.workers[name] = ToldWorker(self, name, int(concurrency))
        self.wait("0.5")

    def slow(self, name: str, seconds: str) -> None:
        """A worker waits for each answer of the store, from now on."""
        self.network.slow_s[name] = float(seconds)

    def pause(self, seconds: str) -> None:
        """An operator pauses the queue, and resumes it later."""
        self.world.operator.pause(float(seconds))

    def own(self, owner: str, partition: str, told: str = "told") -> None:
        """The group gives a partition to an owner; the one before is told, or is not."""
        number = int(partition)
        before = self.tenancies.get(number)
        if before is not None and told == "told":
            before.end()
        token = 1 + max((each.token for each in self.tenancies.values()), default=0)
        self.tenancies[number] = Tenancy(self.owners[owner], number, token)
        self.wait("0.5")

    def enqueue(self, name: str, *words: str) -> None:
        """Make a task: ``partition=1 priority=5 after=a retries=0 takes=0.5``, and ``wait=0.1`` seconds."""
        given = dict(word.split("=") for word in words if "=" in word)
        self.ids[name] = f"{len(self.ids) + 1:040x}"
        head = Head(
            self.ids[name],
            QUEUE,
            "plain",
            priority=int(given.get("priority", 0)),
            after=tuple(self.ids[each] for each in given["after"].split(",")) if "after" in given else (),
            retries=int(given.get("retries", 3)),
            after_failure=AfterFailure(given.get("after_failure", "wait")),
        )
        enqueue = Enqueue(Task(head, name.encode()), int(given.get("partition", 0)), TaskState())
        self.body_s[name] = float(given.get("takes", 0.01))
        self.world.network.write(self.bodies, enqueue)(lambda _: None)
        self.wait(given.get("wait", "0.1"))

    def ask(self, owner: str, worker: str) -> None:
        """A worker asks an owner for a claim."""

        def reply(claimed: Claimed) -> None:
            name = self.name_of(claimed.stored.head.id)
            self.claims[worker] = claimed
            self.tell(f"{worker}: has {name}")

        self.owners[owner].ask(worker, reply)
        self.wait("0.4")
        if worker not in self.claims:
            self.tell(f"{worker}: has nothing yet")

    def end(self, worker: str, how: str) -> None:
        """A body ends its claim: ``complete``, ``fail`` or ``release``; it is kept until it is written."""
        claimed = self.claims.pop(worker)
        held, stored = claimed.held, claimed.stored
        decide = {
            "complete": lambda found: rules.complete(found.state, held, b"done"),
            "complete-large": lambda found: rules.complete(found.state, held, b"x" * (MAX_CONTENT_BYTES + 1)),
            "fail": lambda found: rules.fail(found.head, found.state, held, "failed", 0.0),
            "release": lambda found: rules.release(found.state, held),
        }[how]
        self._write(worker, how, PendingMove(stored, decide, lasting=True), claimed)

    def update(self, worker: str) -> None:
        """A body adds to its claim's log."""
        claimed = self.claims[worker]
        claim = claimed.stored.state.claim
        assert claim is not None
        content, sequence = b"update", claim.updates
        ask = PendingMove(
            claimed.stored,
            lambda found: rules.update(found.state, claimed.held, sequence, content, None),
            update=Update(claimed.held.number, sequence, content),
        )
        self._write(worker, "update", ask, claimed)

    def _write(self, worker: str, what: str, ask: PendingMove, claimed: Claimed) -> None:
        self.bodies.spawn(self._written(worker, what, ask, claimed))
        self.wait("0.1")

    def _written(self, worker: str, what: str, ask: PendingMove, claimed: Claimed) -> Script:
        try:
            settled: Any = yield from self.writer.written(ask, claimed.held)
        except RebalanserError as error:
            self.tell(f"{worker}: {what} raises {type(error).__name__}")
            return
        if isinstance(settled, Refused):
            self.tell(f"{worker}: {what} is refused, {settled.reason.value}")
        elif worker in self.claims:
            self.claims[worker] = replace(claimed, stored=settled)

    def store(self, state: str, seconds: str) -> None:
        """The store takes no writes for some time, or is away, and says why."""
        until = self.world.now + float(seconds)
        if state == "away":
            self.world.network.engine_away_until = until
        else:
            self.world.network.refuse(_FAULTS[state], until)

    def wait(self, seconds: str) -> None:
        """Let time pass."""
        self.world.scheduler.run_until(self.world.now + float(seconds))

    def cancel(self, name: str, wait_s: str = "0.2") -> None:
        """An operator wants a task no more."""
        self.world.operator.cancel(self.ids[name])
        self.wait(wait_s)

    def words(self) -> Words:
        """What scripts are written in."""
        return {
            "own": self.own,
            "enqueue": self.enqueue,
            "ask": self.ask,
            "end": self.end,
            "update": self.update,
            "store": self.store,
            "wait": self.wait,
            "cancel": self.cancel,
            "work": self.work,
            "slow": self.slow,
            "pause": self.pause,
            "leave": lambda name: self.workers[name].stop(),
            "stop-process": lambda name, seconds: setattr(
                self.workers[name], "resumes_at", self.world.now + float(seconds)
            ),
            "cut-off": lambda owner, seconds: setattr(
                self.owners[owner], "cut_until", self.world.now + float(seconds)
            ),
        }


def begin(first: str, tell: Callable[[str], None]) -> Words:
    """A queue and its owners."""
    return Stage(first, tell).words()


@pytest.mark.parametrize("path", files_in(FOLDER), ids=lambda path: path.stem)
@pytest.mark.rule("SK-5", "SK-6", "SK-8", "SK-10", "SK-13", "SK-15", "SK-17", "SK-19", "SK-20", "SK-23")
def test_the_story_is_as_written(path: Path) -> None:
    script, story = read(path)
    assert play(script, begin) == story


def test_there_are_stories() -> None:
    assert len(files_in(FOLDER)) >= 8


if __name__ == "__main__":
    write_anew(FOLDER, begin)
