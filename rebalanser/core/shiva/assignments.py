"""The applications of a document: the worker of each, who may still run it, and its state."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar

from rebalanser.core.allocation import Placement, RememberedSearch, place
from rebalanser.core.shiva.membership import Members
from rebalanser.core.shiva.records import AssignmentDocument, Pong, RunReport, StartCommand
from rebalanser.core.shiva.safeguards import Safeguards
from rebalanser.core.shiva.states import TO_RUN, check_step
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Cordon,
    Epoch,
    Incarnation,
    Leaving,
    RunState,
    WorkerId,
)

Behind: TypeAlias = tuple[WorkerId, Incarnation]
"""A worker's id and the process behind it."""
MAX_REASON_CHARS: Final = 500
MAX_FAILED_ON: Final = 100
MAX_NAMED: Final = 5
"""Maximum cordoned workers that a reason names."""
MAX_CORDONS: Final = 10_000
"""Maximum workers that are cordoned or drained at the same time."""
_RESTARTING: Final = frozenset({RunState.STARTING, RunState.BACKING_OFF, RunState.STOPPING})
"""States of an application on its worker between two processes."""
KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True)
class _Retry:
    failed_at: float
    due_at: float | None
    count: int = 0
    """Retries in a row so far."""


class Retries:
    """Times at which failed applications are retried: later with each failure in a row (SH-17)."""

    def __init__(self, initial_s: float, max_s: float) -> None:
        self.now = 0.0
        """The present, in monotonic seconds."""
        self._initial_s = initial_s
        self._max_s = max_s
        self._retries: dict[ApplicationId, _Retry] = {}

    @property
    def next_at(self) -> float | None:
        """Time (monotonic seconds) of the next retry; None for none."""
        times = (retry.due_at for retry in self._retries.values())
        return min((at for at in times if at is not None), default=None)

    def failed(self, application: ApplicationId) -> None:
        """Note a failure on a worker; after a long time without one the delay begins anew."""
        known = self._retries.get(application)
        stable = known is None or self.now - known.failed_at > 2 * self._max_s
        count = 0 if known is None or stable else known.count
        self._retries[application] = _Retry(self.now, self.now + self._delay_s(count), count)

    def due(self) -> list[ApplicationId]:
        """Return the applications to retry now, each once."""
        found = []
        for application, retry in list(self._retries.items()):
            if retry.due_at is not None and retry.due_at <= self.now:
                found.append(application)
                retry.due_at = None
                retry.count += 1
            elif retry.due_at is None and self.now - retry.failed_at > 2 * self._max_s:
                del self._retries[application]
        return found

    def forget(self, application: ApplicationId) -> None:
        """Forget an application that is started anew, or removed."""
        self._retries.pop(application, None)

    def note(self, application: ApplicationId) -> str:
        """Return which retry comes when, for people; empty for none."""
        retry = self._retries.get(application)
        if retry is None or retry.due_at is None:
            return ""
        return f"; retry {retry.count + 1} comes {self._delay_s(retry.count):g} s after its last failure"

    def _delay_s(self, count: int) -> float:
        return min(self._max_s, self._initial_s * 2.0 ** min(count, 64))


class AssignmentTable:
    """All applications that a leader knows, indexed so that a pong takes few steps.

    An application with replicas has an entry for each of them (SH-28). All that are to run have the same
    start command, archive and mode.
    """

    def __init__(self, members: Members, guards: Safeguards, retries: Retries) -> None:
        self.entries: dict[ApplicationId, ApplicationEntry] = {}
        self.issued = Epoch(-1, 0)
        """The newest document that may be published."""
        self.next = Epoch(-1, 0)
        """The next document to issue, the first with the changes made now."""
        self.changed = False
        self._members = members
        self._guards = guards
        self._retries = retries
        self._unplaced = True
        self._by_weight = RememberedSearch()
        self._held_up: set[ApplicationId] = set()
        """Applications whose next worker has no room for them until others have left it (SH-27)."""
        self._named: dict[WorkerId, dict[ApplicationId, None]] = {}
        self._left: dict[Behind, dict[ApplicationId, None]] = {}
        self._targets: dict[ApplicationId, WorkerId] = {}
        self._kept: dict[WorkerId, dict[ApplicationId, None]] = {}
        self._away_until: dict[WorkerId, float] = {}
        self.cordons: dict[WorkerId, Cordon] = {}
        """Workers that are cordoned or drained (SH-26)."""
        self._needed_bytes = 0
        self._sizes: dict[ApplicationId, int] = {}
        """Size of the archive of each application of which a replica is to run."""
        self._replicas: dict[ApplicationId, dict[ApplicationId, None]] = {}
        """All replicas of each application."""
        self._needed: dict[ApplicationId, dict[ApplicationId, None]] = {}
        """Those that are to run."""
        self._on: dict[tuple[ApplicationId, WorkerId], dict[ApplicationId, None]] = {}
        """Replicas of each application that each worker is to run, or may still run."""

    def take_over(self, document: AssignmentDocument, kept_until: float) -> None:
        """Go on from a predecessor's document; applications of absent workers wait until ``kept_until``."""
        entries = document.applications
        self.cordons = dict(document.cordons)
        for application, entry in entries.items():
            self._set(application, entry)
            if entry.failed_on:
                self._retries.failed(application)
        for worker in self._kept.keys() - self._members.entries.keys():
            self._away_until[worker] = kept_until
        self.changed = False

    @property
    def waited_for(self) -> list[Behind]:
        """Processes that may still run an application that they are not assigned any more."""
        return list(self._left)

    @property
    def needed_bytes(self) -> int:
        """Bytes on COMMAND of the archives of all applications that are to run."""
        return self._needed_bytes

    def to_run(self) -> Iterator[tuple[ApplicationId, ApplicationEntry]]:
        """Replicas that are to run."""
        return ((app, entry) for app, entry in self.entries.items() if entry.state in TO_RUN)

    def needed(self) -> Iterator[tuple[ApplicationId, ApplicationEntry]]:
        """Applications of which a replica is to run, each with the entry of one."""
        return ((whole, self.entries[next(iter(replicas))]) for whole, replicas in self._needed.items())

    def needing(self, application: ApplicationId) -> ApplicationEntry | None:
        """Return the entry of a replica of an application that is to run; None if none is."""
        replica = next(iter(self._needed.get(application, ())), None)
        return None if replica is None else self.entries[replica]

    def put(self, application: ApplicationId, entry: ApplicationEntry) -> None:
        """Replace an application's entry."""
        before = self.entries.get(application)
        if entry == before:
            return
        check_step(before.state if before else None, entry.state)
        self._set(application, entry)

    def _set(self, application: ApplicationId, entry: ApplicationEntry) -> None:
        self._unindex(application)
        self.entries[application] = entry
        if entry.worker is not None:
            self._named.setdefault(entry.worker, {})[application] = None
        if entry.leaving is not None:
            behind = (entry.leaving.worker, entry.leaving.incarnation)
            self._left.setdefault(behind, {})[application] = None
        if entry.kept_for is not None:
            self._kept.setdefault(entry.kept_for, {})[application] = None
        if entry.state is not ApplicationState.MOVING:
            self._targets.pop(application, None)
        whole = application.whole
        for worker in _workers_of(entry):
            self._on.setdefault((whole, worker), {})[application] = None
        self._replicas.setdefault(whole, {})[application] = None
        if entry.state in TO_RUN:
            self._needed.setdefault(whole, {})[application] = None
            self._count_size(whole, entry.archive.size_bytes)
        elif application in self._needed.get(whole, ()):
            self._no_longer_needed(whole, application)
        self.changed = True

    def _count_size(self, whole: ApplicationId, size_bytes: int) -> None:
        """Count the archive of an application, which its replicas share."""
        self._needed_bytes += size_bytes - self._sizes.get(whole, 0)
        self._sizes[whole] = size_bytes

    def _no_longer_needed(self, whole: ApplicationId, application: ApplicationId) -> None:
        _remove(self._needed, whole, application)
        if whole not in self._needed:
            self._needed_bytes -= self._sizes.pop(whole)

    def _unindex(self, application: ApplicationId) -> None:
        before = self.entries.get(application)
        for worker in _workers_of(before) if before is not None else ():
            _remove(self._on, (application.whole, worker), application)
        if before is not None and before.worker is not None:
            _remove(self._named, before.worker, application)
        if before is not None and before.leaving is not None:
            _remove(self._left, (before.leaving.worker, before.leaving.incarnation), application)
        if before is not None and before.kept_for is not None:
            _remove(self._kept, before.kept_for, application)

    def _drop(self, application: ApplicationId) -> None:
        self._unindex(application)
        check_step(self.entries.pop(application).state, None)
        self._targets.pop(application, None)
        self._retries.forget(application)
        whole = application.whole
        _remove(self._replicas, whole, application)
        if application in self._needed.get(whole, ()):
            self._no_longer_needed(whole, application)
        self.changed = True

    def start(self, start: StartCommand, offset: int, timestamp_ms: int) -> None:
        """Run an application by this command from now on; the workers of an earlier one may keep it."""
        for replica in range(start.replicas):
            self._start(start.application.numbered(replica), start, offset, timestamp_ms)
        self._stop_from(start.application, start.replicas)

    def begins_anew(self, application: ApplicationId, replicas: int) -> bool:
        """True if all of an application has finished, and with this number some of it would run again."""
        present = self._replicas[application]
        return application not in self._needed and any(
            self.entries[each].state is ApplicationState.STOPPING if each in present else True
            for each in map(application.numbered, range(replicas))
        )

    def scale(self, application: ApplicationId, replicas: int) -> None:
        """Run another number of replicas of an application that is to run, or has finished (SH-28).

        Those that go on are left alone: of their entries only the number changes.
        """
        first = self.entries[application]
        start = replace(StartCommand.of(application, first), replicas=replicas)
        for replica in range(replicas):
            each = application.numbered(replica)
            entry = self.entries.get(each)
            if entry is None or entry.state is ApplicationState.STOPPING:
                self._start(each, start, first.offset, first.timestamp_ms)
            else:
                self.put(each, replace(entry, replicas=replicas))
        self._stop_from(application, replicas)

    def _stop_from(self, application: ApplicationId, first: int) -> None:
        """Stop the replicas with this number and greater ones."""
        for replica in sorted(self._replicas.get(application, ())):
            if replica.replica >= first and self.entries[replica].state is not ApplicationState.STOPPING:
                self._stop(replica)

    def _start(self, application: ApplicationId, start: StartCommand, offset: int, timestamp_ms: int) -> None:
        before = self.entries.get(application)
        entry = start.entry(ApplicationState.WAITING, offset, timestamp_ms)
        if before is not None:
            stays = before.mode is start.mode and before.requests == start.requests
            vacated = before if stays else self._vacated(before)
            named = vacated.worker is not None
            state = ApplicationState.ASSIGNED if named else ApplicationState.WAITING
            entry = replace(entry, state=state, worker=vacated.worker, leaving=vacated.leaving)
        self.put(application, entry)
        self._retries.forget(application)
        self._unplaced = True

    def retry_failed(self) -> None:
        """Forget where an application failed once it is to be tried again (SH-17)."""
        for application in self._retries.due():
            entry = self.entries.get(application)
            if entry is None or not entry.failed_on or entry.state not in TO_RUN:
                continue
            entry = replace(entry, failed_on=MappingProxyType({}))
            if entry.state is ApplicationState.FAILED:
                entry = replace(entry, state=ApplicationState.WAITING)
            self.put(application, entry)
            self._unplaced = True

    def refuse(self, start: StartCommand, offset: int, timestamp_ms: int, reason: str) -> None:
        """Note a refused start command of an application that is not to run now."""
        before = self.entries.get(start.application)
        entry = start.entry(ApplicationState.REFUSED, offset, timestamp_ms)
        leaving = before.leaving if before else None
        self.put(start.application, replace(entry, leaving=leaving, reason=reason))

    def stop(self, application: ApplicationId) -> None:
        """Stop all replicas of an application; each is removed once nothing of it runs any more (SH-5)."""
        self._stop_from(application, 0)

    def _stop(self, application: ApplicationId) -> None:
        vacated = self._vacated(self.entries[application])
        self.put(application, replace(vacated, state=ApplicationState.STOPPING, reason="", kept_for=None))
        if vacated.leaving is None:
            self._drop(application)
        self._unplaced = True

    def note_offset(self, application: ApplicationId, offset: int, timestamp_ms: int) -> None:
        """Note the new offset of a start command; no document is published for that alone."""
        for replica in self._replicas[application]:
            entry = self.entries[replica]
            self.entries[replica] = replace(entry, offset=offset, timestamp_ms=timestamp_ms)

    def recall_requests(self, start: StartCommand) -> None:
        """Take the requests from a start command: a leader of an earlier version leaves them out (SH-27)."""
        entry = self.entries[start.application]
        if entry.requests is None and start.requests is not None:
            self._set(start.application, replace(entry, requests=start.requests))
            self._unplaced = True

    def _vacated(self, entry: ApplicationEntry) -> ApplicationEntry:
        """Return the entry without a worker, and waiting for the last one."""
        incarnation = self._members.incarnation(entry.worker) if entry.worker is not None else None
        if entry.worker is None or incarnation is None:
            return replace(entry, worker=None)
        leaving = Leaving(entry.worker, incarnation, self.next, entry.mode, entry.requests)
        return replace(entry, worker=None, leaving=self._guards.stops_first(leaving))

    def vacate(self, worker: WorkerId, kept_s: float, now: float) -> None:
        """Take all applications from a worker, which must still be known.

        They wait for it for ``kept_s`` seconds, unless it is drained (SH-26).
        """
        kept = kept_s > 0 and self.cordons.get(worker) is not Cordon.DRAINED
        reason = f"{worker}, which had it, is gone"
        if kept:
            reason = f"{worker}, which had it, is away and gets it back if it returns within {kept_s:g} s"
        for application in list(self._named.get(worker, ())):
            entry = self._vacated(self.entries[application])
            kept_for = worker if kept else None
            self.put(
                application,
                replace(entry, state=ApplicationState.WAITING, reason=reason, kept_for=kept_for),
            )
        if worker in self._kept:
            self._away_until[worker] = now + kept_s
        self._unplaced = True

    def returned(self, worker: WorkerId) -> None:
        """Place everything anew: a worker has joined or has other tags. Give back what waits for it."""
        self._away_until.pop(worker, None)
        self._unplaced = True

    def end_grace(self, now: float) -> None:
        """End the wait for the workers that have not returned in time."""
        for worker in [worker for worker, until in self._away_until.items() if until <= now]:
            self._release(worker)

    def _release(self, worker: WorkerId) -> None:
        self._away_until.pop(worker, None)
        for application in list(self._kept.get(worker, ())):
            self.put(application, replace(self.entries[application], kept_for=None))
        self._unplaced = True

    @property
    def next_grace_end(self) -> float | None:
        """Time (monotonic seconds) at which the next wait for a worker ends; None for none."""
        return min(self._away_until.values(), default=None)

    def has_room_for(self, worker: WorkerId, cordon: Cordon | None) -> bool:
        """True if the document has room for one more cordon."""
        return cordon is None or worker in self.cordons or len(self.cordons) < MAX_CORDONS

    def cordon(self, worker: WorkerId, cordon: Cordon | None) -> None:
        """Cordon or drain a worker from now on, or end both (SH-26)."""
        if cordon is None:
            self.cordons.pop(worker, None)
        else:
            self.cordons[worker] = cordon
        if cordon is Cordon.DRAINED:
            self._release(worker)
        self.changed = self._unplaced = True

    def begin_again(self, worker: WorkerId) -> None:
        """Note that another process is behind the worker's id: nothing runs there yet."""
        for application in list(self._named.get(worker, ())):
            entry = self.entries[application]
            self.put(application, replace(entry, state=ApplicationState.ASSIGNED))
        self._unplaced = True

    def offer_back(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """Note that an unknown process is back: applications that wait for it may go back to it."""
        for application in self._left.get((worker, incarnation), ()):
            self._targets.pop(application, None)

    def clear_ended(self, worker: WorkerId, behind: Incarnation, left: bool) -> None:
        """Note that a process is behind the worker's id, or has ``left``: earlier ones have ended."""
        for key in [key for key in self._left if key[0] == worker]:
            for application in list(self._left[key]):
                leaving = self.entries[application].leaving
                if leaving is not None and (
                    (left and leaving.incarnation == behind) or self._guards.proves_ended(behind, leaving)
                ):
                    self._clear(application)

    def clear_stopped(self, pong: Pong) -> None:
        """Take in a process's report of applications that it is not assigned any more (SH-13)."""
        for application in list(self._left.get((pong.worker, pong.incarnation), ())):
            leaving = self.entries[application].leaving
            if leaving is not None and self._guards.proves_stopped(leaving, application, pong):
                self._clear(application)

    def clear_gone(self, now: float, deadline_s: float, *, overdue: bool = False) -> None:
        """End the wait for processes that are not known any more, by the mode of each application (SH-14).

        With ``overdue`` only those whose deadline has passed are checked.
        """
        for worker, incarnation in self._absent():
            silent_s = now - self._members.heard_at(worker, incarnation)
            if overdue and silent_s < deadline_s:
                continue
            for application in list(self._left[worker, incarnation]):
                leaving = self.entries[application].leaving
                if leaving is not None and self._guards.is_gone(leaving, self.issued, silent_s, deadline_s):
                    self._clear(application)

    def next_gone(self, now: float, deadline_s: float) -> float | None:
        """Time (monotonic seconds) at which the next awaited process counts as gone; None for none."""
        times = [self._members.heard_at(*behind) + deadline_s for behind in self._absent()]
        return min((at for at in times if at > now), default=None)

    def _absent(self) -> list[Behind]:
        known = self._members.incarnation
        return [(worker, incarnation) for worker, incarnation in self._left if known(worker) != incarnation]

    def _clear(self, application: ApplicationId) -> None:
        entry = replace(self.entries[application], leaving=None)
        target = self._targets.get(application)
        if entry.state is ApplicationState.STOPPING:
            self._drop(application)
        elif (
            target is not None
            and target in self._members.entries
            and not self._unplaced
            and self._has_room(target, application, entry)
        ):
            self.put(application, replace(entry, state=ApplicationState.ASSIGNED, worker=target, reason=""))
        else:
            self.put(application, entry)
            self._unplaced = self._unplaced or entry.state in TO_RUN

    def reported(self, pong: Pong) -> None:
        """Take in a known worker's report of the applications that it is assigned, or still runs."""
        for application, report in pong.applications.items():
            entry = self.entries.get(application)
            if entry is None or entry.state not in TO_RUN:
                continue
            if entry.worker is None and entry.leaving is None:
                self._adopt(application, entry, pong, report)
            elif entry.worker == pong.worker or _waits_for(entry, pong):
                self._follow(application, entry, pong.worker, report)
        for application in list(self._named.get(pong.worker, ())):
            entry = self.entries[application]
            if entry.state is ApplicationState.RUNNING and application not in pong.applications:
                self.put(application, replace(entry, state=ApplicationState.ASSIGNED))

    def _adopt(
        self, application: ApplicationId, entry: ApplicationEntry, pong: Pong, report: RunReport
    ) -> None:
        """Prefer a worker that was cut off and still runs an application without a worker."""
        if not report.state.may_run:
            return
        leaving = Leaving(pong.worker, pong.incarnation, self.next, entry.mode, entry.requests)
        self.put(application, replace(entry, leaving=self._guards.stops_first(leaving)))
        self._unplaced = True

    def _follow(
        self, application: ApplicationId, entry: ApplicationEntry, worker: WorkerId, report: RunReport
    ) -> None:
        if report.command != entry.command:
            return
        told = report.reason[:MAX_REASON_CHARS]
        named = entry.worker == worker
        if report.state is RunState.FINISHED:
            self.put(
                application,
                replace(
                    self._vacated(entry),
                    state=ApplicationState.FINISHED,
                    reason=told or f"finished on {worker}",
                    restarts=report.restarts,
                ),
            )
            self._unplaced = True
        elif report.state is RunState.FAILED:
            if named or worker not in entry.failed_on:
                self._failed(application, entry, worker, told or "failed")
        elif named and not self._only_restarts(entry, report):
            runs = report.state is RunState.RUNNING
            state = ApplicationState.RUNNING if runs else ApplicationState.ASSIGNED
            if (entry.state, entry.reason) != (state, told):  # most reports of a pong are as before
                self.put(application, replace(entry, state=state, reason=told))

    def _only_restarts(self, entry: ApplicationEntry, report: RunReport) -> bool:
        """True if its worker merely restarts its process, which only pongs report (SH-24).

        If the application has not run yet, the document says why its first process has ended.
        """
        if report.state not in _RESTARTING:
            return False
        first = report.restarts == 0 or (report.restarts == 1 and report.state is RunState.BACKING_OFF)
        return entry.state is ApplicationState.RUNNING or not first

    def _failed(
        self, application: ApplicationId, entry: ApplicationEntry, worker: WorkerId, reason: str
    ) -> None:
        """Place an application that failed on a worker elsewhere, if another one can take it (SH-17)."""
        failed_on = dict([*entry.failed_on.items(), (worker, reason)][-MAX_FAILED_ON:])
        vacated = self._vacated(entry) if entry.worker == worker else entry
        waiting = replace(
            vacated, failed_on=MappingProxyType(failed_on), reason=f"failed on {worker}: {reason}"
        )
        if waiting.worker is None:
            waiting = replace(waiting, state=ApplicationState.WAITING)
        self.put(application, waiting)
        self._retries.failed(application)
        self._unplaced = True

    def settle(self) -> None:
        """Place everything anew, if that may change anything: balanced, by tags, few moves (SH-12)."""
        if not self._unplaced and not self._held_up:
            return
        self._unplaced = False
        self._held_up.clear()
        named = {
            str(application): (application, entry)
            for application, entry in self.to_run()
            if entry.kept_for not in self._away_until
        }
        placement = self._placed(named)
        for name, (application, entry) in named.items():
            holder = placement.holders.get(name)
            if holder is None:
                self._send_nowhere(application, entry, placement.unplaced[name], name in placement.full)
            elif entry.worker != holder:
                self._send(application, entry, holder)

    def _placed(self, named: Mapping[str, tuple[ApplicationId, ApplicationEntry]]) -> Placement:
        previous = {}
        for name, (application, entry) in named.items():
            worker = entry.worker or self._targets.get(application) or self._back_to(entry) or entry.kept_for
            if worker is not None:
                previous[name] = worker
        drained = self._cordoned(Cordon.DRAINED)
        closed = self._cordoned(Cordon.CORDONED)
        refused = {
            name: closed.difference({previous.get(name)}).union(entry.failed_on)
            for name, (_, entry) in named.items()
            if closed or entry.failed_on
        }
        return place(
            {worker: known.tags for worker, known in self._members.entries.items() if worker not in drained},
            {name: entry.tags for name, (_, entry) in named.items()},
            previous,
            refused=refused,
            requests={name: entry.requests for name, (_, entry) in named.items() if entry.requests},
            capacities={
                worker: known.capacity for worker, known in self._members.entries.items() if known.capacity
            },
            groups=self._group_replicas(named),
            by_weight=self._by_weight,
        )

    def _group_replicas(
        self, named: Mapping[str, tuple[ApplicationId, ApplicationEntry]]
    ) -> Mapping[str, str]:
        """Return the application of each replica, of which no two are on one worker (SH-28)."""
        return {name: str(app.whole) for name, (app, entry) in named.items() if entry.replicas > 1}

    def _cordoned(self, cordon: Cordon) -> frozenset[WorkerId]:
        return frozenset(worker for worker, known in self.cordons.items() if known is cordon)

    def _back_to(self, entry: ApplicationEntry) -> WorkerId | None:
        """Return the awaited worker, if it can have the application back."""
        leaving = entry.leaving
        if leaving is None or self._members.incarnation(leaving.worker) != leaving.incarnation:
            return None
        return leaving.worker

    def _send(self, application: ApplicationId, entry: ApplicationEntry, target: WorkerId) -> None:
        vacated = self._vacated(entry)
        leaving = vacated.leaving
        if leaving is not None and leaving.worker == target:
            known = self._members.incarnation(target)
            keeps_room = self._guards.keeps_room(entry.requests, leaving.requests)
            if keeps_room and self._guards.may_take_back(leaving, known, entry.mode):
                leaving = None
        if leaving is None and self._has_room(target, application, entry):
            assigned = replace(
                vacated,
                state=ApplicationState.ASSIGNED,
                worker=target,
                leaving=None,
                reason="",
                kept_for=None,
            )
            self.put(application, assigned)
            return
        if leaving is None:
            sibling = self._sibling_on(target, application)
            awaited = f"{sibling} has left it" if sibling else "others that leave it have made room"
            reason = f"to be started on {target} once {awaited}"
            self._held_up.add(application)
        else:
            reason = f"to be started on {target} once {leaving.worker} has stopped it or is gone"
        self.put(application, replace(vacated, state=ApplicationState.MOVING, reason=reason, kept_for=None))
        self._targets[application] = target

    def _has_room(self, worker: WorkerId, application: ApplicationId, entry: ApplicationEntry) -> bool:
        """True if a worker has room for an application beside all that it may still run (SH-27, SH-28)."""
        if self._guards.waits_for(self._sibling_on(worker, application)):
            return False
        known, requests = self._members.entries[worker], entry.requests
        if requests is None or known.capacity is None:
            return True
        taken = [
            self.entries[other].requests for other in self._named.get(worker, ()) if other != application
        ]
        for other in self._left.get((worker, known.incarnation), ()):
            leaving = self.entries[other].leaving
            if leaving is not None and other != application:
                taken.append(leaving.requests)
        return self._guards.has_room(known.capacity, requests, [each for each in taken if each is not None])

    def _sibling_on(self, worker: WorkerId, application: ApplicationId) -> ApplicationId | None:
        """Return another replica that a worker is to run, or may still run; None for none (SH-28)."""
        on_it = self._on.get((application.whole, worker), ())
        return next((other for other in on_it if other != application), None)

    def _send_nowhere(
        self, application: ApplicationId, entry: ApplicationEntry, reason: str, full: bool
    ) -> None:
        workers = self._members.entries
        able = [worker for worker, known in workers.items() if entry.tags <= known.tags]
        closed = sorted(
            worker
            for worker in able
            if worker in self.cordons
            and worker not in entry.failed_on
            and self._sibling_on(worker, application) is None
        )
        failed = not full and not closed and any(worker in able for worker in entry.failed_on)
        state = ApplicationState.FAILED if failed else ApplicationState.WAITING
        if closed and not full:
            shown = ", ".join(f"{worker} ({self.cordons[worker]})" for worker in closed[:MAX_NAMED])
            more = len(closed) - MAX_NAMED
            reason = f"no other worker could take it than {shown}{f' and {more} more' if more > 0 else ''}"
        elif failed:
            reason += self._retries.note(application)
        self.put(application, replace(self._vacated(entry), state=state, reason=reason, kept_for=None))


def _workers_of(entry: ApplicationEntry) -> set[WorkerId]:
    """Return the workers that are to run an application, or may still run it."""
    named = (entry.worker, entry.leaving.worker if entry.leaving is not None else None)
    return {worker for worker in named if worker is not None}


def _waits_for(entry: ApplicationEntry, pong: Pong) -> bool:
    leaving = entry.leaving
    return leaving is not None and (leaving.worker, leaving.incarnation) == (pong.worker, pong.incarnation)


def _remove(index: dict[KeyT, dict[ApplicationId, None]], key: KeyT, application: ApplicationId) -> None:
    applications = index[key]
    del applications[application]
    if not applications:
        del index[key]
