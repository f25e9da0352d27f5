"""Rules of the holder core, checked by hand: lifetimes, returns, waste, forgetting, GPU time, contradictions, what the fleet hears."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.histogram import bucket
from schemas.records import (
    NO_ID,
    UNKNOWN_PARENT,
    Batch,
    Breach,
    Declaration,
    Departure,
    HolderReset,
    Loss,
    Note,
    Op,
    RankMessage,
    RankWindow,
    ResidencyChanges,
    Scrape,
)
from streams.residency import PAST_LIVES, RankCore

SECOND = 1_000_000
START = 1_700_000_000 * SECOND
A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


def declared(**what: Any) -> Declaration:
    return Declaration(**({"reuse_reporting": "none", "removals": "per_copy", "model": "m"} | what))


def store(*ids: bytes, after: bytes | None = None, **what: Any) -> Op:
    state: Any = "ROOT" if after is None else "CONTENT"
    packed = b"".join(ids)
    return Op("STORE", 0, "GPU", None, 16, packed, packed, state, after, parent_block_id=after, **what)


def remove(*ids: bytes, tier: str = "GPU") -> Op:
    return Op("REMOVE", 0, tier, None, block_ids=b"".join(ids))


class Rank:
    """One rank's stream, a batch a second unless told otherwise."""

    def __init__(self, declaration: Declaration | None = None, **options: Any) -> None:
        self.core = RankCore("a", 0, **options)
        self.offset = -1
        self.seq = 0
        self.life = "one"
        self.send(declaration=declaration or declared())

    def send(self, at: float = 0, **what: Any) -> None:
        made = RankMessage("a", 0, self.life, self.seq, START + round(at * SECOND), 0, "run")
        for name, value in what.items():
            setattr(made, name, value)
        self.offset += 1
        self.core.apply(made, self.offset)

    def batch(self, at: float, *ops: Op) -> None:
        self.send(at, batch=Batch(list(ops)))
        self.seq += 1

    def rows(self) -> list[RankWindow]:
        return self.core.drain().windows

    def changes(self) -> list[ResidencyChanges]:
        return self.core.drain().changes[0]


def test_lifetimes_and_returns_fall_into_buckets_of_the_rows_in_which_they_end() -> None:
    rank = Rank()
    rank.batch(1, store(A, B))
    rank.batch(4, remove(A))
    rank.batch(12, store(A), remove(B))
    first, second = (row.groups[0] for row in rank.rows())
    assert (first.lifetime_buckets, first.lifetime_counts) == ([bucket(3 * SECOND)], [1])
    assert (second.lifetime_buckets, second.lifetime_counts) == ([bucket(11 * SECOND)], [1])
    assert (second.back_evicted_buckets, second.back_evicted_counts) == ([bucket(8 * SECOND)], [1])
    assert first.back_evicted_counts == second.back_cleared_counts == []


def test_a_clear_ends_no_lifetime() -> None:
    rank = Rank()
    rank.batch(1, store(A))
    rank.batch(2, Op("CLEAR", None, None))
    (row,) = rank.rows()
    assert (row.groups[0].lifetime_counts, row.groups[0].cleared_blocks) == ([], 1)


def test_a_second_continuation_shows_a_use_of_the_whole_chain_before_it() -> None:
    rank = Rank()
    rank.batch(1, store(A, B), store(C, after=B))
    rank.batch(2, store(D, after=B))  # another request went on from B, and so found A as well
    rank.batch(3, remove(D), remove(C), remove(B), remove(A))
    (row,) = rank.rows()
    assert (row.groups[0].evicted_blocks, row.groups[0].unreused_blocks, row.groups[0].unreused_tokens) == (4, 2, 32)


def test_a_use_is_of_one_residency() -> None:
    rank = Rank()
    rank.batch(1, store(A), store(A))
    rank.batch(2, remove(A), remove(A), store(A), remove(A))
    (row,) = rank.rows()
    assert (row.groups[0].evicted_blocks, row.groups[0].unreused_blocks) == (3, 1)


def test_a_marked_store_shows_a_use() -> None:
    rank = Rank(declared(reuse_reporting="labelled"))
    rank.batch(1, store(A), store(B))
    rank.batch(2, store(A, reused=True))
    rank.batch(3, remove(A), remove(B))
    assert rank.rows()[0].groups[0].unreused_blocks == 1


def test_what_was_lost_longest_ago_is_forgotten_first_and_every_row_from_then_on_says_so() -> None:
    rank = Rank(history_blocks=2)
    rank.batch(1, store(A, B, C))
    rank.batch(2, remove(C))
    rank.batch(3, remove(B))
    rank.batch(12, remove(A))
    rank.batch(13, store(C), store(A))
    rank.batch(25, store(B))
    first, second, third = rank.rows()
    assert [row.groups[0].forgotten_blocks for row in (first, second, third)] == [0, 1, 0]
    assert ["history_forgotten" in row.reasons for row in (first, second, third)] == [False, True, True]
    assert (second.groups[0].recompute_evicted_blocks, third.groups[0].recompute_evicted_blocks) == (1, 1)
    assert (first.register, third.register) == ("lower_bound", "lower_bound")


def test_history_of_an_earlier_life_is_forgotten_after_its_time() -> None:
    rank = Rank(history_us=60 * SECOND)
    rank.batch(1, store(A, B))
    rank.life, rank.seq = "two", 0
    rank.send(5, holder_reset=HolderReset(START + 5 * SECOND, "new"))
    rank.batch(65, store(A))  # exactly the bound: remembered
    rank.batch(66, store(B))
    rows = rank.rows()
    assert sum(row.groups[0].recompute_restarted_blocks for row in rows) == 2, "B's loss was remembered when its batch came"
    rank = Rank(history_us=60 * SECOND)
    rank.batch(1, store(A))
    rank.batch(2, remove(A))
    rank.batch(63)
    rank.batch(64, store(A))
    assert sum(group.recompute_evicted_blocks for row in rank.rows() for group in row.groups) == 0


def test_gpu_time_is_of_the_declared_rate_and_of_all_gpus_of_the_rank() -> None:
    rank = Rank(declared(prefill_rate=1_000.0, gpus_per_rank=2.0))
    rank.batch(1, store(A))
    rank.batch(2, remove(A), store(A))
    drained = rank.core.drain()
    assert drained.windows[0].groups[0].recompute_evicted_gpu_us == drained.recomputes[0].gpu_us == 32_000
    assert (drained.windows[0].prefill_rate, drained.windows[0].prefill_rate_source, drained.windows[0].gpus_per_rank) == (
        1_000.0,
        "declared",
        2.0,
    )


def test_the_highest_rate_of_the_last_hour_is_in_force_and_without_any_tokens_go_unrated() -> None:
    rank = Rank()
    rank.batch(1, store(A), remove(A), store(A))
    rank.send(scrape=Scrape(0, prompt_tokens=0))
    rank.send(scrape=Scrape(5_000, prompt_tokens=50_000))  # too soon to measure
    rank.batch(2, remove(A), store(A))
    rank.send(scrape=Scrape(10_000, prompt_tokens=60_000, prompt_tokens_cached=20_000))  # 40,000 in 10 s
    rank.send(scrape=Scrape(20_000, prompt_tokens=60_000, prompt_tokens_cached=20_000))
    rank.batch(3, remove(A), store(A))
    row = rank.rows()[0]
    assert (row.groups[0].unrated_tokens, row.groups[0].recompute_evicted_gpu_us) == (32, 16 * SECOND // 4_000)
    assert (row.prefill_rate, row.prefill_rate_source, row.gpus_per_rank, row.scrapes) == (4_000.0, "measured", 1.0, 4)
    rank.send(scrape=Scrape(3_700_000, prompt_tokens=60_000, prompt_tokens_cached=20_000))
    assert rank.rows()[0].prefill_rate is None


def test_a_counter_of_cached_tokens_that_fell_measures_nothing() -> None:
    """Another process counts from zero: what its counters rose by since the old one's nobody knows."""
    rank = Rank()
    rank.batch(1, store(A))
    rank.send(scrape=Scrape(0, prompt_tokens=1_000, prompt_tokens_cached=900))
    rank.send(scrape=Scrape(10_000, prompt_tokens=2_000, prompt_tokens_cached=0))
    assert rank.rows()[0].prefill_rate is None
    rank.send(scrape=Scrape(20_000, prompt_tokens=3_000, prompt_tokens_cached=500))
    assert rank.rows()[0].prefill_rate == 50.0


def test_more_cached_than_the_pool_has_is_a_breach_with_both_numbers_and_ends_the_observed_stretch() -> None:
    rank = Rank()
    rank.batch(1, store(A, B), store(A))
    rank.send(scrape=Scrape(7, num_gpu_blocks=2))
    rank.batch(4)
    rank.batch(5)
    (row,) = rank.rows()
    assert row.breaches == [Breach("cached_over_pool", START + SECOND, 7, 3, 2)]
    assert (row.breaches_found, row.pool_blocks, row.observed_us, row.reasons) == (1, 2, SECOND, ["cached_over_pool"])
    assert row.groups[0].resident_copies == 3
    rank = Rank(declared(reuse_reporting="unlabelled"))
    rank.batch(1, store(A, B), store(A))
    rank.send(scrape=Scrape(7, num_gpu_blocks=2))
    assert rank.rows()[0].breaches == [], "the second store may have been an announcement"


def test_more_in_use_than_cached_must_hold_twice() -> None:
    rank = Rank()
    rank.batch(1, store(A))
    odd = Scrape(0, num_gpu_blocks=100, kv_cache_usage=0.5, requests_running=2)  # 50 > 1 + 2 + 8
    rank.send(scrape=odd)
    rank.send(scrape=odd)  # delivered twice
    assert rank.rows()[0].breaches == []
    rank.send(scrape=Scrape(10, num_gpu_blocks=100, kv_cache_usage=0.5, requests_running=2))
    (row,) = rank.rows()
    assert row.breaches == [Breach("in_use_over_cached", START + SECOND, 10, 50, 11)]
    assert "in_use_over_cached" in row.reasons


def test_a_connector_shows_in_the_metrics_until_the_life_ends() -> None:
    rank = Rank()
    rank.batch(1, store(A))
    rank.send(scrape=Scrape(0, external_prefix_cache_hits=5))
    assert rank.rows()[0].kv_connector is None
    rank.send(scrape=Scrape(1, external_prefix_cache_hits=6))
    (row,) = rank.rows()
    assert (row.kv_connector, row.register, row.reasons) == ("seen in metrics", "indeterminate", ["kv_connector"])
    rank.life, rank.seq = "two", 0
    rank.send(2, holder_reset=HolderReset(START + 2 * SECOND, "new"))
    rank.batch(3)
    assert {row.life_id: row.kv_connector for row in rank.rows()}["two"] is None


def test_a_message_that_counting_gives_up_on_is_unreadable_to_its_rank() -> None:
    rank = Rank()
    rank.batch(0, store(A))
    broken: Any = None
    with pytest.raises(TypeError):
        rank.batch(1, Op("STORE", 0, "GPU", block_ids=broken))
    rank.core.unreadable(rank.offset)
    rank.batch(2, remove(A))
    (row,) = rank.rows()
    assert "unreadable" in row.reasons
    assert row.observed_us < 2 * SECOND


def test_rows_say_why_they_are_less_than_exact() -> None:
    rank = Rank(declared(reuse_reporting="unlabelled"))
    rank.seq = 4
    rank.batch(1, Op("STORE", 0, "GPU", None, 16, A, NO_ID))
    rank.core.unreadable(rank.offset + 1)
    rank.core.unreadable(rank.offset + 1)
    rank.offset += 1
    rank.batch(3)
    (row,) = rank.rows()
    assert row.reasons == ["identity", "late_attach", "unlabelled", "unreadable", "warmup"]
    assert (row.observed_us, row.register) == (0, "indeterminate")
    assert (row.prefill_rate, row.prefill_rate_source, row.gpus_per_rank, row.pool_blocks) == (None, None, 1.0, None)


def test_the_fleet_hears_of_parents_stretches_and_reasons() -> None:
    rank = Rank(shards=2)
    rank.batch(1, store(A, B), store(C, after=B))
    rank.batch(2, Op("STORE", 0, "GPU", None, 16, D, D, "UNKNOWN"))
    rank.core.unreadable(rank.offset + 1)
    shards = rank.core.drain().changes
    parents = {}
    for messages in shards:
        for step in (step for message in messages for step in message.steps):
            for start in range(0, len(step.opened), 16):
                parents[step.opened[start : start + 16]] = step.parents[start : start + 16]
    assert parents == {A: NO_ID, B: A, C: B, D: UNKNOWN_PARENT}
    told = [message for message in shards[0] if message.observed or message.notes]
    assert [(message.observed, message.notes) for message in told] == [([START + SECOND, START + 2 * SECOND], [Note(START, "unreadable")])]
    assert not any(message.observed or message.notes for message in shards[1])


def test_a_departed_rank_is_back_for_the_fleet_with_its_next_batch() -> None:
    rank = Rank()
    rank.batch(1, store(A))
    rank.send(1, departure=Departure("stopped"))
    assert rank.rows()[0].departed
    rank.send(1, declaration=declared())
    assert not rank.rows()[0].departed, "the forwarder is there again"
    rank.batch(40)
    rank.batch(41)
    assert [(message.departed, message.watermark_us) for message in rank.changes()] == [
        (False, START + 40 * SECOND),
        (False, START + 41 * SECOND),
    ]


def test_a_message_to_the_fleet_has_one_declaration() -> None:
    rank = Rank(declared(workload="old", kv_bytes_per_token=10))
    rank.batch(1, store(A))
    rank.send(declaration=declared(workload="new", kv_bytes_per_token=10, kv_bytes_by_group={"1": 4}))
    rank.batch(2, store(B))
    rank.batch(3, Op("STORE", 1, "GPU", None, 16, C, C))
    told = [(message.workload, message.kv_bytes_per_token, message.declared_at_us, len(message.steps)) for message in rank.changes()]
    assert told == [("old", 10, 0, 1), ("new", 10, START + SECOND, 1), ("new", None, START + 3 * SECOND, 1)]


def test_copies_that_were_announcements_until_the_declaration_changed_close_once() -> None:
    rank = Rank(declared(reuse_reporting="unlabelled"))
    rank.batch(1, store(A), store(A), store(A))
    rank.batch(2, remove(A))
    rank.send(declaration=declared())
    rank.batch(3, remove(A))
    rank.batch(4, remove(A))
    closed = [step.closed for message in rank.changes() for step in message.steps if step.closed]
    assert closed == [A]


def test_what_comes_late_of_a_life_that_ended_begins_no_life_and_changes_nothing() -> None:
    rank = Rank()
    rank.batch(1, store(A))
    rank.life, rank.seq = "two", 0
    rank.send(2, holder_reset=HolderReset(START + 2 * SECOND, "numbers began again"))
    rank.batch(3, store(B))
    rank.rows()
    rank.life = "one"
    rank.batch(4, store(C))
    rank.life = "two"
    rank.batch(5, store(D))
    (row,) = rank.rows()
    assert (row.life_id, row.batches, row.duplicate_batches) == ("two", 2, 1)
    assert (row.groups[0].resident_blocks, row.groups[0].stored_blocks) == (2, 2)
    assert "reattached" not in row.reasons


def test_of_a_lost_range_the_numbers_of_other_ranks_were_not_lost() -> None:
    rank = Rank()
    rank.batch(1, store(A))
    rank.send(1, loss=Loss(1, 6, "gone"), skipped=2)
    assert [row.lost_batches for row in rank.rows()] == [4]


def reset(rank: Rank, at: float, life: str, boundary: float | None = None, **what: Any) -> None:
    """The engine came back (or goes on under another key) as ``life``."""
    rank.life, rank.seq = life, 0
    rank.send(at, holder_reset=HolderReset(START + round((at if boundary is None else boundary) * SECOND), "new", **what))


def test_every_copy_that_was_open_ends_with_the_engine() -> None:
    rank = Rank()
    rank.batch(1, store(A, B), store(A))
    reset(rank, 2, "two", boundary=0.5)  # of before the newest batch: it ends there, and engine time never goes back
    (row,) = rank.rows()
    assert (row.groups[0].restarted_blocks, row.groups[0].restarted_tokens, row.groups[0].resident_copies) == (3, 48, 0)
    rank.batch(4, store(A))
    (again,) = rank.core.drain().recomputes
    assert (again.cause, again.lost_at_us, again.elapsed_us) == ("restarted", START + SECOND, 3 * SECOND)


def test_under_another_key_nothing_of_before_comes_back() -> None:
    """Not what was lost before the restart before it, either."""
    rank = Rank()
    rank.batch(1, store(A))
    reset(rank, 2, "two")
    rank.batch(3, store(B))
    reset(rank, 4, "three", cause="rekeyed")
    rank.batch(5, store(A, B))
    assert rank.core.drain().recomputes == []


def test_what_lay_in_an_offload_tier_when_nobody_watched_was_not_lost_before() -> None:
    """It went from the GPU alone; how it ended in the other tier was not seen."""
    rank = Rank()
    cpu = store(A)
    cpu.tier = "CPU"
    rank.batch(1, store(A), cpu)
    rank.batch(2, remove(A))
    rank.life, rank.seq = "two", 0
    rank.batch(3)
    rank.batch(4, store(A))
    assert rank.core.drain().recomputes == []


def test_a_second_store_of_what_lies_off_the_gpu_as_well_may_have_been_loaded() -> None:
    rank = Rank()
    cpu = store(A)
    cpu.tier = "CPU"
    rank.batch(1, store(A, B), cpu)
    rank.batch(2, store(A, B))
    assert [(each.cause, each.block_id) for each in rank.core.drain().recomputes] == [("concurrent", B)]


@pytest.mark.parametrize("tier", ["GPU", "CPU"])
def test_where_copies_are_not_told_from_announcements_the_first_removal_ends_it_for_the_fleet(tier: str) -> None:
    """Each reading can only undercount: for what is computed again, the residency lasts until removals have matched all stores."""

    def closed(**declaration: Any) -> list[int]:
        """How many contents each batch closed."""
        rank = Rank(declared(**declaration))
        stored = store(A)
        stored.tier = tier
        rank.batch(1, stored)
        rank.batch(2, stored)
        for at in (3, 4):
            rank.batch(at, remove(A, tier=tier))
        return [(step.at_us - START) // SECOND for message in rank.changes() for step in message.steps if step.closed]

    assert closed(reuse_reporting="unlabelled") == [3]
    assert closed(reuse_reporting="none") == [4]
    assert closed(reuse_reporting="none", removals="last_copy") == [3]


def test_what_a_batch_undid_itself_the_fleet_never_hears_of() -> None:
    rank = Rank()
    rank.batch(1, store(A), store(B), remove(A))
    rank.batch(2, remove(B), store(B))
    assert [(step.opened, step.closed) for message in rank.changes() for step in message.steps] == [(B, b"")]


def test_content_is_not_learned_from_a_store_of_another_size() -> None:
    rank = Rank()
    rank.batch(1, Op("STORE", 0, "GPU", None, 16, A + B, NO_ID + NO_ID))
    far = [Op("STORE", 0, "GPU", "REMOTE", size, each, each, "ROOT") for size, each in ((32, A), (16, B))]
    rank.batch(2, *far)
    assert [step.opened for message in rank.changes() for step in message.steps] == [B]


def test_the_pool_is_known_beyond_the_life() -> None:
    rank = Rank()
    rank.batch(1, store(A))
    rank.send(scrape=Scrape(7, num_gpu_blocks=50))
    reset(rank, 2, "two")
    rank.batch(3)
    assert [row.pool_blocks for row in rank.rows()] == [50, 50]


def test_a_running_request_fills_a_block_of_each_gpu_group_alone() -> None:
    rank = Rank()
    cpu = Op("STORE", 1, "CPU", None, 16, B, B, "ROOT")
    rank.batch(1, store(A), cpu)
    for at_ms in (0, 10):
        rank.send(scrape=Scrape(at_ms, num_gpu_blocks=100, kv_cache_usage=0.5, requests_running=2))
    assert [breach.bound for row in rank.rows() for breach in row.breaches] == [1 + 2 + 8]


def test_ten_contradictions_of_a_row_are_shown_and_all_counted() -> None:
    rank = Rank()
    rank.batch(1, store(A, B))
    for at_ms in range(12):
        rank.send(scrape=Scrape(at_ms, num_gpu_blocks=1))
    (row,) = rank.rows()
    assert ([breach.scraped_at_ms for breach in row.breaches], row.breaches_found, row.scrapes) == (list(range(10)), 12, 12)


def test_what_came_before_any_batch_stands_in_the_first_row() -> None:
    rank = Rank()
    rank.send(loss=Loss(0, 2, "gone"))
    for at_ms in (0, 10):
        rank.send(scrape=Scrape(at_ms, num_gpu_blocks=100, kv_cache_usage=0.5, requests_running=2))
    rank.seq = 3
    rank.batch(1, store(A))
    (row,) = rank.rows()
    assert (row.lost_batches, row.scrapes, row.breaches_found) == (3, 2, 1)
    assert row.breaches == [Breach("in_use_over_cached", 0, 10, 50, 8)]
    assert {"lost", "in_use_over_cached"} <= set(row.reasons)


def test_lives_long_ago_are_let_go() -> None:
    rank = Rank()
    for life in range(PAST_LIVES + 5):
        rank.life = f"life {life}"
        rank.send(declaration=declared())
    rank.core.drain()
    assert len(rank.core.dump()) < PAST_LIVES * 20


@pytest.mark.parametrize("tier", ["CPU", "GPU"])
def test_bytes_are_of_the_group_or_of_the_only_one(tier: str) -> None:
    rank = Rank(declared(kv_bytes_per_token=10, kv_bytes_by_group={"1": 4}))
    rank.batch(1, store(A))
    assert [group.kv_bytes_per_token for group in rank.rows()[0].groups] == [10]
    rank.batch(2, Op("STORE", 1, tier, None, 16, B, B))
    assert [group.kv_bytes_per_token for group in rank.rows()[0].groups] == [None, 4]
