"""The scripts of a leader: becoming one, reading the group, publishing an allocation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from rebalanser.core.group.messages import (
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
from rebalanser.core.group.types import (
    Fingerprint,
    Group,
    Header,
    Leadership,
    Member,
    NodeId,
    Plan,
    Policy,
    Resource,
    ResourceSpec,
    Share,
    SharePart,
    Trouble,
)
from rebalanser.errors import InternalError, UnusableStore
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
    Result,
    Stat,
    Transaction,
)
from rebalanser.registry.script import (
    CommandScript,
    ItemT,
    Script,
    Scripts,
    all_entries,
    fingerprint_of,
    one_entry,
    outcome_of,
    readable,
    sized,
    stats_of,
)

MAX_ERROR_CHARS: Final = 500
"""Maximum characters of the error with which a leader resigns."""
MAX_ROUNDS: Final = 4
"""Maximum rounds in which a leader tries to read only changes, while operators go on."""
MAX_SINGLE_READS: Final = 100
"""Maximum keys that a leader reads one by one; in a large group a quarter of the resources, if more."""
NameT = TypeVar("NameT")


class LeaderScripts(Scripts):
    """Scripts of the commands that a node performs for its group."""

    policy = Policy()
    """The last policy that could be read. It is used while the stored one can't be."""

    def _campaign(self, command: Campaign) -> CommandScript:
        """Increment the term if no live node leads; after a lost answer read who won (RB-5)."""
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
            vacant = self._leads(current)
            if current.leader:
                vacant += (Absent(keys.node(current.leader)),)
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

    def _resign(self, command: Resign) -> CommandScript:
        """Write that no node leads the term, which ends it for this node as another term would."""
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
            Range(keys.header),
            Range(keys.nodes),
            Range(keys.resources),
            Range(keys.drains),
            Range(keys.shares),
            Range(keys.acks),
            Get(keys.operator),
            Get(keys.policy),
        )

    def _group_in(self, outcome: contract.Outcome) -> Group:
        unreadable: dict[str, str] = {}
        header, remembered = self._header_in(outcome.results[0], unreadable)
        nodes, resources, drains, shares, acks = (all_entries(result) for result in outcome.results[1:6])
        stored, obsolete = self._allocation_in(header, shares, unreadable)
        return Group(
            revision=outcome.revision,
            members=readable(nodes, self._member, unreadable),
            resources=self._resources_in(resources, unreadable),
            drained=frozenset(readable(drains, self._drain, unreadable)),
            header=header,
            shares=stored,
            obsolete_parts=obsolete,
            acknowledged=readable(acks, self._completed, unreadable),
            fingerprint=Fingerprint(
                members=fingerprint_of(nodes),
                changes=values.load_changes(one_entry(outcome.results[6])),
                acknowledgements=fingerprint_of(acks),
            ),
            policy=self._policy_in(one_entry(outcome.results[7]), unreadable),
            remembered=remembered,
            unreadable=unreadable,
        )

    def _allocation_in(
        self, header: Header | None, entries: Iterable[KeyValue], unreadable: dict[str, str]
    ) -> tuple[dict[NodeId, Share], frozenset[SharePart]]:
        """Return the shares of the allocation, and the obsolete parts."""
        parts = self._parts_in(entries, unreadable)
        shares = self._shares_in(header, parts, unreadable) if header else {}
        versions = {node: share.version for node, share in shares.items()}
        return shares, frozenset(part for part in parts if versions.get(part.node) != part.version)

    def _member(self, entry: KeyValue) -> tuple[NodeId, Member]:
        node = self.keys.name(entry.key, self.keys.nodes)
        return node, values.load_member(node, entry)

    def _header_in(
        self, result: Result, unreadable: dict[str, str]
    ) -> tuple[Header | None, dict[NodeId, Member]]:
        """Return the header, and the members that are remembered beside it: one range has both."""
        entries = {entry.key: entry for entry in all_entries(result)}
        entry = entries.pop(self.keys.header, None)
        header = values.load_header(entry) if entry else None
        return header, readable(entries.values(), self._remembered, unreadable)

    def _remembered(self, entry: KeyValue) -> tuple[NodeId, Member]:
        node = self.keys.name(entry.key, self.keys.remembered)
        return node, replace(values.load_member(node, entry), registered=0)

    def _policy_in(self, entry: KeyValue | None, unreadable: dict[str, str]) -> Policy:
        try:
            self.policy = values.load_policy(entry)
        except UnusableStore as error:
            unreadable[self.keys.policy] = str(error)
        return self.policy

    def _drain(self, entry: KeyValue) -> tuple[str, None]:
        return self.keys.name(entry.key, self.keys.drains), None

    def _completed(self, entry: KeyValue) -> tuple[NodeId, int]:
        return self.keys.name(entry.key, self.keys.acks), values.load_acknowledgement(entry)

    def _record(self, entry: KeyValue) -> tuple[int, list[str] | None]:
        return self.keys.change_number(entry.key), values.load_change(entry)

    def _resources_in(
        self, entries: Iterable[KeyValue], unreadable: dict[str, str]
    ) -> dict[Resource, ResourceSpec]:
        """Return the resources; one with an unreadable value stays a resource, so that work on it
        continues."""

        def load(entry: KeyValue) -> tuple[Resource, ResourceSpec]:
            name = self.keys.name(entry.key, self.keys.resources)
            try:
                return name, values.load_resource(name, entry)
            except UnusableStore as error:
                unreadable[entry.key] = str(error)
                return name, ResourceSpec(name)

        return readable(entries, load, unreadable)

    def _read_group(self, command: ReadGroup) -> CommandScript:
        """Read the changes since the known group; read all if none is known or changes would take longer."""
        if command.known is not None:
            update = _Update(command, command.known)
            done = yield from self._read_changes(command, update)
            if done is not None:
                return done
        outcome = outcome_of((yield self._reading(command, self._group_reads())))
        if not outcome.succeeded:
            return self._reading_refused(command, outcome)
        return GroupRead(self._group_in(outcome))

    def _read_changes(self, command: ReadGroup, update: _Update) -> Script[Outcome | None]:
        """Read in rounds until nothing is missing. Return None if reading all is better.

        The record of each operator request names what changed of the resources, the drains and the policy.
        Every round reads all members that were put since the group is known, whatever watches reported. So no
        member is missing, and if there are as many keys as the leader holds, none is gone either. Watches
        report which are gone: otherwise all members are read. The shares are the leader's own. What watches
        reported is read in the first round, which is usually the only one.
        """
        policy = update.policy
        for _ in range(MAX_ROUNDS):
            if update.takes_longer:
                return None
            for reads in self._round(update):
                outcome = outcome_of((yield self._reading(command, reads)))
                if not outcome.succeeded:
                    return self._reading_refused(command, outcome)
                found = dict(zip(reads, outcome.results, strict=True))
                update.note(reads, outcome.revision)
                self._take_entries(update, found)
            self._take_head(update, found)
            if update.complete:
                changed = frozenset(update.resources) if update.policy == policy else None
                return GroupRead(update.group(outcome.revision), update.read, changed)
        return None

    def _round(self, update: _Update) -> list[list[Operation]]:
        """Return the transactions of a round; the last one has the head, which shows if anything is missing.

        Of a member's key only its presence is read: the head reads its value if that is new.
        """
        keys = self.keys
        head: list[Operation] = [
            Get(keys.header) if update.shares_known else Range(keys.header),
            Get(keys.operator),
            self._records(update),
            Stat(keys.nodes),
            Stat(keys.acks),
            self._members(update),
        ]
        if not update.shares_known:
            head.append(Range(keys.shares))
        if update.reread_acknowledgements:
            head.append(self._acknowledgements(update))
        gets = ((Get(key, key.startswith(keys.nodes)), len(key)) for key in sorted(update.to_read))
        chunks: list[list[Operation]] = list(self._chunks(gets))
        if chunks and len(head) + len(chunks[-1]) <= self._max_operations:
            head += chunks.pop()
        return [*chunks, head]

    def _records(self, update: _Update) -> Range:
        """Read the records of operator requests that are not known yet."""
        return Range(self.keys.changes, after=self.keys.change(update.requests))

    def _members(self, update: _Update) -> Range:
        """Read the members that were put since the known group, or all if a member may be gone."""
        since = update.known.revision if update.members_known else 0
        return Range(self.keys.nodes, modified_after=since)

    def _acknowledgements(self, update: _Update) -> Range:
        """Return the acknowledgements that are not known, or all if one that may be gone could not be
        read."""
        unreadable = any(key.startswith(self.keys.acks) for key in update.known.unreadable)
        return Range(self.keys.acks, modified_after=0 if unreadable else update.acknowledged_until)

    def _take_entries(self, update: _Update, found: Mapping[Operation, Result]) -> None:
        """Apply the keys of members, resources, drains and the policy that were read one by one."""
        keys = self.keys
        for read, result in found.items():
            if not isinstance(read, Get) or read.key in (keys.header, keys.operator):
                continue
            key, entry = read.key, one_entry(result)
            entries = () if entry is None else (entry,)
            if key.startswith(keys.nodes):
                if entry is None:
                    self._take_member(update, key, entries)
                continue
            update.unreadable.pop(key, None)
            if key == keys.policy:
                update.policy = self._policy_in(entry, update.unreadable)
            elif key.startswith(keys.resources):
                name = self._name(key, keys.resources)
                update.resources[name] = self._resources_in(entries, update.unreadable).get(name)
            elif key.startswith(keys.drains):
                label = self._name(key, keys.drains)
                drains = readable(entries, self._drain, update.unreadable)
                update.drains[label] = label if label in drains else None

    def _take_member(self, update: _Update, key: str, entries: tuple[KeyValue, ...]) -> None:
        """Apply the key of a member that was put, or is gone."""
        node = self._name(key, self.keys.nodes)
        was_there = update.unreadable.pop(key, None) is not None or update.has_member(node)
        update.members[node] = readable(entries, self._member, update.unreadable).get(node)
        update.member_keys += len(entries) - was_there

    def _take_head(self, update: _Update, found: Mapping[Operation, Result]) -> None:
        """Apply the rest, and find what is missing."""
        keys = self.keys
        requests = values.load_changes(one_entry(found[Get(keys.operator)]))
        records = readable(all_entries(found[self._records(update)]), self._record, {})
        changed = [names for number, names in records.items() if update.requests < number <= requests]
        update.gap = len(changed) != requests - update.requests or None in changed
        update.requests = requests
        update.to_read = {keys.prefix + key for names in changed for key in names or ()}
        update.to_read -= {read.key for read in found if isinstance(read, Get)}
        update.acknowledgements = stats_of(found[Stat(keys.acks)])
        self._take_members(update, found)
        if update.reread_acknowledgements:
            read = self._acknowledgements(update)
            entries = update.reread(keys.acks, found[read])
            known = update.known.acknowledged if read.modified_after else {}
            update.acknowledged = {**known, **readable(entries, self._completed, update.unreadable)}
        self._take_shares(update, found)

    def _take_members(self, update: _Update, found: Mapping[Operation, Result]) -> None:
        result = found[self._members(update)]
        if update.members_known:
            for entry in all_entries(result):
                self._take_member(update, entry.key, (entry,))
        else:
            entries = update.reread(self.keys.nodes, result)
            update.known = replace(update.known, members=readable(entries, self._member, update.unreadable))
            update.members.clear()
            update.member_keys = len(entries)
        update.stats = stats_of(found[Stat(self.keys.nodes)])
        update.members_known = update.stats[0] == update.member_keys

    def _take_shares(self, update: _Update, found: Mapping[Operation, Result]) -> None:
        if Range(self.keys.header) in found:
            update.reread(self.keys.remembered, found[Range(self.keys.header)])
            header, remembered = self._header_in(found[Range(self.keys.header)], update.unreadable)
            entries = update.reread(self.keys.shares, found[Range(self.keys.shares)])
            shares, obsolete = self._allocation_in(header, entries, update.unreadable)
            update.known = replace(
                update.known,
                header=header,
                shares=shares,
                obsolete_parts=obsolete,
                remembered=remembered,
            )
            update.shares_known = True
            return
        entry = one_entry(found[Get(self.keys.header)])
        update.shares_known = (values.load_header(entry) if entry else None) == update.known.header

    def _name(self, key: str, prefix: str) -> str:
        """Return the name in a key; empty for a key that no Rebalanser wrote."""
        try:
            return self.keys.name(key, prefix)
        except UnusableStore:
            return ""

    def _reading(self, command: ReadGroup, reads: Sequence[Operation]) -> Transaction:
        return Transaction(
            guards=self._alive(command.session) + self._leads(command.leadership),
            then=tuple(reads),
            otherwise=(Get(self.keys.node(command.session.node)),),
        )

    def _reading_refused(self, command: ReadGroup, outcome: contract.Outcome) -> Outcome:
        alive = self._is_session(one_entry(outcome.results[0]), command.session)
        return Deposed() if alive else SessionLost()

    def _publish(self, command: Publish) -> CommandScript:
        """Write the changed shares under keys of their own, then commit them all by the header.

        If everything fits in one transaction, there is only one. Otherwise no node acts on a share before the
        header commits it, and obsolete parts are deleted afterwards, by this leader or a later one. Orphaned
        parts are deleted first: otherwise leaders that fail, one after another, would fill the registry.
        Parts that this leader may have left stay, as a publication of unknown outcome may still commit them.

        Shares are written only while the allocation is the one that the plan changes: no share is ever added
        to a version that a later header would take for committed.

        Members are remembered before the header commits their shares, and forgotten with it: what a later
        leader finds of a grace that is over is an ordinary share of a node that is gone (RB-39).
        """
        leadership, plan, based_on = command.leadership, command.plan, self._based_on(command.plan.based_on)
        header = Put(self.keys.header, values.dump_header(plan.version, leadership.term, plan.aborted))
        shares = [
            put
            for node in sorted(plan.changed)
            for put in self._parts(node, plan.version, plan.changed[node])
        ]
        remember = [
            Put(self.keys.remember(node), values.dump_member(member))
            for node, member in sorted(plan.remember.items())
        ]
        commit_all: list[Put | Delete] = [Delete(self.keys.remember(node)) for node in sorted(plan.forget)]
        commit_all.append(header)
        orphaned = [Delete(self.keys.share(part)) for part in sorted(plan.orphaned)]
        obsolete = [
            *orphaned,
            *(Delete(self.keys.share(part)) for part in sorted(plan.obsolete - plan.orphaned)),
        ]
        together = list(self._chunks(sized([*remember, *shares, *obsolete, *commit_all])))
        if len(together) == 1:
            before, commit, after = [], together[0], []
        else:
            *forgotten, commit = self._chunks(sized(commit_all))
            before = [
                *self._chunks(sized(orphaned)),
                *self._chunks(sized([*remember, *shares])),
                *forgotten,
            ]
            after = list(self._chunks(sized(obsolete[len(orphaned) :])))
        written: dict[str, int] = {}
        for chunk in [*before, commit]:
            outcome = outcome_of((yield self._as_leader(command, chunk, based_on)))
            if not outcome.succeeded:
                return self._publish_refused(command, outcome)
            written.update((write.key, outcome.revision) for write in chunk if isinstance(write, Put))
        for chunk in after:
            yield self._as_leader(command, chunk)
        parts = Counter(self.keys.share_part(put.key).node for put in shares)
        return Published(
            Header(plan.version, leadership.term, written[self.keys.header], plan.aborted),
            {
                node: Share(
                    plan.version, plan.changed[node], parts[node], written[self._first_part(node, plan)]
                )
                for node in sorted(plan.changed)
            },
        )

    def _first_part(self, node: NodeId, plan: Plan) -> str:
        return self.keys.share(SharePart(node, plan.version))

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


class _Update:
    """A known group that a leader brings up to date (RB-45)."""

    def __init__(self, command: ReadGroup, known: Group) -> None:
        self.known = known
        self.members: dict[NodeId, Member | None] = {}
        """Members that changed; None for one that is gone."""
        self.resources: dict[Resource, ResourceSpec | None] = {}
        """Resources that changed; None for one that is gone."""
        self.drains: dict[str, str | None] = {}
        """Labels whose drain changed; None for one that is not drained any more."""
        self.policy = known.policy
        self.unreadable = dict(known.unreadable)
        self.acknowledged = known.acknowledged
        self.acknowledgements = known.fingerprint.acknowledgements
        self.requests = known.fingerprint.changes
        self.stats = known.fingerprint.members
        self.member_keys = self.stats[0]
        """Number of keys of members, readable or not, as far as was read."""
        self.to_read = set(command.keys)
        self.reread_acknowledgements = command.reread_acknowledgements
        self.acknowledged_until = command.acknowledged_until
        self.members_known = True
        """False if some member is gone, but not known which."""
        self.shares_known = not command.reread_shares
        self.read: dict[str, int] = {}
        """The keys and prefixes that were read, each at its latest revision."""
        self.gap = False
        """True if the record of an operator request is missing."""

    @property
    def takes_longer(self) -> bool:
        """True if reading all of the group is quicker than reading the changes."""
        return self.gap or len(self.to_read) > max(MAX_SINGLE_READS, len(self.known.resources) // 4)

    @property
    def complete(self) -> bool:
        """True if nothing is missing."""
        return not (self.gap or self.to_read) and self.members_known and self.shares_known

    def note(self, reads: Iterable[Operation], revision: int) -> None:
        """Record that keys and prefixes were read at a revision."""
        self.read |= {read.key: revision for read in reads if isinstance(read, Get)}
        self.read |= {read.prefix: revision for read in reads if isinstance(read, Range)}

    def has_member(self, node: NodeId) -> bool:
        """Return True if the node is a member, as far as was read."""
        return self.members.get(node, self.known.members.get(node)) is not None

    def reread(self, prefix: str, result: Result) -> tuple[KeyValue, ...]:
        """Return all entries with a prefix, and forget which of them were unreadable."""
        self.unreadable = {k: why for k, why in self.unreadable.items() if not k.startswith(prefix)}
        return all_entries(result)

    def group(self, revision: int) -> Group:
        """The group as of ``revision``, at which nothing was missing."""
        members = _merged(self.known.members, self.members)
        acknowledged = self.acknowledged
        if self.reread_acknowledgements:  # an acknowledgement goes with its node
            acknowledged = {node: version for node, version in acknowledged.items() if node in members}
        return replace(
            self.known,
            revision=revision,
            members=members,
            resources=_merged(self.known.resources, self.resources),
            drained=frozenset(_merged(dict.fromkeys(self.known.drained, ""), self.drains)),
            acknowledged=acknowledged,
            fingerprint=Fingerprint(self.stats, self.requests, self.acknowledgements),
            policy=self.policy,
            unreadable=self.unreadable,
        )


def _merged(known: Mapping[NameT, ItemT], changed: Mapping[NameT, ItemT | None]) -> Mapping[NameT, ItemT]:
    if not changed:
        return known
    merged = dict(known)
    for name, item in changed.items():
        if item is not None:
            merged[name] = item
        else:
            merged.pop(name, None)
    return merged
