"""The options that every command over Kafka has."""

from __future__ import annotations

from typing import Annotated

import typer

from rebalanser.neli.facade import KAFKA_VARIABLE

KafkaOption = Annotated[
    str | None,
    typer.Option(
        "--kafka",
        metavar="HOST:PORT",
        envvar=KAFKA_VARIABLE,
        show_default=False,
        help="Where Kafka is, such as HOST:PORT,HOST:PORT, or a kafka:// URL with security settings.",
    ),
]
