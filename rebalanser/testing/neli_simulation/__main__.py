"""``python -m rebalanser.testing.neli_simulation``: a soak on all cores, or one seed with its trace."""

from __future__ import annotations

from rebalanser.testing.neli_simulation.runner import Report, exercised, replay_command, run_chunk, run_seed
from rebalanser.testing.neli_simulation.scenario import PROFILES
from rebalanser.testing.simulation.command_line import Simulator, run


def _counts(total: Report) -> dict[str, int | str]:
    return {
        "rebalances": total.rebalances,
        "inductions": total.inductions,
        "leader changes": total.leader_changes,
        "overlaps (non-exclusive)": total.overlaps,
        "longest overlap": f"{total.longest_overlap_s:.3f} s",
        **{f"fact: {kind}": count for kind, count in sorted(total.facts.items())},
    }


if __name__ == "__main__":
    run(
        Simulator(
            title="NELI simulation",
            purpose="Simulate NELI groups under faults, and check the rules after every event.",
            profiles=PROFILES,
            run_seed=run_seed,
            run_chunk=run_chunk,
            make_report=Report,
            counts=_counts,
            exercised=exercised,
            replay_command=replay_command,
        )
    )
