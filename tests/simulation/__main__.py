"""``python tests/simulation group|neli|shiva|tasks``: a soak on all cores, or one seed with its trace."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.group import runner as group_runner
from simulation.group import scenario as group_scenario
from simulation.group.coverage import seldom
from simulation.kernel.command_line import Simulator, command
from simulation.neli import runner as neli_runner
from simulation.neli import scenario as neli_scenario
from simulation.shiva import runner as shiva_runner
from simulation.shiva import scenario as shiva_scenario
from simulation.tasks import runner as tasks_runner
from simulation.tasks import scenario as tasks_scenario


def _simulator(
    runner: Any,
    profiles: Mapping[str, Any],
    purpose: str,
    counts: Callable[[Any], Mapping[str, int | str]],
    **rest: Any,
) -> Simulator[Any, Any]:
    return Simulator(
        purpose=purpose,
        profiles=profiles,
        run_seed=runner.run_seed,
        run_chunk=runner.run_chunk,
        make_report=runner.Report,
        counts=counts,
        exercised=runner.exercised,
        replay_command=runner.replay_command,
        **rest,
    )


def _group_counts(total: Any) -> dict[str, int | str]:
    return {
        "rebalances completed": total.rebalances,
        "versions published": total.versions,
        "leader changes": total.leader_changes,
        "fenced writes": total.writes,
        "stale writes refused": total.stale_writes,
        "overlaps beyond the bound": total.excused,
    }


def _neli_counts(total: Any) -> dict[str, int | str]:
    return {
        "rebalances": total.rebalances,
        "inductions": total.inductions,
        "leader changes": total.leader_changes,
        "overlaps (non-exclusive)": total.overlaps,
        "longest overlap": f"{total.longest_overlap_s:.3f} s",
        **_facts(total),
    }


def _shiva_counts(total: Any) -> dict[str, int | str]:
    return {
        "documents published": total.documents,
        "terms of leaders": total.terms,
        "processes started": total.starts,
        "applications moved": total.moves,
        "start commands kept": total.kept,
        "side by side (available, cut off)": total.side_by_side,
        "overlaps beyond the bound": total.excused,
    }


def _facts(total: Any) -> dict[str, int | str]:
    return {f"fact: {kind}": count for kind, count in sorted(total.facts.items())}


SIMULATORS = {
    "group": _simulator(
        group_runner,
        group_scenario.PROFILES,
        "Simulate groups of nodes under faults, and check the rules after every event.",
        _group_counts,
        seldom=lambda total: seldom(total.met),
        share=lambda profile: profile.share,
    ),
    "neli": _simulator(
        neli_runner,
        neli_scenario.PROFILES,
        "Simulate NELI groups under faults, and check the rules after every event.",
        _neli_counts,
    ),
    "shiva": _simulator(
        shiva_runner,
        shiva_scenario.PROFILES,
        "Simulate clusters of leaders and workers under faults, and check the rules after every event.",
        _shiva_counts,
    ),
    "tasks": _simulator(
        tasks_runner,
        tasks_scenario.PROFILES,
        "Simulate task queues under faults, and check the rules at every write.",
        _facts,
    ),
}

if __name__ == "__main__":
    application = typer.Typer(help=__doc__, add_completion=False)
    for name, simulator in SIMULATORS.items():
        application.command(name)(command(simulator))
    application()
