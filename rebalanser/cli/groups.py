"""``rebalanser groups``: lists the groups in a registry."""

from __future__ import annotations

from rebalanser.cli.options import JsonOption, RegistryOption
from rebalanser.cli.output import Face


def groups(registry: RegistryOption = None, json: JsonOption = False) -> None:
    """List the groups in the registry. In Kafka each group is a topic, which Kafka's own tools list."""
    face = Face.of(registry, json)
    names = face.groups()
    face.answer({"groups": names}, *names)
