"""``python -m rebalanser.testing.tasks_simulation``: a soak on all cores, or one seed with its trace."""

from __future__ import annotations

from rebalanser.testing.simulation.command_line import Simulator, run
from rebalanser.testing.tasks_simulation.runner import (
    Report,
    exercised,
    replay_command,
    run_chunk,
    run_seed,
)
from rebalanser.testing.tasks_simulation.scenario import PROFILES


def _counts(total: Report) -> dict[str, int | str]:
    return {f"fact: {kind}": count for kind, count in sorted(total.facts.items())}


if __name__ == "__main__":
    run(
        Simulator(
            title="Skuld simulation",
            purpose="Simulate task queues under faults, and check the rules at every write.",
            profiles=PROFILES,
            run_seed=run_seed,
            run_chunk=run_chunk,
            make_report=Report,
            counts=_counts,
            exercised=exercised,
            replay_command=replay_command,
        )
    )
