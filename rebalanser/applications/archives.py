"""Packing an application's files for the log, and unpacking them on a worker (SH-16).

Client and worker read an archive the same way: its listing is checked as a whole by
:mod:`rebalanser.shiva.archives` before a byte is unpacked, and its manifest is parsed. An archive is a zip of
plain files and folders, compressed by deflate or not at all, without zip64: what needs that is over every
limit anyway.

Unpacking writes to a folder aside and renames it into place, so that a folder in place is complete. That
holds through the death of any process; after a reboot :class:`rebalanser.applications.DataFolder` begins
without unpacked files, so nothing needs to be forced to the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rebalanser.applications.manifest import Manifest, parse_manifest
from rebalanser.errors import InvalidArchive
from rebalanser.shiva.archives import (
    DEFAULT_LIMITS,
    MANIFEST_NAME,
    ArchiveLimits,
    Entry,
    EntryKind,
    check_archive_size,
    check_entry_count,
    check_listing,
)

ASIDE_PREFIX: Final = ".aside-"
"""Begins the name of a folder that is being unpacked or removed; a crash may leave one."""
_CHUNK_BYTES: Final = 1024 * 1024
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_UNIX: Final = 3
_ENCRYPTED: Final = 0x1
_METHODS: Final = {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflated"}
_END: Final = struct.Struct("<4s4H2LH")
_END_SIGNATURE: Final = b"PK\x05\x06"
_ZIP64_SIGNATURE: Final = b"PK\x06\x07"
_ZIP64_BYTES: Final = 20
_LONGEST_COMMENT_BYTES: Final = 65_535
_ENTRY_SIGNATURE: Final = b"PK\x01\x02"
_UNREADABLE: Final = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    IndexError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ValueError,
)
"""What :mod:`zipfile` raises on bytes that are no sound zip; decoding a name is a ValueError."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An archive that workers will take."""

    archive: bytes
    sha256: str
    manifest: Manifest
    entries: int
    unpacked_bytes: int

    @property
    def size_bytes(self) -> int:
        """What the archive takes as it is sent."""
        return len(self.archive)

    @property
    def tags(self) -> frozenset[str]:
        """The tags that the manifest asks of a worker (SH-12)."""
        return frozenset(self.manifest.tags)


def pack(source: Path, limits: ArchiveLimits = DEFAULT_LIMITS) -> Packed:
    """The archive of a folder, or a zip as it is, checked as every worker will check it.

    A folder packs to the same bytes whenever its content is the same: entries are sorted and carry no times,
    owners or modes but whether a file can be executed.

    Raises:
        InvalidArchive: naming the entry that no worker would take, or the size that is over its limit.
        InvalidManifest: with every error of ``shiva.json``.
        OSError: the source cannot be read.
    """
    archive = _pack_folder(source, limits) if source.is_dir() else _read_file(source, limits)
    return inspect(archive, limits)


def inspect(archive: bytes, limits: ArchiveLimits = DEFAULT_LIMITS) -> Packed:
    """Check an archive completely, as unpacking it would, without writing anything.

    Raises:
        InvalidArchive: naming the entry that must not be unpacked.
        InvalidManifest: with every error of ``shiva.json``.
    """
    with _opened(archive, limits) as opened, Path(os.devnull).open("wb") as nowhere:
        listing = _checked_listing(opened, limits)
        manifest = _manifest_of(opened, limits)
        for info in listing:
            with opened.open(info) as content:
                _copy(content, nowhere, info.file_size, info.filename)
    sha256 = hashlib.sha256(archive).hexdigest()
    unpacked_bytes = sum(info.file_size for info in listing)
    return Packed(archive, sha256, manifest, len(listing), unpacked_bytes)


def unpack(archive: bytes, sha256: str, into: Path, limits: ArchiveLimits = DEFAULT_LIMITS) -> Manifest:
    """Unpack an archive to the folder ``into``, which appears complete or not at all; its manifest.

    What stood at ``into`` before is replaced. Files that can be executed in the archive can be executed here.

    Raises:
        InvalidArchive: it is not the archive of that sha256, or an entry must not be unpacked; nothing was
            written, unless an entry expands to something else than it declares, which is removed again.
        InvalidManifest: with every error of ``shiva.json``; nothing was written.
        OSError: the disk is full or fails; what was written is removed again.
    """
    check_archive_size(len(archive), limits)
    found = hashlib.sha256(archive).hexdigest()
    if found != sha256:
        raise InvalidArchive(f"the archive's sha256 is {found} and {sha256} was announced")
    aside = into.with_name(f"{ASIDE_PREFIX}{into.name}")
    with _opened(archive, limits) as opened:
        listing = _checked_listing(opened, limits)
        manifest = _manifest_of(opened, limits)
        into.parent.mkdir(parents=True, exist_ok=True)
        remove_folder(aside)
        try:
            aside.mkdir(mode=0o755)
            for info in listing:
                _unpack_entry(opened, info, aside)
            remove_folder(into)
            aside.rename(into)
        finally:
            remove_folder(aside)
    return manifest


def remove_folder(folder: Path) -> None:
    """Remove a folder with all that is in it, whole at once as seen by its name; none is no error.

    Raises:
        OSError: it cannot be removed.
    """
    doomed = folder
    if not folder.name.startswith(ASIDE_PREFIX):
        doomed = folder.with_name(f"{ASIDE_PREFIX}gone-{folder.name}")
        remove_folder(doomed)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(doomed)
    with contextlib.suppress(FileNotFoundError):
        _remove(doomed)


def _remove(doomed: Path) -> None:
    """Remove what an application has left: it may have put a link here, or have closed a folder to itself."""
    if doomed.is_symlink() or not doomed.is_dir():
        doomed.unlink()
        return
    try:
        shutil.rmtree(doomed)
    except PermissionError:
        _open_up(doomed)
        shutil.rmtree(doomed)


def _open_up(folder: Path) -> None:
    folders = [folder]
    while folders:
        opened = folders.pop()
        opened.chmod(stat.S_IRWXU)
        with os.scandir(opened) as children:
            folders += [Path(child.path) for child in children if child.is_dir(follow_symlinks=False)]


def _read_file(source: Path, limits: ArchiveLimits) -> bytes:
    check_archive_size(source.stat().st_size, limits)
    return source.read_bytes()


def _pack_folder(folder: Path, limits: ArchiveLimits) -> bytes:
    found = sorted(itertools.islice(_walk(folder, "", limits), limits.entries + 1))
    check_listing([entry for _, entry, _ in found], limits)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", allowZip64=False) as archive:
        for name, entry, executable in found:
            mode = stat.S_IFDIR | 0o755 if entry.kind is EntryKind.FOLDER else stat.S_IFREG | 0o644
            info = zipfile.ZipInfo(name, _EPOCH)
            info.create_system = _UNIX
            info.external_attr = (mode | (0o111 if executable else 0)) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            if entry.kind is EntryKind.FOLDER:
                info.compress_type = zipfile.ZIP_STORED
                archive.writestr(info, b"")
                continue
            with (folder / name).open("rb") as file, archive.open(info, "w") as entry_file:
                _copy(file, entry_file, entry.size_bytes, name)
            check_archive_size(packed.tell(), limits)
    return packed.getvalue()


def _walk(folder: Path, prefix: str, limits: ArchiveLimits) -> Iterator[tuple[str, Entry, bool]]:
    """Every file and folder below, as entries; links are told as what they are and never followed."""
    with os.scandir(folder) as scan:
        children = list(scan)
    check_entry_count(len(children), limits)
    for child in children:
        path, name = Path(child.path), prefix + child.name
        status = child.stat(follow_symlinks=False)
        if child.is_dir(follow_symlinks=False):
            yield f"{name}/", Entry(f"{name}/", EntryKind.FOLDER), False
            if len(name) <= limits.path_bytes:
                yield from _walk(path, f"{name}/", limits)
            continue
        kind = _kind_of_mode(status.st_mode)
        size_bytes = status.st_size if kind is EntryKind.FILE else 0
        yield name, Entry(name, kind, size_bytes, size_bytes), bool(status.st_mode & stat.S_IXUSR)


def _copy(source: IO[bytes], to: IO[bytes], size_bytes: int, name: str) -> None:
    """Copy exactly ``size_bytes``: neither a growing file nor a lying archive gets any further."""
    left = size_bytes
    while chunk := source.read(min(_CHUNK_BYTES, left + 1)):
        left -= len(chunk)
        if left < 0:
            break
        to.write(chunk)
    if left:
        more = "more" if left < 0 else "less"
        raise InvalidArchive(
            f"entry {name!a} has {more} than the {size_bytes:,} bytes that it was said to have"
        )


@contextlib.contextmanager
def _opened(archive: bytes, limits: ArchiveLimits) -> Iterator[zipfile.ZipFile]:
    """The archive, its listing read. What :mod:`zipfile` cannot read is an :class:`InvalidArchive`."""
    check_archive_size(len(archive), limits)
    _check_end(archive, limits)
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            yield opened
    except _UNREADABLE as error:
        raise InvalidArchive(f"the archive is no sound zip: {error}") from error


def _check_end(archive: bytes, limits: ArchiveLimits) -> None:
    """Refuse a listing that is too long before it is read: every entry of it costs memory."""
    start = archive.rfind(_END_SIGNATURE, max(0, len(archive) - _END.size - _LONGEST_COMMENT_BYTES))
    if start < 0 or start + _END.size > len(archive):
        raise InvalidArchive("the archive is no zip")
    if archive[max(0, start - _ZIP64_BYTES) :].startswith(_ZIP64_SIGNATURE):
        raise InvalidArchive("the archive is a zip64, which only one over the limits needs")
    _, _, _, _, _, listing_bytes, _, _ = _END.unpack_from(archive, start)
    check_entry_count(archive.count(_ENTRY_SIGNATURE, max(0, start - listing_bytes), start), limits)


def _checked_listing(archive: zipfile.ZipFile, limits: ArchiveLimits) -> list[zipfile.ZipInfo]:
    listing = archive.infolist()
    check_listing([_entry_of(info) for info in listing], limits)
    return listing


def _entry_of(info: zipfile.ZipInfo) -> Entry:
    """An entry as its raw name declares it: ``ZipInfo.filename`` ends at the first NUL."""
    return Entry(
        name=info.orig_filename,
        kind=_kind_of(info),
        size_bytes=info.file_size,
        packed_bytes=info.compress_size,
        method=_METHODS.get(info.compress_type, f"method {info.compress_type}"),
        encrypted=bool(info.flag_bits & _ENCRYPTED),
    )


def _kind_of(info: zipfile.ZipInfo) -> EntryKind:
    """Only Unix declares more than the name does; a mode without a type is a plain file's."""
    mode = info.external_attr >> 16
    kind = EntryKind.FILE if not stat.S_IFMT(mode) else _kind_of_mode(mode)
    if kind is EntryKind.FILE and info.is_dir():
        return EntryKind.FOLDER
    return kind


def _kind_of_mode(mode: int) -> EntryKind:
    match stat.S_IFMT(mode):
        case stat.S_IFREG:
            return EntryKind.FILE
        case stat.S_IFDIR:
            return EntryKind.FOLDER
        case stat.S_IFLNK:
            return EntryKind.LINK
    return EntryKind.SPECIAL


def _manifest_of(archive: zipfile.ZipFile, limits: ArchiveLimits) -> Manifest:
    with archive.open(MANIFEST_NAME) as file:
        return parse_manifest(file.read(limits.manifest_bytes + 1))


def _unpack_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo, folder: Path) -> None:
    to = folder / info.filename
    if _kind_of(info) is EntryKind.FOLDER:
        to.mkdir(mode=0o755, parents=True, exist_ok=True)
        return
    to.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    executable = info.external_attr >> 16 & stat.S_IXUSR
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(to, flags, 0o755 if executable else 0o644)
    with os.fdopen(descriptor, "wb") as file, archive.open(info) as content:
        _copy(content, file, info.file_size, info.filename)
