"""Pure checks on the listing of an application's archive (SH-16).

The same checks run where an archive is packed and where it is unpacked, before anything is written. No name
leaves the folder or is read in two ways, no two names become one on a filesystem that folds case or
normalises Unicode, there are only plain files and folders, and nothing expands beyond the limits. The sizes
are those that the archive declares; unpacking must enforce them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rebalanser.errors import InvalidArchive

MANIFEST_NAME: Final = "shiva.json"
"""Name of the manifest, at the root of every archive."""
METHODS: Final = frozenset({"stored", "deflated"})
"""Compressions that are read. With others the archive would decide how much memory is needed."""
_SHOWN_CHARS: Final = 120
_DRIVE: Final = re.compile(r"[A-Za-z]:")


class EntryKind(StrEnum):
    """Kind of an archive's entry."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    SPECIAL = "special"
    """A device, a socket or a named pipe."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an archive, as the archive's listing declares it."""

    name: str
    """Its path with ``/`` between the parts; one trailing ``/`` for a folder."""
    kind: EntryKind = EntryKind.FILE
    size_bytes: int = 0
    """Size once unpacked."""
    packed_bytes: int = 0
    """Size in the archive."""
    method: str = "stored"
    encrypted: bool = False
    unicode_paths: tuple[bytes, ...] = ()
    """Contents of its Info-ZIP Unicode Path fields (0x7075), which some readers prefer to the name."""


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """Limits of an archive. Client and workers of a cluster use the same."""

    archive_bytes: int = 256 * 1024 * 1024
    entries: int = 10_000
    entry_bytes: int = 1024 * 1024 * 1024
    total_bytes: int = 2 * 1024 * 1024 * 1024
    """Maximum size of all entries together, once unpacked."""
    expansion_ratio: float = 200.0
    """Maximum ratio of unpacked to packed size, of an entry and of all together."""
    expansion_free_bytes: int = 16 * 1024 * 1024
    """Unpacked size up to which the ratio is not limited: text and zeros pack well."""
    part_bytes: int = 255
    """Maximum length of one file or folder's name in UTF-8, as on Linux filesystems."""
    path_bytes: int = 1024
    manifest_bytes: int = 64 * 1024


DEFAULT_LIMITS: Final = ArchiveLimits()


def check_archive_size(size_bytes: int, limits: ArchiveLimits = DEFAULT_LIMITS) -> None:
    """Refuse an archive that is too big as it is packed.

    Raises:
        InvalidArchive: with both numbers.
    """
    if size_bytes > limits.archive_bytes:
        raise InvalidArchive(
            f"the archive has {size_bytes:,} bytes and at most {limits.archive_bytes:,} are allowed"
        )


def check_entry_count(count: int, limits: ArchiveLimits = DEFAULT_LIMITS) -> None:
    """Refuse an archive of too many entries.

    Raises:
        InvalidArchive: with both numbers.
    """
    if count > limits.entries:
        raise InvalidArchive(f"the archive has {count:,} entries and at most {limits.entries:,} are allowed")


def check_listing(entries: Sequence[Entry], limits: ArchiveLimits = DEFAULT_LIMITS) -> None:
    """Refuse an archive that has an entry which must not be written, or that expands too much (SH-16).

    Raises:
        InvalidArchive: naming the first such entry, and what is wrong with it.
    """
    check_entry_count(len(entries), limits)
    for entry in entries:
        problem = _problem_of(entry, limits)
        if problem:
            raise InvalidArchive(f"entry {_shown(entry.name)} {problem}")
    _check_sum(entries, limits)
    _check_places(entries)
    manifest = next((entry for entry in entries if entry.name == MANIFEST_NAME), None)
    if manifest is None or manifest.kind is not EntryKind.FILE:
        raise InvalidArchive(f"there is no file {MANIFEST_NAME} at the archive's root")
    if manifest.size_bytes > limits.manifest_bytes:
        raise InvalidArchive(
            f"entry {MANIFEST_NAME!r} has {manifest.size_bytes:,} bytes and at most "
            f"{limits.manifest_bytes:,} are allowed"
        )


def _problem_of(entry: Entry, limits: ArchiveLimits) -> str | None:
    if entry.kind is EntryKind.LINK:
        return "is a link; links are not taken, put the file itself in"
    if entry.kind is EntryKind.SPECIAL:
        return "is neither a file nor a folder"
    if entry.encrypted:
        return "is encrypted"
    if entry.method not in METHODS:
        return f"is compressed by {entry.method}; use deflate or none"
    return (
        _problem_of_name(entry, limits) or _problem_of_unicode_paths(entry) or _problem_of_size(entry, limits)
    )


def _problem_of_name(entry: Entry, limits: ArchiveLimits) -> str | None:
    name = entry.name.removesuffix("/") if entry.kind is EntryKind.FOLDER else entry.name
    if any(unicodedata.category(character) in {"Cc", "Cs"} for character in name):
        return "has a control character or half a character in its name"
    if "\\" in name:
        return "has a backslash in its name"
    if name.startswith("/"):
        return "has an absolute name"
    if _DRIVE.match(name):
        return "has a drive letter in its name"
    if len(name.encode()) > limits.path_bytes:
        return f"has a name of over {limits.path_bytes} bytes"
    problems = (_problem_of_part(part, limits) for part in name.split("/"))
    return next((problem for problem in problems if problem), None)


def _problem_of_part(part: str, limits: ArchiveLimits) -> str | None:
    if not part:
        return "has an empty name, or an empty part in it"
    if part in {".", ".."}:
        return f"has the part {part!r} in its name"
    if len(part.encode()) > limits.part_bytes:
        return f"has a part of over {limits.part_bytes} bytes in its name"
    return None


def _problem_of_unicode_paths(entry: Entry) -> str | None:
    """Return a problem unless each field has version 1 and, after a checksum, the name of the entry."""
    name = entry.name.encode()
    if all(field[:1] == b"\x01" and field[5:] == name for field in entry.unicode_paths):
        return None
    return "has a Unicode Path field that differs from its name; store the name itself in UTF-8"


def _problem_of_size(entry: Entry, limits: ArchiveLimits) -> str | None:
    if entry.kind is EntryKind.FOLDER and entry.size_bytes:
        return "is a folder with content"
    if entry.size_bytes < 0 or entry.packed_bytes < 0:
        return "has a negative size"
    if entry.size_bytes > limits.entry_bytes:
        return f"expands to {entry.size_bytes:,} bytes and at most {limits.entry_bytes:,} are allowed"
    if _expands_too_much(entry.size_bytes, entry.packed_bytes, limits):
        return (
            f"expands from {entry.packed_bytes:,} to {entry.size_bytes:,} bytes, more than "
            f"{limits.expansion_ratio:g} times"
        )
    return None


def _expands_too_much(size_bytes: int, packed_bytes: int, limits: ArchiveLimits) -> bool:
    return size_bytes > limits.expansion_free_bytes and size_bytes > limits.expansion_ratio * packed_bytes


def _check_sum(entries: Iterable[Entry], limits: ArchiveLimits) -> None:
    size_bytes = packed_bytes = 0
    for entry in entries:
        size_bytes += entry.size_bytes
        packed_bytes += entry.packed_bytes
        if size_bytes > limits.total_bytes:
            raise InvalidArchive(
                f"entry {_shown(entry.name)} brings the archive over {limits.total_bytes:,} bytes, unpacked"
            )
    if _expands_too_much(size_bytes, packed_bytes, limits):
        raise InvalidArchive(
            f"the archive expands from {packed_bytes:,} to {size_bytes:,} bytes, more than "
            f"{limits.expansion_ratio:g} times"
        )


def _folded(path: str) -> str:
    """Return a path's form on a filesystem that ignores case and Unicode forms."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _check_places(entries: Iterable[Entry]) -> None:
    """Refuse paths that are spelled in two ways, are a file and a folder, or are there twice."""
    spelled: dict[str, str] = {}
    kinds: dict[str, EntryKind] = {}
    listed: set[str] = set()
    for entry in entries:
        path = entry.name.removesuffix("/")
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            place = "/".join(parts[:depth])
            key = _folded(place)
            kind = entry.kind if depth == len(parts) else EntryKind.FOLDER
            if spelled.setdefault(key, place) != place:
                raise InvalidArchive(
                    f"entry {_shown(entry.name)} collides with {_shown(spelled[key])} where case and "
                    "Unicode forms do not count"
                )
            if kinds.setdefault(key, kind) is not kind:
                raise InvalidArchive(f"entry {_shown(entry.name)} makes {_shown(place)} a file and a folder")
        if path in listed:
            raise InvalidArchive(f"entry {_shown(entry.name)} is there twice")
        listed.add(path)


def _shown(name: str) -> str:
    """Return a name for a message: quoted, escaped and shortened."""
    short = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}…"
    return ascii(short)
