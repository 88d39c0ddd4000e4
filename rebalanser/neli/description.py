"""A NELI group seen from outside: the assignment of the roles' partitions, and their last commits."""

from __future__ import annotations

from pydantic import AwareDatetime, BaseModel, ConfigDict


class MemberDescription(BaseModel):
    """A process from the view of the group's coordinator."""

    model_config = ConfigDict(frozen=True)

    member: str
    """The coordinator's id of the process."""
    client: str
    """The process's own name for itself: host, process and a random part."""
    host: str


class PartitionDescription(BaseModel):
    """One partition with its roles."""

    model_config = ConfigDict(frozen=True)

    partition: int
    roles: list[str | int]
    member: MemberDescription | None
    """The member to which it is assigned now. Only that process knows if it leads (NE-4)."""
    committed_offset: int | None
    """Offset up to which the leader's heartbeats were read back; tokens are not above it."""
    claim: str | None
    """State in the last commit: ``held`` or ``released``."""
    committed_by: str | None
    """The process that made the last commit."""
    last_heartbeat_at: AwareDatetime | None
    """Time at which the newest record of the partition was written, by any group."""


class GroupDescription(BaseModel):
    """A group at one instant, which is past when it is shown."""

    model_config = ConfigDict(frozen=True)

    topic: str
    group: str
    state: str
    """The coordinator's state of the group, such as ``stable`` or ``empty``."""
    protocol: str
    as_of: AwareDatetime
    partitions: list[PartitionDescription]
