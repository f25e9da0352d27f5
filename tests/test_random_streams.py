"""Random rank streams, engine or not: whatever the frames say, the counting path and the oracle agree to the last integer.

The frames are made at the level of the payload and need not be what one engine would send: removals of what was never
stored, clears of any scope, placeholders without tokens, parents that are unknown or come later, marks, remote blocks, copies,
repeated and late frames, gaps, restarts, clocks that stand still. Left out, because the rules leave them open:

* engine clocks that step back inside one life, and a restart that shows an older time than the life before it;
* two engine hashes of one content in one life, or a hash that changes its meaning;
* frames that cannot be read under a number already passed (nothing tells whether they repeat or begin something);
* block sizes that differ between events of one hash in one group, and placeholders without a size for a hash whose size an event
  gave that could not be resolved (whether its size is known then);
* on a rank with offload tiers, restarts together with content that becomes known late (whether the mark of an ambiguous clear is
  still there when what it is about was stored into the GPU tier unrecognised).
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from producers.simulate.source import RankSource, SourceBatch
from schemas.records import Declaration, RankMessage, ReuseReporting
from sql.figures import assemble
from sql.totals import totals_from_records
from streams.offline import Counted, OfflineFleet
from tests.counting import differences, expected, interleaved, messages

START_US = 1_700_000_000_000_000
TICKS_US = (0, 0, 1, 250_000, 500_000, 1_000_000, 1_000_001, 3_000_000, 9_500_000)
LONG_US = (40_000_000, 7_300_000_000)
KINDS = ("full_attention", "mla_attention", "sink_full_attention", "sliding_window", "mamba", None)
TIERS = ("GPU", "gpu", None, "CPU", "DISK")

Event = dict[str, Any]


@dataclass(frozen=True)
class Node:
    """One block of content: its place in a chain shared by all ranks."""

    number: int
    parent: int | None
    tokens: tuple[int, ...]
    extra: str | None
    adapter: str | None


def chains(rng: random.Random) -> list[list[Node]]:
    """Some prompts, each a chain of blocks; some of them branch off another."""
    size = rng.choice((1, 4))
    found: list[list[Node]] = []
    number = 0
    for _ in range(rng.randint(1, 3)):
        trunk = found[0][: rng.randint(0, len(found[0]))] if found and rng.random() < 0.4 else []
        adapter = trunk[0].adapter if trunk else rng.choice((None, None, "adapter"))
        chain = list(trunk)
        for _ in range(rng.randint(1, 4)):
            tokens = tuple(number * size + each for each in range(size))
            extra = "salt" if rng.random() < 0.1 else None
            chain.append(Node(number, chain[-1].number if chain else None, tokens, extra, adapter))
            number += 1
        found.append(chain)
    return found


@dataclass
class Writer:
    """Makes the frames of one rank. ``arrays``: events as positional arrays, which have no marks and no scope on a clear."""

    rng: random.Random
    chains: list[list[Node]]
    seed: str
    arrays: bool
    batches: list[SourceBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.groups = {group: rng.choice(KINDS) for group in rng.sample(range(3), rng.randint(1, 3))}
        self.bare = {group for group in self.groups if rng.random() < 0.2}  # groups whose stores are placeholders
        self.sizeless = rng.random() < 0.5
        self.tiers = rng.choice(((None,), ("GPU", None), TIERS))
        self.restarts = self.tiers != TIERS or rng.random() < 0.5
        self.resolves_late = self.tiers != TIERS or not self.restarts
        if not self.resolves_late:
            self.bare.clear()
        self.life = 0
        self.seq = 0
        self.at_us = START_US + rng.choice((0, 0, 500_000, 2_000_000))

    def hash_of(self, node: Node) -> int | bytes:
        digest = hashlib.blake2b(f"{self.seed} {self.life} {node.number}".encode(), digest_size=8).digest()
        return digest if self.seed.endswith("b") else int.from_bytes(digest, "big")

    def store(self) -> Event:
        rng = self.rng
        chain = rng.choice(self.chains)
        start = 0 if self.sizeless or not self.resolves_late or rng.random() < 0.6 else rng.randrange(len(chain))
        run = chain[start : start + rng.randint(1, len(chain))] if rng.random() < 0.95 else []
        group = rng.choice(list(self.groups))
        placeholder = group in self.bare or (self.resolves_late and rng.random() < 0.1)
        size = len(chain[0].tokens)
        event: Event = {
            "type": "BlockStored",
            "block_hashes": [self.hash_of(node) for node in run],
            "parent_block_hash": self.hash_of(chain[start - 1]) if start else None,
            "token_ids": (None if self.seq % 2 else []) if placeholder else [token for node in run for token in node.tokens],
            "block_size": 0 if placeholder and self.sizeless else size,
            "lora_id": None,
            "medium": rng.choice(self.tiers),
            "lora_name": chain[0].adapter,
            "extra_keys": [[node.extra] if node.extra else None for node in run] if any(node.extra for node in run) else None,
            "group_idx": None if group == 0 and rng.random() < 0.5 else group,
            "kv_cache_spec_kind": self.groups[group],
            "kv_cache_spec_sliding_window": 64 if self.groups[group] == "sliding_window" else None,
        }
        if not self.arrays:
            if self.seq % 3 == 0:
                event |= {"session_id": f"session-{self.seq}", "ownership": "exclusive"}
            if rng.random() < 0.15:
                event["reused"] = True
            if rng.random() < 0.08:
                event["locality"] = rng.choice(("REMOTE", "remote", "LOCAL"))
        return event

    def remove(self) -> Event:
        rng = self.rng
        nodes = rng.choice(self.chains)
        event: Event = {
            "type": "BlockRemoved",
            "block_hashes": [self.hash_of(node) for node in rng.sample(nodes, rng.randint(1, len(nodes)))],
            "medium": rng.choice(self.tiers),
            "group_idx": rng.choice(list(self.groups)),
        }
        if not self.arrays and rng.random() < 0.05:
            event["locality"] = "REMOTE"
        return event

    def clear(self) -> Event:
        rng = self.rng
        event: Event = {"type": "AllBlocksCleared"}
        if not self.arrays:
            if rng.random() < 0.4:
                event["medium"] = rng.choice(TIERS)
            if rng.random() < 0.4:
                event["group_idx"] = rng.choice(list(self.groups))
            if event.get("medium") and rng.random() < 0.3:
                event["type"] = "TierBlocksCleared"
            if rng.random() < 0.05:
                event["locality"] = "REMOTE"
        return event

    def event(self) -> Event:
        return self.rng.choices((self.store, self.remove, self.clear, lambda: {"type": "Unheard"}), (60, 30, 6, 2))[0]()

    def payload(self) -> bytes:
        events: list[Any] = [self.event() for _ in range(self.rng.choice((0, 1, 1, 2, 3, 5)))]
        if self.arrays:
            events = [[*event.values()] for event in events]
        return msgspec.msgpack.encode([self.at_us / 1e6, events])

    def add(self, payload: bytes) -> None:
        self.batches.append(SourceBatch(self.life, self.seq, self.at_us, payload))

    def step(self) -> None:
        """One thing that happens on the way: mostly a batch that follows."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.03 and self.batches and self.batches[-1].life == self.life:  # a frame again
            self.batches.append(rng.choice([batch for batch in self.batches[-5:] if batch.life == self.life]))
            return
        if kind < 0.06 and self.batches and self.restarts:  # another process: later, and numbered from the start
            self.life += 1
            self.at_us += rng.choice((1, 1_000_000, 3_000_000))
            self.seq = 0
        elif kind < 0.09:  # missing; now and then it comes late
            self.seq += rng.randint(1, 2)
        else:
            self.at_us += rng.choice(TICKS_US)
            if rng.random() < 0.01:
                self.at_us += rng.choice(LONG_US)
        if rng.random() < 0.02 and self.seq:
            self.add(b"\xc1 not msgpack")
        else:
            late = self.payload() if rng.random() < 0.5 else None
            self.add(self.payload())
            if late is not None and kind < 0.09 and self.seq > 1 and kind >= 0.06:
                self.batches.append(SourceBatch(self.life, self.seq - 1, self.at_us, late))
        self.seq += 1


def fleet(seed: int) -> list[RankSource]:
    """One to four ranks of one to three instances over shared content."""
    rng = random.Random(seed)
    content = chains(rng)
    sources = []
    ranks: dict[str, int] = {}
    for _ in range(rng.randint(1, 4)):
        instance = rng.choice("abc")
        dp_rank = ranks[instance] = ranks.get(instance, -1) + 1
        writer = Writer(rng, content, f"{seed} {instance} {dp_rank} {rng.choice('nb')}", rng.random() < 0.3)
        for _ in range(rng.randint(1, 40)):
            writer.step()
        declaration = Declaration(
            rng.choice(("none", "labelled", "unlabelled")),
            rng.choice(("per_copy", "last_copy")),
            model="m",
            workload=rng.choice(("w", None)),
        )
        sources.append(RankSource(instance, dp_rank, writer.batches, declaration, START_US))
    return sources


def counted(stream: list[RankMessage], rng: random.Random) -> Counted:
    """The rows for these messages, whatever the shards, the window and the moments of giving out."""
    offline = OfflineFleet(window_us=rng.choice((250_000, 1_000_000, 10_000_000, 60_000_000)), shards=rng.randint(1, 4))
    often = rng.choice((0.0, 0.1, 1.0))
    for message in stream:
        offline.apply(message)
        if rng.random() < often:
            offline.drain()
    return offline.drain()


def disagreements(sources: list[RankSource], seed: int) -> list[str]:
    """What the counting path and the oracle say differently of these ranks."""
    rng = random.Random(seed)
    wanted = expected(sources)
    rows = counted(interleaved(messages(sources), rng.randrange), rng)
    document = assemble(totals_from_records(rows.rank_windows, rows.duplicate_windows))
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
        for row in rows.recomputes
        if row.cause != "concurrent"
    )
    if again != wanted["recomputes"]:
        found.append(f"recomputes: {again} instead of {wanted['recomputes']}")
    return found


@pytest.mark.parametrize("block", range(8))
def test_random_streams_agree_with_the_oracle(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        assert disagreements(fleet(seed), seed) == [], f"seed {seed}"


def rank(*lives: list[list[Event]], instance: str = "a", reuse: ReuseReporting = "none", declared_model: str | None = "m") -> RankSource:
    """A rank whose lives are lists of batches, one a second."""
    batches: list[SourceBatch] = []
    for life, payloads in enumerate(lives):
        for seq, events in enumerate(payloads):
            at_us = START_US + len(batches) * 1_000_000
            batches.append(SourceBatch(life, seq, at_us, msgspec.msgpack.encode([at_us / 1e6, events])))
    return RankSource(instance, 0, batches, Declaration(reuse, "per_copy", model=declared_model), START_US)


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


def figures_of(*sources: RankSource) -> dict[str, Any]:
    """The document for these ranks, which the oracle agrees with."""
    assert disagreements(list(sources), 0) == []
    rows = counted(interleaved(messages(sources), lambda _: 0), random.Random(0))
    return assemble(totals_from_records(rows.rank_windows, rows.duplicate_windows))


def test_a_placeholder_is_resident_with_the_size_that_comes_later() -> None:
    held = figures_of(rank([[stored(1, 2, tokens=False, size=0)], [stored(1)], [{"type": "BlockRemoved", "block_hashes": [1]}]]))["ranks"][
        0
    ]
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
