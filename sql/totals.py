"""Sums over a span of engine time, of which all figures are made: per process life of a rank, and per scope of duplicates. Pure.

:func:`totals_from_records` makes them from records in memory and :func:`sql.load.load` has ClickHouse make them from the
tables; both follow what this module says and give the same, to the last integer:

* Of rows with one key only that with the highest version counts.
* Rows of one ``semantics_version`` are summed, the newest in the span; others are left out and named.
* Windows are half-open. Asked for a span, it is widened to borders of the base window: the longest row that holds a
  batch (only rows without one are longer) in the span, or anywhere if there is none in it, or else the shortest row. Where
  a side is not given, the span ends with the first or last batch of any rank there, and no row is clipped on that side.
* A row that starts before the span or ends after it is constant over its length (it holds no batch) and counts in
  proportion; integer arithmetic is exact there. What it counts otherwise (losses, refusals) belongs to its start.
* A process life has one entry per declaration in force. Its groups are those of the whole life, in the span or not,
  because the primary group is chosen from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from schemas.records import DuplicateWindow, GroupCounters, RankWindow
from sql.result_rows import GROUP_STATES, GROUP_SUMS

By = Literal["rank", "workload", "model"]

RESIDENT_FIELDS = GROUP_STATES
SUMMED_FIELDS = GROUP_SUMS

DUPLICATE_SUMS = ("inside_token_us", "between_token_us", "inside_block_us", "between_block_us")
DUPLICATE_MAXIMA = (
    "extra_tokens_max",
    "inside_tokens_max",
    "between_tokens_max",
    "extra_blocks_max",
    "inside_blocks_max",
    "between_blocks_max",
)
DUPLICATE_ENDS = ("inside_tokens_end", "between_tokens_end", "inside_blocks_end", "between_blocks_end", "ranks", "rank_lag_us")


@dataclass(frozen=True)
class Span:
    """[``start_us``, ``end_us``) of engine time, microseconds."""

    start_us: int
    end_us: int

    @property
    def length_us(self) -> int:
        """Its length; never negative."""
        return max(0, self.end_us - self.start_us)


@dataclass
class LifeTotals:
    """Sums of one rank in one process life under one declaration, over the span.

    ``observed_us`` is the part of the span demonstrably observed. ``first_batch_us`` and ``last_batch_us`` are ``None`` where
    the span holds no batch. ``groups`` are in the order of their index: sums, but ``resident_*``, which are the last row's;
    ``spec_kind`` and ``gpu`` hold for the whole life. ``last_window_us`` is the start of the last row. ``final`` is false if any
    row will be replaced.
    """

    instance_id: str
    dp_rank: int
    life_id: str
    workload: str | None
    model: str | None
    reuse_reporting: str
    removals: str
    kv_connector: str | None
    key_epoch: int
    canary: str
    observed_us: int = 0
    first_batch_us: int | None = None
    last_batch_us: int | None = None
    last_window_us: int = 0
    batches: int = 0
    duplicate_batches: int = 0
    lost: int = 0
    refused: int = 0
    unknown_events: int = 0
    unresolved: int = 0
    warmup: bool = False
    final: bool = True
    reasons: list[str] = field(default_factory=list)
    groups: list[GroupCounters] = field(default_factory=list)


@dataclass
class DuplicateTotals:
    """Extra copies of one scope and tier over the span: sums in copies x microseconds, maxima, and the last row's end.

    ``as_of_us`` is the engine time up to which they are counted, ``ranks`` how many ranks are, ``rank_lag_us`` how far the shards were
    behind it; ``complete`` says that all shards reported in every row.
    """

    scope: str
    scope_key: str
    tier: str
    inside_token_us: int = 0
    between_token_us: int = 0
    inside_block_us: int = 0
    between_block_us: int = 0
    extra_tokens_max: int = 0
    inside_tokens_max: int = 0
    between_tokens_max: int = 0
    extra_blocks_max: int = 0
    inside_blocks_max: int = 0
    between_blocks_max: int = 0
    inside_tokens_end: int = 0
    between_tokens_end: int = 0
    inside_blocks_end: int = 0
    between_blocks_end: int = 0
    ranks: int = 0
    rank_lag_us: int = 0
    as_of_us: int = 0
    final: bool = True
    complete: bool = True


@dataclass
class Totals:
    """Everything :func:`sql.figures.assemble` needs. ``asked`` is the span as asked for, before it was widened; a side may be ``None``."""

    span: Span
    asked: tuple[int | None, int | None]
    semantics_version: int | None
    left_out_versions: list[int]
    lives: list[LifeTotals]
    duplicates: list[DuplicateTotals]
    by: By | None = None


LifeKey = tuple[str, int, str, str | None, str | None, str, str, str | None, int, str]
GroupsOfLife = dict[tuple[str, int, str], dict[int, tuple[bool, str | None]]]
"""(instance, rank, life) -> group -> (on a GPU, kind)."""


def scopes(by: By | None) -> list[str]:
    """Scopes of duplicates that are needed for figures by ``by``."""
    return ["fleet"] if by is None else ["fleet", by]


def widened(since_us: int | None, until_us: int | None, base_us: int) -> tuple[int | None, int | None]:
    """The given sides moved outwards to borders of the base window; 0 moves nothing."""
    if not base_us:
        return since_us, until_us
    since = None if since_us is None else since_us // base_us * base_us
    until = None if until_us is None else -(-until_us // base_us) * base_us
    return since, until


def settle_span(since_us: int | None, until_us: int | None, first_us: int | None, last_us: int | None) -> Span:
    """The span whose open sides are the first and last batch; empty, at the side that is known, where there is none."""
    start = since_us if since_us is not None else first_us
    end = until_us if until_us is not None else last_us
    if start is None:
        start = end if end is not None else 0
    return Span(start, max(start, end if end is not None else start))


def with_groups_of_life(groups: Iterable[GroupCounters], of_life: dict[int, tuple[bool, str | None]]) -> list[GroupCounters]:
    """``groups`` in order, with what the life as a whole says of each, and those that do nothing in the span added."""
    found = {group.group_idx: group for group in groups}
    for index, (gpu, kind) in of_life.items():
        group = found.setdefault(index, GroupCounters(group_idx=index))
        group.gpu = gpu
        group.spec_kind = kind
    return [found[index] for index in sorted(found)]


def life_order(life: LifeTotals) -> tuple[str, ...]:
    """The order in which lives are listed."""
    return (
        life.instance_id,
        f"{life.dp_rank:010d}",
        f"{life.last_window_us:020d}",
        life.life_id,
        life.workload or "",
        life.model or "",
        life.reuse_reporting,
        life.removals,
        life.kv_connector or "",
        f"{life.key_epoch:020d}",
        life.canary,
    )


def duplicate_order(totals: DuplicateTotals) -> tuple[str, str, str]:
    """The order in which duplicates are listed."""
    return totals.scope, totals.scope_key, totals.tier


def totals_from_records(
    rank_windows: Iterable[RankWindow],
    duplicate_windows: Iterable[DuplicateWindow],
    span: Span | None = None,
    *,
    since_us: int | None = None,
    until_us: int | None = None,
    by: By | None = None,
) -> Totals:
    """Totals of records in memory, in any order, repeats and superseded versions among them.

    The span is ``span``, or from ``since_us`` to ``until_us``, each of which may be open.
    """
    if span is not None:
        since_us, until_us = span.start_us, span.end_us
    everything = list(rank_windows)
    wanted = set(scopes(by))
    latest_ranks: dict[tuple[object, ...], RankWindow] = {}
    for row in everything:
        key = (row.instance_id, row.dp_rank, row.life_id, row.window_start_us, row.semantics_version)
        if key not in latest_ranks or row.version > latest_ranks[key].version:
            latest_ranks[key] = row
    latest_duplicates: dict[tuple[object, ...], DuplicateWindow] = {}
    for window in duplicate_windows:
        scope = (window.scope, window.scope_key, window.tier, window.window_start_us, window.semantics_version)
        if scope not in latest_duplicates or window.version > latest_duplicates[scope].version:
            latest_duplicates[scope] = window
    ranks = [row for row in latest_ranks.values() if _overlaps(row.window_start_us, row.window_us, since_us, until_us)]
    duplicates = [row for row in latest_duplicates.values() if _overlaps(row.window_start_us, row.window_us, since_us, until_us)]
    versions = sorted({row.semantics_version for row in ranks} | {row.semantics_version for row in duplicates}, reverse=True)
    newest = versions[0] if versions else None
    if since_us is not None or until_us is not None:
        of_newest = [row for row in latest_ranks.values() if row.semantics_version == newest]
        base = _longest_holding(row for row in ranks if row.semantics_version == newest) or _longest_holding(of_newest)
        if not base:
            lengths = [row.window_us for row in of_newest]
            lengths += [row.window_us for row in latest_duplicates.values() if row.semantics_version == newest]
            base = min(lengths, default=0)
        since, until = widened(since_us, until_us, base)
    else:
        since, until = None, None
    ranks = [
        row
        for row in latest_ranks.values()
        if row.semantics_version == newest and _overlaps(row.window_start_us, row.window_us, since, until)
    ]
    duplicates = [
        row for row in latest_duplicates.values() if row.semantics_version == newest and row.scope in wanted and _counted(row, since, until)
    ]
    firsts = [row.first_batch_us for row in ranks if row.first_batch_us]
    lasts = [row.last_batch_us for row in ranks if row.last_batch_us]
    return Totals(
        span=settle_span(since, until, min(firsts, default=None), max(lasts, default=None)),
        asked=(since_us, until_us),
        semantics_version=newest,
        left_out_versions=versions[1:],
        lives=_lives(ranks, groups_of_lives(row for row in everything if row.semantics_version == newest), since, until),
        duplicates=_duplicates(duplicates, since, until),
        by=by,
    )


def groups_of_lives(rows: Iterable[RankWindow]) -> GroupsOfLife:
    """The groups each life ever had: on a GPU if any row says so, of the kind a row names."""
    lives: GroupsOfLife = {}
    for row in rows:
        of_life = lives.setdefault((row.instance_id, row.dp_rank, row.life_id), {})
        for group in row.groups:
            gpu, kind = of_life.get(group.group_idx, (False, None))
            named = [name for name in (kind, group.spec_kind) if name is not None]
            of_life[group.group_idx] = (gpu or group.gpu, max(named, default=None))
    return lives


def _overlaps(start_us: int, length_us: int, since_us: int | None, until_us: int | None) -> bool:
    if until_us is not None and start_us >= until_us:
        return False
    return since_us is None or start_us + length_us > since_us


def _counted(row: DuplicateWindow, since_us: int | None, until_us: int | None) -> bool:
    if until_us is not None and row.window_start_us >= until_us:
        return False
    return since_us is None or row.window_start_us >= since_us or row.as_of_us > since_us


def _longest_holding(ranks: Iterable[RankWindow]) -> int:
    return max((row.window_us for row in ranks if row.batches), default=0)


def _share(value: int, start_us: int, end_us: int, since_us: int | None, until_us: int | None) -> int:
    """The part of ``value``, spread evenly over [start, end), that lies in the span."""
    inside_from = start_us if since_us is None else max(start_us, since_us)
    inside_to = end_us if until_us is None else min(end_us, until_us)
    if inside_from == start_us and inside_to == end_us:
        return value
    return value * max(0, inside_to - inside_from) // max(1, end_us - start_us)


def _lives(rows: Sequence[RankWindow], of_lives: GroupsOfLife, since_us: int | None, until_us: int | None) -> list[LifeTotals]:
    lives: dict[LifeKey, LifeTotals] = {}
    groups: dict[LifeKey, dict[int, GroupCounters]] = {}
    reasons: dict[LifeKey, set[str]] = {}
    for row in sorted(rows, key=lambda row: row.window_start_us):
        key: LifeKey = (
            row.instance_id,
            row.dp_rank,
            row.life_id,
            row.workload,
            row.model,
            row.reuse_reporting,
            row.removals,
            row.kv_connector,
            row.key_epoch,
            row.canary,
        )
        if key not in lives:
            lives[key] = LifeTotals(*key)
            groups[key] = {}
            reasons[key] = set()
        life = lives[key]
        life.observed_us += _share(row.observed_us, row.window_start_us, row.window_start_us + row.window_us, since_us, until_us)
        life.last_window_us = row.window_start_us
        life.warmup = life.warmup or row.warmup
        life.final = life.final and row.final
        reasons[key].update(row.reasons)
        if row.first_batch_us:
            life.first_batch_us = min(row.first_batch_us, life.first_batch_us or row.first_batch_us)
        if row.last_batch_us:
            life.last_batch_us = max(row.last_batch_us, life.last_batch_us or row.last_batch_us)
        starts_inside = since_us is None or row.window_start_us >= since_us
        if starts_inside:
            life.batches += row.batches
            life.duplicate_batches += row.duplicate_batches
            life.lost += row.lost_batches
            life.refused += row.refused_batches
            life.unknown_events += row.unknown_events
            life.unresolved += row.unresolved_blocks
        for group in row.groups:
            total = groups[key].setdefault(group.group_idx, GroupCounters(group_idx=group.group_idx))
            for name in RESIDENT_FIELDS:
                setattr(total, name, getattr(group, name))
            if starts_inside:
                for name in SUMMED_FIELDS:
                    setattr(total, name, getattr(total, name) + getattr(group, name))
    for key, life in lives.items():
        life.reasons = sorted(reasons[key])
        life.groups = with_groups_of_life(groups[key].values(), of_lives.get(key[:3], {}))
    return sorted(lives.values(), key=life_order)


def _duplicates(rows: Sequence[DuplicateWindow], since_us: int | None, until_us: int | None) -> list[DuplicateTotals]:
    found: dict[tuple[str, str, str], DuplicateTotals] = {}
    for row in sorted(rows, key=lambda row: row.window_start_us):
        total = found.setdefault((row.scope, row.scope_key, row.tier), DuplicateTotals(row.scope, row.scope_key, row.tier))
        for name in DUPLICATE_SUMS:
            share = _share(getattr(row, name), row.window_start_us, row.as_of_us, since_us, until_us)
            setattr(total, name, getattr(total, name) + share)
        for name in DUPLICATE_MAXIMA:
            setattr(total, name, max(getattr(total, name), getattr(row, name)))
        for name in DUPLICATE_ENDS:
            setattr(total, name, getattr(row, name))
        as_of = row.as_of_us if until_us is None else min(row.as_of_us, until_us)
        total.as_of_us = max(total.as_of_us, as_of)
        total.final = total.final and row.final
        total.complete = total.complete and row.shards_reported >= row.shards
    return sorted(found.values(), key=duplicate_order)
