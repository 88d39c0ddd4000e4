"""``rebalanser shiva``: runs leaders and workers of a cluster, and manages its applications."""

from __future__ import annotations

import contextlib
import json as json_module
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, TextColumn
from rich.progress import Progress as Bar

from rebalanser.cli import shiva_running
from rebalanser.cli.commands import Commands
from rebalanser.cli.options import YesOption
from rebalanser.cli.output import Face, counted
from rebalanser.cli.shiva_options import ClusterOptions, TagOption, TimeoutOption, WaitOptions, cluster_name
from rebalanser.cli.shiva_table import application_line, plain, render
from rebalanser.core.shiva.records import AssignmentDocument, OutputAnswer
from rebalanser.core.shiva.types import (
    MAX_REPLICAS,
    ApplicationEntry,
    ApplicationId,
    ApplicationPattern,
    ApplicationState,
    Cordon,
    Mode,
)
from rebalanser.errors import InvalidName, InvalidSettings, UnknownApplication
from rebalanser.settings import Settings
from rebalanser.shiva import ClusterStatus, manifest_schema, read_channel_file, status_of, tail
from rebalanser.shiva.cluster import Cluster, Commanded, Progress

WATCH_S: Final = 2.0
"""Seconds between two looks at ages while a cluster is watched."""
SHOWN: Final = 5
"""Applications that a question names."""

app = Commands("Place applications on workers, over Kafka.")
app.command()(shiva_running.leader)
app.command()(shiva_running.worker)
app.command()(shiva_running.daemon)

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", show_default=False, help="The worker's id.")]
ApplicationArgument = Annotated[
    str,
    typer.Argument(metavar="TENANT/CHANNEL/APP", show_default=False, help="The application."),
]
PatternArgument = Annotated[
    str,
    typer.Argument(
        metavar="TENANT[/CHANNEL[/APP]]",
        show_default=False,
        help="The application, or all of a tenant or a channel; each part may have * and ?.",
    ),
]
OnlyArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[TENANT[/CHANNEL[/APP]]]",
        show_default=False,
        help="Only these applications; each part may have * and ?.",
    ),
]
ReplicasOption = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        min=1,
        max=MAX_REPLICAS,
        metavar="N",
        show_default="as the manifest says",
        help="Number of replicas, each on another worker.",
    ),
]


@app.command()
def start(
    waiting: WaitOptions,
    on: ClusterOptions,
    application: Annotated[
        str | None,
        typer.Argument(metavar="[TENANT/CHANNEL/APP", show_default=False, help="The application."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER-OR-ZIP]",
            show_default=False,
            help="The application's files, with a manifest at their root.",
        ),
    ] = None,
    channel_file: Annotated[
        Path | None,
        typer.Option(
            "--channel-file",
            metavar="FILE",
            show_default=False,
            help="Instead of one application: start all applications of a channel, as this JSON file says.",
        ),
    ] = None,
    tag: TagOption = None,
    mode: Annotated[
        Mode,
        typer.Option(
            help="On a worker without contact to a leader: keep running (available) or stop (exclusive)."
        ),
    ] = Mode.AVAILABLE,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME=VALUE",
            show_default=False,
            help="An environment variable in addition to the manifest; repeatable. NAME alone takes the "
            "value of this shell.",
        ),
    ] = None,
    replicas: ReplicasOption = None,
) -> None:
    """Start an application: publish its files and the command to run it on one of the workers."""
    face = on.face()
    if channel_file is not None:
        if application is not None or tag or env or replicas or mode is not Mode.AVAILABLE:
            raise InvalidSettings("--channel-file can't be combined with an application or its options")
        starts = read_channel_file(channel_file)
        with on.opened(face) as opened:
            with _publishing(face) as progress:
                started = opened.start_all(starts, progress)
            commands = dict(zip((each.application for each in starts), started, strict=True))
            _report_many(face, opened, Commanded(commands, {}), "start", waiting.limit_s)
        return
    if application is None or source is None:
        raise InvalidSettings("give TENANT/CHANNEL/APP and FOLDER-OR-ZIP, or --channel-file FILE")
    name = ApplicationId.parse(application)
    name.require_whole()
    environment = _environment(env or ())
    with on.opened(face) as opened:
        with _publishing(face) as progress:
            command = opened.start(
                name,
                source,
                tags=tag or (),
                mode=mode,
                environment=environment,
                progress=progress,
                replicas=replicas,
            )
        entry = _await(face, opened, name, command, waiting.timeout) if waiting.wait else None
    face.answer(
        {
            "application": application,
            "command": command,
            "state": entry.state.value if entry else "commanded",
            "worker": entry.worker if entry else None,
        },
        _started(application, entry),
    )


def _environment(given: Sequence[str]) -> dict[str, str]:
    """Return the variables of ``NAME=VALUE``, or of ``NAME`` with the value that it has here.

    Raises:
        InvalidSettings: a name alone is not set here.
    """
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals and name not in os.environ:
            raise InvalidSettings(f"--env {name}: it is not set in this environment; give --env {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def _started(application: str, entry: ApplicationEntry | None) -> str:
    if entry is None:
        return f"{application}: start commanded"
    if entry.replicas > 1:
        return f"{application}: all {entry.replicas} replicas have started"
    return f"{application} is {entry.state}{f' on {entry.worker}' if entry.worker else ''}"


def _chosen(
    face: Face,
    cluster: Cluster,
    pattern: ApplicationPattern,
    verb: str,
    yes: bool,
    spared: frozenset[ApplicationState],
) -> list[ApplicationId]:
    """Return the applications that a pattern selects, once the user has agreed to their number (SH-25).

    Raises:
        UnknownApplication: it selects none.
        InvalidSettings: nobody can be asked.
    """
    known = cluster.applications(Settings().connect_timeout_s)
    chosen = sorted(name for name, state in known.items() if pattern.matches(name) and state not in spared)
    if not chosen:
        raise UnknownApplication(f"there is no application of {pattern} to {verb}")
    if yes:
        return chosen
    number = counted(len(chosen), "application")
    shown = ", ".join(map(str, chosen[:SHOWN])) + (", …" if len(chosen) > SHOWN else "")
    if face.json or not sys.stdin.isatty():
        raise InvalidSettings(f"this would {verb} {number} of {pattern} ({shown}): give --yes to confirm")
    typer.confirm(f"{verb} {number} ({shown})?", abort=True, err=True)
    return chosen


def _report_many(
    face: Face, cluster: Cluster, commanded: Commanded, verb: str, timeout_s: float | None
) -> None:
    """Wait for the effects of many commands, unless ``timeout_s`` is None, and report them.

    Raises:
        UnknownApplication, ApplicationFailed: no application was commanded; the error of the first one.
    """
    commands, left_out = commanded.commands, commanded.left_out
    if not commands:
        raise next(iter(left_out.values()))
    _print_left_out(left_out.values())
    entries = cluster.wait_all(commands, timeout_s) if timeout_s is not None else {}
    known = {str(name): entry for name, entry in entries.items()}
    settled = "" if timeout_s is None else ", and all have taken effect"
    face.answer(
        {
            "applications": [
                {
                    "application": str(name),
                    "command": command,
                    "state": "commanded"
                    if timeout_s is None
                    else entry.state.value
                    if (entry := known[str(name)])
                    else "stopped",
                }
                for name, command in commands.items()
            ],
            "left_out": _left_out_json(commanded),
        },
        f"{verb} of {counted(len(commands), 'application')} commanded{settled}",
    )


def _print_left_out(reasons: Iterable[Exception]) -> None:
    for reason in reasons:
        typer.echo(f"left out: {reason}", err=True)


def _left_out_json(commanded: Commanded) -> list[dict[str, str]]:
    return [{"application": str(name), "reason": str(reason)} for name, reason in commanded.left_out.items()]


@app.command()
def stop(
    waiting: WaitOptions,
    on: ClusterOptions,
    application: PatternArgument,
    keep_data: Annotated[
        bool, typer.Option("--keep-data", help="Keep the folder SHIVA_DATA on the workers that have one.")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Stop an application, or all of a tenant or channel, and delete its own data unless that is kept."""
    face = on.face()
    pattern = ApplicationPattern.parse(application)
    name = pattern.exact
    if name is None:
        with on.opened(face) as opened:
            chosen = _chosen(face, opened, pattern, "stop", yes, frozenset({ApplicationState.STOPPING}))
            commanded = opened.stop_all(chosen, keep_data=keep_data)
            _report_many(face, opened, commanded, "stop", waiting.limit_s)
        return
    with on.opened(face) as opened:
        command = opened.stop(name, keep_data=keep_data)
        if waiting.wait:
            _await(face, opened, name, command, waiting.timeout)
    state = "stopped" if waiting.wait else "commanded"
    face.answer(
        {"application": application, "command": command, "state": state},
        f"{application} is stopped" if waiting.wait else f"{application}: stop commanded",
    )


@app.command()
def restart(
    waiting: WaitOptions,
    on: ClusterOptions,
    application: PatternArgument,
    yes: YesOption = False,
) -> None:
    """Start an application, or all of a tenant or channel, anew from the files in the cluster.

    Workers on which it failed may run it again.
    """
    face = on.face()
    pattern = ApplicationPattern.parse(application)
    name = pattern.exact
    if name is None:
        spared = frozenset({ApplicationState.STOPPING, ApplicationState.REFUSED})
        with on.opened(face) as opened:
            chosen = _chosen(face, opened, pattern, "restart", yes, spared)
            _report_many(face, opened, opened.restart_all(chosen), "restart", waiting.limit_s)
        return
    with on.opened(face) as opened:
        command = opened.restart(name)
        entry = _await(face, opened, name, command, waiting.timeout) if waiting.wait else None
    face.answer(
        {
            "application": application,
            "command": command,
            "state": entry.state.value if entry else "commanded",
            "worker": entry.worker if entry else None,
        },
        f"{application}: restart commanded" if entry is None else _started(application, entry),
    )


@app.command()
def scale(
    waiting: WaitOptions,
    on: ClusterOptions,
    application: ApplicationArgument,
    replicas: Annotated[
        int,
        typer.Argument(
            min=1, max=MAX_REPLICAS, metavar="N", show_default=False, help="The number of replicas."
        ),
    ],
) -> None:
    """Run another number of replicas of an application; those that stay are left alone."""
    face = on.face()
    name = ApplicationId.parse(application)
    name.require_whole()
    with on.opened(face) as opened:
        command = opened.scale(name, replicas)
        if waiting.wait:
            _await(face, opened, name, command, waiting.timeout)
    face.answer(
        {"application": application, "command": command, "replicas": replicas, "settled": waiting.wait},
        f"{application} has {counted(replicas, 'replica')}, and all run or have finished"
        if waiting.wait
        else f"{application}: commanded to have {counted(replicas, 'replica')}",
    )


@app.command()
def retry(
    on: ClusterOptions,
    applications: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TENANT[/CHANNEL[/APP]]]...",
            show_default=False,
            help="The applications, or those of a tenant or channel that have failed on every worker; "
            "default: all of these.",
        ),
    ] = None,
) -> None:
    """Start failed applications anew from their files in the cluster, on any worker that can take them.

    A named application that is unknown is an error. Others that have vanished meanwhile are left out.
    """
    face = on.face()
    patterns = [ApplicationPattern.parse(each) for each in applications or ("*",)]
    wanted = [pattern.exact for pattern in patterns if pattern.exact is not None]
    with on.opened(face) as opened:
        document = opened.read(Settings().connect_timeout_s)
        known = document.applications if document is not None else {}
        failed = {
            name.whole
            for name, entry in known.items()
            if entry.state is ApplicationState.FAILED and any(each.matches(name) for each in patterns)
        }
        chosen = sorted(failed.union(wanted))
        failing = {name.whole for name, entry in known.items() if entry.failed_on}
        sound = [name for name in chosen if name in known and name not in failing]
        broken = [name for name in chosen if name not in sound]
        commanded = opened.restart_all(broken) if broken else Commanded({}, {})
    face.answer(
        {
            "retried": {str(name): command for name, command in commanded.commands.items()},
            "left_out": _left_out_json(commanded),
        },
        *(f"{name}: retry commanded" for name in commanded.commands),
        *(f"{name} has not failed" for name in sound),
        *(() if chosen else ("no application has failed",)),
    )
    left_out = commanded.left_out
    errors = [reason for name, reason in left_out.items() if name in wanted or not commanded.commands]
    _print_left_out(reason for reason in left_out.values() if reason not in errors[:1])
    if errors:
        raise errors[0]


@app.command()
def drain(waiting: WaitOptions, on: ClusterOptions, worker: WorkerArgument) -> None:
    """Move all applications off a worker, and give it none until it is uncordoned."""
    _cordon(on, worker, Cordon.DRAINED, waiting.limit_s)


@app.command()
def cordon(waiting: WaitOptions, on: ClusterOptions, worker: WorkerArgument) -> None:
    """Give a worker no further applications until it is uncordoned; it keeps those that it has."""
    _cordon(on, worker, Cordon.CORDONED, waiting.limit_s)


@app.command()
def uncordon(waiting: WaitOptions, on: ClusterOptions, worker: WorkerArgument) -> None:
    """Give a cordoned or drained worker applications again."""
    _cordon(on, worker, None, waiting.limit_s)


def _cordon(on: ClusterOptions, worker: str, cordon: Cordon | None, timeout_s: float | None) -> None:
    """Command it, and wait for its effect unless ``timeout_s`` is None."""
    face = on.face()
    state = cordon.value if cordon else "uncordoned"
    with on.opened(face) as opened:
        command = opened.cordon(worker, cordon)
        if timeout_s is not None:
            opened.wait_cordoned(worker, cordon, timeout_s, command=command)
    face.answer(
        {"worker": worker, "command": command, "cordon": state, "settled": timeout_s is not None},
        f"{worker} is {state}" if timeout_s is not None else f"{worker}: commanded to be {state}",
    )


def _await(
    face: Face, cluster: Cluster, application: ApplicationId, command: str, timeout_s: float
) -> ApplicationEntry | None:
    """Wait for a command's effect, and show the application's state meanwhile."""
    if face.json or not sys.stderr.isatty():
        return cluster.wait(application, command, timeout_s)
    with Console(stderr=True).status(f"waiting for {application}") as line:

        def tell(document: AssignmentDocument) -> None:
            entry = document.applications.get(application)
            if entry is not None:
                line.update(f"{application} is {entry.state}{f': {entry.reason}' if entry.reason else ''}")

        return cluster.wait(application, command, timeout_s, tell)


@contextlib.contextmanager
def _publishing(face: Face) -> Iterator[Progress]:
    if face.json or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    columns = (TextColumn("publishing archives"), BarColumn(), DownloadColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("archive", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@app.command("list")
def list_(on: ClusterOptions, only: OnlyArgument = None) -> None:
    """List the applications of a cluster, a line each: state, worker, and the reason if it waits."""
    face = on.face()
    pattern = _pattern(only)
    with on.opened(face) as opened:
        status = _read_status(face, opened, pattern)
    applications = {"applications": [each.model_dump(mode="json") for each in status.applications]}
    face.answer(applications, *map(application_line, status.applications))


@app.command()
def status(
    on: ClusterOptions,
    only: OnlyArgument = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show changes until Ctrl-C.")] = False,
    exit_code: Annotated[
        bool,
        typer.Option("--exit-code", help="Exit with 1 unless all started applications run."),
    ] = False,
) -> None:
    """Show a cluster: its workers, its applications, and why some can't be placed or have failed."""
    face = on.face()
    pattern = _pattern(only)
    with on.opened(face) as opened:
        if watch:
            _watch(face, opened, pattern)
            return
        shown = _read_status(face, opened, pattern)
    if face.on_terminal:
        face.draw(render(shown))
    else:
        face.answer(shown, *plain(shown))
    if exit_code and not shown.settled:
        raise typer.Exit(1)


def _pattern(only: str | None) -> ApplicationPattern:
    if only is not None and "#" in only:
        replica = ApplicationId.parse(only)
        raise InvalidName(f"{replica} is a replica, and is shown with all of them: give {replica.whole}")
    return ApplicationPattern.parse("*" if only is None else only)


def _read_status(face: Face, cluster: Cluster, pattern: ApplicationPattern) -> ClusterStatus:
    timeout_s = Settings().connect_timeout_s
    return status_of(cluster_name(face.url), cluster.read(timeout_s), cluster.heard(timeout_s)).only(pattern)


def _watch(face: Face, cluster: Cluster, pattern: ApplicationPattern) -> None:
    """Show each document, and what has become stale meanwhile (SH-20)."""
    name = cluster_name(face.url)
    shown = (
        status_of(name, document, cluster.heard(Settings().connect_timeout_s)).only(pattern)
        for document in cluster.documents(repeat_s=WATCH_S)
    )
    if face.on_terminal:
        with Live(console=Console(highlight=False), auto_refresh=False, screen=True) as live:
            live.update(render(status_of(name, None)), refresh=True)
            for status in shown:
                live.update(render(status), refresh=True)
        return
    before = None
    for status in shown:
        news = status.epoch, status.active_leader, status.stale, [each.stale for each in status.workers]
        if news != before:
            face.answer(status, *plain(status))
            sys.stdout.flush()
        before = news


@app.command()
def logs(
    on: ClusterOptions,
    application: ApplicationArgument,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            show_default=False,
            help="Read the output in this data folder of a worker on this host, instead of asking a worker "
            "over Kafka.",
        ),
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option(
            "--worker",
            metavar="ID",
            show_default="the one that has it",
            help="The worker to ask.",
        ),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, metavar="N", help="Number of lines.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then show new output until Ctrl-C.")
    ] = False,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Show the output of an application: from a data folder here, or through the worker that has it."""
    name = ApplicationId.parse(application)
    if data is None:
        face = on.face()
        with on.opened(face) as opened:
            if not follow:
                _print_output(face, application, opened.output(name, lines, timeout, worker))
                return
            for answer in opened.follow_output(name, lines, timeout, worker):
                _print_output(face, application, answer)
                sys.stdout.flush()
        return
    face = Face("", on.json)
    for line in tail(data, name, lines=lines, follow=follow):
        face.answer({"application": application, "line": line}, line)
        if follow:
            sys.stdout.flush()


def _print_output(face: Face, application: str, answer: OutputAnswer) -> None:
    if answer.omitted:
        typer.echo(f"{answer.omitted:,} earlier lines left out: they exceed the size of an answer", err=True)
    for line in answer.lines:
        face.answer({"application": application, "worker": answer.worker, "line": line}, line)


@app.command()
def schema() -> None:
    """Show the JSON schema of an application's manifest."""
    typer.echo(json_module.dumps(manifest_schema(), indent=2))
