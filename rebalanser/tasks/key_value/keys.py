"""Where everything of one queue is kept in a registry.

Under ``ROOT/q/QUEUE/``, the queue's name percent-encoded:

=====================  ==========================================================================
``s/PARTITION/TASK``   the head and the state of a task; its mod revision is the state's
``p/TASK``             the partition in which the task lies, and its payload if that is short
``b/TASK``             its payload if that is long
``u/TASK/CLAIM/NUMBER``  an update
``d/TASK/DEPENDENT``   a task that depends on this one; it may be gone, or not be there yet
``n/TASK``             put whenever something is enqueued that depends on the task
``e/PARTITION``        the epoch
``k/KEY``              the last task that was enqueued with a unique key, by a digest of name and key
``l/LIMIT``            the mark of a rate limit, by a digest of function and key, under a lease
``o/OUTBOX``           the tally of an outbox: which of its entries was taken last
``c/COLLECTION``       a collection under way that is too large for one transaction
``m/TASK``             the collection that has marked the task
``f/PROCESS/HOLDER``   a free slot of a worker, or what was claimed for it, under the worker's lease
``i/PROCESS``          what a worker's process says of itself, for people
``r``                  the note
``h``                  the pause of the queue, if it is paused
``h/SCHEDULE``         the pause of a schedule, also one that has ended
``w``                  deleted by every collection: whoever finds it as he put it knows that
                       nothing was collected in between
=====================  ==========================================================================

and under ``ROOT/queues/`` one key for each queue, its definition. ``s`` and ``p`` of a task are put and
deleted together.
"""

from __future__ import annotations

import hashlib
from typing import Final
from urllib.parse import quote, unquote

from rebalanser.registry.contract import Absent, Get
from rebalanser.registry.keys import check_name
from rebalanser.tasks.model import LimitId, TaskId

NUMBER_DIGITS: Final = 10
"""Numbers of claims and updates are padded, so that the order of keys is theirs."""


class QueueKeys:
    """The keys of one queue."""

    def __init__(self, root: str, queue: str) -> None:
        """Raises :class:`~rebalanser.errors.InvalidName` if the queue's name cannot be stored."""
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
        self.look_at_pause = Get(self.pause, keys_only=True)
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
        """The prefix of a partition's states."""
        return f"{self.states}{partition}/"

    def state(self, partition: int, task: TaskId) -> str:
        """A task's head and state."""
        return f"{self.states}{partition}/{task}"

    def partition_and_task(self, state_key: str) -> tuple[int, TaskId]:
        """What the key of a state is of."""
        partition, _, task = state_key[len(self.states) :].partition("/")
        return int(partition), task

    def payload(self, task: TaskId) -> str:
        """A task's place and its payload if that is short. It exists exactly as long as the task does."""
        return self._payloads + task

    def long_payload(self, task: TaskId) -> str:
        """A task's payload if that is long."""
        return self._long_payloads + task

    def dependents(self, task: TaskId) -> str:
        """The prefix of all tasks that depend on this one."""
        return f"{self._dependents}{task}/"

    def dependent(self, task: TaskId, dependent: TaskId) -> str:
        """A task that depends on this one."""
        return f"{self._dependents}{task}/{dependent}"

    @staticmethod
    def task_that_depends(dependent_key: str) -> TaskId:
        """The task that the key says depends on another."""
        return dependent_key.rpartition("/")[2]

    def news(self, task: TaskId) -> str:
        """What is put whenever something is enqueued that depends on the task."""
        return self._news + task

    def mark(self, task: TaskId) -> str:
        """The collection that has marked the task."""
        return self._marks + task

    def log(self, task: TaskId) -> str:
        """The prefix of all updates of a task."""
        return f"{self._logs}{task}/"

    def log_of_claim(self, task: TaskId, claim: int) -> str:
        """The prefix of a claim's updates."""
        return f"{self._logs}{task}/{claim:0{NUMBER_DIGITS}}/"

    def update(self, task: TaskId, claim: int, sequence: int) -> str:
        """One update."""
        return f"{self.log_of_claim(task, claim)}{sequence:0{NUMBER_DIGITS}}"

    def claim_and_sequence(self, update_key: str) -> tuple[int, int]:
        """Which update a key is of."""
        _, claim, sequence = update_key.rsplit("/", 2)
        return int(claim), int(sequence)

    def epoch(self, partition: int) -> str:
        """A partition's epoch."""
        return f"{self._epochs}{partition}"

    def tally(self, outbox: str) -> str:
        """An outbox's tally."""
        return self._outboxes + quote(outbox, safe="")

    def pause_of(self, schedule: str) -> str:
        """The pause of a schedule, of the queue where the name is empty."""
        return f"{self.pause}/{quote(schedule, safe='')}" if schedule else self.pause

    def paused(self, pause_key: str) -> str:
        """The schedule that a pause is of; empty for the queue."""
        return unquote(pause_key[len(self.pause) + 1 :])

    def unique(self, name: str, key: str) -> str:
        """The last task of this function that was enqueued with a unique key; both have any length."""
        return self._unique + hashlib.sha256(f"{name}\0{key}".encode()).hexdigest()

    def rate(self, limit: LimitId) -> str:
        """The mark of a rate limit; the function and the key have any length."""
        return self._rates + hashlib.sha256("\0".join(limit).encode()).hexdigest()

    def slots_of(self, process: str) -> str:
        """The prefix of all slots of a worker's process."""
        return f"{self.slots}{process}/"

    def slot(self, process: str, holder: str) -> str:
        """A free slot, or what was claimed for it."""
        return self.slots_of(process) + holder

    def process_and_holder(self, slot_key: str) -> tuple[str, str]:
        """Whose slot a key is of, and the holder of the claim for it."""
        process, _, holder = slot_key[len(self.slots) :].partition("/")
        return process, holder

    def collection(self, name: str) -> str:
        """A collection under way."""
        return self.collections + name

    def collection_of(self, key: str) -> str:
        """The name of a collection under way."""
        return key.removeprefix(self.collections)


def definitions(root: str) -> str:
    """The prefix of all queues' definitions."""
    return f"{root}/queues/"


def defined_queue(root: str, definition_key: str) -> str:
    """The queue that a definition is of."""
    return unquote(definition_key.removeprefix(definitions(root)))
