"""The fleet's duplicate windows from the steps of all content shards. Pure, no clocks, no I/O.

Means and ends of shards add up, maxima do not: so shards hand over their steps and the levels are followed here, for the
fleet and for each rank, workload and model (rule 5 and 7 of the design).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

from schemas.records import DuplicateSteps, DuplicateWindow, rank_key
from streams.residency import GPU, SEMANTICS_VERSION
from streams.windows import LONG_STRETCH_WINDOWS, window_start

STALE_US = 60_000_000
"""A rank whose watermark lies further behind the newest one no longer holds up the closing of windows."""

WINDOWS_KEPT = 8_640
"""Windows with steps that late data can still change; older steps count in the oldest one kept."""

Rank = tuple[str, int]
Scope = tuple[str, str]
_Counts = list[int]  # inside blocks, inside tokens, between blocks, between tokens
FLEET: Scope = ("fleet", "")


@dataclass(slots=True)
class _Level:
    """Extra copies of one scope inside one row: the level now, since when, its integral and maxima so far."""

    now: _Counts
    since: int
    sums: _Counts = field(default_factory=lambda: [0, 0, 0, 0])
    tops: _Counts = field(default_factory=lambda: [0, 0, 0, 0, 0, 0])

    def hold_until(self, at: int) -> None:
        """The level held from ``since`` to ``at``; only a state of positive duration counts."""
        span = at - self.since
        if span > 0:
            now, sums = self.now, self.sums
            for index in range(4):
                sums[index] += now[index] * span
            self.top()
            self.since = at

    def top(self) -> None:
        """Take the present state into the maxima (which are of inside, between and both together)."""
        ib, it, bb, bt = self.now
        tops = self.tops
        for index, value in enumerate((ib, it, bb, bt, ib + bb, it + bt)):
            tops[index] = max(tops[index], value)


@dataclass(slots=True)
class _Tier:
    """Steps of one tier by window, and the levels at the start of one of them (``base``).

    ``rows`` are the starts of the rows given out so far, ``lengths`` and ``scopes`` what each of them covered.
    """

    steps: dict[int, dict[int, dict[Rank, _Counts]]] = field(default_factory=dict)
    busy: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    scopes: dict[int, set[Scope]] = field(default_factory=dict)
    open_rows: set[int] = field(default_factory=set)
    base: int = 0
    floor: int = 0
    levels: dict[Rank, _Counts] = field(default_factory=dict)
    dirty_from: int | None = None

    def add(self, window: int, at: int, rank: Rank, counts: _Counts) -> None:
        """One more step; what lies before the base is part of the levels there."""
        moments = self.steps.get(window)
        if moments is None:
            moments = self.steps[window] = {}
            insort(self.busy, window)
        _add(moments.setdefault(at, {}), rank, counts, 1)
        if window < self.base:
            _add(self.levels, rank, counts, 1)
        if self.dirty_from is None or window < self.dirty_from:
            self.dirty_from = window

    def move_base(self, window: int) -> None:
        """Make :attr:`levels` the levels at the start of ``window``, by adding or taking back what lies between."""
        sign, low, high = (1, self.base, window) if window > self.base else (-1, window, self.base)
        for each in self.busy[bisect_left(self.busy, low) : bisect_left(self.busy, high)]:
            for moment in self.steps[each].values():
                for rank, counts in moment.items():
                    _add(self.levels, rank, counts, sign)
        self.base = window
        if len(self.busy) > WINDOWS_KEPT:
            self._forget()

    def _forget(self) -> None:
        """Let go of the oldest windows: they can no longer change."""
        dropped = [each for each in self.busy[: WINDOWS_KEPT // 4] if each < self.base]
        if not dropped:
            return
        self.floor = dropped[-1] + 1
        for each in dropped:
            del self.steps[each]
        del self.busy[: len(dropped)]
        nth = bisect_left(self.rows, self.floor)
        for row in self.rows[:nth]:
            del self.lengths[row]
            self.scopes.pop(row, None)
            self.open_rows.discard(row)
        del self.rows[:nth]


def _add(levels: dict[Rank, _Counts], rank: Rank, counts: _Counts, sign: int) -> None:
    have = levels.get(rank)
    if have is None:
        have = levels[rank] = [0, 0, 0, 0]
    for index in range(4):
        have[index] += sign * counts[index]


def _any_between(starts: list[int], low: int, high: int) -> bool:
    """Whether one of the sorted ``starts`` lies in [``low``, ``high``)."""
    at = bisect_left(starts, low)
    return at < len(starts) and starts[at] < high


class Merger:
    """Duplicate windows of the fleet; ``window_us`` in microseconds, ``shards`` content shards expected."""

    def __init__(self, *, window_us: int = 10_000_000, shards: int = 1) -> None:
        self.late_steps = 0
        self._window_us = window_us
        self._shards = shards
        self._tiers: dict[str, _Tier] = {GPU: _Tier()}
        self._taken: dict[int, int] = {}
        self._watermarks: dict[int, dict[Rank, int]] = {}
        self._owners: dict[Rank, tuple[str | None, str | None]] = {}
        self._marked: list[int] = []
        self._first_us: int | None = None
        self._as_of = 0
        self._heard = 0
        self._lag_us = 0
        self._offset = 0
        self._changed = False

    @property
    def dirty(self) -> bool:
        """Whether a drain would give anything."""
        return self._changed

    def apply(self, message: DuplicateSteps, offset: int) -> None:
        """Take in one answer of a shard; one that was taken in before (same shard and source offset) changes nothing."""
        if message.source_offset <= self._taken.get(message.shard, -1):
            return
        self._taken[message.shard] = message.source_offset
        self._offset = max(self._offset, offset)
        self._changed = True
        rank = (message.instance_id, message.dp_rank)
        self._owners[rank] = (message.workload, message.model)
        marks = self._watermarks.setdefault(message.shard, {})
        marks[rank] = max(marks.get(rank, 0), message.watermark_us)
        if message.watermark_us:
            self._mark(window_start(message.watermark_us, self._window_us))
            if self._first_us is None:
                self._first_us = message.watermark_us
        for step in message.steps:
            tier = self._tiers.get(step.tier)
            if tier is None:
                tier = self._tiers[step.tier] = _Tier()
            start = window_start(step.at_us, self._window_us)
            at = step.at_us
            if start < tier.floor:
                self.late_steps += 1
                start = window_start(tier.floor + self._window_us, self._window_us)
                at = start
            counts = [step.inside_blocks, step.inside_tokens, step.between_blocks, step.between_tokens]
            tier.add(start, at, (step.instance_id, step.dp_rank), counts)
            if self._first_us is None or at < self._first_us:
                self._first_us = at

    def _mark(self, window: int) -> None:
        """Note a window in which some rank's engine time was told."""
        at = bisect_left(self._marked, window)
        if at == len(self._marked) or self._marked[at] != window:
            self._marked.insert(at, window)

    def _reached(self) -> int:
        """Engine time that every shard that has reported has heard of; it never goes back."""
        newest = [max(marks.values()) for marks in self._watermarks.values()]
        self._as_of = max(self._as_of, min(newest, default=0))
        return self._as_of

    def _closed_before(self, as_of: int) -> int:
        """Every rank that is not stale has passed this engine time, as each shard has seen it."""
        if len(self._watermarks) < self._shards:
            return 0
        ranks = set(self._owners)
        lows: list[int] = []
        for marks in self._watermarks.values():
            lows.extend(marks.get(rank, 0) for rank in ranks)
        live = [low for low in lows if low >= as_of - STALE_US]
        return min(live, default=0)

    def _hear(self, as_of: int) -> None:
        """Note which ranks every shard has heard of, and how far behind ``as_of``."""
        self._heard = 0
        self._lag_us = 0
        for rank in self._owners:
            marks = [marks[rank] for marks in self._watermarks.values() if rank in marks]
            if len(marks) == len(self._watermarks):
                self._heard += 1
                self._lag_us += as_of - min(marks)

    def drain(self) -> list[DuplicateWindow]:
        """Rows of the windows that changed since the last drain, or that have closed since."""
        before = self._as_of
        as_of = self._reached()
        self._changed = False
        if not as_of or self._first_us is None:
            return []
        closed = self._closed_before(as_of)
        self._hear(as_of)
        rows: list[DuplicateWindow] = []
        for name, tier in self._tiers.items():
            if name == GPU or tier.steps:
                rows.extend(self._drain_tier(name, tier, before, as_of, closed))
        return rows

    def _drain_tier(self, name: str, tier: _Tier, before: int, as_of: int, closed: int) -> list[DuplicateWindow]:
        assert self._first_us is not None
        last = window_start(as_of, self._window_us)
        first = window_start(min(self._first_us, as_of), self._window_us)
        target = first
        if tier.rows:
            closing = [row for row in tier.open_rows if row + tier.lengths[row] <= closed]
            target = min([window_start(before, self._window_us), last, *closing])
            if tier.dirty_from is not None:
                target = min(target, tier.dirty_from)
            if target < tier.rows[0]:
                target = max(first, window_start(tier.floor, self._window_us))
            else:  # begin at the row that holds the target
                target = tier.rows[bisect_right(tier.rows, target) - 1]
        tier.dirty_from = None
        tier.move_base(target)
        out: list[DuplicateWindow] = []
        start = target
        levels = {rank: list(counts) for rank, counts in tier.levels.items() if any(counts)}
        while start <= last:
            length = self._row_length(tier, start, last)
            out.extend(self._row(name, tier, start, length, min(start + length, as_of), levels, closed))
            start += length
        tier.move_base(last)
        return out

    def _row_length(self, tier: _Tier, start: int, last: int) -> int:
        """Length of the row at ``start``: one window, or a long stretch of windows in which nothing happens.

        A long row lies on a grid of its own length, and no rank's engine time was ever told to lie inside it. So how time
        is cut into rows hangs on what is known and not on when it was drained: a merger that reads all of it again gives rows that
        begin where those that stand in a table begin, and late data only ever cuts a row, whose start remains one.
        """
        long = LONG_STRETCH_WINDOWS * self._window_us
        if (
            start % long
            or start + long > last
            or _any_between(tier.busy, start, start + long)
            or _any_between(self._marked, start, start + long)
        ):
            return self._window_us
        return long

    def _scopes_of(self, rank: Rank) -> tuple[Scope, ...]:
        workload, model = self._owners.get(rank, (None, None))
        return FLEET, ("rank", rank_key(*rank)), ("workload", workload or ""), ("model", model or "")

    def _row(
        self, name: str, tier: _Tier, start: int, length: int, end: int, levels: dict[Rank, _Counts], closed: int
    ) -> list[DuplicateWindow]:
        """The rows of one window, one per scope; ``levels`` moves on to the window's end."""
        following: dict[Scope, _Level] = {FLEET: _Level([0, 0, 0, 0], start)}

        def move(rank: Rank, counts: _Counts, at: int) -> None:
            for scope in self._scopes_of(rank):
                level = following.get(scope)
                if level is None:
                    level = following[scope] = _Level([0, 0, 0, 0], start)
                level.hold_until(at)
                for index in range(4):
                    level.now[index] += counts[index]

        for rank, counts in levels.items():
            move(rank, counts, start)
        whole = end == start + length
        moments = tier.steps.get(start, {})
        for at in sorted(moments):
            if at > end:
                break  # foretold: lies beyond the engine time reached
            for rank, counts in moments[at].items():
                move(rank, counts, at)
                _add(levels, rank, counts, 1)
        if start not in tier.lengths:
            tier.rows.insert(bisect_left(tier.rows, start), start)
        tier.lengths[start] = length
        final = whole and end <= closed
        (tier.open_rows.discard if final else tier.open_rows.add)(start)
        given = tier.scopes.setdefault(start, set())
        rows = []
        for scope, level in following.items():
            level.hold_until(end)
            if not whole:
                level.top()  # the final state counts, however short
            if scope == FLEET or scope in given or any(level.tops):
                given.add(scope)
                rows.append(self._record(name, scope, level, start, length, end, final))
        for scope in given - following.keys():
            rows.append(self._record(name, scope, _Level([0, 0, 0, 0], start), start, length, end, final))
        return rows

    def _record(self, tier: str, scope: Scope, level: _Level, start: int, length: int, end: int, final: bool) -> DuplicateWindow:
        ib, it, bb, bt = level.now
        tops = level.tops
        return DuplicateWindow(
            scope=scope[0],
            scope_key=scope[1],
            tier=tier,
            window_start_us=start,
            window_us=length,
            as_of_us=end,
            semantics_version=SEMANTICS_VERSION,
            version=self._offset * 2 + final,
            final=final,
            shards_reported=len(self._watermarks),
            shards=self._shards,
            ranks=self._heard,
            rank_lag_us=self._lag_us,
            inside_token_us=level.sums[1],
            between_token_us=level.sums[3],
            inside_block_us=level.sums[0],
            between_block_us=level.sums[2],
            extra_tokens_max=tops[5],
            inside_tokens_max=tops[1],
            between_tokens_max=tops[3],
            extra_blocks_max=tops[4],
            inside_blocks_max=tops[0],
            between_blocks_max=tops[2],
            inside_tokens_end=it,
            between_tokens_end=bt,
            inside_blocks_end=ib,
            between_blocks_end=bb,
        )
