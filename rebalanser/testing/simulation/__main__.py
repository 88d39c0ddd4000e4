"""``python -m rebalanser.testing.simulation``: a soak on all cores, or one seed with its trace."""

from __future__ import annotations

from rebalanser.testing.simulation.command_line import Simulator, run
from rebalanser.testing.simulation.coverage import seldom
from rebalanser.testing.simulation.runner import Report, exercised, replay_command, run_chunk, run_seed
from rebalanser.testing.simulation.scenario import PROFILES


def _counts(total: Report) -> dict[str, int | str]:
    return {
        "rebalances completed": total.rebalances,
        "versions published": total.versions,
        "leader changes": total.leader_changes,
        "fenced writes": total.writes,
        "stale writes refused": total.stale_writes,
        "overlaps beyond the bound": total.excused,
    }


if __name__ == "__main__":
    run(
        Simulator(
            title="simulation",
            purpose="Simulate groups of nodes under faults, and check the rules after every event.",
            profiles=PROFILES,
            run_seed=run_seed,
            run_chunk=run_chunk,
            make_report=Report,
            counts=_counts,
            exercised=exercised,
            replay_command=replay_command,
            seldom=lambda total: seldom(total.met),
            share=lambda profile: profile.share,
        )
    )
