"""The options of the commands on a Shiva cluster, and the opening of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Annotated, Final

import typer

from rebalanser.cli.options import JsonOption, KafkaOption
from rebalanser.cli.output import Face
from rebalanser.core.shiva.types import check_part
from rebalanser.errors import InvalidSettings, InvalidUrl
from rebalanser.registry.urls import known_schemes, with_scheme
from rebalanser.settings import Settings
from rebalanser.shiva import TopicNames, open_cluster
from rebalanser.shiva.cluster import ENTRY_POINT_GROUP, Cluster

CLUSTER_VARIABLE: Final = "REBALANSER_CLUSTER"
TOPICS_VARIABLE: Final = "REBALANSER_TOPICS"
TOPICS: Final = tuple(field.name for field in fields(TopicNames))

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
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait for the effect.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.0, metavar="SECONDS", help="Maximum time to wait.")
]
TagOption = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", show_default=False, help="A tag; repeatable.")
]


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The options of every command on a cluster."""

    cluster: ClusterOption = None
    kafka: KafkaOption = None
    registry: UrlOption = None
    topics: TopicsOption = None
    json: JsonOption = False

    def url(self) -> str:
        """Return the cluster's URL, from --registry or from --kafka and --cluster.

        Raises:
            InvalidUrl: neither of the two is complete, or both are given.
        """
        if self.registry is not None:
            if self.kafka is not None or self.cluster is not None:
                raise InvalidUrl("give either --registry, or --kafka and --cluster")
            scheme, found, _ = self.registry.partition("://")
            if found and scheme not in known_schemes(ENTRY_POINT_GROUP):
                raise InvalidUrl(
                    f"Shiva needs Kafka, not {scheme}://: give --registry kafka://HOST:PORT/CLUSTER"
                )
            return self.registry
        if self.kafka is None or self.cluster is None:
            needed = {"--kafka": self.kafka, "--cluster": self.cluster}
            missing = " and ".join(name for name, value in needed.items() if value is None)
            raise InvalidUrl(f"no cluster: {missing} missing (or give --registry kafka://HOST:PORT/CLUSTER)")
        base, question, options = with_scheme(self.kafka, "kafka").partition("?")
        return f"{base.rstrip('/')}/{check_part(self.cluster, 'cluster')}{question}{options}"

    def face(self, verbose: int = 0) -> Face:
        """Return the command's face. Logs go to standard error, more of them with ``verbose``."""
        return Face.of(self.url(), self.json, verbose)

    @contextlib.contextmanager
    def opened(self, face: Face) -> Iterator[Cluster]:
        """Open the cluster; wait at most ``connect_timeout_s`` for Kafka."""
        settings, names = Settings(), topic_names(self.topics)
        with face.patience(settings):
            cluster = open_cluster(face.url, settings.connect_timeout_s, names)
        with closing(cluster):
            yield cluster


@dataclass(frozen=True, slots=True)
class WaitOptions:
    """The options of a command that can wait for its effect."""

    wait: WaitOption = False
    timeout: TimeoutOption = 60.0

    @property
    def limit_s(self) -> float | None:
        """Maximum seconds to wait; None to not wait."""
        return self.timeout if self.wait else None


def topic_names(text: str | None) -> TopicNames:
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


def cluster_name(url: str) -> str:
    """Return the cluster's name in its URL."""
    return url.partition("?")[0].rpartition("/")[2]
