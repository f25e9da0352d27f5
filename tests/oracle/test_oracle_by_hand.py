"""Tiny constructed streams whose figures were worked out by hand. Each test says how.

Unless said: blocks of 4 tokens, times in whole seconds, one instance "i" with rank 0, the stream declared `none`, allowance 1 s.
A block with engine hash h holds the tokens [h, h, h, h], so equal hashes in equal chains are equal contents.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest

from .oracle import Contents, Rank, RankInput, figures, ranks_of_capture, read_capture

S = 1_000_000
Raw = dict[str, Any] | list[Any]
ZERO = {"tokens": 0, "blocks": 0}


def store(*hashes: int, parent: int | None = None, size: int = 4, tokens: list[int] | None = None, **more: Any) -> Raw:
    ids = [h for h in hashes for _ in range(size)] if tokens is None else tokens
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": size,
        "lora_id": None,
        **more,
    }


def remove(*hashes: int, **more: Any) -> Raw:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


def clear(**scope: Any) -> Raw:
    return {"type": "TierBlocksCleared" if scope else "AllBlocksCleared", **scope}


def batch(at: float, *events: Raw, rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([at, list(events), rank])


def frames(*payloads: bytes, first: int = 0) -> list[tuple[int, bytes]]:
    return [(first + n, payload) for n, payload in enumerate(payloads)]


def rank(*payloads: bytes, reuse: str = "none", instance: str = "i", dp: int = 0, **more: Any) -> RankInput:
    return RankInput(instance, dp, frames(*payloads), reuse_reporting=reuse, **more)


def one(*payloads: bytes, reuse: str = "none", **more: Any) -> dict[str, Any]:
    return figures([rank(*payloads, reuse=reuse, **more)])


def causes(result: dict[str, Any]) -> dict[str, int]:
    """Blocks by cause, without the zeros."""
    return {c: v["blocks"] for c, v in result["repeat_compute"].items() if v is not None and v["blocks"]}


def mean(part: dict[str, Any], what: str = "extra_tokens") -> Fraction:
    return Fraction(*part[what]["mean"])


# ------------------------------------------------------------------------------------- rules 1 and 2: causes


def test_an_evicted_block_that_comes_back_is_a_recompute() -> None:
    # 1 and 2 stored at 10; 2 evicted at 12, stored again at 15; evicted at 16 and not back: 1 recompute of 4 tokens after 3 s.
    got = one(
        batch(10, store(1, 2)),
        batch(12, remove(2)),
        batch(15, store(2, parent=1)),
        batch(16, remove(2)),
    )
    assert got["span"] == [10 * S, 16 * S]
    assert got["repeat_compute"]["evicted"] == {"tokens": 4, "blocks": 1}
    assert causes(got) == {"evicted": 1}
    assert got["recomputes"] == [("i", 0, 0, "evicted", 4, 12 * S, 15 * S)]
    (only,) = got["ranks"]
    assert only["stored_tokens"] == 12  # three stores
    assert only["evicted_tokens"] == 8  # two removals
    assert only["unjoined_evicts"] == 0
    assert got["coverage"] == 1


def test_a_clear_ends_everything_and_a_store_in_the_same_batch_comes_back() -> None:
    # Cleared at 12; 1 back within that batch (0 s later), 2 at 13 and again at 14 while held: 2 cleared, 1 concurrent.
    got = one(batch(10, store(1, 2, 3)), batch(12, clear(), store(1)), batch(13, store(2, parent=1)), batch(14, store(2, parent=1)))
    assert causes(got) == {"cleared": 2, "concurrent": 1}
    assert [r[5:] for r in got["recomputes"]] == [(12 * S, 12 * S), (12 * S, 13 * S)]
    assert got["ranks"][0]["evicted_tokens"] == 0


def test_order_inside_a_batch_counts() -> None:
    # remove, store, remove, store of one block in one batch: twice back.
    got = one(batch(10, store(1)), batch(11, remove(1), store(1), remove(1), store(1)))
    assert causes(got) == {"evicted": 2}


def test_history_is_consumed_by_one_store() -> None:
    # Evicted once, back at 12: counted. Two more stores while held are copies; both removed leaves one; no recompute until the last goes.
    got = one(
        batch(10, store(1)),
        batch(11, remove(1)),
        batch(12, store(1)),
        batch(13, store(1), store(1)),
        batch(14, remove(1), remove(1)),
        batch(15, store(1)),  # still one copy: concurrent
    )
    assert causes(got) == {"evicted": 1, "concurrent": 3}


def test_a_removal_of_something_not_open_opens_no_history() -> None:
    # 9 was never stored; 1 is removed twice: 2 unjoined, and the later store of 9 is a first one.
    got = one(batch(10, remove(9), store(1)), batch(11, remove(1), remove(1)), batch(12, store(9)))
    assert causes(got) == {}
    assert got["ranks"][0]["unjoined_evicts"] == 2
    assert got["ranks"][0]["evicted_tokens"] == 4


def test_a_restart_closes_everything_and_only_content_matches_across_it() -> None:
    # Life 1: content of 1 open, that of 2 evicted at 11. Life 2 (other hashes, same tokens) starts at 20: the first is `restarted`
    # (lost at 20, back at 20), the second still `evicted` (lost at 11). Hash 2, now with tokens never seen, is new.
    got = figures(
        [
            RankInput(
                "i",
                0,
                [
                    *frames(batch(10, store(1), store(2)), batch(11, remove(2))),
                    *frames(batch(20, store(101, tokens=[1] * 4), store(102, tokens=[2] * 4), store(2, tokens=[77] * 4)), batch(21)),
                ],
                "none",
            )
        ]
    )
    assert causes(got) == {"restarted": 1, "evicted": 1}
    assert sorted(r[3:] for r in got["recomputes"]) == [("evicted", 4, 11 * S, 20 * S), ("restarted", 4, 20 * S, 20 * S)]
    # observed: 10..11 and 20..21 of 11 s
    assert got["coverage"] == Fraction(2, 11)
    assert got["ranks"][0]["lives"] == 2


def test_within_a_life_the_engine_hash_is_enough_across_lives_it_is_not() -> None:
    # The parent 99 is unknown: 5 has no content. Evicted and back in one life: counted. Open at the restart, then back: not.
    orphan = store(5, parent=99)
    life = [batch(10, orphan), batch(11, remove(5)), batch(12, orphan)]
    got = figures([RankInput("i", 0, [*frames(*life), *frames(batch(20, orphan))], "none")])
    assert causes(got) == {"evicted": 1}
    assert got["duplicate_footprint"]["extra_blocks"]["max"] == 0


def test_a_closed_block_gets_its_content_later_and_then_matches_across_the_restart() -> None:
    # 5 is stored without content (parent unknown) and evicted at 11. At 12 another group stores 99 and 5 in full: 5's content is known
    # from now on, also for the closed block of group 0. After the restart group 0 stores that content under other hashes: evicted at 11.
    # The other group lost both at 20. Group 0's block 99 was never stored there.
    got = figures(
        [
            RankInput(
                "i",
                0,
                [
                    *frames(
                        batch(10, store(5, parent=99)),
                        batch(11, remove(5)),
                        batch(12, store(99, 5, group_idx=1)),
                    ),
                    *frames(batch(20, store(199, 105, tokens=[99] * 4 + [5] * 4))),
                ],
                "none",
            )
        ]
    )
    assert got["recomputes"] == [("i", 0, 0, "evicted", 4, 11 * S, 20 * S)]


# ------------------------------------------------------------------------------------------- rule 3: copies


COPIES = (
    batch(10, store(1)),
    batch(11, store(1)),  # copy or announcement
    batch(13, remove(1)),
    batch(14, store(1)),
    batch(15, remove(1), remove(1)),
    batch(16, store(1)),
    batch(20),
)
OTHER = rank(batch(10, store(1)), batch(20), dp=1)


def test_copies_on_a_stream_without_announcements() -> None:
    # none: 2 copies at 11 (concurrent), 1 at 13, 2 at 14 (concurrent), 0 at 15, back at 16: evicted.
    # Beside it rank 1 holds the block throughout: 1 extra during 10..15 and 16..20 = 9 of 10 s.
    got = figures([rank(*COPIES), OTHER])
    assert causes(got) == {"evicted": 1, "concurrent": 2}
    first = got["ranks"][0]
    assert first["stored_tokens"] == 16
    assert first["evicted_tokens"] == 12
    assert got["duplicate_footprint"]["extra_tokens"] == {"mean": (36 * S, 10 * S), "max": 4, "end": 4}
    assert got["repeat_compute"]["concurrent"] == {"tokens": 8, "blocks": 2}


def test_the_same_stream_unlabelled_takes_the_undercounting_reading_twice() -> None:
    # Repeat compute counts copies as above: evicted 1. The footprint ends at the first removal, 13, opens at 14, ends at 15:
    # extra during 10..13, 14..15, 16..20 = 8 of 10 s. Concurrent is unknown for rank 0 and zero for rank 1.
    got = figures([rank(*COPIES, reuse="unlabelled"), OTHER])
    assert causes(got) == {"evicted": 1}
    assert got["repeat_compute"]["concurrent"] == ZERO
    first = got["ranks"][0]
    assert first["stored_tokens"] is None
    assert first["recompute"]["concurrent"] is None
    assert first["evicted_tokens"] == 12
    assert got["duplicate_footprint"]["extra_tokens"] == {"mean": (32 * S, 10 * S), "max": 4, "end": 4}
    assert one(*COPIES, reuse="unlabelled")["repeat_compute"]["concurrent"] is None


def test_last_copy_removals_end_it_for_all_copies() -> None:
    # none: 2 copies end at 13 (8 tokens), 14 is a recompute, its copy ends at 15 (4 tokens), the second removal there is unjoined,
    # 16 is a recompute.
    got = one(*COPIES, removals="last_copy")
    assert causes(got) == {"evicted": 2, "concurrent": 1}
    assert got["ranks"][0]["evicted_tokens"] == 12
    assert got["ranks"][0]["unjoined_evicts"] == 1
    # unlabelled: the same ends, one copy each: 8 tokens
    got = one(*COPIES, removals="last_copy", reuse="unlabelled")
    assert causes(got) == {"evicted": 2}
    assert got["ranks"][0]["evicted_tokens"] == 8


def test_marked_stores_change_nothing_on_a_labelled_stream() -> None:
    # 1 stored, announced twice (marked), removed once, announced once more (marked: opens nothing), stored: one recompute.
    marked = store(1, reused=True)
    got = one(
        batch(10, store(1)), batch(11, marked, marked), batch(12, remove(1)), batch(13, marked), batch(14, store(1)), reuse="labelled"
    )
    assert causes(got) == {"evicted": 1}
    assert got["recomputes"] == [("i", 0, 0, "evicted", 4, 12 * S, 14 * S)]
    assert got["ranks"][0]["stored_tokens"] == 8
    # a second store without the mark is a copy
    assert causes(one(batch(10, store(1)), batch(11, store(1)), reuse="labelled")) == {"concurrent": 1}


# -------------------------------------------------------------------------------------- rules 0 to 2: tiers


def test_a_block_in_an_offload_tier_is_a_reload_and_the_last_tier_to_end_gives_the_cause() -> None:
    # 1 on GPU and CPU. GPU evicted 11, loaded back 12: reload. GPU evicted 13, CPU evicted 14: now it is lost (at 14). 15: evicted.
    got = one(
        batch(10, store(1), store(1, medium="cpu")),
        batch(11, remove(1, medium="GPU")),
        batch(12, store(1, medium="GPU")),
        batch(13, remove(1)),
        batch(14, remove(1, medium="CPU")),
        batch(15, store(1)),
    )
    assert got["recomputes"] == [("i", 0, 0, "evicted", 4, 14 * S, 15 * S)]
    assert causes(got) == {"evicted": 1}
    assert got["ranks"][0]["stored_tokens"] == 12  # loads are GPU stores
    assert got["ranks"][0]["evicted_tokens"] == 8  # GPU only
    # no tier but the GPU is a place where computing happens: a CPU store after the loss is no recompute and consumes nothing
    got = one(
        batch(10, store(1)),
        batch(11, remove(1)),
        batch(12, store(1, medium="CPU")),
        batch(13, remove(1, medium="CPU")),
        batch(14, store(1)),
    )
    assert got["recomputes"] == [("i", 0, 0, "evicted", 4, 13 * S, 14 * S)]


def test_a_reload_consumes_the_history() -> None:
    # 1 lost at 11; on the CPU at 12; loaded at 13 (reload). A clear of the CPU tier alone at 14 leaves the GPU. Nothing was recomputed.
    got = one(
        batch(10, store(1)),
        batch(11, remove(1)),
        batch(12, store(1, medium="CPU")),
        batch(13, store(1)),
        batch(14, clear(medium="CPU")),
        batch(15, store(1)),
    )
    assert causes(got) == {"concurrent": 1}


def test_an_unscoped_clear_beside_an_offload_tier_is_ambiguous() -> None:
    # 1 on GPU and CPU, 2 on GPU only. Cleared at 11. 2 back: cleared. 1 back: ambiguous. 1 evicted and back: evicted as ever.
    # Another group of the rank that holds 1 on the GPU only is cleared, not ambiguous, but it is not the primary group.
    got = one(
        batch(10, store(1, 2), store(1, medium="CPU"), store(1, group_idx=1)),
        batch(11, clear()),
        batch(12, store(1, 2), store(1, group_idx=1)),
        batch(13, remove(1)),
        batch(14, store(1)),
    )
    assert causes(got) == {"cleared": 1, "ambiguous_reload": 1, "evicted": 1}
    assert ("i", 0, 0, "ambiguous_reload", 4, 11 * S, 12 * S) in got["recomputes"]
    assert ("i", 0, 1, "cleared", 4, 11 * S, 12 * S) in got["recomputes"]


def test_a_clear_that_names_its_tier_is_not_ambiguous() -> None:
    # GPU cleared at 11: 1 is still on the CPU (reload at 12), 2 is lost (cleared). Then the CPU is cleared at 13, GPU stays.
    got = one(
        batch(10, store(1, 2), store(1, medium="CPU")),
        batch(11, clear(medium="gpu")),
        batch(12, store(1, 2)),
        batch(13, clear(medium="CPU")),
    )
    assert causes(got) == {"cleared": 1}


def test_a_remote_block_is_not_held() -> None:
    # Stores and removals that say REMOTE open and close nothing, in either figure.
    got = figures(
        [
            rank(
                batch(10, store(1, locality="REMOTE"), store(2)),
                batch(11, remove(2, locality="REMOTE")),
                batch(12, store(1), store(2)),
                batch(13),
            ),
            rank(batch(10, store(1)), batch(13), dp=1),
        ]
    )
    assert causes(got) == {"concurrent": 1}  # 2 was never removed
    assert got["ranks"][0]["unjoined_evicts"] == 0
    assert mean(got["duplicate_footprint"]) == Fraction(4 * 1, 3)  # 1 on both during 12..13 only


def test_other_tiers_have_their_own_footprint() -> None:
    # Two ranks hold 1 on the CPU from 10 on, only one on the GPU: 1 extra CPU block, none on the GPU.
    got = figures([rank(batch(10, store(1), store(1, medium="CPU")), batch(12)), rank(batch(10, store(1, medium="CPU")), batch(12), dp=1)])
    assert got["duplicate_footprint"]["extra_tokens"]["max"] == 0
    assert list(got["duplicate_footprint"]["other_tiers"]) == ["CPU"]
    assert got["duplicate_footprint"]["other_tiers"]["CPU"]["inside_instances"]["extra_tokens"] == {
        "mean": (8 * S, 2 * S),
        "max": 4,
        "end": 4,
    }


# ---------------------------------------------------------------------------------------- rule 4: groups


def test_tokens_count_from_the_primary_group() -> None:
    # Groups 0 (sliding window), 1 (full), 2 (full): group 1 counts, though each group loses and recomputes its block.
    parts = [(0, "sliding_window"), (1, "full_attention"), (2, "full_attention")]
    stores = [store(1, group_idx=g, kv_cache_spec_kind=k) for g, k in parts]
    removes = [remove(1, group_idx=g) for g, _ in parts]
    got = one(batch(10, *stores), batch(11, *removes), batch(12, *stores))
    assert causes(got) == {"evicted": 1}
    assert got["ranks"][0]["stored_tokens"] == 8
    assert got["ranks"][0]["evicted_tokens"] == 4
    assert [r[2] for r in got["recomputes"]] == [0, 1, 2]
    # chosen over the whole life: a lower full-attention group that comes late takes over for all of it
    late = store(7, group_idx=0, kv_cache_spec_kind="mla_attention")
    got = one(batch(10, stores[1]), batch(11, removes[1]), batch(12, stores[1], late))
    assert causes(got) == {}
    assert got["ranks"][0]["stored_tokens"] == 4
    # no candidate: the lowest index
    got = one(batch(10, store(1, group_idx=3, kv_cache_spec_kind="mamba"), store(1, 2, group_idx=5, kv_cache_spec_kind="sliding_window")))
    assert got["ranks"][0]["stored_tokens"] == 4


# ------------------------------------------------------------------------------------------------ identity


def hold_both(left: Raw, right: Raw) -> int:
    """Extra blocks when one rank stores `left` and another `right`."""
    got = figures([rank(batch(10, left), batch(12)), rank(batch(10, right), batch(12), dp=1)])
    end: int = got["duplicate_footprint"]["extra_blocks"]["end"]
    return end


def test_what_makes_contents_equal() -> None:
    assert hold_both(store(1, 2, 3), store(11, 12, 13, tokens=[1] * 4 + [2] * 4 + [3] * 4)) == 3  # hashes don't matter
    assert hold_both(store(1, 2), store(1, 2, tokens=[1] * 4 + [9] * 4)) == 1
    assert hold_both(store(1, 2), store(2)) == 0  # another parent
    assert hold_both(store(1, tokens=[1] * 8, size=8), store(1, 2, tokens=[1] * 8)) == 0  # another block size
    assert hold_both(store(1, 2), store(1, 2, extra_keys=[None, []])) == 2
    assert hold_both(store(1, 2), store(1, 2, extra_keys=[["salt"], None])) == 0  # and what follows the salted block differs too
    assert hold_both(store(1, 2), store(1, 2, extra_keys=[None, ["image"]])) == 1
    assert hold_both(store(1), store(1, lora_name="a")) == 0
    assert hold_both(store(1, lora_name="a"), store(1, lora_name="a", extra_keys=[["a"]])) == 1  # one engine repeats the adapter
    assert hold_both(store(1, lora_name="a", extra_keys=[["s"]]), store(1, lora_name="a", extra_keys=[["a", "s"]])) == 1
    assert hold_both(store(1), store(1, extra_keys=[["a"]])) == 0
    assert hold_both(store(1, group_idx=0), store(1, group_idx=4)) == 1  # the group is where it lies


def test_the_model_is_part_of_identity() -> None:
    for models, extra in ((("m", "m"), 1), (("m", "n"), 0), (("m", None), 0), ((None, None), 1)):
        got = figures([rank(batch(10, store(1)), batch(12), dp=n, model=m) for n, m in enumerate(models)])
        assert got["duplicate_footprint"]["extra_blocks"]["end"] == extra


def test_an_unknown_parent_is_not_a_root() -> None:
    assert hold_both(store(2), store(2, parent=77)) == 0
    # both orphans: equal tokens, still no content
    assert hold_both(store(2, parent=77), store(2, parent=77)) == 0


def test_children_before_parents_in_one_batch() -> None:
    # 3 and 2 come before their ancestors: two more passes resolve them. In another batch it would be too late.
    other = rank(batch(10, store(1, 2, 3)), batch(12), dp=1)
    got = figures([rank(batch(10, store(3, parent=2), store(2, parent=1), store(1)), batch(12)), other])
    assert got["duplicate_footprint"]["extra_blocks"] == {"mean": (6 * S, 2 * S), "max": 3, "end": 3}
    got = figures([rank(batch(10, store(3, parent=2)), batch(11, store(2, parent=1), store(1)), batch(12)), other])
    assert got["duplicate_footprint"]["extra_blocks"] == {"mean": (2 * S, 2 * S), "max": 2, "end": 2}


def test_stores_whose_tokens_fit_no_hash_borrow() -> None:
    # Rank 0: a sliding-window group stores 2 of 3 blocks of a span, first in the batch; the full group follows. The tokens can't be cut,
    # so 3 is borrowed once the full group has resolved it. Only that group keeps it (the full one loses all at 11): 3 stays a duplicate.
    window = store(3, tokens=[1] * 4 + [2] * 4 + [3] * 4, group_idx=0, kv_cache_spec_kind="sliding_window")
    full = store(1, 2, 3, group_idx=1, kv_cache_spec_kind="full_attention")
    other = rank(batch(10, store(1, 2, 3)), batch(12), dp=1)
    got = figures([rank(batch(10, window, full), batch(11, remove(1, 2, 3, group_idx=1)), batch(12)), other])
    assert got["duplicate_footprint"]["extra_blocks"] == {"mean": (4 * S, 2 * S), "max": 3, "end": 1}
    # A placeholder without tokens and size takes the known size; one of another size stays unresolved.
    for size, extra in ((0, 1), (4, 1), (8, 0)):
        tier = figures(
            [rank(batch(10, store(1)), batch(11, store(1, size=size, tokens=[], medium="CPU")), batch(12), dp=n) for n in (0, 1)]
        )
        assert tier["duplicate_footprint"]["other_tiers"]["CPU"]["extra_tokens"]["end"] == 4 * extra
    # The mapping outlives eviction and clear.
    got = figures([rank(batch(10, store(1)), batch(11, clear()), batch(12, store(2, parent=1)), dp=n) for n in (0, 1)])
    assert got["duplicate_footprint"]["extra_blocks"]["end"] == 1
    # ... but not the process.
    lives = [*frames(batch(10, store(1))), *frames(batch(12, store(2, parent=1)))]
    got = figures([RankInput("i", n, lives, "none") for n in (0, 1)])
    assert got["duplicate_footprint"]["extra_blocks"]["end"] == 0


def test_an_open_block_gets_its_content_later_from_that_instant() -> None:
    # Rank 0 holds 2 from 10 on, its parent unknown; at 14 group 1 stores 1 and 2 in full and loses them at 16. Group 0's block is known
    # from 14 on. Rank 1 holds both from 10 to 20. Extra: 1 during 14..16, 2 during 14..20: 8 of 10 block seconds.
    got = figures(
        [
            rank(
                batch(10, store(2, parent=1)),
                batch(14, store(1, 2, group_idx=1)),
                batch(16, remove(1, 2, group_idx=1)),
                batch(20),
            ),
            rank(batch(10, store(1, 2)), batch(20), dp=1),
        ]
    )
    assert got["duplicate_footprint"]["extra_blocks"] == {"mean": (8 * S, 10 * S), "max": 2, "end": 1}


# ------------------------------------------------------------------------------------------ rule 5: footprint


def test_inside_one_instance() -> None:
    # Three ranks. 1: rank 0 10..20, rank 1 12..18, rank 2 from 14. Copies beyond the first: 1 in 12..14, 2 in 14..18, 1 in 18..20
    # = 2 + 8 + 2 = 12 block seconds of 10; at the end, 20: rank 0 lets go, rank 2 alone: 0.
    got = figures(
        [
            rank(batch(10, store(1)), batch(20, remove(1))),
            rank(batch(12, store(1)), batch(18, remove(1)), dp=1),
            rank(batch(14, store(1)), dp=2),
        ]
    )["duplicate_footprint"]
    assert got["inside_instances"]["extra_blocks"] == {"mean": (12 * S, 10 * S), "max": 2, "end": 0}
    assert got["inside_instances"]["extra_tokens"] == {"mean": (48 * S, 10 * S), "max": 8, "end": 0}
    assert got["extra_tokens"] == got["inside_instances"]["extra_tokens"]
    assert got["between_instances"]["extra_blocks"] == {"mean": (0, 10 * S), "max": 0, "end": 0}


def test_copies_and_groups_of_one_rank_are_one() -> None:
    got = one(batch(10, store(1), store(1), store(1, group_idx=1)), batch(12))["duplicate_footprint"]
    assert got["extra_blocks"]["max"] == 0


def test_between_instances_waits_for_the_allowance() -> None:
    # a holds 1 from 10, b from 12 to 18. Matured: a from 11, b from 13. Extra 13..18 of 10..20: 5 of 10 s.
    fleet = [
        rank(batch(10, store(1)), batch(20), instance="a"),
        rank(batch(12, store(1)), batch(18, remove(1)), instance="b"),
    ]
    got = figures(fleet)["duplicate_footprint"]
    assert got["between_instances"]["extra_tokens"] == {"mean": (20 * S, 10 * S), "max": 4, "end": 0}
    assert got["inside_instances"]["extra_tokens"]["max"] == 0
    # no allowance: 12..18; allowance of 6 s: b ends as it matures, never a duplicate; 8 s: nothing
    assert mean(figures(fleet, skew_us=0)["duplicate_footprint"]) == Fraction(4 * 6, 10)
    assert figures(fleet, skew_us=6 * S)["duplicate_footprint"]["extra_tokens"]["max"] == 0
    assert figures(fleet, skew_us=6 * S - 1)["duplicate_footprint"]["extra_tokens"] == {"mean": (4, 10 * S), "max": 4, "end": 0}


def test_maturing_at_the_very_end_belongs_to_the_final_state() -> None:
    # b's block opens at 19 and matures at 20, the span's end: no duration, but the end and the max see it.
    got = figures([rank(batch(10, store(1)), instance="a"), rank(batch(19, store(1)), batch(20), instance="b")])["duplicate_footprint"]
    assert got["extra_blocks"] == {"mean": (0, 10 * S), "max": 1, "end": 1}


def test_an_instance_stays_open_while_any_rank_holds_the_block() -> None:
    # a: rank 0 10..14, rank 1 14..20 (one ends where the other begins: no new opening). b: 10.., removed and stored again at 15.0 in
    # one batch (no new opening either), removed at 16 and stored at 17 (matures at 18). Extra: 11..16 and 18..20 = 7 of 10 s.
    got = figures(
        [
            rank(batch(10, store(1)), batch(14, remove(1)), instance="a"),
            rank(batch(14, store(1)), batch(20), instance="a", dp=1),
            rank(batch(10, store(1)), batch(15, remove(1), store(1)), batch(16, remove(1)), batch(17, store(1)), instance="b"),
        ]
    )["duplicate_footprint"]
    assert got["between_instances"]["extra_blocks"] == {"mean": (7 * S, 10 * S), "max": 1, "end": 1}
    assert got["inside_instances"]["extra_blocks"] == {"mean": (0, 10 * S), "max": 0, "end": 0}


def test_a_reset_that_stores_again_at_once_does_not_start_the_allowance_anew() -> None:
    # b restarts at 15 and its first batch stores the block again: open throughout. Extra 11..20 = 9 of 10 s.
    restarted = RankInput("b", 0, [*frames(batch(10, store(1))), *frames(batch(15, store(9, tokens=[1] * 4)))], "none")
    got = figures([rank(batch(10, store(1)), batch(20), instance="a"), restarted])
    assert mean(got["duplicate_footprint"]["between_instances"], "extra_blocks") == Fraction(9, 10)
    assert causes(got) == {"restarted": 1}


def test_states_without_duration_do_not_exist() -> None:
    # Rank 1 stores and loses the block in one batch; rank 2 closes at 12 when rank 3 opens: never more than one extra.
    got = figures(
        [
            rank(batch(10, store(1)), batch(14)),
            rank(batch(11, store(1), remove(1)), dp=1),
            rank(batch(11, store(1)), batch(12, remove(1)), dp=2),
            rank(batch(12, store(1)), batch(14), dp=3),
        ]
    )["duplicate_footprint"]
    assert got["extra_blocks"] == {"mean": (3 * S, 4 * S), "max": 1, "end": 1}


def test_inside_and_between_together_count_every_extra_copy_once_matured() -> None:
    # Instance a: ranks 0 and 1, b: rank 0, c: rank 0, all from 10 on, two blocks of 8 tokens. Inside 2 blocks from 10, between 4 from 11.
    events = store(1, 2, size=8)
    got = figures(
        [
            rank(batch(10, events), batch(14), instance="a"),
            rank(batch(10, events), instance="a", dp=1),
            rank(batch(10, events), instance="b"),
            rank(batch(10, events), instance="c"),
        ]
    )["duplicate_footprint"]
    assert got["inside_instances"]["extra_tokens"] == {"mean": (16 * 4 * S, 4 * S), "max": 16, "end": 16}
    assert got["between_instances"]["extra_tokens"] == {"mean": (32 * 3 * S, 4 * S), "max": 32, "end": 32}
    assert got["extra_tokens"] == {"mean": (160 * S, 4 * S), "max": 48, "end": 48}


# --------------------------------------------------------------------------- continuity and rule 8: coverage


def test_losses_duplicates_and_refusals() -> None:
    # 0, 1 | lost 2 | 3, 4 | refused 5 | 6, 7: observed 10..11, 13..14, 16..17 = 3 of 7 s. Repeated and late messages change nothing;
    # what was held before the loss still is: the store of 1 at 13 is a copy.
    sent = [batch(10 + n, *([store(1)] if n in (0, 3) else [])) for n in range(8)]
    order = [
        (0, sent[0]),
        (1, sent[1]),
        (3, sent[3]),
        (0, sent[0]),
        (4, sent[4]),
        (2, sent[2]),
        (5, b"\xc1"),
        (6, sent[6]),
        (7, sent[7]),
        (3, sent[3]),
    ]
    got = figures([RankInput("i", 0, order, "none")])
    assert got["coverage"] == Fraction(3, 7)
    assert got["ranks"][0]["observed_us"] == 3 * S
    assert got["ranks"][0]["lives"] == 1
    assert causes(got) == {"concurrent": 1}


def test_coverage_is_over_all_ranks() -> None:
    # Span 10..20. Rank 0 observed 10..20, rank 1 12..17, rank 2 sent nothing: 15 of 30 s.
    got = figures([rank(batch(10), batch(20)), rank(batch(12), batch(17), dp=1), rank(dp=2)])
    assert got["coverage"] == Fraction(1, 2)


def test_the_same_number_with_something_else_is_a_restart() -> None:
    # One batch per life, both numbered 0: the second is newer and different.
    got = figures([RankInput("i", 0, [(0, batch(10, store(1))), (0, batch(11, store(1))), (0, batch(11, store(1)))], "none")])
    assert causes(got) == {"restarted": 1}
    assert got["ranks"][0]["lives"] == 2
    assert got["coverage"] == 0


def test_what_is_malformed_or_unknown() -> None:
    # An unknown event is skipped, the rest of its batch counts. A batch whose event is none at all is refused as a whole.
    got = one(
        batch(10, store(1), {"type": "BlockInactive", "block_hashes": [1]}),
        batch(11, remove(1)),
        batch(12, store(1)),
        batch(13, [], store(1)),
    )
    assert causes(got) == {"evicted": 1}
    assert got["span"] == [10 * S, 12 * S]


def test_nothing_at_all() -> None:
    got = figures([rank(), rank(dp=1, reuse="unlabelled")])
    assert got["span"] == [0, 0]
    assert got["coverage"] == 0
    assert got["duplicate_footprint"]["extra_tokens"] == {"mean": (0, 1), "max": 0, "end": 0}
    assert causes(got) == {}


# ------------------------------------------------------------------------------------------------------- files


def test_positional_events_mean_the_same() -> None:
    stored = ["BlockStored", [1, 2], None, [1] * 4 + [2] * 4, 4, None, "GPU", None, [["s"], None], 0, "full_attention", None]
    short = ["BlockStored", [3], None, [3] * 4, 4, None]
    got = figures(
        [
            rank(
                batch(10, stored, short),
                batch(11, ["BlockRemoved", [2], "GPU", 0], ["BlockRemoved", [3]]),
                batch(12, short),
                batch(13, ["AllBlocksCleared"], short),
            ),
            rank(batch(10, store(1, 2, extra_keys=[["s"], None])), dp=1),
        ]
    )
    assert causes(got) == {"evicted": 1, "cleared": 1}
    # 2 extra blocks in 10..11, 1 in 11..13, 0 after the clear
    assert got["duplicate_footprint"]["extra_blocks"] == {"mean": (4 * S, 3 * S), "max": 2, "end": 0}


def test_the_three_forms_of_capture_file(tmp_path: Path) -> None:
    sent = [(0, 0, batch(10, store(1))), (1, 0, batch(10, store(1), rank=1)), (0, 1, batch(12))]

    def write(name: str, lines: list[dict[str, Any]]) -> Path:
        path = tmp_path / name
        path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))
        return path

    def b64(*parts: bytes) -> list[str]:
        return [base64.b64encode(p).decode() for p in parts]

    def number(seq: int) -> bytes:
        return seq.to_bytes(8, "big", signed=True)

    live = write("live.frames.jsonl.gz", [{"t": 1.0, "frames": b64(b"topic", number(q), p)} for _, q, p in sent])
    hexed = write("hex.jsonl.gz", [{"seq": q, "topic_hex": "", "payload_hex": p.hex()} for _, q, p in sent])
    answers = [{"dir": "recv", "frames": b64(b"", b"topic", number(q), p)} for _, q, p in sent]
    old = [{"dir": "recv", "frames": b64(b"", number(q), p)} for _, q, p in sent]
    asked = {"dir": "send", "socket": "DEALER", "start_seq": 0, "frames": b64(b"", number(0))}
    ends = [{"dir": "recv", "frames": b64(b"", b"", number(-1), b"")}, {"dir": "recv", "frames": b64(b"", number(-1), b"")}]
    replayed = write("x_replay.jsonl.gz", [asked, *answers, ends[0], asked, *old, ends[1]])
    assert read_capture(live) == sent
    assert read_capture(hexed) == sent
    assert read_capture(replayed) == sent * 2
    assert figures(ranks_of_capture(replayed, "i")) == figures(ranks_of_capture(live, "i"))
    assert figures(ranks_of_capture(live, "i"))["duplicate_footprint"]["extra_blocks"]["end"] == 1


# ---------------------------------------------------------------- the sweep against looking at every instant


@pytest.mark.parametrize("seed", range(6))
def test_the_sweep_equals_looking_at_every_instant(seed: int) -> None:
    rng = random.Random(seed)
    given = []
    for instance, dp in (("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1)):
        at, payloads = 10.0 + rng.randrange(3), []
        for _ in range(60):
            events = [
                rng.choice([store, remove])(rng.randrange(6), medium=rng.choice(["GPU", "GPU", "CPU"])) for _ in range(rng.randrange(4))
            ]
            if rng.random() < 0.05:
                events.append(clear())
            payloads.append(batch(at, *events))
            at += rng.choice([0, 0.25, 0.5, 1, 2])
        cut = rng.randrange(60)
        given.append(RankInput(instance, dp, [*frames(*payloads[:cut]), *frames(*payloads[cut:])], rng.choice(["none", "unlabelled"])))
    skew = rng.choice([0, 250_000, S, 3 * S])
    got = figures(given, skew_us=skew)
    contents = Contents()
    ranks = [Rank(g, contents) for g in given]
    start, end = got["span"]

    def is_held(r: Rank, tier: str, content: int, t: int) -> bool:
        return any(s <= t and (e is None or t < e) for s, e in r.intervals[tier, content])

    def since(holders: list[Rank], tier: str, content: int, t: int) -> int:
        """The earliest time from which some rank of this instance has held it without a break until t."""
        while True:
            earlier = [s for r in holders for s, e in r.intervals[tier, content] if s < t and (e is None or e >= t)]
            if not earlier:
                return t
            t = min(earlier)

    def state(tier: str, t: int) -> tuple[int, int]:
        inside = between = 0
        for content in range(len(contents.size)):
            matured = 0
            for instance in "abc":
                holders = [r for r in ranks if r.given.instance_id == instance]
                n = sum(is_held(r, tier, content, t) for r in holders)
                inside += max(0, n - 1)
                matured += n > 0 and since(holders, tier, content, t) + skew <= t
            between += max(0, matured - 1)
        return inside, between

    for tier, part in (("GPU", got["duplicate_footprint"]), ("CPU", got["duplicate_footprint"]["other_tiers"]["CPU"])):
        # every batch time and everything that could mature: all of it lies on a grid of a quarter second
        instants = list(range(start, end, S // 4))
        states = [state(tier, t) for t in instants]
        final = state(tier, end)
        for name, pick in (("inside_instances", (1, 0)), ("between_instances", (0, 1)), ("", (1, 1))):
            values = [i * pick[0] + b * pick[1] for i, b in states]
            last = final[0] * pick[0] + final[1] * pick[1]
            expected = {"mean": (sum(values) * S // 4, end - start), "max": max([*values, last]), "end": last}
            assert (part[name] if name else part)["extra_blocks"] == expected
