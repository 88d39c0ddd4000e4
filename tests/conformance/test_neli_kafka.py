"""NELI on a real broker: in every mode and both group protocols, what a leader can count on."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic  # type: ignore[attr-defined]

from rebalanser.core.neli.messages import Fact, FactKind
from rebalanser.core.neli.roles import Role
from rebalanser.core.neli.settings import GroupProtocol, Mode, NeliSettings
from rebalanser.errors import Fenced, InvalidSettings, InvalidState, InvalidUrl, RegistryRefused
from rebalanser.neli import AsyncNeli, Candidacy, Neli, hash_slot, open_elections
from rebalanser.testing.waiting import PATIENCE_S, wait_until

SETTINGS = NeliSettings(session_timeout_s=2.0, max_poll_interval_s=10.0)
ROLES = ("billing", "mail", "reports")
MODES = [pytest.param(mode, id=mode.value) for mode in Mode]
PROTOCOLS = [pytest.param(protocol, id=protocol.value) for protocol in GroupProtocol]


@pytest.fixture
def topic() -> str:
    return f"neli-{uuid.uuid4().hex}"


class Told:
    """What the handlers of one process were told, in order."""

    def __init__(self, neli: Neli) -> None:
        self.neli = neli
        self.calls: list[tuple[str, Role, int]] = []
        self.facts: list[Fact] = []
        neli.on_induced(lambda role, token: self.calls.append(("induced", role, token)))
        neli.on_lapsed(self.lapsed)
        neli.on_fenced(lambda role, token: self.calls.append(("fenced", role, token)))
        neli.on_fact(self.facts.append)
        self.may_end = threading.Event()
        self.may_end.set()

    def lapsed(self, role: Role, token: int) -> None:
        """End the work, which takes as long as the test likes."""
        self.calls.append(("lapsed", role, token))
        self.may_end.wait(PATIENCE_S)
        self.calls.append(("ended", role, token))

    def was(self, what: str) -> bool:
        return any(kind == what for kind, _, _ in self.calls)

    def wait_induced(self, role: Role) -> None:
        """Wait until it leads ``role`` and its handler has heard of it, which may be later."""
        assert self.neli.wait_leader(role, PATIENCE_S)
        wait_until(lambda: any((kind, told) == ("induced", role) for kind, told, _ in self.calls))


Joining = Callable[..., Told]


@pytest.fixture
def join(kafka_address: str, topic: str) -> Iterator[Joining]:
    """Starts processes of a group, here as objects of this one; stops what was not stopped."""
    started: list[Told] = []

    def start(**options: object) -> Told:
        given = {"group": f"{topic}-group", "roles": ROLES, "settings": SETTINGS, "partitions": 3, **options}
        neli = Neli(topic, kafka=kafka_address, **given)  # type: ignore[arg-type]
        told = Told(neli)
        neli.start()
        started.append(told)
        return told

    yield start
    for told in started:
        told.neli.request_stop()
    for told in started:
        told.neli.stop(PATIENCE_S)


def leaders_of(role: Role, *group: Told) -> list[Told]:
    return [told for told in group if told.neli.is_leader(role)]


@pytest.mark.rule("NE-1", "NE-4", "NE-5", "NE-9", "NE-15", "NE-16")
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("mode", MODES)
def test_every_role_has_one_leader_and_an_orderly_hand_over(
    join: Joining, mode: Mode, protocol: GroupProtocol
) -> None:
    settings = replace(SETTINGS, mode=mode, protocol=protocol)
    first, second = join(settings=settings), join(settings=settings)
    wait_until(lambda: all(leaders_of(role, first, second) for role in ROLES))
    before = {**first.neli.roles_held(), **second.neli.roles_held()}
    assert before.keys() == set(ROLES)
    told_before = len(first.calls)
    first.neli.stop(PATIENCE_S)
    assert not first.neli.roles_held()
    assert not any(kind == "fenced" for kind, _, _ in first.calls[told_before:])
    wait_until(lambda: second.neli.roles_held().keys() == set(ROLES))
    moved = {role for kind, role, _ in first.calls[told_before:] if kind == "lapsed"}
    for role, token in second.neli.roles_held().items():
        assert token > before[role] if role in moved else token >= before[role]
        assert second.neli.token(role) == token
        assert second.neli.why_not(role) is None
    assert first.neli.why_not(ROLES[0]) == "it does not take part"


@pytest.mark.rule("NE-9")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_successor_waits_for_work_that_is_under_way(join: Joining, protocol: GroupProtocol) -> None:
    options = {"settings": replace(SETTINGS, protocol=protocol), "roles": ["only"], "partitions": 1}
    first = join(**options)
    first.wait_induced("only")
    second = join(**options)
    first.may_end.clear()
    first.neli.request_stop()
    wait_until(lambda: first.was("lapsed"))
    assert not first.neli.is_leader("only")
    assert not second.neli.wait_leader("only", 1.5 * SETTINGS.session_timeout_s)
    first.may_end.set()
    assert second.neli.wait_leader("only", PATIENCE_S)
    assert [kind for kind, _, _ in first.calls] == ["induced", "lapsed", "ended"]
    wait_until(lambda: FactKind.SUCCEEDS in {fact.kind for fact in second.facts}, "the fact is told")


@pytest.mark.rule("NE-5")
def test_roles_with_numbers_are_shared_evenly_and_uneven_ones_are_warned_about(
    join: Joining, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["prices", "invoices", "mail", "news", "reports", "backup"]
    numbers = {name: number for number, name in enumerate(names)}
    group = [join(roles=numbers, partitions=6) for _ in range(3)]
    wait_until(lambda: [len(told.neli.roles_held()) for told in group] == [2, 2, 2])
    assert "roles belong to" not in caplog.text
    group[0].neli.set_roles(dict.fromkeys(names[:3], 0))
    assert "3 roles belong to 1 of 6 partitions, up to 3 to one" in caplog.text
    caplog.clear()
    join(roles=names, partitions=6, group="another")
    assert "6 roles belong to" in caplog.text


@pytest.mark.rule("NE-1")
def test_roles_may_change_at_any_time(join: Joining) -> None:
    told = join(roles=["old", "kept"])
    wait_until(lambda: told.neli.roles_held().keys() == {"old", "kept"})
    token = told.neli.token("kept")
    told.neli.set_roles(["kept", "new"])
    wait_until(lambda: told.neli.roles_held().keys() == {"kept", "new"})
    wait_until(lambda: told.was("ended"))
    assert told.neli.token("kept") == token
    assert [role for kind, role, _ in told.calls if kind == "lapsed"] == ["old"]
    assert not told.neli.is_leader("old")
    assert told.neli.why_not("old") == "the role is not known here"
    with pytest.raises(InvalidSettings, match="no role"):
        told.neli.set_roles([1.5])  # type: ignore[list-item]


@pytest.mark.rule("NE-12", "NE-13")
@pytest.mark.parametrize("mode", MODES)
def test_two_groups_share_a_topic_and_neither_starves(join: Joining, topic: str, mode: Mode) -> None:
    settings = replace(SETTINGS, mode=mode, groups=2)
    groups = [join(settings=settings, group=f"{topic}-{name}") for name in "ab"]
    for told in groups:
        wait_until(lambda told=told: told.neli.roles_held().keys() == set(ROLES))  # type: ignore[misc]
    # Each goes on leading on its own heartbeats when the other is gone.
    groups[0].neli.stop(PATIENCE_S)
    for role in ROLES:
        assert groups[1].neli.wait_leader(role, PATIENCE_S)
    assert not groups[1].was("fenced")


@pytest.mark.rule("NE-5")
def test_a_change_of_the_partition_count_is_noticed_and_refused(
    join: Joining, kafka_address: str, topic: str
) -> None:
    told = join()
    told.wait_induced(ROLES[0])
    admin = AdminClient({"bootstrap.servers": kafka_address, "log_level": 0})
    for future in admin.create_partitions([NewPartitions(topic, 4)]).values():
        future.result(PATIENCE_S)
    with pytest.raises(InvalidSettings, match="4 partitions and had 3"):
        told.neli.wait_stopped(PATIENCE_S)
    assert not told.neli.roles_held()
    wait_until(lambda: told.was("fenced"))
    with pytest.raises(InvalidSettings, match="4 partitions and had 3"):
        told.neli.stop(PATIENCE_S)


def make_topic(address: str, topic: str, **settings: str) -> None:
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    config = {name.replace("_", "."): value for name, value in settings.items()}
    for future in admin.create_topics([NewTopic(topic, 2, 1, config=config)]).values():
        future.result(PATIENCE_S)


@pytest.mark.rule("NE-7")
def test_exclusive_refuses_a_topic_without_the_brokers_timestamps(
    join: Joining, kafka_address: str, topic: str
) -> None:
    make_topic(kafka_address, topic, message_timestamp_type="CreateTime")
    with pytest.raises(
        InvalidSettings,
        match=r"message.timestamp.type is CreateTime, wanted LogAppendTime .*do: kafka-configs",
    ):
        join(settings=replace(SETTINGS, mode=Mode.EXCLUSIVE))
    assert join().neli.wait_leader(ROLES[0], PATIENCE_S), "the other modes do without"


@pytest.mark.rule("NE-2")
def test_a_compacted_topic_is_refused(join: Joining, kafka_address: str, topic: str) -> None:
    make_topic(kafka_address, topic, cleanup_policy="compact")
    with pytest.raises(InvalidSettings, match=r"cleanup.policy is compact, wanted delete"):
        join()


@pytest.mark.rule("NE-2")
def test_foreign_records_in_the_topic_harm_nobody(join: Joining, kafka_address: str, topic: str) -> None:
    told = join(roles=["only"], partitions=1)
    assert told.neli.wait_leader("only", PATIENCE_S)
    producer = Producer({"bootstrap.servers": kafka_address, "log_level": 0})
    for value in (b"", b"[1,2]", b"\xff" * 100):
        producer.produce(topic, value=value, key=value, headers=[("neli", value)], partition=0)
    assert producer.flush(PATIENCE_S) == 0
    second = join(roles=["only"], partitions=1)
    told.neli.stop(PATIENCE_S)
    assert second.neli.wait_leader("only", PATIENCE_S)
    assert not told.was("fenced")


@pytest.mark.rule("NE-16")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_second_process_of_one_instance_fences_the_first(join: Joining, protocol: GroupProtocol) -> None:
    options = {"settings": replace(SETTINGS, protocol=protocol), "roles": ["only"], "instance": "i1"}
    first = join(**options)
    first.wait_induced("only")
    if protocol is GroupProtocol.CLASSIC:
        second = join(**options)
        loser, winner = first, second
    else:
        # KIP-848 refuses the newcomer for as long as the first one lives.
        loser, winner = join(**options), first
    with pytest.raises(Fenced, match="an instance of its own"):
        loser.neli.wait_stopped(PATIENCE_S)
    assert not loser.neli.roles_held()
    assert winner.neli.wait_leader("only", PATIENCE_S)
    if loser is first:
        wait_until(lambda: first.was("fenced"))
    with pytest.raises(Fenced):
        loser.neli.stop(PATIENCE_S)


@pytest.mark.rule("NE-14")
def test_slots_stay_with_their_leader_when_a_third_process_joins(join: Joining) -> None:
    slots = range(24)
    options = {"roles": slots, "partitions": 24}
    first, second = join(**options), join(**options)

    def owners(*group: Told) -> dict[Role, Told]:
        return {slot: told for told in group for slot in told.neli.roles_held()}

    wait_until(lambda: len(owners(first, second)) == len(slots))
    wait_until(lambda: all(len(told.neli.roles_held()) == 12 for told in (first, second)))
    before = owners(first, second)
    third = join(**options)
    wait_until(lambda: all(len(told.neli.roles_held()) == 8 for told in (first, second, third)))
    after = owners(first, second, third)
    moved = {slot for slot in slots if after[slot] is not before[slot]}
    assert moved == set(third.neli.roles_held()), "nothing moves but to the new one"
    assert after[hash_slot("customer-7", 24)] in (first, second, third)


@pytest.mark.rule("NE-15")
def test_tokens_grow_from_leader_to_leader(join: Joining) -> None:
    tokens = []
    leader = join(roles=["only"], partitions=1)
    for _ in range(4):
        assert leader.neli.wait_leader("only", PATIENCE_S)
        token = leader.neli.token("only")
        assert token is not None
        tokens.append(token)
        successor = join(roles=["only"], partitions=1)
        leader.neli.stop(PATIENCE_S)
        leader = successor
    assert all(earlier < later for earlier, later in pairwise(tokens))


def test_the_session_timeout_of_a_kip_848_group_is_the_groups_own(join: Joining, topic: str) -> None:
    consumer = replace(SETTINGS, protocol=GroupProtocol.CONSUMER)
    told = join(settings=consumer)
    assert told.neli.wait_leader(ROLES[0], PATIENCE_S)
    with pytest.raises(InvalidSettings, match=r"consumer.session.timeout.ms=2000 and session_timeout_s is 3"):
        join(settings=replace(consumer, session_timeout_s=3.0))
    with pytest.raises(
        InvalidSettings, match=r"consumer.session.timeout.ms=300, .* \(brokers allow sessions of 45 to 60 s"
    ):
        join(settings=replace(consumer, session_timeout_s=0.3), group=f"{topic}-other")


@pytest.mark.rule("NE-16")
def test_a_group_is_described_to_an_outsider(join: Joining, kafka_address: str, topic: str) -> None:
    elections = open_elections(kafka_address, PATIENCE_S)
    candidacy = Candidacy(topic, f"{topic}-group", ROLES)
    with pytest.raises(RegistryRefused, match="there is no topic"):
        elections.describe(candidacy)
    told = join(partitions=2)
    with pytest.raises(RegistryRefused, match="there is no group nobody's"):
        elections.describe(replace(candidacy, group="nobody's"))
    wait_until(lambda: told.neli.roles_held().keys() == set(ROLES))
    assert told.neli._candidate is not None
    process = told.neli._candidate.process
    described = elections.describe(candidacy)
    assert described.state == "stable"
    assert {role for each in described.partitions for role in each.roles} == set(ROLES)
    for each in described.partitions:
        assert each.member is not None
        assert each.member.client == each.committed_by == process
        assert each.claim == "held"
        assert each.last_heartbeat_at is not None
    told.neli.stop(PATIENCE_S)
    left = elections.describe(candidacy)
    assert [(each.member, each.claim) for each in left.partitions] == [(None, "released")] * 2


def test_what_makes_no_sense_is_refused(join: Joining, kafka_address: str, topic: str) -> None:
    told = join()
    with pytest.raises(InvalidState, match="takes part already"):
        told.neli.start()
    told.neli.stop(PATIENCE_S)
    told.neli.start()
    assert told.neli.wait_leader(ROLES[0], PATIENCE_S), "it may begin again after it has ended"
    with pytest.raises(InvalidUrl, match="has a path"):
        Neli(topic, "g", ROLES, kafka=f"kafka://{kafka_address}/cluster").start()


@pytest.mark.rule("NE-16")
def test_asyncio(kafka_address: str, topic: str) -> None:
    calls: list[str] = []

    async def live() -> None:
        neli = AsyncNeli(topic, f"{topic}-group", ["only"], kafka=kafka_address, settings=SETTINGS)
        loop = asyncio.get_running_loop()
        told = asyncio.Event()

        @neli.on_induced
        async def induced(role: Role, token: int) -> None:
            assert asyncio.get_running_loop() is loop
            with pytest.raises(InvalidState, match="called from a handler"):
                await neli.stop()
            calls.append(f"induced {role}")
            told.set()

        @neli.on_lapsed
        def lapsed(role: Role, _token: int) -> None:
            calls.append(f"lapsed {role}")

        async with neli:
            assert await neli.wait_leader("only", PATIENCE_S)
            await asyncio.wait_for(told.wait(), PATIENCE_S)
            assert neli.is_leader("only")
            assert neli.roles_held() == {"only": neli.token("only")}
            assert neli.why_not("only") is None
        assert not neli.is_leader("only")

    asyncio.run(live())
    assert calls == ["induced only", "lapsed only"]
