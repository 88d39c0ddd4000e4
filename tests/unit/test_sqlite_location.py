"""Where a registry file may be, and what is said of every place where it may not."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebalanser.errors import InvalidUrl, RebalanserError, RegistryUnavailable, UnusableStore
from rebalanser.registry.contract import Changed, Outcome, Put, Target, Transaction
from rebalanser.registry.urls import open_registry, parse_url
from rebalanser.tasks.context import load_engine
from rebalanser.testing.registry_suite import EventRecorder
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_sqlite import SqliteRegistry, location
from rebalanser_sqlite.location import SHARED_FILESYSTEMS, file_of, mount_of
from rebalanser_sqlite.store import APPLICATION_ID, SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from rebalanser.registry.contract import Registry
    from rebalanser.tasks.engine import Engine


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


def open_engine(url: str) -> Engine:
    parsed, opener = load_engine(url)
    return opener(parsed, PATIENCE_S)


def modes_below(folder: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("opener", [open_registry, open_engine], ids=["registry", "tasks"])
def test_files_are_this_users_alone(tmp_path: Path, opener: Callable[[str], Registry | Engine]) -> None:
    with closing(opener(f"sqlite:///{tmp_path}/groups.db")):
        assert modes_below(tmp_path) == dict.fromkeys(("groups.db", "groups.db-wal", "groups.db-shm"), 0o600)


@pytest.mark.parametrize("opener", [open_registry, open_engine], ids=["registry", "tasks"])
def test_the_url_lets_others_use_the_files(
    tmp_path: Path, opener: Callable[[str], Registry | Engine]
) -> None:
    before = os.umask(0o077)
    try:
        with closing(opener(f"sqlite:///{tmp_path}/groups.db?file_mode=0660")):
            assert set(modes_below(tmp_path).values()) == {0o660}
        with closing(opener(f"sqlite:///{tmp_path}/groups.db")):
            assert set(modes_below(tmp_path).values()) == {0o660}
    finally:
        os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_a_link_to_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "groups.db")
    with closing(SqliteRegistry(tmp_path / "link.db")):
        assert modes_below(tmp_path)["groups.db"] == 0o600


@pytest.mark.parametrize(
    "query", ["file_mode=0777", "file_mode=rw", "file_mode=", "file_mode=0440", "mode=0600", "x"]
)
def test_an_option_that_is_none_is_refused(tmp_path: Path, query: str) -> None:
    with pytest.raises(
        InvalidUrl, match=r"octal digits such as 0640|06[46][06] does not|it has file_mode|has no value"
    ):
        open_registry(f"sqlite:///{tmp_path}/groups.db?{query}")
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (errno.EMFILE, RegistryUnavailable, "has no file descriptor left; try again"),
        (errno.ENFILE, RegistryUnavailable, "has no file descriptor left; try again"),
        (errno.EIO, UnusableStore, "cannot be used: Input/output error"),
    ],
)
def test_a_place_that_can_not_be_looked_at(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[RebalanserError],
    says: str,
) -> None:
    """What may pass is for the caller to try again, and nothing that a person is asked to change."""

    def fail() -> list[str]:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(location, "_mount_lines", fail)
    with pytest.raises(kind, match=says) as caught:
        SqliteRegistry(tmp_path / "groups.db")
    assert type(caught.value) is kind


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
    assert "is damaged, or its disk fails to read it: see the kernel's log" in refusal(path)


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
def test_the_mount_of_a_path(path: str, kind: str) -> None:
    assert mount_of(Path(path), MOUNTS)[1] == kind


def test_without_mounts_nothing_is_known() -> None:
    assert mount_of(Path("/groups.db"), []) == (Path("/"), "")


def mounted(monkeypatch: pytest.MonkeyPatch, folder: Path, point: Path, kind: str) -> None:
    """Have ``point`` be a mount of this kind for as long as the test runs."""
    mounts = folder / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {point} {kind} rw 0 0\n")
    monkeypatch.setattr(location, "MOUNTS", mounts)


@pytest.mark.parametrize(
    "kind",
    [
        *("9p", "afs", "beegfs", "ceph", "cifs", "drvfs", "fakeowner", "fuse.grpcfuse", "fuse.mount-s3"),
        *("fuse.sshfs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "prl_fs", "smb3", "vboxsf", "virtiofs"),
    ],
)
def test_a_network_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    mounted(monkeypatch, tmp_path, tmp_path, kind)
    assert f"is on a network filesystem ({kind}); use a local disk, or etcd://" in refusal(tmp_path / "g.db")
    assert not (tmp_path / "g.db").exists()
    assert kind in SHARED_FILESYSTEMS


@pytest.mark.parametrize("kind", ["fuse.newfs", "fuse"])
def test_an_unknown_filesystem_in_user_space_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mounted(monkeypatch, tmp_path, tmp_path, kind)
    with closing(SqliteRegistry(tmp_path / "groups.db")) as registry:
        (reason,) = registry.capabilities.unsafe_reasons
    assert f"is on an unknown filesystem ({kind}): if other hosts write it too" in reason


def test_a_local_disk_is_not_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, tmp_path, tmp_path, "fuseblk")
    with closing(SqliteRegistry(tmp_path / "groups.db")) as registry:
        assert registry.capabilities.unsafe_reasons == ()


@pytest.mark.rule("RB-1")
def test_a_file_that_is_mounted_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a b.db"
    mounted(monkeypatch, tmp_path, Path(str(path).replace(" ", "\\040")), "ext4")
    assert "is a mount point itself" in refusal(path)
    assert "mount its folder, never the file" in refusal(path)
    (tmp_path / "link.db").symlink_to(path)
    assert "is a mount point itself" in refusal(tmp_path / "link.db")
    with closing(SqliteRegistry(tmp_path / "other.db")) as registry:
        assert registry.capabilities.unsafe_reasons == ()


@pytest.mark.rule("RB-1")
def test_a_file_with_two_names(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    SqliteRegistry(path).close()
    (tmp_path / "other.db").hardlink_to(path)
    assert "has 2 names (hard links)" in refusal(path)
    assert "has 2 names (hard links)" in refusal(tmp_path / "other.db")
    (tmp_path / "other.db").unlink()
    SqliteRegistry(path).close()


@pytest.mark.rule("RB-1")
@pytest.mark.parametrize(
    "spelling",
    [
        "groups.db",
        "./groups.db",
        "{0}//groups.db",
        "{0}/../{1}/groups.db",
        "{0}/file.db",
        "{0}/folder/groups.db",
    ],
    ids=["relative", "dot", "two-slashes", "above", "link-to-file", "link-to-folder"],
)
def test_all_spellings_of_a_path_are_one_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    path = tmp_path / "groups.db"
    (tmp_path / "file.db").symlink_to(path)
    (tmp_path / "folder").symlink_to(tmp_path, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{spelling.format(tmp_path, tmp_path.name)}"
    with closing(open_registry(url)) as one, closing(SqliteRegistry(path)) as two:
        recorder = EventRecorder(PATIENCE_S)
        two.watch(Target("k"), 1, recorder)
        one.execute(Transaction(then=(Put("k", b"one"),)), PATIENCE_S)
        recorder.wait_for(Changed("k", 1, b"one"))
        assert two.execute(Transaction(then=(Put("k", b"two"),)), PATIENCE_S) == Outcome(True, 2, (None,))


@pytest.mark.rule("RB-1")
def test_a_link_turned_to_another_file_while_in_use_is_noticed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        SqliteRegistry(tmp_path / name).close()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    with closing(SqliteRegistry(tmp_path / "link")) as registry:
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to(tmp_path / "two")
        with pytest.raises(UnusableStore, match="removed or replaced"):
            registry.execute(Transaction(), PATIENCE_S)


def test_a_link_is_followed_to_its_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far").mkdir()
    mounted(monkeypatch, tmp_path, tmp_path / "far", "nfs")
    (tmp_path / "near.db").symlink_to(tmp_path / "far" / "groups.db")
    assert "is on a network filesystem (nfs)" in refusal(tmp_path / "near.db")
