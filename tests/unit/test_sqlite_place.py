"""Where a registry file may be, and what is said of every place where it may not."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from rebalanser_sqlite import SqliteRegistry, place
from rebalanser_sqlite.place import SHARED_FILESYSTEMS, file_of, filesystem_of
from rebalanser_sqlite.store import APPLICATION_ID, SCHEMA_VERSION

from rebalanser.errors import InvalidUrl, RebalanserError, UnusableStore
from rebalanser.registry.urls import open_registry, parse_url


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///groups.db", "groups.db"),
        ("sqlite:///state/groups.db", "state/groups.db"),
        ("sqlite:////var/lib/groups.db", "/var/lib/groups.db"),
        ("sqlite:////a b/100%25.db", "/a b/100%25.db"),
    ],
)
def test_a_url_names_a_file(url: str, path: str) -> None:
    assert file_of(parse_url(url)) == Path(path)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite://groups.db", "sqlite:///a\0b"])
def test_a_url_that_names_no_file_is_refused(url: str) -> None:
    with pytest.raises(InvalidUrl, match=r"write sqlite:///groups\.db"):
        open_registry(url)


def test_a_database_in_memory_is_refused() -> None:
    with pytest.raises(UnusableStore, match="use memory://NAME"):
        open_registry("sqlite:///:memory:")


def one_line(error: RebalanserError) -> str:
    assert "\n" not in str(error)
    return str(error)


def refusal(path: Path) -> str:
    with pytest.raises(UnusableStore) as caught:
        SqliteRegistry(path)
    return one_line(caught.value)


def database(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def test_a_missing_folder(tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path}/none; create it" in refusal(tmp_path / "none" / "groups.db")


def test_a_folder(tmp_path: Path) -> None:
    assert "is a folder; name a file in it" in refusal(tmp_path)


def test_no_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a plain file" in refusal(tmp_path / "pipe")


def test_a_name_too_long(tmp_path: Path) -> None:
    assert "File name too long" in refusal(tmp_path / ("x" * 300))


@pytest.mark.parametrize("content", [b"short", b"no database at all\n" * 1000], ids=["short", "long"])
def test_a_file_that_is_no_database(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    assert "is not an SQLite database; name another file" in refusal(path)
    assert path.read_bytes() == content


def test_a_damaged_database(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    SqliteRegistry(path).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes(len(whole) - 100))
    assert "is a damaged SQLite database" in refusal(path)


def test_the_database_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    database(path, "CREATE TABLE t (x)")
    assert "is the database of another program" in refusal(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("t",)]


def test_a_newer_schema(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    SqliteRegistry(path).close()
    database(path, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    assert f"has schema {SCHEMA_VERSION + 1}" in refusal(path)
    assert "upgrade rebalanser" in refusal(path)


def test_an_empty_file_becomes_a_registry(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    path.touch()
    SqliteRegistry(path).close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)


@pytest.mark.usefixtures("permissions_count")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert "is read-only for this user" in refusal(tmp_path / "groups.db")


@pytest.mark.usefixtures("permissions_count")
def test_a_read_only_file(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    SqliteRegistry(path).close()
    path.chmod(0o444)
    assert "cannot be read and written by this user" in refusal(path)


@pytest.mark.usefixtures("permissions_count")
def test_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    assert "Permission denied" in refusal(tmp_path / "closed" / "groups.db")


MOUNTS = [
    "/dev/vda / ext4 rw,relatime 0 0",
    "server:/export /srv nfs4 rw 0 0",
    "/dev/vdb /srv/local xfs rw 0 0",
    "me@host: /home/me/far\\040away fuse.sshfs rw 0 0",
    "/dev/vdc /data ext4 rw 0 0",
    "//server/share /data cifs rw 0 0",
]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/groups.db", "ext4"),
        ("/srv/groups.db", "nfs4"),
        ("/srv/local/groups.db", "xfs"),
        ("/srvant/groups.db", "ext4"),
        ("/home/me/far away/groups.db", "fuse.sshfs"),
        ("/data/groups.db", "cifs"),
    ],
)
def test_the_filesystem_of_a_path(path: str, kind: str) -> None:
    assert filesystem_of(Path(path), MOUNTS) == kind


def test_without_mounts_nothing_is_known() -> None:
    assert filesystem_of(Path("/groups.db"), []) == ""


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre", "afs"])
def test_a_network_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n")
    monkeypatch.setattr(place, "MOUNTS", mounts)
    assert f"is on a network filesystem ({kind}); use a local disk, or etcd://" in refusal(tmp_path / "g.db")
    assert not (tmp_path / "g.db").exists()
    assert kind in SHARED_FILESYSTEMS


def test_a_link_is_followed_to_its_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    (tmp_path / "far").mkdir()
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path}/far nfs rw 0 0\n")
    monkeypatch.setattr(place, "MOUNTS", mounts)
    (tmp_path / "near.db").symlink_to(tmp_path / "far" / "groups.db")
    assert "is on a network filesystem (nfs)" in refusal(tmp_path / "near.db")
