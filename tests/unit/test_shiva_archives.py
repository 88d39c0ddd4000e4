"""Archives that client and worker both refuse, and that a refusal writes nothing (SH-16)."""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import socket
import stat
import struct
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rebalanser.core.shiva.archives import (
    MANIFEST_NAME,
    ArchiveLimits,
    Entry,
    EntryKind,
    check_listing,
)
from rebalanser.errors import InvalidArchive, InvalidManifest
from rebalanser.shiva import archives
from rebalanser.shiva.archives import ASIDE_PREFIX, Packed, inspect, pack, remove_folder, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.rule("SH-16")

MIB = 1024 * 1024
MANIFEST = b'{"command": ["true"]}'
LISTED = Entry(MANIFEST_NAME, size_bytes=10, packed_bytes=10)


def listing_of(*names: str) -> list[Entry]:
    return [LISTED, *(Entry(name) for name in names)]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/etc/passwd", "absolute"),
        ("//x", "absolute"),
        ("..", "part '..'"),
        ("../x", "part '..'"),
        ("a/../../x", "part '..'"),
        ("a/..", "part '..'"),
        ("./x", "part '.'"),
        ("a/./x", "part '.'"),
        ("", "empty"),
        ("a//x", "empty"),
        ("a/", "empty"),
        ("C:/x", "drive letter"),
        ("c:x", "drive letter"),
        ("a\\..\\x", "backslash"),
        ("a\x00.txt", "control character"),
        ("a\nb", "control character"),
        ("a\x7fb", "control character"),
        ("a\x9bb", "control character"),
        ("a\ud800b", "half a character"),
        ("a" * 256, "part of over 255"),
        ("ä" * 128, "part of over 255"),
        ("/".join(["a" * 100] * 11), "name of over 1024"),
    ],
)
def test_names_that_lead_out_or_astray_are_refused(name: str, why: str) -> None:
    with pytest.raises(InvalidArchive, match=why) as refused:
        check_listing(listing_of(name))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "name", ["a", ".env", "...", "a b", "ä/ß", "x/y/z.tar.gz", "aux.c", "ab:c", "a" * 255]
)
def test_odd_names_that_do_no_harm_are_taken(name: str) -> None:
    check_listing(listing_of(name))


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("readme", "README"), "collides"),
        (("A/x", "a/y"), "collides"),
        (("straße", "STRASSE"), "collides"),
        (("caf\u00e9", "cafe\u0301"), "collides"),
        (("x", "x"), "twice"),
        (("x", "x/y"), "a file and a folder"),
        (("x/y", "x"), "a file and a folder"),
        (("X/y", "x"), "collides"),
        (("Shiva.json",), "collides"),
    ],
)
def test_names_that_are_one_place_on_some_filesystem_are_refused(names: tuple[str, ...], why: str) -> None:
    with pytest.raises(InvalidArchive, match=why):
        check_listing(listing_of(*names))


def test_a_folder_may_be_listed_once_before_or_after_what_is_in_it() -> None:
    folder = Entry("x/", EntryKind.FOLDER)
    check_listing([LISTED, folder, Entry("x/y")])
    check_listing([LISTED, Entry("x/y"), folder])
    with pytest.raises(InvalidArchive, match="twice"):
        check_listing([LISTED, folder, folder])


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (Entry("x", EntryKind.LINK), "is a link"),
        (Entry("x", EntryKind.SPECIAL), "neither a file nor a folder"),
        (Entry("x", encrypted=True), "encrypted"),
        (Entry("x", method="method 14"), "compressed by method 14"),
        (Entry("x/", EntryKind.FOLDER, size_bytes=1), "folder with content"),
        (Entry("x", size_bytes=-1), "negative"),
        (Entry("x", size_bytes=1001, packed_bytes=1001), "1,001 bytes and at most 1,000"),
        (Entry("x", size_bytes=900, packed_bytes=89), "from 89 to 900 bytes, more than 10 times"),
    ],
)
def test_entries_that_are_no_plain_files_or_too_big_are_refused(entry: Entry, why: str) -> None:
    limits = ArchiveLimits(entry_bytes=1000, expansion_ratio=10, expansion_free_bytes=100)
    with pytest.raises(InvalidArchive, match=why) as refused:
        check_listing([LISTED, entry], limits)
    assert "'x" in str(refused.value)


def test_all_entries_together_have_limits_too() -> None:
    many = [LISTED, *(Entry(f"x{number}", size_bytes=90, packed_bytes=5) for number in range(9))]
    check_listing(many, ArchiveLimits(total_bytes=820, entries=10, expansion_free_bytes=820))
    with pytest.raises(InvalidArchive, match="'x8' brings the archive over 819 bytes"):
        check_listing(many, ArchiveLimits(total_bytes=819))
    with pytest.raises(InvalidArchive, match="10 entries and at most 9"):
        check_listing(many, ArchiveLimits(entries=9))
    with pytest.raises(InvalidArchive, match="from 55 to 820 bytes"):
        check_listing(many, ArchiveLimits(expansion_free_bytes=100, expansion_ratio=14))


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([Entry("x")], "no file shiva.json at the archive's root"),
        ([Entry("x/shiva.json")], "no file shiva.json at the archive's root"),
        ([Entry("shiva.json", EntryKind.FOLDER)], "no file shiva.json at the archive's root"),
        ([Entry("shiva.json", size_bytes=65_537, packed_bytes=65_537)], "65,537 bytes and at most 65,536"),
    ],
)
def test_a_manifest_has_to_be_there(entries: list[Entry], why: str) -> None:
    with pytest.raises(InvalidArchive, match=why):
        check_listing(entries)


@given(st.lists(st.text("aA./\\\x00é:\u0301", max_size=8), max_size=4))
def test_whatever_is_taken_stays_within_its_folder(names: list[str]) -> None:
    try:
        check_listing(listing_of(*names))
    except InvalidArchive:
        return
    folder = Path("/data/application")
    for name in names:
        written = Path(os.path.normpath(folder / name))
        assert written.is_relative_to(folder)
        assert written != folder
    assert len({os.path.normpath(name) for name in names}) == len(names)


def zip_of(*entries: tuple[str | zipfile.ZipInfo, bytes], manifest: bytes = MANIFEST) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST_NAME, manifest)
        for name, content in entries:
            archive.writestr(name, content)
    return packed.getvalue()


def of_mode(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = mode << 16
    return info


def raw_name(name: str, replacement: bytes) -> bytes:
    """A zip whose entry has a name that no zip writer would give it."""
    assert len(name) == len(replacement)
    return zip_of((name, b"x")).replace(name.encode(), replacement)


def unicode_path(header: str, name: bytes, version: int = 1) -> bytes:
    """Return an Info-ZIP Unicode Path field that names the entry of the name ``header``."""
    content = struct.pack("<BL", version, zlib.crc32(header.encode())) + name
    return struct.pack("<HH", 0x7075, len(content)) + content


def with_fields(name: str, *fields: bytes) -> bytes:
    info = zipfile.ZipInfo(name)
    info.extra = b"".join(fields)
    return zip_of((info, b"" if name.endswith("/") else b"x"))


def overlapping() -> bytes:
    """Return a zip whose entry ``inner`` is read from within the content of ``outer``."""
    alone = zip_of(("inner", b"x"))
    start = alone.rindex(b"PK\x03\x04")
    outer = zipfile.ZipInfo("outer")
    packed = bytearray(zip_of((outer, alone[start : alone.index(b"PK\x01\x02")]), ("inner", b"x")))
    struct.pack_into("<I", packed, packed.rindex(b"PK\x01\x02") + 42, packed.index(b"outer") + len("outer"))
    return bytes(packed)


def with_method(method: int) -> bytes:
    packed = bytearray(zip_of(("marked", b"x" * 100)))
    struct.pack_into("<H", packed, packed.rindex(b"PK\x01\x02") + 10, method)
    return bytes(packed)


def with_flag(flag: int) -> bytes:
    packed = bytearray(zip_of(("marked", b"x" * 100)))
    struct.pack_into("<H", packed, packed.rindex(b"PK\x01\x02") + 8, flag)
    return bytes(packed)


def bomb(declared_bytes: int) -> bytes:
    """10 GB of zeros in some 10 MB, by one deflated block over and over; it says to be ``declared_bytes``."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = deflate.compress(bytes(MIB)) + deflate.flush(zlib.Z_FULL_FLUSH)
    content = block * 10_240 + deflate.flush()
    packed = bytearray(zip_of(("bomb", b"")))
    local = packed.rindex(b"PK\x03\x04")
    central = packed.index(b"PK\x01\x02", local)
    second = packed.rindex(b"PK\x01\x02")
    end = packed.rindex(b"PK\x05\x06")
    for place in (local + 18, second + 20):
        struct.pack_into("<II", packed, place, len(content), declared_bytes)
    data = local + 30 + len("bomb")
    struct.pack_into("<I", packed, end + 16, central - 2 + len(content))
    return bytes(packed[:data] + content + packed[central:])


def huge() -> bytes:
    """10 GB that the listing is honest about: it takes the long form of a size."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(MANIFEST_NAME, MANIFEST)
        archive.writestr("bomb", b"")
        archive.getinfo("bomb").file_size = 10 * 1024**3
    return packed.getvalue()


EVIL: dict[str, tuple[Callable[[], bytes], str]] = {
    "parent": (lambda: zip_of(("../x", b"x")), "'../x' has the part '..'"),
    "absolute": (lambda: zip_of(("/tmp/x", b"x")), "'/tmp/x' has an absolute name"),
    "drive": (lambda: zip_of(("C:/x", b"x")), "'C:/x' has a drive letter"),
    "backslash": (lambda: zip_of(("a\\x", b"x")), "backslash"),
    "nul": (lambda: raw_name("evilXname", b"evil\0name"), "'evil.x00name' has a control character"),
    "link": (lambda: zip_of((of_mode("x", stat.S_IFLNK | 0o777), b"/etc")), "'x' is a link"),
    "pipe": (lambda: zip_of((of_mode("x", stat.S_IFIFO), b"")), "'x' is neither a file nor a folder"),
    "device": (lambda: zip_of((of_mode("x", stat.S_IFBLK), b"")), "'x' is neither a file nor a folder"),
    "case": (lambda: zip_of(("x/Readme", b""), ("x/README", b"")), "'x/README' collides with 'x/Readme'"),
    "unicode": (lambda: zip_of(("\u00e9", b""), ("e\u0301", b"")), "collides"),
    "prefix": (lambda: zip_of(("x", b""), ("x/y", b"")), "'x/y' makes 'x' a file and a folder"),
    "unicode path": (
        lambda: with_fields("a.txt", unicode_path("a.txt", b"../../x")),
        "'a.txt' has a Unicode Path field that differs",
    ),
    "absolute unicode path": (
        lambda: with_fields("a.txt", unicode_path("a.txt", b"/tmp/x")),
        "'a.txt' has a Unicode Path field that differs",
    ),
    "second unicode path": (
        lambda: with_fields("a.txt", unicode_path("a.txt", b"a.txt"), unicode_path("a.txt", b"b.txt")),
        "'a.txt' has a Unicode Path field that differs",
    ),
    "unicode path of another name": (
        lambda: with_fields("a.txt", unicode_path("b.txt", b"b.txt")),
        "'a.txt' has a Unicode Path field that differs",
    ),
    "unicode path of another version": (
        lambda: with_fields("a.txt", unicode_path("a.txt", b"a.txt", 2)),
        "'a.txt' has a Unicode Path field that differs",
    ),
    "empty unicode path": (
        lambda: with_fields("a.txt", unicode_path("a.txt", b"")),
        "'a.txt' has a Unicode Path field that differs|Empty unicode path",
    ),
    "short unicode path": (
        lambda: with_fields("a.txt", struct.pack("<HHB", 0x7075, 1, 1)),
        "'a.txt' has a Unicode Path field that differs|Corrupt unicode path",
    ),
    "unicode path that is no text": (
        lambda: with_fields("a.txt", unicode_path("a.txt", b"\xff")),
        "'a.txt' has a Unicode Path field that differs|Corrupt unicode path",
    ),
    "local name": (lambda: zip_of(("a.txt", b"x")).replace(b"a.txt", b"b.txt", 1), "File name in directory"),
    "overlap": (overlapping, "'inner' overlaps another entry|'outer' overlaps another entry"),
    "listing within": (
        lambda: zip_of((zipfile.ZipInfo("x"), b"")).replace(b"\0\0\0\0\x01\0\0\0x", b"\0\0\0\0\x01\0\x01\0x"),
        "'x' overlaps another entry or the listing",
    ),
    "encrypted": (lambda: with_flag(1), "'marked' is encrypted"),
    "lzma": (lambda: with_method(14), "'marked' is compressed by method 14"),
    "bomb": (lambda: bomb(2**31 - 1), "'bomb' expands to 2,147,483,647 bytes"),
    "dense bomb": (lambda: zip_of(("bomb", bytes(64 * MIB))), "more than 200 times"),
    "lying bomb": (lambda: bomb(10), "not a valid zip: Bad CRC-32"),
    "huge": (huge, "'bomb' expands to 10,737,418,240 bytes"),
    "many": (lambda: zip_of(*((f"{n}", b"") for n in range(10_000))), "10,001 entries and at most 10,000"),
    "no manifest": (lambda: zip_of().replace(b"shiva.json", b"other.json"), "no file shiva.json"),
    "no zip": (lambda: b"no zip at all", "the archive is not a zip"),
    "nothing": (lambda: b"", "the archive is not a zip"),
    "cut off": (lambda: zip_of(("x", os.urandom(9999)))[5000:], "not a valid zip"),
    "zip64": (lambda: zip_of()[:-22] + b"PK\x06\x07" + bytes(16) + zip_of()[-22:], "zip64"),
    "damaged": (lambda: zip_of(("x", b"y" * 99)).replace(b"PK\x03\x04", b"PK\x03\x05"), "not a valid zip"),
}


@pytest.mark.parametrize("kind", EVIL)
def test_client_and_worker_refuse_every_evil_archive_and_the_folder_stays_as_it_was(
    tmp_path: Path, kind: str
) -> None:
    make, why = EVIL[kind]
    archive = make()
    sent = tmp_path / "evil.zip"
    sent.write_bytes(archive)
    worker = tmp_path / "worker"
    (worker / "into").mkdir(parents=True)
    (worker / "into" / "kept").write_text("as it was")
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidArchive, match=why):
        unpack(archive, hashlib.sha256(archive).hexdigest(), worker / "into")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 128 * 1024
    assert sorted(worker.rglob("*")) == [worker / "into", worker / "into" / "kept"]
    assert sorted(tmp_path.iterdir()) == [sent, worker]
    with pytest.raises(InvalidArchive, match=why):
        pack(sent)


def test_an_archive_beyond_its_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    source = tmp_path / "app.zip"
    with source.open("wb") as file:
        file.truncate(10 * 1024**3)
    with pytest.raises(InvalidArchive, match="10,737,418,240 bytes and at most 268,435,456"):
        pack(source)


def test_a_zip_that_lists_more_than_it_says_is_refused_before_its_listing_is_read() -> None:
    packed = bytearray(zip_of(*((f"{n}", b"") for n in range(20))))
    struct.pack_into("<HH", packed, packed.rindex(b"PK\x05\x06") + 8, 1, 1)
    with pytest.raises(InvalidArchive, match="21 entries and at most 20"):
        inspect(bytes(packed), ArchiveLimits(entries=20))
    assert inspect(bytes(packed), ArchiveLimits(entries=21)).entries == 21


@pytest.mark.parametrize("name", ["a.txt", "deep/ünï", "日本/"])
def test_a_unicode_path_that_repeats_the_name_is_accepted(tmp_path: Path, name: str) -> None:
    other_field = struct.pack("<HH", 0x7855, 2) + b"ab"
    packed = inspect(with_fields(name, other_field, unicode_path(name, name.encode()), other_field))
    unpack(packed.archive, packed.sha256, tmp_path / "into")
    assert (tmp_path / "into" / name).exists()


def test_an_entry_that_zipfile_reads_under_another_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = zip_of(("a.txt", b"x"))
    listing_of_zip = zipfile.ZipFile.infolist

    def renamed(opened: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
        listing = listing_of_zip(opened)
        listing[-1].filename = "/tmp/b.txt"
        return listing

    monkeypatch.setattr(zipfile.ZipFile, "infolist", renamed)
    with pytest.raises(InvalidArchive, match=r"'a.txt' is also named '/tmp/b.txt'"):
        inspect(archive)
    with pytest.raises(InvalidArchive, match=r"'a.txt' is also named '/tmp/b.txt'"):
        unpack(archive, hashlib.sha256(archive).hexdigest(), tmp_path / "into")


def unchecked_listing(
    opened: zipfile.ZipFile, _archive: bytes, _limits: ArchiveLimits
) -> list[archives._CheckedEntry]:
    return [archives._CheckedEntry(archives._entry_of(info), info) for info in opened.infolist()]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "..", "../x/", "{outside}/x", "a//x", "./x"])
def test_unpacking_writes_nothing_outside_even_if_names_are_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    worker, outside = tmp_path / "worker", tmp_path / "outside"
    outside.mkdir()
    archive = zip_of((name.format(outside=outside), b"x"))
    monkeypatch.setattr(archives, "_checked_listing", unchecked_listing)
    with pytest.raises(InvalidArchive, match="points outside its folder"):
        unpack(archive, hashlib.sha256(archive).hexdigest(), worker / "into")
    assert sorted(tmp_path.rglob("*")) == [outside, worker]


def test_unpacking_writes_under_the_header_name_even_if_it_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renamed(*arguments: Any) -> list[archives._CheckedEntry]:
        listing = unchecked_listing(*arguments)
        listing[-1].info.filename = str(tmp_path / "b.txt")
        return listing

    archive = with_fields("a.txt", unicode_path("a.txt", bytes(tmp_path / "b.txt")))
    monkeypatch.setattr(archives, "_checked_listing", renamed)
    unpack(archive, hashlib.sha256(archive).hexdigest(), tmp_path / "into")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.txt", "into", MANIFEST_NAME]


@pytest.mark.parametrize("name", ["deep/x", "deep/er/x", "deep", "deep/er/"])
def test_a_link_that_appears_while_unpacking_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    outside = tmp_path / "outside"
    (outside / "er").mkdir(parents=True)
    archive = zip_of((name, b"" if name.endswith("/") else b"x"))
    copy = archives._copy

    def copy_and_link(*arguments: Any) -> None:
        link = tmp_path / f"{ASIDE_PREFIX}into" / "deep"
        link.symlink_to(outside / "x" if name == "deep" else outside)
        copy(*arguments)

    monkeypatch.setattr(archives, "_copy", copy_and_link)
    with pytest.raises(OSError, match="deep"):
        unpack(archive, hashlib.sha256(archive).hexdigest(), tmp_path / "into")
    assert sorted(tmp_path.rglob("*")) == [outside, outside / "er"]


@pytest.fixture
def application(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "empty").mkdir(parents=True)
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / MANIFEST_NAME).write_text('{"command": ["./run"], "tags": ["gpu"], "version": "7"}')
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o755)
    (folder / "deep" / "er" / "ünï").write_bytes(bytes(range(256)) * 1000)
    return folder


def tree(folder: Path) -> dict[str, tuple[bytes | None, bool]]:
    return {
        path.relative_to(folder).as_posix(): (
            path.read_bytes() if path.is_file() else None,
            path.is_file() and os.access(path, os.X_OK),
        )
        for path in folder.rglob("*")
    }


def test_what_was_packed_is_unpacked_the_same(application: Path, tmp_path: Path) -> None:
    packed = pack(application)
    assert packed.tags == {"gpu"}
    assert packed.size_bytes == len(packed.archive) < packed.unpacked_bytes
    into = tmp_path / "data" / "into"
    manifest = unpack(packed.archive, packed.sha256, into)
    assert manifest == packed.manifest
    assert manifest.version == "7"
    assert tree(into) == tree(application)
    assert [path.name for path in into.parent.iterdir()] == ["into"]


def test_the_same_folder_packs_to_the_same_archive_whenever_it_was_written(
    application: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    unpack(pack(application).archive, pack(application).sha256, copy)
    os.utime(copy / "run", (1, 1))
    (copy / "shiva.json").chmod(0o600)
    assert pack(copy).sha256 == pack(application).sha256
    (copy / "run").chmod(0o644)
    assert pack(copy).sha256 != pack(application).sha256


def test_a_ready_zip_is_taken_as_it_is(tmp_path: Path) -> None:
    archive = zip_of(("x", b"y"))
    (tmp_path / "app.zip").write_bytes(archive)
    assert pack(tmp_path / "app.zip").archive == archive
    commented = archive[:-2] + struct.pack("<H", 4) + b"note"
    assert inspect(commented).entries == 2


@pytest.mark.rule("SH-4", "SH-16")
@pytest.mark.parametrize("as_zip", [False, True])
def test_an_environment_is_added_to_the_manifest_in_the_archive(
    application: Path, tmp_path: Path, as_zip: bool
) -> None:
    before = pack(application)
    source = application
    if as_zip:
        source = tmp_path / "ready.zip"
        source.write_bytes(before.archive)
    packed = pack(source, environment={"MORE": "a=b", "EMPTY": ""})
    expected = {**before.manifest.environment, "MORE": "a=b", "EMPTY": ""}
    assert packed.manifest == before.manifest.model_copy(update={"environment": expected})
    assert pack(application) == before
    for one, folder in ((before, tmp_path / "before"), (packed, tmp_path / "after")):
        unpack(one.archive, one.sha256, folder)
        (folder / MANIFEST_NAME).unlink()
    assert tree(tmp_path / "before") == tree(tmp_path / "after")


@pytest.mark.rule("SH-4", "SH-23")
@pytest.mark.parametrize("check", [{}, {"health_check": {"tcp": "h:1"}}], ids=["none", "tcp"])
def test_with_an_environment_the_manifest_has_no_field_that_it_had_not_before(
    tmp_path: Path, check: dict[str, object]
) -> None:
    """An earlier worker refuses fields that it does not know, also if they are null."""
    source, manifest = tmp_path / "source", {"command": ["./run"], **check}
    source.mkdir()
    (source / MANIFEST_NAME).write_text(json.dumps(manifest))
    packed = pack(source, environment={"A": "b"})
    unpack(packed.archive, packed.sha256, tmp_path / "after")
    sent = json.loads((tmp_path / "after" / MANIFEST_NAME).read_text())
    assert sent == {**manifest, "environment": {"A": "b"}}


@pytest.mark.rule("SH-4")
@pytest.mark.parametrize("name", ["SHIVA_TOKEN", "1ST", "", "A B"])
def test_an_environment_that_no_manifest_may_have_is_refused(application: Path, name: str) -> None:
    with pytest.raises(InvalidManifest, match="environment"):
        pack(application, environment={name: "x"})


def test_a_folder_with_a_link_or_a_socket_is_refused(application: Path) -> None:
    (application / "link").symlink_to("run")
    with pytest.raises(InvalidArchive, match="'link' is a link"):
        pack(application)
    (application / "link").unlink()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(application / "socket"))
        with pytest.raises(InvalidArchive, match="'socket' is neither"):
            pack(application)


def test_a_folder_over_the_limits_is_refused_with_the_numbers(application: Path) -> None:
    with pytest.raises(InvalidArchive, match="5 entries and at most 4"):
        pack(application, ArchiveLimits(entries=4))
    with (application / "big").open("wb") as file:
        file.truncate(3 * 1024**3)
    with pytest.raises(InvalidArchive, match="'big' expands to 3,221,225,472 bytes"):
        pack(application)


def test_an_archive_of_another_sha256_is_refused(tmp_path: Path) -> None:
    archive = zip_of()
    with pytest.raises(InvalidArchive, match="sha256"):
        unpack(archive, hashlib.sha256(archive + b"x").hexdigest(), tmp_path / "into")
    assert not list(tmp_path.iterdir())


def test_an_archive_of_a_bad_manifest_is_refused_and_nothing_written(tmp_path: Path) -> None:
    archive = zip_of(manifest=b'{"command": []}')
    with pytest.raises(InvalidManifest, match="command"):
        unpack(archive, hashlib.sha256(archive).hexdigest(), tmp_path / "into")
    assert not list(tmp_path.iterdir())


def test_what_a_crash_left_behind_does_not_get_into_the_folder(tmp_path: Path) -> None:
    packed = inspect(zip_of(("x", b"new")))
    left = tmp_path / f"{ASIDE_PREFIX}into"
    left.mkdir()
    (left / "torn").write_text("half a file")
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / "old").write_text("old")
    unpack(packed.archive, packed.sha256, tmp_path / "into")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["into", MANIFEST_NAME, "x"]
    remove_folder(tmp_path / "into")
    remove_folder(tmp_path / "into")
    assert not list(tmp_path.iterdir())


SOUND = zip_of(("run", b"#!/bin/sh\n" * 9), ("deep/er/file", bytes(range(256))), ("empty/", b""))


@given(st.data())
def test_a_damaged_archive_is_refused_or_holds_what_it_held(data: st.DataObject) -> None:
    damaged = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(SOUND) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = inspect(bytes(damaged[: data.draw(st.integers(len(SOUND) - 30, len(SOUND)))]))
    except (InvalidArchive, InvalidManifest):
        return
    assert found.manifest.command == ("true",)
    assert found.unpacked_bytes <= inspect(SOUND).unpacked_bytes


LIMITS = ArchiveLimits(
    archive_bytes=6000,
    entries=6,
    entry_bytes=1500,
    total_bytes=3000,
    expansion_ratio=20,
    expansion_free_bytes=500,
    part_bytes=20,
    path_bytes=40,
    manifest_bytes=100,
)
"""Limits that made-up archives often break, each of them."""
_PARTS = [
    "a",
    "b",
    "..",
    ".",
    "",
    "/",
    "A",
    "\u00e9",
    "e\u0301",
    "a" * 21,
    "C:",
    "\\",
    "\x00",
    "-",
    MANIFEST_NAME,
]
_MODES = [
    0,
    0o644,
    stat.S_IFREG | 0o755,
    stat.S_IFDIR | 0o755,
    stat.S_IFLNK | 0o777,
    stat.S_IFIFO,
    stat.S_IFCHR,
]
_METHODS = [
    zipfile.ZIP_STORED,
    zipfile.ZIP_DEFLATED,
    zipfile.ZIP_DEFLATED,
    zipfile.ZIP_BZIP2,
    zipfile.ZIP_LZMA,
]


@st.composite
def made_up(draw: st.DrawFn, escape: str) -> bytes:
    """Make an archive of a few entries, each of which may be as it should not be, and damage it, maybe.

    ``escape`` is a path outside; every way to name it is tried, nested archives and links to it as well.
    """
    made = io.BytesIO()
    names = st.lists(st.sampled_from(_PARTS), min_size=1, max_size=4).map("/".join)
    contents = st.one_of(
        st.binary(max_size=60),
        st.sampled_from([400, 1100, 1500, 1501]).map(bytes),
        st.sampled_from([SOUND, escape.encode(), MANIFEST, b"{}"]),
    )
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w") as archive:
        warnings.simplefilter("ignore", UserWarning)  # an entry that comes twice
        if draw(st.integers(0, 9)):
            archive.writestr(MANIFEST_NAME, draw(st.sampled_from([MANIFEST] * 4 + [b" " * 99 + MANIFEST])))
        for _ in range(draw(st.integers(1, 6))):
            name = f"{draw(st.sampled_from('abcdef'))}/{draw(st.integers(0, 3))}"
            info = zipfile.ZipInfo(name)
            match draw(st.sampled_from(["", "", "", "name", "method", "mode", "extra"])):
                case "name":
                    others = st.sampled_from([escape, "../up", "d/../../up", "d/../../../victim/keys"])
                    info.filename = draw(st.one_of(names, others))
                case "method":
                    info.compress_type = draw(st.sampled_from(_METHODS))
                case "mode":
                    info.external_attr = draw(st.sampled_from(_MODES)) << 16
                    info.create_system = draw(st.sampled_from([0, 3]))
                case "extra":
                    info.extra = b"".join(draw(st.lists(extra_fields(name, escape), max_size=2)))
            archive.writestr(info, draw(contents))
    damaged = bytearray(made.getvalue())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        place = draw(st.integers(1, min(len(damaged), 300)))
        damaged[-place] = draw(st.sampled_from([0, 1, 0x7F, 0xFF, ord("/"), ord(".")]))
    cut = draw(st.sampled_from([0] * 8 + [1, 22, 50]))
    return bytes(damaged[: len(damaged) - cut]) + draw(st.sampled_from([b""] * 8 + [b"PK", SOUND]))


def extra_fields(name: str, escape: str) -> st.SearchStrategy[bytes]:
    return st.one_of(
        st.sampled_from([name, escape, "../x", "a\x00b"]).map(
            lambda other: unicode_path(name, other.encode(errors="surrogatepass"))
        ),
        st.integers(0, 0xFFFF).map(lambda kind: struct.pack("<HH", kind, 3) + b"abc"),
    )


def everything(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    return {
        str(path.relative_to(folder)): (
            stat.S_IFMT(path.lstat().st_mode),
            path.read_bytes() if path.is_file() and not path.is_symlink() else None,
        )
        for path in sorted(folder.rglob("*"))
    }


@settings(max_examples=5 * settings().max_examples, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_archive_gets_out_of_its_folder_or_over_its_limits(data: st.DataObject) -> None:
    """Whatever the client accepts every worker accepts, what it refuses they refuse, and nothing gets out."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        victim, into = root / "victim", root / "data" / "into"
        victim.mkdir()
        into.parent.mkdir()
        (victim / "keys").write_bytes(b"secret")
        archive = data.draw(made_up(str(victim / "keys")), "archive")
        before = everything(root)
        try:
            packed: Packed | None = inspect(archive, LIMITS)
        except (InvalidArchive, InvalidManifest):
            packed = None
        assert everything(root) == before, "the client's check writes nothing"
        if packed is None:
            with pytest.raises((InvalidArchive, InvalidManifest)):
                unpack(archive, hashlib.sha256(archive).hexdigest(), into, LIMITS)
            assert everything(root) == before
            return
        assert unpack(archive, packed.sha256, into, LIMITS) == packed.manifest
        found = everything(root)
        unpacked = {name: each for name, each in found.items() if name.startswith("data/into")}
        assert {name: each for name, each in found.items() if name not in unpacked} == before
        assert {kind for kind, _ in unpacked.values()} <= {stat.S_IFREG, stat.S_IFDIR}
        sizes = [len(content) for _, content in unpacked.values() if content is not None]
        assert sum(sizes) == packed.unpacked_bytes <= LIMITS.total_bytes
        assert max(sizes) <= LIMITS.entry_bytes
        assert len(sizes) <= packed.entries <= LIMITS.entries
        assert all(len(part.encode()) <= LIMITS.part_bytes for name in unpacked for part in name.split("/"))
