"""The folder of one worker: its identity, and the files, locks and output of its applications.

::

    lock              held by the worker's process, and by the shim of its processes until all have ended
    worker            locked by the worker's process alone
    identity.json     the worker's lineage and incarnation, and the boot and the folder that they hold for
    applications/     one folder for each application: its unpacked files, a folder for the data of each
                      replica, and the file ``kept`` while it is stopped and its data stays
    logs/             one folder for each application: what it printed, with one for each further replica
    locks/            one file for each replica of an application, locked while a process of it lives

An application's folder is named by its id, made safe, and by a hash of the id: whatever the id is, the folder
is a direct child of its parent, and no two ids share one (SH-16).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import signal
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, Self

from tenacity import Retrying, retry_if_exception_type, retry_if_result, stop_after_delay, wait_fixed

from rebalanser.boot_id import boot_id
from rebalanser.core.shiva.archives import DEFAULT_LIMITS, MANIFEST_NAME, ArchiveLimits
from rebalanser.core.shiva.types import ApplicationId, Incarnation
from rebalanser.errors import InternalError, InvalidManifest, UnusableFolder
from rebalanser.runtime import output_logger
from rebalanser.runtime.logs import get_logger
from rebalanser.runtime.supervisor_shim import is_file_at
from rebalanser.shiva.archives import ASIDE_PREFIX, remove_folder, unpack
from rebalanser.shiva.manifest import Manifest, parse_manifest

OPEN_TIMEOUT_S: Final = 30.0
"""Maximum seconds to wait for an earlier worker, or for its processes beyond their stop timeouts."""
KEPT_LOGS: Final = 100
"""Maximum stopped applications whose output is kept; the oldest output goes first."""
_POLL_S: Final = 0.05
_log = get_logger("rebalanser.shiva")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")
_SHOWN_CHARS: Final = 120
_HASH_CHARS: Final = 24
_OUTPUT: Final = "output.log"
_KEPT: Final = "kept"


def folder_name(application: str) -> str:
    """Return the name of an application's folder: a safe one, and another for each id (SH-16)."""
    return f"{_UNSAFE.sub('_', application)[:_SHOWN_CHARS]}-{_digest(application)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_HASH_CHARS]


def output_file(data_folder: Path, application: ApplicationId) -> Path:
    """Return the file with the newest output of an application, in a worker's data folder."""
    folder = data_folder / "logs" / folder_name(str(application.whole))
    return (folder / f"replica-{application.replica}" if application.replica else folder) / _OUTPUT


class DataFolder:
    """A worker's folder, locked for this process. Use ``open``; close it, or leave its ``with`` block.

    Opening proves that nothing of an earlier worker in it runs any more, neither the worker itself nor a
    process that it started, and then counts one incarnation further: so a greater incarnation of a lineage
    proves that the earlier one has ended with all that it ran (SH-13). After a reboot, on another host or in
    a copy of the folder it begins a new lineage, which proves nothing of the old one.
    """

    def __init__(self, path: Path, lock: int, worker_lock: int, incarnation: Incarnation) -> None:
        self.path: Final = path
        self.incarnation: Final = incarnation
        """Identity of this worker: the folder's lineage, and the number of times that it was opened."""
        self._lock: int | None = lock
        self._worker_lock = worker_lock
        self._locked: dict[ApplicationId, set[ApplicationId]] = {}
        """Replicas whose lock files were made, by their applications."""
        self._found = frozenset(folder.name for folder in (path / "applications").iterdir())

    @classmethod
    def open(cls, path: Path, timeout_s: float = OPEN_TIMEOUT_S) -> Self:
        """Open a folder, made if it is missing, once nothing of an earlier worker in it runs any more.

        Waits at most ``timeout_s`` for an earlier worker to end, and as much plus their longest stop timeout
        for what it started; what has outlived both that worker and its shim is killed.

        Raises:
            UnusableFolder: another worker uses it, or it cannot be written.
        """
        path = path.absolute()
        try:
            for name in ("applications", "logs", "locks"):
                (path / name).mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as failing:
                worker_lock = _open_lock(path / "worker", failing)
                _wait_for_lock(worker_lock, path, lambda: timeout_s)
                lock = _open_lock(path / "lock", failing)
                _wait_for_lock(lock, path, lambda: timeout_s + _longest_stop_s(path))
                _end_leftovers(path / "locks", timeout_s)
                same_boot, incarnation = _count_further(path / "identity.json")
                _clean(path, same_boot)
                failing.pop_all()
        except OSError as error:
            raise UnusableFolder(f"the data folder {path} cannot be used: {error}") from error
        return cls(path, lock, worker_lock, incarnation)

    @property
    def lock(self) -> int:
        """Descriptor of the folder's lock; a process that inherits it keeps the folder from being opened.

        Raises:
            InternalError: the folder was closed.
        """
        if self._lock is None:
            raise InternalError("the data folder is closed")
        return self._lock

    def unpack(
        self,
        application: ApplicationId,
        archive: bytes,
        sha256: str,
        limits: ArchiveLimits = DEFAULT_LIMITS,
    ) -> Manifest:
        """Unpack an application's files to ``files_of``, checked, unless they are there; return the manifest.

        Raises:
            InvalidArchive: naming the entry that must not be unpacked.
            InvalidManifest: with every error of ``shiva.json``.
            OSError: the disk is full or fails.
        """
        stored = self.stored_manifest(application, sha256)
        return stored or unpack(archive, sha256, self.files_of(application, sha256), limits)

    def files_of(self, application: ApplicationId, sha256: str) -> Path:
        """Return the folder of an archive's unpacked files."""
        return self._folder_of(application) / f"files-{_digest(sha256)}"

    def stored_manifest(self, application: ApplicationId, sha256: str) -> Manifest | None:
        """Return the manifest of unpacked files; None if they are missing or were changed.

        Raises:
            OSError: the disk fails.
        """
        file = self.files_of(application, sha256) / MANIFEST_NAME
        with contextlib.suppress(FileNotFoundError, InvalidManifest):
            return parse_manifest(file.read_bytes())
        return None

    def data_of(self, application: ApplicationId) -> Path:
        """Return an application's folder for its own files, made if it is missing (``SHIVA_DATA``)."""
        folder = self._folder_of(application)
        data = folder / (f"data-{application.replica}" if application.replica else "data")
        data.mkdir(parents=True, exist_ok=True)
        (folder / _KEPT).unlink(missing_ok=True)
        return data

    def output_of(self, application: ApplicationId) -> Path:
        """Return the file for an application's output; its folder is made if it is missing."""
        file = output_file(self.path, application)
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def lock_of(self, application: ApplicationId) -> Path:
        """Return the file that is locked while a process of an application lives; see ``drop_files``."""
        self._locked.setdefault(application.whole, set()).add(application)
        return self.path / "locks" / folder_name(str(application))

    def _drop_locks(self, application: ApplicationId) -> None:
        """Remove the lock files of an application's replicas that no process holds.

        Each is removed while it is locked. A job that opens it before and locks it afterwards finds that the
        path does not name it any more, and makes another one.
        """
        replicas = self._locked.get(application.whole, set())
        for replica in tuple(replicas):
            path = self.path / "locks" / folder_name(str(replica))
            with contextlib.ExitStack() as opened, contextlib.suppress(FileNotFoundError, BlockingIOError):
                lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                opened.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_file_at(path, os.fstat(lock)):
                    path.unlink()
                    replicas.discard(replica)

    def drop_files(self, application: ApplicationId, kept: Collection[str] = ()) -> None:
        """Remove an application's unpacked files but those of the archives of these sha256; its data stays.

        No process may use what is removed any more. Locks that no process holds are removed too.

        Raises:
            OSError: they cannot be removed.
        """
        self._drop_locks(application)
        folder = self._folder_of(application)
        for files in set(folder.glob("files-*")) - {self.files_of(application, sha256) for sha256 in kept}:
            remove_folder(files)
        with contextlib.suppress(OSError):
            folder.rmdir()

    def drop(self, application: ApplicationId, *, keep_data: bool | None = False) -> bool:
        """Remove all files of an application; its output is kept, and its data if ``keep_data`` (SH-5).

        Data that is kept stays until a stop does not keep it. With None it stays only if it is kept already.
        Return True if there was anything.

        Raises:
            OSError: they cannot be removed.
        """
        self._drop_locks(application)
        folder = self._folder_of(application)
        if not os.path.lexists(folder):
            return False
        if keep_data is None:
            keep_data = (folder / _KEPT).exists()
        if not (keep_data and any(folder.glob("data*"))):
            remove_folder(folder)
        else:
            (folder / _KEPT).touch()
            self.drop_files(application)
        return True

    def found(self, applications: Collection[ApplicationId]) -> frozenset[ApplicationId]:
        """Return those of the applications whose folders were here at the opening."""
        return frozenset(a for a in applications if folder_name(str(a)) in self._found)

    def leftovers(self, applications: Collection[ApplicationId]) -> frozenset[str]:
        """Return the folders of all other applications that were here at the opening; see ``drop_leftover``.

        A worker that was away does not know those applications any more.
        """
        unknown = self._found - {folder_name(str(application)) for application in applications}
        return frozenset(
            folder for folder in unknown if not (self.path / "applications" / folder / _KEPT).exists()
        )

    def drop_leftover(self, folder: str) -> None:
        """Remove a folder of ``leftovers``.

        Raises:
            OSError: it cannot be removed.
        """
        remove_folder(self.path / "applications" / folder)

    def forget_old_output(self) -> None:
        """Remove the output of applications that are no longer here, but for the last ones (SH-5).

        Raises:
            OSError: it cannot be removed.
        """
        outputs = list((self.path / "logs").iterdir())
        here = {folder.name for folder in (self.path / "applications").iterdir()}
        stopped = [folder for folder in outputs if folder.name not in here]
        stopped.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in stopped[KEPT_LOGS:]:
            remove_folder(folder)

    def _folder_of(self, application: ApplicationId) -> Path:
        return self.path / "applications" / folder_name(str(application.whole))

    def close(self) -> None:
        """Release the folder; a shim that inherited its lock still holds it. Closing twice does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            os.close(self._worker_lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _open_lock(file: Path, failing: contextlib.ExitStack) -> int:
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    failing.callback(os.close, lock)
    return lock


def _longest_stop_s(path: Path) -> float:
    """Return the longest stop timeout of the stored manifests, in seconds."""
    longest_s = 0.0
    for file in path.glob(f"applications/*/files-*/{MANIFEST_NAME}"):
        with contextlib.suppress(OSError, InvalidManifest):
            longest_s = max(longest_s, parse_manifest(file.read_bytes()).stop_timeout_s)
    return longest_s


def _wait_for_lock(lock: int, path: Path, limit_s: Callable[[], float]) -> None:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    timeout_s = limit_s()
    attempts = Retrying(
        retry=retry_if_exception_type(BlockingIOError),
        stop=stop_after_delay(timeout_s),
        wait=wait_fixed(_POLL_S),
        before_sleep=lambda state: _tell_wait(path, timeout_s) if state.attempt_number == 1 else None,
        reraise=True,
    )
    try:
        attempts(fcntl.flock, lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UnusableFolder(
            f"another worker uses the data folder {path}, or processes of one still run after "
            f"{timeout_s:g} s: give each worker a folder of its own"
        ) from error


def _tell_wait(path: Path, timeout_s: float) -> None:
    """Log what the opening waits for, and which processes hold it."""
    holders = ", ".join(map(str, sorted(set(_holders(path, only="lock")) - {os.getpid()})))
    _log.warning(
        f"waiting up to {timeout_s:g} s until the data folder {path} is free",
        action="folder_busy",
        held_by=holders or "unknown",
    )


def _end_leftovers(locks: Path, timeout_s: float) -> None:
    """Kill what holds an application's lock although its worker and that worker's shim are gone.

    Not a logger: it writes the last words down and then ends by itself.
    """

    def kill_holders() -> list[int]:
        holders = list(_holders(locks))
        for pid in holders:
            with contextlib.suppress(OSError):
                if os.fsencode(output_logger.__file__) not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        return holders

    attempts = Retrying(
        retry=retry_if_result(bool),
        stop=stop_after_delay(timeout_s),
        wait=wait_fixed(_POLL_S),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
    )
    left = attempts(kill_holders)
    if left:
        raise UnusableFolder(f"processes {left} of an earlier worker still run after {timeout_s:g} s")
    for file in locks.iterdir():
        file.unlink()


def _holders(folder: Path, only: str = "") -> Iterator[int]:
    """Yield the processes that have a file of the folder open, as far as this user may know."""
    inside = f"{folder.resolve()}/{only}"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()).startswith(inside) for file in (process / "fd").iterdir()):
                yield int(process.name)


def _count_further(file: Path) -> tuple[bool, Incarnation]:
    """Store the next incarnation; return it, after True unless the host was booted since the last one.

    A lock proves something only on one boot of one host. After a reboot, on another host and in a copy of the
    folder a new lineage begins: it proves nothing of the last one, which a leader waits for.

    Raises:
        UnusableFolder: the file is not as it was written.
        OSError: it cannot be written.
    """
    here = {"boot_id": boot_id(), "inode": file.parent.stat().st_ino}
    lineage, number, same_boot = secrets.token_hex(8), 0, True
    try:
        known = json.loads(file.read_text())
        last_lineage, last_number = str(known["lineage"]), int(known["number"])
        same_boot = known["boot_id"] == here["boot_id"]
        if same_boot and known["inode"] == here["inode"]:
            lineage, number = last_lineage, last_number
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableFolder(
            f"{file} is damaged: remove it, and the worker begins as a new one once the leader has "
            "removed the old one"
        ) from error
    _write_durably(file, json.dumps({"lineage": lineage, "number": number + 1, **here}))
    return same_boot, Incarnation(lineage, number + 1)


def _write_durably(file: Path, text: str) -> None:
    """Write and sync a file: an announced incarnation must never come again, even after a power failure."""
    aside = file.with_name(f"{ASIDE_PREFIX}{file.name}")
    with aside.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    aside.replace(file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _clean(path: Path, same_boot: bool) -> None:
    """Remove what a crash left half done. After a reboot unpacked files may be torn: they go too."""
    doomed = [path / "archives"]  # of an earlier version, which kept archives there on their way in
    doomed += [*path.glob(f"*/{ASIDE_PREFIX}*"), *path.glob(f"applications/*/{ASIDE_PREFIX}*")]
    if not same_boot:
        doomed += path.glob("applications/*/files-*")
    for folder in doomed:
        remove_folder(folder)
