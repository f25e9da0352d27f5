"""The rows of one rank that are being counted, what holds for all of them, and how far they were observed (design, rule 8). Pure."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.records import Breach, Declaration, RankWindow
from streams.engine_view import SEEN_CONNECTOR, EngineView
from streams.fleet_news import FleetNews, group_bytes
from streams.holdings import SEMANTICS_VERSION, Holdings
from streams.rank_rows import BREACHES_SHOWN, Row, tally_of
from streams.windows import cut, window_start

LONGEST_OBSERVED_US = 400 * 24 * 3_600 * 1_000_000
"""A step of engine time longer than this between two batches is a clock that jumped, not a stretch that was observed."""


class RankWindows:
    """What :class:`streams.residency.RankCore` counts into. ``watermark_us`` is the newest engine time, ``offset`` the newest position."""

    def __init__(self, instance_id: str, dp_rank: int, window_us: int, fleet: FleetNews, holdings: Holdings) -> None:
        self.instance_id = instance_id
        self.dp_rank = dp_rank
        self.watermark_us = 0
        self.offset = -1
        self._window_us = window_us
        self._fleet = fleet
        self._holdings = holdings
        self._engine = EngineView()
        self._declaration = Declaration(reuse_reporting="unlabelled", removals="per_copy")
        self._life_id = ""
        self._contiguous = False
        self._warmup = False
        self._departed = False
        self._forgot = False
        self._windows: dict[tuple[str, int], Row] = {}
        self._dirty: dict[tuple[str, int], None] = {}
        self._provisional: dict[tuple[str, int], None] = {}
        self._current: Row | None = None
        self._standing: list[str] = []
        self._connector: str | None = None
        self._rate: float | None = None

    def _touch(self, at: int) -> Row:
        """The row of the present life that holds ``at``, marked as changed."""
        row = self._current
        if row is None or not row.start <= at < row.end:
            row = self._current = self._row_from(window_start(max(at, self.watermark_us), self._window_us), self._window_us)
        return self._mark(row)

    def _row_from(self, start: int, length: int) -> Row:
        key = (self._life_id, start)
        row = self._windows.get(key)
        if row is None:
            row = self._windows[key] = Row(start, length, self._life_id, self._declaration)
        return row

    def _mark(self, row: Row) -> Row:
        """Note that ``row`` changed, and in it what holds for the rank as a whole."""
        row.changed_at = self.offset
        self._dirty[row.life_id, row.start] = None
        if row.standing is not self._standing:
            self._stand(row)
        return row

    def _observe(self, row: Row, at: int) -> None:
        """The stretch between two contiguous batches of one life was observed; ``row`` is that of the second, at ``at``."""
        since = self.watermark_us
        if not self._contiguous or at <= since:
            return
        if at - since > LONGEST_OBSERVED_US:
            self._name(row, "clock_jump")
            return
        self._fleet.observe(since, at)
        if row.start <= since:
            row.observed_us += at - since
            return
        for start, length, part in cut(since, at, self._window_us):
            crossed = self._mark(self._row_from(start, length))
            crossed.observed_us += part
            if not crossed.groups:
                self._fill(crossed)

    def _fill(self, row: Row) -> None:
        """Write the state as it is now into the row."""
        holdings = self._holdings
        for group, (blocks, tokens, copies) in holdings.resident.items():
            tally = row.groups.get(group)
            if tally is None:
                if not blocks:
                    continue
                tally = tally_of(row.groups, group)
            counters = tally.counters
            counters.resident_blocks = blocks
            counters.resident_tokens = tokens
            counters.resident_copies = copies
        kinds, on_gpu = holdings.kinds, holdings.gpu_groups
        for group, tally in row.groups.items():
            counters = tally.counters
            counters.spec_kind = kinds.get(group)
            counters.gpu = group in on_gpu
            counters.kv_bytes_per_token = self._bytes_of(group)

    def _bytes_of(self, group: int) -> int | None:
        declared = self._declaration
        if not declared.kv_bytes_by_group and declared.kv_bytes_per_token is None:
            return None
        return group_bytes(declared, group, len(self._holdings.groups))

    # -- reasons -------------------------------------------------------------------------------------------------

    def _name(self, row: Row, reason: str) -> None:
        """``reason`` stands in ``row`` from here on; the fleet hears of it when it is new there."""
        if reason not in row.reasons:
            row.reasons.append(reason)
            self._fleet.note(row.start, reason)

    def _contradicted(self, row: Row, found: list[Breach]) -> None:
        for breach in found:
            row.breaches_found += 1
            if len(row.breaches) < BREACHES_SHOWN:
                row.breaches.append(breach)
            self._name(row, breach.kind)

    def _restand(self) -> None:
        """Look again at what holds for the rank as a whole; rows take it over when they are next touched."""
        declared = self._declaration
        self._connector = declared.kv_connector or (SEEN_CONNECTOR if self._engine.connector else None)
        self._rate = self._engine.rate if declared.prefill_rate is None else declared.prefill_rate
        self._holdings.set_rate(self._rate, 1 if declared.gpus_per_rank is None else declared.gpus_per_rank)
        holds = {
            "unlabelled": declared.reuse_reporting == "unlabelled",
            "warmup": self._warmup,
            "kv_connector": self._connector is not None,
            "history_forgotten": self._forgot,
        }
        self._standing = [reason for reason, here in holds.items() if here]

    def _stand(self, row: Row) -> None:
        declared = self._declaration
        row.standing = self._standing
        row.declared = declared
        row.warmup = self._warmup
        row.departed = self._departed
        row.connector = self._connector
        row.rate = self._rate
        row.rate_source = None if self._rate is None else "measured" if declared.prefill_rate is None else "declared"
        row.pool_blocks = self._engine.pool_blocks
        for reason in self._standing:
            self._name(row, reason)

    # -- output --------------------------------------------------------------------------------------------------

    def _take_rows(self) -> list[RankWindow]:
        """The rows that changed, and those that were given out before their time had passed."""
        due = dict(self._dirty)
        due.update(dict.fromkeys(key for key in self._provisional if self._windows[key].end <= self.watermark_us))
        self._dirty = {}
        return [self._given(key, self._windows[key]) for key in due]

    def _restore_rows(self, rows: Iterable[Row]) -> None:
        self._windows = {(row.life_id, row.start): row for row in rows}
        self._provisional = dict.fromkeys(self._windows)  # what was final went out with the drain before

    def _given(self, key: tuple[str, int], row: Row) -> RankWindow:
        final = row.end <= self.watermark_us
        if final:  # engine time of a rank never goes back, so nothing can touch this row again
            self._provisional.pop(key, None)
            del self._windows[key]
            if row is self._current:
                self._current = None
        else:
            self._provisional[key] = None
        return row.record(self.instance_id, self.dp_rank, SEMANTICS_VERSION, final=final)
