"""Which content lies on more than one rank, at which instant: the content-shard core. Pure, no clocks, no I/O.

Rule 5 of the design. A shard takes the residency changes of every rank, in whatever order they arrive, and answers each
with the steps by which extra copies change: (time, rank that bears the copy, change). Steps are sums, so a late change
only adds the difference between what was said and what is now known; the final answer depends on the facts alone.

The contents lie in :data:`SLICES` slices, each of which can be written down and read again by itself, with the position up to
which it has counted: a shard whose slices stand at different positions reads on from the least of them, and each slice takes
only what it does not have.
"""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.errors import KvcensusError
from schemas.records import ID_BYTES, DuplicateStep, DuplicateSteps, Note, PairStep, ResidencyChanges, SharedContent
from streams.holding import Content, Event, Holder, Rank, Steps
from streams.residency import GPU
from streams.shard_ranks import GRACE_US, Known, Ranks
from streams.shard_slice import Contents, Slice, key_of

SLICES = 16
"""Parts of a shard that are written down one at a time. A content's is told by a byte of its id that does not tell its shard."""

MAX_EVENTS = 200_000
"""Open and close events a shard keeps for late data; beyond that, the oldest are folded into a settled state."""

FOLD_BEHIND_US = 600_000_000
"""What is folded lies at least this far behind the newest engine time seen."""

PREFIX_WINDOWS = 6
"""Shared content is told of every so many windows."""

SHARED_BYTES = 512 * 1024
"""About how much of it one answer tells at most, below the usual limit of a broker (1 MiB); the rest follows with the next."""

STATE_VERSION = 1
"""Of what :meth:`ShardCore.dump_slice` gives."""

_SLICE_BYTE = 5
_SLICE_MASK = SLICES - 1

_SaidSteps = dict[tuple[str, int], Steps]
"""By tier and size of the contents."""


class _Part:
    """Slices that stand at one position, and what was known of the ranks there."""

    def __init__(self, ranks: Ranks, slices: list[int]) -> None:
        self.ranks = ranks
        self.slices = slices


class ShardCore:
    """Duplicate steps of one content shard.

    ``skew_us`` is the clock skew allowance between instances: how long an instance must have held a content before it
    counts as a copy between instances. ``window_us`` is the base window, ``grace_us`` how far beyond an instant each live rank must be
    before shared content is told of it, ``shared_bytes`` how much of that one answer may hold.
    """

    def __init__(
        self,
        shard: int,
        shards: int,
        *,
        skew_us: int = 1_000_000,
        window_us: int = 10_000_000,
        grace_us: int = GRACE_US,
        max_events: int = MAX_EVENTS,
        fold_behind_us: int = FOLD_BEHIND_US,
        shared_bytes: int = SHARED_BYTES,
    ) -> None:
        self.shard = shard
        self.shards = shards
        self._skew_us = skew_us
        self._step_us = PREFIX_WINDOWS * window_us
        self._grace_us = grace_us
        self._fold_behind_us = fold_behind_us
        self._shared_bytes = shared_bytes // SLICES
        self._slices = [Slice(self._step_us, skew_us, max_events // SLICES) for _ in range(SLICES)]
        self._parts = [_Part(Ranks(self._step_us, grace_us), list(range(SLICES)))]
        self._holders: dict[Holder, Holder] = {}

    @property
    def late_changes(self) -> int:
        """Changes so late that they count at a later time than their own."""
        return sum(each.late_changes for each in self._slices)

    def apply(self, changes: ResidencyChanges, offset: int) -> DuplicateSteps:
        """The answer to the message at ``offset``; steps are empty where a rank's batches were already taken into account."""
        rank = (changes.instance_id, changes.dp_rank)
        answer = DuplicateSteps(self.shard, self.shards, offset, *rank, changes.workload, changes.model, changes.watermark_us, [])
        steps: _SaidSteps = {}
        parts = [part for part in self._parts if part.ranks.position < offset]
        for part in parts:
            answer.previous_offset = part.ranks.position
            known, taken = part.ranks.hear(rank, changes)
            self._take(part, known, taken, self._holder(rank, changes.workload or ""), changes, steps, answer.notes)
            part.ranks.position = offset
            if part is parts[-1]:
                self._head(answer, changes, known, taken)
        self._tell(parts, answer)
        _write(steps, answer)
        answer.late_changes = self.late_changes
        answer.shared_late = sum(each.shared_late for each in self._slices)
        answer.parent_conflicts = sum(each.conflicts for each in self._slices)
        if len(self._parts) > 1:
            self._join()
        return answer

    def missed(self, offset: int) -> None:
        """The message at ``offset``, and any before it that was not taken in, will never come: it stands as one whose answer is missing."""
        for part in self._parts:
            part.ranks.position = max(part.ranks.position, offset)
        self._join()

    def _head(self, answer: DuplicateSteps, changes: ResidencyChanges, known: Known, taken: int) -> None:
        """What is passed on of a rank: as it stands, where the message is one of before."""
        (
            answer.workload,
            answer.model,
            answer.declared_at_us,
            answer.key_epoch,
            answer.canary,
            answer.kv_bytes_per_token,
            answer.staleness_ms,
            answer.departed,
        ) = known.said
        answer.first_held_us = known.first_held_us
        if changes.source_offset >= taken:
            answer.observed = changes.observed
            answer.notes = changes.notes + answer.notes

    def _take(
        self, part: _Part, known: Known, taken: int, holder: Holder, changes: ResidencyChanges, said: _SaidSteps, notes: list[Note]
    ) -> None:
        """Count the steps of a message in the slices of one part."""
        late: dict[tuple[str, bytes], list[Event]] = {}
        rank, skew_us = holder[0], self._skew_us
        counts = [0] * SLICES
        tables_of: dict[str, list[Contents | None]] = {}
        for step in changes.steps:
            if step.source_offset <= taken:
                continue
            tier, at, size, parents = step.tier or GPU, step.at_us, step.block_size, step.parents
            tables = tables_of.get(tier) or tables_of.setdefault(tier, self._tables(part, tier))
            is_gpu = tier == GPU
            steps = _of(said, tier, size)
            if is_gpu and step.opened and (not known.first_held_us or at < known.first_held_us):
                known.first_held_us = at
            for packed, opened in ((step.opened, True), (step.closed, False)):
                for start in range(0, len(packed), ID_BYTES):
                    key = packed[start : start + ID_BYTES]
                    slot = key[_SLICE_BYTE] & _SLICE_MASK
                    contents = tables[slot]
                    if contents is None:
                        continue
                    content = contents.get(key)
                    if content is None:
                        content = contents[key] = Content(size)
                    if opened:
                        if at < content.first_at or content.first_at < 0:
                            content.first_at = at
                        if parents:
                            parent = parents[start : start + ID_BYTES]
                            if parent != content.parent or at < content.parent_at:
                                self._behind(slot, content, parent, at, notes)
                    if at <= content.last_at or (late and (tier, key) in late):
                        late.setdefault((tier, key), []).append((at, holder, opened))
                        continue
                    counts[slot] += 1
                    events = content.events
                    if content.tail is None and (not events or events[0][1][0] == rank):
                        events.append((at, holder, opened))  # most content is only ever on one rank
                        content.last_at = at
                        continue
                    content.append(at, holder, opened, skew_us, steps if content.size == size else _of(said, tier, content.size))
                    if is_gpu:
                        self._slices[slot].touch(at, key)
        for slot, count in enumerate(counts):
            self._slices[slot].events += count
        for (tier, key), moved in late.items():
            place = self._slices[key[_SLICE_BYTE] & _SLICE_MASK]
            since = place.insert(tier, key, moved, _of(said, tier, place.tiers[tier][key].size))
            if since is not None:
                notes.append(Note(since, "late_data"))
        for slot in part.slices:
            if self._slices[slot].events > self._slices[slot].fold_at:
                self._slices[slot].fold(part.ranks.newest_us - self._fold_behind_us)

    def _tables(self, part: _Part, tier: str) -> list[Contents | None]:
        tables: list[Contents | None] = [None] * SLICES
        for slot in part.slices:
            tables[slot] = self._slices[slot].tiers.setdefault(tier, {})
        return tables

    def _behind(self, slot: int, content: Content, parent: bytes, at: int, notes: list[Note]) -> None:
        alike = content.rivals is None
        since = content.behind(parent, at)
        if since is not None:
            self._slices[slot].conflicts += alike
            notes.append(Note(since, "parent_conflict"))

    def _holder(self, rank: Rank, workload: str) -> Holder:
        """The one object of a rank and workload: events refer to it."""
        holder = (rank, workload)
        return self._holders.setdefault(holder, holder)

    def _tell(self, parts: list[_Part], answer: DuplicateSteps) -> None:
        """Tell of shared content at the instants that have closed."""
        names: dict[Rank, int] = {}

        def named(rank: Rank) -> int:
            return names.setdefault(rank, len(names))

        shared: list[SharedContent] = []
        for part in parts:
            closed = part.ranks.close()
            for slot in part.slices:
                if self._slices[slot].told_us < closed:
                    shared += self._slices[slot].tell(closed, self._shared_bytes, named)
        answer.shared = sorted(shared, key=lambda each: (each.as_of_us, each.content_id))
        answer.holder_names = [key_of(rank) for rank in names]
        answer.shared_as_of_us = min(each.told_us for each in self._slices)

    # -- state ----------------------------------------------------------------------------------------------------

    def slice_position(self, number: int) -> int:
        """Position of the last message that slice ``number`` has counted; -1: none."""
        return self._part_of(number).ranks.position

    def dump_slice(self, number: int) -> bytes:
        """Everything slice ``number`` knows, for :meth:`load_slice` of a core with the same options."""
        part = self._part_of(number)
        return msgspec.msgpack.encode([STATE_VERSION, self._options(number), part.ranks.dump(), self._slices[number].dump()])

    def load_slice(self, number: int, data: bytes) -> None:
        """Take on slice ``number`` as it was dumped; messages up to its position change nothing in it any more.

        :class:`KvcensusError` for what another version wrote, or a core with other options.
        """
        version, options, ranks, contents = msgspec.msgpack.decode(data, strict=False)
        if version != STATE_VERSION or options != self._options(number):
            raise KvcensusError(f"the state of slice {number} of shard {self.shard} was written by another version or with other options")
        self._part_of(number).slices.remove(number)
        self._slices[number].load(contents, self._holder)
        part = _Part(Ranks(self._step_us, self._grace_us), [number])
        part.ranks.load(ranks)
        self._parts.append(part)
        self._join()

    def _options(self, number: int) -> list[Any]:
        return [self.shard, self.shards, number, self._skew_us, self._step_us, self._grace_us]

    def _part_of(self, number: int) -> _Part:
        return next(part for part in self._parts if number in part.slices)

    def _join(self) -> None:
        """Slices that stand at one position know the same of the ranks."""
        joined: dict[int, _Part] = {}
        for part in self._parts:
            if not part.slices:
                continue
            other = joined.setdefault(part.ranks.position, part)
            if other is not part:
                other.slices = sorted(other.slices + part.slices)
        self._parts = [joined[position] for position in sorted(joined)]


def _of(said: _SaidSteps, tier: str, size: int) -> Steps:
    steps = said.get((tier, size))
    if steps is None:
        steps = said[tier, size] = Steps()
    return steps


def _write(said: _SaidSteps, answer: DuplicateSteps) -> None:
    """Write the steps into the answer, summed over the sizes: blocks, and tokens at each size."""
    copies: dict[tuple[str, int, Rank], list[int]] = {}
    pairs: dict[tuple[str, int, str, str], list[int]] = {}
    for (tier, size), steps in said.items():
        for (at, rank), (inside, between) in steps.ranks.items():
            if inside or between:
                _sum(copies, (tier, at, rank), (inside, inside * size, between, between * size))
        for (at, (one, other)), change in steps.pairs.items():
            if change:
                _sum(pairs, (tier, at, one, other), (change, change * size))
    answer.steps = [DuplicateStep(at, tier, *rank, *counts) for (tier, at, rank), counts in sorted(copies.items()) if any(counts)]
    answer.pairs = [PairStep(at, tier, one, other, *counts) for (tier, at, one, other), counts in sorted(pairs.items()) if any(counts)]


def _sum(sums: dict[Any, list[int]], key: Any, change: tuple[int, ...]) -> None:
    have = sums.get(key)
    sums[key] = list(change) if have is None else [one + other for one, other in zip(have, change, strict=True)]
