"""``python -m rebalanser.testing.simulation``: a soak on all cores, or one seed with its trace."""

from __future__ import annotations

import multiprocessing
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rebalanser.testing.simulation.runner import Report, exercised, replay_command, run_chunk, run_seed
from rebalanser.testing.simulation.scenario import ANYTHING, PROFILES

_CHUNK = 50


def _chunks(first: int, seeds: int, profile: str) -> list[tuple[int, int, str]]:
    end = first + seeds
    return [(start, min(_CHUNK, end - start), profile) for start in range(first, end, _CHUNK)]


def _soak(first: int, seeds: int, profile: str, jobs: int, console: Console) -> Report:
    total = Report()
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, Progress(*columns, console=console) as bar:
        task = bar.add_task("seeds", total=seeds)
        for report in pool.imap_unordered(run_chunk, _chunks(first, seeds, profile)):
            total.add(report)
            bar.advance(task, report.seeds)
            for seed, _, sentence in report.violations:
                command = replay_command(seed, PROFILES[profile])
                bar.console.print(f"[red]{sentence}[/red]\n  {command}", soft_wrap=True)
    return total


def _summary(total: Report) -> Table:
    table = Table(title="simulation", show_header=False)
    rows: dict[str, int | str] = {
        "seeds": total.seeds,
        "simulated hours": f"{total.simulated_s / 3600:.1f}",
        "events": total.events,
        "rebalances completed": total.rebalances,
        "versions published": total.versions,
        "leader changes": total.leader_changes,
        "fenced writes": total.writes,
        "stale writes refused": total.stale_writes,
        "overlaps beyond the bound": total.excused,
        **{f"fault: {kind}": count for kind, count in sorted(total.faults.items())},
        "violations": len(total.violations),
    }
    for name, value in rows.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
    return table


def _replay(seed: int, profile: str, trace: bool) -> int:
    report = run_seed(seed, PROFILES[profile], typer.echo if trace else None)
    for _, _, sentence in report.violations:
        typer.echo(sentence, err=True)
    if not report.violations:
        typer.echo(f"seed {seed}: no violation in {report.simulated_s:.1f} simulated seconds")
    return 1 if report.violations else 0


def main(
    seed: Annotated[int | None, typer.Option(help="Run this one seed.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Show what happens, line by line.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    profile: Annotated[str, typer.Option(help=f"One of: {', '.join(PROFILES)}.")] = ANYTHING.name,
) -> None:
    """Simulate groups of nodes under faults, and check the rules after every event."""
    if profile not in PROFILES:
        raise typer.BadParameter(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
    if seed is not None:
        raise typer.Exit(_replay(seed, profile, trace))
    console = Console()
    total = _soak(first, seeds, profile, jobs, console)
    console.print(_summary(total))
    missing = exercised(total, PROFILES[profile])
    for sentence in missing:
        console.print(f"[red]{sentence}[/red]")
    raise typer.Exit(1 if total.violations or missing else 0)


if __name__ == "__main__":
    typer.run(main)
