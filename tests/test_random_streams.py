"""Random rank streams, engine or not: whatever they say, the counting path and the reference agree to the last integer.

What they are made of is in :mod:`tests.oracle.streams`.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from producers.identity import ephemeral_key
from schemas.records import RankMessage
from sql.figures import assemble
from sql.totals import totals_from_records
from streams.history import HISTORY_BLOCKS, HISTORY_US
from streams.offline import Counted, OfflineFleet
from streams.residency import RankCore
from tests.counting import differences, interleaved
from tests.oracle import driver, rows
from tests.oracle.oracle import Contents, Declared, Rank, RankInput, figures
from tests.oracle.streams import START_US, Event, fleet

KEY = ephemeral_key()
WINDOWS_US = (250_000, 1_000_000, 10_000_000, 60_000_000)


def messages(ranks: list[RankInput]) -> list[list[RankMessage]]:
    """What forwarders would send for these ranks, a list per rank."""
    return [driver.messages(rank, KEY) for rank in ranks]


def counted(stream: list[RankMessage], rng: random.Random) -> Counted:
    """The rows for these messages, whatever the shards, the window and the moments of giving out."""
    offline = OfflineFleet(window_us=rng.choice(WINDOWS_US), shards=rng.randint(1, 4))
    often = rng.choice((0.0, 0.1, 1.0))
    for message in stream:
        offline.apply(message)
        if rng.random() < often:
            offline.drain()
    return offline.drain()


def disagreements(ranks: list[RankInput], seed: int) -> list[str]:
    """What the counting path and the oracle say differently of these ranks, over the whole span."""
    rng = random.Random(seed)
    wanted = figures(ranks)
    given_out = counted(interleaved(messages(ranks), rng.randrange), rng)
    document = assemble(totals_from_records(given_out.rank_windows, given_out.duplicate_windows))
    found = differences(document, wanted)
    for theirs in wanted["ranks"]:
        ours = next(
            rank for rank in document["ranks"] if (rank["instance_id"], rank["dp_rank"]) == (theirs["instance_id"], theirs["dp_rank"])
        )
        for name in ("unjoined_evicts", "lives"):
            if ours[name] != theirs[name]:
                found.append(f"{name}: {ours[name]} instead of {theirs[name]}")
        if ours["resident_tokens"] < 0 or ours["resident_blocks"] < 0:
            found.append(f"resident: {ours['resident_tokens']} tokens, {ours['resident_blocks']} blocks")
    for tier in sorted(document["duplicate_footprint"]["other_tiers"].keys() | wanted["duplicate_footprint"]["other_tiers"].keys()):
        ours = document["duplicate_footprint"]["other_tiers"].get(tier, {}).get("extra_tokens", {"mean": 0, "max": 0, "end": 0})
        theirs = wanted["duplicate_footprint"]["other_tiers"].get(tier, {}).get("extra_tokens", {"mean": (0, 1), "max": 0, "end": 0})
        numerator, denominator = theirs["mean"]
        if ours != {"mean": numerator / denominator, "max": theirs["max"], "end": theirs["end"]}:
            found.append(f"{tier}: {ours} instead of {theirs}")
    again = sorted(
        (row.instance_id, row.dp_rank, row.group_idx, row.cause, row.tokens, row.lost_at_us, row.back_at_us)
        for row in given_out.recomputes
        if row.cause != "concurrent"
    )
    if again != wanted["recomputes"]:
        found.append(f"recomputes: {again} instead of {wanted['recomputes']}")
    return found


@pytest.mark.parametrize("block", range(8))
def test_random_streams_agree_with_the_oracle(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        assert disagreements(fleet(seed), seed) == [], f"seed {seed}"


def core_of(given: RankInput, window_us: int, shards: int = 1) -> RankCore:
    """The real counter of one rank."""
    return RankCore(
        given.instance_id,
        given.dp_rank,
        window_us=window_us,
        shards=shards,
        history_us=HISTORY_US if given.history_us is None else given.history_us,
        history_blocks=HISTORY_BLOCKS if given.history_blocks is None else given.history_blocks,
    )


def row_differences(given: RankInput, rng: random.Random) -> list[str]:
    """What the counter of one rank and the reference say differently, in any row and any field."""
    reference = Rank(given, Contents(), states=True)
    core = core_of(given, rng.choice(WINDOWS_US))
    windows, recomputes = [], []
    often = rng.choice((0.0, 0.1, 1.0))
    for offset, message in enumerate(driver.messages(given, KEY)):
        core.apply(message, offset)
        if rng.random() < often:
            drained = core.drain()
            windows += drained.windows
            recomputes += drained.recomputes
    drained = core.drain()
    windows += drained.windows
    recomputes += drained.recomputes
    return rows.rank_differences(reference, windows) + rows.recompute_differences([reference], recomputes)


@pytest.mark.parametrize("block", range(4))
def test_every_row_of_a_rank_is_the_references(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        rng = random.Random(seed)
        for given in fleet(seed, rich=True):
            assert row_differences(given, rng) == [], f"seed {seed}"


def rank(*lives: list[list[Event]], instance: str = "a", reuse: str = "none", model: str | None = "m") -> RankInput:
    """A rank whose lives are lists of batches, one a second."""
    frames: list[tuple[int, bytes]] = []
    for payloads in lives:
        for seq, events in enumerate(payloads):
            at_us = START_US + len(frames) * 1_000_000
            frames.append((seq, msgspec.msgpack.encode([at_us / 1e6, events])))
    return RankInput(instance, 0, frames, declared=Declared(reuse, model=model))


def stored(*hashes: int, tokens: bool = True, size: int = 4, **fields: Any) -> Event:
    """A store of a chain from the root; the tokens of a block are its hash."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": [block_hash for block_hash in hashes for _ in range(size)] if tokens else [],
        "block_size": size,
        **fields,
    }


CLEARED: Event = {"type": "AllBlocksCleared"}


def figures_of(*ranks: RankInput) -> dict[str, Any]:
    """The document for these ranks, which the oracle agrees with."""
    assert disagreements(list(ranks), 0) == []
    given_out = counted(interleaved(messages(list(ranks)), lambda _: 0), random.Random(0))
    return assemble(totals_from_records(given_out.rank_windows, given_out.duplicate_windows))


def test_a_placeholder_is_resident_with_the_size_that_comes_later() -> None:
    sizeless = stored(1, 2, tokens=False, size=0)
    held = figures_of(rank([[sizeless], [stored(1)], [{"type": "BlockRemoved", "block_hashes": [1]}]]))["ranks"][0]
    assert (held["resident_tokens"], held["resident_blocks"]) == (4, 2)
    gone = figures_of(rank([[stored(1, tokens=False, size=0)], [stored(1), CLEARED], []]))["ranks"][0]
    assert (gone["resident_tokens"], gone["resident_blocks"]) == (0, 0)


def test_a_remote_store_tells_what_a_held_block_is() -> None:
    teller = rank([[stored(1, tokens=False)], [stored(1, group_idx=1, locality="REMOTE")], [], []])
    other = rank([[stored(1)], [], [], [], []], instance="b")
    assert figures_of(teller, other)["duplicate_footprint"]["between_instances"]["extra_blocks"]["max"] == 1


def test_the_mark_of_an_ambiguous_clear_outlives_the_life() -> None:
    marked = [[stored(1, medium="CPU")], [CLEARED]]
    offloaded = [[stored(1, medium="CPU")], [{"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}], []]
    for lives in ([marked, [[stored(1)]]], [marked, [*offloaded, [stored(1)]]], [marked, offloaded[:1], [[stored(1)]]]):
        repeat = figures_of(rank(*lives))["repeat_compute"]
        assert repeat["ambiguous_reload"]["blocks"] == 1
        assert repeat["evicted"]["blocks"] == repeat["restarted"]["blocks"] == 0


def test_a_number_seen_with_another_payload_is_a_restart_whatever_its_time() -> None:
    at = START_US / 1e6
    first, other = (msgspec.msgpack.encode([at, [stored(each)]]) for each in (1, 2))
    again = msgspec.msgpack.encode([at - 5, [stored(1)]])
    document = figures_of(RankInput("a", 0, [(0, first), (0, first), (0, other), (1, again)], declared=Declared("none", model="m")))
    assert document["ranks"][0]["lives"] == 2
    assert document["repeat_compute"]["restarted"]["blocks"] == 1


def test_blocks_stored_without_tokens_do_not_continue_each_other() -> None:
    # A sliding window keeps blocks that need not follow each other: a use of the second says nothing of the first.
    removed = {"type": "BlockRemoved", "block_hashes": [1]}
    given = rank([[stored(1, 2, tokens=False)], [stored(2, tokens=False)], [removed]])
    assert row_differences(given, random.Random(0)) == []
    core = core_of(given, 10_000_000)
    for offset, message in enumerate(driver.messages(given, KEY)):
        core.apply(message, offset)
    assert [group.unreused_blocks for row in core.drain().windows for group in row.groups] == [1]


def test_a_long_stretch_that_begins_with_a_window_leaves_that_window_its_own_row() -> None:
    batches = [(seq, msgspec.msgpack.encode([START_US / 1e6 + 7_300 * seq, []])) for seq in range(2)]
    core = core_of(RankInput("a", 0, batches), 250_000)
    for offset, message in enumerate(driver.messages(RankInput("a", 0, batches), KEY)):
        core.apply(message, offset)
    assert all(row.observed_us <= row.window_us for row in core.drain().windows)
