"""Values of a queue's keys: compact JSON that begins with its version, and payloads as they are.

A state begins with its version and its status, so that counting need not read on.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from rebalanser.core.tasks.model import (
    AfterFailure,
    ClaimState,
    ClaimTerm,
    Head,
    RateMark,
    Status,
    Stored,
    TaskId,
    TaskState,
)
from rebalanser.core.tasks.store import FreeSlot, OutboxTally, UsedSlot
from rebalanser.errors import UnusableStore
from rebalanser.registry.contract import KeyValue

SCHEMA_VERSION: Final = 1
SHORT_PAYLOAD_BYTES: Final = 8192
"""Maximum bytes of a payload stored with its task's place; a longer one has its own key."""

_dump = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_text = json.encoder.encode_basestring_ascii
_VERSION: Final = f'{{"v":{SCHEMA_VERSION}'
_STATUS_END: Final = b'",'
_STATUS_START: Final = f'{_VERSION},"status":"'.encode()
_MARK: Final = b',"mark":{"by":'
CACHED_BYTES: Final = 1024
"""Maximum bytes of a value whose decoded head is cached."""
_NEW: Final = b',"state":{}}'
_NEW_STATE: Final = TaskState()
_STATUSES: Final = {status.value.encode(): status for status in Status}


@contextmanager
def _reading(key: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableStore(
            f"{key!r} has a value that no task queue wrote ({error!r}): repair or delete it"
        ) from error


def _load(key: str, text: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    if value["v"] > SCHEMA_VERSION:
        raise UnusableStore(
            f"{key!r} was written by a newer Rebalanser (schema {value['v']}, "
            f"this one knows {SCHEMA_VERSION}): upgrade this process"
        )
    return value


def dump_definition(partitions: int) -> bytes:
    """Dump a queue's definition."""
    return _dump({"v": SCHEMA_VERSION, "partitions": partitions}).encode()


def load_definition(entry: KeyValue) -> int:
    """Load the number of a queue's partitions."""
    with _reading(entry.key):
        return int(_load(entry.key, entry.value)["partitions"])


def dump_token(token: int) -> bytes:
    """Dump a partition's epoch."""
    return _dump({"v": SCHEMA_VERSION, "token": token}).encode()


def load_token(entry: KeyValue) -> int:
    """Load the token of a partition's epoch."""
    with _reading(entry.key):
        return int(_load(entry.key, entry.value)["token"])


def dump_tally(tally: OutboxTally) -> bytes:
    """Dump an outbox's tally."""
    return _dump({"v": SCHEMA_VERSION, "number": tally.number, "skipped": tally.skipped}).encode()


def load_tally(entry: KeyValue) -> OutboxTally:
    """Load an outbox's tally."""
    with _reading(entry.key):
        loaded = _load(entry.key, entry.value)
        return OutboxTally(int(loaded["number"]), bool(loaded["skipped"]))


@dataclass(frozen=True, slots=True)
class Last:
    """The last task of a unique key, its partition, and the seconds for which it keeps others out."""

    task: TaskId
    partition: int
    unique_for_s: float


def dump_last(last: Last) -> bytes:
    """Dump the last task of a unique key."""
    value = {"task": last.task, "partition": last.partition, "unique_for_s": last.unique_for_s}
    return _dump({"v": SCHEMA_VERSION, **value}).encode()


def load_last(entry: KeyValue) -> Last:
    """Load the last task of a unique key."""
    with _reading(entry.key):
        loaded = _load(entry.key, entry.value)
        return Last(str(loaded["task"]), int(loaded["partition"]), float(loaded["unique_for_s"]))


def dump_rate(mark: RateMark) -> bytes:
    """Dump the mark of a rate limit."""
    value = {"debt_s": mark.debt_s, "clock": mark.clock, "at_s": mark.at_s, "wall": mark.wall}
    return _dump({"v": SCHEMA_VERSION, **value}).encode()


def load_rate(entry: KeyValue) -> RateMark:
    """Load the mark of a rate limit; its revision is the key's."""
    with _reading(entry.key):
        loaded = _load(entry.key, entry.value)
        debt_s, at_s, wall = (float(loaded[each]) for each in ("debt_s", "at_s", "wall"))
        return RateMark(debt_s, str(loaded["clock"]), at_s, wall, entry.mod_revision)


def dump_head(head: Head) -> str:
    """Dump a head, as a part of the value of its task; the id and the queue are in the key."""
    if head.after or head.unique_key or head.is_limited or head.after_failure is not AfterFailure.WAIT:
        return _dump_head(
            *(head.name, head.priority, head.after, head.retries, head.timeout_s, head.after_failure),
            *(head.unique_key, head.unique_for_s, head.limit_key, head.max_running, head.rate_limit),
        )
    return _dump_lone_head(head.name, head.priority, head.retries, head.timeout_s)


def _dump_head(
    name: str,
    priority: int,
    after: Sequence[TaskId],
    retries: int,
    timeout_s: float | None,
    after_failure: AfterFailure = AfterFailure.WAIT,
    unique_key: str = "",
    unique_for_s: float = 0.0,
    limit_key: str = "",
    max_running: int = 0,
    rate_limit: str = "",
) -> str:
    value: dict[str, Any] = {"name": name}
    if priority:
        value["priority"] = priority
    if after:
        value["after"] = after
    if retries:
        value["retries"] = retries
    if timeout_s is not None:
        value["timeout_s"] = timeout_s
    if after_failure is not AfterFailure.WAIT:
        value["after_failure"] = after_failure.value
    if unique_key:
        value["unique"] = [unique_key, unique_for_s]
    if max_running or rate_limit:
        value["limit"] = [limit_key, max_running]
    if rate_limit:
        value["rate"] = rate_limit
    return _dump(value)


@lru_cache(maxsize=1024)
def _dump_lone_head(name: str, priority: int, retries: int, timeout_s: float | None) -> str:
    """Dump a head without dependencies, cached: those of one function are nearly always equal."""
    return _dump_head(name, priority, (), retries, timeout_s)


def dump_state(state: TaskState) -> str:
    """Dump a state, as a part of the value of its task. By hand: in a third of an encoder's time."""
    parts: list[str] = []
    claim = state.claim
    if claim is not None:
        term = claim.term
        parts.append(
            f'"claim":{{"number":{claim.number},"holder":{_text(claim.holder)},'
            f'"worker":{_text(claim.worker)},"ttl_s":{_number(term.ttl_s)},"clock":{_text(term.clock)},'
            f'"ends_at_s":{_number(term.ends_at_s)},"updates":{claim.updates}}}'
        )
    if state.due:
        parts.append(f'"due":{_number(state.due)}')
    if state.failures:
        parts.append(f'"failures":{state.failures}')
    if state.error:
        parts.append(f'"error":{_text(state.error)}')
    if state.result is not None:
        parts.append(f'"result":"{b64encode(state.result).decode()}"')
    return f"{{{','.join(parts)}}}"


def _number(number: float) -> str:
    text = repr(number)
    return text if text[-1].isdigit() else _dump(number)


def dump_task(status: Status, head: str, state: str) -> bytes:
    """Dump a task from the texts of its head and its state."""
    return f'{_VERSION},"status":"{status}","head":{head},"state":{state}}}'.encode()


def status_of(key: str, value: bytes) -> Status:
    """Return the status of a task, from the beginning of its value."""
    if value.startswith(_STATUS_START):
        begin = len(_STATUS_START)
        status = _STATUSES.get(value[begin : value.find(_STATUS_END, begin)])
        if status is not None:
            return status
    with _reading(key):
        return Status(_load(key, value)["status"])


@dataclass(frozen=True, slots=True)
class RegistryTask:
    """A task as it is stored in the registry.

    ``mark`` names the collection that has marked it, in which case ``stored`` is the task as before.
    ``revision`` is the mod revision of the key.
    """

    stored: Stored
    revision: int
    mark: str | None


def load_task(
    queue: str, partition: int, task: TaskId, key: str, value: bytes, revision: int
) -> RegistryTask:
    """Load a task from the value of its key."""
    is_short = len(value) <= CACHED_BYTES  # others differ, and may be long: they name dependencies
    if is_short and value.endswith(_NEW) and (head := _load_new(value)) is not None:
        return RegistryTask(Stored(Head(task, queue, *head), _NEW_STATE, revision, partition), revision, None)
    with _reading(key):
        loaded = _load(key, value)
        mark = loaded.get("mark")
        stored = Stored(
            Head(task, queue, *_head(loaded["head"])),
            _state(Status(loaded["status"]), loaded["state"]),
            mark["revision"] if mark else revision,
            partition,
        )
        return RegistryTask(stored, revision, mark["by"] if mark else None)


@lru_cache(maxsize=1024)
def _load_new(value: bytes) -> tuple[Any, ...] | None:
    """Load the head of a task that was never claimed, cached: those of one function are nearly always equal.

    None if it is marked, or can't be read.
    """
    try:
        with _reading(""):
            loaded = _load("", value)
            head = _head(loaded["head"])
            Head("", "", *head)
            is_new = loaded["status"] == Status.WAITING and not loaded["state"] and "mark" not in loaded
            return head if is_new else None
    except UnusableStore:
        return None


def _head(value: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a head, without the id and the queue."""
    get = value.get
    unique_key, unique_for_s = get("unique", ("", 0.0))
    limit_key, max_running = get("limit", ("", 0))
    return (
        value["name"],
        get("priority", 0),
        tuple(get("after", ())),
        get("retries", 0),
        get("timeout_s"),
        AfterFailure(value["after_failure"]) if "after_failure" in value else AfterFailure.WAIT,
        unique_key,
        unique_for_s,
        limit_key,
        max_running,
        get("rate", ""),
    )


def _state(status: Status, value: Mapping[str, Any]) -> TaskState:
    get = value.get
    claim = get("claim")
    result = get("result")
    return TaskState(
        status,
        None if claim is None else _claim(claim),
        get("due", 0.0),
        get("failures", 0),
        get("error", ""),
        None if result is None else b64decode(result),
    )


def _claim(value: Mapping[str, Any]) -> ClaimState:
    term = ClaimTerm(value["ttl_s"], value["clock"], value["ends_at_s"])
    return ClaimState(value["number"], value["holder"], value["worker"], term, value["updates"])


def head_text(key: str, value: bytes) -> str:
    """Return the head in the value of a task, as ``dump_head`` wrote it."""
    with _reading(key):
        return _dump(_load(key, value)["head"])


def is_marked(value: bytes) -> bool:
    """True if a collection has marked the task of this value. In a text of it the quotes would be escaped."""
    return _MARK in value


def marked(entry: KeyValue, collection: str) -> bytes:
    """Return the value of a task, marked by a collection."""
    with _reading(entry.key):
        loaded = _load(entry.key, entry.value)
        return _dump(loaded | {"mark": {"by": collection, "revision": entry.mod_revision}}).encode()


def unmarked(entry: KeyValue) -> bytes:
    """Return the value of a marked task as it was before."""
    with _reading(entry.key):
        loaded = _load(entry.key, entry.value)
        del loaded["mark"]
        return _dump(loaded).encode()


def dump_mark(collection: str) -> bytes:
    """Dump the mark of a task, beside the one in its value."""
    return _dump({"v": SCHEMA_VERSION, "by": collection}).encode()


def load_mark(entry: KeyValue) -> str:
    """Load the collection that has marked a task."""
    with _reading(entry.key):
        return str(_load(entry.key, entry.value)["by"])


def dump_free_slot(slot: FreeSlot) -> bytes:
    """Dump a free slot; the process and the holder are in the key."""
    value = {
        "worker": slot.worker,
        "names": None if slot.names is None else sorted(slot.names),
        "ttl_s": slot.ttl_s,
        "lease": slot.lease,
        "ahead": slot.ahead,
    }
    return _dump({"v": SCHEMA_VERSION, "free": value}).encode()


def dump_used_slot(task: TaskId) -> bytes:
    """Dump a used slot: the task that was claimed for it."""
    return _dump({"v": SCHEMA_VERSION, "task": task}).encode()


def load_slot(process: str, holder: str, key: str, value: bytes, revision: int) -> FreeSlot | UsedSlot:
    """Load a slot from the value of its key."""
    with _reading(key):
        loaded = _load(key, value)
        free = loaded.get("free")
        if free is None:
            return UsedSlot(holder, process, loaded["task"])
        names = None if free["names"] is None else frozenset(map(str, free["names"]))
        worker, ttl_s, lease = free["worker"], free["ttl_s"], free["lease"]
        return FreeSlot(holder, process, worker, names, ttl_s, lease, free["ahead"], revision)


def is_short(payload: bytes) -> bool:
    """True if a payload is stored with its task's place."""
    return len(payload) <= SHORT_PAYLOAD_BYTES


def dump_place(partition: int, payload: bytes) -> bytes:
    """Dump the place of a task, and its payload if that is short."""
    if is_short(payload):
        return _dump({"v": SCHEMA_VERSION, "partition": partition}).encode() + b"\n" + payload
    return _dump({"v": SCHEMA_VERSION, "partition": partition, "long": True}).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a task; ``payload`` is None if it is long."""

    partition: int
    payload: bytes | None


def load_place(entry: KeyValue) -> Place:
    """Load a task's place."""
    line, _, payload = entry.value.partition(b"\n")
    partition, is_long = _load_place(line) or _read_place(entry.key, line)
    return Place(partition, None if is_long else payload)


def _read_place(key: str, line: bytes) -> tuple[int, bool]:
    """Read the partition of a place, and True if the payload has its own key."""
    with _reading(key):
        loaded = _load(key, line)
        return loaded["partition"], bool(loaded.get("long"))


@lru_cache(maxsize=1024)
def _load_place(line: bytes) -> tuple[int, bool] | None:
    """Load a place, cached, as a partition has two; None if it can't be read."""
    try:
        return _read_place("", line)
    except UnusableStore:
        return None


class Phase(StrEnum):
    """Phase of a collection."""

    MARKING = "marking"
    """Its tasks are being marked; it may still fail."""
    SWEEPING = "sweeping"
    """It has taken effect: marked tasks are deleted."""
    RESTORING = "restoring"
    """It has failed: marked tasks are restored."""


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection under way: its tasks, each with its partition."""

    phase: Phase
    tasks: Sequence[tuple[int, TaskId]]


def dump_collection(collection: Collection) -> bytes:
    """Dump a collection under way."""
    value = {"v": SCHEMA_VERSION, "phase": collection.phase.value, "tasks": collection.tasks}
    return _dump(value).encode()


def load_collection(entry: KeyValue) -> Collection:
    """Load a collection under way."""
    with _reading(entry.key):
        loaded = _load(entry.key, entry.value)
        return Collection(Phase(loaded["phase"]), [(partition, task) for partition, task in loaded["tasks"]])
