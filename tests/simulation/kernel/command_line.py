"""The command line of every simulator: a soak on all cores, or one seed with its trace."""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Generic, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from simulation.kernel.reports import USUAL_PROFILE, RunReport
from simulation.kernel.trace import Write

ReportT = TypeVar("ReportT", bound=RunReport[Any, Any])
ProfileT = TypeVar("ProfileT")

ALL = "all"
"""Stands for every profile."""
SOAK_SEEDS = 100_000
"""Fewer seeds of all profiles need not have met everything often."""
_CHUNK = 50


@dataclass(frozen=True)
class _Named(Generic[ReportT]):
    """Runs a chunk and says of which profile it is."""

    run_chunk: Callable[[tuple[int, int, str]], ReportT]

    def __call__(self, chunk: tuple[int, int, str]) -> tuple[str, ReportT]:
        return chunk[2], self.run_chunk(chunk)


@dataclass(frozen=True)
class Simulator(Generic[ReportT, ProfileT]):
    """What the command line needs of a simulator.

    ``run_chunk`` is called in other processes, with the first seed, how many, and a profile's name; so it
    is a function of a module. ``counts`` is what a summary tells of a report beside what all have.
    """

    purpose: str
    profiles: Mapping[str, ProfileT]
    run_seed: Callable[[int, ProfileT, Write | None], ReportT]
    run_chunk: Callable[[tuple[int, int, str]], ReportT]
    make_report: Callable[[], ReportT]
    counts: Callable[[ReportT], Mapping[str, int | str]]
    exercised: Callable[[ReportT, ProfileT], list[str]]
    replay_command: Callable[[int, ProfileT], str]
    seldom: Callable[[ReportT], Mapping[str, int]] = lambda _: {}
    """Events that a long soak of all profiles met too rarely, with their counts."""
    share: Callable[[ProfileT], float] = lambda _: 1.0
    """Seeds of a profile in a soak of all, relative to the others."""

    def soak(
        self, first: int, seeds: int, profiles: Sequence[str], jobs: int, console: Console
    ) -> dict[str, ReportT]:
        """Run many seeds, spread over the profiles, in ``jobs`` processes; what breaks a rule is printed."""
        totals = {name: self.make_report() for name in profiles}
        shares = [self.share(self.profiles[name]) for name in profiles]
        limits = [round(seeds * limit / sum(shares)) for limit in accumulate(shares)]
        counts = [limit - before for before, limit in pairwise([0, *limits])]
        ends = {name: first + count for name, count in zip(profiles, counts, strict=True)}
        chunks = [
            (start, min(_CHUNK, end - start), name)
            for name, end in ends.items()
            for start in range(first, end, _CHUNK)
        ]
        columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        spawning = multiprocessing.get_context("spawn")
        with spawning.Pool(jobs) as pool, Progress(*columns, console=console) as bar:
            task = bar.add_task("seeds", total=seeds)
            for name, report in pool.imap_unordered(_Named(self.run_chunk), chunks):
                totals[name].add(report)
                bar.advance(task, report.seeds)
                for seed, _, sentence in report.violations:
                    command = self.replay_command(seed, self.profiles[name])
                    bar.console.print(f"[red]{sentence}[/red]\n  {command}", soft_wrap=True)
        return totals

    def summary(self, title: str, total: ReportT) -> Table:
        """The table of what runs did."""
        table = Table(title=title, show_header=False)
        rows: dict[str, int | str] = {
            "seeds": total.seeds,
            "simulated hours": f"{total.simulated_s / 3600:.1f}",
            "events": total.events,
            **self.counts(total),
            **{f"fault: {kind}": count for kind, count in sorted(total.faults.items())},
            **{f"seldom met: {name}": count for name, count in self.seldom(total).items()},
            "violations": len(total.violations),
        }
        for name, value in rows.items():
            table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
        return table

    def replay(self, seed: int, profile: str, *, trace: bool) -> int:
        """Run one seed and print what it broke; the exit status."""
        report = self.run_seed(seed, self.profiles[profile], typer.echo if trace else None)
        for _, _, sentence in report.violations:
            typer.echo(sentence, err=True)
        if not report.violations:
            typer.echo(f"seed {seed}: no violation in {report.simulated_s:.1f} simulated seconds")
        return 1 if report.violations else 0


def command(simulator: Simulator[ReportT, ProfileT]) -> Callable[..., None]:
    """Make the command that runs a simulator, and exits with 1 if a rule was broken."""
    known = ", ".join(simulator.profiles)

    # Not postponed: the annotations name what only this function knows.
    def main(
        seed: Annotated[int | None, typer.Option(help="Run this one seed.")] = None,
        trace: Annotated[bool, typer.Option("--trace", help="Show what happens, line by line.")] = False,
        seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run.")] = 1000,
        first: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
        jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
        profile: Annotated[
            str, typer.Option(help=f"One of: {known}; or {ALL}, one after another.")
        ] = USUAL_PROFILE,
    ) -> None:
        if profile not in simulator.profiles and (profile != ALL or seed is not None):
            raise typer.BadParameter(f"unknown profile {profile!r}; known: {known}")
        if seed is not None:
            raise typer.Exit(simulator.replay(seed, profile, trace=trace))
        console = Console()
        totals = simulator.soak(
            first, seeds, list(simulator.profiles) if profile == ALL else [profile], jobs, console
        )
        total = type(simulator.make_report()).of(totals.values())
        console.print(simulator.summary(simulator.purpose, total))
        missing = [
            f"{name}: {sentence}"
            for name, report in totals.items()
            for sentence in simulator.exercised(report, simulator.profiles[name])
        ]
        if profile == ALL and seeds >= SOAK_SEEDS:
            missing += [f"{count} times only: {name}" for name, count in simulator.seldom(total).items()]
        for sentence in missing:
            console.print(f"[red]{sentence}[/red]")
        raise typer.Exit(1 if total.violations or missing else 0)

    main.__doc__ = simulator.purpose
    return main
