"""The engine on any registry of keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from rebalanser.core.tasks.ids import is_task_id
from rebalanser.core.tasks.model import MAX_FILL_S, LimitId, RateMark, Status, Stored, TaskId, Update
from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    ChangeFilter,
    Collect,
    Enqueue,
    EnqueueAll,
    FreeSlot,
    Move,
    Page,
    QueueNote,
    Skip,
    SlotNews,
    TakeOver,
    UsedSlot,
    Write,
)
from rebalanser.errors import InternalError, InvalidState, LeaseNotFound, OutcomeUnknown, RebalanserError
from rebalanser.registry.contract import (
    Absent,
    Capabilities,
    Delete,
    Get,
    Grant,
    Granted,
    KeepAlive,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Range,
    Registry,
    Revoke,
    Settles,
    Target,
    Transaction,
    Unchanged,
)
from rebalanser.registry.urls import RegistryUrl, open_registry, parse_url
from rebalanser.tasks.engine import Engine, EngineCapabilities, EngineWatch, SharesSlots, Sink, SlotSink
from rebalanser.tasks.key_value import reading
from rebalanser.tasks.key_value.batches import outbox_batches
from rebalanser.tasks.key_value.collection import CollectStep
from rebalanser.tasks.key_value.enqueues import EnqueueAllStep, EnqueueStep, SkipStep
from rebalanser.tasks.key_value.keys import QueueKeys, defined_queue, definitions
from rebalanser.tasks.key_value.reading import SlotChangeSink, StateSink
from rebalanser.tasks.key_value.steps import (
    EngineCall,
    Epochs,
    MoveStep,
    TakeOverStep,
    WriteStep,
    size_limits_of,
)
from rebalanser.tasks.key_value.values import dump_definition, dump_free_slot, load_definition, load_rate

COLLECTION_OVERHEAD: Final = 2
"""Operations of the transaction in which a collection is nested: itself, and the witness."""
MAX_IN_FLIGHT: Final = 2
"""Maximum calls of ``apply`` at the same time: while one batch is in flight, the next one is encoded.

That gains nothing with one member on the same host, and half as much again with 10 ms to each answer.
"""
RATE_LEASE_S: Final = 2 * MAX_FILL_S
"""TTL of the lease of rate marks. A mark is kept for at least half of it: longer than its debt (SK-23)."""
TASKS: Final = "+tasks"
"""Name under the registry's root, beside the groups; no group can have it."""


def open_engine(url: str | RegistryUrl, timeout_s: float = 10.0) -> KeyValueEngine:
    """Open the engine in the registry at ``url``, waiting at most ``timeout_s`` seconds for its first answer.

    Raises:
        FixConfiguration, RetryLater: as ``open_registry`` does.
    """
    parsed = parse_url(url) if isinstance(url, str) else url
    return KeyValueEngine(open_registry(parsed, timeout_s), f"{parsed.root}/{TASKS}")


class KeyValueEngine(Engine, SharesSlots):
    """Tasks in a registry, which the engine closes when it is closed.

    ``root`` begins all its keys. Beside what the contract says, every method raises what the registry does.
    """

    def __init__(self, registry: Registry, root: str) -> None:
        self._registry = registry
        self._root = root
        self._limits = size_limits_of(registry.capabilities)
        self._epochs = Epochs()
        self._keys: dict[str, QueueKeys] = {}
        self._partitions: dict[str, int] = {}
        self._rate_lease = (0, float("-inf"))
        """The lease of marks of rate limits, and when it was granted, in seconds of the monotonic clock."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Capabilities that follow from the registry's."""
        capabilities = self._registry.capabilities
        return EngineCapabilities(
            max_payload_bytes=self._limits.payload,
            max_update_bytes=self._limits.update,
            shared_between_hosts=capabilities.shared_between_hosts,
            durable=_durability(capabilities),
            unsafe_reasons=capabilities.unsafe_reasons,
            max_in_flight=MAX_IN_FLIGHT if capabilities.shared_between_hosts else 1,
        )

    def define(self, queue: str, partitions: int, timeout_s: float) -> int:
        """Define a queue; return its number of partitions, which is the given one if it is new.

        Raises:
            InvalidName: the queue's name cannot be stored.
        """
        key = self._keys_of(queue).definition
        put = Put(key, dump_definition(partitions))
        outcome = EngineCall(self._registry, timeout_s).execute(
            Transaction((Absent(key),), (put,), (Get(key),))
        )
        found = outcome.results[0]
        number = load_definition(found) if isinstance(found, KeyValue) else partitions
        self._partitions[queue] = number
        return number

    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        """Carry out writes in few transactions, each with its own outcome; see the contract."""
        if any(isinstance(write, Move) and write.start is not None for write in writes):
            self._grant_rate_lease(timeout_s)
        steps = [self._step(write) for write in writes]
        answers: list[Answer] = []
        for batch in outbox_batches(EngineCall(self._registry, timeout_s), steps):
            try:
                answers += batch.answers()
            except OutcomeUnknown:
                raise
            except LeaseNotFound as error:
                self._rate_lease = (
                    0,
                    float("-inf"),
                )  # the host was suspended for a day, or the lease was revoked
                raise OutcomeUnknown(f"the lease of rate limits has ended: {error}") from error
            except RebalanserError as error:
                if any(isinstance(answer, Applied) for answer in answers):
                    raise OutcomeUnknown(
                        f"the first {len(answers)} of {len(writes)} writes are done, the rest not: {error}"
                    ) from error
                raise
        return answers

    def read(
        self, queue: str, ids: Sequence[TaskId], timeout_s: float, *, at_least: int = 0
    ) -> Mapping[TaskId, Stored]:
        """Read tasks; the result has those that exist."""
        known = list(filter(is_task_id, ids))
        return reading.read(EngineCall(self._registry, timeout_s, at_least), self._keys_of(queue), known)

    def payloads(self, queue: str, ids: Sequence[TaskId], timeout_s: float) -> Mapping[TaskId, bytes]:
        """Read payloads; the result has those of tasks that exist."""
        known = list(filter(is_task_id, ids))
        return reading.payloads(EngineCall(self._registry, timeout_s), self._keys_of(queue), known)

    def page(
        self,
        queue: str,
        timeout_s: float,
        *,
        partition: int | None = None,
        statuses: frozenset[Status] | None = None,
        after: TaskId | None = None,
        limit: int = 1000,
        at_least: int = 0,
    ) -> Page:
        """Read at most ``limit`` tasks in the order of their ids, of a partition or of all (SK-12)."""
        call = EngineCall(self._registry, timeout_s, at_least)
        partitions = range(self._number_of_partitions(queue, call)) if partition is None else [partition]
        return reading.page(call, self._keys_of(queue), partitions, statuses, after, limit)

    def updates(
        self, queue: str, task: TaskId, timeout_s: float, *, claim: int | None = None, first: int = 0,
        limit: int = 1000,
    ) -> Sequence[Update]:  # fmt: skip
        """Read a task's log by claim and number, of one claim from number ``first`` on or of all (SK-9)."""
        if not is_task_id(task):
            return []
        call = EngineCall(self._registry, timeout_s)
        return reading.updates(call, self._keys_of(queue), task, claim, first, limit)

    def count(self, queue: str, timeout_s: float) -> Mapping[Status, int]:
        """Count the tasks of a queue in each status, read in pages (SK-12)."""
        return reading.count(EngineCall(self._registry, timeout_s), self._keys_of(queue))

    def ready_since(self, queue: str, wall: float, timeout_s: float) -> float | None:
        """Return since when the oldest ready task waits; reads tasks in the order of their ids up to it."""
        call = EngineCall(self._registry, timeout_s)
        partitions = range(self._number_of_partitions(queue, call))
        return reading.ready_since(call, self._keys_of(queue), partitions, wall)

    def note_worker(self, queue: str, process: str, note: bytes | None, timeout_s: float) -> None:
        """Put a worker process's note; None deletes it."""
        key = self._keys_of(queue).workers + process
        operation = Delete(key) if note is None else Put(key, note)
        EngineCall(self._registry, timeout_s).execute(Transaction(then=(operation,)))

    def workers(self, queue: str, timeout_s: float) -> Mapping[str, bytes]:
        """Read the notes of a queue's workers, by process."""
        prefix = self._keys_of(queue).workers
        items = reading.all_values(EngineCall(self._registry, timeout_s), prefix)
        return {item.key.removeprefix(prefix): item.value for item in items}

    def queues(self, timeout_s: float) -> Mapping[str, int]:
        """Read the names of all queues, with their numbers of partitions."""
        (found,) = EngineCall(self._registry, timeout_s).read_all([Range(definitions(self._root))])
        return {
            defined_queue(self._root, item.key): load_definition(item) for item in reading.key_values(found)
        }

    def note(self, queue: str, timeout_s: float) -> QueueNote:
        """Read the note of a queue; its version is the mod revision of its key."""
        key = self._keys_of(queue).note
        found = EngineCall(self._registry, timeout_s).get([key]).get(key)
        return QueueNote() if found is None else QueueNote(found.value, found.mod_revision)

    def put_note(self, queue: str, content: bytes, version: int, timeout_s: float) -> bool:
        """Replace the note of ``version``; False if that is not the present one."""
        key = self._keys_of(queue).note
        guard = Unchanged(key, version) if version else Absent(key)
        put = Transaction((guard,), (Put(key, content),))
        return EngineCall(self._registry, timeout_s).execute(put).succeeded

    def pauses(self, queue: str, timeout_s: float) -> Mapping[str, bytes]:
        """Read the pauses of a queue: its own under an empty name, those of its schedules by name."""
        keys = self._keys_of(queue)
        items = reading.all_values(EngineCall(self._registry, timeout_s), keys.pause)
        return {keys.paused(item.key): item.value for item in items}

    def put_pause(self, queue: str, schedule: str, pause: bytes | None, timeout_s: float) -> None:
        """Put a pause; None deletes it. Each transaction that claims has a guard on the queue's pause."""
        key = self._keys_of(queue).pause_of(schedule)
        operation = Delete(key) if pause is None else Put(key, pause)
        EngineCall(self._registry, timeout_s).execute(Transaction(then=(operation,)))

    def rates(self, queue: str, limits: Collection[LimitId], timeout_s: float) -> Mapping[LimitId, RateMark]:
        """Read the marks of rate limits; one whose debt is over may be missing, as its lease has ended."""
        keys = {self._keys_of(queue).rate(limit): limit for limit in limits}
        found = EngineCall(self._registry, timeout_s).get(keys)
        return {keys[key]: load_rate(item) for key, item in found.items()}

    def running(self, queue: str, limits: Collection[LimitId], timeout_s: float) -> Mapping[LimitId, int]:
        """Count the claimed tasks of limits by reading their partitions, unless these are large."""
        call = EngineCall(self._registry, timeout_s)
        return reading.running(call, self._keys_of(queue), limits, self._number_of_partitions(queue, call))

    def watch_pauses(self, queue: str, from_revision: int, wake: Callable[[], None]) -> EngineWatch:
        """Call ``wake`` after each change of a queue's pauses, or if some may have been missed."""
        target = Target(self._keys_of(queue).pause, prefix=True)
        return self._registry.watch(target, from_revision + 1, lambda _: wake())

    def watch(
        self, queue: str, from_revision: int, sink: Sink, wants: ChangeFilter | None = None
    ) -> EngineWatch:
        """Report to ``sink`` all states written after ``from_revision``, also the first of new tasks."""
        keys = self._keys_of(queue)
        return self._registry.watch(
            Target(keys.states, prefix=True), from_revision + 1, StateSink(keys, sink, wants)
        )

    def grant_slots(self, ttl_s: float, timeout_s: float) -> int:
        """Grant a lease for slots."""
        granted = self._registry.execute(Grant(ttl_s), timeout_s)
        if not isinstance(granted, Granted):
            raise InternalError(f"a grant was answered {granted!r}")
        return granted.lease

    def keep_slots(self, lease: int, timeout_s: float) -> None:
        """Keep a lease; raises ``LeaseNotFound`` if it has ended."""
        self._registry.execute(KeepAlive(lease), timeout_s)

    def end_slots(self, lease: int, timeout_s: float) -> None:
        """End a lease with its slots now."""
        self._registry.execute(Revoke(lease), timeout_s)

    def publish_slots(
        self, queue: str, slots: Sequence[FreeSlot], used: Sequence[UsedSlot], timeout_s: float
    ) -> None:
        """Publish free slots, and delete used ones."""
        keys, call = self._keys_of(queue), EngineCall(self._registry, timeout_s)
        operations: list[Operation] = [Delete(keys.slot(each.process, each.holder)) for each in used]
        operations += [
            Put(keys.slot(each.process, each.holder), dump_free_slot(each), each.lease) for each in slots
        ]
        step = call.max_operations
        for start in range(0, len(operations), step):
            call.execute(Transaction(then=tuple(operations[start : start + step])))

    def withdraw_slots(
        self, queue: str, process: str, holders: Collection[str] | None, timeout_s: float
    ) -> Sequence[UsedSlot]:
        """Delete the free slots of a process; return the used ones."""
        keys, call = self._keys_of(queue), EngineCall(self._registry, timeout_s)
        used: list[UsedSlot] = []
        free: list[KeyValue] = []
        for item in reading.all_values(call, keys.slots_of(process)):
            if holders is None or keys.process_and_holder(item.key)[1] in holders:
                slot = reading.stored_slot(keys, item)
                if isinstance(slot, UsedSlot):
                    used.append(slot)
                elif slot is not None:
                    free.append(item)
        step = max(1, call.max_operations - 1)
        for start in range(0, len(free), step):
            nested = tuple(map(_deletion, free[start : start + step]))
            for result in call.execute(Transaction(then=nested)).results:
                if not isinstance(result, Outcome):
                    raise InternalError(f"a nested transaction was answered {result!r}")
                # A slot that has changed since it was read was used, and nothing else.
                found = None if result.succeeded else result.results[0]
                slot = reading.stored_slot(keys, found) if isinstance(found, KeyValue) else None
                if isinstance(slot, UsedSlot):
                    used.append(slot)
        return used

    def slots(self, queue: str, timeout_s: float) -> tuple[Sequence[SlotNews], int]:
        """Read all free and used slots, and the revision of the read."""
        call = EngineCall(self._registry, timeout_s)
        return reading.slots(call, self._keys_of(queue)), call.seen

    def watch_slots(self, queue: str, from_revision: int, sink: SlotSink) -> EngineWatch:
        """Report to ``sink`` all slots published, used or deleted after ``from_revision``."""
        keys = self._keys_of(queue)
        return self._registry.watch(
            Target(keys.slots, prefix=True), from_revision + 1, SlotChangeSink(keys, sink)
        )

    def settle(self) -> None:
        """Wait until the watches have reported all changes so far.

        Raises:
            InvalidState: the registry is not in this process.
        """
        if not isinstance(self._registry, Settles):
            raise InvalidState("tasks run in the calling thread on memory:// and sqlite:// only")
        self._registry.settle()

    def close(self) -> None:
        """Close the registry. Closing twice does nothing."""
        self._registry.close()

    def _keys_of(self, queue: str) -> QueueKeys:
        keys = self._keys.get(queue)
        if keys is None:
            keys = self._keys[queue] = QueueKeys(self._root, queue)
        return keys

    def _number_of_partitions(self, queue: str, call: EngineCall) -> int:
        """Return the number of the queue's partitions; 0 if it is not defined."""
        if queue not in self._partitions:
            key = self._keys_of(queue).definition
            definition = call.get([key]).get(key)
            if definition is None:
                return 0
            self._partitions[queue] = load_definition(definition)
        return self._partitions[queue]

    def _grant_rate_lease(self, timeout_s: float) -> None:
        """Grant a lease for rate marks, unless the present one still outlasts any debt."""
        granted_at = self._rate_lease[1]
        now = time.monotonic()
        if now - granted_at > RATE_LEASE_S - MAX_FILL_S:
            self._rate_lease = (self.grant_slots(RATE_LEASE_S, timeout_s), now)

    def _step(self, write: Write) -> WriteStep:
        match write:
            case Move():
                lease = self._rate_lease[0]
                return MoveStep(write, self._keys_of(write.queue), self._epochs, self._limits, lease)
            case Enqueue():
                return EnqueueStep(write, self._keys_of(write.task.head.queue), self._limits)
            case EnqueueAll():
                queue = write.enqueues[0].task.head.queue
                return EnqueueAllStep(write.enqueues, self._keys_of(queue), self._limits)
            case Skip():
                return SkipStep(write, self._keys_of(write.queue))
            case TakeOver():
                return TakeOverStep(write, self._keys_of(write.queue), self._epochs)
            case Collect():
                longest = self._registry.capabilities.max_operations - COLLECTION_OVERHEAD
                return CollectStep(write, self._keys_of(write.queue), self._limits, longest)


def _deletion(item: KeyValue) -> Transaction:
    return Transaction((Unchanged(item.key, item.mod_revision),), (Delete(item.key),), (Get(item.key),))


def _durability(capabilities: Capabilities) -> str:
    if capabilities.shared_between_hosts:
        return (
            "the loss of any minority of the registry's members: each of a majority has synced it to its disk"
        )
    if capabilities.survives_process:
        return "the end of this process, as the registry keeps it"
    return "nothing: it is in the memory of this process"
