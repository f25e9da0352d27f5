"""The fleet's duplicate windows from the steps of all content shards. Pure, no clocks, no I/O.

Means and ends of shards add up, maxima do not: so shards hand over their steps and the levels are followed here, for the
fleet and for each rank, workload, model and pair of workloads (rule 5 and 7 of the design). Beside them the shared prefixes.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from copy import copy

import msgspec

from schemas.errors import KvcensusError
from schemas.records import DuplicateSteps, DuplicateWindow, Note, SharedPrefix
from streams.duplication import PREFIX_WINDOWS
from streams.fleet_ranks import FLEET, Coverage, FleetRanks, Heard, Scope
from streams.levels import Bearer, Level, Tier
from streams.residency import GPU, SEMANTICS_VERSION
from streams.shard_ranks import GRACE_US
from streams.shared_contents import SharedContents
from streams.windows import LONG_STRETCH_WINDOWS, window_start

MAX_KEPT = 300_000
"""Steps, rows and marks that late data can still change; beyond, the oldest windows are let go, and what concerns them counts later."""

KEEP_US = 600_000_000
"""Windows are kept at least this long behind the engine time reached, unless there is four times as much to keep."""

STATE_VERSION = 1
"""Of what :meth:`Merger.dump` gives."""

_LARGEST = 2**63 - 1
"""What a field of a record holds at most. A fleet that holds 2.5 TB twice through an idle hour is beyond it in byte-milliseconds."""

Rank = tuple[str, int]


class Merger:
    """Duplicate windows of the fleet, and its shared prefixes.

    ``window_us`` in microseconds, ``shards`` content shards expected. A window is final once all shards have reported and each live rank
    has passed its end by ``grace_us``.
    """

    def __init__(
        self,
        *,
        window_us: int = 10_000_000,
        shards: int = 1,
        grace_us: int = GRACE_US,
        max_kept: int = MAX_KEPT,
        keep_us: int = KEEP_US,
    ) -> None:
        self.late_steps = 0
        self._window_us = window_us
        self._shards = shards
        self._grace_us = grace_us
        self._max_kept = max_kept
        self._keep_us = keep_us
        self._tiers: dict[str, Tier] = {GPU: Tier()}
        self._taken: dict[int, int] = {}
        self._late: dict[int, int] = {}
        self._watermarks: dict[int, dict[Rank, int]] = {}
        self._fleet = FleetRanks(window_us)
        self._shared = SharedContents(shards, PREFIX_WINDOWS * window_us)
        self._marked: list[int] = []
        self._touched: set[tuple[int, int]] = set()
        self._first_us: int | None = None
        self._as_of = 0
        self._closed = 0
        self._offset = 0
        self._changed = False

    @property
    def dirty(self) -> bool:
        """Whether a drain would give anything."""
        return self._changed

    def apply(self, message: DuplicateSteps, offset: int) -> None:
        """Take in one answer of a shard; one that was taken in before (same shard and source offset) changes nothing."""
        shard = message.shard
        taken = self._taken.get(shard, -1)
        if message.source_offset <= taken:
            return
        self._taken[shard] = message.source_offset
        self._offset = max(self._offset, offset)
        self._changed = True
        self._late[shard] = message.late_changes
        rank = (message.instance_id, message.dp_rank)
        marks = self._watermarks.setdefault(shard, {})
        if len(self._watermarks) <= self._shards and not marks:
            self._dirty_since(0)  # one shard more has reported
        if message.previous_offset > taken:
            self._miss(marks)
        marks[rank] = max(marks.get(rank, 0), message.watermark_us)
        heard = self._fleet.hear(message)
        for step in message.steps:
            counts = [step.inside_blocks, step.inside_tokens, step.between_blocks, step.between_tokens]
            self._step(step.tier, step.at_us, (step.instance_id, step.dp_rank), counts, heard)
        if message.steps:
            self._fleet.shared_since(min(step.at_us for step in message.steps), heard)
        for pair in message.pairs:
            self._step(pair.tier, pair.at_us, (pair.workload_a, pair.workload_b), [0, 0, pair.blocks, pair.tokens], heard)
        if message.watermark_us:
            self._mark(message.watermark_us)
        self._heard(heard)
        first = self._fleet.get(rank).first_us
        if first and (self._first_us is None or first < self._first_us):
            self._first_us = max(first, self._fleet.floor)
        self._shared.take(message)

    def _step(self, name: str, at: int, bearer: Bearer, counts: list[int], heard: Heard) -> None:
        tier = self._tiers.get(name)
        if tier is None:
            tier = self._tiers[name] = Tier()
            tier.dirty_from = 0
        if at < self._fleet.floor:
            at = self._fleet.floor
            self.late_steps += 1
            self._fleet.note(Note(at, "late_data"), heard)
        start = window_start(at, self._window_us)
        tier.add(start, at, bearer, counts)
        if isinstance(bearer[1], str):
            tier.pairs[bearer] = min(tier.pairs.get(bearer, start), start)
        if self._first_us is None or at < self._first_us:
            self._first_us = at

    def _miss(self, marks: dict[Rank, int]) -> None:
        """An answer of a shard never came: what it held is missing from every level since, however much comes after."""
        live = {facts.rank for facts in self._fleet.live(self._as_of)}
        since = min((mark for rank, mark in marks.items() if rank in live), default=0)
        if self._fleet.missing_since is None or since < self._fleet.missing_since:
            self._fleet.missing_since = since
            self._dirty_since(since)

    def _heard(self, heard: Heard) -> None:
        for at in heard.marks:
            if at:
                self._mark(at)
        self._touched.update((window_start(since, self._window_us), window_start(until, self._window_us)) for since, until in heard.windows)
        if heard.dirty is not None:
            self._dirty_since(heard.dirty)

    def _dirty_since(self, at: int) -> None:
        window = window_start(at, self._window_us)
        for tier in self._tiers.values():
            tier.dirty_from = window if tier.dirty_from is None else min(tier.dirty_from, window)

    def _mark(self, at_us: int) -> None:
        """Note the window of an instant at which a rank was heard of."""
        window = window_start(at_us, self._window_us)
        marked = self._marked
        if marked and marked[-1] == window:
            return
        at = bisect_left(marked, window)
        if (at == len(marked) or marked[at] != window) and window >= self._fleet.floor:
            marked.insert(at, window)
            self._touched.add((window, window))

    def _reached(self) -> int:
        """Engine time that every shard that has reported has heard of; it never goes back."""
        newest = [max(marks.values()) for marks in self._watermarks.values()]
        self._as_of = max(self._as_of, min(newest, default=0))
        return self._as_of

    def _closed_before(self, as_of: int) -> int:
        """Every live rank has passed this engine time by the grace, as each shard has seen it. It never goes back."""
        if len(self._watermarks) >= self._shards:
            live = [facts.rank for facts in self._fleet.live(as_of)]
            lows = (marks.get(rank, 0) for marks in self._watermarks.values() for rank in live)
            self._closed = max(self._closed, min(lows, default=as_of) - self._grace_us)
        return self._closed

    def _lag(self, as_of: int) -> tuple[int, int]:
        """How many ranks every shard has heard of, and how far behind ``as_of``, summed."""
        heard = lag_us = 0
        for rank in self._fleet.known:
            marks = [marks[rank] for marks in self._watermarks.values() if marks.get(rank)]
            if len(marks) == len(self._watermarks):
                heard += 1
                lag_us += as_of - min(marks)
        return heard, lag_us

    # -- rows -----------------------------------------------------------------------------------------------------

    def drain(self) -> list[DuplicateWindow]:
        """Rows of the windows that changed since the last drain, or that have closed since."""
        before = self._as_of
        as_of = self._reached()
        self._changed = False
        if not as_of or self._first_us is None:
            return []
        drain = _Drain(self, before, as_of, self._closed_before(as_of), self._lag(as_of))
        rows: list[DuplicateWindow] = []
        for name, tier in self._tiers.items():
            if name == GPU or tier.steps or tier.rows:
                rows.extend(drain.tier(name, tier))
        self._touched.clear()
        self._forget()
        return rows

    def drain_prefixes(self) -> list[SharedPrefix]:
        """Rows of the shared prefixes at the instants of which all shards have told since. To be called after :meth:`drain`."""
        return self._shared.drain(self._fleet, self._window_us, self._offset)

    def _forget(self) -> None:
        """Let go of the oldest windows where there is too much to keep: they can no longer change."""
        kept = sum(tier.kept + len(tier.rows) for tier in self._tiers.values()) + len(self._marked)
        if kept <= self._max_kept:
            return
        starts = sorted(
            [each for tier in self._tiers.values() for each in tier.rows]
            + [window for tier in self._tiers.values() for window, moments in tier.steps.items() for each in moments.values() for _ in each]
        )
        newest = window_start(self._as_of, self._window_us)
        border = newest if kept > 4 * self._max_kept else window_start(max(self._as_of - self._keep_us, 0), self._window_us)
        floor = min(starts[len(starts) // 4], border)
        # A row is let go of as a whole, or the next one would begin inside it.
        for tier in self._tiers.values():
            at = bisect_right(tier.rows, floor) - 1
            if at >= 0 and tier.rows[at] < floor < tier.rows[at] + tier.lengths[tier.rows[at]]:
                floor = tier.rows[at]
        if floor <= self._fleet.floor:
            return
        self._fleet.forget(floor)
        for tier in self._tiers.values():
            tier.forget(floor)
        del self._marked[: bisect_left(self._marked, floor)]
        self._first_us = max(self._first_us or 0, floor)

    # -- state ----------------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """Everything the merger knows, right after a drain, for :meth:`restored` with the same options."""
        watermarks = [[shard, [[*rank, mark] for rank, mark in marks.items()]] for shard, marks in self._watermarks.items()]
        return msgspec.msgpack.encode(
            [
                STATE_VERSION,
                [self._window_us, self._shards, self._grace_us],
                {name: tier.dump() for name, tier in self._tiers.items()},
                [self._taken, self._late, watermarks],
                self._fleet.dump(),
                self._shared.dump(),
                self._marked,
                [self._first_us, self._as_of, self._closed, self._offset, self.late_steps],
            ]
        )

    @classmethod
    def restored(cls, data: bytes, **options: int) -> Merger:
        """The merger that was dumped. :class:`KvcensusError` for what another version wrote, or one with other options."""
        merger = cls(**options)
        version, told, *rest = msgspec.msgpack.decode(data, strict=False)
        if version != STATE_VERSION or told != [merger._window_us, merger._shards, merger._grace_us]:
            raise KvcensusError("the state of the merger was written by another version or with other options")
        tiers, (merger._taken, merger._late, watermarks), fleet, shared, merger._marked, numbers = rest
        merger._tiers = {name: Tier.restored(tier) for name, tier in tiers.items()}
        merger._watermarks = {shard: {(name, dp_rank): mark for name, dp_rank, mark in marks} for shard, marks in watermarks}
        merger._fleet.load(fleet)
        merger._shared.load(shared)
        merger._first_us, merger._as_of, merger._closed, merger._offset, merger.late_steps = numbers
        return merger

    @property
    def position(self) -> int:
        """Position of the newest answer taken in; -1 before the first."""
        return self._offset if self._taken else -1


class _Drain:
    """One drain: what holds of every row of it. It reads the merger's state, and moves its tiers on."""

    def __init__(self, merger: Merger, before: int, as_of: int, closed: int, lag: tuple[int, int]) -> None:
        self._merger = merger
        self._before = before
        self._as_of = as_of
        self._closed = closed
        self._heard, self._lag_us = lag
        self._window_us = merger._window_us
        self._coverages: dict[tuple[int, int, int], Coverage] = {}
        self._late_changes = merger.late_steps + sum(merger._late.values())

    def tier(self, name: str, tier: Tier) -> list[DuplicateWindow]:
        """Rows of one tier."""
        merger, as_of = self._merger, self._as_of
        assert merger._first_us is not None
        last = window_start(as_of, self._window_us)
        first = max(window_start(min(merger._first_us, as_of), self._window_us), merger._fleet.floor)
        target = first
        alone: list[int] = []
        if tier.rows:
            target = min(window_start(self._before, self._window_us), last)
            if tier.dirty_from is not None:
                target = min(target, tier.dirty_from)
            target = first if target < tier.rows[0] or first < tier.rows[0] else _row_of(tier, target)
            closing = {row for row in tier.open_rows if row + tier.lengths[row] <= self._closed}
            touched = {row for since, until in merger._touched for row in _rows_of(tier, since, until)}
            alone = sorted(row for row in closing | touched if row < target)
        tier.dirty_from = None
        out: list[DuplicateWindow] = []
        for row in alone:
            self._walk(name, tier, row, row + tier.lengths[row], out)
        self._walk(name, tier, target, last + self._window_us, out)
        tier.move_base(last)
        return out

    def _walk(self, name: str, tier: Tier, start: int, until: int, out: list[DuplicateWindow]) -> None:
        """Rows from ``start`` to ``until``; both are borders of rows."""
        last = window_start(self._as_of, self._window_us)
        while start < until:
            length = self._row_length(tier, start, last)
            tier.move_base(start)
            out.extend(self._row(name, tier, start, length))
            start += length

    def _row_length(self, tier: Tier, start: int, last: int) -> int:
        """Length of the row at ``start``: one window, or a long stretch of windows in which nothing happens.

        A long row lies on a grid of its own length, and no rank was ever heard of inside it. So how time
        is cut into rows hangs on what is known and not on when it was drained: a merger that reads all of it again gives rows that
        begin where those that stand in a table begin, and late data only ever cuts a row, whose start remains one.
        """
        long = LONG_STRETCH_WINDOWS * self._window_us
        if (
            start % long
            or start + long > last
            or _any_between(tier.busy, start, start + long)
            or _any_between(self._merger._marked, start, start + long)
        ):
            return self._window_us
        return long

    def _row(self, name: str, tier: Tier, start: int, length: int) -> list[DuplicateWindow]:
        """The rows of one window, one per scope: of every rank heard of by then, also where it bears nothing."""
        end = min(start + length, self._as_of)
        whole = end == start + length
        levels: dict[Scope, Level] = {FLEET: Level(start)}
        scopes: dict[Bearer, tuple[tuple[Level, ...], int | None]] = {}

        def level_of(scope: Scope) -> Level:
            level = levels.get(scope)
            if level is None:
                level = levels[scope] = Level(start)
            return level

        def levels_of(bearer: Bearer) -> tuple[tuple[Level, ...], int | None]:
            found = scopes.get(bearer)
            if found is None:
                if isinstance(bearer[1], str):
                    found = (level_of(("workload_pair", json.dumps(bearer))),), None
                else:
                    declared = self._merger._fleet.get(bearer).at(start)
                    found = tuple(level_of(scope) for scope in declared.scopes), declared.bytes_per_token
                scopes[bearer] = found
            return found

        def move(bearer: Bearer, counts: list[int], at: int) -> None:
            moved, bytes_per_token = levels_of(bearer)
            for level in moved:
                level.move(at, counts, bytes_per_token)

        for bearer, counts in tier.levels.items():
            if any(counts):
                move(bearer, counts, start)
        moments = tier.steps.get(start, {})
        for at in sorted(moments):
            if at > end:
                break  # foretold: lies beyond the engine time reached
            for bearer, counts in moments[at].items():
                move(bearer, counts, at)
        # Over a long stretch in which nothing happens those that bear nothing are left out, unless something else was said before.
        is_long = length > self._window_us
        idle: list[Scope] = []
        if not is_long:
            idle += [scope for scope, since in self._merger._fleet.scopes.items() if since <= start and scope not in levels]
            for pair, since in tier.pairs.items():
                if since <= start:
                    levels_of(pair)
        final = whole and start + length <= self._closed
        tier.row_given(start, length, final=final)
        given = tier.given.setdefault(start, set()) if is_long else tier.given.pop(start, set())
        idle += [scope for scope in given if scope not in levels and scope not in idle]
        if is_long:
            given.update(levels)
        nothing = self._nothing(name, start, length, end, final)
        rows = []
        for scope, level in levels.items():
            level.hold_until(end)
            if not whole:
                level.top()  # the final state counts, however short
            rows.append(_filled(copy(nothing), scope, level))
        for scope in idle:
            row = copy(nothing)
            row.scope, row.scope_key = scope
            rows.append(_filled(row, scope, Level(start)) if scope[0] == "workload_pair" else row)
        return rows

    def _coverage(self, start: int, end: int, as_of: int) -> Coverage:
        key = (start, end, as_of)
        found = self._coverages.get(key)
        if found is None:
            complete = len(self._merger._watermarks) >= self._merger._shards
            found = self._coverages[key] = self._merger._fleet.coverage(start, end, as_of, complete=complete)
        return found

    def _nothing(self, tier: str, start: int, length: int, end: int, final: bool) -> DuplicateWindow:
        """The row of a scope that bore nothing."""
        merger = self._merger
        coverage = self._coverage(start, start + length, end)
        return DuplicateWindow(
            scope="fleet",
            scope_key="",
            tier=tier,
            window_start_us=start,
            window_us=length,
            as_of_us=end,
            semantics_version=SEMANTICS_VERSION,
            version=merger._offset * 2 + final,
            final=final,
            shards_reported=len(merger._watermarks),
            shards=merger._shards,
            # Of a closed window nothing is on its way, and what is told of it does not hang on when it is told.
            ranks=merger._fleet.heard_by(end) if final else self._heard,
            rank_lag_us=0 if final else self._lag_us,
            **dict.fromkeys(_FIGURES, 0),
            expected_ranks=coverage.expected,
            observed_us=coverage.observed_us,
            register=coverage.register,
            inside_register=coverage.inside,
            between_register=coverage.between,
            key_epoch=coverage.key_epoch,
            reasons=coverage.reasons,
            late_changes=self._late_changes,
        )


_FIGURES = (
    "inside_token_us",
    "between_token_us",
    "inside_block_us",
    "between_block_us",
    "extra_tokens_max",
    "inside_tokens_max",
    "between_tokens_max",
    "extra_blocks_max",
    "inside_blocks_max",
    "between_blocks_max",
    "inside_tokens_end",
    "between_tokens_end",
    "inside_blocks_end",
    "between_blocks_end",
    "inside_byte_ms",
    "between_byte_ms",
    "extra_bytes_max",
    "inside_bytes_end",
    "between_bytes_end",
)


def _filled(row: DuplicateWindow, scope: Scope, level: Level) -> DuplicateWindow:
    """``row`` with the figures of one scope.

    Bytes are null where they are not known of every rank that bore a copy, of a pair, and where their sum is too large for its field.
    """
    row.scope, row.scope_key = scope
    *sums, inside, between = level.sums
    row.inside_block_us, row.inside_token_us, row.between_block_us, row.between_token_us = (min(each, _LARGEST) for each in sums)
    if max(sums) > _LARGEST:
        _cap(row)
    row.inside_blocks_end, row.inside_tokens_end, row.between_blocks_end, row.between_tokens_end, inside_end, between_end = level.now
    tops = level.tops
    row.inside_blocks_max, row.inside_tokens_max, row.between_blocks_max, row.between_tokens_max = tops[:4]
    row.extra_blocks_max, row.extra_tokens_max, bytes_max = tops[6:]
    if level.sized and scope[0] != "workload_pair" and max(inside, between) // 1_000 <= _LARGEST:
        row.inside_byte_ms, row.between_byte_ms, row.extra_bytes_max = inside // 1_000, between // 1_000, bytes_max
        row.inside_bytes_end, row.between_bytes_end = inside_end, between_end
    else:
        row.inside_byte_ms = row.between_byte_ms = row.extra_bytes_max = row.inside_bytes_end = row.between_bytes_end = None
    return row


def _cap(row: DuplicateWindow) -> None:
    """A sum of ``row`` was cut to what its field can hold: it is a lower bound, and says so."""
    row.reasons = sorted({*row.reasons, "too_large"})
    row.register, row.inside_register, row.between_register = (
        "lower_bound" if register == "exact" else register for register in (row.register, row.inside_register, row.between_register)
    )


def _row_of(tier: Tier, at: int) -> int:
    """Start of the row, of those given out, that holds ``at``, or of the one before it."""
    return tier.rows[bisect_right(tier.rows, at) - 1]


def _rows_of(tier: Tier, since: int, until: int) -> list[int]:
    """Starts of the rows, of those given out, that hold something of [``since``, ``until``]."""
    return tier.rows[max(0, bisect_right(tier.rows, since) - 1) : bisect_right(tier.rows, until)]


def _any_between(starts: list[int], low: int, high: int) -> bool:
    """Whether one of the sorted ``starts`` lies in [``low``, ``high``)."""
    at = bisect_left(starts, low)
    return at < len(starts) and starts[at] < high
