"""Checks the place of a registry file: on this host's own disk, in a writable folder."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from rebalanser.errors import InvalidSettings, InvalidUrl, UnusableStore
from rebalanser.folders import PRIVATE, file_mode_of
from rebalanser_sqlite.failures import OUT_OF_FILES, out_of_files

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rebalanser.registry.urls import RegistryUrl

MOUNTS = Path("/proc/self/mounts")
SHARED_FILESYSTEMS = frozenset(
    {
        *("9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "cvfs", "davfs", "drvfs", "fakeowner"),
        *("gfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs3", "nfs4", "ocfs2", "orangefs"),
        *("panfs", "prl_fs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs"),
        *("fuse.beegfs", "fuse.blobfuse", "fuse.blobfuse2", "fuse.ceph", "fuse.ceph-fuse", "fuse.cephfs"),
        *("fuse.davfs", "fuse.davfs2", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.grpcfuse"),
        *("fuse.hdfs", "fuse.juicefs", "fuse.lizardfs", "fuse.mfs", "fuse.moosefs", "fuse.mount-s3"),
        *("fuse.nfs", "fuse.osxfs", "fuse.prl_fsd", "fuse.quobyte", "fuse.rclone", "fuse.s3fs", "fuse.s3ql"),
        *("fuse.seaweedfs", "fuse.smbnetfs", "fuse.sshfs", "fuse.virtiofs", "fuse.vmhgfs-fuse"),
    }
)
"""Filesystems that other hosts (or the host of a virtual machine) also write. They do not share memory, so
the write-ahead log would be torn."""


def file_of(url: RegistryUrl) -> Path:
    """Return the file of ``sqlite:///relative`` or ``sqlite:////absolute``.

    Raises:
        InvalidUrl: the URL names no file.
        UnusableStore: it names SQLite's in-memory database.
    """
    slash, name = url.path[:1], url.path[1:]
    if url.hosts or slash != "/" or not name or "\0" in name:
        raise InvalidUrl(
            f"{str(url)!r} names no file; write sqlite:///groups.db or sqlite:////absolute/groups.db"
        )
    if name == ":memory:":
        raise UnusableStore("an in-memory SQLite database is seen by one connection only; use memory://NAME")
    return Path(name)


def log_of(path: Path) -> Path:
    """Return the write-ahead log of a file: SQLite follows symbolic links, so that all links share it."""
    return Path(f"{path.resolve()}-wal")


def file_mode_from(url: RegistryUrl) -> int:
    """Return the mode of new files, from the URL's ``file_mode=0640``; by default for the user alone.

    Raises:
        InvalidUrl: it is not a mode of a file, or the URL has an unknown option.
    """
    unknown = sorted(set(url.options) - {"file_mode"})
    if unknown:
        raise InvalidUrl(f"sqlite:// has no option {unknown[0]!r}; it has file_mode")
    try:
        return file_mode_of(url.options.get("file_mode", PRIVATE))
    except InvalidSettings as error:
        raise InvalidUrl(f"file_mode in {str(url)!r}: {error}") from error


def check_place(path: Path) -> tuple[str, ...]:
    """Refuse a place where a registry file can't work. Return warnings about a doubtful one.

    Raises:
        UnusableStore: the folder is missing or read-only, or the path is a folder, not a regular file, a file
            with several names, a mount point itself, not writable, or on a network filesystem.
        RegistryUnavailable: the process or the host has no file descriptor left.
    """
    folder = path.parent
    try:
        if not folder.is_dir():
            raise UnusableStore(f"there is no folder {folder}; create it first")
        _check_file(path)
        point, filesystem = mount_of(path.resolve(), _mount_lines())
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise out_of_files(path) from error
        raise UnusableStore(f"{path} cannot be used: {error.strerror}") from error
    if filesystem in SHARED_FILESYSTEMS:
        raise UnusableStore(f"{path} is on a network filesystem ({filesystem}); use a local disk, or etcd://")
    if not _may(path.resolve().parent, os.W_OK | os.X_OK):
        raise UnusableStore(
            f"the folder of {path} is read-only for this user; SQLite keeps two more files beside it"
        )
    if point == path.resolve():
        raise UnusableStore(
            f"{path} is a mount point itself: SQLite keeps two more files beside it, which other containers "
            f"would not see, and every resource would have two owners; mount its folder, never the file"
        )
    if filesystem.split(".")[0] == "fuse":
        reason = (
            f"{path} is on an unknown filesystem ({filesystem}): if other hosts write it too, each of them "
            "may own every resource; use a local disk, or etcd://"
        )
        return (reason,)
    return ()


def _check_file(path: Path) -> None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        raise UnusableStore(f"{path} is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise UnusableStore(f"{path} is not a plain file; name another one")
    if found.st_nlink > 1:
        raise UnusableStore(
            f"{path} has {found.st_nlink} names (hard links): SQLite keeps two more files beside each, so "
            "that users of one name don't see those of another, and every resource would have two owners; "
            "remove the other names, or use a copy"
        )
    if not _may(path, os.R_OK | os.W_OK):
        raise UnusableStore(f"{path} cannot be read and written by this user; change its permissions")


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _mount_lines() -> list[str]:
    try:
        return MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return []


def mount_of(path: Path, mount_lines: Iterable[str]) -> tuple[Path, str]:
    """Return the mount point of an absolute path and the filesystem's type; "" if unknown.

    Lines are as in ``/proc/self/mounts``. The longest mount point counts, and of several mounts at one point
    the last, which hides the others.
    """
    found, filesystem, depth = Path("/"), "", -1
    for line in mount_lines:
        _, point, kind, *_ = line.split(" ")
        at = Path(_unescaped(point))
        if len(at.parts) >= depth and path.parts[: len(at.parts)] == at.parts:
            found, filesystem, depth = at, kind, len(at.parts)
    return found, filesystem


def _unescaped(text: str) -> str:
    """Decode the octal escapes of blanks in mount points."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
