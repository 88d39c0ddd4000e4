"""``rebalanser neli``: leads roles, and shows their assignment."""

from __future__ import annotations

import sys
import threading
from datetime import datetime
from typing import Annotated

import typer

from rebalanser.cli.face import Face, JsonOption, VerboseOption
from rebalanser.cli.kafka_options import KafkaOption
from rebalanser.cli.recording import HistoryOption, HistoryTopicOption
from rebalanser.errors import InvalidSettings, InvalidUrl
from rebalanser.neli.roles import Role
from rebalanser.neli.settings import GroupProtocol, Mode, NeliSettings
from rebalanser.roles import Candidacy, GroupDescription, Neli, open_elections
from rebalanser.roles.contract import PARTITIONS
from rebalanser.roles.description import PartitionDescription
from rebalanser.roles.facade import KAFKA_VARIABLE
from rebalanser.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Lead roles, one process each at a time, over a Kafka consumer group.",
)

TopicArgument = Annotated[
    str, typer.Argument(metavar="TOPIC", show_default=False, help="The topic of the group's heartbeats.")
]
GroupArgument = Annotated[
    str, typer.Argument(metavar="GROUP", show_default=False, help="The consumer group's id.")
]
RolesOption = Annotated[
    str,
    typer.Option(
        "--roles", metavar="ROLE,…", show_default=False, help="The roles; a whole number N is role N."
    ),
]


@app.command()
def run(
    topic: TopicArgument,
    group: GroupArgument,
    roles: RolesOption,
    mode: Annotated[Mode, typer.Option(help="The guarantee of leadership.")] = Mode.FAST,
    protocol: Annotated[
        GroupProtocol, typer.Option(help="The protocol of the consumer group; consumer is KIP-848.")
    ] = GroupProtocol.CLASSIC,
    session_timeout: Annotated[
        float,
        typer.Option(
            "--session-timeout", min=0.1, metavar="SECONDS", help="Time until a dead process is replaced."
        ),
    ] = 10.0,
    partitions: Annotated[
        int,
        typer.Option(
            "--partitions", min=1, metavar="M", help="Number of partitions if the topic has to be created."
        ),
    ] = PARTITIONS,
    instance: Annotated[
        str | None,
        typer.Option(
            "--instance",
            metavar="ID",
            show_default=False,
            help="The id of this process across restarts; no two processes may have the same at a time.",
        ),
    ] = None,
    kafka: KafkaOption = None,
    history: HistoryOption = None,
    history_topic: HistoryTopicOption = None,
    verbose: VerboseOption = 0,
    json: JsonOption = False,
) -> None:
    """Take part until Ctrl-C or SIGTERM, and print a line for each role that is induced, lapsed or fenced."""
    face = Face.of(_address(kafka), json, verbose)
    settings = NeliSettings(mode=mode, protocol=protocol, session_timeout_s=session_timeout)
    neli = Neli(
        topic,
        group,
        _roles(roles),
        kafka=face.url,
        settings=settings,
        partitions=partitions,
        instance=instance,
        history_dir=history,
        history_topic=history_topic,
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
    neli.run()


@app.command()
def status(
    topic: TopicArgument,
    group: GroupArgument,
    roles: RolesOption,
    kafka: KafkaOption = None,
    json: JsonOption = False,
) -> None:
    """Show the process assigned to each role's partition, and its last commit and heartbeat.

    Only the process itself knows, by its own clock, whether it leads.
    """
    face = Face.of(_address(kafka), json)
    settings = Settings()
    with face.patience(settings):
        elections = open_elections(face.url, settings.connect_timeout_s)
        described = elections.describe(Candidacy(topic, group, _roles(roles)))
    face.answer(described, *_lines(described))


def _address(kafka: str | None) -> str:
    if kafka is None:
        raise InvalidUrl(f"where is Kafka? give --kafka HOST:PORT or set {KAFKA_VARIABLE}")
    return kafka


def _roles(text: str) -> list[Role]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidSettings("--roles names no role; write --roles billing,mail")
    return [int(name) if name.isdecimal() else name for name in names]


def _lines(described: GroupDescription) -> list[str]:
    head = (
        f"group {described.group} on {described.topic}: {described.state}, {described.protocol} protocol, "
        f"as of {_clock(described.as_of)}"
    )
    return [head, *(_line(role, each) for each in described.partitions for role in each.roles)]


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
