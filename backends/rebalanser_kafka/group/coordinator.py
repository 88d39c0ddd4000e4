"""A connection to a group that lives in a log: the ``Coordinator`` of ``kafka://``.

A command is appended, and its caller waits until it is read back: by then this replica has executed it at its
offset, as every other replica does. One thread reads the log. It never blocks on anything else, so heartbeats
are answered in any case. It also appends the ends of leases and writes snapshots, without waiting for either.

**Safety.** A record that was sent may be appended later, twice or never: commands are guarded as in any
registry. A connection that lags behind decides nothing: every replica takes each decision at a record's
offset, and a proof of life counts from before its record was sent. If a log has lost records that were read,
or was created anew, it is read again from its beginning. Sessions that it no longer has are lost, and new
revisions are above all that this connection has seen.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import Final, Protocol, TypeAlias

from rebalanser.core.group.messages import (
    AddBarriers,
    Command,
    Joined,
    Outcome,
    ReadBarriers,
    ReadGroup,
    RemoveBarriers,
)
from rebalanser.core.group.types import SPEC_FIELDS, NodeId, Policy, ResourceSpec, Topic
from rebalanser.errors import (
    InternalError,
    OutcomeUnknown,
    RebalanserError,
    RegistryUnavailable,
    RequestTooLarge,
    UnusableStore,
)
from rebalanser.feed import Applications
from rebalanser.registry.contract import Capabilities, LeaseAge
from rebalanser.registry.coordinator import (
    MAX_OPERATOR_TRIES,
    OVERTAKEN,
    Coordinator,
    GroupView,
    HoldingsRead,
    Listener,
    Progress,
)
from rebalanser.registry.script import failure
from rebalanser.runtime.logs import log_aside
from rebalanser_kafka.group.applications import LeaderFeed, RunningApplications
from rebalanser_kafka.group.follower import (
    Ended,
    Event,
    LogEntry,
    LogFollower,
    Overtaken,
    SnapshotRead,
    UnreadableRecord,
)
from rebalanser_kafka.group.leases import REPEAT_S, LeaseCounter, rank
from rebalanser_kafka.group.records import (
    MAX_REQUEST_BYTES,
    Fed,
    PutResources,
    ReadAll,
    Rebase,
    RemoveResources,
    Request,
    SetDrained,
    SetPolicy,
    WeighResources,
    Wish,
    encode,
)
from rebalanser_kafka.group.replica import MIN_LEASE_TTL_S, Replica, Result
from rebalanser_kafka.group.splitting import RESOURCES_PER_COMMAND, batches, in_turn
from rebalanser_kafka.group.watches import Delivery, Watches

SNAPSHOT_RECORDS: Final = 5_000
"""Records after which a snapshot is due."""
SNAPSHOT_BYTES: Final = 16 * 1024 * 1024
"""Bytes after which a snapshot is due."""
LONGEST_LOOK_S: Final = 0.1
"""Maximum seconds that the reader waits for a record, and so its delay in seeing a request to stop."""
PAUSE_S: Final = 0.2
"""Seconds before the reader begins anew."""
CLOSE_TIMEOUT_S: Final = 5.0
CAPABILITIES: Final = Capabilities(
    max_operations=MAX_REQUEST_BYTES,
    max_request_bytes=MAX_REQUEST_BYTES,
    min_lease_ttl_s=MIN_LEASE_TTL_S,
    lease_detection_s=1.0,
    survives_process=True,
    shared_between_hosts=True,
)


OnDone: TypeAlias = Callable[[int | RebalanserError], None]
"""Called once for each record, with its offset, or with the error if it is not or may not be written."""


class Log(Protocol):
    """The log of one group, as the coordinator needs it. ``append`` may be called from any thread."""

    @property
    def name(self) -> str:
        """Name of the log in messages."""

    @property
    def position(self) -> int:
        """Offset of the next record."""

    @property
    def trouble(self) -> str | None:
        """Reason why no records may be coming at present."""

    @property
    def unsafe_reasons(self) -> tuple[str, ...]:
        """Reasons why the log weakens a promise, one sentence each; known after ``begin``."""

    def begin(self) -> tuple[int, int]:
        """Read from the first record on; return the offsets of the first record and of the next one.

        Raises:
            RebalanserError: the log is unreachable, or must not be used as it is.
        """

    def read(self, timeout_s: float) -> Sequence[LogEntry]:
        """Return the next records; none if none comes within ``timeout_s`` seconds.

        Raises:
            RebalanserError: the log must be begun anew, as it does not have the next record.
        """

    def append(self, value: bytes, done: OnDone) -> None:
        """Append a request, in parts if it is too large for one record; ``done`` is called with the outcome.

        Raises:
            RebalanserError: it was not sent and will not be.
        """

    def delete_before(self, offset: int) -> None:
        """Delete the records before this offset at some time; returns at once."""

    def close(self) -> None:
        """Close the log."""


class LogCoordinator(Coordinator):
    """One connection of a node or an operator to a group that lives in a log.

    ``now`` is the monotonic clock (seconds) that leases and proofs of life are counted on, ``timeout_s``
    ``now`` is the monotonic clock (seconds) of leases and proofs of life, and ``timeout_s`` limits each
    command. The log is closed with the coordinator."""

    def __init__(self, log: Log, group: str, now: Callable[[], float], timeout_s: float) -> None:
        self._log = log
        self._group = group
        self._now = now
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._asked: dict[str, float] = {}
        self._waiting: dict[str, Future[Result]] = {}
        self._follower = LogFollower(group, 0)
        self._watches = Watches(self._follower.replica.translation)
        self._counter = LeaseCounter()
        self._own_node: NodeId | None = None
        self._own_lease: int | None = None
        self._running: RunningApplications | None = None
        self._feed: LeaderFeed | None = None
        self._end = 0
        self._above: int | None = None
        self._rise_at = 0.0
        self._started = False
        self._lost = False
        self._snapshot_from = 0
        self._own_snapshots: set[str] = set()
        self._warned = False
        self._failure: RebalanserError | None = None
        self._last_error = "it was not read yet"
        self._caught_up = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rebalanser-log-{group}", daemon=True)

    def open(self, timeout_s: float) -> None:
        """Read all records of the log, within ``timeout_s`` seconds.

        Raises:
            RegistryUnavailable: the end of the log was not reached in time.
            FixConfiguration: it cannot be read before a person changes something.
        """
        self._begin()
        self._follow(())
        self._thread.start()
        in_time = self._caught_up.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        if not in_time:
            raise RegistryUnavailable(
                f"{self._log.name} was read to offset {self._follower.position} of {self._end} within "
                f"{timeout_s:g} s: {self._last_error}"
            )

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of a group in a log."""
        return replace(CAPABILITIES, unsafe_reasons=self._log.unsafe_reasons)

    def perform(self, command: Command) -> Outcome:
        """Execute a command and wait for its outcome. Every failure is an outcome, never an exception."""
        if isinstance(command, AddBarriers | RemoveBarriers | ReadBarriers):
            return in_turn(command, self._perform)
        if isinstance(command, ReadGroup):
            command = ReadGroup(command.session, command.leadership)  # the replica has all of it at hand
        return self._perform(command)

    def _perform(self, command: Command) -> Outcome:
        try:
            outcome = self._ask(command)
        except InternalError:
            raise
        except RebalanserError as error:
            return failure(error)
        if outcome is None or isinstance(outcome, int | GroupView):
            raise InternalError(f"{type(command).__name__} was answered with {outcome!r}")
        if isinstance(outcome, Joined):
            self._own_node, self._own_lease = outcome.session.node, outcome.session.lease
        return outcome

    def watch(self, node: NodeId, topics: Mapping[Topic, int], listener: Listener) -> None:
        """Watch exactly these topics, each new one from its revision on; those watched before continue."""
        with self._lock:
            deliveries = self._watches.replace(node, topics, listener)
        _deliver(deliveries)

    def feed_from(self, running: RunningApplications) -> None:
        """Add the running applications to the resources, as long as this connection's node leads (SH-19)."""
        self._running = running
        self._feed = LeaderFeed(running, self._leads, self._take, self._timeout_s, self._group)

    def _leads(self) -> bool:
        with self._lock:
            return self._own_node is not None and self._follower.replica.leader() == self._own_node

    def _is_leaderless(self) -> bool:
        with self._lock:
            return self._follower.replica.leader() is None

    def _take(self, applications: Applications) -> None:
        with self._lock:
            fed_epoch = self._follower.replica.fed_epoch
        if fed_epoch is None or fed_epoch < applications.epoch:
            self._ask(Fed(applications.epoch, applications.names))

    def read(self) -> GroupView:
        """Return the whole group and its barriers at one revision, for any reader (RB-19)."""
        if self._running is not None and self._is_leaderless():
            # The group must be readable even if the running applications are not.
            with suppress(RebalanserError):
                applications = self._running.read(self._timeout_s)
                if applications is not None:
                    self._take(applications)
        view = self._ask(ReadAll())
        if not isinstance(view, GroupView):
            raise InternalError(f"a reading was answered with {view!r}")
        return view

    def read_holdings(self, keys: Collection[str] | None = None) -> HoldingsRead:
        """Read all barriers with their holders; of notices, what this connection's replica has at ``keys``.

        The replica gave the notices, so it knows their objects.
        """
        if keys is None:
            return super().read_holdings()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._closed.is_set() or self._lost or not self._caught_up.is_set():
                raise RegistryUnavailable(f"{self._log.name} was not read to its end: {self._last_error}")
            return self._follower.replica.holdings_at(keys)

    def heartbeats(self, nodes: Sequence[NodeId]) -> Mapping[NodeId, LeaseAge]:
        """Return the age of the last heartbeat of each live node, counted since this connection read it."""
        with self._lock:
            now, leases = self._now(), dict(self._follower.replica.members())
            ages = {node: self._counter.age(leases[node], now) for node in nodes if node in leases}
        return {node: age for node, age in ages.items() if age is not None}

    def put_resources(
        self, specs: Sequence[ResourceSpec], progress: Progress, fields: frozenset[str] = SPEC_FIELDS
    ) -> int:
        """Add resources, or change these fields of them; return the number of new ones (RB-29)."""
        parts = [PutResources(tuple(part), fields) for part in batches(specs)]
        return self._change(parts, len(specs), progress)

    def weigh_resources(self, weights: Mapping[str, float], progress: Progress) -> int:
        """Change the weights of existing resources, and nothing else of them (AU-7, RB-29)."""
        parts = [WeighResources(dict(part)) for part in batches(list(weights.items()))]
        return self._change(parts, len(weights), progress)

    def remove_resources(self, resources: Sequence[str], progress: Progress) -> int:
        """Remove resources; return the number that existed. Barriers are left alone (RB-16)."""
        parts = [RemoveResources(tuple(part)) for part in batches(resources)]
        return self._change(parts, len(resources), progress)

    def set_drained(self, label: str, drained: bool) -> None:
        """Mark a node as drained, or not (RB-30)."""
        self._operate(SetDrained(label, drained))

    def policy(self) -> Policy:
        """Read the policy, as part of the whole group."""
        view = self.read()
        with self._lock:
            key = self._follower.replica.keys.policy
        if key in view.group.unreadable:
            raise UnusableStore(view.group.unreadable[key])
        return view.group.policy

    def set_policy(self, policy: Policy, fields: frozenset[str]) -> None:
        """Change these fields of the group's policy (RB-38)."""
        self._operate(SetPolicy(policy, fields))

    def _change(self, parts: Sequence[Wish], total: int, progress: Progress) -> int:
        progress(0)
        changed = 0
        for number, part in enumerate(parts, start=1):
            counted = self._operate(part)
            if not isinstance(counted, int):
                raise InternalError(f"a change of resources was answered with {counted!r}")
            changed += counted
            progress(min(total, number * RESOURCES_PER_COMMAND))
        return changed

    def _operate(self, wish: Wish) -> Result:
        """Append an operator request; retry if another took effect first (RB-44)."""
        for _ in range(MAX_OPERATOR_TRIES):
            with self._lock:
                epoch = self._follower.replica.operator_epoch
            with suppress(Overtaken):
                return self._ask(wish, epoch)
        raise RegistryUnavailable(OVERTAKEN)

    def forget_history(self) -> None:
        """Forget past changes, as after a gap: watches from before are notified to read again."""
        with self._lock:
            deliveries = self._watches.lost(self._follower.replica.latest)
        _deliver(deliveries)

    def close(self) -> None:
        """Close the connection and all watches. Closing twice does nothing."""
        self._closed.set()
        self._fail_waiting(OutcomeUnknown("the connection was closed before the answer came"))
        if self._feed is not None:
            self._feed.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)
        self._log.close()

    def _ask(self, wish: Wish, epoch: int | None = None) -> Result:
        """Append a request and wait until it was read back and executed; return its result."""
        name = uuid.uuid4().hex
        value = self._encoded(name, wish, epoch)
        answer: Future[Result] = Future()
        written: list[int] = []

        def appended(done: int | RebalanserError) -> None:
            if isinstance(done, int):
                written.append(done)
            _appended(answer, done)

        with self._lock:
            if self._closed.is_set():
                raise RegistryUnavailable("this connection to the group is closed")
            if self._failure is not None:
                raise self._failure
            self._waiting[name] = answer
            self._asked[name] = self._now()
        try:
            self._log.append(value, appended)
            return answer.result(self._timeout_s)
        except TimeoutError:
            where = f"was written at offset {written[0]}" if written else "was not acknowledged"
            raise OutcomeUnknown(
                f"{self._log.name}: no answer within {self._timeout_s:g} s: the request {where}, the log was "
                f"read to offset {self._log.position}; {self._last_error}"
            ) from None
        finally:
            with self._lock:
                self._waiting.pop(name, None)
                self._asked.pop(name, None)

    def _encoded(self, name: str, wish: Wish, epoch: int | None = None) -> bytes:
        return encode(Request(name, wish, self._follower.replica.birth_ms, epoch))

    def _fail_waiting(self, error: RebalanserError) -> None:
        with self._lock:
            waiting = list(self._waiting.values())
        for answer in waiting:
            with suppress(InvalidStateError):
                answer.set_exception(error)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._turn()
        except BaseException as error:
            if isinstance(error, RebalanserError):
                self._failure = error
            else:
                self._failure = InternalError(f"the reader of {self._log.name} failed: {error!r}")
            log_aside(
                "the group's log can no longer be read: every command fails",
                error,
                action="log_failed",
                group=self._group,
            )
            self._fail_waiting(self._failure)
            self._caught_up.set()

    def _turn(self) -> None:
        """Read the next records, and do all work that is due."""
        try:
            if self._lost:
                self._begin()
            entries = self._log.read(self._patience_s())
        except RebalanserError as error:
            self._lost = True
            self._last_error = str(error)
            self._closed.wait(PAUSE_S)
            return
        self._last_error = self._log.trouble or "no error was reported"
        self._follow(entries)
        if self._caught_up.is_set() and not self._lost:
            self._rise()
            self._end_leases()
            self._save()

    def _patience_s(self) -> float:
        until_due = self._counter.next_look(self._now())
        return LONGEST_LOOK_S if until_due is None else min(LONGEST_LOOK_S, until_due)

    def _follow(self, entries: Sequence[LogEntry]) -> None:
        with self._lock:
            events = self._read(entries)
            replica = self._follower.replica
            deliveries: list[Delivery] = []
            if self._follower.complete:
                # The time is taken after the read, so that no lease is counted from before it (RB-21).
                self._counter.observe(replica.leases, self._now())
                deliveries = self._watches.changed(replica.take_changes())
            if not (self._lost or self._caught_up.is_set()) and self._log.position >= self._end:
                deliveries += self._arrive(replica)
        for event in events:
            self._react(event)
        _deliver(deliveries)

    def _read(self, entries: Sequence[LogEntry]) -> list[Event]:
        events: list[Event] = []
        for entry in entries:
            events += self._follower.read(entry, self._asked)
            # Records that existed when the read began are no sign that the log was created anew since.
            if self._follower.foreign_at >= self._end:
                self._lost = True
                break
        return events

    def _arrive(self, replica: Replica) -> list[Delivery]:
        """Note that all records from before the start have been read."""
        if not self._follower.complete:
            raise UnusableStore(
                f"{self._log.name} begins in the middle and has no snapshot: somebody else deleted earlier "
                "records; delete the topic while no node runs, and begin anew"
            )
        self._caught_up.set()
        if self._above is None and self._follower.from_beginning:
            return []
        return self._watches.lost(max(replica.latest, self._above or 0))

    def _react(self, event: Event) -> None:
        match event:
            case Ended(request=name, result=result, error=error):
                answer = self._waiting.get(name)
                if answer is not None:
                    _settle(answer, result, error)
            case UnreadableRecord(offset=offset, reason=reason):
                self._warn_of(offset, reason)
            case SnapshotRead(request=name, needs_from=needs_from):
                if name in self._own_snapshots:
                    self._own_snapshots.clear()
                    self._log.delete_before(needs_from)

    def _warn_of(self, offset: int, reason: str) -> None:
        """Warn once: a process that writes into the log by mistake writes much."""
        if not self._warned:
            self._warned = True
            log_aside(
                "the group's log has records that cannot be read; they are set aside",
                UnusableStore(f"{self._log.name}, offset {offset}: {reason}"),
                action="record_set_aside",
                group=self._group,
            )

    def _say(self, wish: Wish) -> str:
        """Append a record that nothing waits for; it is repeated when it is due again."""
        name = uuid.uuid4().hex
        try:
            self._log.append(self._encoded(name, wish), lambda _done: None)
        except RequestTooLarge as error:
            log_aside(
                "the group has grown too large for a snapshot: its log is no longer shortened",
                error,
                action="snapshot_too_large",
                group=self._group,
            )
        except RebalanserError as error:
            self._last_error = str(error)
        return name

    def _rise(self) -> None:
        """Move the revisions above all that this connection saw in a log that was cut back; retry until that
        has taken effect."""
        if self._above is not None and self._follower.replica.latest >= self._above:
            self._above = None
        if self._above is not None and self._now() >= self._rise_at:
            self._rise_at = self._now() + REPEAT_S
            self._say(Rebase(self._above))

    def _leases_of_members(self) -> list[int]:
        return [lease for _, lease in self._follower.replica.members()]

    def _end_leases(self) -> None:
        for expire in self._counter.due(self._now(), self._leases_of_members, self._own_lease):
            self._say(expire)

    def _save(self) -> None:
        """Write a snapshot once the log has grown enough, in turn of rank."""
        follower = self._follower
        grown = max(
            follower.records_since_snapshot / SNAPSHOT_RECORDS, follower.bytes_since_snapshot / SNAPSHOT_BYTES
        )
        if grown < 1 or follower.position < self._snapshot_from or not self._caught_up.is_set():
            return
        turn = rank(self._leases_of_members(), self._own_lease)
        if grown < 1 + turn / 10:
            return
        self._snapshot_from = follower.position + SNAPSHOT_RECORDS // 10
        self._own_snapshots.add(self._say(follower.snapshot()))

    def _begin(self) -> None:
        """Read the log from its beginning. The connection forgets all but the last revision it saw."""
        start, end = self._log.begin()
        with self._lock:
            if self._started:
                self._above = max(self._above or 0, self._follower.replica.latest)
            self._started = True
            self._lost = False
            self._end = end
            self._caught_up.clear()
            self._follower = LogFollower(self._group, start)
            self._rise_at = 0.0
            self._snapshot_from = 0
            self._own_snapshots.clear()
            self._counter.forget()


def _appended(answer: Future[Result], done: int | RebalanserError) -> None:
    """Fail the answer if the record was not written; otherwise it comes when the record is read."""
    if isinstance(done, RebalanserError):
        with suppress(InvalidStateError):
            answer.set_exception(done)


def _settle(answer: Future[Result], result: Result, error: RebalanserError | None) -> None:
    with suppress(InvalidStateError):
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)


def _deliver(deliveries: Sequence[Delivery]) -> None:
    for listener, notices in deliveries:
        listener(notices)
