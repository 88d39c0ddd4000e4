"""The simulator of Skuld: the pure core of tasks over a simulated engine, on virtual time, from one seed.

The core is the product's (``rebalanser.core.tasks``): the rules, the index of owned partitions and its
scripts, the requests for claims from an engine's index, batches of writes and their settlement, the decisions
of workers and servers, their free slots, and retention.

Simulated are the engine with the guards of its contract (``engine``) and, as in SQLite, with its own
index of ready tasks (``indexing``); requests and their faults (``network``); a group that may leave
an old owner running (``world``); and the actors: the writer of each process (``writing``), owners
(``owning``) with their tickers (``ticking``), workers (``working``, ``executing``), servers
and their clients (``dispensing``), producers (``producing``), operators and retention
(``operating``). Monotonic clocks drift, and wall clocks are hours apart. The store is away, full,
read-only or locked, and refuses large writes. Operators pause the queue, and clients hang up.

A run has faults at random, then heals everything, and requires that all tasks are completed that can be.
Meanwhile the ``oracle`` judges every write that takes effect, and each writer judges the outcomes of its
pending writes.

``python tests/simulation tasks --seeds 1000`` runs many seeds on all cores. A failure names
its seed, and ``python tests/simulation tasks --seed N --trace`` shows that run again.

Assumption: no task is collected that a producer will enqueue again by itself, as the store forgets the ids of
collected tasks. Entries that an outbox sends again are recognised: complete tasks are collected while
requests that make them may still be under way.
"""

from simulation.kernel.reports import Violation
from simulation.tasks.oracle import Oracle
from simulation.tasks.runner import (
    Report,
    exercised,
    replay_command,
    run_seed,
    run_seeds,
)
from simulation.tasks.scenario import ANYTHING, PROFILES, Fault, Profile, Scenario
from simulation.tasks.world import World

__all__ = [
    "ANYTHING",
    "PROFILES",
    "Fault",
    "Oracle",
    "Profile",
    "Report",
    "Scenario",
    "Violation",
    "World",
    "exercised",
    "replay_command",
    "run_seed",
    "run_seeds",
]
