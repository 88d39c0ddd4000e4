"""The reference of fields and kinds that the documentation shows, made from the code itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from rebalanser.history.records import GAP, Kind, Record
from rebalanser.protocol.messages import FactKind


@dataclass(frozen=True, slots=True)
class KindNote:
    """What a kind of record means, and which keys its ``detail`` may have."""

    meaning: str
    detail: tuple[str, ...] = ()


KINDS: Final[Mapping[Kind, KindNote]] = MappingProxyType(
    {
        FactKind.JOINING: KindNote("the node asks for a lease and registers"),
        FactKind.JOINED: KindNote("it is registered; `revision` created its node key"),
        FactKind.JOIN_FAILED: KindNote(
            "registering failed; it is tried again unless `fatal`", ("error", "fatal")
        ),
        FactKind.ISOLATED: KindNote(
            "life was not proven for so long that access must end now", ("last_proof_s",)
        ),
        FactKind.RECONNECTED: KindNote("life is proven again, the lease never ended"),
        FactKind.SESSION_LOST: KindNote("the lease has ended; the node joins again as a new incarnation"),
        FactKind.LEAVING: KindNote("the node stops access in order to leave"),
        FactKind.LAPSING: KindNote(
            "OnStop raised: the barriers are left to end with the lease, not removed", ("resources",)
        ),
        FactKind.LEFT: KindNote("the node is out of the group"),
        FactKind.ELECTED: KindNote("this node leads `term`, which began at `revision`"),
        FactKind.FOLLOWS: KindNote("another node leads `term`", ("leader",)),
        FactKind.DEPOSED: KindNote("this node led and leads no more"),
        FactKind.GROUP_READ: KindNote(
            "the leader read the whole group at `revision`", ("members", "resources")
        ),
        FactKind.ALLOCATION_PUBLISHED: KindNote(
            "the leader committed an allocation at `revision`", ("published_version",)
        ),
        FactKind.REBALANCE_COMPLETED: KindNote(
            "the leader saw every live node complete its share", ("completed_version",)
        ),
        FactKind.ALLOCATION_ADOPTED: KindNote(
            "the node acts on a new share from now on", ("share_version", "resources")
        ),
        FactKind.BARRIER_ADDED: KindNote("the node holds the barrier of `resource`, with `token`"),
        FactKind.BARRIER_BLOCKED: KindNote("another node still holds the barrier of `resource`", ("holder",)),
        FactKind.BARRIER_REMOVED: KindNote("the node gave up the barrier of `resource`"),
        FactKind.ACKNOWLEDGED: KindNote(
            "the node told the group that its share is complete", ("share_version",)
        ),
        FactKind.START_ENTERED: KindNote("OnStart is entered: access to `resource` begins, with `token`"),
        FactKind.START_RETURNED: KindNote("OnStart returned"),
        FactKind.START_FAILED: KindNote("OnStart raised; OnStop follows and the node leaves", ("error",)),
        FactKind.START_REFUSED: KindNote("OnStart was not entered, because it was too late for it"),
        FactKind.STOP_ENTERED: KindNote("OnStop is entered; access to `resource` goes on until it returns"),
        FactKind.STOP_RETURNED: KindNote("OnStop returned: access to `resource` has ended"),
        FactKind.STOP_FAILED: KindNote("OnStop raised; access is taken as not ended", ("error",)),
        FactKind.HANDLER_OVERRAN: KindNote(
            "a handler still runs after its limit; its barriers stay held", ("handler", "limit_s")
        ),
        FactKind.COMMAND_FAILED: KindNote(
            "a request to the registry failed, or (`unknown`) may have worked",
            ("command", "error", "unknown"),
        ),
        GAP: KindNote(
            "records were dropped here, this one's `sequence` being the first of them",
            ("dropped", "first", "last", "reason"),
        ),
    }
)


def describe() -> str:
    """The fields of a record and the kinds of records, as two tables in Markdown."""
    fields = [
        f"| `{name}` | {_type(schema)} | {schema['description']} |"
        for name, schema in Record.model_json_schema()["properties"].items()
    ]
    kinds = [
        f"| `{kind}` | {note.meaning} | {', '.join(f'`{key}`' for key in note.detail) or 'nothing'} |"
        for kind, note in KINDS.items()
    ]
    return "\n".join(
        [
            "| Field | Type | Meaning |",
            "| --- | --- | --- |",
            *fields,
            "",
            "| Kind | What happened | In `detail` |",
            "| --- | --- | --- |",
            *kinds,
        ]
    )


def _type(schema: Mapping[str, Any]) -> str:
    """A field's JSON type for people."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(choice) for choice in schema["anyOf"]))
    if "$ref" in schema:
        return "string"
    return str(schema["type"])
