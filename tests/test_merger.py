"""The merger at the borders: when a window is final, what belongs to its last instant, what a gap in a shard's answers does."""

from __future__ import annotations

from typing import Any

from schemas import codec
from schemas.records import DuplicateStep, DuplicateSteps, DuplicateWindow, PairStep
from streams.merger import Merger

W = 10_000_000
GRACE_US = 2_000_000


class Fleet:
    """Two ranks of one instance, told of by one shard."""

    def __init__(self) -> None:
        self.merger = Merger(window_us=W, grace_us=GRACE_US)
        self.offset = -1

    def say(self, rank: int, watermark: int, *steps: DuplicateStep, **what: Any) -> None:
        self.offset += 1
        previous, held = what.pop("previous_offset", self.offset - 1), what.pop("held", 1)
        made = DuplicateSteps(0, 1, self.offset, "a", rank, None, "m", watermark, list(steps), canary="c", **what)
        made.previous_offset, made.first_held_us = previous, held
        self.merger.apply(made, self.offset)

    def rows(self, scope: str = "fleet") -> dict[int, DuplicateWindow]:
        return {row.window_start_us // W: row for row in self.merger.drain() if row.scope == scope and row.tier == "GPU"}


def step(at: int, change: int) -> DuplicateStep:
    return DuplicateStep(at, "GPU", "a", 1, change, 16 * change, 0, 0)


def test_a_window_is_final_once_every_live_rank_has_passed_it_by_the_grace() -> None:
    fleet = Fleet()
    fleet.say(0, 3 * W, observed=[W, 3 * W])
    fleet.say(1, 2 * W + GRACE_US - 1, observed=[W, 2 * W + GRACE_US - 1], kv_bytes_per_token=2)
    assert not fleet.rows()[1].final
    fleet.say(1, 2 * W + GRACE_US)
    row = fleet.rows()[1]
    assert (row.final, row.version % 2, row.ranks, row.rank_lag_us) == (True, 1, 2, 0)
    assert (row.expected_ranks, row.observed_us, row.register) == (2, 2 * W, "exact")


def test_what_changes_at_the_instant_reached_belongs_to_the_final_state() -> None:
    fleet = Fleet()
    fleet.say(0, 2 * W + 5)
    fleet.say(1, 2 * W + 5, step(2 * W + 5, 1), kv_bytes_per_token=2)
    row = fleet.rows()[2]
    assert (row.as_of_us, row.inside_tokens_end, row.extra_tokens_max, row.inside_token_us) == (2 * W + 5, 16, 16, 0)
    assert (row.inside_bytes_end, row.extra_bytes_max, row.final) == (32, 32, False)


def test_a_sum_beyond_its_field_is_cut_and_says_so() -> None:
    fleet = Fleet()
    fleet.say(0, 3 * W, observed=[W, 3 * W], kv_bytes_per_token=2)
    fleet.say(1, 3 * W, step(W, 10**14), observed=[W, 3 * W], kv_bytes_per_token=2)
    row = fleet.rows()[1]
    assert (row.inside_token_us, row.inside_tokens_end, row.inside_byte_ms) == (2**63 - 1, 16 * 10**14, None)
    assert ("too_large" in row.reasons, row.register) == (True, "lower_bound")
    assert codec.decode(codec.encode(row), DuplicateWindow) == row


def test_what_is_foretold_is_not_counted_before_its_time() -> None:
    fleet = Fleet()
    fleet.say(0, 2 * W + 5)
    fleet.say(1, 2 * W + 5, step(2 * W + 6, 1))
    assert fleet.rows()[2].extra_tokens_max == 0
    fleet.say(0, 2 * W + 8)
    fleet.say(1, 2 * W + 8)
    assert fleet.rows()[2].inside_token_us == 2 * 16


def test_an_answer_that_never_came_lowers_every_window_since() -> None:
    fleet = Fleet()
    fleet.say(0, 2 * W, observed=[W, 2 * W])
    fleet.say(1, 2 * W, observed=[W, 2 * W])
    assert fleet.rows()[1].reasons == []
    fleet.say(0, 3 * W, observed=[2 * W, 3 * W], previous_offset=7)
    fleet.say(1, 3 * W, observed=[2 * W, 3 * W])
    rows = fleet.rows()
    assert (rows[2].reasons, rows[2].register) == (["shards_missing"], "lower_bound")


def test_the_bytes_of_a_pair_are_never_known() -> None:
    fleet = Fleet()
    fleet.say(0, 4 * W, pairs=[PairStep(W, "GPU", "chat", "code", 1, 16), PairStep(2 * W, "GPU", "chat", "code", -1, -16)])
    fleet.say(1, 4 * W, kv_bytes_per_token=2)
    rows = fleet.rows("workload_pair")
    assert [(rows[n].between_token_us, rows[n].between_byte_ms, rows[n].extra_bytes_max, rows[n].between_bytes_end) for n in (1, 2, 3)] == [
        (16 * W, None, None, None),
        (0, None, None, None),
        (0, None, None, None),
    ]


def test_copies_of_a_rank_of_unknown_size_have_no_bytes() -> None:
    fleet = Fleet()
    fleet.say(0, 3 * W, kv_bytes_per_token=2)
    fleet.say(1, 3 * W, step(2 * W + 5, 1))
    rows = fleet.rows()
    assert (rows[1].inside_byte_ms, rows[2].inside_byte_ms, rows[2].inside_token_us) == (0, None, 16 * (W - 5))


def test_a_closed_window_tells_of_the_ranks_that_had_been_heard_of_by_its_end() -> None:
    fleet = Fleet()
    fleet.say(0, W)
    fleet.say(1, W)
    fleet.say(2, 4 * W, held=4 * W)
    fleet.say(0, 4 * W)
    fleet.say(1, 4 * W)
    assert {n: (row.ranks, row.final) for n, row in fleet.rows().items() if n} == {
        **dict.fromkeys((1, 2), (2, True)),
        **dict.fromkeys((3, 4), (3, False)),
    }


def test_every_scope_has_a_row_of_zeros_from_its_first_window_on() -> None:
    fleet = Fleet()
    fleet.say(0, 3 * W, observed=[W, 3 * W], held=W)
    fleet.say(1, 3 * W, observed=[2 * W, 3 * W], held=2 * W)
    found = [(row.scope, row.scope_key, row.window_start_us // W) for row in fleet.merger.drain() if row.scope in ("rank", "model")]
    assert sorted(found) == [
        *(("model", "m", n) for n in (1, 2, 3)),
        *(("rank", "a/0", n) for n in (1, 2, 3)),
        *(("rank", "a/1", n) for n in (2, 3)),
    ]


def test_a_step_of_the_newest_window_that_comes_after_a_drain_counts_once() -> None:
    fleet = Fleet()
    fleet.say(0, 2 * W + 5)
    fleet.say(1, 2 * W + 5, step(2 * W + 1, 1))
    assert fleet.rows()[2].inside_blocks_end == 1
    fleet.say(0, 2 * W + 9)
    fleet.say(1, 2 * W + 9, step(2 * W + 6, 1))
    assert fleet.rows()[2].inside_blocks_end == 2


def test_an_answer_delivered_twice_counts_once() -> None:
    fleet = Fleet()
    fleet.say(0, 3 * W)
    fleet.say(1, 3 * W, step(2 * W, 1))
    fleet.merger.apply(DuplicateSteps(0, 1, 1, "a", 1, None, "m", 3 * W, [step(2 * W, 1)]), 99)
    assert fleet.rows()[2].extra_blocks_max == 1


def test_bytes_of_a_pair_stay_unknown_where_it_turns_out_to_have_had_nothing_in_common() -> None:
    fleet = Fleet()
    common = PairStep(W + 1, "GPU", "chat", "search", 1, 16)
    fleet.say(0, W + 2, pairs=[common])
    fleet.say(0, 2_000 * W)  # most of it a long stretch in which nothing happens
    had = fleet.rows("workload_pair")
    assert {(row.between_tokens_end, row.between_bytes_end) for row in had.values()} == {(16, None)}
    fleet.say(0, 2_000 * W, pairs=[PairStep(W + 1, "GPU", "chat", "search", -1, -16)])
    has_not = fleet.rows("workload_pair")
    assert had.keys() == has_not.keys()
    assert {(row.between_tokens_end, row.between_bytes_end, row.inside_byte_ms) for row in has_not.values()} == {(0, None, None)}
