"""The simulator of NELI: real members over a simulated Kafka, in one thread, on a fake clock, from one seed.

What runs is the product's ``Member``. Simulated are the group coordinator with
both group protocols (``coordinator``), the log (``log``), the client that polls (``process``),
and what can befall them (``Fault``). A run starts processes, lets chance strike, heals
everything, and demands that every role soon has one leader. Meanwhile the ``oracle`` judges every event.

``python -m rebalanser.testing.neli_simulation --seeds 1000`` runs many seeds on all cores. A failure names
its seed, and ``python -m rebalanser.testing.neli_simulation --seed N --trace`` shows that run again.

What is assumed of Kafka, beside what it documents: the coordinator handles the heartbeats and joins of one
client in the order in which they were sent (commits may come late); a client that is about to get a partition
does not report it as given up; and the log loses no record that it took.
"""

from rebalanser.testing.neli_simulation.oracle import Oracle
from rebalanser.testing.neli_simulation.process import Process
from rebalanser.testing.neli_simulation.runner import (
    Report,
    exercised,
    heal,
    replay_command,
    run_seed,
    run_seeds,
    settle,
    stay,
)
from rebalanser.testing.neli_simulation.scenario import (
    ANYTHING,
    PROFILES,
    Fault,
    Profile,
    Scenario,
    settings_of,
)
from rebalanser.testing.neli_simulation.world import World
from rebalanser.testing.simulation.oracle import Violation

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
