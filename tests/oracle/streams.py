"""Random fleets for the reference and the real path alike: frames at the level of the payload, and what else a rank's stream carries.

The frames need not be what one engine would send: removals of what was never stored, clears of any scope, placeholders without tokens,
parents that are unknown or come later, marks, remote blocks, copies, repeated and late frames, gaps, restarts at any time (a number
seen before with another payload is one, whatever its time), clocks that stand still or step back, frames that cannot be read. With
``rich``, between them: scrapes, departures, declarations that change.

Left out, because the rules leave them open:

* two engine hashes of one content in one life, or a hash that changes its meaning;
* block sizes that differ between events of one hash in one group, and placeholders without a size for a hash whose size an event
  gave that could not be resolved (whether its size is known then);
* which of two losses of one instant is forgotten first;
* scrapes more than an hour apart (how far back a rate may be measured from then);
* on a rank with offload tiers, restarts together with content that becomes known late (whether the mark of an ambiguous clear is
  still there when what it is about was stored into the GPU tier unrecognised).
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from .rank import Declared, Departed, RankInput, Scraped, Step

START_US = 1_700_000_000_000_000
TICKS_US = (0, 0, 1, 250_000, 500_000, 1_000_000, 1_000_001, 3_000_000, 9_500_000)
LONG_US = (40_000_000, 7_300_000_000)
WITHIN_THE_HOUR_US = (40_000_000, 600_000_000)
KINDS = ("full_attention", "mla_attention", "sink_full_attention", "sliding_window", "mamba", None)
TIERS = ("GPU", "gpu", None, "CPU", "DISK")
WORKLOADS = ("chat", "batch", None)

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
    """Makes the steps of one rank. ``arrays``: events as positional arrays, which have no marks and no scope on a clear."""

    rng: random.Random
    chains: list[list[Node]]
    seed: str
    arrays: bool
    declared: Declared
    rich: bool
    in_order: bool = False  # one event an instant: what is lost first is plain
    steps: list[Step] = field(default_factory=list)
    sent: list[tuple[int, bytes]] = field(default_factory=list)  # of this life

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
        self.prompt = self.cached = self.hits = 0
        self.pool = rng.choice((3, 10, 1000))

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
        events: list[Any] = [self.event() for _ in range(self.rng.choice((0, 1, 1) if self.in_order else (0, 1, 1, 2, 3, 5)))]
        if self.arrays:
            events = [[*event.values()] for event in events]
        return msgspec.msgpack.encode([self.at_us / 1e6, events])

    def add(self, seq: int, payload: bytes) -> None:
        self.steps.append((seq, payload))
        self.sent.append((seq, payload))

    def step(self) -> None:
        """One thing that happens on the way: mostly a batch that follows."""
        rng = self.rng
        kind = rng.random()
        if self.rich and rng.random() < 0.3:
            self.say()
        if kind < 0.03 and self.sent:  # a frame again
            self.steps.append(rng.choice(self.sent[-5:]))
            return
        if kind < 0.06 and self.sent and self.restarts:  # another process, numbered from the start
            seen = any(seq == 0 for seq, _ in self.sent)
            # What tells it is a time that is newer, or else another payload under a number seen.
            self.at_us += rng.choice((0, -500_000, 1_000_000) if seen and not self.in_order else (1, 1_000_000, 3_000_000))
            self.life += 1
            self.seq = 0
            self.sent.clear()
            self.prompt = self.cached = self.hits = 0
        elif kind < 0.09:  # missing; now and then it comes late
            self.seq += rng.randint(1, 2)
        else:
            self.at_us += rng.choice(TICKS_US) or self.in_order
            if rng.random() < 0.01:
                self.at_us += rng.choice(WITHIN_THE_HOUR_US if self.rich else LONG_US)
            if rng.random() < 0.02 and not self.in_order:
                self.at_us -= 300_000
        if rng.random() < 0.02 and self.seq:
            self.add(self.seq, b"\xc1 not msgpack")
            if rng.random() < 0.3:
                self.steps.append((rng.randrange(self.seq), b"\xc1 neither"))
        else:
            late = self.payload() if rng.random() < 0.5 else None
            self.add(self.seq, self.payload())
            if late is not None and kind < 0.09 and self.seq > 1 and kind >= 0.06:
                self.add(self.seq - 1, late)
        self.seq += 1

    # -- what stands between the frames

    def say(self) -> None:
        rng = self.rng
        what = rng.random()
        if what < 0.75:
            self.steps.append(self.scrape())
        elif what < 0.85:
            self.steps.append(Departed())
        else:
            self.declared = replace(self.declared, **dict(rng.sample(list(redeclarable(rng).items()), rng.randint(0, 2))))
            self.steps.append(self.declared)

    def scrape(self) -> Scraped:
        rng = self.rng
        self.prompt += rng.choice((0, 5, 1000))
        self.cached = min(self.cached + rng.choice((0, 0, 3, 400)), self.prompt)
        if rng.random() < 0.02:
            self.prompt = self.cached = 0
        self.hits += rng.random() < 0.03
        return Scraped(
            at_ms=self.at_us // 1000 + rng.choice((0, 1, 400)),
            usage=rng.choice((None, 0.0, 0.5, 1.0)),
            pool=rng.choice((None, self.pool, self.pool, self.pool)),
            running=rng.choice((None, 0, 1, 3)),
            prompt_tokens=rng.choice((None, self.prompt, self.prompt, self.prompt)),
            prompt_tokens_cached=rng.choice((self.cached, self.cached, None)),
            external_hits=rng.choice((None, self.hits)),
        )


def redeclarable(rng: random.Random) -> dict[str, Any]:
    """A value for everything that an operator may declare anew without making another identity of it."""
    return {
        "reuse_reporting": rng.choice(("none", "labelled", "unlabelled")),
        "removals": rng.choice(("per_copy", "last_copy")),
        "workload": rng.choice(WORKLOADS),
        "kv_connector": rng.choice((None, None, "shared store")),
        "prefill_rate": rng.choice((None, 700.0, 12_345.6)),
        "gpus_per_rank": rng.choice((None, 1.0, 0.5, 8.0)),
        "kv_bytes_per_token": rng.choice((None, 1, 1000)),
        "kv_bytes_by_group": rng.choice(((), ((0, 10), (1, 7), (2, 9)), ((1, 3),))),
        "staleness_ms": rng.choice((0, 5_000)),
    }


def fleet(seed: int, *, rich: bool = False) -> list[RankInput]:
    """One to four ranks of one to three instances over shared content."""
    rng = random.Random(seed)
    content = chains(rng)
    inputs = []
    ranks: dict[str, int] = {}
    for _ in range(rng.randint(1, 4)):
        instance = rng.choice("abc")
        dp_rank = ranks[instance] = ranks.get(instance, -1) + 1
        declared = Declared(
            rng.choice(("none", "labelled", "unlabelled")),
            rng.choice(("per_copy", "last_copy")),
            model="m",
            workload=rng.choice(WORKLOADS),
        )
        if rich:
            declared = replace(declared, **redeclarable(rng), model=rng.choice(("m", "m", "m", None)), canary=rng.choice(("c", "c", "d")))
        most = rng.choice((None, 1, 3)) if rich else None
        name = f"{seed} {instance} {dp_rank} {rng.choice('nb')}"
        writer = Writer(rng, content, name, rng.random() < 0.3, declared, rich, in_order=most is not None)
        for _ in range(rng.randint(1, 40)):
            writer.step()
        given = RankInput(instance, dp_rank, writer.steps, declared=declared)
        if rich:
            given.history_us = rng.choice((None, 1_000_000, 5_000_000))
            given.history_blocks = most
        inputs.append(given)
    return inputs
