"""Transaction scripts: their form, their guards, and their division by the registry's limits.

A script carries out one command or one request of an operator. It is a generator: it yields
``Request`` after request, is sent an ``Answer`` for each, and returns
the result. It does no I/O and reads no clock, so that the runtime and the simulator drive the same code. A
driver throws the registry's errors into the generator; ``failure`` turns those that a script does not
handle into an outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TypeAlias, TypeVar

from rebalanser.core.group.messages import (
    Failed,
    Outcome,
)
from rebalanser.core.group.types import (
    Header,
    Leadership,
    NodeId,
    Resource,
    Session,
    Share,
    SharePart,
    Token,
    record,
)
from rebalanser.errors import (
    FixConfiguration,
    InternalError,
    OutcomeUnknown,
    RebalanserError,
    UnusableStore,
)
from rebalanser.registry import contract, values
from rebalanser.registry.contract import (
    Absent,
    Capabilities,
    Created,
    Delete,
    Guard,
    KeyValue,
    Operation,
    Put,
    Reply,
    Request,
    Result,
    Stats,
    Unchanged,
)
from rebalanser.registry.keys import GroupKeys

ItemT = TypeVar("ItemT")
KeyT = TypeVar("KeyT")
_RESERVED_OPERATIONS = 4
_RESERVED_BYTES = 4096
_ROOM_FOR_NUMBERS = 8
"""Bytes of a key in which the number of a share's part fits."""
LEAST_PART_BYTES = 256
"""Minimum size of a part of a share, whatever a registry's limit."""
ROUNDING_S = 1.0
"""Seconds by which a registry may round a lease up; more would delay every take-over."""


@record
class Answer:
    """The registry's reply, and the monotonic instant (seconds) just before the request was sent."""

    reply: Reply
    sent_at: float


Script: TypeAlias = Generator[Request, Answer, ItemT]
CommandScript: TypeAlias = Script[Outcome]


def failure(error: RebalanserError) -> Failed:
    """Return the outcome of a command that ended with an error of the registry."""
    return Failed(
        error=f"{type(error).__name__}: {error}",
        unknown=isinstance(error, OutcomeUnknown),
        fatal=isinstance(error, FixConfiguration),
    )


def outcome_of(answer: Answer) -> contract.Outcome:
    """Return the outcome of a transaction."""
    if not isinstance(answer.reply, contract.Outcome):
        raise InternalError(f"a transaction was answered with {answer.reply!r}")
    return answer.reply


def one_entry(result: Result) -> KeyValue | None:
    """Return the result of reading one key."""
    if result is None or isinstance(result, KeyValue):
        return result
    raise InternalError(f"reading one key was answered with {result!r}")


def revision_of(result: Result) -> int:
    """Return the revision at which a key changed last; 0 if it is absent."""
    entry = one_entry(result)
    return entry.mod_revision if entry is not None else 0


def all_entries(result: Result) -> tuple[KeyValue, ...]:
    """Return the result of reading a range."""
    if isinstance(result, tuple):
        return result
    raise InternalError(f"reading a range was answered with {result!r}")


def stats_of(result: Result) -> tuple[int, int]:
    """Return the number of keys in a range and their latest revision."""
    if isinstance(result, Stats):
        return result.count, result.newest
    raise InternalError(f"counting a range was answered with {result!r}")


def readable(
    entries: Iterable[KeyValue],
    load: Callable[[KeyValue], tuple[KeyT, ItemT]],
    unreadable: dict[str, str],
) -> dict[KeyT, ItemT]:
    """Load entries; record in ``unreadable``, by its key, why one can't be loaded (RB-46)."""
    loaded: dict[KeyT, ItemT] = {}
    for entry in entries:
        try:
            key, item = load(entry)
        except UnusableStore as error:
            unreadable[entry.key] = str(error)
        else:
            loaded[key] = item
    return loaded


def nested_outcome(result: Result) -> contract.Outcome:
    """Return the outcome of a nested transaction."""
    if isinstance(result, contract.Outcome):
        return result
    raise InternalError(f"a nested transaction was answered with {result!r}")


def fingerprint_of(entries: Iterable[KeyValue]) -> tuple[int, int]:
    """Return the number of keys and their latest revision."""
    revisions = [entry.mod_revision for entry in entries]
    return len(revisions), max(revisions, default=0)


def sized(operations: Iterable[Put | Delete]) -> list[tuple[Operation, int]]:
    """Return writes with their sizes in bytes."""
    return [(op, len(op.key) + (len(op.value) if isinstance(op, Put) else 0)) for op in operations]


class Scripts:
    """The guards that safety rests on, one method each, and the division into chunks."""

    def __init__(self, keys: GroupKeys, capabilities: Capabilities) -> None:
        self.keys = keys
        self._max_operations = capabilities.max_operations
        self._chunk_operations = max(1, capabilities.max_operations - _RESERVED_OPERATIONS)
        self._chunk_bytes = max(1, capabilities.max_request_bytes - _RESERVED_BYTES)

    def _alive(self, session: Session) -> tuple[Guard, ...]:
        """The session lives: its node key is there, and it is the very key that the session created."""
        return (Created(self.keys.node(session.node), session.created),)

    def _leads(self, leadership: Leadership) -> tuple[Guard, ...]:
        """The term is still the leader's."""
        return (Unchanged(self.keys.term, leadership.revision),)

    def _has_share(self, node: NodeId, version: int, revision: int) -> tuple[Guard, ...]:
        """The share that the node read is still stored: it was not deleted for a later one."""
        return (Unchanged(self.keys.share(SharePart(node, version)), revision),)

    def _free(self, barrier: str) -> tuple[Guard, ...]:
        """No node holds the barrier."""
        return (Absent(barrier),)

    def _mine(self, barrier: str, token: Token) -> tuple[Guard, ...]:
        """The barrier is still the one that this session added."""
        return (Unchanged(barrier, token),)

    def _unregistered(self, key: str) -> tuple[Guard, ...]:
        """No earlier attempt of this incarnation has registered it."""
        return (Absent(key),)

    def _not_overtaken(self, key: str, revision: int) -> tuple[Guard, ...]:
        """No other acknowledgement, or record, of this node was written since."""
        return (Unchanged(key, revision),)

    def _based_on(self, header: Header | None) -> tuple[Guard, ...]:
        """The allocation is still the one that the plan changes."""
        if header is None:
            return (Absent(self.keys.header),)
        return (Unchanged(self.keys.header, header.revision),)

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

    def _part_bytes(self, share: SharePart) -> int:
        """Maximum bytes of the value of a share's part, so that it fits in a request."""
        return max(LEAST_PART_BYTES, self._chunk_bytes - len(self.keys.share(share)) - _ROOM_FOR_NUMBERS)

    def _parts_in(self, entries: Iterable[KeyValue], unreadable: dict[str, str]) -> dict[SharePart, KeyValue]:
        """Return the parts of shares among the entries."""
        return readable(entries, lambda entry: (self.keys.share_part(entry.key), entry), unreadable)

    def _shares_in(
        self, header: Header, parts: Mapping[SharePart, KeyValue], unreadable: dict[str, str]
    ) -> dict[NodeId, Share]:
        """Return each node's share: the latest of a committed version.

        Its first part is written with the others or before, and deleted with them or before.
        """
        named: dict[NodeId, list[SharePart]] = {}
        for part in sorted(parts):
            if not header.is_committed(part.version):
                continue
            if part.part == 0:
                named[part.node] = [part]
            elif part.node in named and named[part.node][0].version == part.version:
                named[part.node].append(part)
        shares: dict[NodeId, Share] = {}
        for node, found in named.items():
            try:
                shares[node] = values.load_share(found[0].version, [parts[part] for part in found])
            except UnusableStore as error:
                unreadable[parts[found[0]].key] = str(error)
        return shares

    def _barrier_chunks(self, resources: Iterable[Resource]) -> Iterator[list[Resource]]:
        return self._chunks((r, 3 * len(self.keys.barrier(r)) + 256) for r in sorted(resources))

    @staticmethod
    def _half_done(error: RebalanserError, begun: bool) -> Failed:
        lost = failure(error)
        return Failed(lost.error, unknown=lost.unknown or begun, fatal=lost.fatal)
