"""The name of a group's topic.

Topics are named of ASCII letters, digits and three signs, groups of any printable text (RB-33). Where a
group's name can stand as it is, it does; else the topic has what is legible of it and a hash. The last part
``group`` between hyphens is always the one that this module wrote, so no two pairs of a cluster and a group
share a topic; and as Kafka takes ``.`` and ``_`` for the same where it names metrics, neither is used.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from rebalanser.registry.keys import check_name
from rebalanser.registry.urls import MAX_TOPIC_CHARS

_PLAIN: Final = re.compile(r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*")
_HASH_CHARS: Final = 32
_SEPARATOR: Final = "-group-"


def topic_of(cluster: str, group: str) -> str:
    """The topic in which a group's log is kept. ``cluster`` is one that a URL may name.

    Raises:
        InvalidName: the group's name can't be stored.
    """
    check_name(group, "group")
    room = MAX_TOPIC_CHARS - len(cluster) - len(_SEPARATOR)
    if _PLAIN.fullmatch(group) and "group" not in group.split("-") and len(group) <= room:
        return cluster + _SEPARATOR + group
    legible = "-".join(part for part in re.split(r"[^A-Za-z0-9]+", group) if part not in {"", "group"})
    digest = hashlib.sha256(group.encode()).hexdigest()[:_HASH_CHARS]
    head = legible[: room - _HASH_CHARS - 2].rstrip("-")
    return f"{cluster}{_SEPARATOR}{head}--{digest}"
