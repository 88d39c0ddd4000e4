"""``rebalanser feed``: keep a group's resources equal to the running applications of a Shiva cluster."""

from __future__ import annotations

import sys
import threading
from typing import Annotated, Final

import typer

from rebalanser.cli.options import GroupArgument, JsonOption, VerboseOption
from rebalanser.cli.output import Face
from rebalanser.feed import ResourceFeed
from rebalanser.redaction import redact
from rebalanser.registry.urls import REGISTRY_VARIABLE
from rebalanser.runtime.participant import stopping_on_signals

LOOK_S: Final = 0.2
GRACE_S: Final = 1.0
"""Maximum seconds to wait for a change under way; an attempt to connect may take much longer."""


def feed(
    group: GroupArgument,
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="URL", show_default=False, help="The cluster: kafka://HOST:PORT/CLUSTER."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--to",
            "--registry",
            metavar="URL",
            envvar=REGISTRY_VARIABLE,
            show_default="a SQLite file in the user's state folder",
            help="The group's registry, such as etcd://HOST:PORT.",
        ),
    ] = None,
    verbose: VerboseOption = 0,
    json: JsonOption = False,
) -> None:
    """Keep a group's resources equal to a cluster's running applications, until Ctrl-C or SIGTERM.

    Resources that operators added stay. While either side is away nothing changes.
    """
    face = Face.of(target, json, 1 + verbose)
    feeding = ResourceFeed(source, group, face.url)
    asked = threading.Event()
    with stopping_on_signals(asked.set):
        feeding.start()
        face.answer(
            {"feeding": group, "from": redact(source)},
            f"feeding {group} from {redact(source)}; Ctrl-C stops it",
        )
        sys.stdout.flush()
        while not asked.is_set() and not feeding.wait(LOOK_S):
            pass
        feeding.stop(GRACE_S)
