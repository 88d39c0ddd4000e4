"""Skuld: tasks that are never lost and never finished by a stale worker.

**Theory of operation.** A task is immutable (SK-2). Beside it is one small *state*, and every change of the
state is one conditional write: "if the state is still the one that I read, replace it by this one". The store
checks the condition, so a change computed from an old state is refused. This alone makes claims safe. The
index, the clocks and the owners of partitions make them fast and fair.

1. *Rules* (``core.tasks.rules``), pure: a state and a request give the next state, or a refusal
   with its reason. All transitions are there.
2. *Engine* (``tasks.engine``), the contract of a store: conditional writes in batches, each
   with an outcome of its own; reads that see every write answered before; a watch that wakes. SQLite has
   tables of its own; every registry of keys and values is an engine too
   (``tasks.key_value``).
3. *Owner* (``core.tasks.owner``), pure: what one partition holds, in memory. Partitions are
   resources of a group, so each has one owner (SK-13), which reads its open tasks once, follows the changes,
   and hands out the best one without a look at the rest. Its claims carry its *epoch*, the fencing token of
   the partition: taking over writes the epoch into the store, and from then on no claim of an earlier owner
   is written there.
   An owner claims for its own process, and ready tasks beyond its room for idle workers of others. These
   publish *free slots* (``core.tasks.slots``); the claim's write uses the slot (SK-20).
4. *Claims.* A claim is numbered one higher than the one before (SK-6) and lasts until its time. Clocks of two
   hosts are never compared (SK-18): the owner counts a claim's time on its own monotonic clock from
   when it wrote or read the claim's last renewal, or exactly, where both ran on one boot of one host; a
   worker counts from before it sent its request (SK-8). So a claim of a dead worker is over later than its
   time, never earlier; and if all clocks were wrong, the next claim has the next number, and the store
   refuses what the old one writes.
5. *Progress.* Updates are numbered from 0 within a claim and written with the state that counts them, so
   that a log has no gap (SK-9). Complete is a state that no rule leads out of (SK-10).
6. *Outbox* (``tasks.outbox``). A producer may keep what it enqueues on its own disk
   until the engine has it (SK-4). The entries of an outbox are numbered, and the engine counts each in the
   write that makes its task: sent again, it is known, even if its task was completed and collected.

**Unknown outcomes.** A write whose answer was lost is read back. A claim names its *holder*, unique to each
attempt: an attempt that finds its own name has the claim. Every other rule is idempotent for its claim.

**Rooms.** What is pure is in ``core.tasks``, and the modules here carry it out. ``execution`` claims tasks
and runs their bodies; ``http`` serves other languages; ``key_value`` is the engine on any registry. The
modules beside them are the faces of a queue.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rebalanser.core.tasks.model import EnqueueAnswer, Enqueued, Status
    from rebalanser.core.tasks.retention import Retention
    from rebalanser.tasks.async_claim import AsyncClaim
    from rebalanser.tasks.async_queue import AsyncCall, AsyncQueue, AsyncQueues, AsyncTaskFunction
    from rebalanser.tasks.claim import Claim
    from rebalanser.tasks.execution.bodies import Middleware
    from rebalanser.tasks.execution.outcomes import GiveUp, Retry
    from rebalanser.tasks.pauses import Pause, Pauses
    from rebalanser.tasks.producer import Call, TaskFunction
    from rebalanser.tasks.queue import Queue, Queues

__all__ = [
    "AsyncCall",
    "AsyncClaim",
    "AsyncQueue",
    "AsyncQueues",
    "AsyncTaskFunction",
    "Call",
    "Claim",
    "EnqueueAnswer",
    "Enqueued",
    "GiveUp",
    "Middleware",
    "Pause",
    "Pauses",
    "Queue",
    "Queues",
    "Retention",
    "Retry",
    "Status",
    "TaskFunction",
]

_HOMES: Final = MappingProxyType(
    {
        "AsyncCall": "tasks.async_queue",
        "AsyncClaim": "tasks.async_claim",
        "AsyncQueue": "tasks.async_queue",
        "AsyncQueues": "tasks.async_queue",
        "AsyncTaskFunction": "tasks.async_queue",
        "Call": "tasks.producer",
        "Claim": "tasks.claim",
        "EnqueueAnswer": "core.tasks.model",
        "Enqueued": "core.tasks.model",
        "GiveUp": "tasks.execution.outcomes",
        "Middleware": "tasks.execution.bodies",
        "Pause": "tasks.pauses",
        "Pauses": "tasks.pauses",
        "Queue": "tasks.queue",
        "Queues": "tasks.queue",
        "Retention": "core.tasks.retention",
        "Retry": "tasks.execution.outcomes",
        "Status": "core.tasks.model",
        "TaskFunction": "tasks.producer",
    }
)


def __getattr__(name: str) -> Any:
    """Load a public name at its first use: the engines need the nouns only."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"rebalanser.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
