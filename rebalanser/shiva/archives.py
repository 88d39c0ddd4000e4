"""Packing an application's files for the log, and unpacking them on a worker (SH-16).

Client and worker read an archive the same way: ``rebalanser.core.shiva.archives`` checks its whole listing
before a byte is unpacked, and its manifest is parsed. An archive is a zip of plain files and folders,
compressed by deflate or not at all. A zip64 is refused: it is needed only beyond the limits.

The verdict does not depend on the version of Python. Versions of ``zipfile`` differ in two checks, so both
are made here: Unicode Path fields, which 3.12 began to read, and entries that overlap.

Unpacking writes below one folder descriptor, a path part at a time and through no link, so that nothing gets
outside even if a check is wrong. It writes to a folder aside and renames it into place, so a folder in place
is complete. That holds through the death of any process. After a reboot
``rebalanser.shiva.DataFolder`` begins without unpacked files, so nothing is forced to the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final

from rebalanser.core.allocation import Requests
from rebalanser.core.shiva.archives import (
    DEFAULT_LIMITS,
    MANIFEST_NAME,
    ArchiveLimits,
    Entry,
    EntryKind,
    check_archive_size,
    check_entry_count,
    check_listing,
)
from rebalanser.errors import InvalidArchive
from rebalanser.shiva.manifest import Manifest, parse_manifest

ASIDE_PREFIX: Final = ".aside-"
"""Begins the name of a folder that is being unpacked or removed; a crash may leave one."""
NO_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType({})
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
_LOCAL_HEADER: Final = struct.Struct("<26x2H")
"""Lengths of the name and of the extra fields, which end an entry's local header."""
_EXTRA_HEADER: Final = struct.Struct("<2H")
_UNICODE_PATH: Final = 0x7075
_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_UNREADABLE: Final = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    IndexError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    UserWarning,
    ValueError,
)
"""Errors of ``zipfile`` for bytes that are no sound zip.

Decoding a name raises ValueError. A UserWarning is raised where the host turns warnings into errors.
"""


@dataclass(frozen=True, slots=True)
class Packed:
    """An archive that workers accept."""

    archive: bytes
    sha256: str
    manifest: Manifest
    entries: int
    unpacked_bytes: int

    @property
    def size_bytes(self) -> int:
        """Size of the archive as it is sent."""
        return len(self.archive)

    @property
    def tags(self) -> frozenset[str]:
        """Tags that the manifest requires of a worker (SH-12)."""
        return frozenset(self.manifest.tags)

    @property
    def requests(self) -> Requests | None:
        """Amounts of its worker that it takes, as the manifest says (SH-27)."""
        return self.manifest.requests.as_requests()


@dataclass(frozen=True, slots=True)
class _CheckedEntry:
    """An entry as it was checked, with what ``zipfile`` needs to read it.

    It is written under the name that was checked, ``entry.name``, and never under ``info.filename``.
    """

    entry: Entry
    info: zipfile.ZipInfo


def pack(
    source: Path, limits: ArchiveLimits = DEFAULT_LIMITS, environment: Mapping[str, str] = NO_ENVIRONMENT
) -> Packed:
    """Pack a folder, or take a zip as it is, and check it as every worker does.

    ``environment`` is added to the manifest's in the archive; the source stays as it is.

    A folder packs to the same bytes whenever its content is the same: entries are sorted and carry no times,
    owners or modes, only whether a file is executable.

    Raises:
        InvalidArchive: naming the entry that workers refuse, or the size that is over its limit.
        InvalidManifest: with every error of ``shiva.json``.
        OSError: the source cannot be read.
    """
    archive = _pack_folder(source, limits) if source.is_dir() else _read_file(source, limits)
    packed = inspect(archive, limits)
    return inspect(_with_environment(packed, environment), limits) if environment else packed


def _with_environment(packed: Packed, environment: Mapping[str, str]) -> bytes:
    """Return a checked archive with more environment in its manifest, and all else as it was.

    What the manifest does not say is not added: an earlier worker may not know it.
    """
    manifest = packed.manifest.model_dump(mode="json", exclude_unset=True)
    manifest["environment"] = {**packed.manifest.environment, **environment}
    changed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(packed.archive)) as before,
        zipfile.ZipFile(changed, "w", allowZip64=False) as archive,
    ):
        for entry in before.infolist():
            info = zipfile.ZipInfo(entry.filename, _EPOCH)
            info.create_system, info.external_attr = entry.create_system, entry.external_attr
            info.compress_type = entry.compress_type
            is_manifest = entry.filename == MANIFEST_NAME
            archive.writestr(info, json.dumps(manifest) if is_manifest else before.read(entry))
    return changed.getvalue()


def inspect(archive: bytes, limits: ArchiveLimits = DEFAULT_LIMITS) -> Packed:
    """Check an archive completely, as unpacking it would, without writing anything.

    Raises:
        InvalidArchive: naming the entry that must not be unpacked.
        InvalidManifest: with every error of ``shiva.json``.
    """
    with _opened(archive, limits) as opened, Path(os.devnull).open("wb") as nowhere:
        listing = _checked_listing(opened, archive, limits)
        manifest = _manifest_of(opened, listing, limits)
        for member in listing:
            with opened.open(member.info) as content:
                _copy(content, nowhere, member.entry.size_bytes, member.entry.name)
    sha256 = hashlib.sha256(archive).hexdigest()
    unpacked_bytes = sum(member.entry.size_bytes for member in listing)
    return Packed(archive, sha256, manifest, len(listing), unpacked_bytes)


def unpack(archive: bytes, sha256: str, into: Path, limits: ArchiveLimits = DEFAULT_LIMITS) -> Manifest:
    """Unpack an archive to the folder ``into`` and return its manifest.

    The folder appears complete or not at all, and replaces what was at ``into``. Files keep their executable
    bit. Nothing is written outside the folder, even if something puts a link into it meanwhile.

    Raises:
        InvalidArchive: it is not the archive of that sha256, or an entry must not be unpacked; nothing was
            written, unless an entry expands to something else than it declares, which is removed again.
        InvalidManifest: with every error of ``shiva.json``; nothing was written.
        OSError: the disk is full or fails, or a link appeared in the folder; what was written is removed
            again.
    """
    check_archive_size(len(archive), limits)
    found = hashlib.sha256(archive).hexdigest()
    if found != sha256:
        raise InvalidArchive(f"the archive's sha256 is {found} and {sha256} was announced")
    aside = into.with_name(f"{ASIDE_PREFIX}{into.name}")
    with _opened(archive, limits) as opened:
        listing = _checked_listing(opened, archive, limits)
        manifest = _manifest_of(opened, listing, limits)
        into.parent.mkdir(parents=True, exist_ok=True)
        remove_folder(aside)
        try:
            aside.mkdir(mode=0o755)
            with _folder_opened(aside) as folder:
                for member in listing:
                    _unpack_entry(opened, member, folder)
            remove_folder(into)
            aside.rename(into)
        finally:
            remove_folder(aside)
    return manifest


def remove_folder(folder: Path) -> None:
    """Remove a folder with all that is in it. It disappears at once; a missing folder is no error.

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
    """Remove what an application left, even a link in the folder's place or folders without permissions."""
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
    """Yield every file and folder below as an entry; links are yielded as links and never followed."""
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
    """Copy exactly ``size_bytes``, so that neither a growing file nor a false declaration writes more."""
    left = size_bytes
    while chunk := source.read(min(_CHUNK_BYTES, left + 1)):
        left -= len(chunk)
        if left < 0:
            break
        to.write(chunk)
    if left:
        more = "more" if left < 0 else "less"
        raise InvalidArchive(f"entry {name!a} has {more} than the {size_bytes:,} bytes that it declares")


@contextlib.contextmanager
def _opened(archive: bytes, limits: ArchiveLimits) -> Iterator[zipfile.ZipFile]:
    """Open the archive and read its listing; errors of ``zipfile`` become ``InvalidArchive``."""
    check_archive_size(len(archive), limits)
    _check_end(archive, limits)
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            yield opened
    except _UNREADABLE as error:
        raise InvalidArchive(f"the archive is not a valid zip: {error}") from error


def _check_end(archive: bytes, limits: ArchiveLimits) -> None:
    """Refuse a listing that is too long before it is read, since every entry takes memory."""
    start = archive.rfind(_END_SIGNATURE, max(0, len(archive) - _END.size - _LONGEST_COMMENT_BYTES))
    if start < 0 or start + _END.size > len(archive):
        raise InvalidArchive("the archive is not a zip")
    if archive[max(0, start - _ZIP64_BYTES) :].startswith(_ZIP64_SIGNATURE):
        raise InvalidArchive("the archive is a zip64, which only one over the limits needs")
    _, _, _, _, _, listing_bytes, _, _ = _END.unpack_from(archive, start)
    check_entry_count(archive.count(_ENTRY_SIGNATURE, max(0, start - listing_bytes), start), limits)


def _checked_listing(opened: zipfile.ZipFile, archive: bytes, limits: ArchiveLimits) -> list[_CheckedEntry]:
    listing = [_CheckedEntry(_entry_of(info), info) for info in opened.infolist()]
    check_listing([member.entry for member in listing], limits)
    for member in listing:
        if member.info.filename != member.entry.name:
            raise InvalidArchive(f"entry {member.entry.name!a} is also named {member.info.filename!a}")
    _check_overlaps(listing, archive, opened.start_dir)
    return listing


def _check_overlaps(listing: list[_CheckedEntry], archive: bytes, listing_start: int) -> None:
    """Refuse entries that share bytes with each other or with the listing, as zip bombs do."""
    end = listing_start
    for member in sorted(listing, key=lambda member: member.info.header_offset, reverse=True):
        start = member.info.header_offset
        if start < 0:
            raise InvalidArchive(f"the archive is not a valid zip: {member.entry.name!a} begins before it")
        lengths = _LOCAL_HEADER.unpack_from(archive, start)
        if start + _LOCAL_HEADER.size + sum(lengths) + member.entry.packed_bytes > end:
            raise InvalidArchive(f"entry {member.entry.name!a} overlaps another entry or the listing")
        end = start


def _entry_of(info: zipfile.ZipInfo) -> Entry:
    """Return an entry under the name in its header.

    ``ZipInfo.filename`` may be another: it ends at the first NUL and may come from a Unicode Path field.
    """
    return Entry(
        name=info.orig_filename,
        kind=_kind_of(info),
        size_bytes=info.file_size,
        packed_bytes=info.compress_size,
        method=_METHODS.get(info.compress_type, f"method {info.compress_type}"),
        encrypted=bool(info.flag_bits & _ENCRYPTED),
        unicode_paths=tuple(_unicode_paths(info.extra)),
    )


def _unicode_paths(extra: bytes) -> Iterator[bytes]:
    while len(extra) >= _EXTRA_HEADER.size:
        kind, size_bytes = _EXTRA_HEADER.unpack_from(extra)
        end = _EXTRA_HEADER.size + size_bytes
        if kind == _UNICODE_PATH:
            yield extra[_EXTRA_HEADER.size : end]
        extra = extra[end:]


def _kind_of(info: zipfile.ZipInfo) -> EntryKind:
    """Return the kind that the Unix mode declares, or that the name implies if the mode has no type."""
    mode = info.external_attr >> 16
    kind = EntryKind.FILE if not stat.S_IFMT(mode) else _kind_of_mode(mode)
    if kind is EntryKind.FILE and info.orig_filename.endswith("/"):
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


def _manifest_of(archive: zipfile.ZipFile, listing: list[_CheckedEntry], limits: ArchiveLimits) -> Manifest:
    infos = {member.entry.name: member.info for member in listing}
    with archive.open(infos[MANIFEST_NAME]) as file:
        return parse_manifest(file.read(limits.manifest_bytes + 1))


def _unpack_entry(archive: zipfile.ZipFile, member: _CheckedEntry, folder: int) -> None:
    """Write an entry below an open folder; the checks on its name are not relied on."""
    entry, mode = member.entry, member.info.external_attr >> 16
    parts = entry.name.removesuffix("/").split("/")
    if any(part in {"", ".", ".."} for part in parts):
        raise InvalidArchive(f"entry {entry.name!a} points outside its folder")
    if entry.kind is EntryKind.FOLDER:
        with _folder_below(folder, parts):
            return
    with _folder_below(folder, parts[:-1]) as parent:
        descriptor = os.open(parts[-1], _CREATE_FILE, 0o755 if mode & stat.S_IXUSR else 0o644, dir_fd=parent)
        with os.fdopen(descriptor, "wb") as file, archive.open(member.info) as content:
            _copy(content, file, entry.size_bytes, entry.name)


@contextlib.contextmanager
def _folder_opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, _OPEN_FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _folder_below(folder: int, parts: list[str]) -> Iterator[int]:
    """Open a folder below, making folders that are missing and following no link."""
    at = os.dup(folder)
    try:
        for part in parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=at)
            above, at = at, os.open(part, _OPEN_FOLDER, dir_fd=at)
            os.close(above)
        yield at
    finally:
        os.close(at)
