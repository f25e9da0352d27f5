"""Which content lies on more than one rank, at which instant: the content-shard core. Pure, no clocks, no I/O.

Rule 5 of the design. A shard takes the residency changes of every rank, in whatever order they arrive, and answers each
with the steps by which extra copies change: (time, rank that bears the copy, change). Steps are sums, so a late change
only adds the difference between what was said and what is now known; the final answer depends on the facts alone.

Every extra copy is borne by one rank, so that cuts by rank, workload or model add up to the fleet:

* inside an instance each rank but the one that has held the content longest bears one copy (`inside`);
* between instances, each matured instance but the one that has held it longest bears one, on the rank of it that has
  held the content longest (`between`).

Ties go to the smaller instance name, then the smaller data-parallel rank.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import groupby

from schemas.records import ID_BYTES, DuplicateStep, DuplicateSteps, ResidencyChanges
from streams.residency import GPU

MAX_EVENTS = 200_000
"""Open and close events a shard keeps for late data; beyond that, the oldest are folded into a settled state."""

FOLD_BEHIND_US = 600_000_000
"""What is folded lies at least this far behind the newest engine time seen."""

Rank = tuple[str, int]
_Steps = dict[tuple[int, Rank], list[int]]
_INSIDE, _BETWEEN = 0, 1


def _add(steps: _Steps, at: int, rank: Rank, which: int, change: int) -> None:
    step = steps.get((at, rank))
    if step is None:
        step = steps[at, rank] = [0, 0]
    step[which] += change


@dataclass(slots=True)
class _Instance:
    """One instance that holds a content: since when, whether that has matured, and its ranks, longest first.

    ``foretold`` is the rank for which the copy that matures at ``matures_at`` was already announced.
    """

    matures_at: int
    matured: bool = False
    foretold: Rank | None = None
    ranks: dict[Rank, None] = field(default_factory=dict)

    def copy(self) -> _Instance:
        return _Instance(self.matures_at, self.matured, self.foretold, dict(self.ranks))


class _State:
    """Who holds one content after all events so far; ``instances`` in the order in which they came to hold it."""

    __slots__ = ("instances",)

    def __init__(self) -> None:
        self.instances: dict[str, _Instance] = {}

    def copy(self) -> _State:
        other = _State()
        other.instances = {name: instance.copy() for name, instance in self.instances.items()}
        return other

    def apply(self, at: int, changes: dict[Rank, bool], skew_us: int, steps: _Steps) -> None:
        """Move to the state after ``at``, later than anything applied; ``changes``: rank -> holds it from now on."""
        pending = self._settle(at, steps)
        for rank in sorted(changes):
            if changes[rank]:
                self._open(at, rank, skew_us, pending, steps)
        for rank in sorted(changes):
            if not changes[rank]:
                self._close(at, rank, pending, steps)
        self._foretell(pending, steps)

    def _settle(self, at: int, steps: _Steps) -> dict[str, None]:
        """Instances that matured before ``at`` have; the announcements of the others are taken back."""
        pending: dict[str, None] = {}
        for name, instance in reversed(self.instances.items()):
            if instance.matured:
                break  # they mature in the order in which they opened
            if instance.matures_at < at:
                instance.matured = True
                continue
            pending[name] = None
            if instance.foretold is not None:
                _add(steps, instance.matures_at, instance.foretold, _BETWEEN, -1)
                instance.foretold = None
        return pending

    def _foretell(self, pending: dict[str, None], steps: _Steps) -> None:
        first = next(iter(self.instances), None)
        for name in pending:
            if name != first:
                instance = self.instances[name]
                instance.foretold = next(iter(instance.ranks))
                _add(steps, instance.matures_at, instance.foretold, _BETWEEN, 1)

    def _open(self, at: int, rank: Rank, skew_us: int, pending: dict[str, None], steps: _Steps) -> None:
        instance = self.instances.get(rank[0])
        if instance is None:
            instance = self.instances[rank[0]] = _Instance(at + skew_us)
            pending[rank[0]] = None
        elif rank in instance.ranks:
            return
        else:
            _add(steps, at, rank, _INSIDE, 1)
        instance.ranks[rank] = None

    def _close(self, at: int, rank: Rank, pending: dict[str, None], steps: _Steps) -> None:
        instance = self.instances.get(rank[0])
        if instance is None or rank not in instance.ranks:
            return
        bears = instance.matured and next(iter(self.instances)) != rank[0]
        if next(iter(instance.ranks)) != rank:
            _add(steps, at, rank, _INSIDE, -1)
            del instance.ranks[rank]
            return
        del instance.ranks[rank]
        if bears:
            _add(steps, at, rank, _BETWEEN, -1)
        if instance.ranks:  # the next rank of the instance takes its place
            heir = next(iter(instance.ranks))
            _add(steps, at, heir, _INSIDE, -1)
            if bears:
                _add(steps, at, heir, _BETWEEN, 1)
            return
        was_first = next(iter(self.instances)) == rank[0]
        del self.instances[rank[0]]
        pending.pop(rank[0], None)
        if was_first and self.instances:
            successor = next(iter(self.instances.values()))
            if successor.matured:  # the one that has now held it longest bears nothing
                _add(steps, at, next(iter(successor.ranks)), _BETWEEN, -1)


_Event = tuple[int, Rank, bool]


class _Content:
    """One content: its size in tokens, the events kept, in the order of their time, and the states before and after them.

    While a single rank has ever held it nothing is duplicated, and ``tail`` is not kept: most content never needs it.
    ``base`` is the state after all events up to ``base_at``, which were let go.
    """

    __slots__ = ("base", "base_at", "events", "last_at", "size", "tail")

    def __init__(self, size: int) -> None:
        self.size = size
        self.events: list[_Event] = []
        self.tail: _State | None = None
        self.last_at = -1
        self.base: _State | None = None
        self.base_at = -1

    def append(self, at: int, rank: Rank, opened: bool, skew_us: int, steps: _Steps) -> None:
        """An event later than all others."""
        alone = self.tail is None and (not self.events or self.events[0][1] == rank)
        if not alone or self.base is not None:
            if self.tail is None:
                self.tail, _ = self.replay(skew_us)  # of one rank alone: no steps so far
            self.tail.apply(at, {rank: opened}, skew_us, steps)
        self.events.append((at, rank, opened))
        self.last_at = at

    def insert(self, rank: Rank, times: dict[int, bool], skew_us: int) -> _Steps:
        """Put late events of one rank where they belong; the difference to what was announced before."""
        _, before = self.replay(skew_us)
        late = {max(at, self.base_at + 1): opened for at, opened in times.items()}
        # Of one rank the last word on an instant holds.
        self.events = [event for event in self.events if not (event[1] == rank and event[0] in late)]
        self.events += [(at, rank, opened) for at, opened in late.items()]
        self.events.sort(key=_time_of)
        self.last_at = self.events[-1][0]
        self.tail, after = self.replay(skew_us)
        for (at, bearer), (inside, between) in before.items():
            _add(after, at, bearer, _INSIDE, -inside)
            _add(after, at, bearer, _BETWEEN, -between)
        return after

    def replay(self, skew_us: int) -> tuple[_State, _Steps]:
        """State and steps of the kept events, from the settled state on."""
        state = _State() if self.base is None else self.base.copy()
        steps: _Steps = {}
        _apply_all(state, self.events, skew_us, steps)
        return state, steps

    def settle(self, border: int, skew_us: int) -> None:
        """Let go of the events before ``border``: they can no longer change."""
        kept = bisect_left(self.events, border, key=_time_of)
        if not kept:
            return
        state = _State() if self.base is None else self.base
        _apply_all(state, self.events[:kept], skew_us, {})
        self.base, self.base_at = state, self.events[kept - 1][0]
        del self.events[:kept]
        if self.tail is None:
            self.tail, _ = self.replay(skew_us)

    def forgotten(self) -> bool:
        """Whether nothing is left to know: no events, and nobody holds it."""
        return not self.events and (self.base is None or not self.base.instances)


def _time_of(event: _Event) -> int:
    return event[0]


def _apply_all(state: _State, events: list[_Event], skew_us: int, steps: _Steps) -> None:
    for at, moment in groupby(events, key=_time_of):
        state.apply(at, {rank: opened for _, rank, opened in moment}, skew_us, steps)


class ShardCore:
    """Duplicate steps of one content shard.

    ``skew_us`` is the clock skew allowance between instances: how long an instance must have held a content before it
    counts as a copy between instances.
    """

    def __init__(self, shard: int, shards: int, *, skew_us: int = 1_000_000) -> None:
        self.shard = shard
        self.shards = shards
        self.late_changes = 0
        self._skew_us = skew_us
        self._contents: dict[str, dict[bytes, _Content]] = {}
        self._offsets: dict[Rank, int] = {}
        self._newest_us = 0
        self._events = 0
        self._fold_at = MAX_EVENTS

    def apply(self, changes: ResidencyChanges, offset: int) -> DuplicateSteps:
        """The answer to one message; steps are empty where a rank's batches were already taken into account."""
        rank = (changes.instance_id, changes.dp_rank)
        taken = self._offsets.get(rank, -1)
        out: dict[str, dict[tuple[int, Rank], list[int]]] = {}
        late: dict[tuple[str, bytes], dict[int, bool]] = {}
        for step in changes.steps:
            if step.source_offset <= taken:
                continue
            contents = self._contents.setdefault(step.tier, {})
            for packed, opened in ((step.opened, True), (step.closed, False)):
                for start in range(0, len(packed), ID_BYTES):
                    key = packed[start : start + ID_BYTES]
                    content = contents.get(key)
                    if content is None:
                        content = contents[key] = _Content(step.block_size)
                    if (late and (step.tier, key) in late) or step.at_us <= content.last_at:
                        late.setdefault((step.tier, key), {})[step.at_us] = opened
                        continue
                    steps: _Steps = {}
                    content.append(step.at_us, rank, opened, self._skew_us, steps)
                    self._events += 1
                    if steps:
                        _gather(out, step.tier, content.size, steps)
        for (tier, key), times in late.items():
            content = self._contents[tier][key]
            self.late_changes += sum(at <= content.base_at for at in times)
            self._events -= len(content.events)
            _gather(out, tier, content.size, content.insert(rank, times, self._skew_us))
            self._events += len(content.events)
        self._offsets[rank] = max(taken, changes.source_offset)
        self._newest_us = max(self._newest_us, changes.watermark_us)
        if self._events > self._fold_at:
            self._fold()
        return DuplicateSteps(
            shard=self.shard,
            shards=self.shards,
            source_offset=offset,
            instance_id=changes.instance_id,
            dp_rank=changes.dp_rank,
            workload=changes.workload,
            model=changes.model,
            watermark_us=changes.watermark_us,
            steps=[
                DuplicateStep(at, tier, bearer[0], bearer[1], *counts)
                for tier, steps_of in out.items()
                for (at, bearer), counts in sorted(steps_of.items())
                if any(counts)
            ],
        )

    def _fold(self) -> None:
        """Settle what lies far behind, and forget content that nobody holds."""
        border = self._newest_us - FOLD_BEHIND_US
        self._events = 0
        for contents in self._contents.values():
            for key, content in list(contents.items()):
                content.settle(border, self._skew_us)
                if content.forgotten():
                    del contents[key]
                self._events += len(content.events)
        self._fold_at = max(MAX_EVENTS, 2 * self._events)  # else a busy shard would fold at every message


def _gather(out: dict[str, dict[tuple[int, Rank], list[int]]], tier: str, size: int, steps: _Steps) -> None:
    """Sum the steps of one content into the answer: blocks, and tokens at ``size`` tokens a block."""
    sums = out.setdefault(tier or GPU, {})
    for key, (inside, between) in steps.items():
        total = sums.get(key)
        if total is None:
            total = sums[key] = [0, 0, 0, 0]
        total[0] += inside
        total[1] += inside * size
        total[2] += between
        total[3] += between * size
