"""Seeded histories of a small fleet, cut into messages in any way, and driven through shards and merger with or without restarts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from schemas.records import (
    NO_ID,
    UNKNOWN_PARENT,
    DuplicateSteps,
    DuplicateWindow,
    Note,
    ResidencyChanges,
    ResidencyStep,
    SharedPrefix,
)
from streams.duplication import SLICES, ShardCore
from streams.merger import Merger

WINDOW_US = 100
STEP_US = 6 * WINDOW_US
SKEW_US = 15
GRACE_US = 40
SIZE = 16
END_US = 3_600
CONTENTS = 12
RANKS = [("a", 0), ("a", 1), ("b", 0), ("c", 0)]
Rank = tuple[str, int]


def content_id(number: int) -> bytes:
    """Of content ``number``: neighbours lie in different shards and slices."""
    return (number * 7 + 1).to_bytes(4, "big") + bytes([number, number * 5 % 256]) + bytes(10)


PARENTS = {number: NO_ID if number in (0, 6) else content_id(4 if number == 9 else number - 1) for number in range(CONTENTS)}
"""Two chains, one of which forks at 4."""


@dataclass
class Batch:
    """One engine batch: what it opened and closed, and what holds of the rank. ``gap``: not contiguous with the one before."""

    at: int
    opened: list[int]
    closed: list[int]
    workload: str | None
    since: int
    known: bool = True
    gap: bool = False
    departs: bool = False
    tier: str = "GPU"


def history(rng: random.Random, *, departures: bool = False) -> dict[Rank, list[Batch]]:
    """Batches per rank; all ranks have one at the start and one beyond the end.

    With ``departures`` ranks leave and come back: as nobody waits for them meanwhile, what they send then may be late.
    """
    return {rank: _of_rank(rng, departures) for rank in RANKS[: rng.randint(2, 4)]}


def _of_rank(rng: random.Random, departures: bool) -> list[Batch]:
    at, held, workload, since = rng.randint(1, 60), dict.fromkeys(("GPU", "CPU"), frozenset[int]()), rng.choice(("x", "y", None)), 0
    batches = [Batch(at, [], [], workload, since)]
    while True:
        at += rng.choice((0, 1, 14, 15, 16, 40, 100, 230))
        if at >= END_US:
            break
        if rng.random() < 0.08:
            workload, since = rng.choice(("x", "y", "z", None)), at
        tier = "CPU" if rng.random() < 0.15 else "GPU"
        chain = rng.choice((range(6), range(6, CONTENTS), (9, 10)))
        touched = set(chain[: rng.randint(1, len(chain))]) if rng.random() < 0.6 else set(rng.sample(range(CONTENTS), 2))
        is_open = rng.random() < 0.6
        opened = sorted(touched - held[tier]) if is_open else []
        closed = [] if is_open else sorted(touched & held[tier])
        held[tier] = held[tier] | set(opened) if is_open else held[tier] - set(closed)
        batches.append(
            Batch(
                at,
                opened,
                closed,
                workload,
                since,
                known=rng.random() < 0.9,
                gap=rng.random() < 0.1,
                departs=rng.random() < 0.05 * departures,
                tier=tier,
            )
        )
    return [*batches, Batch(END_US + 2 * GRACE_US, [], [], workload, since)]


def messages(rank: Rank, batches: Sequence[Batch], shards: int, rng: random.Random) -> list[list[ResidencyChanges]]:
    """The rank's messages, each as one per shard: cut at random places, and where a holder cuts them.

    That is where what holds of the rank changes, before and behind a batch with which it comes, and between windows.
    """
    out: list[list[ResidencyChanges]] = []
    since = 0
    often = rng.choice((0.1, 0.5, 1.0))
    for last, batch in enumerate(batches):
        following = batches[last + 1] if last + 1 < len(batches) else None
        if following and not (
            batch.departs
            or last == 0
            or batches[last - 1].departs
            or batch.at // WINDOW_US != following.at // WINDOW_US
            or (batch.workload, batch.since) != (following.workload, following.since)
            or rng.random() < often
        ):
            continue
        out.append([_message(rank, batches, since, last, shard, shards) for shard in range(shards)])
        since = last + 1
    return out


def _message(rank: Rank, batches: Sequence[Batch], first: int, last: int, shard: int, shards: int) -> ResidencyChanges:
    steps, observed, notes = [], [], []
    for offset in range(first, last + 1):
        batch = batches[offset]
        opened = [number for number in batch.opened if (number * 7 + 1) % shards == shard]
        closed = [number for number in batch.closed if (number * 7 + 1) % shards == shard]
        parents = b"".join(PARENTS[number] if batch.known else UNKNOWN_PARENT for number in opened)
        if opened or closed:
            steps.append(ResidencyStep(offset, batch.at, batch.tier, SIZE, _packed(opened), _packed(closed), parents))
        if offset and not batch.gap:
            observed += [batches[offset - 1].at, batch.at]
        if batch.gap:
            notes.append(Note(batch.at - batch.at % WINDOW_US, "lost"))
    end = batches[last]
    return ResidencyChanges(
        *rank,
        workload=end.workload,
        model="m" if rank[0] == "a" else None,
        source_offset=last,
        watermark_us=end.at,
        steps=steps,
        declared_at_us=end.since,
        key_epoch=0,
        canary="k",
        kv_bytes_per_token=None if rank == ("c", 0) else 1_000,
        observed=observed if shard == 0 else [],
        notes=notes if shard == 0 else [],
        departed=end.departs,
    )


def _packed(numbers: list[int]) -> bytes:
    return b"".join(content_id(number) for number in numbers)


@dataclass
class Fleet:
    """Shards and merger with their logs; :meth:`crash` forgets what is in memory and goes on from what was written down."""

    shards: int
    rng: random.Random
    options: dict[str, int] = field(default_factory=dict)
    merging: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cores = [self._core(shard) for shard in range(self.shards)]
        self.merger = Merger(**self._merger_options())
        self.residency: list[list[ResidencyChanges]] = [[] for _ in range(self.shards)]
        self.steps: list[DuplicateSteps] = []
        self.read = [0] * self.shards
        self.merged = 0
        self.windows: dict[tuple[str, str, str, int], DuplicateWindow] = {}
        self.prefixes: dict[tuple[int, int], SharedPrefix] = {}
        self.slices: list[dict[int, bytes]] = [{} for _ in range(self.shards)]
        self.merger_dump: bytes | None = None

    def _core(self, shard: int) -> ShardCore:
        return ShardCore(shard, self.shards, skew_us=SKEW_US, window_us=WINDOW_US, grace_us=GRACE_US, **self.options)

    def _merger_options(self) -> dict[str, int]:
        return {"window_us": WINDOW_US, "shards": self.shards, "grace_us": GRACE_US, **self.merging}

    def count(self, shard: int, number: int) -> None:
        """Let a shard take up to ``number`` messages."""
        for message in self.residency[shard][self.read[shard] : self.read[shard] + number]:
            self.steps.append(self.cores[shard].apply(message, self.read[shard]))
            self.read[shard] += 1

    def merge(self, number: int) -> None:
        """Let the merger take up to ``number`` answers."""
        for answer in self.steps[self.merged : self.merged + number]:
            self.merger.apply(answer, self.merged)
            self.merged += 1

    def drain(self) -> None:
        """Keep the rows that the merger gives, of each key the one with the highest version."""
        for row in self.merger.drain():
            key = (row.scope, row.scope_key, row.tier, row.window_start_us)
            if key not in self.windows or row.version >= self.windows[key].version:
                self.windows[key] = row
        for prefix in self.merger.drain_prefixes():
            self.prefixes[prefix.as_of_us, prefix.place] = prefix

    def write_down(self) -> None:
        """Dump some slices, or the merger."""
        shard = self.rng.randrange(self.shards)
        for number in self.rng.sample(range(SLICES), self.rng.choice((1, 3, SLICES))):
            self.slices[shard][number] = self.cores[shard].dump_slice(number)
        if self.rng.random() < 0.3:
            self.drain()
            self.merger_dump = self.merger.dump()

    def crash(self) -> None:
        """Restore what was written down, and read again from some place before it."""
        shard = self.rng.randrange(self.shards)
        core = self.cores[shard] = self._core(shard)
        for number, data in self.slices[shard].items():
            core.load_slice(number, data)
        self.read[shard] = self.rng.randint(0, min(core.slice_position(number) for number in range(SLICES)) + 1)
        if self.rng.random() < 0.5:
            if self.merger_dump is None:
                self.merger, self.merged = Merger(**self._merger_options()), 0
            else:
                self.merger = Merger.restored(self.merger_dump, **self._merger_options())
                self.merged = self.rng.randint(0, self.merger.position + 1)

    def finish(self) -> None:
        """Take all there is."""
        for shard in range(self.shards):
            self.count(shard, len(self.residency[shard]))
        self.merge(len(self.steps))
        self.drain()


def run(
    batches: dict[Rank, list[Batch]],
    seed: int,
    *,
    shards: int,
    restarts: bool = False,
    in_order: bool = False,
    options: dict[str, int] | None = None,
) -> Fleet:
    """The history through a fleet: cut and interleaved by ``seed``, each rank heard of before any goes on."""
    rng = random.Random(seed)
    fleet = Fleet(shards, rng, options or {})
    queues = {rank: list(messages(rank, each, shards, rng)) for rank, each in batches.items()}
    firsts = [queue.pop(0) for queue in queues.values()]
    rng.shuffle(firsts)
    for first in firsts:
        for shard in range(shards):
            fleet.residency[shard].append(first[shard])
    while any(queues.values()):
        waiting = [rank for rank, queue in queues.items() if queue]
        rank = min(waiting, key=lambda each: queues[each][0][0].watermark_us) if in_order else rng.choice(waiting)
        for shard, message in enumerate(queues[rank].pop(0)):
            fleet.residency[shard].append(message)
        if rng.random() < 0.6:
            fleet.count(rng.randrange(shards), rng.randint(1, 6))
        if rng.random() < 0.5:
            fleet.merge(rng.randint(1, 9))
        if rng.random() < 0.3:
            fleet.drain()
        if restarts and rng.random() < 0.25:
            fleet.write_down()
        if restarts and rng.random() < 0.08:
            fleet.crash()
    fleet.finish()
    return fleet


def final_windows(fleet: Fleet) -> dict[tuple[str, str, str, int], dict[str, Any]]:
    """Final rows but for their version; of pairs and offload tiers, which come with their first step, those that say something."""
    out = {}
    for key, row in fleet.windows.items():
        if row.final and (row.inside_block_us or row.between_block_us or row.extra_blocks_max or (row.tier == "GPU" and _steady(row))):
            out[key] = structs.asdict(row) | {"version": 0}
    return out


def _steady(row: DuplicateWindow) -> bool:
    return row.scope != "workload_pair"


def told_prefixes(fleet: Fleet) -> dict[tuple[int, int], dict[str, Any]]:
    """Rows of shared prefixes but for their version."""
    return {key: structs.asdict(row) | {"version": 0} for key, row in fleet.prefixes.items()}
