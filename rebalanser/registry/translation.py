"""The one translation of the protocol's commands into registry operations.

Each command is a generator: it yields :class:`~rebalanser.registry.contract.Request` after request, is sent
an :class:`Answer` for each, and returns the command's outcome. It does no I/O and knows no time beyond
what its answers carry, so that the runtime and the simulator drive the very same code. A driver throws the
registry's errors into the generator; :func:`failure` turns what a command does not handle into an outcome.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from rebalanser.errors import (
    FixConfiguration,
    InternalError,
    InvalidSettings,
    LeaseNotFound,
    OutcomeUnknown,
    RebalanserError,
)
from rebalanser.protocol.messages import (
    Acknowledge,
    Acknowledged,
    AddBarriers,
    Alive,
    BarriersAdded,
    BarriersRead,
    BarriersRemoved,
    Campaign,
    Command,
    Conflict,
    Deposed,
    Elected,
    Failed,
    Follows,
    GroupRead,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Left,
    Noticed,
    Outcome,
    Publish,
    Published,
    ReadBarriers,
    ReadGroup,
    ReadShare,
    RemoveBarriers,
    SessionLost,
    ShareRead,
)
from rebalanser.protocol.types import (
    Fingerprint,
    Group,
    Header,
    Leadership,
    NodeId,
    Resource,
    ResourceSpec,
    Session,
    Share,
    Token,
    Topic,
    TopicKind,
)
from rebalanser.registry import contract, values
from rebalanser.registry.contract import (
    Absent,
    Capabilities,
    Changed,
    Created,
    Delete,
    Get,
    Grant,
    Granted,
    Guard,
    HistoryLost,
    KeepAlive,
    KeyValue,
    Operation,
    Put,
    Range,
    Reply,
    Request,
    Result,
    Revoke,
    Stat,
    Stats,
    Target,
    Transaction,
    Unchanged,
    WatchEvent,
)
from rebalanser.registry.coordinator import GroupView, Holding, Progress
from rebalanser.registry.keys import GroupKeys

ItemT = TypeVar("ItemT")
_RESERVED_OPERATIONS = 4
_RESERVED_BYTES = 4096
_ROUNDING_S = 1.0
"""A registry may round a lease up to whole seconds; more than that would delay every take-over unasked."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the registry answered, and the monotonic instant (seconds) just before it was asked."""

    reply: Reply
    sent_at: float


Dialogue: TypeAlias = Generator[Request, Answer, Outcome]
Reading: TypeAlias = Generator[Request, Answer, ItemT]


def failure(error: RebalanserError) -> Failed:
    """The outcome of a command that ended with an error of the registry."""
    return Failed(
        error=f"{type(error).__name__}: {error}",
        unknown=isinstance(error, OutcomeUnknown),
        fatal=isinstance(error, FixConfiguration),
    )


def _outcome(answer: Answer) -> contract.Outcome:
    if not isinstance(answer.reply, contract.Outcome):
        raise InternalError(f"a transaction was answered with {answer.reply!r}")
    return answer.reply


def _entry(result: Result) -> KeyValue | None:
    if result is None or isinstance(result, KeyValue):
        return result
    raise InternalError(f"reading one key was answered with {result!r}")


def _entries(result: Result) -> tuple[KeyValue, ...]:
    if isinstance(result, tuple):
        return result
    raise InternalError(f"reading a range was answered with {result!r}")


def _stats(result: Result) -> tuple[int, int]:
    if isinstance(result, Stats):
        return result.count, result.newest
    raise InternalError(f"counting a range was answered with {result!r}")


def _nested(result: Result) -> contract.Outcome:
    if isinstance(result, contract.Outcome):
        return result
    raise InternalError(f"a nested transaction was answered with {result!r}")


def _fingerprint(entries: Iterable[KeyValue]) -> tuple[int, int]:
    revisions = [entry.mod_revision for entry in entries]
    return len(revisions), max(revisions, default=0)


def _sized(operations: Iterable[Put | Delete]) -> list[tuple[Operation, int]]:
    return [(op, len(op.key) + (len(op.value) if isinstance(op, Put) else 0)) for op in operations]


class Translation:
    """Commands of one group as dialogues with a registry."""

    def __init__(self, keys: GroupKeys, capabilities: Capabilities) -> None:
        self.keys = keys
        self._max_operations = capabilities.max_operations
        self._chunk_operations = max(1, capabilities.max_operations - _RESERVED_OPERATIONS)
        self._chunk_bytes = max(1, capabilities.max_request_bytes - _RESERVED_BYTES)

    def dialogue(self, command: Command) -> Dialogue:
        """The dialogue that carries out a command."""
        match command:
            case Join():
                return self._join(command)
            case Heartbeat():
                return self._heartbeat(command)
            case ReadShare() | ReadBarriers() | AddBarriers() | RemoveBarriers() | Acknowledge() | Leave():
                return self._member_dialogue(command)
            case Campaign():
                return self._campaign(command)
            case ReadGroup():
                return self._read_group(command)
            case Publish():
                return self._publish(command)

    def _member_dialogue(
        self, command: ReadShare | ReadBarriers | AddBarriers | RemoveBarriers | Acknowledge | Leave
    ) -> Dialogue:
        match command:
            case ReadShare():
                return self._read_share(command)
            case ReadBarriers():
                return self._read_barriers(command)
            case AddBarriers():
                return self._add_barriers(command)
            case RemoveBarriers():
                return self._remove_barriers(command)
            case Acknowledge():
                return self._acknowledge(command)
            case Leave():
                return self._leave(command)

    def _alive(self, session: Session) -> tuple[Guard, ...]:
        """The session lives: its node key is there, and it is the very key that the session created."""
        return (Created(self.keys.node(session.node), session.created),)

    def _leads(self, leadership: Leadership) -> tuple[Guard, ...]:
        """The term is still the leader's."""
        return (Unchanged(self.keys.term, leadership.revision),)

    def _acted_on(self, header_revision: int) -> tuple[Guard, ...]:
        """The allocation is still the one acted on."""
        return (Unchanged(self.keys.header, header_revision),)

    def _free(self, barrier: str) -> tuple[Guard, ...]:
        """Nobody holds the barrier."""
        return (Absent(barrier),)

    def _mine(self, barrier: str, token: Token) -> tuple[Guard, ...]:
        """The barrier is still the one that this session added."""
        return (Unchanged(barrier, token),)

    def _is_session(self, own: KeyValue | None, session: Session) -> bool:
        return own is not None and own.create_revision == session.created

    def _is_mine(self, barrier: KeyValue, session: Session) -> bool:
        return barrier.lease == session.lease and barrier.value.decode() == session.node

    def _chunks(self, items: Iterable[tuple[ItemT, int]]) -> Iterator[list[ItemT]]:
        """Cut items with their sizes in bytes into chunks that keep the registry's limits."""
        chunk: list[ItemT] = []
        room = self._chunk_bytes
        for item, size in items:
            if chunk and (len(chunk) >= self._chunk_operations or size > room):
                yield chunk
                chunk, room = [], self._chunk_bytes
            chunk.append(item)
            room -= size
        if chunk:
            yield chunk

    def _barrier_chunks(self, resources: Iterable[Resource]) -> Iterator[list[Resource]]:
        return self._chunks((r, 3 * len(self.keys.barrier(r)) + 256) for r in sorted(resources))

    def _join(self, command: Join) -> Dialogue:
        """Grant a lease and create the node key; after a lost answer take over what is found (RB-4)."""
        member = command.member
        granted = yield Grant(command.lease_ttl_s)
        if not isinstance(granted.reply, Granted):
            raise InternalError(f"a grant was answered with {granted.reply!r}")
        lease = granted.reply.lease
        if granted.reply.ttl_s >= command.lease_ttl_s + _ROUNDING_S:
            yield Revoke(lease)
            return failure(
                InvalidSettings(
                    f"lease_ttl_s {command.lease_ttl_s:g} is below what the registry allows: "
                    f"it grants {granted.reply.ttl_s:g} s; ask for as much"
                )
            )
        key = self.keys.node(member.node)
        answer = yield Transaction(
            guards=self._unregistered(key),
            then=(
                Put(key, values.dump_member(member), lease),
                Put(self.keys.release(member.node), b"", lease),
                Put(self.keys.ack(member.node), b"0", lease),
            ),
            otherwise=(Get(key),),
        )
        outcome = _outcome(answer)
        if outcome.succeeded:
            return Joined(Session(member.node, lease, outcome.revision), granted.sent_at)
        return (yield from self._take_over(member.node, lease, _entry(outcome.results[0])))

    def _unregistered(self, key: str) -> tuple[Guard, ...]:
        """No earlier attempt of this incarnation has registered it."""
        return (Absent(key),)

    def _take_over(self, node: NodeId, spare_lease: int, found: KeyValue | None) -> Dialogue:
        yield Revoke(spare_lease)
        if found is None:
            return Failed("the node key came and went; register again")
        session = Session(node, found.lease, found.create_revision)
        renewed = yield KeepAlive(session.lease)
        answer = yield Transaction(guards=self._alive(session))
        if not _outcome(answer).succeeded:
            return Failed("the lease of an earlier attempt has ended; register again")
        return Joined(session, renewed.sent_at)

    def _heartbeat(self, command: Heartbeat) -> Dialogue:
        """Renew, then prove by a linearizable read that the renewed lease lived afterwards."""
        session, keys = command.session, self.keys
        try:
            renewed = yield KeepAlive(session.lease)
        except LeaseNotFound:
            return (yield from self._confirm_loss(session))
        looks: list[Operation] = [Get(keys.header), Get(keys.term)]
        if command.leading:
            looks += [Stat(keys.nodes), Stat(keys.resources), Stat(keys.drains), Stat(keys.acks)]
        if command.leader is not None:
            looks.append(Get(keys.node(command.leader)))
        blockers = sorted(command.blockers)[: max(0, self._max_operations - len(looks))]
        looks += [Get(keys.release(node)) for node in blockers]
        answer = yield Transaction(guards=self._alive(session), then=tuple(looks))
        outcome = _outcome(answer)
        if not outcome.succeeded:
            return SessionLost()
        return self._seen(command, outcome, self._proven_at(renewed, answer), blockers)

    def _proven_at(self, renewed: Answer, proof: Answer) -> float:  # noqa: ARG002 - the proof's own time proves less
        """The lease was renewed no earlier than the instant just before the renewal was sent."""
        return renewed.sent_at

    def _confirm_loss(self, session: Session) -> Dialogue:
        """A keep-alive's word is no proof in either direction: look."""
        answer = yield Transaction(guards=self._alive(session))
        if _outcome(answer).succeeded:
            return Failed("the registry did not renew a lease that it still has")
        return SessionLost()

    def _seen(
        self, command: Heartbeat, outcome: contract.Outcome, proven_at: float, blockers: Sequence[NodeId]
    ) -> Alive:
        results = list(outcome.results)
        header, term = _entry(results.pop(0)), _entry(results.pop(0))
        fingerprint = None
        if command.leading:
            fingerprint = Fingerprint(
                members=_stats(results.pop(0)),
                resources=_stats(results.pop(0)),
                drains=_stats(results.pop(0)),
                acknowledgements=_stats(results.pop(0)),
            )
        leader_alive = command.leader is None or _entry(results.pop(0)) is not None
        released = [_entry(result) for result in results]
        return Alive(
            proven_at=proven_at,
            revision=outcome.revision,
            header_revision=header.mod_revision if header else 0,
            leadership_revision=term.mod_revision if term else 0,
            leader_alive=leader_alive,
            progress={
                node: entry.mod_revision if entry else 0
                for node, entry in zip(blockers, released, strict=True)
            },
            fingerprint=fingerprint,
        )

    def _read_share(self, command: ReadShare) -> Dialogue:
        node = command.session.node
        answer = yield Transaction(
            guards=self._alive(command.session),
            then=(Get(self.keys.header), Get(self.keys.term), Range(self.keys.shares_of(node))),
        )
        outcome = _outcome(answer)
        if not outcome.succeeded:
            return SessionLost()
        header_entry, term_entry = _entry(outcome.results[0]), _entry(outcome.results[1])
        header = values.load_header(header_entry) if header_entry else None
        share = None
        if header is not None and node in header.shares:
            share = self._share_in(_entries(outcome.results[2]), node, header)
        return ShareRead(
            revision=outcome.revision,
            header=header,
            share=share,
            leadership=values.load_leadership(term_entry) if term_entry else None,
        )

    def _share_in(self, entries: Iterable[KeyValue], node: NodeId, header: Header) -> Share:
        version = header.shares[node]
        key = self.keys.share(node, version)
        for entry in entries:
            if entry.key == key:
                return values.load_share(version, entry.value)
        raise InternalError(f"the header of version {header.version} names {key!r}, which is not there")

    def _read_barriers(self, command: ReadBarriers) -> Dialogue:
        mine: dict[Resource, Token] = {}
        for chunk in self._barrier_chunks(command.resources):
            answer = yield Transaction(
                guards=self._alive(command.session),
                then=tuple(Get(self.keys.barrier(resource)) for resource in chunk),
            )
            outcome = _outcome(answer)
            if not outcome.succeeded:
                return SessionLost()
            for resource, result in zip(chunk, outcome.results, strict=True):
                entry = _entry(result)
                if entry is not None and self._is_mine(entry, command.session):
                    mine[resource] = entry.create_revision
        return BarriersRead(mine)

    def _add_barriers(self, command: AddBarriers) -> Dialogue:
        """Add what is free, in as few transactions as the limits allow; learn who holds the rest.

        A chunk that fails after others took effect makes the whole command's outcome unknown, which is
        read back or repeated by the node like any other.
        """
        added: dict[Resource, Token] = {}
        blocked: dict[Resource, NodeId] = {}
        revision = 0
        for chunk in self._barrier_chunks(command.resources):
            try:
                answer = yield self._adding(command, chunk)
            except RebalanserError as error:
                return self._half_done(error, begun=bool(added))
            outcome = _outcome(answer)
            revision = revision or outcome.revision
            if not outcome.succeeded:
                if not self._is_session(_entry(outcome.results[0]), command.session):
                    return SessionLost()
                if added:
                    return Failed("the allocation changed between two chunks", unknown=True)
                return BarriersAdded(outcome.revision, {}, {}, superseded=True)
            self._sort_out(command.session, chunk, outcome, added, blocked)
        return BarriersAdded(revision, added, blocked)

    def _adding(self, command: AddBarriers, chunk: Sequence[Resource]) -> Transaction:
        session = command.session
        return Transaction(
            guards=self._alive(session) + self._acted_on(command.header_revision),
            then=tuple(
                Transaction(
                    guards=self._free(barrier),
                    then=(Put(barrier, session.node.encode(), session.lease),),
                    otherwise=(Get(barrier),),
                )
                for barrier in map(self.keys.barrier, chunk)
            ),
            otherwise=(Get(self.keys.node(session.node)),),
        )

    def _sort_out(
        self,
        session: Session,
        chunk: Sequence[Resource],
        outcome: contract.Outcome,
        added: dict[Resource, Token],
        blocked: dict[Resource, NodeId],
    ) -> None:
        for resource, result in zip(chunk, outcome.results, strict=True):
            attempt = _nested(result)
            if attempt.succeeded:
                added[resource] = outcome.revision
                continue
            entry = _entry(attempt.results[0])
            if entry is None:
                raise InternalError(f"the barrier of {resource!r} was there and was not")
            if self._is_mine(entry, session):
                added[resource] = entry.create_revision
            else:
                blocked[resource] = entry.value.decode()

    def _remove_barriers(self, command: RemoveBarriers) -> Dialogue:
        """Remove what is still this session's; each chunk wakes up who waits for this node.

        A chunk that fails after others took effect makes the whole command's outcome unknown.
        """
        revision = 0
        for chunk in self._barrier_chunks(command.barriers):
            try:
                answer = yield self._removing(command, chunk)
            except RebalanserError as error:
                return self._half_done(error, begun=revision > 0)
            outcome = _outcome(answer)
            if not outcome.succeeded:
                return SessionLost()
            revision = outcome.revision
        return BarriersRemoved(frozenset(command.barriers), revision)

    def _removing(self, command: RemoveBarriers, chunk: Sequence[Resource]) -> Transaction:
        session = command.session
        removals = tuple(
            Transaction(guards=self._mine(barrier, token), then=(Delete(barrier),))
            for barrier, token in ((self.keys.barrier(r), command.barriers[r]) for r in chunk)
        )
        told = Put(self.keys.release(session.node), b"", session.lease)
        return Transaction(guards=self._alive(session), then=(*removals, told))

    @staticmethod
    def _half_done(error: RebalanserError, begun: bool) -> Failed:
        lost = failure(error)
        return Failed(lost.error, unknown=lost.unknown or begun, fatal=lost.fatal)

    def _acknowledge(self, command: Acknowledge) -> Dialogue:
        session, key = command.session, self.keys.ack(command.session.node)
        answer = yield Transaction(
            guards=self._alive(session) + self._not_overtaken(key, command.replaces),
            then=(Put(key, str(command.version).encode(), session.lease),),
            otherwise=(Get(self.keys.node(session.node)), Get(key)),
        )
        outcome = _outcome(answer)
        if outcome.succeeded:
            return Acknowledged(command.version, outcome.revision)
        present = _entry(outcome.results[1])
        if not self._is_session(_entry(outcome.results[0]), session) or present is None:
            return SessionLost()
        return Acknowledged(int(present.value), present.mod_revision)

    def _not_overtaken(self, key: str, revision: int) -> tuple[Guard, ...]:
        """No other acknowledgement of this node was written since."""
        return (Unchanged(key, revision),)

    def _leave(self, command: Leave) -> Dialogue:
        """Remove the node, then revoke its lease, which takes whatever else is under it (RB-26)."""
        session = command.session
        yield Transaction(
            guards=self._alive(session),
            then=(
                Delete(self.keys.node(session.node)),
                Delete(self.keys.release(session.node)),
                Delete(self.keys.ack(session.node)),
            ),
        )
        yield Revoke(session.lease)
        return Left()

    def _campaign(self, command: Campaign) -> Dialogue:
        """Increment the term if nobody alive leads; after a lost answer find out who won."""
        session, keys = command.session, self.keys
        answer = yield Transaction(guards=self._alive(session), then=(Get(keys.term),))
        outcome = _outcome(answer)
        if not outcome.succeeded:
            return SessionLost()
        entry = _entry(outcome.results[0])
        current = values.load_leadership(entry) if entry else None
        if current is not None and current.leader == session.node:
            return Elected(current)
        vacant: tuple[Guard, ...] = (Absent(keys.term),)
        if current is not None:
            vacant = (*self._leads(current), Absent(keys.node(current.leader)))
        term = (current.term if current else 0) + 1
        answer = yield Transaction(
            guards=self._alive(session) + vacant,
            then=(Put(keys.term, values.dump_leadership(term, session.node)),),
            otherwise=(Get(keys.node(session.node)), Get(keys.term)),
        )
        outcome = _outcome(answer)
        if outcome.succeeded:
            return Elected(Leadership(term, session.node, outcome.revision))
        if not self._is_session(_entry(outcome.results[0]), session):
            return SessionLost()
        entry = _entry(outcome.results[1])
        if entry is None:
            raise InternalError("the term key is gone; it is never deleted")
        winner = values.load_leadership(entry)
        if winner.leader == session.node:
            return Elected(winner)
        return Follows(winner, outcome.revision)

    def _group_reads(self) -> tuple[Operation, ...]:
        keys = self.keys
        return (
            Get(keys.header),
            Range(keys.nodes),
            Range(keys.resources),
            Range(keys.drains),
            Range(keys.shares),
            Range(keys.acks),
        )

    def _group_in(self, outcome: contract.Outcome) -> Group:
        keys = self.keys
        header_entry = _entry(outcome.results[0])
        nodes, resources, drains, shares, acks = (_entries(result) for result in outcome.results[1:6])
        header = values.load_header(header_entry) if header_entry else None
        by_key = {entry.key: entry for entry in shares}
        named = {
            node: keys.share(node, version) for node, version in (header.shares if header else {}).items()
        }
        names = {keys.name(entry.key, keys.nodes): entry for entry in nodes}
        return Group(
            revision=outcome.revision,
            members={node: values.load_member(node, entry) for node, entry in names.items()},
            resources={
                name: values.load_resource(name, entry)
                for name, entry in ((keys.name(e.key, keys.resources), e) for e in resources)
            },
            drained=frozenset(keys.name(entry.key, keys.drains) for entry in drains),
            header=header,
            shares={
                node: values.load_share(header.shares[node], by_key[key].value)
                for node, key in named.items()
                if header is not None
            },
            leftover_shares=frozenset(keys.node_and_version(k) for k in by_key.keys() - set(named.values())),
            acknowledged={keys.name(entry.key, keys.acks): int(entry.value) for entry in acks},
            fingerprint=Fingerprint(*map(_fingerprint, (nodes, resources, drains, acks))),
        )

    def _read_group(self, command: ReadGroup) -> Dialogue:
        answer = yield Transaction(
            guards=self._alive(command.session) + self._leads(command.leadership),
            then=self._group_reads(),
            otherwise=(Get(self.keys.node(command.session.node)),),
        )
        outcome = _outcome(answer)
        if not outcome.succeeded:
            alive = self._is_session(_entry(outcome.results[0]), command.session)
            return Deposed() if alive else SessionLost()
        return GroupRead(self._group_in(outcome))

    def _publish(self, command: Publish) -> Dialogue:
        """Write the changed shares under keys of their own, then commit them all by the header.

        Where all fits in one transaction it is one. Else nobody reads a share before the header names it,
        and shares that no header names are deleted afterwards, by this leader or a later one.
        """
        leadership, plan = command.leadership, command.plan
        header = Put(self.keys.header, values.dump_header(plan.version, leadership.term, plan.shares))
        shares = [
            Put(self.keys.share(node, plan.version), values.dump_share(resources))
            for node, resources in sorted(plan.changed.items())
        ]
        outdated = [Delete(self.keys.share(node, version)) for node, version in sorted(plan.superseded)]
        together = list(self._chunks(_sized([*shares, *outdated, header])))
        if len(together) == 1:
            before, commit, after = [], together[0], []
        else:
            before = list(self._chunks(_sized(shares)))
            commit = [header]
            after = list(self._chunks(_sized(outdated)))
        for chunk in before:
            answer = yield self._as_leader(command, chunk)
            if not _outcome(answer).succeeded:
                return self._publish_refused(command, _outcome(answer))
        answer = yield self._as_leader(command, commit, self._based_on(plan.based_on))
        committed = _outcome(answer)
        if not committed.succeeded:
            return self._publish_refused(command, committed)
        for chunk in after:
            yield self._as_leader(command, chunk)
        return Published(Header(plan.version, leadership.term, committed.revision, plan.shares))

    def _as_leader(
        self, command: Publish, operations: Sequence[Operation], guards: tuple[Guard, ...] = ()
    ) -> Transaction:
        return Transaction(
            guards=self._alive(command.session) + self._leads(command.leadership) + guards,
            then=tuple(operations),
            otherwise=(Get(self.keys.node(command.session.node)), Get(self.keys.term)),
        )

    def _based_on(self, header: Header | None) -> tuple[Guard, ...]:
        """The allocation is still the one that the plan changes."""
        if header is None:
            return (Absent(self.keys.header),)
        return (Unchanged(self.keys.header, header.revision),)

    def _publish_refused(self, command: Publish, outcome: contract.Outcome) -> Outcome:
        if not self._is_session(_entry(outcome.results[0]), command.session):
            return SessionLost()
        term = _entry(outcome.results[1])
        if term is None or term.mod_revision != command.leadership.revision:
            return Deposed()
        return Conflict()

    def read(self) -> Reading[GroupView]:
        """All of the group with its barriers, at one revision."""
        reads = (*self._group_reads(), Range(self.keys.barriers), Get(self.keys.term))
        answer = yield Transaction(then=reads)
        outcome = _outcome(answer)
        term = _entry(outcome.results[7])
        return GroupView(
            group=self._group_in(outcome),
            leadership=values.load_leadership(term) if term else None,
            holdings=tuple(
                Holding(self.keys.resource_of_barrier(entry.key), entry.value.decode(), entry.create_revision)
                for entry in _entries(outcome.results[6])
            ),
        )

    def put_resources(self, specs: Sequence[ResourceSpec], progress: Progress) -> Reading[int]:
        """Write what differs from what is there; how many resources are new."""
        answer = yield Transaction(then=(Range(self.keys.resources),))
        present = {entry.key: entry.value for entry in _entries(_outcome(answer).results[0])}
        puts = [Put(self.keys.resource(spec.resource), values.dump_resource(spec)) for spec in specs]
        differing = [put for put in puts if present.get(put.key) != put.value]
        yield from self._change(differing, len(specs) - len(differing), progress)
        return sum(put.key not in present for put in puts)

    def remove_resources(self, resources: Sequence[Resource], progress: Progress) -> Reading[int]:
        """Delete what is there; how many there were."""
        answer = yield Transaction(then=(Range(self.keys.resources),))
        present = {entry.key for entry in _entries(_outcome(answer).results[0])}
        deletes = [Delete(key) for key in map(self.keys.resource, resources) if key in present]
        yield from self._change(deletes, len(resources) - len(deletes), progress)
        return len(deletes)

    def _change(self, operations: Sequence[Put | Delete], done: int, progress: Progress) -> Reading[None]:
        progress(done)
        for chunk in self._chunks(_sized(operations)):
            yield Transaction(then=tuple(chunk))
            done += len(chunk)
            progress(done)

    def set_drained(self, label: str, drained: bool) -> Reading[None]:
        """Mark a node as drained, or not; changes nothing where it is so already."""
        key = self.keys.drain(label)
        if drained:
            yield Transaction(guards=(Absent(key),), then=(Put(key, b""),))
        else:
            yield Transaction(then=(Delete(key),))

    def targets(self, topic: Topic) -> tuple[Target, ...]:
        """What to watch for a topic."""
        match topic.kind:
            case TopicKind.ALLOCATION:
                return (Target(self.keys.header),)
            case TopicKind.LEADERSHIP:
                return (Target(self.keys.term),)
            case TopicKind.NODE:
                return (Target(self.keys.node(topic.node)),)
            case TopicKind.PROGRESS:
                return (Target(self.keys.release(topic.node)),)
            case TopicKind.ACKNOWLEDGEMENTS:
                return (Target(self.keys.acks, prefix=True),)
            case TopicKind.GROUP:
                prefixes = (self.keys.nodes, self.keys.resources, self.keys.drains)
                return tuple(Target(prefix, prefix=True) for prefix in prefixes)

    def notices(self, topic: Topic, events: Sequence[WatchEvent], node: NodeId) -> list[Noticed]:
        """What a watched topic's events tell ``node``: the latest of them, or each acknowledgement."""
        if topic.kind is TopicKind.ACKNOWLEDGEMENTS:
            return [self._acknowledgement(topic, event) for event in events if not _is_deletion(event)]
        if topic.kind is TopicKind.NODE:
            events = [event for event in events if isinstance(event, HistoryLost) or _is_deletion(event)]
        if not events:
            return []
        latest = max(events, key=lambda event: event.revision)
        version = None
        if topic.kind is TopicKind.ALLOCATION and isinstance(latest, Changed) and latest.value is not None:
            version = values.load_header(_as_entry(latest)).shares.get(node)
        return [Noticed(topic, latest.revision, version)]

    def _acknowledgement(self, topic: Topic, event: WatchEvent) -> Noticed:
        if isinstance(event, HistoryLost) or event.value is None:
            return Noticed(topic, event.revision)
        acknowledger = self.keys.name(event.key, self.keys.acks)
        return Noticed(Topic(topic.kind, acknowledger), event.revision, int(event.value))


def _is_deletion(event: WatchEvent) -> bool:
    return isinstance(event, Changed) and event.value is None


def _as_entry(event: Changed) -> KeyValue:
    return KeyValue(event.key, event.value or b"", event.revision, event.revision)
