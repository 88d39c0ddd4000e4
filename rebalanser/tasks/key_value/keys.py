"""Keys of a queue in a registry.

Under ``ROOT/q/QUEUE/``, the queue's name percent-encoded:

=====================  ==========================================================================
``s/PARTITION/TASK``   the head and the state of a task; its mod revision is the state's
``p/TASK``             the partition of the task, and its payload if that is short
``b/TASK``             its payload if that is long
``u/TASK/CLAIM/NUMBER``  an update
``d/TASK/DEPENDENT``   a task that depends on this one; it may be deleted, or not exist yet
``n/TASK``             put whenever something is enqueued that depends on the task
``e/PARTITION``        the epoch
``k/KEY``              the last task that was enqueued with a unique key, by a digest of name and key
``l/LIMIT``            the mark of a rate limit, by a digest of function and key, under a lease
``o/OUTBOX``           the tally of an outbox: which of its entries was taken last
``c/COLLECTION``       a collection under way that is too large for one transaction
``m/TASK``             the collection that has marked the task
``f/PROCESS/HOLDER``   a free slot of a worker, or what was claimed for it, under the worker's lease
``i/PROCESS``          the note of a worker's process, for people
``r``                  the note
``h``                  the pause of the queue, if it is paused
``h/SCHEDULE``         the pause of a schedule, also one that has ended
``w``                  the witness, deleted by every collection: while it exists as it was put,
                       nothing was collected
=====================  ==========================================================================

and under ``ROOT/queues/`` one key for each queue, its definition. ``s`` and ``p`` of a task are put and
deleted together.
"""

from __future__ import annotations

import hashlib
from typing import Final
from urllib.parse import quote, unquote

from rebalanser.core.tasks.model import LimitId, TaskId
from rebalanser.registry.contract import Absent, Get
from rebalanser.registry.keys import check_name

NUMBER_DIGITS: Final = 10
"""Digits of padded numbers of claims and updates, so that keys sort by number."""


class QueueKeys:
    """The keys of one queue."""

    def __init__(self, root: str, queue: str) -> None:
        """Raises ``InvalidName`` if the queue's name cannot be stored."""
        name = quote(check_name(queue, "queue"), safe="")
        prefix = f"{root}/q/{name}/"
        self.queue = queue
        self.definition = definitions(root) + name
        self.states = f"{prefix}s/"
        self.collections = f"{prefix}c/"
        self.witness = f"{prefix}w"
        self.note = f"{prefix}r"
        self.pause = f"{prefix}h"
        self.unpaused = Absent(self.pause)
        self.pause_read = Get(self.pause, keys_only=True)
        self._payloads = f"{prefix}p/"
        self._dependents = f"{prefix}d/"
        self._news = f"{prefix}n/"
        self._marks = f"{prefix}m/"
        self._long_payloads = f"{prefix}b/"
        self._logs = f"{prefix}u/"
        self._epochs = f"{prefix}e/"
        self._outboxes = f"{prefix}o/"
        self._unique = f"{prefix}k/"
        self._rates = f"{prefix}l/"
        self.slots = f"{prefix}f/"
        self.workers = f"{prefix}i/"

    def states_of(self, partition: int) -> str:
        """Prefix of a partition's states."""
        return f"{self.states}{partition}/"

    def state(self, partition: int, task: TaskId) -> str:
        """Key of a task's head and state."""
        return f"{self.states}{partition}/{task}"

    def partition_and_task(self, state_key: str) -> tuple[int, TaskId]:
        """Return the partition and the task of a state's key."""
        partition, _, task = state_key[len(self.states) :].partition("/")
        return int(partition), task

    def payload(self, task: TaskId) -> str:
        """Key of a task's place, and its payload if that is short. It exists exactly while the task does."""
        return self._payloads + task

    def long_payload(self, task: TaskId) -> str:
        """Key of a task's payload if that is long."""
        return self._long_payloads + task

    def dependents(self, task: TaskId) -> str:
        """Prefix of all tasks that depend on this one."""
        return f"{self._dependents}{task}/"

    def dependent(self, task: TaskId, dependent: TaskId) -> str:
        """Key of a task that depends on this one."""
        return f"{self._dependents}{task}/{dependent}"

    @staticmethod
    def task_that_depends(dependent_key: str) -> TaskId:
        """Return the dependent of a dependent's key."""
        return dependent_key.rpartition("/")[2]

    def news(self, task: TaskId) -> str:
        """Key that is put whenever a task is enqueued that depends on this one."""
        return self._news + task

    def mark(self, task: TaskId) -> str:
        """Key of the collection that has marked the task."""
        return self._marks + task

    def log(self, task: TaskId) -> str:
        """Prefix of all updates of a task."""
        return f"{self._logs}{task}/"

    def log_of_claim(self, task: TaskId, claim: int) -> str:
        """Prefix of a claim's updates."""
        return f"{self._logs}{task}/{claim:0{NUMBER_DIGITS}}/"

    def update(self, task: TaskId, claim: int, sequence: int) -> str:
        """Key of one update."""
        return f"{self.log_of_claim(task, claim)}{sequence:0{NUMBER_DIGITS}}"

    def claim_and_sequence(self, update_key: str) -> tuple[int, int]:
        """Return the claim and the sequence number of an update's key."""
        _, claim, sequence = update_key.rsplit("/", 2)
        return int(claim), int(sequence)

    def epoch(self, partition: int) -> str:
        """Key of a partition's epoch."""
        return f"{self._epochs}{partition}"

    def tally(self, outbox: str) -> str:
        """Key of an outbox's tally."""
        return self._outboxes + quote(outbox, safe="")

    def pause_of(self, schedule: str) -> str:
        """Key of the pause of a schedule, or of the queue if the name is empty."""
        return f"{self.pause}/{quote(schedule, safe='')}" if schedule else self.pause

    def paused(self, pause_key: str) -> str:
        """Return the schedule of a pause's key; empty for the queue."""
        return unquote(pause_key[len(self.pause) + 1 :])

    def unique(self, name: str, key: str) -> str:
        """Key of the last task of a function and a unique key, as a digest: both may have any length."""
        return self._unique + hashlib.sha256(f"{name}\0{key}".encode()).hexdigest()

    def rate(self, limit: LimitId) -> str:
        """Key of the mark of a rate limit, as a digest: its function and key may have any length."""
        return self._rates + hashlib.sha256("\0".join(limit).encode()).hexdigest()

    def slots_of(self, process: str) -> str:
        """Prefix of all slots of a worker's process."""
        return f"{self.slots}{process}/"

    def slot(self, process: str, holder: str) -> str:
        """Key of a free or used slot."""
        return self.slots_of(process) + holder

    def process_and_holder(self, slot_key: str) -> tuple[str, str]:
        """Return the process and the holder of a slot's key."""
        process, _, holder = slot_key[len(self.slots) :].partition("/")
        return process, holder

    def collection(self, name: str) -> str:
        """Key of a collection under way."""
        return self.collections + name

    def collection_of(self, key: str) -> str:
        """Return the name of a collection's key."""
        return key.removeprefix(self.collections)


def definitions(root: str) -> str:
    """Return the prefix of all queues' definitions."""
    return f"{root}/queues/"


def defined_queue(root: str, definition_key: str) -> str:
    """Return the queue of a definition's key."""
    return unquote(definition_key.removeprefix(definitions(root)))
