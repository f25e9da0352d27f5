"""Holders of one content by hand: which steps a few events make, what is kept, and what was so at an instant."""

from __future__ import annotations

from schemas.records import NO_ID, UNKNOWN_PARENT
from streams.holding import Content, Holder, Steps
from streams.shard_slice import Slice

SKEW_US = 15
A0: Holder = (("a", 0), "chat")
A1: Holder = (("a", 1), "chat")
B0: Holder = (("b", 0), "code")
P, Q = b"p" * 16, b"q" * 16


def given(*events: tuple[int, Holder, bool]) -> tuple[Content, Steps]:
    content, steps = Content(16), Steps()
    for at, holder, opened in events:
        content.append(at, holder, opened, SKEW_US, steps)
    return content, steps


def copies(*events: tuple[int, Holder, bool]) -> dict[tuple[int, str], tuple[int, ...]]:
    """Changes by time and rank, inside and between; what cancels is left out."""
    said = {(at, f"{rank[0]}{rank[1]}"): tuple(change) for (at, rank), change in given(*events)[1].ranks.items()}
    return {where: change for where, change in said.items() if any(change)}


def pairs(*events: tuple[int, Holder, bool]) -> dict[int, int]:
    return {at: change for (at, pair), change in given(*events)[1].pairs.items() if change and pair == ("chat", "code")}


def test_inside_an_instance_the_younger_bears_the_copy_and_hands_it_on() -> None:
    assert copies((0, A0, True), (5, A1, True)) == {(5, "a1"): (1, 0)}
    assert copies((0, A0, True), (5, A1, True), (9, A0, False)) == {(5, "a1"): (1, 0), (9, "a1"): (-1, 0)}


def test_between_instances_the_younger_bears_it_once_it_has_matured() -> None:
    assert copies((0, A0, True), (10, B0, True)) == {(25, "b0"): (0, 1)}
    assert copies((0, A0, True), (10, B0, True), (30, B0, False)) == {(25, "b0"): (0, 1), (30, "b0"): (0, -1)}
    assert copies((0, A0, True), (10, B0, True), (24, B0, False)) == {}
    assert copies((0, A0, True), (10, B0, True), (25, B0, False)) == {}, "a state of no duration"


def test_who_is_left_alone_bears_nothing() -> None:
    assert copies((0, A0, True), (10, B0, True), (30, A0, False)) == {(25, "b0"): (0, 1), (30, "b0"): (0, -1)}
    assert copies((0, A0, True), (10, B0, True), (12, A0, False)) == {}, "it had not matured"


def test_two_workloads_share_from_when_the_younger_has_held_it_for_the_allowance() -> None:
    assert pairs((0, A0, True), (10, B0, True)) == {25: 1}
    assert pairs((0, A0, True), (10, B0, True), (12, B0, False)) == {}
    assert pairs((0, A0, True), (10, B0, True), (12, A0, False)) == {}
    assert pairs((0, A0, True), (10, B0, True), (40, A0, False)) == {25: 1, 40: -1}
    assert pairs((0, A0, True), (10, B0, True), (11, A1, True), (40, A0, False)) == {25: 1}, "another of its ranks still has it"


def test_what_was_so_at_an_instant_includes_what_happened_at_it() -> None:
    content, _ = given((5, A0, True), (9, A1, True), (12, A0, False))
    assert [content.holders_at(at) for at in (4, 5, 9, 11, 12)] == [set(), {A0[0]}, {A0[0], A1[0]}, {A0[0], A1[0]}, {A1[0]}]
    assert content.behind(P, 7) is None
    assert [content.parent_as_of(at) for at in (6, 7)] == [UNKNOWN_PARENT, P]


def test_the_parent_that_was_told_first_holds_and_news_of_another_is_since_when_they_differ() -> None:
    content = Content(16)
    assert content.behind(UNKNOWN_PARENT, 1) is None
    assert content.behind(P, 5) is None
    assert content.behind(NO_ID, 9) == 9
    assert content.behind(NO_ID, 11) is None, "no news"
    assert content.behind(Q, 3) == 5, "three, of which two are in conflict since the second came"
    assert (content.parent, content.parent_at) == (Q, 3)


def test_what_a_single_rank_still_holds_is_not_let_go_of() -> None:
    content, _ = given((5, A0, True), (6, A0, False), (7, A0, True))
    content.settle(100, SKEW_US)
    assert content.events == [(7, A0, True)]
    assert (content.holders_at(200), content.forgotten()) == ({A0[0]}, False)
    gone, _ = given((5, A0, True), (7, A0, False))
    gone.settle(100, SKEW_US)
    assert (gone.events, gone.forgotten()) == ([], True)


def test_a_change_belongs_to_the_next_instant_that_is_told_or_is_late_for_it() -> None:
    place = Slice(step_us=60, skew_us=SKEW_US, max_events=9)
    assert not place.touch(60, P)
    assert not place.touch(61, Q)
    assert place.touched == {60: {P}, 120: {Q}}
    place.tell(60, 1 << 20, lambda rank: 0)
    assert place.touch(60, P)
    assert (place.touched, place.told_us) == ({120: {P, Q}}, 60)


def test_what_comes_for_a_time_that_was_let_go_of_counts_right_after_it() -> None:
    place = Slice(step_us=60, skew_us=SKEW_US, max_events=9)
    content, _ = given((0, A0, True), (5, A1, True), (50, A1, False))
    place.tiers["GPU"][P] = content
    content.settle(20, SKEW_US)
    assert (content.base_at, place.insert("GPU", P, [(6, A1, False)], Steps()), place.late_changes) == (5, None, 0)
    steps = Steps()
    assert place.insert("GPU", P, [(5, A1, False)], steps) == 6
    assert place.late_changes == 1
