"""Proof that tests see: each mutant of what no simulator runs fails the test that holds its promise.

The tests run in a process of their own, which imports all of them once and then forks for each mutant. ``make
mutants`` prints the table.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rebalanser import explanation
from rebalanser import group as group_module
from rebalanser import plan as plan_module
from rebalanser import settings as settings_module
from rebalanser import state as state_module
from rebalanser.admin import Admin
from rebalanser.core.allocation import bounds, explanations
from rebalanser.core.allocation.constrained import _Search
from rebalanser.core.group import leading as leading_module
from rebalanser.core.group.leading import Leading
from rebalanser.core.group.messages import Noticed
from rebalanser.core.group.node import Node
from rebalanser.core.group.rebalancing import Rebalancing
from rebalanser.core.group.types import PlanBasis
from rebalanser.core.tasks import ready_index
from rebalanser.core.tasks.claims import PausableClaims
from rebalanser.core.tasks.ready_index import ClaimableTasks
from rebalanser.core.tasks.slots import SlotDecisions
from rebalanser.core.tasks.worker import Execution
from rebalanser.core.tasks.writes import Batches
from rebalanser.group import Group
from rebalanser.history import Journal
from rebalanser.observer import Observer
from rebalanser.plan import GroupChange
from rebalanser.registry import keys as keys_module
from rebalanser.registry import script, values
from rebalanser.registry.translation import Translation
from rebalanser.runtime import participant
from rebalanser.runtime.handlers import HandlerRunner
from rebalanser.runtime.node_runner import NodeRunner
from rebalanser.tasks import producer, results, retention
from rebalanser.tasks.batcher import WriteBatcher
from rebalanser.tasks.execution.worker import SharedConcurrency
from rebalanser.tasks.key_value.enqueues import EnqueueAllStep
from rebalanser.tasks.key_value.steps import MoveStep
from rebalanser.tasks.pauses import Pause
from rebalanser.testing.waiting import PATIENCE_S, PATIENCE_VARIABLE, patience_ratio
from rebalanser_sqlite import SqliteRegistry, leases
from rebalanser_sqlite.store import Store
from rebalanser_sqlite.tasks.claims import Claims
from rebalanser_sqlite.tasks.writer import Writing
from simulation.kernel.mutants import Caught, Mutant, Switch, always, edited, instead, switched

pytestmark = [pytest.mark.full_size, pytest.mark.xdist_group("runtime mutants")]

ROOT = Path(__file__).resolve().parents[2]
HASTE = 0.02
"""The part of the usual patience with which a mutant's test waits: many mutants make it wait in vain."""
BROKEN = ("AttributeError", "NameError", "TypeError", "UnboundLocalError")
AT_ONCE = 4
"""Mutants that run at once."""


def _edit(owner: Any, method: str, old: str, new: str, *more: tuple[str, str]) -> tuple[Switch, ...]:
    return (Switch(owner, method, edited(old, new, *more)),)


def _mutant(name: str, promise: str, switches: tuple[Switch, ...], test: str, *rules: str) -> Mutant:
    return Mutant(name, promise, switches, frozenset(rules), test=f"tests/{test}")


async def _in_default_executor(function: Callable[..., Any], *arguments: Any) -> Any:

    return await asyncio.to_thread(function, *arguments)


def _stated_with(**fields: Any) -> Callable[..., Any]:
    """``problem_of``, but for these fields of the problem."""
    return lambda problem_of: lambda group: replace(problem_of(group), **fields)


LATE_SHARES = (
    "unit/test_translation.py::test_shares_of_a_version_that_was_given_up_are_nobodys_however_late_they_come"
)
CONSTRAINTS = "unit/test_allocation_constraints.py"
LEADING = "unit/test_leading.py"
PLANS = "unit/test_plan.py"
PAUSES = "conformance/test_task_pauses.py"
QUEUES = "conformance/test_task_queues.py"
STORIES = "simulation/test_tasks_scenarios.py"
MUTANTS = (
    _mutant(
        "facts one by one",
        "a report costs the loop no more for many resources than for one",
        _edit(Observer, "observe", "with self._in_order:", "list(report.facts())\n    with self._in_order:"),
        "unit/test_runtime.py::test_a_report_of_many_resources_costs_the_reporter_no_more_than_one",
        "RB-21",
    ),
    _mutant(
        "clock read too early",
        "the clock is read directly before OnStart is entered",
        _edit(
            HandlerRunner,
            "_start",
            "arriving = [",
            "late = self._clock.now() >= effect.not_after\n    arriving = [",
            ("or self._clock.now() >= effect.not_after", "or late"),
        ),
        "unit/test_runtime.py::test_the_clock_is_read_after_all_that_takes_longer_for_many_resources",
        "RB-21",
    ),
    _mutant(
        "one command for all",
        "one command adds at most 10,000 barriers",
        _edit(Rebalancing, "to_add", "islice(self._to_try, MAX_BARRIERS)", "self._to_try"),
        "unit/test_node.py::test_barriers_are_added_and_removed_in_slices",
        "RB-42",
    ),
    _mutant(
        "all looked through",
        "a turn costs the same however much is owned",
        _edit(Rebalancing, "completed", "self._owns_its_share", "all(r in self.held for r in self.wanted)"),
        "unit/test_node.py::test_a_turn_costs_the_same_however_much_is_owned",
        "RB-42",
    ),
    _mutant(
        "refused start of nothing",
        "a node that owns nothing is told so, even if the first OnStart came too late",
        _edit(Rebalancing, "start_returned", "self._empty_start_called = False", "pass"),
        "unit/test_node.py::test_an_empty_allocation_whose_onstart_came_too_late_is_told_again",
        "RB-18",
    ),
    _mutant(
        "settled in doubt",
        "a node has settled only once no barrier is in doubt",
        _edit(Rebalancing, "completed", "and not self.uncertain", "and True"),
        "unit/test_node.py::test_a_node_that_may_hold_a_barrier_too_many_has_not_settled",
        "RB-14",
    ),
    _mutant(
        "returned barrier to spare",
        "a barrier that is wanted again is kept",
        _edit(Rebalancing, "_compare", "self._spare -= returned", "pass"),
        "unit/test_node.py::test_a_barrier_that_is_found_to_be_held_is_told_as_added_before_it_is_used",
        "RB-12",
    ),
    _mutant(
        "keys of folded notices lost",
        "a leader reads all that its watches told of",
        _edit(Noticed, "folded", "keys=self.keys | other.keys", "keys=latest.keys"),
        "unit/test_runtime.py::test_notices_that_are_folded_keep_the_keys_of_all",
        "RB-28",
    ),
    _mutant(
        "rewritten record unread",
        "a leader reads every record that was rewritten",
        _edit(Translation, "_take_members", "all_entries(result)", "()"),
        "unit/test_translation.py::test_a_leader_reads_every_record_that_was_rewritten",
        "RB-28",
    ),
    _mutant(
        "record before barriers",
        "a record that can't be written holds up nothing",
        _edit(
            Node,
            "_advance_barriers",
            "self._next_barrier_command(session) or self._next_record(session)",
            "self._next_record(session) or self._next_barrier_command(session)",
        ),
        "unit/test_node.py::test_a_record_that_can_not_be_written_holds_up_nothing",
        "RB-3",
    ),
    _mutant(
        "registered as another",
        "one incarnation registers as the same, however often it tries",
        _edit(Node, "_advance_life", "if self._record is None:", "if True:"),
        "unit/test_node.py::test_what_was_released_is_named_when_the_node_joins_again",
        "RB-4",
    ),
    _mutant(
        "pinned to the first of its label",
        "of nodes with a pin's label one that has not released the resource gets it",
        _edit(leading_module, "_pinned", "min(willing, default=pinned[resource])", "pinned[resource]"),
        "unit/test_node.py::test_a_leader_gives_no_node_what_it_has_released",
        "RB-29",
    ),
    _mutant(
        "releases without limit",
        "a node releases at most 1,000 resources at once",
        _edit(NodeRunner, "_release", "len(known) >= MAX_RELEASED", "False"),
        "unit/test_group.py::test_a_node_releases_a_thousand_resources_at_once_and_no_more",
        "RB-42",
    ),
    _mutant(
        "node removed before its lease",
        "a node that leaves goes together with its lease",
        _edit(
            Translation,
            "_leave",
            "yield Revoke(command.session.lease)",
            "yield Transaction(then=(Delete(self.keys.node(command.session.node)),))\n"
            "    yield Revoke(command.session.lease)",
        ),
        "unit/test_translation.py::test_a_late_copy_of_its_registration_makes_no_member_of_a_node_that_leaves",
        "RB-4",
    ),
    _mutant(
        "spare lease kept",
        "a registration that finds an earlier one revokes its own lease",
        _edit(Translation, "_take_over", "yield Revoke(spare_lease)", "yield from ()"),
        "unit/test_translation.py::test_registering_again_after_a_lost_answer_makes_no_second_member",
        "RB-4",
    ),
    _mutant(
        "deposed by who left before",
        "a leader leads on when the leader before it leaves",
        _edit(Node, "_noticed", "self._leading.node_gone(topic.node, noticed.revision)", "self._deposed()"),
        "unit/test_node.py::test_a_leader_leads_on_until_it_is_told_of_another_term",
        "RB-28",
    ),
    _mutant(
        "taken over without a renewal",
        "a session is taken over only with a lease that was renewed",
        _edit(Translation, "_take_over", "if not self._is_renewal(renewed, answer):", "if False:"),
        "unit/test_translation.py::test_only_the_leader_that_proves_a_lease_can_have_renewed_it",
        "RB-21",
    ),
    _mutant(
        "switch armed late",
        "the dead man's switch is armed before OnStart is called",
        _edit(Node, "_advance_handlers", "self._update_guard()", "pass"),
        "unit/test_node.py::test_the_switch_is_armed_before_onstart_is_called",
        "RB-34",
    ),
    _mutant(
        "earliest change told",
        "of several changes the latest is told",
        _edit(Translation, "notices", "max(event.revision", "min(event.revision"),
        "unit/test_translation.py::test_of_several_changes_the_latest_is_told",
        "RB-28",
    ),
    _mutant(
        "attempts not aborted",
        "shares that a publication may still write are aborted",
        _edit(
            Leading, "_planned", "aborted=group.uncommitted | asked.attempts,", "aborted=group.uncommitted,"
        ),
        f"{LATE_SHARES}[before the commit]",
        "RB-9",
    ),
    _mutant(
        "shares not read again",
        "a leader whose publication is in doubt reads what is stored of shares",
        _edit(Leading, "reading_group", "reread_shares=bool(self._attempts)", "reread_shares=False"),
        f"{LATE_SHARES}[before the read]",
        "RB-9",
    ),
    _mutant(
        "shares written late",
        "shares are written only while the allocation is the one that the plan changes",
        _edit(
            Translation,
            "_publish",
            "(yield self._as_leader(command, chunk, based_on))",
            "(yield self._as_leader(command, chunk, based_on if chunk is commit else ()))",
        ),
        f"{LATE_SHARES}[after the next]",
        "RB-9",
    ),
    _mutant(
        "whole group read",
        "a leader reads what changed",
        _edit(Translation, "_read_group", "if command.known is not None:", "if False:"),
        "unit/test_translation.py::test_a_change_costs_the_leader_and_the_registry_what_changed[added-True]",
        "RB-45",
    ),
    _mutant(
        "all resources looked at",
        "a leader plans from what changed",
        _edit(Leading, "make_plan", "asked.basis.unsettled if asked.basis else None", "None"),
        "unit/test_translation.py::test_a_plan_looks_only_at_resources_that_changed_since_the_last",
        "RB-45",
    ),
    _mutant(
        "changes not looked at",
        "a leader plans from all that changed",
        _edit(PlanBasis, "after", "self.unsettled | changed", "self.unsettled"),
        "unit/test_translation.py::test_a_plan_looks_only_at_resources_that_changed_since_the_last",
        "RB-45",
    ),
    _mutant(
        "pins forgotten",
        "a leader keeps the pins that it knows up to date",
        _edit(PlanBasis, "after", "if name not in changed", "if True"),
        "unit/test_translation.py::test_a_leader_that_looks_at_changes_plans_as_one_that_reads_everything[0]",
        "RB-29",
    ),
    _mutant(
        "unsettled forever",
        "what no node may own is looked at with each plan",
        _edit(
            Leading,
            "make_plan",
            "PlanBasis(unplaced, pins, special)",
            "PlanBasis(frozenset(), pins, special)",
        ),
        "unit/test_translation.py::test_a_plan_looks_only_at_resources_that_changed_since_the_last",
        "RB-45",
    ),
    _mutant(
        "weights ignored",
        "load is shared out by weight",
        _edit(
            _Search,
            "_read_resources",
            "min(spec.weight, MAX_WEIGHT)",
            "1.0",
        ),
        f"{CONSTRAINTS}::test_load_is_shared_out_by_weight",
        "RB-36",
    ),
    _mutant(
        "capacities alike",
        "a larger node gets more load",
        _edit(_Search, "_read_nodes", "[capacities.amounts[node] for node", "[MILLION for node"),
        f"{CONSTRAINTS}::test_a_node_with_twice_the_capacity_gets_twice_the_load",
        "RB-36",
    ),
    _mutant(
        "moves one by one",
        "the fullest node gives load by way of another one where it can't directly",
        (Switch(_Search, "_pair", always(None)),),
        f"{CONSTRAINTS}::test_one_resource_is_exchanged_or_handed_on_where_no_single_move_helps",
        "RB-36",
    ),
    _mutant(
        "bound of all nodes",
        "the lower bound knows what only some nodes may own",
        _edit(
            bounds, "_weights_of_sets", "open_nodes(spec.needs, weight)", "open_nodes(frozenset(), weight)"
        ),
        f"{CONSTRAINTS}::test_the_bound_knows_what_only_some_nodes_may_own",
        "RB-36",
    ),
    _mutant(
        "needs ignored",
        "a resource is only on nodes with the tags that it needs",
        _edit(_Search, "_class", "if needs <= tags", "if True"),
        f"{CONSTRAINTS}::test_a_resource_is_only_where_its_needs_are_met",
        "RB-37",
    ),
    _mutant(
        "capacity exceeded",
        "no node gets more than its capacity",
        _edit(_Search, "_fill", "if load > limits[i]:", "if False:"),
        f"{CONSTRAINTS}::test_no_node_gets_more_than_its_capacity",
        "RB-37",
    ),
    _mutant(
        "excess kept",
        "what became too much for a node leaves it",
        _edit(_Search, "_give_up", "if self._loads[i] > limit:", "if False:"),
        f"{CONSTRAINTS}::test_what_became_too_much_for_a_node_leaves_it",
        "RB-37",
    ),
    _mutant(
        "spread ignored",
        "two resources of a spread are on distinct nodes or in distinct zones",
        _edit(_Search, "_is_free", "return there is None or", "return True or"),
        f"{CONSTRAINTS}::test_a_spread_is_kept_over_nodes_or_zones[zone]",
        "RB-37",
    ),
    _mutant(
        "no room made",
        "others move where that makes room for what has none",
        (Switch(_Search, "_make_rooms", always(False)),),
        f"{CONSTRAINTS}::test_others_make_room_for_what_has_none",
        "RB-37",
    ),
    _mutant(
        "moves not counted",
        "no more resources move for a better balance than the policy allows",
        _edit(_Search, "_is_used_up", "limit is not None and", "False and"),
        f"{CONSTRAINTS}::test_no_more_resources_move_than_the_policy_allows[1]",
        "RB-38",
    ),
    _mutant(
        "band ignored",
        "nothing moves for a better balance within the band",
        _edit(_Search, "_is_uneven", "> bound * (1 + band)", "> 0.0"),
        f"{CONSTRAINTS}::test_nothing_moves_within_the_band_and_enough_moves_outside_of_it",
        "RB-38",
    ),
    _mutant(
        "cool-down ignored",
        "a resource in its cool-down does not move for a better balance",
        _edit(_Search, "_may_move", "name not in self._problem.resting", "name"),
        f"{CONSTRAINTS}::test_a_resource_in_its_cool_down_does_not_move_for_a_better_balance",
        "RB-38",
    ),
    _mutant(
        "improved at once",
        "a leader keeps an interval between moves for a better balance, also after its election",
        _edit(Leading, "_move_limits", "0 if now < self._improves_from(policy) else None", "None"),
        f"{LEADING}::test_moves_for_a_better_balance_keep_their_interval_also_after_an_election",
        "RB-38",
    ),
    _mutant(
        "moves forgotten",
        "a leader remembers what moved for a better balance",
        _edit(Leading, "_record_improvement", "self._moved_at.update(dict.fromkeys(moved, now))", "pass"),
        f"{LEADING}::test_a_resource_that_moved_stays_for_its_cool_down",
        "RB-38",
    ),
    _mutant(
        "balance left",
        "a leader plans again when more may move",
        (Switch(Leading, "_plan_improvement", always(None)),),
        f"{LEADING}::test_a_leader_goes_on_with_what_one_rebalance_left",
        "RB-38",
    ),
    _mutant(
        "balance awaited",
        "a group that waits until more may move for a better balance is balanced",
        _edit(state_module, "_present_problem", "if group.policy.spaces_moves", "if False"),
        f"{LEADING}::test_a_group_is_balanced_while_moves_for_a_better_balance_wait_for_their_interval",
        "RB-19",
        "RB-38",
    ),
    _mutant(
        "late moves forgotten",
        "moves that turn out to be committed count as well",
        _edit(Leading, "group_read", "self._record_improvement(group.header.version, now)", "pass"),
        f"{LEADING}::test_moves_whose_publication_is_known_late_count_from_then",
        "RB-38",
    ),
    _mutant(
        "plan without pins",
        "a plan goes on from the present pins",
        (Switch(plan_module, "problem_of", _stated_with(pinned={})),),
        f"{PLANS}::test_a_plan_goes_on_from_present_pins_drains_and_policy",
        "RB-35",
    ),
    _mutant(
        "plan from nothing",
        "a plan moves only what the leader moves from where it is",
        (Switch(plan_module, "problem_of", _stated_with(previous={})),),
        f"{PLANS}::test_what_is_planned_is_what_the_leader_publishes[nothing]",
        "RB-35",
    ),
    _mutant(
        "plan under the old policy",
        "a plan allocates by the changed policy",
        _edit(GroupChange, "made_to", "replace(group.policy, **self.policy)", "group.policy"),
        f"{PLANS}::test_what_is_planned_is_what_the_leader_publishes[a weight changes under a budget]",
        "RB-35",
    ),
    _mutant(
        "plan that keeps who leaves",
        "a plan gives nothing to the nodes that it removes",
        _edit(GroupChange, "_members", "if member.label not in self.nodes_removed", ""),
        f"{PLANS}::test_what_is_planned_is_what_the_leader_publishes[a node leaves]",
        "RB-35",
    ),
    _mutant(
        "plan without restarts",
        "a plan counts what stops and starts on a node in eager mode",
        _edit(plan_module, "_nodes", "restarts and member.mode is Mode.EAGER", "False"),
        f"{PLANS}::test_a_plan_counts_what_restarts_on_an_eager_node",
        "RB-35",
    ),
    _mutant(
        "plan without the leader's pause",
        "a plan says how long a resource of a removed node may be without an owner",
        _edit(plan_module, "_times", "timings.stop_timeout_s + pause", "timings.stop_timeout_s"),
        f"{PLANS}::test_a_plan_says_how_long_resources_may_be_without_an_owner",
        "RB-35",
    ),
    _mutant(
        "explanation without tags",
        "an explanation names the constraint that keeps a resource from a node",
        _edit(
            explanations,
            "_obstacles",
            "elif missing := spec.needs - member.tags",
            "elif missing := frozenset()",
        ),
        f"{PLANS}::test_each_node_has_the_constraint_that_keeps_a_resource_from_it",
        "RB-35",
    ),
    _mutant(
        "explanation without zones",
        "an explanation keeps resources of a spread apart as the policy says",
        _edit(explanations, "_obstacles", "(member.zone if by_zone else node) in", "node in"),
        f"{PLANS}::test_a_zone_with_a_sibling_keeps_a_resource_from_all_its_other_nodes",
        "RB-35",
    ),
    _mutant(
        "explanation without the policy",
        "an explanation says if the policy holds a better balance back",
        _edit(explanation, "why_not_there", "allocation.certificate.improvable", "False"),
        f"{PLANS}::test_a_policy_that_holds_moves_back_is_named",
        "RB-35",
    ),
    _mutant(
        "wait for nobody",
        "an explanation says which node has yet to give a resource up",
        _edit(explanation, "_waits", "elif holder is not None and holder != assigned", "elif False"),
        f"{PLANS}::test_an_explanation_says_what_a_resource_waits_for",
        "RB-35",
    ),
    _mutant(
        "special forever",
        "a leader keeps up to date which resources have a weight, needs or a spread",
        _edit(PlanBasis, "after", "special - changed | {", "special | {"),
        f"{LEADING}::test_the_basis_of_a_plan_knows_what_is_special_from_the_changes",
        "RB-45",
    ),
    _mutant(
        "all acknowledgements read",
        "a leader that missed acknowledgements reads the later ones",
        _edit(Translation, "_acknowledgements", "0 if unreadable else update.acknowledged_until", "0"),
        "unit/test_translation.py::test_of_acknowledgements_that_were_missed_only_later_ones_are_read[False]",
        "RB-45",
    ),
    _mutant(
        "told of every version",
        "nothing reaches a node whose share stays",
        _edit(Translation, "targets", "self.keys.shares_of(topic.node)", "self.keys.shares"),
        "unit/test_translation.py::test_a_change_costs_the_leader_and_the_registry_what_changed[added-True]",
        "RB-45",
    ),
    _mutant(
        "members counted with each heartbeat",
        "a heartbeat costs the registry the same however many members there are",
        _edit(Leading, "next_beat_reads_fingerprint", "(members // MEMBERS_PER_BEAT + 1)", "1"),
        "unit/test_translation.py::test_of_many_members_a_leader_counts_a_part_with_each_heartbeat[300-4]",
        "RB-45",
    ),
    _mutant(
        "deposed leader",
        "a leader that sees another term reverts to follower",
        _edit(Node, "_deposed", "if self._leading.role is Role.LEADER:", "if False:"),
        "unit/test_node.py::test_a_leader_that_sees_another_term_reverts_and_asks_who_leads",
        "RB-6",
    ),
    _mutant(
        "leader unwatched",
        "a follower watches the leader's key",
        _edit(Leading, "topics", "if self.role is Role.FOLLOWER and self.leadership.leader:", "if False:"),
        "unit/test_node.py::test_what_a_node_watches_follows_from_its_role",
        "RB-13",
    ),
    _mutant(
        "foreign keys read",
        "what no Rebalanser wrote is told of and left alone",
        _edit(script, "readable", "except UnusableStore as error:", "except KeyError as error:"),
        "unit/test_translation.py::test_what_no_rebalanser_wrote_is_told_of_and_left_alone",
        "RB-46",
    ),
    _mutant(
        "types unchecked",
        "a value of wrong types is one that no Rebalanser wrote",
        _edit(
            values,
            "_load",
            "value = kind.model_validate_json(entry.value, strict=True)",
            "value = kind.model_validate_json(entry.value)",
        ),
        "unit/test_translation.py::test_a_value_of_wrong_types_is_named",
        "RB-46",
    ),
    _mutant(
        "moment behind writing",
        "a report takes its time and numbers while another is written",
        _edit(Journal, "moment", "self._lock", "self._writing"),
        "unit/test_history_journal.py::test_a_moment_is_taken_while_many_events_are_written",
        "RB-42",
    ),
    _mutant(
        "handler in the loop",
        "heartbeats go on while a handler runs",
        _edit(
            HandlerRunner,
            "call",
            "self._waiting.put_nowait(effect)",
            "(self._start if isinstance(effect, CallStart) else self._stop)(effect)",
        ),
        "unit/test_runtime.py::test_heartbeats_go_on_while_a_handler_runs",
        "RB-25",
    ),
    _mutant(
        "overrun passed over",
        "a handler that overruns is reported while it runs",
        _edit(Node, "_watch_handler", "self._overran = True", "return"),
        "unit/test_node.py::test_an_overrun_is_reported_while_it_lasts_and_heartbeats_go_on",
        "RB-25",
    ),
    _mutant(
        "OnStart stays hurried",
        "back in touch an OnStart that still runs has its own limit",
        _edit(
            Node, "_hurry", "self._limit_handler(self._handler_began, self._timings.start_timeout_s)", "pass"
        ),
        "unit/test_node.py::test_back_in_touch_an_onstart_that_runs_has_its_own_limit_again",
        "RB-21",
        "RB-34",
    ),
    _mutant(
        "switch not armed anew",
        "the dead man's switch follows every proof of life",
        _edit(NodeRunner, "_guard", "self._switch.arm(deadline)", "pass"),
        "unit/test_runtime.py::test_the_switch_follows_every_proof_of_life",
        "RB-34",
    ),
    _mutant(
        "heartbeats without backoff",
        "failed heartbeats are sent at growing distances",
        _edit(Node, "_beat_delay", "2.0 ** min(failures - 1, 32)", "1.0"),
        "unit/test_node.py::test_refused_heartbeats_are_sent_at_growing_distances_that_differ_from_node_to_node",
        "RB-21",
    ),
    _mutant(
        "heartbeats in step",
        "failed heartbeats of different nodes spread out",
        _edit(Node, "_beat_delay", "self._node_id", "0"),
        "unit/test_node.py::test_refused_heartbeats_are_sent_at_growing_distances_that_differ_from_node_to_node",
        "RB-21",
    ),
    _mutant(
        "timings that can't hold",
        "a configuration is refused in which a lease could end before OnStop has returned",
        (Switch(settings_module, "_TOLERANCE_S", lambda _: math.inf),),
        "unit/test_settings.py::test_timings_that_can_not_hold_are_refused_with_the_numbers",
        "RB-21",
    ),
    _mutant(
        "signal for the last group only",
        "a signal stops every group of the process",
        _edit(
            participant._StopSignals, "_handle", "list(self._stops.values())", "[*self._stops.values()][-1:]"
        ),
        "unit/test_running.py::test_a_signal_stops_all_that_run_and_what_begins_to_run_later",
        "RB-26",
    ),
    _mutant(
        "second SIGTERM kills",
        "a further SIGTERM leaves a graceful stop alone",
        _edit(
            participant._StopSignals,
            "_handle",
            "if self.asked:\n        return",
            "if self.asked:\n        raise SystemExit",
        ),
        "unit/test_running.py::test_further_signals_other_than_sigint_are_ignored",
        "RB-26",
    ),
    _mutant(
        "thread of the default executor",
        "a wait holds no thread of the loop's default executor",
        (Switch(participant, "in_own_thread", instead(_in_default_executor)),),
        "unit/test_async_group.py::test_a_signal_stops_all_groups_of_a_loop_that_has_no_thread_to_spare",
        "RB-26",
    ),
    _mutant(
        "two starts at once",
        "two threads that start a group start one node",
        _edit(
            Group,
            "_begun",
            "if not self._beginning.acquire(blocking=False):",
            "if False:",
            ("undo.callback(self._beginning.release)", "pass"),
        ),
        "unit/test_group.py::test_two_threads_that_start_a_group_start_one_node",
        "RB-26",
    ),
    _mutant(
        "late clean-up",
        "a stop that ends late leaves the next run's history alone",
        _edit(Group, "_clean_up", "run.close()", "(self._run or run).close()"),
        "unit/test_group.py::test_a_start_while_an_earlier_stop_still_cleans_up_has_its_whole_history",
        "AU-1",
    ),
    _mutant(
        "default label without random part",
        "a default label never comes back, and with it no drain",
        _edit(group_module, "default_label", "-{_random_part(os.getpid())}", ""),
        "unit/test_group.py::test_default_labels_name_the_process_and_no_later_one",
        "RB-30",
    ),
    _mutant(
        "watch closed under others",
        "a thread that waits for balance hears of changes, though others stop waiting",
        _edit(
            Admin,
            "_watch_from",
            "if self._closed else",
            "if self._closed or not revision else",
        ),
        "unit/test_admin.py::test_several_threads_wait_for_balance_at_once",
        "RB-19",
    ),
    _mutant(
        "operator requests without order",
        "an operator's request that arrives late undoes no later one",
        _edit(
            Translation, "_in_epoch", "guards=(Unchanged(key, epoch) if epoch else Absent(key),)", "guards=()"
        ),
        "unit/test_translation.py::test_a_late_request_of_an_operator_undoes_no_later_one",
        "RB-44",
    ),
    _mutant(
        "leader that never resigns",
        "a leader that fails to lead resigns",
        (Switch(Leading, "must_resign", lambda _: property(lambda _: False)),),
        "unit/test_node.py::test_a_leader_that_fails_too_often_resigns",
        "RB-43",
    ),
    _mutant(
        "orphaned parts kept",
        "leaders that fail leave no more than the last of them did",
        _edit(Leading, "_planned", "part.version <= asked.inherited_version", "False"),
        "unit/test_translation.py::test_leaders_that_fail_leave_no_more_than_the_last_of_them_did",
        "RB-43",
    ),
    _mutant(
        "own parts deleted first",
        "a publication of unknown outcome finds its shares, however late it takes effect",
        _edit(Leading, "_planned", "part.version <= asked.inherited_version", "True"),
        "unit/test_translation.py::test_a_publication_of_unknown_outcome_finds_its_shares_however_late_it_is",
        "RB-9",
    ),
    _mutant(
        "large share in one request",
        "a share of any size can be published",
        _edit(values, "dump_share", "len(whole), max_bytes)", "len(whole), len(whole))"),
        "unit/test_translation.py::test_a_share_larger_than_a_request_is_stored_in_parts",
        "RB-9",
    ),
    _mutant(
        "lost history not told",
        "a compaction while a watch is down loses no change",
        _edit(
            Translation,
            "notices",
            "if not events:",
            "events = [event for event in events if not isinstance(event, HistoryLost)]\n    if not events:",
        ),
        "conformance/test_coordinator_memory.py::TestMemory::test_a_gap_is_noticed",
        "RB-28",
    ),
    _mutant(
        "groups that nest",
        "no group's keys are under another's",
        (Switch(keys_module, "_quoted", instead(str)),),
        "unit/test_translation.py::test_no_groups_keys_are_under_anothers",
        "RB-33",
    ),
    _mutant(
        "unprintable name",
        "a name that can't be stored is refused",
        _edit(group_module, "check_name", "if not name.isprintable():", "if False:"),
        "unit/test_group.py::test_a_name_that_can_not_be_stored_is_refused",
        "RB-33",
    ),
    _mutant(
        "keys outlive their lease",
        "with a lease all its keys end in SQLite",
        (Switch(leases, "_DELETE_KEYS", lambda original: f"{original} AND 0"),),
        "conformance/test_sqlite.py::TestSqlite::test_a_lease_ends_with_all_its_keys_at_once",
        "RB-20",
    ),
    _mutant(
        "proof in place of a renewal",
        "a keep-alive that is answered with its proof renewed the lease in SQLite",
        _edit(SqliteRegistry, "_reply", "leases.keep_alive(self._store, lease)", "pass"),
        "conformance/test_sqlite.py::TestSqlite::test_a_renewal_is_proved",
        "RB-21",
    ),
    _mutant(
        "renewal in place of a proof",
        "a lease that was renewed in SQLite proves nothing if the node's key is gone",
        _edit(
            SqliteRegistry,
            "_reply",
            "self._carry_out(proof)",
            "self._carry_out(Transaction(then=proof.then))",
        ),
        "conformance/test_sqlite.py::TestSqlite::test_a_proof_sees_what_others_did",
        "RB-21",
    ),
    _mutant(
        "proof of its own time",
        "a proof counts from before the renewal was sent, in one request as in two",
        _edit(Translation, "_proven_at", "renewed.sent_at", "proof.sent_at"),
        "unit/test_translation.py::test_a_heartbeat_renews_and_proves_in_one_request_where_the_registry_can",
        "RB-21",
    ),
    _mutant(
        "a lost log goes unnoticed",
        "a process whose log or shared memory was removed from an SQLite file does nothing more",
        (Switch(Store, "_check_identity", instead(lambda _self: None)),),
        "unit/test_sqlite_registry.py::test_a_log_removed_while_in_use_is_noticed",
        "RB-1",
    ),
    _mutant(
        "a new log beside a file in use",
        "nobody opens an SQLite file that another has open with a log which is not beside it",
        (Switch(Store, "_see_that_none_has_it_open", instead(lambda _self: None)),),
        "unit/test_sqlite_registry.py::test_nobody_opens_a_file_whose_users_have_lost_its_log",
        "RB-1",
    ),
    _mutant(
        "guards on the ids of tasks together",
        "no task that is there is overwritten by one of several that are enqueued together",
        _edit(EnqueueAllStep, "_addition", "guards |= dict.fromkeys(addition.guards)", "pass"),
        "unit/test_key_value_engine.py"
        "::test_an_id_that_is_taken_while_others_are_enqueued_with_it_refuses_all",
        "SK-2",
    ),
    _mutant(
        "guards on what tasks together depend on",
        "what is collected meanwhile is depended on by none of the tasks that are enqueued together",
        _edit(
            EnqueueAllStep,
            "_guards",
            "guards[Created(key, items[key].create_revision)] = None",
            "pass",
        ),
        "unit/test_key_value_engine.py"
        "::test_whoever_collects_between_the_steps_of_an_enqueueing[several-2-together]",
        "SK-14",
    ),
    _mutant(
        "marks of what tasks together depend on",
        "what a collection has marked is depended on by none of the tasks that are enqueued together",
        _edit(EnqueueAllStep, "_guards", "guards[Absent(self.keys.mark(task))] = None", "pass"),
        "unit/test_key_value_engine.py"
        "::test_whoever_enqueues_as_a_collection_is_cut_off_is_not_left_alone[several]",
        "SK-14",
    ),
    _mutant(
        "the witness of tasks together",
        "as many of them as depend on many others are added only if none of those was collected meanwhile",
        _edit(EnqueueAllStep, "_witness_guards", "guards |= dict.fromkeys(guarded.guards)", "pass"),
        "unit/test_key_value_engine.py"
        "::test_whoever_collects_between_the_steps_of_an_enqueueing[several-40-together]",
        "SK-14",
    ),
    _mutant(
        "tasks together that are refused later",
        "none of several tasks is added to an SQLite file if one of them is refused",
        _edit(Writing, "_enqueue_all", "if unknown:", "if False:"),
        "conformance/test_engines.py::TestSqliteEngine"
        "::test_of_tasks_that_are_enqueued_together_none_is_if_one_is_refused",
        "SK-2",
    ),
    _mutant(
        "components beside one that is too large",
        "connected tasks that the store can't delete together keep no others from being deleted",
        _edit(retention, "_delete", "if len(parts) > 1:", "if False:"),
        "conformance/test_task_retention.py"
        "::test_connected_tasks_that_are_too_many_for_the_store_keep_no_others[memory]",
        "SK-22",
    ),
    _mutant(
        "results in another order",
        "a task gets the results of others in the order in which they were given",
        _edit(results, "_list", 'b",".join(values)', 'b",".join(list(values)[::-1])'),
        "unit/test_task_functions.py::test_a_payload_is_filled_with_results_as_they_are_stored",
        "SK-5",
    ),
    _mutant(
        "results that are not waited for",
        "a task waits for all whose results it gets",
        _edit(producer, "dependencies", "(*after, *tasks_of(sources))", "after"),
        "unit/test_task_functions.py::test_a_call_waits_for_those_whose_results_it_gets",
        "SK-5",
    ),
    _mutant(
        "a lone enqueue whose answer was lost",
        "an enqueue that may have been written is not told as one that was not",
        _edit(WriteBatcher, "enqueue", "failed = FirstError(error, began_at)", "failed = None"),
        "unit/test_task_batcher.py::test_an_enqueue_whose_first_answer_was_lost_stays_unknown",
        "SK-3",
    ),
    _mutant(
        "a lone enqueue that nobody waits for",
        "no batch is written beside an enqueue that is alone, and a queue is not closed meanwhile",
        _edit(Batches, "take_alone", "self._in_flight.append(batch)", "pass"),
        "unit/test_task_batcher.py::test_who_ends_waits_for_an_enqueue_that_is_written",
        "SK-15",
    ),
    _mutant(
        "pause that guards no claim",
        "a registry refuses the claim of an owner that has not heard of a pause",
        _edit(MoveStep, "plan", ", self.keys.unpaused", ""),
        "conformance/test_key_value_engines.py::TestMemory::test_nothing_is_claimed_in_a_paused_queue",
        "SK-6",
    ),
    _mutant(
        "pause looked at before the lock",
        "SQLite refuses a claim that was begun before a pause",
        _edit(Claims, "carry_out", "writing.is_paused(queue)", "False"),
        "unit/test_sqlite_engine.py::test_a_claim_that_was_begun_before_a_pause_is_refused",
        "SK-6",
    ),
    _mutant(
        "slots kept through a pause",
        "a claim for a slot is given back once the queue is paused",
        _edit(PausableClaims, "claim", "yield TakeArrived(0, None, keeps=False)", "pass"),
        f"{PAUSES}::test_a_claim_for_a_slot_is_given_back_and_slots_are_withdrawn",
        "SK-20",
    ),
    _mutant(
        "pause that is read once",
        "a pause that could not be read is read again",
        _edit(PausableClaims, "_read", "self._changed = True", "pass"),
        f"{PAUSES}::test_a_pause_that_could_not_be_read_is_read_again",
    ),
    _mutant(
        "pause for good",
        "ticks after the end of a pause come",
        _edit(Pause, "covers", "<= tick <= ended", "<= tick"),
        f"{PAUSES}::test_a_tick_within_a_pause_is_missed_whoever_looks_at_it_and_whenever",
        "SK-15",
    ),
    _mutant(
        "ticks made up for",
        "a tick within a pause is missed, also after its end",
        _edit(Pause, "covers", "in self.times", "in self.times if ended == math.inf"),
        f"{PAUSES}::test_a_tick_within_a_pause_is_missed_whoever_looks_at_it_and_whenever",
        "SK-15",
    ),
    _mutant(
        "bodies whose claim is over",
        "a body does not begin whose claim is over",
        _edit(Execution, "may_run", "and held.claim.still_mine()", ""),
        f"{STORIES}::test_the_story_is_as_written[claim-over-at-begin]",
        "SK-8",
    ),
    _mutant(
        "news that comes before its claim",
        "a claim that was over before it came is not begun",
        _edit(Execution, "_hand_out", "if each.head.id in self._recent]", "if False]"),
        f"{STORIES}::test_the_story_is_as_written[cancelled-before-its-claim-came]",
        "SK-6",
    ),
    _mutant(
        "claims for slots that come with a pause",
        "a claim that arrives for a slot while the queue is paused is given back",
        _edit(PausableClaims, "claim", "yield TakeArrived(0, None, keeps=False)", "pass"),
        f"{STORIES}::test_the_story_is_as_written[paused-before-its-claim-came]",
        "SK-23",
    ),
    _mutant(
        "claims ahead of a worker that is told of a pause",
        "a worker gives back what has not begun as soon as it hears of a pause",
        _edit(Execution, "look", "if is_paused and", "if False and"),
        f"{STORIES}::test_the_story_is_as_written[claimed-ahead-and-paused]",
        "SK-23",
    ),
    _mutant(
        "leaving: what has not begun",
        "a worker that leaves first gives back what has not begun",
        _edit(Execution, "leave", "yield GiveBack(self._take_ahead(), frees=True)", "pass"),
        f"{STORIES}::test_the_story_is_as_written[leaves-with-what-has-not-begun]",
        "SK-20",
    ),
    _mutant(
        "tries that a free thread is about to begin",
        "what a free thread is about to begin is not given back, however late it is",
        _edit(Execution, "_behind_bodies", "max(self._capacity() - self.running, 0)", "0"),
        "unit/test_task_worker.py::test_what_a_free_thread_is_about_to_begin_is_not_given_back",
        "SK-23",
    ),
    _mutant(
        "clock of a rate",
        "the mark of a rate limit is not compared with the clock of another host",
        _edit(ready_index, "full_at", "if clock and mark.clock == clock else latest", ""),
        "unit/test_task_owner.py::test_a_new_owner_counts_the_starts_before",
        "SK-23",
    ),
    _mutant(
        "mark that was read",
        "a start is written only over the mark that it follows",
        _edit(
            MoveStep,
            "plan",
            "guards = (*guards, Unchanged(self._rate_key, before) if before else Absent(self._rate_key))",
            "pass",
        ),
        "conformance/test_key_value_engines.py"
        "::TestMemory::test_a_start_is_written_over_the_mark_that_it_follows",
        "SK-23",
    ),
    _mutant(
        "rate of what is over",
        "a task whose claim is over waits for its rate limit, too",
        _edit(ClaimableTasks, "add_claimed", "if head.rate_limit", "if False"),
        "unit/test_task_owner.py::test_what_is_over_waits_for_its_rate_and_what_becomes_dead_is_no_start",
        "SK-23",
    ),
    _mutant(
        "claims for slots that were followed by others",
        "a claim for a slot that has arrived is taken only while it is current",
        _edit(SlotDecisions, "_current_claims", "if claim.holder == each.holder:", "if True:"),
        f"{STORIES}::test_the_story_is_as_written[slot-claim-that-was-followed]",
        "SK-6",
    ),
    _mutant(
        "queues without an order",
        "a task of a later queue begins only while no earlier one has a ready task",
        _edit(SharedConcurrency, "take", "any(each.looks for each in self._sharers[:number])", "False"),
        f"{QUEUES}::test_while_an_earlier_worker_looks_later_ones_get_no_place",
        "SK-5",
    ),
    _mutant(
        "a concurrency each",
        "queues that share a concurrency run no more bodies than that",
        _edit(SharedConcurrency, "_free", "sum(each.held() + each.taken for each in self._sharers)", "0"),
        f"{QUEUES}::test_while_an_earlier_worker_looks_later_ones_get_no_place",
        "SK-5",
    ),
    _mutant(
        "a queue without tasks looks on",
        "a queue that has no ready task keeps no later one waiting",
        _edit(SharedConcurrency, "return_places", "sharer.looks and sharer.taken <= claimed", "True"),
        f"{QUEUES}::test_while_an_earlier_worker_looks_later_ones_get_no_place",
        "SK-5",
    ),
    _mutant(
        "places that are freed without a word",
        "a place that was taken and not used wakes the workers that look",
        _edit(SharedConcurrency, "return_places", "sharer.taken > 0 or not sharer.looks", "False"),
        f"{QUEUES}::test_while_an_earlier_worker_looks_later_ones_get_no_place",
        "SK-5",
    ),
)


@dataclass(eq=False)  # pytest puts plugins into sets
class _Verdict:
    """A plugin that notes which rules the tests of a run are marked with, and how the run ended."""

    rules: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.rules = sorted(
            {rule for item in items for mark in item.iter_markers("rule") for rule in mark.args}
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[f"{report.nodeid} ({report.when})"] = report.longreprtext.splitlines()[-1]
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)


def _run(tests: Iterable[str], *options: str) -> _Verdict:
    verdict = _Verdict()
    pytest.main(["-q", "-x", "-p", "no:cacheprovider", *options, *tests], plugins=[verdict])
    return verdict


def _main(results: Path) -> None:
    """Write a file of JSON for the tests without a mutant, and one for each mutant."""
    everything = sorted({mutant.test for mutant in MUTANTS})
    _run(everything, "--collect-only")
    jobs = [
        ("", (), everything),
        *((mutant.name, mutant.switches, [mutant.test]) for mutant in MUTANTS),
    ]
    running: dict[int, str] = {}
    for name, switches, tests in jobs:
        running[_fork(results, name, switches, tests)] = name
        while len(running) == AT_ONCE or (running and not name):
            _wait_for_one(running)
    while running:
        _wait_for_one(running)


def _fork(results: Path, name: str, switches: tuple[Switch, ...], tests: list[str]) -> int:
    """Run tests in a child process, which writes a file; return its id."""
    if child := os.fork():
        return child
    with switched(switches):
        verdict = _run(tests)
    (results / str(os.getpid())).write_text(json.dumps([name, asdict(verdict)]))
    os._exit(0)


def _wait_for_one(running: dict[int, str]) -> None:
    """Wait for the end of one child; ``running`` has the mutant of each."""
    child, status = os.wait()
    if child in running:  # and no process that a module started
        name = running.pop(child)
        if status:
            raise RuntimeError(f"the tests of {name!r} ended with {os.waitstatus_to_exitcode(status)}")


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, _Verdict]:
    """How the tests of each mutant ended, and under an empty name all of them without one."""
    results = tmp_path_factory.mktemp("mutants")
    haste = {PATIENCE_VARIABLE: str(HASTE * patience_ratio())}
    ran = subprocess.run(
        [sys.executable, __file__, str(results)],
        env={**os.environ, **haste},
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ended = (json.loads(path.read_text()) for path in results.iterdir())
    return {name: _Verdict(**verdict) for name, verdict in ended}


def test_without_a_mutant_every_test_passes(verdicts: Mapping[str, _Verdict]) -> None:
    verdict = verdicts[""]
    assert not verdict.failed
    for mutant in MUTANTS:
        assert any(name.startswith(mutant.test) for name in verdict.passed), mutant.test


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_test_sees_every_mutant(
    mutant: Mutant, verdicts: Mapping[str, _Verdict], caught: Callable[[Caught], None]
) -> None:
    verdict = verdicts[mutant.name]
    assert mutant.rules <= set(verdict.rules), "the test is not marked with the rules of the mutant"
    assert verdict.failed, "the test passes"
    ((test, sentence),) = verdict.failed.items()
    assert test.endswith("(call)"), sentence
    assert not sentence.endswith(BROKEN), "the mutant is no program"
    caught(Caught(mutant, None, ", ".join(sorted(mutant.rules)), sentence))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
