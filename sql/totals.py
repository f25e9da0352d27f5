"""Totals of records in memory, by the rules of :mod:`sql.total_types`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schemas.records import Breach, DuplicateWindow, RankWindow, SharedPrefix
from sql.known import KnownRank, absent, known_by_rows
from sql.result_rows import HISTOGRAMS
from sql.total_types import (
    BYTE_SUMS,
    CAUSE_FIELDS,
    DUPLICATE_ENDS,
    DUPLICATE_MAXIMA,
    DUPLICATE_SUMS,
    LIFE_ENDS,
    PREFIXES,
    RESIDENT_FIELDS,
    SUMMED_FIELDS,
    By,
    DuplicateTotals,
    GroupsOfLife,
    GroupTotals,
    LifeKey,
    LifeTotals,
    Span,
    Totals,
    chosen_version,
    duplicate_order,
    life_order,
    listed_breaches,
    rated,
    scopes,
    settle_span,
    widened,
    with_groups_of_life,
)

__all__ = ["By", "DuplicateTotals", "KnownRank", "LifeTotals", "Span", "Totals", "groups_of_lives", "settle_span", "totals_from_records"]


def totals_from_records(
    rank_windows: Iterable[RankWindow],
    duplicate_windows: Iterable[DuplicateWindow],
    span: Span | None = None,
    *,
    since_us: int | None = None,
    until_us: int | None = None,
    by: By | None = None,
    semantics_version: int | None = None,
    shared_prefixes: Iterable[SharedPrefix] = (),
    prefixes: int = PREFIXES,
    known: Iterable[KnownRank] = (),
) -> Totals:
    """Totals of records in memory, in any order, repeats and superseded versions among them.

    The span is ``span``, or from ``since_us`` to ``until_us``, each of which may be open. ``semantics_version``: of the rows to sum, by
    default the newest in the span. ``known``: ranks that are known of otherwise than by their rows. ``prefixes``: how many are kept.
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
    newest, left_out = chosen_version(
        [row.semantics_version for row in ranks] + [row.semantics_version for row in duplicates], semantics_version
    )
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
    in_span = [row for row in latest_ranks.values() if _overlaps(row.window_start_us, row.window_us, since, until)]
    ranks = [row for row in in_span if row.semantics_version == newest]
    duplicates = [
        row for row in latest_duplicates.values() if row.semantics_version == newest and row.scope in wanted and _counted(row, since, until)
    ]
    firsts = [row.first_batch_us for row in ranks if row.first_batch_us]
    lasts = [row.last_batch_us for row in ranks if row.last_batch_us]
    settled = settle_span(since, until, min(firsts, default=None), max(lasts, default=None))
    by_rows = known_by_rows(latest_ranks.values(), settled)
    ever = {(row.instance_id, row.dp_rank) for row in everything}
    present = {(row.instance_id, row.dp_rank) for row in in_span}
    missing = absent(by_rows, present, settled, open_ended=until is None) + absent(known, ever, settled, open_ended=until is None)
    lives = _lives(ranks, groups_of_lives(row for row in everything if row.semantics_version == newest), since, until)
    return Totals(
        span=settled,
        asked=(since_us, until_us),
        semantics_version=newest,
        left_out_versions=left_out,
        lives=sorted(lives + missing, key=life_order),
        duplicates=_duplicates(duplicates, since, until),
        by=by,
        prefixes=_prefixes([row for row in shared_prefixes if row.semantics_version == newest], since, until)[:prefixes],
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
    groups: dict[LifeKey, dict[int, GroupTotals]] = {}
    reasons: dict[LifeKey, set[str]] = {}
    sources: dict[LifeKey, set[str]] = {}
    breaches: dict[LifeKey, list[Breach]] = {}
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
            groups[key], reasons[key], sources[key], breaches[key] = {}, set(), set(), []
        life = lives[key]
        life.observed_us += _share(row.observed_us, row.window_start_us, row.window_start_us + row.window_us, since_us, until_us)
        life.last_window_us = row.window_start_us
        life.warmup = life.warmup or row.warmup
        life.final = life.final and row.final
        reasons[key].update(row.reasons)
        for name in LIFE_ENDS:
            setattr(life, name, getattr(row, name))
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
            life.scrapes += row.scrapes
            life.breaches_found += row.breaches_found
            breaches[key] += row.breaches
            if row.prefill_rate_source is not None and _holds_gpu_time(row):
                sources[key].add(row.prefill_rate_source)
        for group in row.groups:
            total = groups[key].setdefault(group.group_idx, GroupTotals(group_idx=group.group_idx))
            for name in RESIDENT_FIELDS:
                setattr(total, name, getattr(group, name))
            if starts_inside:
                for name in SUMMED_FIELDS:
                    setattr(total, name, getattr(total, name) + getattr(group, name))
                for cause in CAUSE_FIELDS:
                    field = f"rated_{cause}_tokens"
                    setattr(total, field, getattr(total, field) + rated(group, cause))
                for name in HISTOGRAMS:
                    _add_histogram(total, name, getattr(group, f"{name}_buckets"), getattr(group, f"{name}_counts"))
    for key, life in lives.items():
        life.reasons = sorted(reasons[key])
        life.rate_sources = sorted(sources[key])
        life.breaches = listed_breaches(breaches[key])
        life.groups = with_groups_of_life(groups[key].values(), of_lives.get(key[:3], {}))
    return sorted(lives.values(), key=life_order)


def _holds_gpu_time(row: RankWindow) -> bool:
    return any(getattr(group, f"recompute_{cause}_gpu_us") for group in row.groups for cause in CAUSE_FIELDS)


def _add_histogram(total: GroupTotals, name: str, buckets: Sequence[int], counts: Sequence[int]) -> None:
    if not buckets:
        return
    merged = dict(zip(getattr(total, f"{name}_buckets"), getattr(total, f"{name}_counts"), strict=True))
    for bucket, count in zip(buckets, counts, strict=True):
        merged[bucket] = merged.get(bucket, 0) + count
    setattr(total, f"{name}_buckets", sorted(merged))
    setattr(total, f"{name}_counts", [merged[bucket] for bucket in sorted(merged)])


def _duplicates(rows: Sequence[DuplicateWindow], since_us: int | None, until_us: int | None) -> list[DuplicateTotals]:
    found: dict[tuple[str, str, str], DuplicateTotals] = {}
    reasons: dict[tuple[str, str, str], set[str]] = {}
    for row in sorted(rows, key=lambda row: row.window_start_us):
        key = row.scope, row.scope_key, row.tier
        total = found.setdefault(key, DuplicateTotals(*key))
        for name in (*DUPLICATE_SUMS, *BYTE_SUMS):
            value = getattr(row, name)
            share = None if value is None else _share(value, row.window_start_us, row.as_of_us, since_us, until_us)
            setattr(total, name, _plus(getattr(total, name), share))
        for name in DUPLICATE_MAXIMA:
            setattr(total, name, max(getattr(total, name), getattr(row, name)))
        known = total.extra_bytes_max is not None and row.extra_bytes_max is not None
        total.extra_bytes_max = max(total.extra_bytes_max or 0, row.extra_bytes_max or 0) if known else None
        for name in DUPLICATE_ENDS:
            setattr(total, name, getattr(row, name))
        as_of = row.as_of_us if until_us is None else min(row.as_of_us, until_us)
        total.as_of_us = max(total.as_of_us, as_of)
        total.final = total.final and row.final
        total.complete = total.complete and row.shards_reported >= row.shards
        reasons.setdefault(key, set()).update(row.reasons)
    for key, total in found.items():
        total.reasons = sorted(reasons[key])
    return sorted(found.values(), key=duplicate_order)


def _plus(total: int | None, value: int | None) -> int | None:
    """A sum of which any part that is not known makes the whole unknown."""
    return None if total is None or value is None else total + value


def _prefixes(rows: Iterable[SharedPrefix], since_us: int | None, until_us: int | None) -> list[SharedPrefix]:
    latest: dict[tuple[int, int], SharedPrefix] = {}
    for row in rows:
        if (since_us is not None and row.as_of_us <= since_us) or (until_us is not None and row.as_of_us > until_us):
            continue
        key = row.as_of_us, row.place
        if key not in latest or row.version > latest[key].version:
            latest[key] = row
    as_of = max((each for each, _ in latest), default=0)
    return [latest[key] for key in sorted(latest) if key[0] == as_of]
