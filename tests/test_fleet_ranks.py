"""The ranks of a fleet at the borders: who is expected in a window, who is waited for, and how its figures may be read."""

from __future__ import annotations

from typing import Any

from schemas.records import DuplicateSteps, Note, ResidencyChanges
from streams.fleet_ranks import Coverage, FleetRanks
from streams.shard_ranks import STALE_MS, Ranks

W = 10_000_000
"""One window; the one that is looked at is the second, [W, 2 W)."""

NAMED: dict[str, Any] = {"model": "m", "canary": "c"}


def hear(fleet: FleetRanks, instance: str, rank: int, watermark: int, *observed: int, **said: Any) -> None:
    model, canary = (NAMED | said)["model"], (NAMED | said)["canary"]
    rest = {name: value for name, value in said.items() if name not in NAMED and name != "workload"}
    made = DuplicateSteps(0, 1, 0, instance, rank, said.get("workload"), model, watermark, [], canary=canary, **rest)
    made.observed = list(observed)
    fleet.hear(made)


def two(*, first: int = 1, held: int = 1, other: str = "a", **said: Any) -> FleetRanks:
    """Two ranks that were observed throughout the window, the second heard of at ``first`` and with content since ``held``."""
    fleet = FleetRanks(W)
    hear(fleet, "a", 0, 3 * W, 1, 3 * W, first_held_us=1)
    hear(fleet, other, 1, 3 * W, first, 3 * W, first_held_us=held, **said)
    return fleet


def seen(fleet: FleetRanks) -> Coverage:
    return fleet.coverage(W, 2 * W, 2 * W, complete=True)


def test_all_seen_is_exact() -> None:
    assert seen(two()) == Coverage(2, 2 * W, [], "exact", "exact", "exact", 0)


def test_a_rank_is_expected_from_the_window_in_which_it_was_first_heard_of() -> None:
    assert seen(two(first=2 * W - 1)) == Coverage(2, W + 1, ["coverage"], "lower_bound", "lower_bound", "lower_bound", 0)
    assert seen(two(first=2 * W, held=2 * W)).expected == 1


def test_several_key_epochs_are_none() -> None:
    assert seen(two(key_epoch=1)).key_epoch is None
    assert FleetRanks(W).coverage(0, W, W, complete=True).key_epoch is None


def departed(at: int, back: int | None = None) -> int:
    fleet = two()
    hear(fleet, "a", 1, at, departed=True)
    if back is not None:
        hear(fleet, "a", 1, back)
    return seen(fleet).expected


def test_a_rank_that_departed_before_the_window_is_not_expected_until_it_is_heard_of_again() -> None:
    assert departed(W) == 2, "it left inside the window"
    assert departed(W - 1) == 1
    assert departed(W - 1, back=2 * W) == 1
    assert departed(W - 1, back=2 * W - 1) == 2


def test_zero_was_measured_only_where_two_ranks_held_something_by_then() -> None:
    assert seen(two(held=2 * W - 1)).register == "exact"
    alone = seen(two(held=2 * W))
    assert (alone.reasons, alone.inside, alone.between) == (["single_holder"], "indeterminate", "indeterminate")


def test_reasons_are_of_their_window_and_those_of_repeat_compute_are_none() -> None:
    fleet = two()
    hear(fleet, "a", 0, 3 * W, notes=[Note(W + 5, "lost"), Note(2 * W, "refused"), Note(W, "kv_connector"), Note(W, "history_forgotten")])
    assert (seen(fleet).reasons, seen(fleet).register) == (["lost"], "lower_bound")


def test_a_parent_conflict_lowers_every_window_from_its_own_on() -> None:
    fleet = two()
    hear(fleet, "a", 0, 3 * W, notes=[Note(2 * W, "parent_conflict")])
    assert seen(fleet).reasons == []
    assert fleet.coverage(2 * W, 3 * W, 3 * W, complete=True).reasons == ["parent_conflict"]


def test_a_model_has_to_be_declared_only_to_compare_instances() -> None:
    assert seen(two(model=None)).register == "exact"
    between = seen(two(other="b", model=None))
    assert (between.reasons, between.inside, between.between, between.register) == (
        ["model_undeclared"],
        "exact",
        "indeterminate",
        "indeterminate",
    )


def test_another_key_between_instances_leaves_what_is_inside_them() -> None:
    apart, split = seen(two(other="b", canary="other")), seen(two(canary="other"))
    assert (apart.reasons, apart.inside, apart.between) == (["key_change"], "exact", "indeterminate")
    assert (split.inside, split.between) == ("indeterminate", "indeterminate")


def test_what_is_declared_holds_from_its_window_on_and_the_first_backwards() -> None:
    fleet = FleetRanks(W)
    hear(fleet, "a", 0, W, workload="chat", declared_at_us=5)
    hear(fleet, "a", 0, 2 * W, workload="code", declared_at_us=2 * W)
    facts = fleet.get(("a", 0))
    assert [facts.at(at).workload for at in (0, 2 * W - 1, 2 * W, 9 * W)] == ["chat", "chat", "code", "code"]
    assert {scope: since for scope, since in fleet.scopes.items() if scope[0] == "workload"} == {
        ("workload", "chat"): W,
        ("workload", "code"): 2 * W,
    }


def test_a_rank_is_waited_for_until_it_is_further_behind_than_it_may_be() -> None:
    fleet = two(staleness_ms=5_000)
    assert len(fleet.live(3 * W + 5_000_000)) == 2
    assert [facts.rank for facts in fleet.live(3 * W + 5_000_001)] == [("a", 0)]
    assert fleet.live(3 * W + STALE_MS * 1_000 + 1) == []


def said(rank: int, watermark: int, offset: int, **what: Any) -> tuple[tuple[str, int], ResidencyChanges]:
    return ("a", rank), ResidencyChanges("a", rank, None, "m", offset, watermark, [], **what)


def test_an_instant_closes_once_every_live_rank_is_past_it_by_the_grace() -> None:
    ranks = Ranks(step_us=100, grace_us=10)
    ranks.hear(*said(0, 500, 0))
    ranks.hear(*said(1, 209, 0))
    assert ranks.close() == 100
    ranks.hear(*said(1, 210, 1))
    assert ranks.close() == 200
    ranks.hear(*said(1, 210, 2, departed=True))
    assert ranks.close() == 400


def test_a_rank_further_behind_than_it_may_be_holds_up_nothing() -> None:
    ranks = Ranks(step_us=100, grace_us=10)
    ranks.hear(*said(0, 1_150, 0))
    ranks.hear(*said(1, 150, 0, staleness_ms=1))
    assert ranks.close() == 100
    ranks.hear(*said(0, 1_151, 1))
    assert ranks.close() == 1_100


def test_what_was_sent_before_does_not_speak_for_a_rank_any_more() -> None:
    ranks = Ranks(step_us=100, grace_us=10)
    ranks.hear(*said(0, 500, 7, departed=True, canary="new"))
    known, taken = ranks.hear(*said(0, 600, 3, canary="old"))
    assert (known.departed, known.said[4], known.taken, taken, known.watermark_us) == (True, "new", 7, 7, 600)
