"""The key layout of a group, and the names that keys may contain.

All keys of a group are under ``ROOT/GROUP/``. Names are percent-encoded, so that no group's prefix begins
another's (RB-33) and every key is printable ASCII. A root may have several segments. Under such a root a
group can't have the name of a folder below (``nodes`` and so on), as its keys could be taken for another
group's.

==============================  =================================================================
``term``                        the term and its leader, or none if it resigned; of no lease, so that
                                terms never go back
``nodes/NODE``                  the member key: a member, and the resources that it has released
                                (``Owned.release``); under its lease
``releases/NODE``               put whenever the node removes barriers, to wake up those that wait for
                                them; under its lease
``acks/NODE``                   the version that the node has completed; under its lease
``resources/RESOURCE``          a resource with its weight, pin, attributes, needs and spread
``policy``                      how resources are allocated; absent if as by default
``drains/LABEL``                a drained node
``troubles/LABEL``              the latest error of the application; under a lease of its own
``operator``                    put with every request of an operator: its revision orders them (RB-44),
                                its value counts those that changed anything
``changes/NUMBER``              the keys that an operator's write changed; the latest 100 (RB-45)
``header``                      the committed version, and the aborted ones before it (``void``). A
                                node's share is its latest of a committed version
``header/NODE``                 a member with ``rejoin_grace_s``, put with its first share and of no lease:
                                what a leader needs to keep the share once the node is gone (RB-39)
``shares/NODE/VERSION/PART``    a part of a share, compressed; never changed once written
``barriers/RESOURCE/SLOT``      a barrier and its holder; under the holder's lease. Beside the
                                resource, not under it (RB-16)
==============================  =================================================================

A resource has slot 0 only, so far; several owners of one resource would take a slot each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from urllib.parse import quote, unquote

from rebalanser.core.group.types import SharePart
from rebalanser.errors import InvalidName, UnusableStore

MAX_NAME_BYTES = 512
"""Maximum length of a name, in bytes of UTF-8."""
MAX_ATTRIBUTE_BYTES = 4096
"""Maximum length of an attribute value, in bytes of UTF-8."""
SLOT = 0
_FOREIGN = "{!r} is a key that no Rebalanser wrote: delete it"
_FOLDERS = frozenset(
    {
        "nodes",
        "releases",
        "acks",
        "resources",
        "drains",
        "troubles",
        "changes",
        "shares",
        "header",
        "barriers",
    }
)
_PARTS = _FOLDERS | {"term", "operator", "policy"}
_is_path = re.compile(r"[A-Za-z0-9_.~/-]+").fullmatch


def check_name(name: str, what: str) -> str:
    """Return the name itself if it can be stored.

    Raises:
        InvalidName: it is empty, not printable, not valid Unicode, or longer than ``MAX_NAME_BYTES``.
    """
    if not isinstance(name, str):
        raise InvalidName(f"a {what} name is text, not {type(name).__name__}")
    if not name:
        raise InvalidName(f"a {what} name must not be empty")
    if not name.isprintable():
        raise InvalidName(f"{what} name {name!r} has an unprintable character")
    size = len(name.encode())
    if size > MAX_NAME_BYTES:
        raise InvalidName(f"{what} name {name[:40]!r}… has {size} bytes; the limit is {MAX_NAME_BYTES}")
    return name


def check_tags(tags: Iterable[str]) -> frozenset[str]:
    """Return the tags as a set if they can be stored; a text is one tag.

    A tag has no comma or semicolon, as these separate tags in the environment, on the command line and in
    files.

    Raises:
        InvalidName: a tag can't be stored, or is given twice, or they are a mapping.
    """
    if isinstance(tags, Mapping):
        raise InvalidName("give a list of tags, not a mapping")
    checked: set[str] = set()
    for tag in [tags] if isinstance(tags, str) else tags:
        if check_name(tag, "tag") in checked:
            raise InvalidName(f"tag {tag!r} is given twice")
        if "," in tag or ";" in tag:
            raise InvalidName(f"tag {tag!r} has a comma or a semicolon: give each tag by itself")
        checked.add(tag)
    return frozenset(checked)


def check_attribute(name: str, value: str, what: str) -> None:
    """Check that an attribute of a resource or node can be stored.

    Raises:
        InvalidName: the name can't be stored, or the value is longer than ``MAX_ATTRIBUTE_BYTES``.
    """
    check_name(name, f"{what} attribute")
    size = len(value.encode(errors="surrogatepass"))
    if size > MAX_ATTRIBUTE_BYTES:
        raise InvalidName(
            f"{what} attribute {name!r} has a value of {size} bytes; the limit is {MAX_ATTRIBUTE_BYTES}"
        )


_quoted_anyhow = lru_cache(maxsize=100_000)(partial(quote, safe=""))


def _quoted(name: str) -> str:
    """Encode a name for a key. Nearly every name is a path, which has a faster way."""
    return name.replace("/", "%2F") if _is_path(name) else _quoted_anyhow(name)


def _unquoted(written: str) -> str:
    """Decode a name.

    Raises:
        ValueError: no name is encoded so.
    """
    if "/" not in written and _is_path(name := written.replace("%2F", "/")):
        return name
    name = unquote(written)
    if not written or _quoted(name) != written:
        raise ValueError(written)
    return name


class GroupKeys:
    """The keys of one group.

    Raises:
        InvalidName: the group's name can't be stored, or its keys would be among those of another group.
    """

    def __init__(self, root: str, group: str) -> None:
        prefix = f"{root}/{_quoted(check_name(group, 'group'))}/"
        above, _, last = root.rpartition("/")
        if above and group in _FOLDERS:
            raise InvalidName(
                f"a group can't be named {group!r} under the root {root!r}: its keys would be among those of "
                f"the group {unquote(last)!r} under {above!r}"
            )
        self.prefix = prefix
        self.term = f"{prefix}term"
        self.header = f"{prefix}header"
        self.nodes = f"{prefix}nodes/"
        self.removals = f"{prefix}releases/"
        self.acks = f"{prefix}acks/"
        self.resources = f"{prefix}resources/"
        self.policy = f"{prefix}policy"
        self.drains = f"{prefix}drains/"
        self.troubles = f"{prefix}troubles/"
        self.operator = f"{prefix}operator"
        self.changes = f"{prefix}changes/"
        self.shares = f"{prefix}shares/"
        self.remembered = f"{prefix}header/"
        self.barriers = f"{prefix}barriers/"

    def node(self, node: str) -> str:
        """A member's key."""
        return self.nodes + _quoted(node)

    def removal(self, node: str) -> str:
        """The key that a node puts whenever it removes barriers."""
        return self.removals + _quoted(node)

    def ack(self, node: str) -> str:
        """The key with the version that a node has completed."""
        return self.acks + _quoted(node)

    def resource(self, resource: str) -> str:
        """A resource's key."""
        return self.resources + _quoted(resource)

    def drain(self, label: str) -> str:
        """The key that marks a node as drained."""
        return self.drains + _quoted(label)

    def trouble(self, label: str) -> str:
        """The key with the latest error of a node."""
        return self.troubles + _quoted(label)

    def change(self, number: int) -> str:
        """The key with the changes of an operator's request."""
        return f"{self.changes}{number:020}"

    def change_number(self, key: str) -> int:
        """The number of the request whose changes a key has.

        Raises:
            UnusableStore: no Rebalanser wrote this key.
        """
        written = key.removeprefix(self.changes)
        if not written.isdecimal() or self.change(int(written)) != key:
            raise UnusableStore(_FOREIGN.format(key))
        return int(written)

    def share(self, part: SharePart) -> str:
        """The key of a part of a node's share."""
        return f"{self.shares_of(part.node)}{part.version}/{part.part}"

    def shares_of(self, node: str) -> str:
        """The prefix of all shares of a node."""
        return f"{self.shares}{_quoted(node)}/"

    def share_part(self, key: str) -> SharePart:
        """The part of a share that a key has.

        Raises:
            UnusableStore: no Rebalanser wrote this key.
        """
        try:
            node, version, part = key.removeprefix(self.shares).split("/")
            return SharePart(_unquoted(node), int(version), int(part))
        except ValueError:
            raise UnusableStore(f"{key!r} is not the key of a share: delete it") from None

    def remember(self, node: str) -> str:
        """The key of a member that is remembered beyond its lease."""
        return self.remembered + _quoted(node)

    def barrier(self, resource: str) -> str:
        """The key of a resource's barrier."""
        return f"{self.barriers}{_quoted(resource)}/{SLOT}"

    def resource_of_barrier(self, key: str) -> str:
        """The resource that a barrier's key belongs to.

        Raises:
            UnusableStore: no Rebalanser wrote this key.
        """
        if not key.endswith(f"/{SLOT}"):
            raise UnusableStore(_FOREIGN.format(key))
        return self.name(key.removesuffix(f"/{SLOT}"), self.barriers)

    @staticmethod
    def group_of(key: str, root: str) -> tuple[str | None, str]:
        """The group under a root that has a key, or None; and a key after all those of the same name."""
        segment, slash, rest = key.removeprefix(f"{root}/").partition("/")
        if not slash:
            return None, key
        past = f"{root}/{segment}0"
        if rest.partition("/")[0] not in _PARTS:
            return None, past
        try:
            return _unquoted(segment), past
        except ValueError:
            return None, past

    @staticmethod
    def name(key: str, prefix: str) -> str:
        """The name at the end of a key.

        Raises:
            UnusableStore: no Rebalanser wrote this key.
        """
        try:
            return _unquoted(key.removeprefix(prefix))
        except ValueError:
            raise UnusableStore(_FOREIGN.format(key)) from None
