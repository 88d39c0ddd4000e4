"""Channel files: the applications of one channel, to be started together (SH-25).

::

    {
      "tenant": "acme",
      "channel": "main",
      "applications": {
        "web": {"source": "web", "tags": ["ssd"], "mode": "exclusive", "environment": {"PORT": "8080"}},
        "jobs": {"source": "jobs.zip"}
      }
    }
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, ValidationError

from rebalanser.core.shiva.types import MAX_REPLICAS, ApplicationId, Mode
from rebalanser.errors import InvalidSettings
from rebalanser.shiva.cluster import Start
from rebalanser.shiva.manifest import EnvironmentName, StrictModel, Text, problems_in

MAX_FILE_BYTES: Final = 16 * 2**20
"""Maximum size of a channel file."""


class ChannelApplication(StrictModel):
    """One application of a channel file, as ``rebalanser shiva start`` takes it."""

    source: Text = Field(min_length=1, description="folder or ZIP file, from the folder of this file on")
    tags: list[str] = Field(default=[], description="tags beside those of its manifest")
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = Field(
        default=None, description="number of replicas; default: that of its manifest"
    )
    mode: Mode = Field(default=Mode.AVAILABLE, description="`available` or `exclusive`")
    environment: dict[EnvironmentName, Text] = Field(
        default={}, description="added to the environment of its manifest"
    )


class ChannelFile(StrictModel):
    """The content of a channel file."""

    tenant: str
    channel: str
    applications: dict[str, ChannelApplication] = Field(min_length=1)


def read_channel_file(file: Path) -> list[Start]:
    """Read the applications of a channel file, in its order.

    Raises:
        InvalidSettings: it cannot be read, or is no valid channel file; the message names each error.
        InvalidName: a tenant, channel or application is no name.
    """
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InvalidSettings(f"{file} has over {MAX_FILE_BYTES:,} bytes")
        channel = ChannelFile.model_validate_json(file.read_bytes())
    except OSError as error:
        raise InvalidSettings(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise InvalidSettings(f"{file}: {problems_in(error)}") from error
    return [
        Start(
            ApplicationId(channel.tenant, channel.channel, name),
            file.parent / each.source,
            each.tags,
            each.mode,
            each.environment,
            each.replicas,
        )
        for name, each in channel.applications.items()
    ]
