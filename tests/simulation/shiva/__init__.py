"""The simulator of Shiva: real leaders and workers over a modelled broker, in one thread, from one seed.

What runs is the product: ``Leader`` and
``Worker``. What is simulated is everything around them: time and clocks,
topics with transactions and a cleaner (``log``), the group of leaders (``group``), processes that
crash, pause and lag, files, application processes and who supervises them (``running``), and clients.

A run starts hosts, lets chance strike (``chaos``; the kinds of fault are ``Fault``), heals
everything, and demands that all is well soon and stays so. Meanwhile the ``oracle`` judges every process
that begins by what really runs, never by what machines believe.

``python tests/simulation shiva --seeds 1000`` runs many seeds on all cores. A failure names
its seed, and ``python tests/simulation shiva --seed N --trace`` shows that run again.
"""

from simulation.shiva.faults import Fault
from simulation.shiva.leading import LeaderProcess
from simulation.shiva.log import Broker
from simulation.shiva.oracle import Oracle
from simulation.shiva.runner import (
    Report,
    change_leader,
    exercised,
    heal,
    replay_command,
    run_chunk,
    run_seed,
    run_seeds,
    settle,
    stay,
)
from simulation.shiva.running import Behaviour
from simulation.shiva.scenario import ANYTHING, PROFILES, HostPlan, Profile, Scenario
from simulation.shiva.working import WorkerProcess
from simulation.shiva.world import Host, World

__all__ = [
    "ANYTHING",
    "PROFILES",
    "Behaviour",
    "Broker",
    "Fault",
    "Host",
    "HostPlan",
    "LeaderProcess",
    "Oracle",
    "Profile",
    "Report",
    "Scenario",
    "WorkerProcess",
    "World",
    "change_leader",
    "exercised",
    "heal",
    "replay_command",
    "run_chunk",
    "run_seed",
    "run_seeds",
    "settle",
    "stay",
]
