"""What a Group's node reports as a fact, as an event of the history."""

from __future__ import annotations

from rebalanser.core.group.messages import Fact, FactKind
from rebalanser.history.records import Event


def event_of(fact: Fact, *, fenced: bool | None = None) -> Event:
    """The fact for a ``Journal``.

    ``fenced`` is what the application says of the receivers of its writes; it is written where access begins.
    """
    return Event(
        kind=fact.kind,
        node=fact.node,
        incarnation=incarnation_of(fact.node),
        term=fact.term,
        version=fact.version,
        resource=fact.resource,
        token=fact.token,
        revision=fact.revision,
        value=fact.value,
        fenced=fenced if fact.kind is FactKind.START_ENTERED else None,
        detail=fact.detail,
    )


def incarnation_of(node: str) -> int:
    """The number that ends a node id ``STEM-N``; 0 where there is none."""
    suffix = node.rpartition("-")[2]
    return int(suffix) if suffix.isascii() and suffix.isdigit() and len(suffix) < 19 else 0
