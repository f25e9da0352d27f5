"""Trunks by hand: where a chain begins and ends, how deep it lies, which are told, and what of them the fleet's rows say."""

from __future__ import annotations

from typing import Any

from schemas.records import NO_ID, UNKNOWN_PARENT, DuplicateSteps, SharedContent
from streams.fleet_ranks import FleetRanks
from streams.prefixes import Rank, Shared, Trunk, trunks
from streams.shared_contents import SharedContents

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")
ONE, OTHER, THIRD = ("i", 0), ("i", 1), ("j", 0)
BOTH: tuple[Rank, ...] = (ONE, OTHER)
WINDOW_US = 10_000_000
STEP_US = 6 * WINDOW_US


def shared(parent: bytes, *ranks: Rank, size: int = 16, first: int = 7) -> Shared:
    return Shared(parent, size, first, ranks or BOTH)


def told(contents: dict[bytes, Shared], **options: int) -> list[tuple[bytes, bytes, int, int, int | None]]:
    return [(each.head, each.last, each.blocks, each.tokens, each.depth) for each in trunks(contents, **options)]


def test_a_chain_of_one_and_the_same_holders_is_one_trunk() -> None:
    assert told({A: shared(NO_ID), B: shared(A, size=8), C: shared(B)}) == [(A, C, 3, 40, 40)]


def test_other_holders_end_a_trunk_and_what_lies_before_counts_in_its_depth() -> None:
    """The second has the most extra mass: two copies beyond the first."""
    assert told({A: shared(NO_ID, ONE, OTHER, THIRD), B: shared(A), C: shared(B)}) == [(A, A, 1, 16, 16), (B, C, 2, 32, 48)]
    assert trunks({A: shared(NO_ID, ONE, OTHER, THIRD)})[0].extra_tokens == 32


def test_a_trunk_ends_where_it_forks_among_the_same_holders() -> None:
    assert told({A: shared(NO_ID, size=17), B: shared(A), C: shared(A)}) == [(A, A, 1, 17, 17), (B, B, 1, 16, 33), (C, C, 1, 16, 33)]
    assert told({A: shared(NO_ID), B: shared(A), C: shared(A, ONE, THIRD)}) == [(A, B, 2, 32, 32), (C, C, 1, 16, 32)]


def test_a_depth_is_known_only_from_the_root_on() -> None:
    assert told({B: shared(A)}) == [(B, B, 1, 16, None)], "nobody shares what lies before"
    assert told({B: shared(UNKNOWN_PARENT), C: shared(B)}) == [(B, C, 2, 32, None)]


def test_a_ring_of_ids_that_were_claimed_twice_begins_with_the_least_and_has_no_depth() -> None:
    assert told({B: shared(A), A: shared(C), C: shared(B), D: shared(C, ONE, THIRD)}) == [(A, C, 3, 48, None), (D, D, 1, 16, None)]


def test_those_with_the_most_extra_tokens_are_told_ties_by_their_last_block() -> None:
    contents = {A: shared(NO_ID), B: shared(NO_ID), C: shared(NO_ID, size=17), D: shared(NO_ID, ONE, OTHER, THIRD)}
    assert [last for _, last, *_ in told(contents, limit=3)] == [D, C, A]


def fleet() -> FleetRanks:
    """Ranks i/0, i/1 and j/0 of sizes 10, 20 and 40 bytes per token, i/0 observed for half of the window before the first instant."""
    known = FleetRanks(WINDOW_US)
    for (instance, rank), size, workload in ((ONE, 10, "chat"), (OTHER, 20, None), (THIRD, 40, "code")):
        answer = DuplicateSteps(0, 1, 0, instance, rank, workload, "m", STEP_US + WINDOW_US, [], canary="c", kv_bytes_per_token=size)
        answer.first_held_us = 1
        if (instance, rank) == ONE:
            answer.observed = [STEP_US - WINDOW_US // 2, STEP_US]
        known.hear(answer)
    return known


def answer(as_of: int, shard: int = 0, shared_late: int = 0, **holders: list[int]) -> DuplicateSteps:
    """What a shard tells of contents a, b, ... at ``as_of``: each behind the one before it, with these holders."""
    names = ["i/0", "i/1", "j/0"]
    contents, parent = [], NO_ID
    for letter, held in holders.items():
        key = letter.encode() * 16
        contents.append(SharedContent(key, parent, 16, 5, held, as_of))
        parent = key
    made: dict[str, Any] = {"shared_as_of_us": as_of, "shared": contents, "holder_names": names, "shared_late": shared_late}
    return DuplicateSteps(shard, 1, 0, "i", 0, None, None, as_of, [], **made)


def test_a_row_tells_copies_bytes_and_how_the_fleet_was_seen() -> None:
    contents = SharedContents(1, STEP_US)
    contents.take(answer(STEP_US, a=[2, 0, 1], b=[0, 1], c=[0]))
    first, second = contents.drain(fleet(), WINDOW_US, 9)
    assert (first.place, first.content_id, first.copies, first.instances, first.extra_tokens, first.depth_tokens) == (1, A, 3, 2, 32, 16)
    # The copy that is no extra one is taken to be the largest.
    assert (first.extra_bytes, first.ranks) == (16 * (10 + 20), ["i/0", "i/1", "j/0"])
    assert (first.workloads, first.models, first.first_seen_us, first.parent_content_id) == (["", "chat", "code"], ["m"], 5, None)
    assert (second.content_id, second.parent_content_id, second.copies, second.extra_bytes, second.depth_tokens) == (B, A, 2, 160, 32)
    assert (first.coverage, first.register, first.reasons) == (1 / 6, "lower_bound", ["coverage"])
    assert first.version == 9


def test_what_was_told_stays_until_it_changes_and_each_instant_is_told_once() -> None:
    contents, known = SharedContents(1, STEP_US), fleet()
    contents.take(answer(STEP_US, a=[0, 1]))
    assert [row.as_of_us for row in contents.drain(known, WINDOW_US, 0)] == [STEP_US]
    assert contents.drain(known, WINDOW_US, 0) == []
    contents.take(answer(3 * STEP_US, a=[0]))
    assert [row.as_of_us for row in contents.drain(known, WINDOW_US, 0)] == [2 * STEP_US], "at the third nobody shares it any more"


def test_all_shards_must_have_told_an_instant() -> None:
    contents, known = SharedContents(2, STEP_US), fleet()
    contents.take(answer(2 * STEP_US, a=[0, 1]))
    assert contents.drain(known, WINDOW_US, 0) == []
    contents.take(answer(STEP_US, shard=1))
    assert contents.drain(known, WINDOW_US, 0) == [], "what the other told is of the second"
    contents.take(answer(2 * STEP_US, shard=1))
    assert [row.as_of_us for row in contents.drain(known, WINDOW_US, 0)] == [2 * STEP_US]


def test_what_comes_too_late_for_an_instant_lowers_those_after_it() -> None:
    contents, known = SharedContents(1, STEP_US), fleet()
    contents.take(answer(STEP_US, a=[0, 1]))
    (on_time,) = contents.drain(known, WINDOW_US, 0)
    contents.take(answer(2 * STEP_US, shared_late=1, a=[0, 2]))
    (late,) = contents.drain(known, WINDOW_US, 0)
    assert "late_data" not in on_time.reasons
    assert ("late_data" in late.reasons, late.ranks) == (True, ["i/0", "j/0"])


def test_a_trunk_is_first_seen_when_its_last_block_was() -> None:
    (trunk,) = trunks({A: shared(NO_ID, first=3), B: shared(A, first=9)})
    assert trunk == Trunk(A, B, NO_ID, 2, 32, 32, 9, BOTH)
