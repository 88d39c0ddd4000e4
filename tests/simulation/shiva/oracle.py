"""The judge: it knows true time and what really runs, and believes no machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from rebalanser.core.allocation import Capacity, Requests
from rebalanser.core.shiva.records import (
    AssignmentDocument,
    DocumentChange,
    KeptCommand,
    ScaleCommand,
    StartCommand,
    StopCommand,
    WorkerCommand,
)
from rebalanser.core.shiva.states import TO_RUN
from rebalanser.core.shiva.types import ApplicationState, Cordon, Mode
from simulation.kernel.reports import Violation
from simulation.shiva.events import part_key
from simulation.shiva.faults import Fault
from simulation.shiva.scenario import NEVER_S

if TYPE_CHECKING:
    from rebalanser.core.shiva.messages import StartProcess, StoreFiles
    from rebalanser.core.shiva.types import ApplicationEntry, ApplicationId, Archive, CommandId, Epoch
    from simulation.kernel.trace import Trace
    from simulation.shiva.host import Machine
    from simulation.shiva.leading import LeaderProcess
    from simulation.shiva.log import Broker, Part, Record
    from simulation.shiva.running import ApplicationProcess, Behaviour
    from simulation.shiva.scenario import Scenario
    from simulation.shiva.working import WorkerProcess

_NAMED = frozenset({ApplicationState.ASSIGNED, ApplicationState.RUNNING})
_DIMENSIONS = ("cpu_milli", "memory_mb")
_EVEN = 0.8
"""Part of a worker's load from which on another one's counts as even."""


class OracleWorld(Protocol):
    """The world, as the oracle sees it."""

    scenario: Scenario
    trace: Trace
    broker: Broker
    behaviours: dict[CommandId, Behaviour]
    hits: Counter[Fault]
    faulty_applications: bool

    @property
    def hosts(self) -> Sequence[Machine[LeaderProcess, WorkerProcess, ApplicationProcess]]:
        """The machines."""
        ...

    @property
    def workers(self) -> Iterator[WorkerProcess]:
        """The workers that live."""
        ...

    @property
    def now(self) -> float:
        """True time in seconds."""
        ...

    @property
    def deadline_s(self) -> float:
        """Seconds for which a pong lets a worker run what is exclusive."""
        ...

    def status(self) -> AssignmentDocument | None:
        """Return the state of the cluster as a reader of ASSIGNEMENT knows it."""
        ...

    def say(self, where: str, sentence: str) -> None:
        """Write a line of the trace."""


class Oracle:
    """Watches a ``World`` and raises ``Violation``."""

    def __init__(self, world: OracleWorld) -> None:
        self._world = world
        self.commands: dict[ApplicationId, StartCommand | StopCommand] = {}
        """The last command of each application, in the order of the log."""
        self._history: dict[ApplicationId, list[tuple[int, StartCommand | StopCommand]]] = defaultdict(list)
        """All commands of an application with their offsets."""
        self._dropped: dict[tuple[ApplicationId, str], bool] = {}
        """Archives that the leader drops; True once their tombstones stand, until they are written again."""
        self._cordons: dict[str, Cordon] = {}
        self._to_answer = -1
        """The offset of the last command whose client waits for a document that has read it."""
        self.running: dict[ApplicationId, list[ApplicationProcess]] = defaultdict(list)
        self.refusable: set[CommandId] = set()
        """Start commands that a leader may refuse."""
        self.forged: set[Epoch] = set()
        """Of documents that no leader published."""
        self.starts = 0
        self.terms = 0
        self.documents = 0
        self.changes = 0
        self.moves = 0
        self.excused = 0
        self.side_by_side = 0
        self._started: dict[CommandId, StartCommand] = {}
        self._replicas: dict[CommandId, int] = {}
        """Number of replicas that was commanded last for a start command."""
        self._workers: dict[ApplicationId, str] = {}
        """Worker of each replica that has one in the last document."""
        self._ran_on: dict[ApplicationId, str] = {}
        self._epochs: set[Epoch] = set()
        self._named: dict[Epoch, set[tuple[str | None, CommandId]]] = {}
        """Who is named for which command, by the epoch of the document."""
        self._consumed = -1

    def commanded(self, command: StartCommand | StopCommand, offset: int) -> None:
        """A command of a client stands on COMMAND."""
        self.commands[command.application] = command
        self._history[command.application].append((offset, command))
        if isinstance(command, StartCommand):
            self._started[command.command] = command
            self._replicas[command.command] = command.replicas
            files = (command.application, command.archive.sha256)
            if files in self._dropped:
                self.refusable.add(command.command)

    def scaled(self, scale: ScaleCommand) -> None:
        """A command about a number of replicas stands on COMMAND."""
        command = self.commands.get(scale.application)
        if isinstance(command, StartCommand):
            self._replicas[command.command] = scale.replicas

    def drops_archives(self, archives: Iterable[tuple[ApplicationId, Archive]], read_to: int) -> None:
        """A leader that has read COMMAND to an offset drops archives: a start behind it comes too late."""
        for application, archive in archives:
            self._dropped[application, archive.sha256] = False
            for offset, command in self._history[application]:
                if (
                    offset > read_to
                    and isinstance(command, StartCommand)
                    and command.archive.sha256 == archive.sha256
                ):
                    self.refusable.add(command.command)

    def archives_dropped(self, archives: Iterable[tuple[ApplicationId, Archive]]) -> None:
        """The tombstones of archives stand on COMMAND: what is written from now on stays."""
        self._dropped |= {(application, archive.sha256): True for application, archive in archives}

    def part_written(self, part: Part) -> None:
        """A part of an archive of a client stands on COMMAND."""
        files = (part.application, part.sha256)
        if self._dropped.get(files):
            del self._dropped[files]

    def _effective(self, command: StartCommand | StopCommand) -> StartCommand | StopCommand:
        """The last command of an application that no leader had a reason to refuse."""
        known = (each for _, each in reversed(self._history[command.application]))
        return next((each for each in known if each.command not in self.refusable), command)

    def awaited(self, offset: int) -> None:
        """A client waits for the effect of its command at this offset, which may change nothing."""
        self._to_answer = offset

    def cordoned(self, command: WorkerCommand) -> None:
        """A command about a worker stands on COMMAND."""
        if command.cordon is None:
            self._cordons.pop(command.worker, None)
        else:
            self._cordons[command.worker] = command.cordon

    def took_over(self, leader: LeaderProcess) -> None:
        """A leader has begun its term."""
        self.terms += 1
        self._dropped = {files: stands for files, stands in self._dropped.items() if stands}
        if self._world.trace:
            leader.say(f"took over with term {leader.term}")

    def committed(self, leader: LeaderProcess, records: list[Record]) -> None:
        """A transaction can be read."""
        for record in records:
            if isinstance(record.value, AssignmentDocument | DocumentChange):
                self._judge_epoch(leader, record.value.epoch)
                document = self._world.status()
                if document is None or document.epoch != record.value.epoch:
                    raise Violation("SH-24", f"no reader can put {record.value.epoch} together")
                self.changes += isinstance(record.value, DocumentChange)
                self._document(leader, document)
                return

    def _judge_epoch(self, leader: LeaderProcess, epoch: Epoch) -> None:
        if epoch in self._epochs:
            raise Violation("SH-7", f"{leader.name} published epoch {epoch} a second time")
        if any(epoch < earlier for earlier in self._epochs):
            raise Violation("SH-7", f"{leader.name} published epoch {epoch} after a later one")
        self._epochs.add(epoch)

    def _document(self, leader: LeaderProcess, document: AssignmentDocument) -> None:
        self.documents += 1
        if document.consumed < self._consumed:
            raise Violation(
                "SH-9",
                f"{leader.name} published before it had read COMMAND: as far as offset {document.consumed}, "
                f"and a document before it as far as {self._consumed}",
            )
        self._consumed = document.consumed
        entries = document.applications.values()
        self._named[document.epoch] = {(entry.worker, entry.command) for entry in entries}
        for host in self._world.hosts:
            worker = host.worker
            known = document.workers.get(host.plan.worker or "")
            if worker is None or not worker.alive:
                continue
            host.unknown.end(self._world.now)
            if known is not None and known.incarnation == worker.incarnation:
                worker.was_known = True
            elif worker.was_known:
                host.unknown.begin(self._world.now)
        for application, entry in document.applications.items():
            if entry.worker is not None and entry.leaving is not None:
                raise Violation("SH-13", f"{application} names {entry.worker} beside {entry.leaving.worker}")
        self._judge_replicas(document)
        for name, load in self._loads(document).items():
            if not _fits(load, document.workers[name].capacity):
                raise Violation("SH-27", f"{name} is given {load}, and has {document.workers[name].capacity}")

    def _judge_replicas(self, document: AssignmentDocument) -> None:
        """No two replicas of an application are on one worker, also while one still leaves (SH-28)."""
        named: set[tuple[ApplicationId, str]] = set()
        leaving = {
            (application.whole, entry.leaving.worker): application
            for application, entry in document.applications.items()
            if entry.leaving is not None
        }
        before, self._workers = self._workers, {}
        for application, entry in document.applications.items():
            if entry.worker is None:
                continue
            self._workers[application] = entry.worker
            place = application.whole, entry.worker
            if place in named:
                raise Violation("SH-28", f"{entry.worker} is named for two replicas of {application.whole}")
            named.add(place)
            if place in leaving and before.get(application) != entry.worker:
                raise Violation(
                    "SH-28", f"{application} is given to {entry.worker} before {leaving[place]} left"
                )

    def _loads(self, document: AssignmentDocument) -> dict[str, tuple[int, ...]]:
        """Amounts that the applications of each known worker in a document request, as commanded."""
        loads: dict[str, tuple[int, ...]] = dict.fromkeys(document.workers, (0, 0))
        for entry in document.applications.values():
            if entry.worker in loads:
                loads[entry.worker] = _plus(loads[entry.worker], self._requests(entry.command))
        return loads

    def _requests(self, command: CommandId) -> Requests:
        return self._started[command].requests or Requests()

    def asked_to_start(self, worker: WorkerProcess, start: StartProcess) -> None:
        """A worker wants a process."""
        if (start.application.whole, start.command) not in worker.stored:
            raise Violation("SH-6", f"{worker.name} starts {start.application} without its files")
        if self._started[start.command].mode is Mode.EXCLUSIVE and start.deadline is None:
            raise Violation("SH-14", f"{worker.name} starts {start.application}, exclusive, for ever")

    def asked_to_store(self, worker: WorkerProcess, store: StoreFiles) -> None:
        """A worker wants files."""
        seen = worker.machine.seen
        if seen is None or (worker.id, store.command) not in self._named.get(seen, ()):
            raise Violation("SH-4", f"{worker.name} stores {store.application} and is not named for it")

    def dropped(self, worker: WorkerProcess, application: ApplicationId, gone: set[str]) -> None:
        """A worker has removed the unpacked archives of these sha256."""
        for process in worker.host.processes:
            if (
                process.application.whole == application
                and self._started[process.command].archive.sha256 in gone
            ):
                raise Violation("SH-5", f"{worker.name} drops the files of {application} while it runs")

    def acted(self, worker: WorkerProcess) -> None:
        """A worker has taken in an event."""
        seen = worker.machine.seen
        if seen is None or seen is worker.highest:
            return
        if worker.highest is not None and seen < worker.highest:
            raise Violation("SH-7", f"{worker.name} acts on {seen} after {worker.highest}")
        if seen in self.forged:
            raise Violation("SH-7", f"{worker.name} acts on {seen}, which a deposed leader wrote")
        worker.highest = seen

    def started(self, process: ApplicationProcess) -> None:
        """A process begins to exist."""
        self.starts += 1
        world, application = self._world, process.application
        if world.trace:
            world.say(process.host.plan.name, f"RUNS {application} ({process.command}, {_mode(process)})")
        for other in self.running[application]:
            self._judge_overlap(other, process)
        for beside in process.host.processes:
            if beside.application.whole == application.whole and beside.application != application:
                raise Violation(
                    "SH-28", f"{process.host.plan.name} starts {application} beside {beside.application}"
                )
        self._judge_room(process)
        self.running[application].append(process)
        before = self._ran_on.get(application)
        if before is not None and before != process.host.plan.name:
            self.moves += 1
        self._ran_on[application] = process.host.plan.name

    def _judge_room(self, process: ApplicationProcess) -> None:
        """Check that all processes of a worker fit its capacity, unless the host was cut off (SH-27)."""
        host, since = process.host, self._world.now - 3 * self._world.deadline_s
        if host.disturbed.ever(since) or host.unknown.ever(since) or not self._requests(process.command):
            return
        total: tuple[int, ...] = (0, 0)
        for each in host.processes:
            total = _plus(total, self._requests(each.command))
        if not _fits(total, process.worker.capacity):
            raise Violation(
                "SH-27",
                f"{host.plan.name} starts {process.application}, and then runs what takes {total} of "
                f"{process.worker.capacity}",
            )

    def _judge_overlap(self, older: ApplicationProcess, newer: ApplicationProcess) -> None:
        """What is exclusive is alone, except for what an earlier command let run as available (SH-14)."""
        world = self._world
        since = world.now - 3 * world.deadline_s
        where = f"{older.host.plan.name} ({_mode(older)}) and {newer.host.plan.name} ({_mode(newer)})"
        if any(host.off_clock.ever(since) for host in world.hosts):
            self.excused += 1
        elif older.exclusive and (newer.exclusive or newer.token > older.token):
            raise Violation("SH-14", f"{newer.application} runs twice: on {where}")
        elif older.host is newer.host or not self._may_run_beside(older, newer, since):
            raise Violation("SH-13", f"{newer.application} runs twice, and nobody was cut off: on {where}")
        else:
            self.side_by_side += 1

    def _may_run_beside(self, older: ApplicationProcess, newer: ApplicationProcess, since: float) -> bool:
        return any(
            spans.ever(since)
            for process in (older, newer)
            for spans in (process.host.disturbed, process.host.unknown)
        )

    def ended(self, process: ApplicationProcess, code: int) -> None:
        """A process is no more."""
        world = self._world
        if world.trace:
            world.say(process.host.plan.name, f"ENDED {process.application} ({process.command}, code {code})")
        self.running[process.application].remove(process)

    def unsettled(self) -> str | None:
        """What is not yet as the last document, the last commands and the rules have it."""
        document = self._world.status()
        if document is None:
            return "no document was ever published" if self.commands else None
        return (
            self._workers_unsettled(document)
            or self._commands_unsettled(document)
            or self._processes_unsettled(document)
            or self._loads_unsettled(document)
            or self._cordons_unsettled(document)
            or self._unanswered(document)
            or self._files_lost(document)
            or self._budget_exceeded(document)
        )

    def _workers_unsettled(self, document: AssignmentDocument) -> str | None:
        present = {(w.id, w.incarnation) for w in self._world.workers}
        known = {(worker, entry.incarnation) for worker, entry in document.workers.items()}
        if not known <= present:
            return f"SH-8: the document knows {sorted(map(str, known - present))}"
        for worker in self._world.workers:
            known_capacity = document.workers[worker.id].capacity if worker.id in document.workers else None
            if worker.id in document.workers and known_capacity != worker.capacity:
                return f"SH-27: {worker.id} has {worker.capacity}, and the document says {known_capacity}"
        missing = {worker for worker, _ in present} - set(document.workers)
        return f"SH-8: the document does not know {sorted(missing)}" if missing else None

    def _commands_unsettled(self, document: AssignmentDocument) -> str | None:
        replicas: dict[ApplicationId, list[ApplicationId]] = defaultdict(list)
        for application in document.applications:
            replicas[application.whole].append(application)
        for application, command in self.commands.items():
            if isinstance(command, StopCommand):
                for there in replicas[application]:
                    return f"SH-5: {there} was stopped, and is {document.applications[there].state}"
            else:
                wrong = self._replicas_unsettled(document, command, replicas[application])
                if wrong:
                    return wrong
        unknown = set(replicas) - set(self.commands)
        return f"SH-11: nobody commanded {sorted(map(str, unknown))}" if unknown else None

    def _replicas_unsettled(
        self, document: AssignmentDocument, command: StartCommand, there: list[ApplicationId]
    ) -> str | None:
        application, first = command.application, document.applications.get(command.application)
        wrong = self._start_unsettled(document, command, application, first)
        if wrong or first is None or first.state is ApplicationState.REFUSED:
            return wrong
        number = self._replicas[first.command]
        entries = [document.applications[each] for each in there]
        if {entry.state for entry in entries} == {ApplicationState.FINISHED}:
            number = min(number, first.replicas)  # more may be refused: its archive is dropped, or too large
        if first.command == command.command and sorted(there) != [
            application.numbered(n) for n in range(number)
        ]:
            return f"SH-28: {application} is to have {number} replicas, and has {sorted(map(str, there))}"
        for each in there:
            wrong = wrong or self._start_unsettled(document, command, each, document.applications[each])
        return wrong or self._too_few_placed(document, there)

    def _too_few_placed(self, document: AssignmentDocument, there: list[ApplicationId]) -> str | None:
        """Check that as many replicas have a worker as can have one of their own (SH-28)."""
        entries = {each: document.applications[each] for each in there}
        if any(self._requests(entry.command) or entry.failed_on for entry in entries.values()):
            return None
        able = {
            each: [
                worker
                for worker, known in document.workers.items()
                if entry.tags <= known.tags and (worker not in document.cordons or worker == entry.worker)
            ]
            for each, entry in entries.items()
            if entry.state in TO_RUN
        }
        on: dict[str, ApplicationId] = {}

        def finds_place(each: ApplicationId, tried: set[str]) -> bool:
            for worker in able[each]:
                if worker not in tried:
                    tried.add(worker)
                    if worker not in on or finds_place(on[worker], tried):
                        on[worker] = each
                        return True
            return False

        most = sum(finds_place(each, set()) for each in sorted(able))
        placed = sum(entry.worker is not None for entry in entries.values())
        return f"SH-28: {placed} of {there} are placed, and {most} could be" if placed < most else None

    def _start_unsettled(
        self,
        document: AssignmentDocument,
        command: StartCommand,
        application: ApplicationId,
        entry: ApplicationEntry | None,
    ) -> str | None:
        refusable = command.command in self.refusable or not self._has_parts(
            application.whole, command.archive
        )
        if entry is None:
            return f"SH-4: {application} was started, and is not in the document"
        if entry.command != command.command:
            effective = self._effective(command)
            compacted = self._world.hits[Fault.COMPACTION] > 0
            if not refusable or (entry.command != effective.command and not compacted):
                return f"SH-2: {application} is of {entry.command}, not {effective.command}"
            command = self._started[entry.command]
        if entry.leaving is not None:
            return f"SH-13: {application} still waits for {entry.leaving.worker}"
        if entry.failed_on and self._world.scenario.options.retry_max_s < NEVER_S:
            return f"SH-17: {application} has not been tried again on {sorted(entry.failed_on)}"
        able = {w for w, known in document.workers.items() if command.tags <= known.tags}
        taken = self._taken(document, application)
        left = able - entry.failed_on.keys() - taken
        behaviour = self._world.behaviours[entry.command]
        allowed = {
            ApplicationState.RUNNING: behaviour.exits_after_s is None and not behaviour.unusable,
            ApplicationState.REFUSED: refusable,
            ApplicationState.FINISHED: behaviour.ends,
            ApplicationState.WAITING: not able
            or (taken and not left)
            or _closed(document, left)
            or self._is_full(document, entry, left),
            ApplicationState.FAILED: self._has_failed(entry, able, taken),
        }
        if not allowed.get(entry.state, False):
            return (
                f"SH-4: {application} is {entry.state} ({entry.reason}), workers {sorted(able)} can take it"
            )
        if entry.state in {ApplicationState.WAITING, ApplicationState.FAILED} and not entry.reason:
            return f"SH-11: no reason is given why {application} is {entry.state}"
        return None

    def _taken(self, document: AssignmentDocument, application: ApplicationId) -> set[str]:
        """Workers that have another replica of the application (SH-28)."""
        return {
            entry.worker
            for other, entry in document.applications.items()
            if other.whole == application.whole and other != application and entry.worker is not None
        }

    def _is_full(self, document: AssignmentDocument, entry: ApplicationEntry, left: set[str]) -> bool:
        """True if none of the workers that are left to it has room, and not all for another reason."""
        loads, requests = self._loads(document), self._requests(entry.command)
        left = left - document.cordons.keys()
        return bool(left) and not any(
            _fits(_plus(loads[worker], requests), document.workers[worker].capacity) for worker in left
        )

    def _has_failed(self, entry: ApplicationEntry, able: set[str], taken: set[str]) -> bool:
        tried_again = self._world.scenario.options.retry_max_s < NEVER_S
        faulty = self._world.faulty_applications and not tried_again
        may_fail = self._world.behaviours[entry.command].fails or faulty
        failed_on = able & entry.failed_on.keys()
        return may_fail and bool(failed_on) and able - taken <= failed_on

    def _processes_unsettled(self, document: AssignmentDocument) -> str | None:
        runs = {
            (str(application), process.host.worker_id, process.command)
            for application, processes in self.running.items()
            for process in processes
        }
        said = {
            (str(application), entry.worker, entry.command)
            for application, entry in document.applications.items()
            if entry.state is ApplicationState.RUNNING
        }
        for application, processes in self.running.items():
            if len(processes) > 1:
                return f"SH-13: {application} runs {len(processes)} times"
        if runs != said:
            only_said, unsaid = sorted(map(str, said - runs)), sorted(map(str, runs - said))
            return f"SH-11: only said to run: {only_said}, not said to run: {unsaid}"
        return None

    def _loads_unsettled(self, document: AssignmentDocument) -> str | None:
        loads = dict.fromkeys(document.workers, 0)
        for entry in document.applications.values():
            if entry.worker is not None and entry.state in _NAMED and not self._requests(entry.command):
                loads[entry.worker] += 1
        weights, full = self._loads(document), self._relative_load(document)
        for application, entry in document.applications.items():
            if entry.worker is None or entry.state not in _NAMED:
                continue
            requests, here = self._requests(entry.command), entry.worker
            for other, known in document.workers.items():
                closed = entry.failed_on.keys() | document.cordons.keys() | self._taken(document, application)
                if other in closed or not entry.tags <= known.tags:
                    continue
                if requests:
                    grown, less = _plus(weights[other], requests), _plus(weights[here], requests, -1)
                    before, after = full(here, weights[here]), full(other, grown)
                    much = full(other, weights[other]) < _EVEN * before
                    if much and _fits(grown, known.capacity) and max(after, full(here, less)) < before:
                        return f"SH-27: {application} is on {here} of {weights}, and {other} could have it"
                elif loads[entry.worker] - loads[other] > 1:
                    return f"SH-12: {application} is on {entry.worker} of {loads}, and {other} could have it"
        return None

    def _relative_load(self, document: AssignmentDocument) -> Callable[[str, tuple[int, ...]], float]:
        """The relative load of a worker; without a limit, that of the largest limit or of all requests."""
        cordons = document.cordons
        capacities = {
            name: known.capacity or Capacity()
            for name, known in document.workers.items()
            if cordons.get(name) is not Cordon.DRAINED
        }
        wanted = [
            self._requests(entry.command)
            for entry in document.applications.values()
            if entry.state in TO_RUN
            and any(
                entry.tags <= document.workers[name].tags
                and name not in entry.failed_on
                and (name not in cordons or name == entry.worker)
                for name in capacities
            )
        ]
        limits = {
            name: [getattr(c, dimension) for dimension in _DIMENSIONS] for name, c in capacities.items()
        }
        most = [
            max((each[n] for each in limits.values() if each[n] is not None), default=0)
            or sum(getattr(each, dimension) for each in wanted)
            or 1
            for n, dimension in enumerate(_DIMENSIONS)
        ]

        def fullness(worker: str, load: tuple[int, ...]) -> float:
            return max(a / (own or other) for a, own, other in zip(load, limits[worker], most, strict=True))

        return fullness

    def _cordons_unsettled(self, document: AssignmentDocument) -> str | None:
        if document.cordons != self._cordons:
            return f"SH-26: cordoned are {dict(document.cordons)}, and commanded was {self._cordons}"
        for application, entry in document.applications.items():
            if entry.worker and document.cordons.get(entry.worker) is Cordon.DRAINED:
                return f"SH-26: {application} is on {entry.worker}, which is drained"
            if entry.kept_for is not None:
                return f"SH-26: {application} is kept for {entry.kept_for}"
        return None

    def _unanswered(self, document: AssignmentDocument) -> str | None:
        if document.consumed < self._to_answer:
            return f"SH-18: no document has read the command at {self._to_answer}, for which a client waits"
        return None

    def _files_lost(self, document: AssignmentDocument) -> str | None:
        """Whether a worker that joins now could not get what is to run (SH-15)."""
        starts = set()
        for record in self._world.broker.command.read(0)[0]:
            value = record.value.start if isinstance(record.value, KeptCommand) else record.value
            if isinstance(value, StartCommand):
                starts.add(value.command)
        for application, entry in document.applications.items():
            if entry.state not in _NAMED:
                continue
            if entry.command not in starts or not self._has_parts(application.whole, entry.archive):
                return f"SH-15: COMMAND has lost the files or the start command of {application}"
        return None

    def _has_parts(self, application: ApplicationId, archive: Archive) -> bool:
        """Whether COMMAND has all parts of an archive; a tombstone drops what stands before it."""
        keys = {part_key(application, archive.sha256, number) for number in range(archive.parts)}
        last = {
            record.key: record.value for record in self._world.broker.command.read(0)[0] if record.key in keys
        }
        return all(last.get(key) is not None for key in keys)

    def _budget_exceeded(self, document: AssignmentDocument) -> str | None:
        budget = self._world.scenario.options.budget_bytes
        sizes = {
            application.whole: entry.archive.size_bytes
            for application, entry in document.applications.items()
            if entry.state in _NAMED
        }
        needed = sum(sizes.values())
        if needed > budget:
            return f"SH-15: {needed} bytes are to run, and the budget is {budget} bytes"
        return None


def _closed(document: AssignmentDocument, workers: set[str]) -> bool:
    """True if there are such workers, and all are cordoned."""
    return bool(workers) and workers <= document.cordons.keys()


def _plus(load: tuple[int, ...], requests: Requests, sign: int = 1) -> tuple[int, ...]:
    return tuple(
        amount + sign * getattr(requests, name) for amount, name in zip(load, _DIMENSIONS, strict=True)
    )


def _fits(load: tuple[int, ...], capacity: Capacity | None) -> bool:
    limits = [getattr(capacity or Capacity(), dimension) for dimension in _DIMENSIONS]
    return all(limit is None or amount <= limit for amount, limit in zip(load, limits, strict=True))


def _mode(process: ApplicationProcess) -> str:
    return "exclusive" if process.exclusive else "available"
