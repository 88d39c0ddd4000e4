"""The parts of archives, kept on a worker's disk from when they are read until they are put together."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from rebalanser.applications.data_folder import folder_name
from rebalanser.errors import InvalidArchive
from rebalanser.shiva.types import ApplicationId, Archive
from rebalanser_kafka.shiva.wire import PartKey


class PartsMissing(InvalidArchive):
    """Parts of an archive are not there, or not yet."""


class PartStore:
    """Files named by archive and number. One thread adds and drops, another may put together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, key: PartKey, value: bytes | None) -> None:
        """Keep a part as it was read last; a tombstone removes it."""
        file = self._folder_of(key.application, key.sha256) / str(key.number)
        if value is None:
            file.unlink(missing_ok=True)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".new")
        part.write_bytes(value)
        part.replace(file)

    def assembled(self, application: ApplicationId, archive: Archive) -> bytes:
        """The whole archive.

        Raises:
            PartsMissing: a part is missing.
            InvalidArchive: the parts do not give the archive's sha256.
        """
        folder = self._folder_of(application, archive.sha256)
        files = [folder / str(number) for number in range(archive.parts)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise PartsMissing(
                f"{len(missing)} of the archive's {archive.parts} parts are missing, first part {missing[0]}"
            )
        sizes = [file.stat().st_size for file in files]
        if sum(sizes) != archive.size_bytes:
            raise InvalidArchive(f"the archive's parts have {sum(sizes)} bytes, not {archive.size_bytes}")
        whole = b"".join(file.read_bytes() for file in files)
        if hashlib.sha256(whole).hexdigest() != archive.sha256:
            raise InvalidArchive("the archive's parts do not give its sha256")
        return whole

    def drop(self, application: ApplicationId, sha256: str) -> None:
        """Forget the parts of an application's archive."""
        shutil.rmtree(self._folder_of(application, sha256), ignore_errors=True)

    def _folder_of(self, application: ApplicationId, sha256: str) -> Path:
        return self._folder / folder_name(str(application)) / sha256
