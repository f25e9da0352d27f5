"""The real cores wired as the worker wires them, with topics that are lists: delivered in any order, cut anywhere, killed at any point.

Each core writes to the list the next one reads. A snapshot is taken whenever it is asked for; a kill throws a core away and begins
with its last snapshot, reading again from there or from anywhere before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from schemas import codec
from schemas.records import DuplicateSteps, DuplicateWindow, RankMessage, RankWindow, Recompute, ResidencyChanges, SharedPrefix
from streams.duplication import SLICES, ShardCore
from streams.history import HISTORY_BLOCKS, HISTORY_US
from streams.merger import Merger
from streams.residency import RankCore

from .rank import RankInput


class RankPart:
    """One rank's core and what it reads."""

    def __init__(self, given: RankInput, messages: Sequence[RankMessage], window_us: int, shards: int) -> None:
        self.key = (given.instance_id, given.dp_rank)
        self.messages = messages
        self.given, self.window_us, self.shards = given, window_us, shards
        self.history_us = HISTORY_US if given.history_us is None else given.history_us
        self.history_blocks = HISTORY_BLOCKS if given.history_blocks is None else given.history_blocks
        self.core = self.new()
        self.position = 0
        self.snapshot: tuple[bytes, int] | None = None

    def new(self) -> RankCore:
        return RankCore(
            *self.key, window_us=self.window_us, shards=self.shards, history_us=self.history_us, history_blocks=self.history_blocks
        )

    def restored(self, data: bytes) -> RankCore:
        return RankCore.restored(
            data, window_us=self.window_us, shards=self.shards, history_us=self.history_us, history_blocks=self.history_blocks
        )


class ShardPart:
    """One shard's core, its input and the snapshots of its slices."""

    def __init__(self, shard: int, shards: int, window_us: int, skew_us: int) -> None:
        self.shard, self.shards = shard, shards
        self.options = {"window_us": window_us, "skew_us": skew_us}
        self.core = ShardCore(shard, shards, **self.options)
        self.input: list[ResidencyChanges] = []
        self.position = 0
        self.snapshots: dict[int, bytes] = {}


class Machine:
    """A worker of ``shards`` content shards over these ranks."""

    def __init__(
        self,
        inputs: Sequence[RankInput],
        messages: Sequence[Sequence[RankMessage]],
        rng: random.Random,
        *,
        window_us: int = 10_000_000,
        shards: int = 1,
        skew_us: int = 1_000_000,
    ) -> None:
        self.rng = rng
        self.ranks = [RankPart(given, sent, window_us, shards) for given, sent in zip(inputs, messages, strict=True)]
        self.shards = [ShardPart(shard, shards, window_us, skew_us) for shard in range(shards)]
        self.merger_options = {"window_us": window_us, "shards": shards}
        self.merger = Merger(**self.merger_options)
        self.merger_snapshot: tuple[bytes, int] | None = None
        self.answers: list[DuplicateSteps] = []
        self.merged = 0
        self.rank_windows: list[RankWindow] = []
        self.recomputes: list[Recompute] = []
        self.duplicate_windows: list[DuplicateWindow] = []
        self.shared_prefixes: list[SharedPrefix] = []

    # -- one step of each part

    def read(self, rank: RankPart, count: int) -> None:
        """Let a rank count its next messages."""
        for message in rank.messages[rank.position : rank.position + count]:
            rank.core.apply(message, rank.position)
            rank.position += 1

    def drain(self, rank: RankPart) -> None:
        """Let a rank give out what it has."""
        drained = rank.core.drain()
        self.rank_windows += drained.windows
        self.recomputes += drained.recomputes
        for shard, changes in zip(self.shards, drained.changes, strict=True):
            shard.input += [codec.decode(codec.encode(each), ResidencyChanges) for each in changes]

    def answer(self, shard: ShardPart, count: int) -> None:
        """Let a shard answer its next messages."""
        for changes in shard.input[shard.position : shard.position + count]:
            answer = shard.core.apply(changes, shard.position)
            self.answers.append(codec.decode(codec.encode(answer), DuplicateSteps))
            shard.position += 1

    def merge(self, count: int) -> None:
        """Let the merger take the next answers, and give out what it has."""
        for answer in self.answers[self.merged : self.merged + count]:
            self.merger.apply(answer, self.merged)
            self.merged += 1
        self.duplicate_windows += self.merger.drain()
        self.shared_prefixes += self.merger.drain_prefixes()

    # -- snapshots and kills

    def keep_rank(self, rank: RankPart) -> None:
        self.drain(rank)
        rank.snapshot = rank.core.dump(), rank.position

    def kill_rank(self, rank: RankPart) -> None:
        """Begin again with the last snapshot, or from nothing."""
        if rank.snapshot is None:
            rank.core, rank.position = rank.new(), 0
        else:
            data, position = rank.snapshot
            rank.core, rank.position = rank.restored(data), self.rng.randint(0, position)

    def keep_slices(self, shard: ShardPart) -> None:
        for number in self.rng.sample(range(SLICES), self.rng.randint(1, SLICES)):
            shard.snapshots[number] = shard.core.dump_slice(number)

    def kill_shard(self, shard: ShardPart) -> None:
        """Begin again with the last snapshot of every slice, from where the oldest of them needs it."""
        shard.core = ShardCore(shard.shard, shard.shards, **shard.options)
        for number, data in shard.snapshots.items():
            shard.core.load_slice(number, data)
        resume = min(shard.core.slice_position(number) for number in range(SLICES)) + 1
        shard.position = self.rng.randint(0, resume)

    def keep_merger(self) -> None:
        self.merge(0)
        self.merger_snapshot = self.merger.dump(), self.merged

    def kill_merger(self) -> None:
        if self.merger_snapshot is None:
            self.merger, self.merged = Merger(**self.merger_options), 0
        else:
            data, merged = self.merger_snapshot
            self.merger, self.merged = Merger.restored(data, **self.merger_options), self.rng.randint(0, merged)

    # -- runs

    def disturbed(self, *, kills: bool) -> None:
        """Everything in any order: which rank reads next, how much, when it is drained, how far shards and merger follow."""
        rng = self.rng
        slack = 400 if kills else 0
        while any(rank.position < len(rank.messages) for rank in self.ranks) and slack >= 0:
            rank, shard = rng.choice(self.ranks), rng.choice(self.shards)
            self.read(rank, rng.choice((1, 1, 3, 20)))
            if rng.random() < 0.5:
                self.drain(rank)
            if rng.random() < 0.5:
                self.answer(shard, rng.choice((1, 5, 100)))
            if rng.random() < 0.3:
                self.merge(rng.choice((1, 10, 1000)))
            if kills and rng.random() < 0.3:
                self.disturb(rank, shard)
                slack -= 1
        self.finish()

    def disturb(self, rank: RankPart, shard: ShardPart) -> None:
        """A snapshot or a kill somewhere."""
        what = self.rng.randrange(6)
        if what == 0:
            self.keep_rank(rank)
        elif what == 1:
            self.kill_rank(rank)
        elif what == 2:
            self.keep_slices(shard)
        elif what == 3:
            self.kill_shard(shard)
        elif what == 4:
            self.keep_merger()
        else:
            self.kill_merger()

    def in_time(self) -> None:
        """Everything in the order of time, in one go for each stage."""
        times = sorted((message.at_us, number) for number, rank in enumerate(self.ranks) for message in rank.messages)
        for _, number in times:
            self.read(self.ranks[number], 1)
            self.drain(self.ranks[number])
        self.finish()

    def finish(self) -> None:
        """Let every stage come to the end of what there is."""
        for rank in self.ranks:
            self.read(rank, len(rank.messages))
            self.drain(rank)
        for shard in self.shards:
            self.answer(shard, len(shard.input))
        self.merge(len(self.answers))
