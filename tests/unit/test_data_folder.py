"""A worker's data folder: who the worker is, where an application's files are, and what is cleaned up."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebalanser.core.shiva.types import ApplicationId
from rebalanser.errors import FixConfiguration, InternalError, UnusableFolder
from rebalanser.runtime import supervisor_shim
from rebalanser.shiva import data_folder as module
from rebalanser.shiva.archives import ASIDE_PREFIX, Packed, pack
from rebalanser.shiva.data_folder import DataFolder, folder_name
from rebalanser.shiva.outputs import tail

if TYPE_CHECKING:
    from collections.abc import Iterator

APP = ApplicationId("tenant", "channel", "app")
OTHER = ApplicationId("tenant", "channel", "other")


@pytest.fixture
def packed(tmp_path: Path) -> Packed:
    source = tmp_path / "source"
    source.mkdir()
    (source / "shiva.json").write_text('{"command": ["true"]}')
    return pack(source)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def data(folder: Path) -> Iterator[DataFolder]:
    with DataFolder.open(folder) as opened:
        yield opened


@pytest.mark.rule("SH-13")
def test_each_opening_is_a_greater_incarnation_of_the_same_lineage(folder: Path, tmp_path: Path) -> None:
    incarnations = []
    for _ in range(3):
        with DataFolder.open(folder) as data:
            incarnations.append(data.incarnation)
    first, second, third = incarnations
    assert third.succeeds(second)
    assert second.succeeds(first)
    with DataFolder.open(tmp_path / "another") as another:
        assert another.incarnation.lineage != first.lineage


@pytest.mark.rule("SH-3", "SH-13")
@pytest.mark.parametrize("elsewhere", ["another boot", "a copy"])
def test_where_the_lock_proves_nothing_of_the_last_worker_another_lineage_begins(
    folder: Path, tmp_path: Path, elsewhere: str
) -> None:
    with DataFolder.open(folder) as data:
        last = data.incarnation
    if elsewhere == "a copy":
        folder = shutil.copytree(folder, tmp_path / "copy")
    else:
        identity = json.loads((folder / "identity.json").read_text())
        (folder / "identity.json").write_text(json.dumps({**identity, "boot_id": "another"}))
    with DataFolder.open(folder) as data:
        assert data.incarnation.lineage != last.lineage
        first = data.incarnation
    with DataFolder.open(folder) as data:
        assert data.incarnation.succeeds(first)


@pytest.mark.rule("SH-17")
def test_a_folder_is_one_workers_until_it_is_closed(data: DataFolder) -> None:
    with pytest.raises(UnusableFolder, match="another worker uses"):
        DataFolder.open(data.path, timeout_s=0)
    data.close()
    data.close()
    DataFolder.open(data.path, timeout_s=0).close()
    with pytest.raises(InternalError):
        _ = data.lock


@pytest.mark.rule("SH-17")
def test_what_an_earlier_worker_started_has_its_stop_timeout_to_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker is killed, and its shim waits for a process with a stop timeout of 600 s."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "shiva.json").write_text('{"command": ["true"], "stop_timeout_s": 600}')
    slow = pack(source)
    with DataFolder.open(folder) as data:
        data.unpack(APP, slow.archive, slow.sha256)
    shims = os.open(folder / "lock", os.O_RDWR)
    fcntl.flock(shims, fcntl.LOCK_EX)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _s: os.close(shims))
    with DataFolder.open(folder, timeout_s=0) as data:
        assert data.incarnation.number == 2
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("waiting up to 600 s until the data folder")
        with pytest.raises(UnusableFolder, match="another worker uses"):
            DataFolder.open(folder, timeout_s=0)


@pytest.mark.rule("SH-17")
def test_it_is_said_at_once_that_a_folder_is_waited_for_and_who_holds_it(
    data: DataFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rebalanser.shiva")
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(data.lock,)
    ) as holder:
        with pytest.raises(UnusableFolder):
            DataFolder.open(data.path, timeout_s=3 * module._POLL_S)
        holder.communicate(b"")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("waiting up to 0.15 s until the data folder")
    assert "action=folder_busy" in line
    assert f"held_by={holder.pid}" in line


@pytest.mark.parametrize("content", ["", "{", "[]", '{"lineage": "x"}', '{"lineage": "x", "number": "y"}'])
def test_a_damaged_identity_is_never_guessed(folder: Path, content: str) -> None:
    DataFolder.open(folder).close()
    (folder / "identity.json").write_text(content)
    with pytest.raises(UnusableFolder, match="is damaged"):
        DataFolder.open(folder)
    (folder / "identity.json").unlink()
    DataFolder.open(folder, timeout_s=0).close()


@pytest.mark.rule("SH-5", "SH-16")
@pytest.mark.usefixtures("permissions_count")
def test_whatever_an_application_left_in_its_folder_is_removed_and_nothing_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    with DataFolder.open(tmp_path / "data") as data:
        own = data.data_of(APP)
        for mode in (0o500, 0o000):
            closed = own / f"{mode}" / "deep"
            closed.mkdir(parents=True)
            (closed / "file").touch()
            (closed / "link").symlink_to(outside)
            closed.chmod(mode)
            closed.parent.chmod(mode)
        data.drop(APP)
        files = data.files_of(APP, "0" * 64)
        files.parent.mkdir()
        files.symlink_to(outside)
        data.drop_files(APP, ["0" * 64])
        own.parent.rename(own.parent.with_name(f"{ASIDE_PREFIX}gone-x"))
        own.parent.with_name(f"{ASIDE_PREFIX}gone-y").symlink_to(outside)
    DataFolder.open(tmp_path / "data").close()
    assert not list((tmp_path / "data" / "applications").iterdir())
    assert outside.stat().st_mode & 0o777 == 0o500


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnusableFolder, match="cannot be used"):
        DataFolder.open(tmp_path / "file" / "data")


@pytest.mark.rule("SH-16")
@given(
    st.one_of(st.text(), st.sampled_from(["../x", "/etc", "..", ".", "", "a/b/c", "con", "a\0b", "\ud800"]))
)
def test_whatever_an_application_is_called_its_folder_is_a_child(name: str) -> None:
    made = folder_name(name)
    assert Path(os.path.normpath(f"/data/{made}")).parent == Path("/data")
    assert made.isascii()
    assert len(made) <= 150
    assert not made.startswith((".", ASIDE_PREFIX))


@pytest.mark.rule("SH-16")
def test_names_that_look_alike_have_folders_of_their_own() -> None:
    names = ["a/b/c", "a_b_c", "A/b/c", "a/b/c.", "a-b/c", f"{'a' * 200}1", f"{'a' * 200}2"]
    assert len({folder_name(name).casefold() for name in names}) == len(names)


@pytest.mark.rule("SH-5")
def test_files_are_here_from_storing_to_dropping(data: DataFolder, packed: Packed) -> None:
    assert data.stored_manifest(APP, packed.sha256) is None
    assert data.unpack(APP, packed.archive, packed.sha256) == packed.manifest
    assert data.stored_manifest(APP, packed.sha256) == packed.manifest
    (data.data_of(APP) / "own").write_text("its own")
    data.drop_files(APP, [packed.sha256])
    assert data.stored_manifest(APP, packed.sha256) == packed.manifest
    data.drop_files(APP)
    assert data.stored_manifest(APP, packed.sha256) is None
    assert (data.data_of(APP) / "own").read_text() == "its own"
    assert data.drop(APP)
    assert not data.drop(APP)
    data.unpack(OTHER, packed.archive, packed.sha256)
    data.drop_files(OTHER)
    assert not list((data.path / "applications").iterdir())


@pytest.mark.rule("SH-5")
def test_data_that_a_stop_keeps_stays_until_a_stop_does_not_keep_it(folder: Path, packed: Packed) -> None:
    with DataFolder.open(folder) as data:
        data.unpack(APP, packed.archive, packed.sha256)
        data.unpack(OTHER, packed.archive, packed.sha256)
        (data.data_of(APP) / "own").write_text("its own")
        data.drop(APP, keep_data=True)
        data.drop(OTHER, keep_data=True)
        assert data.stored_manifest(APP, packed.sha256) is None
        assert [left.name for left in (folder / "applications").iterdir()] == [folder_name(str(APP))]
    with DataFolder.open(folder) as data:
        assert not data.leftovers([])
        data.unpack(APP, packed.archive, packed.sha256)
        data.drop(APP, keep_data=None)
        assert (data.data_of(APP) / "own").read_text() == "its own"
    with DataFolder.open(folder) as data:
        assert data.leftovers([]), "it has run again, so only a stop can keep its data once more"
        data.drop(APP, keep_data=None)
        assert not list((folder / "applications").iterdir())


@pytest.mark.rule("SH-28")
def test_replicas_share_their_files_and_have_data_output_and_locks_of_their_own(
    data: DataFolder, packed: Packed
) -> None:
    second = APP.numbered(1)
    data.unpack(second, packed.archive, packed.sha256)
    assert data.files_of(second, packed.sha256) == data.files_of(APP, packed.sha256)
    for own in (data.data_of, data.output_of, data.lock_of):
        assert own(second) != own(APP)
        assert own(second) != own(APP.numbered(2))
    data.output_of(second).write_text("one\ntwo\n")
    assert list(tail(data.path, second)) == ["one", "two"]
    with pytest.raises(FixConfiguration, match=f"no output of {APP.numbered(3)} is kept"):
        list(tail(data.path, APP.numbered(3)))
    (data.data_of(second) / "kept").write_text("")
    data.drop(APP, keep_data=True)
    assert (data.data_of(second) / "kept").exists()
    data.drop(APP)
    assert not (data.data_of(second) / "kept").exists()


@pytest.mark.rule("SH-28")
def test_a_lock_file_goes_with_its_replica_unless_a_process_holds_it(data: DataFolder) -> None:
    free, held = data.lock_of(APP.numbered(1)), data.lock_of(APP.numbered(2))
    other = data.lock_of(OTHER)
    locks = [supervisor_shim._lock(str(each)) for each in (free, held, other)]
    os.close(locks[0])
    data.drop_files(APP)
    assert set(held.parent.iterdir()) == {held, other}
    os.close(locks[1])
    os.close(locks[2])
    data.drop(APP)
    assert list(held.parent.iterdir()) == [other]


@pytest.mark.rule("SH-28")
@pytest.mark.parametrize("made_anew", [False, True])
def test_a_lock_that_is_removed_while_a_job_takes_it_is_not_taken_for_held(
    data: DataFolder, monkeypatch: pytest.MonkeyPatch, *, made_anew: bool
) -> None:
    path = data.lock_of(APP)
    open_file, opened = os.open, list[int]()

    def open_and_remove(*arguments: Any) -> int:
        opened.append(open_file(*arguments))
        if len(opened) == 1:
            monkeypatch.setattr(os, "open", open_file)
            data.drop(APP)
            if made_anew:
                path.touch()
        return opened[-1]

    monkeypatch.setattr(os, "open", open_and_remove)
    lock = supervisor_shim._lock(str(path))
    assert lock is not None
    assert os.path.samestat(os.fstat(lock), path.stat())
    with pytest.raises(BlockingIOError):
        supervisor_shim._lock(str(path))
    os.close(lock)


def test_files_that_are_no_longer_as_they_were_are_not_taken(data: DataFolder, packed: Packed) -> None:
    data.unpack(APP, packed.archive, packed.sha256)
    (data.files_of(APP, packed.sha256) / "shiva.json").write_text("{}")
    assert data.stored_manifest(APP, packed.sha256) is None


def test_only_what_a_worker_still_knows_is_kept(folder: Path, packed: Packed) -> None:
    with DataFolder.open(folder) as data:
        for application in (APP, OTHER):
            data.unpack(application, packed.archive, packed.sha256)
    late = ApplicationId("t", "c", "late")
    with DataFolder.open(folder) as data:
        data.unpack(late, packed.archive, packed.sha256)
        (leftover,) = data.leftovers([OTHER])
        data.drop_leftover(leftover)
        assert data.stored_manifest(APP, packed.sha256) is None
        assert data.stored_manifest(OTHER, packed.sha256) == packed.manifest
        assert data.stored_manifest(late, packed.sha256) == packed.manifest


@pytest.mark.rule("SH-16")
def test_what_a_crash_left_is_gone_after_the_next_opening(folder: Path, packed: Packed) -> None:
    with DataFolder.open(folder) as data:
        data.unpack(APP, packed.archive, packed.sha256)
        files = data.files_of(APP, packed.sha256)
        (folder / "archives").mkdir()
        (folder / "archives" / "part-1").write_text("half an archive of an earlier version")
        for left in (files.parent / f"{ASIDE_PREFIX}x", folder / "applications" / f"{ASIDE_PREFIX}gone-y"):
            (left / "deep").mkdir(parents=True)
        (data.lock_of(APP)).touch()
    with DataFolder.open(folder) as data:
        assert data.stored_manifest(APP, packed.sha256) == packed.manifest
        assert not list(folder.rglob(f"{ASIDE_PREFIX}*"))
        assert not (folder / "archives").exists()
        assert not list((folder / "locks").iterdir())


@pytest.mark.rule("SH-16")
def test_after_a_reboot_unpacked_files_are_not_trusted(folder: Path, packed: Packed) -> None:
    with DataFolder.open(folder) as data:
        data.unpack(APP, packed.archive, packed.sha256)
        (data.data_of(APP) / "own").write_text("its own")
    identity = json.loads((folder / "identity.json").read_text())
    (folder / "identity.json").write_text(json.dumps({**identity, "boot_id": "another"}))
    with DataFolder.open(folder) as data:
        assert data.stored_manifest(APP, packed.sha256) is None
        assert (data.data_of(APP) / "own").read_text() == "its own"


@pytest.mark.rule("SH-17")
def test_output_of_stopped_applications_is_kept_boundedly(
    data: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_LOGS", 2)
    stopped = [ApplicationId("t", "c", f"app{number}") for number in range(5)]
    for age, application in enumerate([APP, *stopped]):
        data.data_of(application)
        os.utime(data.output_of(application).parent, (1000 - age, 1000 - age))
    for application in stopped:
        data.drop(application)
    data.forget_old_output()
    kept = {folder.name for folder in (data.path / "logs").iterdir()}
    assert kept == {folder_name(str(application)) for application in (APP, *stopped[:2])}
