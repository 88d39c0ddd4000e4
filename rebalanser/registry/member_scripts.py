"""The scripts of a member: joining, proving life, its share, its barriers, leaving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rebalanser.core.group.messages import (
    Acknowledge,
    Acknowledged,
    AddBarriers,
    Alive,
    BarriersAdded,
    BarriersRead,
    BarriersRemoved,
    Failed,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Left,
    ReadBarriers,
    ReadShare,
    RecordReleases,
    ReleasesRecorded,
    RemoveBarriers,
    SessionLost,
    ShareRead,
)
from rebalanser.core.group.types import (
    Fingerprint,
    NodeId,
    Resource,
    Session,
    Token,
)
from rebalanser.errors import (
    InternalError,
    InvalidSettings,
    LeaseNotFound,
    RebalanserError,
    UnusableStore,
)
from rebalanser.registry import contract, values
from rebalanser.registry.contract import (
    Delete,
    Done,
    Get,
    Grant,
    Granted,
    KeepAlive,
    KeyValue,
    Operation,
    Put,
    Range,
    Revoke,
    Stat,
    Transaction,
)
from rebalanser.registry.script import (
    ROUNDING_S,
    Answer,
    CommandScript,
    Script,
    Scripts,
    all_entries,
    failure,
    nested_outcome,
    one_entry,
    outcome_of,
    revision_of,
    sized,
    stats_of,
)

RENEWED_IN_VAIN: Final = "the keep-alive was answered in another term of the registry's leader than the proof"


class MemberScripts(Scripts):
    """Scripts of the commands that a node performs for itself."""

    def _join(self, command: Join) -> CommandScript:
        """Grant a lease and create the node key; after a lost answer adopt the key and lease that are found
        (RB-4)."""
        member = command.member
        granted = yield Grant(command.lease_ttl_s)
        if not isinstance(granted.reply, Granted):
            raise InternalError(f"a grant was answered with {granted.reply!r}")
        lease = granted.reply.lease
        if granted.reply.ttl_s >= command.lease_ttl_s + ROUNDING_S:
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
                Put(self.keys.removal(member.node), b"", lease),
                Put(self.keys.ack(member.node), b"0", lease),
            ),
            otherwise=(Get(key),),
        )
        outcome = outcome_of(answer)
        if outcome.succeeded:
            return Joined(Session(member.node, lease, outcome.revision), granted.sent_at)
        return (yield from self._take_over(member.node, lease, one_entry(outcome.results[0])))

    def _take_over(self, node: NodeId, spare_lease: int, found: KeyValue | None) -> CommandScript:
        yield Revoke(spare_lease)
        if found is None:
            return Failed("the node key came and went; register again")
        session = Session(node, found.lease, found.create_revision)
        proof = Transaction(guards=self._alive(session))
        renewed = yield KeepAlive(session.lease, proof)
        answer = yield from self._proof_of(renewed, proof)
        if not outcome_of(answer).succeeded:
            return Failed("the lease of an earlier attempt has ended; register again")
        if not self._is_renewal(renewed, answer):
            return Failed(RENEWED_IN_VAIN)
        return Joined(session, renewed.sent_at)

    def _heartbeat(self, command: Heartbeat) -> CommandScript:
        """Renew, then prove by a linearizable read that the renewed lease lived afterwards.

        A failure has no effect only if the renewal had none: after that it may have renewed, whatever failed.
        """
        session, keys = command.session, self.keys
        looks: list[Operation] = [
            Stat(keys.shares_of(session.node)),
            Get(keys.header, keys_only=True),
            Get(keys.term, keys_only=True),
        ]
        if command.read_fingerprint:
            looks += [Stat(keys.nodes), Get(keys.operator), Stat(keys.acks)]
        if command.leader is not None:
            looks.append(Get(keys.node(command.leader), keys_only=True))
        blockers = sorted(command.blockers)[: max(0, self._max_operations - len(looks))]
        looks += [Get(keys.removal(node)) for node in blockers]
        proof = Transaction(guards=self._alive(session), then=tuple(looks))
        try:
            renewed = yield KeepAlive(session.lease, proof)
        except LeaseNotFound:
            return (yield from self._confirm_loss(session))
        try:
            answer = yield from self._proof_of(renewed, proof)
        except RebalanserError as error:
            return self._half_done(error, begun=True)
        outcome = outcome_of(answer)
        if not outcome.succeeded:
            return SessionLost()
        if not self._is_renewal(renewed, answer):
            return Failed(RENEWED_IN_VAIN, unknown=True)
        return self._seen(command, outcome, self._proven_at(renewed, answer), blockers)

    def _proof_of(self, renewed: Answer, proof: Transaction) -> Script[Answer]:
        """Return the answer to the proof: that of the renewal if the registry did both in one step."""
        if isinstance(renewed.reply, contract.Outcome):
            return renewed
        return (yield proof)

    def _is_renewal(self, renewed: Answer, proof: Answer) -> bool:
        """Return True if one leader of the registry answered both: a deposed one renews nothing (RB-21)."""
        if not isinstance(renewed.reply, Done | contract.Outcome):
            raise InternalError(f"a keep-alive was answered with {renewed.reply!r}")
        return renewed.reply.term == outcome_of(proof).term

    def _proven_at(self, renewed: Answer, proof: Answer) -> float:  # noqa: ARG002 - the proof's own time proves less
        """Return the instant just before the renewal was sent: the lease was renewed no earlier."""
        return renewed.sent_at

    def _confirm_loss(self, session: Session) -> CommandScript:
        """Read the node key: the answer to a keep-alive proves neither life nor loss."""
        try:
            answer = yield Transaction(guards=self._alive(session))
        except RebalanserError as error:
            return self._half_done(error, begun=True)
        if outcome_of(answer).succeeded:
            return Failed("the registry did not renew a lease that it still has", unknown=True)
        return SessionLost()

    def _seen(
        self, command: Heartbeat, outcome: contract.Outcome, proven_at: float, blockers: Sequence[NodeId]
    ) -> Alive:
        results = list(outcome.results)
        _, share_revision = stats_of(results.pop(0))
        header_revision, leadership_revision = revision_of(results.pop(0)), revision_of(results.pop(0))
        fingerprint = None
        if command.read_fingerprint:
            fingerprint = Fingerprint(
                members=stats_of(results.pop(0)),
                changes=values.load_changes(one_entry(results.pop(0))),
                acknowledgements=stats_of(results.pop(0)),
            )
        leader_alive = command.leader is None or one_entry(results.pop(0)) is not None
        return Alive(
            proven_at=proven_at,
            revision=outcome.revision,
            share_revision=share_revision,
            header_revision=header_revision,
            leadership_revision=leadership_revision,
            leader_alive=leader_alive,
            removals=dict(zip(blockers, map(revision_of, results), strict=True)),
            fingerprint=fingerprint,
        )

    def _read_share(self, command: ReadShare) -> CommandScript:
        """Read the share, and delete the node's earlier ones: no late request can act on them any more.

        So shares of other nodes may change while this node keeps adding barriers (RB-14).
        """
        node = command.session.node
        answer = yield Transaction(
            guards=self._alive(command.session),
            then=(Get(self.keys.header), Get(self.keys.term), Range(self.keys.shares_of(node))),
        )
        outcome = outcome_of(answer)
        if not outcome.succeeded:
            return SessionLost()
        header_entry, term_entry = one_entry(outcome.results[0]), one_entry(outcome.results[1])
        header = values.load_header(header_entry) if header_entry else None
        share, unreadable = None, dict[str, str]()
        stored = self._parts_in(all_entries(outcome.results[2]), unreadable)
        if header is not None:
            share = self._shares_in(header, stored, unreadable).get(node)
        if share is None and unreadable:
            raise UnusableStore("; ".join(unreadable.values()))
        if share is not None:
            earlier = [entry.key for part, entry in stored.items() if part.version < share.version]
            for chunk in self._chunks(sized(map(Delete, earlier))):
                answer = yield Transaction(guards=self._alive(command.session), then=tuple(chunk))
                if not outcome_of(answer).succeeded:
                    return SessionLost()
        return ShareRead(
            revision=outcome.revision,
            header=header,
            share=share,
            leadership=values.load_leadership(term_entry) if term_entry else None,
            pending=any(part.version > (header.version if header else 0) for part in stored),
        )

    def _read_barriers(self, command: ReadBarriers) -> CommandScript:
        mine: dict[Resource, Token] = {}
        for chunk in self._barrier_chunks(command.resources):
            answer = yield Transaction(
                guards=self._alive(command.session),
                then=tuple(Get(self.keys.barrier(resource)) for resource in chunk),
            )
            outcome = outcome_of(answer)
            if not outcome.succeeded:
                return SessionLost()
            for resource, result in zip(chunk, outcome.results, strict=True):
                entry = one_entry(result)
                if entry is not None and self._is_mine(entry, command.session):
                    mine[resource] = entry.create_revision
        return BarriersRead(mine)

    def _add_barriers(self, command: AddBarriers) -> CommandScript:
        """Add free barriers, in as few transactions as the limits allow; read the holders of the rest.

        A chunk that fails ends the script. The outcome has the result of the chunks before it, so that every
        attempt makes progress, however often the allocation of others changes.
        """
        added: dict[Resource, Token] = {}
        blocked: dict[Resource, NodeId] = {}
        revision = 0
        for chunk in self._barrier_chunks(command.resources):
            try:
                answer = yield self._adding(command, chunk)
            except RebalanserError as error:
                failed = self._half_done(error, begun=False)
                if not added and not blocked:
                    return failed
                return BarriersAdded(
                    revision, added, blocked, unknown=frozenset(chunk) if failed.unknown else frozenset()
                )
            outcome = outcome_of(answer)
            revision = revision or outcome.revision
            if not outcome.succeeded:
                if not self._is_session(one_entry(outcome.results[0]), command.session):
                    return SessionLost()
                return BarriersAdded(revision, added, blocked, superseded=True)
            self._sort_out(command.session, chunk, outcome, added, blocked)
        return BarriersAdded(revision, added, blocked)

    def _adding(self, command: AddBarriers, chunk: Sequence[Resource]) -> Transaction:
        session = command.session
        return Transaction(
            guards=self._alive(session) + self._has_share(session.node, command.version, command.revision),
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
            attempt = nested_outcome(result)
            if attempt.succeeded:
                added[resource] = outcome.revision
                continue
            entry = one_entry(attempt.results[0])
            if entry is None:
                raise InternalError(f"the barrier of {resource!r} was there and was not")
            if self._is_mine(entry, session):
                added[resource] = entry.create_revision
            else:
                blocked[resource] = entry.value.decode(errors="replace")

    def _remove_barriers(self, command: RemoveBarriers) -> CommandScript:
        """Remove barriers that are still this session's; each chunk wakes up nodes that wait for this one.

        A chunk that fails after others took effect makes the whole command's outcome unknown. A barrier that
        was gone before, perhaps by an earlier attempt, was removed at an unknown revision.
        """
        removed_at: dict[Resource, int] = {}
        revision = 0
        for chunk in self._barrier_chunks(command.barriers):
            try:
                answer = yield self._removing(command, chunk)
            except RebalanserError as error:
                return self._half_done(error, begun=revision > 0)
            outcome = outcome_of(answer)
            if not outcome.succeeded:
                return SessionLost()
            revision = outcome.revision
            removed_at.update(
                (resource, revision)
                for resource, result in zip(chunk, outcome.results[:-1], strict=True)
                if nested_outcome(result).succeeded
            )
        return BarriersRemoved(frozenset(command.barriers), revision, removed_at)

    def _removing(self, command: RemoveBarriers, chunk: Sequence[Resource]) -> Transaction:
        session = command.session
        removals = tuple(
            Transaction(guards=self._mine(barrier, token), then=(Delete(barrier),))
            for barrier, token in ((self.keys.barrier(r), command.barriers[r]) for r in chunk)
        )
        signal = Put(self.keys.removal(session.node), b"", session.lease)
        return Transaction(guards=self._alive(session), then=(*removals, signal))

    def _acknowledge(self, command: Acknowledge) -> CommandScript:
        session, key = command.session, self.keys.ack(command.session.node)
        answer = yield Transaction(
            guards=self._alive(session) + self._not_overtaken(key, command.replaces),
            then=(Put(key, str(command.version).encode(), session.lease),),
            otherwise=(Get(self.keys.node(session.node)), Get(key)),
        )
        outcome = outcome_of(answer)
        if outcome.succeeded:
            return Acknowledged(command.version, outcome.revision)
        present = one_entry(outcome.results[1])
        if not self._is_session(one_entry(outcome.results[0]), session) or present is None:
            return SessionLost()
        return Acknowledged(values.load_acknowledgement(present), present.mod_revision)

    def _record_releases(self, command: RecordReleases) -> CommandScript:
        """Rewrite the node key over the record that this node last wrote; else return what is stored."""
        session, key = command.session, self.keys.node(command.session.node)
        answer = yield Transaction(
            guards=self._alive(session) + self._not_overtaken(key, command.replaces),
            then=(Put(key, values.dump_member(command.member), session.lease),),
            otherwise=(Get(key),),
        )
        outcome = outcome_of(answer)
        if outcome.succeeded:
            return ReleasesRecorded(command.member.released, outcome.revision)
        present = one_entry(outcome.results[0])
        if present is None or not self._is_session(present, session):
            return SessionLost()
        return ReleasesRecorded(values.load_member(session.node, present).released, present.mod_revision)

    def _leave(self, command: Leave) -> CommandScript:
        """Revoke the lease, which removes the node with it (RB-26).

        In one step: were the node removed first, a late copy of its registration could bring it back.
        """
        yield Revoke(command.session.lease)
        return Left()
