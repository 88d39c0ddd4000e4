"""The dialogues of a leader: becoming one, reading the group, publishing an allocation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rebalanser.errors import InternalError, UnusableStore
from rebalanser.protocol.messages import (
    Campaign,
    Conflict,
    Deposed,
    Elected,
    Follows,
    GroupRead,
    Outcome,
    Publish,
    Published,
    ReadGroup,
    Resign,
    Resigned,
    SessionLost,
)
from rebalanser.protocol.types import (
    Fingerprint,
    Group,
    Header,
    Leadership,
    Member,
    NodeId,
    Resource,
    ResourceSpec,
    SharePart,
    Trouble,
)
from rebalanser.redaction import redact
from rebalanser.registry import contract, values
from rebalanser.registry.contract import (
    Absent,
    Delete,
    Get,
    Guard,
    KeyValue,
    Operation,
    Put,
    Range,
    Transaction,
)
from rebalanser.registry.dialogue import (
    Dialogue,
    Dialogues,
    all_entries,
    fingerprint_of,
    one_entry,
    outcome_of,
    readable,
    sized,
)

MAX_ERROR_CHARS: Final = 500
"""Maximum characters of the error with which a leader resigns."""


class LeaderDialogues(Dialogues):
    """What a node does for its group."""

    def _campaign(self, command: Campaign) -> Dialogue:
        """Increment the term if nobody alive leads; after a lost answer find out who won (RB-5)."""
        session, keys = command.session, self.keys
        answer = yield Transaction(guards=self._alive(session), then=(Get(keys.term),))
        outcome = outcome_of(answer)
        if not outcome.succeeded:
            return SessionLost()
        entry = one_entry(outcome.results[0])
        current = values.load_leadership(entry) if entry else None
        if current is not None and current.leader == session.node:
            return Elected(current)
        vacant: tuple[Guard, ...] = (Absent(keys.term),)
        if current is not None:
            vacant = (*self._leads(current), Absent(keys.node(current.leader)))
        term = (current.term if current else 0) + 1
        trouble = current.trouble if current else None
        answer = yield Transaction(
            guards=self._alive(session) + vacant,
            then=(Put(keys.term, values.dump_leadership(term, session.node, trouble)),),
            otherwise=(Get(keys.node(session.node)), Get(keys.term)),
        )
        outcome = outcome_of(answer)
        if outcome.succeeded:
            return Elected(Leadership(term, session.node, outcome.revision, trouble))
        if not self._is_session(one_entry(outcome.results[0]), session):
            return SessionLost()
        entry = one_entry(outcome.results[1])
        if entry is None:
            raise InternalError("the term key is gone; it is never deleted")
        winner = values.load_leadership(entry)
        if winner.leader == session.node:
            return Elected(winner)
        return Follows(winner, outcome.revision)

    def _resign(self, command: Resign) -> Dialogue:
        """Write that nobody leads the term, which ends it for this node as another term would."""
        term = command.leadership.term
        error = redact(command.error).encode(errors="backslashreplace").decode()
        trouble = Trouble(term, error[:MAX_ERROR_CHARS])
        vacated = Put(self.keys.term, values.dump_leadership(term, "", trouble))
        outcome = outcome_of((yield self._as_leader(command, [vacated])))
        if outcome.succeeded:
            return Resigned(Leadership(term, "", outcome.revision, trouble))
        return (
            Deposed() if self._is_session(one_entry(outcome.results[0]), command.session) else SessionLost()
        )

    def _group_reads(self) -> tuple[Operation, ...]:
        keys = self.keys
        return (
            Get(keys.header),
            Range(keys.nodes),
            Range(keys.resources),
            Range(keys.drains),
            Range(keys.shares),
            Range(keys.acks),
            Get(keys.operator),
        )

    def _group_in(self, outcome: contract.Outcome) -> Group:
        header_entry = one_entry(outcome.results[0])
        nodes, resources, drains, shares, acks = (all_entries(result) for result in outcome.results[1:6])
        header = values.load_header(header_entry) if header_entry else None
        named = header.shares if header else {}
        unreadable: dict[str, str] = {}
        parts = self._parts_in(shares, unreadable)
        return Group(
            revision=outcome.revision,
            members=readable(nodes, self._member, unreadable),
            resources=self._resources_in(resources, unreadable),
            drained=frozenset(readable(drains, self._drain, unreadable)),
            header=header,
            shares=self._shares_in(header, parts, unreadable) if header else {},
            leftover_shares=frozenset(part for part in parts if named.get(part.node) != part.version),
            acknowledged=readable(acks, self._completed, unreadable),
            fingerprint=Fingerprint(
                members=fingerprint_of(nodes),
                changes=values.load_changes(one_entry(outcome.results[6])),
                acknowledgements=fingerprint_of(acks),
            ),
            unreadable=unreadable,
        )

    def _member(self, entry: KeyValue) -> tuple[NodeId, Member]:
        node = self.keys.name(entry.key, self.keys.nodes)
        return node, values.load_member(node, entry)

    def _drain(self, entry: KeyValue) -> tuple[str, None]:
        return self.keys.name(entry.key, self.keys.drains), None

    def _completed(self, entry: KeyValue) -> tuple[NodeId, int]:
        return self.keys.name(entry.key, self.keys.acks), values.load_acknowledgement(entry)

    def _resources_in(
        self, entries: Iterable[KeyValue], unreadable: dict[str, str]
    ) -> dict[Resource, ResourceSpec]:
        """The resources; one whose value can't be read stays a resource, so that work on it goes on."""

        def load(entry: KeyValue) -> tuple[Resource, ResourceSpec]:
            name = self.keys.name(entry.key, self.keys.resources)
            try:
                return name, values.load_resource(name, entry)
            except UnusableStore as error:
                unreadable[entry.key] = str(error)
                return name, ResourceSpec(name)

        return readable(entries, load, unreadable)

    def _read_group(self, command: ReadGroup) -> Dialogue:
        answer = yield Transaction(
            guards=self._alive(command.session) + self._leads(command.leadership),
            then=self._group_reads(),
            otherwise=(Get(self.keys.node(command.session.node)),),
        )
        outcome = outcome_of(answer)
        if not outcome.succeeded:
            alive = self._is_session(one_entry(outcome.results[0]), command.session)
            return Deposed() if alive else SessionLost()
        return GroupRead(self._group_in(outcome))

    def _publish(self, command: Publish) -> Dialogue:
        """Write the changed shares under keys of their own, then commit them all by the header.

        Where all fits in one transaction it is one. Else nobody reads a share before the header names it,
        and shares that no header names are deleted afterwards, by this leader or a later one. What leaders of
        earlier terms left is deleted first: otherwise leaders that fail, one after another, would fill the
        registry. What this leader may have left stays, as a publication of unknown outcome may still name it.
        """
        leadership, plan = command.leadership, command.plan
        header = Put(self.keys.header, values.dump_header(plan.version, leadership.term, plan.shares))
        shares = [
            put
            for node in sorted(plan.changed)
            for put in self._parts(node, plan.version, plan.changed[node])
        ]
        abandoned = [Delete(self.keys.share(part)) for part in sorted(plan.abandoned)]
        outdated = [
            *abandoned,
            *(Delete(self.keys.share(part)) for part in sorted(plan.superseded - plan.abandoned)),
        ]
        together = list(self._chunks(sized([*shares, *outdated, header])))
        if len(together) == 1:
            before, commit, after = [], together[0], []
        else:
            before = [*self._chunks(sized(abandoned)), *self._chunks(sized(shares))]
            commit = [header]
            after = list(self._chunks(sized(outdated[len(abandoned) :])))
        for chunk in before:
            answer = yield self._as_leader(command, chunk)
            if not outcome_of(answer).succeeded:
                return self._publish_refused(command, outcome_of(answer))
        answer = yield self._as_leader(command, commit, self._based_on(plan.based_on))
        committed = outcome_of(answer)
        if not committed.succeeded:
            return self._publish_refused(command, committed)
        for chunk in after:
            yield self._as_leader(command, chunk)
        return Published(Header(plan.version, leadership.term, committed.revision, plan.shares))

    def _parts(self, node: NodeId, version: int, resources: Iterable[Resource]) -> list[Put]:
        share = SharePart(node, version)
        parts = values.dump_share(resources, self._part_bytes(share))
        return [Put(self.keys.share(share._replace(part=part)), value) for part, value in enumerate(parts)]

    def _as_leader(
        self, command: Publish | Resign, operations: Sequence[Operation], guards: tuple[Guard, ...] = ()
    ) -> Transaction:
        return Transaction(
            guards=self._alive(command.session) + self._leads(command.leadership) + guards,
            then=tuple(operations),
            otherwise=(Get(self.keys.node(command.session.node)), Get(self.keys.term)),
        )

    def _publish_refused(self, command: Publish, outcome: contract.Outcome) -> Outcome:
        if not self._is_session(one_entry(outcome.results[0]), command.session):
            return SessionLost()
        term = one_entry(outcome.results[1])
        if term is None or term.mod_revision != command.leadership.revision:
            return Deposed()
        return Conflict()
