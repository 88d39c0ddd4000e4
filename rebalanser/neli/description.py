"""A NELI group as an outsider sees it: who was assigned which role's partition, and what is known of it."""

from __future__ import annotations

from pydantic import AwareDatetime, BaseModel, ConfigDict


class MemberDescription(BaseModel):
    """A process as the group's coordinator knows it."""

    model_config = ConfigDict(frozen=True)

    member: str
    """The coordinator's id of it."""
    client: str
    """What it calls itself: host, process and a random part."""
    host: str


class PartitionDescription(BaseModel):
    """One partition with its roles."""

    model_config = ConfigDict(frozen=True)

    partition: int
    roles: list[str | int]
    member: MemberDescription | None
    """Who is assigned it now. Whether that process leads, only it can know (NE-4)."""
    committed_offset: int | None
    """Up to where the leader's heartbeats were read back; tokens are not above it."""
    claim: str | None
    """What the last commit says: ``held`` or ``released``."""
    committed_by: str | None
    """The process that made the last commit."""
    last_heartbeat_at: AwareDatetime | None
    """When the newest record of the partition was written, by whichever group."""


class GroupDescription(BaseModel):
    """A group at one instant. What an outsider reads is old when it is shown."""

    model_config = ConfigDict(frozen=True)

    topic: str
    group: str
    state: str
    """The coordinator's word for the group, such as ``stable`` or ``empty``."""
    protocol: str
    as_of: AwareDatetime
    partitions: list[PartitionDescription]
