"""``rebalanser neli``: leads roles, and shows their assignment."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from rebalanser.cli.commands import Commands
from rebalanser.cli.options import JsonOption, KafkaOption, ParticipantOptions
from rebalanser.cli.output import Face
from rebalanser.core.neli.roles import Role, numbered
from rebalanser.core.neli.settings import GroupProtocol, Mode, NeliSettings
from rebalanser.errors import InvalidSettings, InvalidUrl
from rebalanser.neli import Candidacy, GroupDescription, Neli, open_elections
from rebalanser.neli.contract import PARTITIONS
from rebalanser.neli.description import PartitionDescription
from rebalanser.registry.urls import KAFKA_VARIABLE
from rebalanser.runtime.logs import get_logger
from rebalanser.settings import Settings

app = Commands("Lead roles, one process each at a time, over a Kafka consumer group.")

TopicArgument = Annotated[
    str, typer.Argument(metavar="TOPIC", show_default=False, help="The topic of the group's heartbeats.")
]
GroupArgument = Annotated[
    str, typer.Argument(metavar="GROUP", show_default=False, help="The consumer group's id.")
]
RolesOption = Annotated[
    str | None,
    typer.Option(
        "--roles",
        metavar="ROLE,…",
        show_default=False,
        help="The roles: names, NAME=N for the role of number N, whole numbers, ranges such as 0-1023.",
    ),
]
RolesFileOption = Annotated[
    Path | None,
    typer.Option(
        "--roles-file",
        metavar="FILE",
        show_default=False,
        help="A file of roles, one or more per line, # for comments; a running process follows its changes.",
    ),
]
MAX_ROLES: Final = 100_000
"""Maximum number of roles on a command line or in a file."""
ROLES_FILE_INTERVAL_S: Final = 1.0
"""Seconds between two looks at a file of roles."""
_RANGE: Final = re.compile(r"(\d+)-(\d+)", re.ASCII)
_NUMBERED: Final = re.compile(r"(.*\S)\s*=\s*(\d+)", re.ASCII)
_log: Final = get_logger("rebalanser.neli")


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """The options of every command on roles."""

    kafka: KafkaOption = None
    json: JsonOption = False

    def face(self, verbose: int = 0) -> Face:
        """Return the command's face; its URL is the address of Kafka.

        Raises:
            InvalidUrl: there is no address.
        """
        if self.kafka is None:
            raise InvalidUrl(f"no Kafka address: give --kafka HOST:PORT or set {KAFKA_VARIABLE}")
        return Face.of(self.kafka, self.json, verbose)


@app.command()
def run(
    process: ParticipantOptions,
    on: KafkaOptions,
    topic: TopicArgument,
    group: GroupArgument,
    roles: RolesOption = None,
    roles_file: RolesFileOption = None,
    mode: Annotated[Mode, typer.Option(help="The guarantee of leadership.")] = Mode.FAST,
    protocol: Annotated[
        GroupProtocol, typer.Option(help="The protocol of the consumer group; consumer is KIP-848.")
    ] = GroupProtocol.CLASSIC,
    session_timeout: Annotated[
        float,
        typer.Option(
            "--session-timeout",
            min=0.1,
            metavar="SECONDS",
            help="Time until a dead process is replaced; brokers take 6 or more by default, 45 to 60 "
            "with --protocol consumer.",
        ),
    ] = 10.0,
    heartbeat_interval: Annotated[
        float | None,
        typer.Option(
            "--heartbeat-interval",
            min=0.001,
            metavar="SECONDS",
            show_default="a sixth of the session timeout; at most 1 with --protocol classic",
            help="Seconds between two signs of life to the group's coordinator; at most a third of the "
            "session timeout.",
        ),
    ] = None,
    max_poll_interval: Annotated[
        float,
        typer.Option(
            "--max-poll-interval",
            min=0.1,
            metavar="SECONDS",
            help="Time without a poll after which Kafka gives the roles of this process to others, and for "
            "which others wait until it has handed over; at least the session timeout.",
        ),
    ] = 60.0,
    partitions: Annotated[
        int,
        typer.Option(
            "--partitions", min=1, metavar="M", help="Number of partitions if the topic has to be created."
        ),
    ] = PARTITIONS,
    groups: Annotated[
        int,
        typer.Option(
            "--groups",
            min=1,
            metavar="N",
            help="Number of groups that share the topic; each publishes at N times the interval.",
        ),
    ] = 1,
    instance: Annotated[
        str | None,
        typer.Option(
            "--instance",
            metavar="ID",
            show_default=False,
            help="The id of this process across restarts; it must be unique.",
        ),
    ] = None,
) -> None:
    """Take part until Ctrl-C or SIGTERM, and print a line for each role that is induced, lapsed or fenced."""
    face = on.face(process.verbose)
    settings = NeliSettings(
        mode=mode,
        protocol=protocol,
        session_timeout_s=session_timeout,
        heartbeat_interval_s=heartbeat_interval or 0.0,
        max_poll_interval_s=max_poll_interval,
        groups=groups,
    )
    known = _roles(roles, roles_file)
    neli = Neli(
        topic,
        group,
        known,
        kafka=face.url,
        settings=settings,
        partitions=partitions,
        instance=instance,
        history_dir=process.history,
        history_topic=process.history_topic,
        connect_timeout_s=Settings().connect_timeout_s,
    )
    one_line_at_a_time = threading.Lock()

    def tell(what: str, role: Role, token: int) -> None:
        with one_line_at_a_time:
            face.answer({"event": what, "role": role, "token": token}, f"{what} {role} token={token}")
            sys.stdout.flush()

    neli.on_induced(lambda role, token: tell("induced", role, token))
    neli.on_lapsed(lambda role, token: tell("lapsed", role, token))
    neli.on_fenced(lambda role, token: tell("fenced", role, token))
    words = f"taking part in group {group} on {topic}; Ctrl-C stops it"
    face.answer({"event": "running", "topic": topic, "group": group}, words)
    sys.stdout.flush()
    if roles_file is None:
        neli.run()
        return
    ended = threading.Event()
    arguments = (roles_file, known, neli.set_roles, ended)
    threading.Thread(target=follow_roles, args=arguments, name="rebalanser-neli-roles", daemon=True).start()
    try:
        neli.run()
    finally:
        ended.set()


@app.command()
def status(
    on: KafkaOptions,
    topic: TopicArgument,
    group: GroupArgument,
    roles: RolesOption = None,
    roles_file: RolesFileOption = None,
) -> None:
    """Show the process assigned to each role's partition, and its last commit and heartbeat.

    Only the process itself knows, by its own clock, whether it leads.
    """
    face = on.face()
    known = _roles(roles, roles_file)
    settings = Settings()
    with face.patience(settings):
        elections = open_elections(face.url, settings.connect_timeout_s)
        described = elections.describe(Candidacy(topic, group, known))
    face.answer(described, *_lines(described))


def _roles(text: str | None, file: Path | None) -> dict[Role, int]:
    if (text is None) == (file is None):
        raise InvalidSettings("name the roles with --roles billing,mail or with --roles-file FILE, not both")
    return parse_roles(text) if text is not None else _read_roles(file or Path())


def _read_roles(file: Path) -> dict[Role, int]:
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"the roles can't be read: {error}") from error
    return parse_roles(",".join(line.partition("#")[0] for line in lines))


def parse_roles(text: str) -> dict[Role, int]:
    """Return the roles of a list such as ``billing,mail=3,0-1023``, each with its number.

    Raises:
        InvalidSettings: it names no role, one with two numbers, too many, or a range that runs backwards.
    """
    roles: dict[Role, int] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        for role, number in _named(name).items():
            if roles.setdefault(role, number) != number:
                raise InvalidSettings(f"role {role} has two numbers, {roles[role]} and {number}")
        if len(roles) > MAX_ROLES:
            raise InvalidSettings(f"more than {MAX_ROLES:,} roles")
    if not roles:
        raise InvalidSettings("no roles: give --roles billing,mail")
    return roles


def _named(name: str) -> dict[Role, int]:
    if found := _RANGE.fullmatch(name):
        first, last = int(found[1]), int(found[2])
        if not 0 <= last - first < MAX_ROLES:
            raise InvalidSettings(f"invalid range {name}: write FIRST-LAST, at most {MAX_ROLES:,} roles")
        return numbered(range(first, last + 1))
    if found := _NUMBERED.fullmatch(name):
        return {found[1]: int(found[2])}
    return numbered([int(name) if name.isdecimal() else name])


def follow_roles(
    file: Path,
    known: Mapping[Role, int],
    set_roles: Callable[[Mapping[Role, int]], None],
    ended: threading.Event,
) -> None:
    """Call ``set_roles`` for each change of a file of roles, ``known`` so far, until ``ended`` is set.

    A file that can't be read or is invalid changes nothing; each reason is logged once.
    """
    trouble = ""
    while not ended.wait(ROLES_FILE_INTERVAL_S):
        try:
            found = _read_roles(file)
        except InvalidSettings as error:
            if trouble != str(error):
                _log.warning("the roles stay as they are", action="roles_unreadable", error=str(error))
            trouble = str(error)
            continue
        trouble = ""
        if found != known:
            known = found
            set_roles(found)


def _lines(described: GroupDescription) -> list[str]:
    head = (
        f"group {described.group} on {described.topic}: {described.state}, {described.protocol} protocol, "
        f"as of {_clock(described.as_of)}"
    )
    roles_of: Counter[str] = Counter()
    for each in described.partitions:
        roles_of[each.member.client if each.member else "nobody"] += len(each.roles)
    shares = ", ".join(f"{client} {count}" for client, count in sorted(roles_of.items()))
    return [
        head,
        *(_line(role, each) for each in described.partitions for role in each.roles),
        f"roles by process: {shares}",
    ]


def _line(role: Role, partition: PartitionDescription) -> str:
    member = partition.member
    who = f"{member.client} at {member.host.lstrip('/')}" if member else "nobody"
    heard = partition.last_heartbeat_at
    return (
        f"{role}: partition {partition.partition}, assigned to {who}, "
        f"last commit {partition.claim or 'none'}, last heartbeat {_clock(heard) if heard else 'none'}"
    )


def _clock(instant: datetime) -> str:
    return instant.astimezone().strftime("%H:%M:%S.%f")[:-3]
