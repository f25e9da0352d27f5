"""One slice of a content shard: its contents, what was told of those that several ranks hold, and both as bytes. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from schemas.records import UNKNOWN_PARENT, SharedContent, rank_key, split_ids
from streams.holding import Content, Holder, Rank, State, Steps
from streams.residency import GPU

Contents = dict[bytes, Content]
_Told = tuple[tuple[Rank, ...], bytes]

_ENTRY_BYTES = 64
"""About what a :class:`SharedContent` takes on the wire, without its holders."""


class Slice:
    """Contents by tier and id. ``step_us`` is the time between two instants of which shared content is told.

    ``touched`` holds, by the first such instant that shows it, content whose holders may have changed; ``told`` what was said last.
    """

    def __init__(self, step_us: int, skew_us: int, max_events: int) -> None:
        self.tiers: dict[str, Contents] = {GPU: {}}
        self.touched: dict[int, set[bytes]] = {}
        self.told: dict[bytes, _Told] = {}
        self.told_us = 0
        self.late_changes = 0
        self.shared_late = 0
        self.conflicts = 0
        self.events = 0
        self.fold_at = max_events
        self._step_us = step_us
        self._skew_us = skew_us
        self._max_events = max_events

    def touch(self, at: int, key: bytes) -> bool:
        """The holders of ``key`` change at ``at``; whether that is too late for the instant that it belongs to."""
        bucket = -(-at // self._step_us) * self._step_us
        late = bucket <= self.told_us
        self.touched.setdefault(self.told_us + self._step_us if late else bucket, set()).add(key)
        return late

    def insert(self, tier: str, key: bytes, events: list[tuple[int, Holder, bool]], steps: Steps) -> int | None:
        """Late events of one content; from when on those count that came too late for their own time, if any did."""
        content = self.tiers[tier][key]
        too_late = sum(at <= content.base_at for at, _, _ in events)
        moved = content.base_at + 1 if too_late else None
        self.late_changes += too_late
        self.events -= len(content.events)
        content.insert(events, self._skew_us, steps)
        self.events += len(content.events)
        if tier == GPU and content.tail is not None:
            self.shared_late += sum(self.touch(at, key) for at, _, _ in events)
            first = min(at for at, _, _ in events)
            for at, _, _ in content.events[bisect_right(content.events, first, key=itemgetter(0)) :]:
                self.touch(at, key)
        return moved

    def tell(self, as_of: int, limit: int, named: Callable[[Rank], int]) -> list[SharedContent]:
        """What changed up to ``as_of`` in who holds what several ranks hold, about ``limit`` bytes of it; the rest another time."""
        out: list[SharedContent] = []
        size = 0
        contents = self.tiers[GPU]
        for bucket in sorted(each for each in self.touched if each <= as_of):
            keys = self.touched[bucket]
            for key in sorted(keys):
                if size >= limit:
                    return out
                keys.discard(key)
                entry = self._entry(key, contents.get(key), bucket, named)
                if entry is not None:
                    out.append(entry)
                    size += _ENTRY_BYTES + 2 * len(entry.holders)
            del self.touched[bucket]
            self.told_us = bucket
        self.told_us = as_of
        return out

    def _entry(self, key: bytes, content: Content | None, at: int, named: Callable[[Rank], int]) -> SharedContent | None:
        ranks = () if content is None else tuple(sorted(content.holders_at(at)))
        if content is None or len(ranks) < 2:
            if self.told.pop(key, None) is None:
                return None
            return SharedContent(key, UNKNOWN_PARENT, content.size if content else 0, content.first_at if content else 0, [], at)
        parent = content.parent_as_of(at)
        if self.told.get(key) == (ranks, parent):
            return None
        self.told[key] = (ranks, parent)
        return SharedContent(key, parent, content.size, content.first_at, [named(rank) for rank in ranks], at)

    def fold(self, border: int) -> None:
        """Settle what lies before ``border``, and forget content that nobody holds."""
        self.events = 0
        for contents in self.tiers.values():
            for key, content in list(contents.items()):
                content.settle(border, self._skew_us)
                if content.forgotten():
                    del contents[key]
                self.events += len(content.events)
        self.fold_at = max(self._max_events, 2 * self.events)  # else a busy shard would fold at every message

    def dump(self) -> list[Any]:
        """As plain values, column by column, for :meth:`load`."""
        holders: dict[Holder, int] = {}
        tiers = {name: _dump_contents(contents, holders) for name, contents in self.tiers.items()}
        ranks: dict[Rank, int] = {}
        told = [
            b"".join(self.told),
            b"".join(parent for _, parent in self.told.values()),
            [[ranks.setdefault(rank, len(ranks)) for rank in held] for held, _ in self.told.values()],
        ]
        return [
            tiers,
            [[*rank, workload] for rank, workload in holders],
            {bucket: b"".join(sorted(keys)) for bucket, keys in self.touched.items()},
            told,
            list(ranks),
            [self.told_us, self.late_changes, self.shared_late, self.conflicts, self.events, self.fold_at],
        ]

    def load(self, data: Sequence[Any], holder: Callable[[Rank, str], Holder]) -> None:
        """Take on what was dumped; ``holder`` gives the one object of each holder."""
        tiers, holders, touched, (keys, parents, held), ranks, counts = data
        known = [holder((name, dp_rank), workload) for name, dp_rank, workload in holders]
        self.tiers = {GPU: {}} | {name: _load_contents(columns, known, self._skew_us) for name, columns in tiers.items()}
        self.touched = {bucket: set(split_ids(packed)) for bucket, packed in touched.items()}
        named: list[Rank] = [(name, dp_rank) for name, dp_rank in ranks]
        self.told = {
            key: (tuple(named[index] for index in indices), parent)
            for key, parent, indices in zip(split_ids(keys), split_ids(parents), held, strict=True)
        }
        self.told_us, self.late_changes, self.shared_late, self.conflicts, self.events, self.fold_at = counts


def key_of(rank: Rank) -> str:
    """The rank's key."""
    return rank_key(*rank)


def _dump_contents(contents: Contents, holders: dict[Holder, int]) -> list[Any]:
    parents, sizes, firsts, since, counts = [], [], array("q"), [], []
    events: list[int] = []
    bases: list[Any] = []
    rivals: list[Any] = []
    for number, content in enumerate(contents.values()):
        first = content.first_at
        parents.append(content.parent)
        sizes.append(content.size)
        firsts.append(first)
        since.append(content.parent_at - first if content.parent_at else 0)
        counts.append(len(content.events))
        for at, holder, opened in content.events:
            index = holders.get(holder)
            if index is None:
                index = holders[holder] = len(holders)
            events += (at - first, 2 * index + opened)
        if content.base_at >= 0:
            bases.append((number, content.base_at, content.last_at, None if content.base is None else content.base.dump()))
        if content.rivals is not None:
            rivals.append((number, list(content.rivals.items())))
    return [b"".join(contents), b"".join(parents), sizes, firsts.tobytes(), since, counts, events, bases, rivals]


def _load_contents(columns: Sequence[Any], holders: list[Holder], skew_us: int) -> Contents:
    keys, parents, sizes, packed, since, counts, events, bases, rivals = columns
    firsts = array("q")
    firsts.frombytes(packed)
    contents: Contents = {}
    ordered: list[Content] = []
    place = 0
    for key, parent, size, first, parent_since, count in zip(
        split_ids(keys), split_ids(parents), sizes, firsts, since, counts, strict=True
    ):
        content = contents[key] = Content(size)
        ordered.append(content)
        content.first_at = first
        if parent != UNKNOWN_PARENT:
            content.parent, content.parent_at = parent, first + parent_since
        for index in range(place, place + 2 * count, 2):
            coded = events[index + 1]
            content.events.append((first + events[index], holders[coded >> 1], bool(coded & 1)))
        place += 2 * count
        if count:
            content.last_at = content.events[-1][0]
    for number, base_at, last_at, state in bases:
        content = ordered[number]
        content.base_at, content.last_at = base_at, last_at
        content.base = None if state is None else State.restored(state)
    for number, told in rivals:
        ordered[number].rivals = dict(told)
    for content in ordered:
        content.restore_tail(skew_us)
    return contents
