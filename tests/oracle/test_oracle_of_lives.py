"""The reference's newer rules, on streams whose figures were worked out by hand: how long blocks lived, and what of it was waste.

As in the other file: blocks of 4 tokens, times in whole seconds, one rank declared `none`.
"""

from __future__ import annotations

from typing import Any

from schemas.histogram import bucket

from .fleet import Amounts, pairs
from .identity import Contents
from .rank import Declared, Rank, RankInput, Scraped, Step
from .test_oracle_by_hand import S, batch, clear, frames, remove, store


def read(*payloads: bytes, contents: Contents | None = None, instance: str = "i", **declared: Any) -> Rank:
    given = RankInput(instance, 0, frames(*payloads), declared=Declared("none", **declared))
    return Rank(given, contents or Contents(), states=True)


def among(*steps: Step) -> Rank:
    return Rank(RankInput("i", 0, list(steps), declared=Declared("none")), Contents())


def histogram(rank: Rank, name: str) -> list[int]:
    return sorted(fact.bucket for fact in rank.facts if fact.name == name)


def test_a_life_lasts_from_the_first_store_to_the_removal_of_the_last_copy() -> None:
    # 1: two copies from 10 and 11, both gone at 15: 5 s. 2 is cleared, which is no removal.
    rank = read(batch(10, store(1, 2)), batch(11, store(1)), batch(12, remove(1)), batch(15, remove(1)), batch(16, clear()))
    assert histogram(rank, "lifetime") == [bucket(5 * S)]
    # back after 6 s from the removal, after 5 s from the clear
    rank = read(batch(10, store(1, 2)), batch(15, remove(1)), batch(16, clear()), batch(21, store(1, 2)))
    assert (histogram(rank, "back_evicted"), histogram(rank, "back_cleared")) == ([bucket(6 * S)], [bucket(5 * S)])


def test_the_second_block_that_goes_on_from_a_chain_shows_it_used() -> None:
    # 3 and then 4 go on from 2: the request of 4 found 1 and 2. Nothing says so of 3 and 4.
    rank = read(batch(10, store(1, 2, 3)), batch(11, store(4, parent=2)), batch(12, remove(4, 3, 2, 1)))
    assert rank.total("unreused_blocks") == 2
    # the same, but 1 had gone in between and come back: its first life was waste, its second was found by the request of 4
    rank = read(batch(10, store(1, 2, 3)), batch(11, remove(1), store(1)), batch(12, store(4, parent=2)), batch(13, remove(4, 3, 2, 1)))
    assert rank.total("unreused_blocks") == 1 + 2  # and 3 and 4


def test_the_oldest_loss_is_forgotten_first() -> None:
    payloads = (batch(10, store(1, 2, 3)), batch(11, remove(3)), batch(12, remove(2)), batch(13, store(3, parent=2), store(2, parent=1)))
    bounded = Rank(RankInput("i", 0, frames(*payloads), declared=Declared("none"), history_blocks=1), Contents())
    assert (bounded.total("forgotten_blocks"), bounded.cause("evicted").blocks) == (1, 1)
    # 3 s of memory: 3, lost at 11, is remembered at 14 and not at 15
    for last, forgotten in ((14, 0), (15, 1)):
        given = RankInput("i", 0, frames(*payloads[:2], batch(last)), declared=Declared("none"), history_us=3 * S)
        assert Rank(given, Contents()).total("forgotten_blocks") == forgotten


def test_gpu_time_is_at_the_rate_declared_or_the_highest_measured() -> None:
    payloads = batch(10, store(1, 2)), batch(11, remove(1)), batch(12, store(1))
    assert read(*payloads).total("unrated_tokens") == 4
    declared = read(*payloads, prefill_rate=100.0, gpus_per_rank=2.0)
    assert declared.total("recompute_evicted_gpu_us") == 80_000  # 4 / 100 s on two GPUs
    # 0..10 s: 50 computed a second; 5..15 s: 100; 9 s is too short to count
    told = ((0, 0, 0), (5, 500, 500), (10, 1500, 1000), (15, 2000, 1000))
    scrapes = [Scraped(at * 1000, prompt_tokens=prompt, prompt_tokens_cached=cached) for at, prompt, cached in told]
    sent = frames(*payloads)
    measured = among(*sent[:2], *scrapes, sent[2])
    assert measured.total("recompute_evicted_gpu_us") == 40_000


def test_what_the_engine_says_of_itself_breaks_the_observed_stretch() -> None:
    sent = frames(batch(10, store(1, 2, 3)), batch(12), batch(14))
    over = among(sent[0], Scraped(1, pool=2), *sent[1:])
    assert [(breach.kind, breach.found, breach.bound) for breach in over.breaches] == [("cached_over_pool", 3, 2)]
    assert over.observed_us() == 2 * S  # 12 to 14
    # 20 in use, 3 cached, none running, slack 8: believed the second time
    busy = [Scraped(at, usage=0.2, pool=100, running=0) for at in (1, 2)]
    starved = among(sent[0], busy[0], sent[1], busy[1], sent[2])
    assert [(breach.kind, breach.at, breach.found, breach.bound) for breach in starved.breaches] == [("in_use_over_cached", 12 * S, 20, 11)]
    assert starved.observed_us() == 2 * S  # 10 to 12


def test_a_pair_of_workloads_shares_what_both_have_held_for_the_allowance() -> None:
    contents = Contents()
    a = read(batch(10, store(1)), batch(20, remove(1)), contents=contents, instance="a", workload="chat", model="m")
    b = read(batch(12, store(1)), batch(25), contents=contents, instance="b", model="m")
    c = read(batch(19, store(1)), batch(25), contents=contents, instance="c", workload="batch", model="m")
    both = pairs([a, b, c], "GPU", S, contents)
    one = Amounts(between_blocks=1, between_tokens=4)
    # chat and undeclared from 13 to 20; chat and batch would begin at 20, when chat ends; batch and undeclared from 20 on
    assert both[("", "chat")] == {13 * S: one, 20 * S: Amounts(between_blocks=-1, between_tokens=-4)}
    assert ("batch", "chat") not in both
    assert both[("", "batch")] == {20 * S: one}
