"""``python -m rebalanser.testing.shiva_simulation``: a soak on all cores, or one seed with its trace."""

from __future__ import annotations

from rebalanser.testing.shiva_simulation.runner import Report, exercised, replay_command, run_chunk, run_seed
from rebalanser.testing.shiva_simulation.scenario import PROFILES
from rebalanser.testing.simulation.command_line import Simulator, run


def _counts(total: Report) -> dict[str, int | str]:
    return {
        "documents published": total.documents,
        "terms of leaders": total.terms,
        "processes started": total.starts,
        "applications moved": total.moves,
        "start commands kept": total.kept,
        "side by side (available, cut off)": total.side_by_side,
        "overlaps beyond the bound": total.excused,
    }


if __name__ == "__main__":
    run(
        Simulator(
            title="Shiva simulation",
            purpose="Simulate clusters of leaders and workers under faults, and check the rules"
            " after every event.",
            profiles=PROFILES,
            run_seed=run_seed,
            run_chunk=run_chunk,
            make_report=Report,
            counts=_counts,
            exercised=exercised,
            replay_command=replay_command,
        )
    )
