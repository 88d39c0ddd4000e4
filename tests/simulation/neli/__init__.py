"""The simulator of NELI: real members over a simulated Kafka, in one thread, on a fake clock, from one seed.

What runs is the product's ``Member``. Simulated are the group coordinator with
both group protocols (``coordinator``), the log (``log``), the client that polls (``process``),
and what can befall them (``Fault``). A run starts processes, lets chance strike, heals
everything, and demands that every role soon has one leader. Meanwhile the ``oracle`` judges every event.

``python tests/simulation neli --seeds 1000`` runs many seeds on all cores. A failure names
its seed, and ``python tests/simulation neli --seed N --trace`` shows that run again.

What is assumed of Kafka, beside what it documents: the coordinator handles the heartbeats and joins of one
client in the order in which they were sent (commits may come late); a client that is about to get a partition
does not report it as given up; and the log loses no record that it took.
"""

from simulation.kernel.reports import Violation
from simulation.neli.oracle import Oracle
from simulation.neli.process import Process
from simulation.neli.runner import (
    Report,
    exercised,
    heal,
    replay_command,
    run_seed,
    run_seeds,
    settle,
    stay,
)
from simulation.neli.scenario import (
    ANYTHING,
    PROFILES,
    Fault,
    Profile,
    Scenario,
    settings_of,
)
from simulation.neli.world import World

__all__ = [
    "ANYTHING",
    "PROFILES",
    "Fault",
    "Oracle",
    "Process",
    "Profile",
    "Report",
    "Scenario",
    "Violation",
    "World",
    "exercised",
    "heal",
    "replay_command",
    "run_seed",
    "run_seeds",
    "settings_of",
    "settle",
    "stay",
]
