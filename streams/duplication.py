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

from dataclasses import dataclass, field

from schemas.records import ID_BYTES, DuplicateStep, DuplicateSteps, ResidencyChanges
from streams.residency import GPU

MAX_EVENTS = 2_000_000
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


@dataclass(slots=True)
class _Content:
    """One content: its size in tokens, its settled state, the events since then by time, and the state after them."""

    size: int
    base: _State = field(default_factory=_State)
    events: dict[int, dict[Rank, bool]] = field(default_factory=dict)
    tail: _State = field(default_factory=_State)
    last_at: int = -1
    base_at: int = -1

    def replay(self, skew_us: int) -> tuple[_State, _Steps]:
        """State and steps of the kept events, from the settled state on."""
        state = self.base.copy()
        steps: _Steps = {}
        for at in sorted(self.events):
            state.apply(at, self.events[at], skew_us, steps)
        return state, steps


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
                    if (step.tier, key) in late or step.at_us <= content.last_at:
                        late.setdefault((step.tier, key), {})[step.at_us] = opened
                        continue
                    content.events[step.at_us] = {rank: opened}
                    content.last_at = step.at_us
                    self._events += 1
                    steps: _Steps = {}
                    content.tail.apply(step.at_us, content.events[step.at_us], self._skew_us, steps)
                    if steps:
                        _gather(out, step.tier, content.size, steps)
        for (tier, key), times in late.items():
            content = self._contents[tier][key]
            _gather(out, tier, content.size, self._insert(content, rank, times))
        self._offsets[rank] = max(taken, changes.source_offset)
        self._newest_us = max(self._newest_us, changes.watermark_us)
        if self._events > MAX_EVENTS:
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

    def _insert(self, content: _Content, rank: Rank, times: dict[int, bool]) -> _Steps:
        """Put late events where they belong; the difference to what was announced before."""
        _, before = content.replay(self._skew_us)
        for at, opened in times.items():
            if at <= content.base_at:
                self.late_changes += 1
            moment = content.events.setdefault(max(at, content.base_at + 1), {})
            self._events += not moment
            moment[rank] = opened
        content.last_at = max(content.events)
        content.tail, after = content.replay(self._skew_us)
        for (at, bearer), (inside, between) in before.items():
            _add(after, at, bearer, _INSIDE, -inside)
            _add(after, at, bearer, _BETWEEN, -between)
        return after

    def _fold(self) -> None:
        """Settle what lies far behind: its events are applied for good, and content that nobody holds is forgotten."""
        border = self._newest_us - FOLD_BEHIND_US
        for contents in self._contents.values():
            for key, content in list(contents.items()):
                old = sorted(at for at in content.events if at < border)
                for at in old:
                    content.base.apply(at, content.events.pop(at), self._skew_us, {})
                if old:
                    content.base_at = old[-1]
                    self._events -= len(old)
                if not content.events and not content.base.instances:
                    del contents[key]


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
