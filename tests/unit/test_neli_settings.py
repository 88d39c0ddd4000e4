"""Roles, slots, the wire format and the settings of NELI."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebalanser.core.neli.records import LeadershipClaim, Note, Stamp
from rebalanser.core.neli.roles import RoleMap, hash_slot, number_of
from rebalanser.core.neli.settings import GroupProtocol, Mode, NeliSettings, check
from rebalanser.core.neli.vector import Vector
from rebalanser.errors import InvalidSettings


@pytest.mark.rule("NE-5")
@given(st.integers(1, 40), st.sets(st.integers(-100, 100) | st.text(max_size=5)))
def test_every_role_has_exactly_one_partition(partitions: int, roles: set[int | str]) -> None:
    """Every role has exactly one partition whatever the sizes of R and M."""
    mapped = RoleMap(roles, partitions)
    assert sorted(map(repr, mapped)) == sorted(map(repr, roles))
    placed = Counter(role for partition in range(partitions) for role in mapped.roles_of(partition))
    assert placed == dict.fromkeys(roles, 1)
    for role in roles:
        assert role in mapped.roles_of(mapped.partition_of(role) or 0)


@pytest.mark.rule("NE-5")
def test_role_j_belongs_to_partition_j_mod_m() -> None:
    assert [RoleMap(range(7), 3).partition_of(role) for role in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert RoleMap({"mail": 4, "bills": 5}, 3).partition_of("mail") == 1


@pytest.mark.rule("NE-5")
def test_a_named_role_keeps_its_partition_in_any_list() -> None:
    assert number_of("mail") == 2223221373428123976
    few, many = RoleMap(["mail"], 12), RoleMap(["bills", "mail", "reports"], 12)
    assert few.partition_of("mail") == many.partition_of("mail") == number_of("mail") % 12


@pytest.mark.rule("NE-5", "NE-11")
def test_roles_that_can_not_be_shared_evenly_are_told_with_the_figures() -> None:
    names = ["prices", "invoices", "mail", "news", "reports", "backup"]
    told = RoleMap(names, 12).imbalance()
    loads = sorted(Counter(RoleMap(names, 12).partition_of(name) for name in names).values())
    assert told is not None
    assert f"6 roles belong to {len(loads)} of 12 partitions, up to {loads[-1]} to one" in told
    assert "one of two processes may lead 6 roles and the other 0" in told
    assert told.endswith("give them the numbers from 0 on in every process (NE-5) and the topic 6 partitions")
    two_on_each_but_one = RoleMap({"a": 0, "b": 1, "c": 1, "d": 1, "e": 2}, 3).imbalance()
    assert two_on_each_but_one is not None
    assert "up to 3 to one" in two_on_each_but_one
    assert "may lead 4 roles and the other 1;" in two_on_each_but_one


@pytest.mark.rule("NE-5")
@given(st.integers(1, 40), st.sets(st.text(max_size=5), max_size=200))
def test_any_names_with_numbers_are_balanced(partitions: int, names: set[str]) -> None:
    """Numbers from 0 on balance roles over partitions, as many as there are roles or fewer."""
    numbers = {name: number for number, name in enumerate(sorted(names))}
    partitions = min(partitions, max(1, len(names)))
    mapped = RoleMap(numbers, partitions)
    loads = [len(mapped.roles_of(partition)) for partition in range(partitions)]
    assert max(loads) - min(loads) <= 1
    assert mapped.imbalance() is None


@pytest.mark.rule("NE-5")
@pytest.mark.parametrize("roles", [[], ["only"], range(1024), range(12)])
def test_nothing_is_told_of_roles_that_are_shared_evenly(roles: Any) -> None:
    assert RoleMap(roles, 12).imbalance() is None


@pytest.mark.rule("NE-14")
def test_a_key_has_a_stable_slot() -> None:
    """Hash slots as roles: key -> slot -> leader is stable."""
    assert [hash_slot(key, 1024) for key in ("a", "Zürich", "order-17")] == [
        hash_slot(key.encode(), 1024) for key in ("a", "Zürich", "order-17")
    ]
    spread = Counter(hash_slot(f"key-{index}", 16) for index in range(4000))
    assert set(spread) == set(range(16))
    assert max(spread.values()) < 2 * min(spread.values())


@pytest.mark.parametrize("roles", [[True], [1.5], [None], {"a": "b"}, {"a": True}, "abc", b"abc", 7])
def test_what_is_no_role_is_refused(roles: Any) -> None:
    with pytest.raises(InvalidSettings, match="role"):
        RoleMap(roles, 2)


def test_without_partitions_or_slots_nothing_can_be_placed() -> None:
    with pytest.raises(InvalidSettings, match="0 partitions"):
        RoleMap([1], 0)
    with pytest.raises(InvalidSettings, match="0 hash slots"):
        hash_slot("key", 0)


@pytest.mark.parametrize(
    ("key", "slots", "words"),
    [
        (17, 1024, r"a key is a text or bytes, not int: str\(key\), for instance"),
        ("key", 1.5, "1.5 hash slots: the number must be a whole one"),
        ("key", True, "True hash slots: the number must be a whole one"),
    ],
)
def test_a_slot_of_another_type_is_refused_in_words(key: Any, slots: Any, words: str) -> None:
    """A number as key ended in an error of hashing, and slots of 1.5 gave a slot that is no whole number."""
    with pytest.raises(InvalidSettings, match=words):
        hash_slot(key, slots)


@pytest.mark.rule("NE-3")
def test_v_has_one_time_for_each_partition_and_never_goes_back() -> None:
    """Sized from the broker's partition count at start: zero if none ever was received."""
    vector = Vector(3)
    assert len(vector) == 3
    assert vector.heard_at(1) is None
    vector.hear(1, 5.0)
    vector.hear(1, 4.0)
    assert [vector.heard_at(partition) for partition in range(3)] == [None, 5.0, None]


@pytest.mark.parametrize(
    ("settings", "alive_s"),
    [
        (NeliSettings(session_timeout_s=3.0), 0.5),
        (NeliSettings(session_timeout_s=45.0), 1.0),
        (NeliSettings(session_timeout_s=45.0, protocol=GroupProtocol.CONSUMER), 7.5),
        (NeliSettings(session_timeout_s=45.0, heartbeat_interval_s=3.0), 3.0),
    ],
)
def test_members_of_a_classic_group_hear_each_second_who_was_lost(
    settings: NeliSettings, alive_s: float
) -> None:
    """Under KIP-848 brokers allow no such interval by default."""
    assert settings.alive_interval_s == alive_s


_STAMP = Stamp('gr"oup', "host-1", 3, 17, 12)
_NOTE = Note(LeadershipClaim.RELEASED, "host-1", 3, 2.5, 12)


def test_stamps_and_notes_survive_the_wire() -> None:
    assert Stamp.decode(_STAMP.encode()) == _STAMP
    assert Note.decode(_NOTE.encode()) == _NOTE


@pytest.mark.parametrize(
    "value",
    [None, b"", b"x", b"\xff", b"[]", b"{}", b"3", b"[2,1]", b'[2,"g","p",1,1,1]', b'[1,"g","p",1,1,"1"]'],
)
def test_what_is_no_stamp_is_none(value: bytes | None) -> None:
    assert Stamp.decode(value) is None


@pytest.mark.parametrize(
    "text", [None, "", "metadata", '[1,"sold","p",1,1.0,2]', '[1,"held","p",1,1,2]', "[1]"]
)
def test_what_is_no_note_is_none(text: str | None) -> None:
    assert Note.decode(text) is None


@pytest.mark.rule("NE-11")
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("protocol", GroupProtocol)
def test_the_defaults_keep_every_promise(mode: Mode, protocol: GroupProtocol) -> None:
    assert check(NeliSettings(mode=mode, protocol=protocol)) == []


@pytest.mark.rule("NE-11", "NE-6", "NE-7", "NE-9")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"mode": Mode.NON_EXCLUSIVE, "deadline_s": 10.0},
            "deadline_s 10 must be above session_timeout_s 10",
        ),
        (
            {"mode": Mode.EXCLUSIVE, "deadline_s": 9.5},
            "deadline_s 9.5 + clock_error_s 0.5 = 10 must be below session_timeout_s 10",
        ),
        ({"deadline_s": 3.5}, "at most a third of session_timeout_s 10, which is 3.33333"),
        ({"deadline_s": 2.0, "publish_interval_s": 1.1}, "heartbeats come every 1.1 s, at least two"),
        (
            {"mode": Mode.NON_EXCLUSIVE, "publish_interval_s": 2.0, "groups": 4},
            "every 8 s (4 groups share the topic)",
        ),
        ({"heartbeat_interval_s": 4.0}, "heartbeat_interval_s 4 must be at most a third"),
        ({"max_poll_interval_s": 8.0}, "session_timeout_s 10 is above max_poll_interval_s 8"),
        (
            {"session_timeout_s": 60.0, "deadline_s": 19.9, "max_poll_interval_s": 20.0},
            "must be below max_poll_interval_s 20",
        ),
        ({"lapse_limit_s": 60.0}, "lapse_limit_s 60 must be below max_poll_interval_s 60"),
        ({"session_timeout_s": 0.0}, "session_timeout_s is 0, it must be above 0"),
        (
            {"session_timeout_s": 0.2},
            "session_timeout_s is 0.2, it must be 0.3 or above: within the deadline",
        ),
        ({"deadline_s": -1.0}, "deadline_s is -1, it must be 0 or above"),
        ({"session_timeout_s": 3601.0}, "session_timeout_s is 3601, Kafka's client takes at most 3600"),
        (
            {"max_poll_interval_s": 86_401.0},
            "max_poll_interval_s is 86401, Kafka's client takes at most 86400",
        ),
        ({"deadline_s": float("nan")}, "deadline_s is nan"),
        ({"groups": 0}, "groups is 0"),
        ({"clock_drift_ratio": 0.5}, "clock_drift_ratio is 0.5"),
    ],
)
def test_settings_that_contradict_the_mode_are_refused_with_the_numbers(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidSettings, match=re.escape(said)):
        check(replace(NeliSettings(), **changes))


@pytest.mark.rule("NE-11", "NE-14")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"assignor": "range"}, "the range assignor moves more roles"),
        ({"assignor": "sticky"}, "interrupts every role"),
        ({"assignor": "range", "protocol": GroupProtocol.CONSUMER}, "use uniform"),
        ({"deadline_s": 2.0, "publish_interval_s": 0.8}, "a single one that is late or lost ends leadership"),
    ],
)
def test_what_is_unwise_is_warned_about(changes: dict[str, Any], said: str) -> None:
    warnings = check(replace(NeliSettings(), **changes))
    assert len(warnings) == 1
    assert said in warnings[0]


@pytest.mark.rule("NE-6", "AU-4")
def test_for_how_long_leaders_may_overlap_is_said() -> None:
    """Successive leaders may overlap by T minus that timeout; where no commit renews the session, by T."""
    slow = NeliSettings(mode=Mode.NON_EXCLUSIVE, session_timeout_s=10.0, deadline_s=16.0)
    assert slow.overlap_s == 6.0
    assert replace(slow, protocol=GroupProtocol.CONSUMER).overlap_s == 16.0
    assert replace(slow, mode=Mode.EXCLUSIVE).overlap_s == replace(slow, mode=Mode.FAST).overlap_s == 0.0
