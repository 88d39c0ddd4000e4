"""The simulator of Skuld: the pure core of tasks over a simulated engine, on virtual time, from one seed.

What runs is the product's (:mod:`rebalanser.tasks`): the rules, the index of the partitions that a process
owns with the scripts that claim in it, what is asked of an index in the engine, the batches of writes and how
each is settled, the decisions of workers and of servers, the free slots of both, and what retention deletes.
Simulated are the engine with the guards of its contract (:mod:`.engine`) and with its own index of ready
tasks, as SQLite has it (:mod:`.indexing`), requests and what befalls them (:mod:`.network`), a group that may
leave an old owner running (:mod:`.world`), and those who use all that: the writer of each process
(:mod:`.writing`), owners (:mod:`.owning`) with their tickers (:mod:`.ticking`), workers (:mod:`.working`,
:mod:`.executing`), servers and their clients (:mod:`.dispensing`), producers (:mod:`.producing`), operators,
and retention (:mod:`.operating`). Hosts' monotonic clocks drift, their wall clocks are hours apart; the store
is away, full, read-only or locked, and refuses what is too large; operators pause the queue; clients hang up.
A run lets chance strike, heals everything, and demands that all is completed that can be. Meanwhile the
:mod:`.oracle` judges every write that takes effect, and each writer what its pending writes are told.

``python -m rebalanser.testing.tasks_simulation --seeds 1000`` runs many seeds on all cores. A failure names
its seed, and ``python -m rebalanser.testing.tasks_simulation --seed N --trace`` shows that run again.

What is assumed: nobody collects a task that a producer is going to enqueue once more of his own will, as an
id that was collected is not known any more. What an outbox sends again is known: complete tasks are collected
while requests that make them may still be under way.
"""

from rebalanser.testing.simulation.oracle import Violation
from rebalanser.testing.tasks_simulation.oracle import Oracle
from rebalanser.testing.tasks_simulation.runner import (
    Report,
    exercised,
    replay_command,
    run_seed,
    run_seeds,
)
from rebalanser.testing.tasks_simulation.scenario import ANYTHING, PROFILES, Fault, Profile, Scenario
from rebalanser.testing.tasks_simulation.world import World

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
