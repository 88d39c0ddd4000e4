"""The replica: the state of a group, computed from its log alone, in the same way by every reader.

Each record is a command of the protocol, or an operator's request, and takes effect as a whole at its offset.
The replica executes the same scripts that drive a registry (``Translation``), against a store in memory. All
changes of one record get one revision: the record's offset plus the log's *base*. So create revisions and
fencing tokens are offsets, and grow as they do (RB-12).

**The base.** A topic that was deleted and created again counts from 0, and a token of the new log must not be
smaller than one of the old. So the base is the time, in milliseconds, at which the broker appended the log's
first record: to catch up, a group would have to write a thousand records a second all its life. If a log is
cut back while a connection watches, that connection moves the base with a ``Rebase``. The time itself remains
the log's *birth*: every request names the log it was written for.

**Leases** have no clock here. A lease ends by a record: some connection has counted its time to live since
the renewal that is still the last one (``rebalanser_kafka.group.leases``).

Nothing here depends on a clock, a thread, a size limit or the order of a set. Two replicas that applied the
same records are equal, whichever snapshots they began with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar, get_args

from rebalanser.core.group.messages import (
    Command,
    Heartbeat,
    Outcome,
    ReadBarriers,
    ReadGroup,
)
from rebalanser.core.group.types import NodeId, ResourceSpec
from rebalanser.errors import InternalError, RebalanserError
from rebalanser.registry import contract, values
from rebalanser.registry.contract import (
    Capabilities,
    Changed,
    Delete,
    Done,
    Grant,
    Granted,
    KeepAlive,
    KeyValue,
    Operation,
    Put,
    Reply,
    Revoke,
    Transaction,
)
from rebalanser.registry.coordinator import GroupView, HoldingsRead
from rebalanser.registry.keys import GroupKeys
from rebalanser.registry.script import Answer, Script, failure
from rebalanser.registry.store import KeyValueStore, Lease
from rebalanser.registry.translation import Translation
from rebalanser_kafka.group.records import (
    FORMAT,
    Expire,
    Fed,
    PutResources,
    ReadAll,
    Rebase,
    RemoveResources,
    SetDrained,
    SetPolicy,
    Snapshot,
    WeighResources,
    Wish,
)

MIN_LEASE_TTL_S: Final = 0.5
FED_BY: Final = "fed-by"
"""Attribute of a resource that no operator added: it is a running application (SH-19)."""
FEEDER: Final = "shiva"
UNLIMITED: Final = Capabilities(
    max_operations=sys.maxsize,
    max_request_bytes=sys.maxsize,
    min_lease_ttl_s=MIN_LEASE_TTL_S,
    lease_detection_s=0.0,
    survives_process=False,
    shared_between_hosts=False,
)
"""No limits: chunks by size could differ between two versions of a compressor."""
_ROOT: Final = "log"
_COMMANDS: Final = get_args(Command)

Result: TypeAlias = Outcome | GroupView | int | None
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class LogLease(Lease):
    """A lease, and the revision of the record that renewed it last."""

    renewal: int


class _Store(KeyValueStore[LogLease]):
    """The keys of one group; ``at`` is the revision of the record being executed."""

    def __init__(self) -> None:
        super().__init__(UNLIMITED, revision=0)
        self.at = 0
        self.changes: list[tuple[Changed, ...]] = []

    def _check(self, transaction: Transaction) -> None:
        """Check nothing: the translation of commands makes only valid transactions, and no limit applies
        here."""

    def _next_revision(self) -> int:
        return self.at

    def _committed(self, changes: tuple[Changed, ...]) -> None:
        self.changes.append(changes)

    def execute(self, request: contract.Request) -> Reply:
        match request:
            case Transaction():
                return self.transact(request)
            case Grant(ttl_s=ttl_s):
                granted_s = max(MIN_LEASE_TTL_S, ttl_s)
                self.grant(self.at, LogLease(granted_s, self.at))
                return Granted(self.at, granted_s)
            case KeepAlive(lease=lease):
                self.lease(lease).renewal = self.at
            case Revoke(lease=lease):
                if lease in self.leases:
                    self.end(lease)
        return Done()


class Replica:
    """The state of one group according to its log. Not thread-safe."""

    def __init__(self, group: str) -> None:
        self.keys = GroupKeys(_ROOT, group)
        self.translation = Translation(self.keys, UNLIMITED)
        self._store = _Store()
        self._birth_ms = 0
        self._base: int | None = None
        self._fed_key = f"{self.keys.prefix}fed"

    @property
    def birth_ms(self) -> int:
        """Time at which the log's first record was appended, which identifies the log; 0 before there is
        one."""
        return self._birth_ms

    @property
    def revision(self) -> int:
        """Revision of the last change; 0 before the first."""
        return self._store.revision

    @property
    def latest(self) -> int:
        """Revision of the last record seen; 0 before the first."""
        return self._store.at

    @property
    def leases(self) -> Mapping[int, LogLease]:
        """All live leases."""
        return self._store.leases

    @property
    def operator_epoch(self) -> int:
        """Revision at which an operator's request last took effect; 0 before the first one (RB-44)."""
        entry = self._store.get(self.keys.operator)
        return entry.mod_revision if entry else 0

    @property
    def fed_epoch(self) -> tuple[int, int] | None:
        """Epoch of the last document that was fed (SH-19)."""
        return self._fed()[0]

    def items(self) -> tuple[KeyValue, ...]:
        """All keys of the group."""
        return self._store.items()

    def leader(self) -> NodeId | None:
        """Return the node that leads, if it is a member."""
        term = self._store.get(self.keys.term)
        if term is None:
            return None
        leader = values.load_leadership(term).leader
        return leader if self._store.get(self.keys.node(leader)) is not None else None

    def members(self) -> tuple[tuple[NodeId, int], ...]:
        """Return nodes with their leases, in the order of joining."""
        entries = sorted(self._store.items(self.keys.nodes), key=lambda entry: entry.create_revision)
        return tuple((self.keys.name(entry.key, self.keys.nodes), entry.lease) for entry in entries)

    def holdings_at(self, keys: Collection[str]) -> HoldingsRead:
        """Return the present barriers and members at these keys."""
        return self._drive(self.translation.holdings_at(keys))

    def take_changes(self) -> list[tuple[Changed, ...]]:
        """Return the changes since the last call, commit by commit."""
        changes, self._store.changes = self._store.changes, []
        return changes

    def see(self, offset: int, timestamp_ms: int) -> int:
        """Return the revision of the record at ``offset``, readable or not; the log's first record gives the
        base."""
        if self._base is None:
            self._base = self._birth_ms = max(1, timestamp_ms)
        self._store.at = self._base + offset
        return self._store.at

    def apply(self, wish: Wish, sent_at: float | None) -> Result:
        """Execute a request at the record that was seen last.

        ``sent_at`` is the instant (seconds of the issuer's clock) just before it was sent. It is None for
        requests of others: nothing is read for them.

        Raises:
            RebalanserError: the issuer's error; its effects are the same on every replica.
        """
        try:
            return self._carry_out(wish, sent_at)
        except RebalanserError:
            raise
        except Exception as error:
            # A bad record, from any writer, must not block all nodes for ever.
            raise InternalError(f"{type(wish).__name__} could not be carried out: {error!r}") from error

    def _carry_out(self, wish: Wish, sent_at: float | None) -> Result:
        match wish:
            case PutResources() | WeighResources() | RemoveResources():
                return self._change_resources(wish)
            case SetDrained(label=label, drained=drained):
                return self._drive(self.translation.set_drained(label, drained))
            case SetPolicy(policy=policy, said=said):
                return self._drive(self.translation.set_policy(policy, said))
            case ReadAll():
                return None if sent_at is None else self._drive(self.translation.read())
            case Expire(lease=lease, renewal=renewal):
                held = self.leases.get(lease)
                if held is not None and held.renewal == renewal:
                    self._store.end(lease)
                return None
            case Fed():
                self._feed(wish)
                return None
            case Rebase(revision=revision):
                self._rebase(revision)
                return None
            case Snapshot():
                return None
            case _:
                return self._command(wish, sent_at)

    def _change_resources(self, wish: PutResources | WeighResources | RemoveResources) -> int:
        match wish:
            case PutResources(specs=specs, said=said):
                return self._drive(self.translation.put_resources(specs, _no_progress, said))
            case WeighResources(weights=weights):
                return self._drive(self.translation.weigh_resources(weights, _no_progress))
            case RemoveResources(resources=resources):
                return self._remove_resources(resources)

    def _command(self, command: Command, sent_at: float | None) -> Outcome | None:
        if sent_at is None:
            match command:
                case ReadBarriers() | ReadGroup():
                    return None
                case Heartbeat(session=session):
                    command = Heartbeat(session)
                case _:
                    pass
        try:
            return self._drive(self.translation.script(command), sent_at or 0.0)
        except InternalError:
            raise
        except RebalanserError as error:
            return failure(error)

    def _drive(self, script: Script[ResultT], sent_at: float = 0.0) -> ResultT:
        try:
            request = next(script)
            while True:
                try:
                    reply = self._store.execute(request)
                except RebalanserError as error:
                    request = script.throw(error)
                else:
                    request = script.send(Answer(reply, sent_at))
        except StopIteration as stop:
            result: ResultT = stop.value
            return result

    def _fed(self) -> tuple[tuple[int, int] | None, frozenset[str]]:
        entry = self._store.get(self._fed_key)
        if entry is None:
            return None, frozenset()
        fed = json.loads(entry.value)
        return (fed["term"], fed["number"]), frozenset(fed["resources"])

    def _is_fed_only(self, resource: str) -> bool:
        """True if the resource was only fed, whatever its weight.

        A resource that an operator added as well is as the operator set it.
        """
        entry = self._store.get(self.keys.resource(resource))
        if entry is None:
            return False
        return replace(values.load_resource(resource, entry), weight=1.0) == _as_fed(resource)

    def _remove_resources(self, resources: Iterable[str]) -> int:
        """Remove resources that operators added; running ones remain as fed (SH-19)."""
        names = tuple(resources)
        running = self._fed()[1].intersection(names)
        back = [name for name in sorted(running) if not self._is_fed_only(name)]
        gone = self._drive(
            self.translation.remove_resources([name for name in names if name not in running], _no_progress)
        )
        if back:
            puts = tuple(Put(self.keys.resource(name), _fed_value(name)) for name in back)
            self._store.transact(Transaction(then=puts))
        return gone + len(back)

    def _feed(self, fed: Fed) -> None:
        """Replace the fed resources by the running applications; those that operators added are not changed
        (SH-19)."""
        last_epoch, before = self._fed()
        if last_epoch is not None and fed.epoch <= last_epoch:
            return
        operations: list[Operation] = [
            Put(self.keys.resource(name), _fed_value(name))
            for name in sorted(fed.resources - before)
            if self._store.get(self.keys.resource(name)) is None
        ]
        operations += [
            Delete(self.keys.resource(name))
            for name in sorted(before - fed.resources)
            if self._is_fed_only(name)
        ]
        term, number = fed.epoch
        document = {"term": term, "number": number, "resources": sorted(fed.resources)}
        operations.append(Put(self._fed_key, json.dumps(document, ensure_ascii=False).encode()))
        self._store.transact(Transaction(then=tuple(operations)))

    def _rebase(self, revision: int) -> None:
        if self._base is None:
            raise InternalError("a record was carried out that was not seen")
        offset = self._store.at - self._base
        self._base = max(self._base, revision - offset)

    def dump(self) -> Mapping[str, Any]:
        """Return the whole state, for a snapshot."""
        resources = self._store.items(self.keys.resources)
        is_new = any(values.is_constrained(entry.value) for entry in resources)
        return {
            **({"format": FORMAT} if is_new else {}),
            "birth_ms": self._birth_ms,
            "base": self._base,
            "revision": self._store.revision,
            "latest": self._store.at,
            "leases": [[lease, held.ttl_s, held.renewal] for lease, held in self.leases.items()],
            "items": [
                [item.key, item.value.decode("latin-1"), item.create_revision, item.mod_revision, item.lease]
                for item in self._store.items()
            ],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``dump`` returned, without notifying anyone of changes.

        Raises:
            InternalError: it is not what a replica dumped.
        """
        try:
            leases = {lease: LogLease(ttl_s, renewal) for lease, ttl_s, renewal in state["leases"]}
            items = [
                KeyValue(key, value.encode("latin-1"), created, changed, lease)
                for key, value, created, changed, lease in state["items"]
            ]
            self._birth_ms = int(state["birth_ms"])
            self._base = int(state["base"])
            self._store.at = int(state["latest"])
            self._store.load(items, leases, int(state["revision"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InternalError(f"a snapshot cannot be loaded: {error!r}") from error
        self._store.changes = []


def _as_fed(resource: str) -> ResourceSpec:
    return ResourceSpec(resource, attributes={FED_BY: FEEDER})


def _fed_value(resource: str) -> bytes:
    return values.dump_resource(_as_fed(resource))


def _no_progress(_done: int) -> None:
    """Ignore progress: a record takes effect at once."""
