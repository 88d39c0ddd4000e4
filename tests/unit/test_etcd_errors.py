"""What a failed call to etcd means: "no effect" or "unknown"; pages of a range; keys with a passphrase."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from etcd3 import etcdrpc

from rebalanser.errors import (
    AccessDenied,
    InternalError,
    InvalidUrl,
    LeaseNotFound,
    MissingExtra,
    OutcomeUnknown,
    QuotaExceeded,
    RebalanserError,
    RegistryRefused,
    RegistryUnavailable,
    RequestTooLarge,
)
from rebalanser.redaction import redact
from rebalanser.registry import GroupKeys, Translation
from rebalanser.registry.contract import (
    Absent,
    Delete,
    Get,
    KeepAlive,
    Outcome,
    Put,
    Range,
    Stat,
    Transaction,
)
from rebalanser.registry.urls import open_registry
from rebalanser_etcd import codec
from rebalanser_etcd.codec import PAGE_KEYS, check_limits, prefix_end, to_outcome, to_request
from rebalanser_etcd.endpoints import Endpoints, Repeat, Trust
from rebalanser_etcd.failures import FailureEffect, judge
from rebalanser_etcd.known_bugs import KNOWN_BUGS, parse_version, unsafe_reasons
from rebalanser_etcd.registry import EtcdRegistry

Code = grpc.StatusCode

REFUSED_CONNECTION = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
    "Failed to connect to remote host: Connection refused"
)
WRONG_CA = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed "
    "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d: CERTIFICATE_VERIFY_FAILED"
)


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (Code.UNAVAILABLE, REFUSED_CONNECTION),
        (Code.UNAVAILABLE, "DNS resolution failed for etcd:2379"),
        (Code.UNAVAILABLE, "etcdserver: no leader"),
        (Code.FAILED_PRECONDITION, "etcdserver: not leader"),
        (Code.FAILED_PRECONDITION, "etcdserver: rpc not supported for learner"),
        (Code.UNAVAILABLE, "etcdserver: rpc not supported for learner"),
        (Code.UNKNOWN, "raft proposal dropped"),
    ],
)
def test_these_had_no_effect_and_may_go_elsewhere(code: grpc.StatusCode, details: str) -> None:
    verdict = judge(code, details)
    assert verdict.effect is FailureEffect.NONE
    assert verdict.error is RegistryUnavailable


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (Code.UNAVAILABLE, "Socket closed"),
        (Code.UNAVAILABLE, "recvmsg:Connection reset by peer"),
        (Code.UNAVAILABLE, "GOAWAY received"),
        (Code.UNAVAILABLE, "keepalive timeout"),
        (Code.UNAVAILABLE, ""),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded"),
        (Code.CANCELLED, "Channel closed!"),
        (Code.INTERNAL, "Received RST_STREAM with error code 2"),
        (Code.UNKNOWN, "anything else"),
        (Code.UNAVAILABLE, "etcdserver: request timed out"),
        (Code.UNAVAILABLE, "etcdserver: request timed out, possibly due to previous leader failure"),
        (Code.UNAVAILABLE, "etcdserver: leader changed"),
        (Code.UNAVAILABLE, "etcdserver: server stopped"),
        (Code.UNAVAILABLE, "etcdserver: a message of a later version"),
        (Code.DEADLINE_EXCEEDED, "etcdserver: context deadline exceeded"),
        (Code.DATA_LOSS, "etcdserver: corrupt cluster"),
    ],
)
def test_these_are_of_unknown_outcome(code: grpc.StatusCode, details: str) -> None:
    verdict = judge(code, details)
    assert verdict.effect is FailureEffect.UNKNOWN
    assert verdict.error is OutcomeUnknown
    assert verdict.text


@pytest.mark.parametrize("code", list(Code))
def test_no_status_without_a_known_message_is_taken_for_no_effect(code: grpc.StatusCode) -> None:
    assert judge(code, "never seen").effect in {FailureEffect.UNKNOWN, FailureEffect.REFUSED}
    assert judge(code, "etcdserver: never seen").effect in {FailureEffect.UNKNOWN, FailureEffect.REFUSED}


@pytest.mark.parametrize(
    ("code", "details", "error", "text"),
    [
        (Code.NOT_FOUND, "etcdserver: requested lease not found", LeaseNotFound, "ended"),
        (Code.INVALID_ARGUMENT, "etcdserver: request is too large", RequestTooLarge, "too large"),
        (
            Code.INVALID_ARGUMENT,
            "etcdserver: too many operations in txn request",
            RequestTooLarge,
            "too many",
        ),
        (
            Code.RESOURCE_EXHAUSTED,
            "grpc: received message larger than max (9 vs. 5)",
            RequestTooLarge,
            "9 vs. 5",
        ),
        (
            Code.INVALID_ARGUMENT,
            "etcdserver: authentication failed, invalid user ID or password",
            AccessDenied,
            "wrong user or password",
        ),
        (Code.PERMISSION_DENIED, "etcdserver: permission denied", AccessDenied, "no permission"),
        (Code.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request", RegistryRefused, "dupl"),
        (Code.UNIMPLEMENTED, "unknown service etcdserverpb.KV", RegistryRefused, "is not etcd 3"),
    ],
)
def test_these_are_refusals(
    code: grpc.StatusCode, details: str, error: type[RebalanserError], text: str
) -> None:
    verdict = judge(code, details)
    assert verdict.effect is FailureEffect.REFUSED
    assert verdict.error is error
    assert text in verdict.text


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (Code.UNAUTHENTICATED, "etcdserver: invalid auth token"),
        (Code.INVALID_ARGUMENT, "etcdserver: revision of auth store is old"),
        (Code.INVALID_ARGUMENT, "etcdserver: user name is empty"),
    ],
)
def test_these_ask_for_the_credentials_again(code: grpc.StatusCode, details: str) -> None:
    verdict = judge(code, details)
    assert verdict.effect is FailureEffect.STALE_TOKEN
    assert verdict.error is AccessDenied


def test_a_full_store_may_have_done_what_it_refused() -> None:
    verdict = judge(Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded")
    assert verdict.effect is FailureEffect.PERHAPS_REFUSED
    assert verdict.error is QuotaExceeded
    assert "no node can join" in verdict.text


def test_a_busy_server_did_nothing_and_is_not_left_for_another() -> None:
    verdict = judge(Code.RESOURCE_EXHAUSTED, "etcdserver: too many requests")
    assert verdict.effect is FailureEffect.BUSY
    assert verdict.error is RegistryUnavailable


def test_a_compacted_revision_is_told_apart() -> None:
    details = "etcdserver: mvcc: required revision has been compacted"
    assert judge(Code.OUT_OF_RANGE, details).effect is FailureEffect.COMPACTED


def test_a_handshake_that_fails_is_a_matter_of_certificates() -> None:
    verdict = judge(Code.UNAVAILABLE, WRONG_CA)
    assert verdict.effect is FailureEffect.NONE
    assert verdict.error is AccessDenied
    assert "check ca, cert, key and server_name" in verdict.text


def test_another_name_of_the_host_is_a_matter_of_certificates() -> None:
    details = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Custom verification "
        "check failed with error: UNAUTHENTICATED: Hostname Verification Check failed."
    )
    assert judge(Code.UNAVAILABLE, details).error is AccessDenied


def test_a_connection_error_is_told_by_its_last_cause() -> None:
    verdict = judge(Code.UNAVAILABLE, REFUSED_CONNECTION)
    assert verdict.text == "Failed to connect to remote host: Connection refused"


@pytest.mark.parametrize(
    ("version", "sentences"),
    [
        (
            "3.4.18",
            [
                "old data",
                "revoke live",
                "damage",
                "go back",
                "single",
                "differently",
                "never end",
                "refuses reads",
                "crash",
            ],
        ),
        ("3.4.23", ["old data", "revoke live leases", "damage", "go back"]),
        ("3.4.31", ["old data", "damage", "go back"]),
        ("3.4.37", ["old data", "damage"]),
        ("3.4.38", ["old data"]),
        ("3.4.41", ["old data"]),
        ("3.4.42", []),
        (
            "3.5.1",
            [
                "old data",
                "revoke live leases",
                "part of a transaction",
                "members whose data differ",
                "members whose revisions differ",
                "damage",
                "go back",
                "single",
                "differently",
                "never end",
                "refuses reads",
                "crash",
            ],
        ),
        ("3.5.16", ["old data", "part of a transaction", "damage"]),
        ("3.5.22", ["old data", "damage"]),
        ("3.5.24", ["old data"]),
        ("3.5.27", ["old data"]),
        ("3.5.28", []),
        ("3.6.0", ["old data", "damage"]),
        ("3.6.5", ["old data"]),
        ("3.6.8", ["old data"]),
        ("3.6.9", []),
        ("3.6.16", []),
        ("3.7.0-rc.0", []),
        ("3.7.0", []),
        ("3.3.27", ["older than 3.4"]),
        ("unheard of", ["an unknown version"]),
    ],
)
@pytest.mark.lesson(17)
def test_faults_of_versions_are_known(version: str, sentences: list[str]) -> None:
    reasons = unsafe_reasons([version, version])
    assert len(reasons) == len(sentences)
    for sentence, reason in zip(sentences, reasons, strict=True):
        assert sentence in reason
        assert version in reason


def test_what_came_later_does_not_concern_earlier_versions() -> None:
    (hidden,) = (fault for fault in KNOWN_BUGS if "only to administrators" in fault.sentence)
    found = [patch for patch in range(16) if hidden.concerns((3, 6, patch))]
    assert found == [9, 10, 11]
    assert hidden.concerns((3, 4, 45))


def test_versions_are_numbers() -> None:
    assert parse_version("3.6.16") == (3, 6, 16)
    assert parse_version("3.7.0-rc.0") == (3, 7, 0)
    assert parse_version("3.6") is None


@pytest.mark.parametrize(
    ("prefix", "end"), [(b"a", b"b"), (b"a/", b"a0"), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0")]
)
def test_the_end_of_a_prefix(prefix: bytes, end: bytes) -> None:
    assert prefix_end(prefix) == end


def test_a_transaction_writes_if_a_branch_of_it_does() -> None:
    reading = Transaction((Absent("a"),), (Get("a"), Range("b")), (Stat("c"), Transaction((), (Get("d"),))))
    assert not reading.writes
    assert Transaction((), (), (Delete("a"),)).writes
    assert Transaction((), (Transaction((), (), (Put("a", b""),)),)).writes


@pytest.mark.rule("RB-21")
def test_the_proof_of_a_keep_alive_only_reads() -> None:
    KeepAlive(1, Transaction((Absent("a"),), (Get("a"),)))
    with pytest.raises(InternalError, match="only reads"):
        KeepAlive(1, Transaction((), (Put("a", b""),)))


def test_a_nested_transaction_shares_the_servers_limit_with_the_outer_one() -> None:
    def nested(outer: int, inner: int) -> Transaction:
        inside = Transaction((), tuple(Get(str(number)) for number in range(inner)))
        return Transaction((), (inside,) + (Get("x"),) * (outer - 1))

    check_limits(nested(127, 1))
    check_limits(nested(1, 127))
    check_limits(nested(64, 64))
    check_limits(Transaction((), tuple(Get(str(number)) for number in range(128))))
    for outer, inner in ((128, 1), (127, 2), (1, 128), (65, 64)):
        with pytest.raises(RequestTooLarge, match=f"of {outer + inner} operations, with"):
            check_limits(nested(outer, inner))


def test_a_transaction_of_guards_alone_is_made_linearizable() -> None:
    request = to_request(Transaction((Absent("a"),)), anchor="root/")
    for branch in (request.success, request.failure):
        (look,) = branch
        assert look.request_range.key == b"root/"
        assert not look.request_range.serializable


def test_a_transaction_may_not_have_too_many_bytes() -> None:
    check_limits(Transaction((), (Put("k", b"x" * 1_499_999),)))
    with pytest.raises(RequestTooLarge, match="1500001 bytes; etcd takes 1500000"):
        check_limits(Transaction((), (Put("k", b"x" * 1_500_000),)))


class SlowEndpoints(Endpoints):
    """An etcd with this many keys that takes most of a request's time for every page of them."""

    def __init__(self, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(["127.0.0.1:1"], None, None, lambda _guards: None)
        stored = [{"key": b"%06d" % number, "mod_revision": 1} for number in range(keys)]
        self._keys = list(etcdrpc.RangeResponse(kvs=stored).kvs)
        self._now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self._now)

    def call(self, call: str, message: Any, timeout_s: float, repeat: Repeat) -> Any:
        """Answer a page, if there is time for it."""
        if timeout_s < 0.8:
            raise RegistryUnavailable("the time is up")
        self._now += 0.8
        asked = message if call == "range" else message.success[0].request_range
        found = [each for each in self._keys if each.key >= asked.key]
        page = etcdrpc.RangeResponse(kvs=found[: asked.limit], more=len(found) > asked.limit)
        if call == "range":
            return page
        return etcdrpc.TxnResponse(
            succeeded=True, responses=[etcdrpc.ResponseOp(response_range=page)], header={"revision": 1}
        )


def test_each_page_of_a_long_range_has_the_time_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = SlowEndpoints(2 * PAGE_KEYS + 1, monkeypatch)
    registry = EtcdRegistry(endpoints, "root/")
    outcome = registry.execute(Transaction((), (Range("0"),)), 1.0)
    assert isinstance(outcome, Outcome)
    (found,) = outcome.results
    assert isinstance(found, tuple)
    assert len(found) == 2 * PAGE_KEYS + 1
    endpoints.close()


PASSPHRASE = b"open, s3same"


def private_key(form: serialization.PrivateFormat, passphrase: bytes | None) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    encryption = (
        serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    )
    return key.private_bytes(serialization.Encoding.PEM, form, encryption)


def trust(folder: Path, key: bytes, passphrase: bytes | None) -> Trust:
    """The options of a client certificate whose files are in a folder."""
    (folder / "key").write_bytes(key)
    (folder / "cert").write_text("certificate")
    if passphrase is None:
        return Trust(cert=folder / "cert", key=folder / "key")
    (folder / "passphrase").write_bytes(passphrase)
    return Trust(cert=folder / "cert", key=folder / "key", key_password_file=folder / "passphrase")


@pytest.mark.parametrize(
    "form", [serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL]
)
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_key_with_a_passphrase_is_opened(
    tmp_path: Path, form: serialization.PrivateFormat, end: bytes
) -> None:
    locked = private_key(form, PASSPHRASE)
    files = trust(tmp_path, locked, PASSPHRASE + end)
    opened = files.unlocked(files.read())
    assert opened is not None
    assert opened.startswith(b"-----BEGIN PRIVATE KEY-----")
    assert opened == files.unlocked(files.read()), "what is the same is read as the same"
    numbers = serialization.load_pem_private_key(locked, PASSPHRASE).private_numbers()
    assert serialization.load_pem_private_key(opened, None).private_numbers() == numbers


def test_a_key_without_a_passphrase_is_left_as_it_is(tmp_path: Path) -> None:
    plain = private_key(serialization.PrivateFormat.PKCS8, None)
    for passphrase in (None, PASSPHRASE, b""):
        files = trust(tmp_path, plain, passphrase)
        assert files.unlocked(files.read()) == plain
    assert Trust().unlocked(Trust().read()) is None


@pytest.mark.parametrize(
    ("passphrase", "message"),
    [
        (None, r"the key \S+/key is encrypted; add key_password_file=FILE to the URL"),
        (b"\n", r"\S+/passphrase is empty, but the key \S+/key is encrypted"),
        (b"guess-me", r"the key \S+/key can't be opened with the passphrase in \S+/passphrase: "),
    ],
)
def test_what_keeps_a_key_from_being_opened_is_said(
    tmp_path: Path, passphrase: bytes | None, message: str
) -> None:
    files = trust(tmp_path, private_key(serialization.PrivateFormat.PKCS8, PASSPHRASE), passphrase)
    with pytest.raises(InvalidUrl, match=message) as refused:
        files.unlocked(files.read())
    assert "guess-me" not in str(refused.value)


def test_a_key_that_is_none_is_said(tmp_path: Path) -> None:
    files = trust(tmp_path, b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nrubbish\n", PASSPHRASE)
    with pytest.raises(InvalidUrl, match="can't be opened"):
        files.unlocked(files.read())
    (tmp_path / "passphrase").unlink()
    with pytest.raises(InvalidUrl, match="the file of key_password_file cannot be read"):
        files.read()


def test_the_package_that_opens_keys_is_named_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_modules: Callable[[str], None]
) -> None:
    files = trust(tmp_path, private_key(serialization.PrivateFormat.PKCS8, PASSPHRASE), PASSPHRASE)
    forget_modules("cryptography")
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtra, match=r"cryptography.*pip install 'rebalanser\[etcd\]'"):
        files.unlocked(files.read())


def test_a_passphrase_is_shown_nowhere(tmp_path: Path) -> None:
    key = private_key(serialization.PrivateFormat.PKCS8, PASSPHRASE)
    files = trust(tmp_path, key, PASSPHRASE + b"\n")
    found = files.read()
    for text in (repr(found), repr(files), redact(f"refused: {PASSPHRASE.decode()}")):
        assert "s3same" not in text
    assert key.decode()[40:60] not in repr(found)


def page_of(numbers: range, last: int) -> Any:
    page = etcdrpc.RangeResponse(more=numbers[-1] < last)
    for number in numbers:
        page.kvs.add(key=f"k{number}".encode(), mod_revision=number)
    return page


def test_the_next_page_of_a_range_is_on_its_way_while_one_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [page_of(range(2 * number, 2 * number + 2), last=5) for number in range(3)]
    story: list[str] = []
    decode = codec._key_value

    def decoded(stored: Any) -> Any:
        story.append(stored.key.decode())
        return decode(stored)

    def follow_up(asked: Any) -> Callable[[], Any]:
        story.append(f"ask after {asked.key!r}")

        def wait() -> Any:
            story.append("wait")
            return pages.pop(0)

        return wait

    monkeypatch.setattr(codec, "_key_value", decoded)
    reply = etcdrpc.TxnResponse(succeeded=True)
    reply.responses.add(response_range=pages.pop(0))
    outcome = to_outcome(Transaction(then=(Range("k"),)), reply, follow_up)
    assert story == [
        *("ask after b'k1\\x00'", "k0", "k1", "wait"),
        *("ask after b'k3\\x00'", "k2", "k3", "wait", "k4", "k5"),
    ]
    found = outcome.results[0]
    assert isinstance(found, tuple)
    assert [entry.key for entry in found] == [f"k{number}" for number in range(6)]


def test_a_whole_group_is_read_within_the_least_limit_of_operations() -> None:
    with contextlib.closing(open_registry("memory://least")) as registry:
        asked = next(Translation(GroupKeys("rebalanser", "group"), registry.capabilities).read())
    assert isinstance(asked, Transaction)
    assert len(asked.then) <= codec.MIN_OPERATIONS
