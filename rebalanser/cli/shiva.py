"""``rebalanser shiva``: runs leaders and workers of a cluster, and manages its applications."""

from __future__ import annotations

import contextlib
import json as json_module
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, TextColumn
from rich.progress import Progress as Bar

from rebalanser.cli.commands import Commands
from rebalanser.cli.options import (
    HistoryOption,
    HistoryTopicOption,
    JsonOption,
    KafkaOption,
    VerboseOption,
    YesOption,
)
from rebalanser.cli.output import Face, counted
from rebalanser.cli.shiva_table import application_line, plain, render
from rebalanser.core.allocation import MAX_AMOUNT, Capacity, thousandths
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import CHANGE_KEYS, AssignmentDocument, OutputAnswer
from rebalanser.core.shiva.types import (
    MAX_REPLICAS,
    ApplicationEntry,
    ApplicationId,
    ApplicationPattern,
    ApplicationState,
    Cordon,
    Mode,
    RestartPolicy,
    check_part,
)
from rebalanser.core.shiva.worker_options import WorkerOptions
from rebalanser.errors import InvalidSettings, InvalidUrl, UnknownApplication
from rebalanser.history import HistorySink, open_sinks
from rebalanser.registry.urls import known_schemes
from rebalanser.runtime.logs import get_logger
from rebalanser.runtime.running import stopping_on_signals
from rebalanser.settings import Settings
from rebalanser.shiva import (
    ClusterStatus,
    TopicNames,
    manifest_schema,
    open_cluster,
    read_channel_file,
    status_of,
    tail,
)
from rebalanser.shiva.cluster import ENTRY_POINT_GROUP, Cluster, Commanded, Progress, Running

CLUSTER_VARIABLE: Final = "REBALANSER_CLUSTER"
TOPICS_VARIABLE: Final = "REBALANSER_TOPICS"
TOPICS: Final = tuple(field.name for field in fields(TopicNames))
WATCH_S: Final = 2.0
"""Seconds between two looks at ages while a cluster is watched."""
SHOWN: Final = 5
"""Applications that a question names."""
LOOK_S: Final = 0.2
"""Seconds between looks for a leader or worker that has ended."""
HISTORY_CLOSE_S: Final = 2.0
"""Maximum seconds for the last records of a history."""

app = Commands("Place applications on workers, over Kafka.")

ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        envvar=CLUSTER_VARIABLE,
        show_default=False,
        help="The cluster's name; its topics' names begin with it.",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="URL",
        show_default=False,
        help="Instead of --kafka and --cluster: kafka://HOST:PORT/CLUSTER.",
    ),
]
TopicsOption = Annotated[
    str | None,
    typer.Option(
        "--topics",
        metavar="command=NAME,…",
        envvar=TOPICS_VARIABLE,
        show_default="CLUSTER-command, CLUSTER-control, CLUSTER-assignement",
        help="Other names of the topics: command=NAME,control=NAME,assignement=NAME.",
    ),
]
IdOption = Annotated[
    str | None,
    typer.Option(
        "--id",
        metavar="ID",
        show_default="the host's name",
        help="The id of this process within the cluster.",
    ),
]
DataOption = Annotated[
    Path,
    typer.Option("--data", metavar="FOLDER", show_default=False, help="The folder for the worker's files."),
]
TagOption = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", show_default=False, help="A tag; repeatable.")
]
RoundOption = Annotated[
    float,
    typer.Option("--round", min=0.1, metavar="SECONDS", help="Seconds between two pings of the leader."),
]
MissedOption = Annotated[
    int,
    typer.Option(
        "--missed-rounds", min=1, metavar="N", help="Number of missed rounds after which a worker is removed."
    ),
]
GraceOption = Annotated[
    float,
    typer.Option(
        "--away-grace",
        min=0.0,
        metavar="SECONDS",
        help="How long the applications of a missing worker wait for it before they move.",
    ),
]
CpuOption = Annotated[
    float | None,
    typer.Option(
        "--cpu",
        min=0.0,
        max=MAX_AMOUNT / 1000,
        metavar="N",
        show_default="no limit",
        help="Processors that the applications of this worker may request together.",
    ),
]
MemoryOption = Annotated[
    int | None,
    typer.Option(
        "--memory-mb",
        min=0,
        max=MAX_AMOUNT,
        metavar="MB",
        show_default="no limit",
        help="Megabytes of memory that the applications of this worker may request together.",
    ),
]
KeepFilesOption = Annotated[
    float,
    typer.Option(
        "--keep-files",
        min=0.0,
        metavar="SECONDS",
        help="How long the unpacked files of an application stay after it has moved to another worker.",
    ),
]
WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", show_default=False, help="The worker's id.")]
SessionOption = Annotated[
    float,
    typer.Option(
        "--session-timeout",
        min=0.1,
        metavar="SECONDS",
        help="Time of silence after which Kafka lets another leader take over.",
    ),
]
StalledOption = Annotated[
    float,
    typer.Option(
        "--stalled",
        min=0.1,
        metavar="SECONDS",
        help="Time after which a worker that answers and follows no assignment counts as gone.",
    ),
]
SnapshotOption = Annotated[
    int,
    typer.Option(
        "--snapshot-changes",
        min=0,
        max=CHANGE_KEYS - 1,
        metavar="N",
        help="Changes published at most before the next whole assignment; 0 for whole ones only.",
    ),
]
RetryInitialOption = Annotated[
    float,
    typer.Option(
        "--retry-initial",
        min=0.1,
        metavar="SECONDS",
        help="Time after which an application that has failed is tried again; it doubles each time.",
    ),
]
RetryMaxOption = Annotated[
    float, typer.Option("--retry-max", min=0.1, metavar="SECONDS", help="Maximum of that time.")
]
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
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait for the effect.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.0, metavar="SECONDS", help="Maximum time to wait.")
]


def _url(registry: str | None, kafka: str | None, cluster: str | None) -> str:
    """Return the cluster's URL from either set of options.

    Raises:
        InvalidUrl: neither set is complete, or both are given.
    """
    if registry is not None:
        if kafka is not None or cluster is not None:
            raise InvalidUrl("give either --registry, or --kafka and --cluster")
        scheme, found, _ = registry.partition("://")
        if found and scheme not in known_schemes(ENTRY_POINT_GROUP):
            raise InvalidUrl(f"Shiva needs Kafka, not {scheme}://: give --registry kafka://HOST:PORT/CLUSTER")
        return registry
    if kafka is None or cluster is None:
        missing = " and ".join(
            name for name, value in (("--kafka", kafka), ("--cluster", cluster)) if value is None
        )
        raise InvalidUrl(f"which cluster? {missing} missing (or --registry kafka://HOST:PORT/CLUSTER)")
    base, question, options = (kafka if "://" in kafka else f"kafka://{kafka}").partition("?")
    return f"{base.rstrip('/')}/{check_part(cluster, 'cluster')}{question}{options}"


def _topic_names(text: str | None) -> TopicNames:
    """Return the names of ``command=NAME,control=NAME,assignement=NAME``; each may be missing.

    Raises:
        InvalidSettings: it is something else.
        InvalidName: as ``TopicNames``.
    """
    names: dict[str, str] = {}
    for each in text.split(",") if text else ():
        topic, _, name = each.partition("=")
        if topic not in TOPICS or topic in names or not name:
            raise InvalidSettings(
                f"--topics {text}: give {','.join(f'{known}=NAME' for known in TOPICS)}, each at most once"
            )
        names[topic] = name
    return TopicNames(**names)


@contextlib.contextmanager
def _opened(face: Face, topics: str | None) -> Iterator[Cluster]:
    settings, names = Settings(), _topic_names(topics)
    with face.patience(settings):
        cluster = open_cluster(face.url, settings.connect_timeout_s, names)
    with closing(cluster):
        yield cluster


def _name(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


def _default_id(given: str | None) -> str:
    return check_part(socket.gethostname() if given is None else given, "id")


@contextlib.contextmanager
def _recorded(folder: Path | None, topic: str | None, group: str, label: str) -> Iterator[HistorySink | None]:
    """Open the history sink for ``label`` of ``group``, and close it at the end; None without a target.

    Raises:
        InvalidUrl: ``topic`` is not a URL.
        UnknownScheme: no installed package has topics of that scheme.
    """
    if folder is None and topic is None:
        yield None
        return
    settings = Settings()
    sink = open_sinks(folder, topic, group, label, settings.history_max_bytes, settings.history_file_mode)
    try:
        yield sink
    finally:
        sink.close(HISTORY_CLOSE_S)


def _recorder(
    face: Face, folder: Path | None, topic: str | None, name: str
) -> Callable[[str], contextlib.AbstractContextManager[HistorySink | None]]:
    """Return a function that opens the history of a role: leader and worker each have their own."""
    return lambda role: _recorded(folder, topic, _name(face.url), f"{role}-{name}")


def _run_until_signal(face: Face, running: Sequence[Running], what: str) -> None:
    """Wait for SIGINT, SIGTERM or SIGHUP, or until a participant ends by itself; then stop one after another.

    Raises:
        RebalanserError: the error of the participant that ended; the others were stopped first.
    """
    asked = threading.Event()
    with stopping_on_signals(asked.set), contextlib.ExitStack() as ending:
        for each in reversed(running):
            ending.callback(each.wait)
            ending.callback(each.stop)
        face.answer({"running": what}, f"{what} runs; Ctrl-C stops it")
        sys.stdout.flush()
        while not asked.wait(LOOK_S) and not any(each.wait(0) for each in running):
            continue


@app.command()
def leader(
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    id: IdOption = None,  # noqa: A002 - the option's name
    round: RoundOption = 30.0,  # noqa: A002 - the option's name
    missed_rounds: MissedOption = 1,
    session_timeout: SessionOption = 10.0,
    stalled: StalledOption = 120.0,
    retry_initial: RetryInitialOption = 30.0,
    retry_max: RetryMaxOption = 300.0,
    away_grace: GraceOption = 0.0,
    snapshot_changes: SnapshotOption = CHANGE_KEYS - 1,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    history: HistoryOption = None,
    history_topic: HistoryTopicOption = None,
    verbose: VerboseOption = 0,
    json: JsonOption = False,
) -> None:
    """Run a leader of a cluster until Ctrl-C or SIGTERM; one of its leaders is active at a time."""
    face = Face.of(_url(registry, kafka, cluster), json, 1 + verbose)
    name = _default_id(id)
    options = LeaderOptions(
        round_s=round,
        missed_rounds=missed_rounds,
        session_timeout_s=session_timeout,
        stalled_s=stalled,
        retry_initial_s=retry_initial,
        retry_max_s=retry_max,
        away_grace_s=away_grace,
        snapshot_changes=snapshot_changes,
    )
    options.check()
    _warn_of_short_deadline(options, WorkerOptions())
    record = _recorder(face, history, history_topic, name)
    with _opened(face, topics) as opened, record("leader") as leading:
        running = [opened.run_leader(name, options, leading)]
        _run_until_signal(face, running, f"leader {name}")


@app.command()
def worker(
    data: DataOption,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    id: IdOption = None,  # noqa: A002 - the option's name
    tag: TagOption = None,
    cpu: CpuOption = None,
    memory_mb: MemoryOption = None,
    keep_files: KeepFilesOption = 3600.0,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    history: HistoryOption = None,
    history_topic: HistoryTopicOption = None,
    verbose: VerboseOption = 0,
    json: JsonOption = False,
) -> None:
    """Run the applications that a cluster's leader assigns to this worker, until Ctrl-C or SIGTERM."""
    face = Face.of(_url(registry, kafka, cluster), json, 1 + verbose)
    name = _default_id(id)
    record = _recorder(face, history, history_topic, name)
    with _opened(face, topics) as opened, record("worker") as working:
        running = [opened.run_worker(name, data, _worker_options(tag, cpu, memory_mb, keep_files), working)]
        _run_until_signal(face, running, f"worker {name}")


@app.command()
def daemon(
    data: DataOption,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    id: IdOption = None,  # noqa: A002 - the option's name
    tag: TagOption = None,
    cpu: CpuOption = None,
    memory_mb: MemoryOption = None,
    keep_files: KeepFilesOption = 3600.0,
    round: RoundOption = 30.0,  # noqa: A002 - the option's name
    missed_rounds: MissedOption = 1,
    session_timeout: SessionOption = 10.0,
    stalled: StalledOption = 120.0,
    retry_initial: RetryInitialOption = 30.0,
    retry_max: RetryMaxOption = 300.0,
    away_grace: GraceOption = 0.0,
    snapshot_changes: SnapshotOption = CHANGE_KEYS - 1,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    history: HistoryOption = None,
    history_topic: HistoryTopicOption = None,
    verbose: VerboseOption = 0,
    json: JsonOption = False,
) -> None:
    """Run a leader and a worker in one process, with the same id, until Ctrl-C or SIGTERM."""
    face = Face.of(_url(registry, kafka, cluster), json, 1 + verbose)
    name = _default_id(id)
    options = LeaderOptions(
        round_s=round,
        missed_rounds=missed_rounds,
        session_timeout_s=session_timeout,
        stalled_s=stalled,
        retry_initial_s=retry_initial,
        retry_max_s=retry_max,
        away_grace_s=away_grace,
        snapshot_changes=snapshot_changes,
    )
    options.check()
    offered = _worker_options(tag, cpu, memory_mb, keep_files)
    _warn_of_short_deadline(options, offered)
    record = _recorder(face, history, history_topic, name)
    with _opened(face, topics) as opened, record("leader") as leading, record("worker") as working:
        ran = opened.run_worker(name, data, offered, working)
        try:
            # The worker stops first: its leader publishes at once that it has left (SH-22).
            running = [ran, opened.run_leader(name, options, leading)]
        except BaseException:
            ran.stop()
            ran.wait()
            raise
        _run_until_signal(face, running, f"daemon {name}")


def _warn_of_short_deadline(options: LeaderOptions, offered: WorkerOptions) -> None:
    """Warn if the rounds are too short for exclusive applications (SH-14)."""
    try:
        offered.check_deadline(options.permission_s, options.round_s, RestartPolicy().stop_timeout_s)
    except InvalidSettings as warning:
        get_logger("rebalanser.shiva").warning(str(warning), action="short_deadline")


def _worker_options(
    tags: list[str] | None, cpu: float | None, memory_mb: int | None, keep_files_s: float
) -> WorkerOptions:
    wanted = frozenset(check_part(tag, "tag") for tag in tags or ())
    limited = cpu is not None or memory_mb is not None
    try:
        cpu_milli = None if cpu is None else thousandths(cpu)
    except ValueError as error:
        raise InvalidSettings(f"--{error}") from None
    capacity = Capacity(cpu_milli, memory_mb) if limited else None
    return WorkerOptions(tags=wanted, capacity=capacity, keep_files_s=keep_files_s)


@app.command()
def start(
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
        Mode, typer.Option(help="On a worker that is cut off it runs on (available) or stops (exclusive).")
    ] = Mode.AVAILABLE,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME=VALUE",
            show_default=False,
            help="Added to the manifest's environment; repeatable. NAME alone: as it is here.",
        ),
    ] = None,
    replicas: ReplicasOption = None,
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    json: JsonOption = False,
) -> None:
    """Start an application: publish its files and the command to run it on one of the workers."""
    face = Face.of(_url(registry, kafka, cluster), json)
    if channel_file is not None:
        if application is not None or tag or env or replicas or mode is not Mode.AVAILABLE:
            raise InvalidSettings(
                "--channel-file says which applications, and how: give nothing of that beside it"
            )
        starts = read_channel_file(channel_file)
        with _opened(face, topics) as opened:
            with _publishing(face) as progress:
                started = opened.start_all(starts, progress)
            commands = dict(zip((each.application for each in starts), started, strict=True))
            _report_many(face, opened, Commanded(commands, {}), "start", timeout if wait else None)
        return
    if application is None or source is None:
        raise InvalidSettings("give TENANT/CHANNEL/APP and FOLDER-OR-ZIP, or --channel-file FILE")
    name = ApplicationId.parse(application)
    environment = _environment(env or ())
    with _opened(face, topics) as opened:
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
        entry = _await(face, opened, name, command, timeout) if wait else None
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
            raise InvalidSettings(f"--env {name}: there is no such variable here; give --env {name}=VALUE")
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
        raise InvalidSettings(f"{number} of {pattern} would be chosen to {verb} ({shown}): give --yes")
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
    settled = "" if timeout_s is None else ", and all have had their effect"
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
    application: PatternArgument,
    keep_data: Annotated[
        bool, typer.Option("--keep-data", help="Keep the folder SHIVA_DATA on the workers that have one.")
    ] = False,
    yes: YesOption = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    json: JsonOption = False,
) -> None:
    """Stop an application on any worker, or all of a tenant or channel; own data goes too, unless kept."""
    face = Face.of(_url(registry, kafka, cluster), json)
    pattern = ApplicationPattern.parse(application)
    name = pattern.exact
    if name is None:
        with _opened(face, topics) as opened:
            chosen = _chosen(face, opened, pattern, "stop", yes, frozenset({ApplicationState.STOPPING}))
            commanded = opened.stop_all(chosen, keep_data=keep_data)
            _report_many(face, opened, commanded, "stop", timeout if wait else None)
        return
    with _opened(face, topics) as opened:
        command = opened.stop(name, keep_data=keep_data)
        if wait:
            _await(face, opened, name, command, timeout)
    state = "stopped" if wait else "commanded"
    face.answer(
        {"application": application, "command": command, "state": state},
        f"{application}: stop commanded" if not wait else f"{application} is stopped",
    )


@app.command()
def restart(
    application: PatternArgument,
    yes: YesOption = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    json: JsonOption = False,
) -> None:
    """Start an application, or all of a tenant or channel, anew from the files in the cluster.

    Where it failed is forgotten.
    """
    face = Face.of(_url(registry, kafka, cluster), json)
    pattern = ApplicationPattern.parse(application)
    name = pattern.exact
    if name is None:
        spared = frozenset({ApplicationState.STOPPING, ApplicationState.REFUSED})
        with _opened(face, topics) as opened:
            chosen = _chosen(face, opened, pattern, "restart", yes, spared)
            _report_many(face, opened, opened.restart_all(chosen), "restart", timeout if wait else None)
        return
    with _opened(face, topics) as opened:
        command = opened.restart(name)
        entry = _await(face, opened, name, command, timeout) if wait else None
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
    application: ApplicationArgument,
    replicas: Annotated[
        int,
        typer.Argument(
            min=1, max=MAX_REPLICAS, metavar="N", show_default=False, help="The number of replicas."
        ),
    ],
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    json: JsonOption = False,
) -> None:
    """Run another number of replicas of an application; those that stay are left alone."""
    face = Face.of(_url(registry, kafka, cluster), json)
    name = ApplicationId.parse(application)
    with _opened(face, topics) as opened:
        command = opened.scale(name, replicas)
        if wait:
            _await(face, opened, name, command, timeout)
    face.answer(
        {"application": application, "command": command, "replicas": replicas, "settled": wait},
        f"{application} has {counted(replicas, 'replica')}, and all run or have finished"
        if wait
        else f"{application}: commanded to have {counted(replicas, 'replica')}",
    )


@app.command()
def retry(
    applications: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TENANT[/CHANNEL[/APP]]]...",
            show_default=False,
            help="The applications, or those of a tenant or channel that have failed on every worker; "
            "default: all of these.",
        ),
    ] = None,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    json: JsonOption = False,
) -> None:
    """Start failed applications anew from their files in the cluster, on any worker that can take them.

    One that is named and unknown is an error; of others, what has vanished meanwhile is left out.
    """
    face = Face.of(_url(registry, kafka, cluster), json)
    patterns = [ApplicationPattern.parse(each) for each in applications or ("*",)]
    wanted = [pattern.exact for pattern in patterns if pattern.exact is not None]
    with _opened(face, topics) as opened:
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
def drain(
    worker: WorkerArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    json: JsonOption = False,
) -> None:
    """Move all applications off a worker, and give it none until it is uncordoned."""
    _cordon(
        Face.of(_url(registry, kafka, cluster), json),
        topics,
        worker,
        Cordon.DRAINED,
        timeout if wait else None,
    )


@app.command()
def cordon(
    worker: WorkerArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    json: JsonOption = False,
) -> None:
    """Give a worker no further applications until it is uncordoned; it keeps those that it has."""
    _cordon(
        Face.of(_url(registry, kafka, cluster), json),
        topics,
        worker,
        Cordon.CORDONED,
        timeout if wait else None,
    )


@app.command()
def uncordon(
    worker: WorkerArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    json: JsonOption = False,
) -> None:
    """Give a cordoned or drained worker applications again."""
    _cordon(Face.of(_url(registry, kafka, cluster), json), topics, worker, None, timeout if wait else None)


def _cordon(
    face: Face, topics: str | None, worker: str, cordon: Cordon | None, timeout_s: float | None
) -> None:
    """Command it, and wait for its effect unless ``timeout_s`` is None."""
    state = cordon.value if cordon else "uncordoned"
    with _opened(face, topics) as opened:
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
def list_(
    only: OnlyArgument = None,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    json: JsonOption = False,
) -> None:
    """List the applications of a cluster, a line each: state, worker, and the reason if it waits."""
    face = Face.of(_url(registry, kafka, cluster), json)
    with _opened(face, topics) as opened:
        status = _read_status(face, opened, _pattern(only))
    applications = {"applications": [each.model_dump(mode="json") for each in status.applications]}
    face.answer(applications, *map(application_line, status.applications))


@app.command()
def status(
    only: OnlyArgument = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show changes until Ctrl-C.")] = False,
    exit_code: Annotated[
        bool,
        typer.Option("--exit-code", help="Exit with 1 unless all started applications run, as known now."),
    ] = False,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    json: JsonOption = False,
) -> None:
    """Show a cluster: its workers, its applications, and why some can't be placed or have failed."""
    face = Face.of(_url(registry, kafka, cluster), json)
    pattern = _pattern(only)
    with _opened(face, topics) as opened:
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
    return ApplicationPattern.parse("*" if only is None else only)


def _read_status(face: Face, cluster: Cluster, pattern: ApplicationPattern) -> ClusterStatus:
    timeout_s = Settings().connect_timeout_s
    return status_of(_name(face.url), cluster.read(timeout_s), cluster.heard(timeout_s)).only(pattern)


def _watch(face: Face, cluster: Cluster, pattern: ApplicationPattern) -> None:
    """Show each document, and what has become stale meanwhile (SH-20)."""
    name = _name(face.url)
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
    application: ApplicationArgument,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            show_default=False,
            help="The data folder of a worker on this host; without it a worker is asked.",
        ),
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option(
            "--worker",
            metavar="ID",
            show_default="the one that has it",
            help="The worker that is asked.",
        ),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, metavar="N", help="Number of lines.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then show new output until Ctrl-C.")
    ] = False,
    timeout: TimeoutOption = 10.0,
    cluster: ClusterOption = None,
    kafka: KafkaOption = None,
    registry: UrlOption = None,
    topics: TopicsOption = None,
    json: JsonOption = False,
) -> None:
    """Show the output of an application: from a data folder here, or through the worker that has it."""
    name = ApplicationId.parse(application)
    if data is None:
        face = Face.of(_url(registry, kafka, cluster), json)
        with _opened(face, topics) as opened:
            if not follow:
                _print_output(face, application, opened.output(name, lines, timeout, worker))
                return
            for answer in opened.follow_output(name, lines, timeout, worker):
                _print_output(face, application, answer)
                sys.stdout.flush()
        return
    face = Face("", json)
    for line in tail(data, name, lines=lines, follow=follow):
        face.answer({"application": application, "line": line}, line)
        if follow:
            sys.stdout.flush()


def _print_output(face: Face, application: str, answer: OutputAnswer) -> None:
    if answer.omitted:
        typer.echo(f"{answer.omitted:,} earlier lines do not fit into an answer", err=True)
    for line in answer.lines:
        face.answer({"application": application, "worker": answer.worker, "line": line}, line)


@app.command()
def schema() -> None:
    """Show the JSON schema of an application's manifest."""
    typer.echo(json_module.dumps(manifest_schema(), indent=2))
