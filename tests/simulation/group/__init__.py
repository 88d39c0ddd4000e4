"""The simulator: real nodes over the memory registry, in one thread, on a fake clock, from one seed.

What runs is the product: ``Node`` is the core, and
``Translation`` makes the requests that reach the
``MemoryStore``. What is simulated is everything around them: time, clocks,
processes, handlers, the network, and an operator. A seed decides all of it.

A run starts hosts, lets chance strike (``chaos``; the kinds of fault are ``FaultKind``),
heals everything, and demands that all is well soon and stays so. Meanwhile the ``oracle`` judges every
event by what really happens, and ``duties`` every decision by what the node was told; never by what nodes
believe. Where resources and nodes differ (profile ``placement``), ``placing`` judges every plan.

``python tests/simulation group --seeds 1000`` runs many seeds on all cores. A failure names its
seed, and ``python tests/simulation group --seed N --trace`` shows that run again, line by line.
A script can do to a ``World`` what chance does, see ``tests/simulation``.

``history_of`` gives the history that the processes of a seed wrote, in the format of the product.
"""

from simulation.group.faults import FaultKind
from simulation.group.history import Recorder, SimulatedHistory, history_of
from simulation.group.network import Armed
from simulation.group.oracle import Oracle, Overlap
from simulation.group.process import Host, Process
from simulation.group.runner import (
    Report,
    exercised,
    heal,
    replay_command,
    run_seed,
    run_seeds,
    settle,
    stay,
)
from simulation.group.scenario import ANYTHING, PROFILES, HostPlan, Profile, Scenario
from simulation.group.world import World
from simulation.kernel.reports import Violation
from simulation.kernel.trace import Trace

__all__ = [
    "ANYTHING",
    "PROFILES",
    "Armed",
    "FaultKind",
    "Host",
    "HostPlan",
    "Oracle",
    "Overlap",
    "Process",
    "Profile",
    "Recorder",
    "Report",
    "Scenario",
    "SimulatedHistory",
    "Trace",
    "Violation",
    "World",
    "exercised",
    "heal",
    "history_of",
    "replay_command",
    "run_seed",
    "run_seeds",
    "settle",
    "stay",
]
