"""The totals of a span, summed by ClickHouse from its tables: the same as :func:`sql.totals.totals_from_records` of their records."""

# ruff: noqa: S608 - the SQL is put together from this module's own text; every value is a bound parameter

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.records import Breach, SharedPrefix, rank_key
from sql.database import Database
from sql.known import KnownRank, absent
from sql.result_rows import HISTOGRAMS
from sql.total_types import (
    BYTE_SUMS,
    CAUSE_FIELDS,
    DUPLICATE_ENDS,
    DUPLICATE_MAXIMA,
    DUPLICATE_SUMS,
    LIFE_ENDS,
    PREFIXES,
    RATED_FIELDS,
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
    scopes,
    settle_span,
    widened,
    with_groups_of_life,
)

_LIFE_KEY = "instance_id, dp_rank, life_id, workload, model, reuse_reporting, removals, kv_connector, key_epoch, canary"
_LIFE_SUMS = (
    "observed_us",
    "first_batch_us",
    "last_batch_us",
    "last_window_us",
    "batches",
    "duplicate_batches",
    "lost",
    "refused",
    "unknown_events",
    "unresolved",
    "warmup",
    "final",
    "reasons",
    "scrapes",
    "breaches_found",
    "rate_sources",
    *LIFE_ENDS,
)
_US = "toUnixTimestamp64Micro"


def load(
    database: Database,
    since_us: int | None = None,
    until_us: int | None = None,
    by: By | None = None,
    *,
    semantics_version: int | None = None,
    prefixes: int = PREFIXES,
) -> Totals:
    """Totals from ``since_us`` to ``until_us`` (engine time, microseconds), each open where ``None``.

    Raises :class:`sql.database.StoreError`, with ``schema_missing`` set where the tables have not been created.
    """
    asked = (since_us, until_us)
    version, left_out = chosen_version(_versions(database, _Bounds(since_us, until_us)), semantics_version)
    bounds = _Bounds(since_us, until_us, version)
    lives: list[LifeTotals] = []
    if version is not None:
        if since_us is not None or until_us is not None:
            bounds = _Bounds(*widened(since_us, until_us, _base_window(database, bounds)), version)
        lives = _lives(database, bounds)
    span = settle_span(
        bounds.since_us,
        bounds.until_us,
        min((life.first_batch_us for life in lives if life.first_batch_us), default=None),
        max((life.last_batch_us for life in lives if life.last_batch_us), default=None),
    )
    return Totals(
        span=span,
        asked=asked,
        semantics_version=version,
        left_out_versions=left_out,
        lives=sorted(lives + _absent(database, lives, bounds, span), key=life_order),
        duplicates=[] if version is None else _duplicates(database, bounds, scopes(by)),
        by=by,
        prefixes=[] if version is None else _prefixes(database, bounds, prefixes),
    )


class _Bounds:
    """The span as SQL conditions, written so that the sorting key can use them, with the parameters they need."""

    def __init__(self, since_us: int | None, until_us: int | None, version: int | None = None) -> None:
        self.since_us = since_us
        self.until_us = until_us
        self.parameters: dict[str, Any] = {}
        if since_us is not None:
            self.parameters["since"] = since_us
        if until_us is not None:
            self.parameters["until"] = until_us
        if version is not None:
            self.parameters["version"] = version

    def overlap(self) -> str:
        """Rows whose window lies in the span, in part or whole."""
        return self._where("window_end > fromUnixTimestamp64Micro({since:Int64}, 'UTC')")

    def counted(self) -> str:
        """Rows of duplicates that reach into the span: those of an open window end at ``as_of``."""
        since = "fromUnixTimestamp64Micro({since:Int64}, 'UTC')"
        return self._where(f"(window_start >= {since} OR as_of > {since})")

    def _where(self, after_since: str) -> str:
        conditions = ["1"]
        if "version" in self.parameters:
            conditions.append("semantics_version = {version:Int32}")
        if self.until_us is not None:
            conditions.append("window_start < fromUnixTimestamp64Micro({until:Int64}, 'UTC')")
        if self.since_us is not None:
            conditions.append(after_since)
        return " AND ".join(conditions)

    def starts_inside(self) -> str:
        """Whether a row starts in the span; those that start after it are not read."""
        return "1" if self.since_us is None else f"{_US}(window_start) >= {{since:Int64}}"

    def share(self, value: str, end_us: str) -> str:
        """The part of ``value``, spread evenly from ``window_start`` to ``end_us``, that lies in the span."""
        if self.since_us is None and self.until_us is None:
            return value
        start_us = f"{_US}(window_start)"
        inside_from = start_us if self.since_us is None else f"greatest({start_us}, {{since:Int64}})"
        inside_to = end_us if self.until_us is None else f"least({end_us}, {{until:Int64}})"
        length = f"greatest(toInt64(0), {inside_to} - {inside_from})"
        whole = f"{inside_from} = {start_us} AND {inside_to} = {end_us}"
        return f"if({whole}, toInt128({value}), intDiv(toInt128({value}) * {length}, greatest(toInt64(1), {end_us} - {start_us})))"


def _versions(database: Database, bounds: _Bounds) -> list[int]:
    rows = database.query(
        f"""
        SELECT DISTINCT v FROM
        (
            SELECT semantics_version AS v FROM rank_windows FINAL WHERE {bounds.overlap()}
            UNION ALL
            SELECT semantics_version AS v FROM duplicate_windows FINAL WHERE {bounds.overlap()}
        )
        ORDER BY v DESC
        """,
        bounds.parameters,
    ).rows
    return [row[0] for row in rows]


def _base_window(database: Database, bounds: _Bounds) -> int:
    anywhere = _Bounds(None, None, bounds.parameters["version"])
    for where in (bounds, anywhere):
        holding = database.query(
            f"SELECT max(window_us) FROM rank_windows FINAL WHERE batches > 0 AND {where.overlap()}", where.parameters
        ).rows[0][0]
        if holding:
            return int(holding)
    shortest, count = database.query(
        f"""
        SELECT min(w), count() FROM
        (
            SELECT window_us AS w FROM rank_windows FINAL WHERE {anywhere.overlap()}
            UNION ALL
            SELECT window_us AS w FROM duplicate_windows FINAL WHERE {anywhere.overlap()}
        )
        """,
        anywhere.parameters,
    ).rows[0]
    return int(shortest) if count else 0


def _lives(database: Database, bounds: _Bounds) -> list[LifeTotals]:
    inside = bounds.starts_inside()
    gpu_time = " + ".join(f"arraySum(`groups.recompute_{cause}_gpu_us`)" for cause in CAUSE_FIELDS)
    last = ", ".join(_last(name) for name in LIFE_ENDS)
    rows = database.query(
        f"""
        SELECT
            {_LIFE_KEY},
            toInt64(sum({bounds.share("observed_us", f"({_US}(window_start) + window_us)")})),
            min({_US}(first_batch)), max({_US}(last_batch)), max({_US}(window_start)),
            sumIf(batches, {inside}), sumIf(duplicate_batches, {inside}), sumIf(lost_batches, {inside}), sumIf(refused_batches, {inside}),
            sumIf(unknown_events, {inside}), sumIf(unresolved_blocks, {inside}),
            max(warmup), min(is_final), arraySort(groupUniqArrayArray(reasons)),
            sumIf(scrapes, {inside}), sumIf(breaches_found, {inside}),
            arraySort(groupUniqArrayIf(prefill_rate_source, {inside} AND ({gpu_time}) > 0)),
            {last}
        FROM rank_windows FINAL
        WHERE {bounds.overlap()}
        GROUP BY {_LIFE_KEY}
        """,
        bounds.parameters,
    ).rows
    groups = _groups(database, bounds)
    breaches = _breaches(database, bounds) if any(row[10 + _LIFE_SUMS.index("breaches_found")] for row in rows) else {}
    of_lives = _groups_of_lives(database, bounds)
    lives = []
    for row in rows:
        key: LifeKey = row[:10]
        life = LifeTotals(*key)
        for name, value in zip(_LIFE_SUMS, row[10:], strict=True):
            setattr(life, name, value)
        life.breaches = listed_breaches(breaches.get(key, []))
        life.groups = with_groups_of_life(groups.get(key, []), of_lives.get(key[:3], {}))
        lives.append(life)
    return sorted(lives, key=life_order)


def _last(column: str) -> str:
    """The last row's value. In a tuple, because argMax passes over NULL."""
    return f"argMax(tuple({column}), window_start).1"


def _breaches(database: Database, bounds: _Bounds) -> dict[LifeKey, list[Breach]]:
    rows = database.query(
        f"""
        SELECT {_LIFE_KEY}, kind, {_US}(at), toUnixTimestamp64Milli(scraped_at), found, bound
        FROM rank_windows FINAL
        ARRAY JOIN `breaches.kind` AS kind, `breaches.at` AS at, `breaches.scraped_at` AS scraped_at,
            `breaches.found` AS found, `breaches.bound` AS bound
        WHERE {bounds.overlap()} AND {bounds.starts_inside()}
        """,
        bounds.parameters,
    ).rows
    found: dict[LifeKey, list[Breach]] = {}
    for row in rows:
        found.setdefault(row[:10], []).append(Breach(*row[10:]))
    return found


def _groups(database: Database, bounds: _Bounds) -> dict[LifeKey, list[GroupTotals]]:
    inside = bounds.starts_inside()
    histograms = [f"{name}_{part}" for name in HISTOGRAMS for part in ("buckets", "counts")]
    joined = ", ".join(f"`groups.{name}` AS g_{name}" for name in ("group_idx", *SUMMED_FIELDS, *RESIDENT_FIELDS, *histograms))
    sums = ", ".join(f"sumIf(g_{name}, {inside})" for name in SUMMED_FIELDS)
    last = ", ".join(_last(f"g_{name}") for name in RESIDENT_FIELDS)
    rated = ", ".join(f"sumIf({_rated(cause)}, {inside})" for cause in CAUSE_FIELDS)
    merged = ", ".join(f"sumMapIf(g_{name}_buckets, g_{name}_counts, {inside})" for name in HISTOGRAMS)
    rows = database.query(
        f"""
        SELECT {_LIFE_KEY}, g_group_idx, {sums}, {last}, {rated}, {merged}
        FROM rank_windows FINAL
        ARRAY JOIN {joined}
        WHERE {bounds.overlap()}
        GROUP BY {_LIFE_KEY}, g_group_idx
        """,
        bounds.parameters,
    ).rows
    names = ("group_idx", *SUMMED_FIELDS, *RESIDENT_FIELDS, *RATED_FIELDS)
    found: dict[LifeKey, list[GroupTotals]] = {}
    for row in rows:
        group = GroupTotals(**dict(zip(names, row[10:], strict=False)))
        for name, (buckets, counts) in zip(HISTOGRAMS, row[10 + len(names) :], strict=True):
            setattr(group, f"{name}_buckets", list(buckets))
            setattr(group, f"{name}_counts", list(counts))
        found.setdefault(row[:10], []).append(group)
    return found


def _rated(cause: str) -> str:
    """:func:`sql.total_types.rated` of one row's group."""
    silent = " + ".join(f"if(g_recompute_{each}_gpu_us = 0, g_recompute_{each}_tokens, 0)" for each in CAUSE_FIELDS)
    unrated = f"greatest(0, g_unrated_tokens - ({silent}))"
    return f"if(g_recompute_{cause}_gpu_us = 0, 0, greatest(0, g_recompute_{cause}_tokens - {unrated}))"


def _groups_of_lives(database: Database, bounds: _Bounds) -> GroupsOfLife:
    rows = database.query(
        f"""
        SELECT instance_id, dp_rank, life_id, group_idx, max(gpu), max(spec_kind)
        FROM life_groups
        WHERE semantics_version = {{version:Int32}}
            AND (instance_id, dp_rank, life_id) IN (SELECT instance_id, dp_rank, life_id FROM rank_windows WHERE {bounds.overlap()})
        GROUP BY instance_id, dp_rank, life_id, group_idx
        """,
        bounds.parameters,
    ).rows
    lives: GroupsOfLife = {}
    for instance_id, dp_rank, life_id, index, gpu, kind in rows:
        lives.setdefault((instance_id, dp_rank, life_id), {})[index] = (bool(gpu), kind)
    return lives


def _duplicates(database: Database, bounds: _Bounds, wanted: Sequence[str]) -> list[DuplicateTotals]:
    end = f"{_US}(as_of)"
    sums = ", ".join(f"sum(toInt128({bounds.share(name, end)}))" for name in DUPLICATE_SUMS)
    byte_sums = ", ".join(_all_or_null(name, f"sum(toInt128({bounds.share(f'assumeNotNull({name})', end)}))") for name in BYTE_SUMS)
    maxima = ", ".join(f"max({name})" for name in DUPLICATE_MAXIMA)
    most_bytes = _all_or_null("extra_bytes_max", "max(assumeNotNull(extra_bytes_max))")
    ends = ", ".join(_last(name) for name in DUPLICATE_ENDS)
    as_of = end if bounds.until_us is None else f"least({end}, {{until:Int64}})"
    rows = database.query(
        f"""
        SELECT scope, scope_key, tier, {sums}, {byte_sums}, {maxima}, {most_bytes}, {ends}, max({as_of}), min(is_final),
            min(CAST(shards_reported >= shards, 'Bool')), arraySort(groupUniqArrayArray(reasons))
        FROM duplicate_windows FINAL
        WHERE scope IN {{scopes:Array(String)}} AND {bounds.counted()}
        GROUP BY scope, scope_key, tier
        """,
        bounds.parameters | {"scopes": list(wanted)},
    ).rows
    sums_and_maxima = (*DUPLICATE_SUMS, *BYTE_SUMS, *DUPLICATE_MAXIMA, "extra_bytes_max")
    names = ("scope", "scope_key", "tier", *sums_and_maxima, *DUPLICATE_ENDS, "as_of_us", "final", "complete", "reasons")
    return sorted((DuplicateTotals(**dict(zip(names, row, strict=True))) for row in rows), key=duplicate_order)


def _all_or_null(column: str, aggregate: str) -> str:
    """``aggregate``, or NULL where any row does not know ``column``."""
    return f"if(countIf({column} IS NULL) > 0, NULL, {aggregate})"


def _prefixes(database: Database, bounds: _Bounds, limit: int) -> list[SharedPrefix]:
    conditions = ["semantics_version = {version:Int32}"]
    if bounds.since_us is not None:
        conditions.append("as_of > fromUnixTimestamp64Micro({since:Int64}, 'UTC')")
    if bounds.until_us is not None:
        conditions.append("as_of <= fromUnixTimestamp64Micro({until:Int64}, 'UTC')")
    where = " AND ".join(conditions)
    columns = ", ".join(
        f"{_US}({name.removesuffix('_us')})" if name in ("as_of_us", "first_seen_us") else name for name in SharedPrefix.__struct_fields__
    )
    rows = database.query(
        f"""
        SELECT {columns} FROM shared_prefixes FINAL
        WHERE {where} AND as_of = (SELECT max(as_of) FROM shared_prefixes WHERE {where})
        ORDER BY place LIMIT {{prefixes:UInt32}}
        """,
        bounds.parameters | {"prefixes": limit},
    ).rows
    return [SharedPrefix(*row) for row in rows]


_DECLARED = "workload, model, reuse_reporting, removals, kv_connector, key_epoch, canary"


def _absent(database: Database, lives: Sequence[LifeTotals], bounds: _Bounds, span: Span) -> list[LifeTotals]:
    """Entries of the ranks that :mod:`sql.known` expects. The tables are asked about ranks without a row in the span only: they are few."""
    present = {(life.instance_id, life.dp_rank) for life in lives}
    first = database.query(f"SELECT instance_id, dp_rank, {_US}(min(first_window)) FROM known_ranks GROUP BY instance_id, dp_rank").rows
    ever = {row[:2] for row in first}
    open_ended = bounds.until_us is None
    missing = [row for row in first if row[:2] not in present and row[2] < span.end_us]
    found = absent(_known_by_rows(database, missing, bounds, span), present, span, open_ended=open_ended) if missing else []
    return found + absent(_known_by_declaration(database), ever, span, open_ended=open_ended)


def _known_by_rows(database: Database, ranks: Sequence[tuple[str, int, int]], bounds: _Bounds, span: Span) -> list[KnownRank]:
    # Rows that the span leaves out for the version of their rules do not make a rank absent.
    parameters = {name: value for name, value in bounds.parameters.items() if name != "version"}
    parameters |= {"start": span.start_us, "end": span.end_us, "ranks": [rank_key(*rank[:2]) for rank in ranks]}
    order = f"(window_start, semantics_version, ifNull({_US}(last_batch), 0), version)"
    before = f"{_US}(window_start) < {{start:Int64}}"
    rows = database.query(
        f"""
        SELECT instance_id, dp_rank, argMax(tuple({_DECLARED}), {order}) AS declared, {_US}(min(window_start)),
            if(argMaxIf(departed, {order}, {before}), maxIf({_US}(window_start), {before}), NULL)
        FROM rank_windows FINAL
        WHERE window_start < fromUnixTimestamp64Micro({{end:Int64}}, 'UTC')
            AND has({{ranks:Array(String)}}, concat(instance_id, '/', toString(dp_rank)))
        GROUP BY instance_id, dp_rank
        HAVING countIf({_Bounds(bounds.since_us, bounds.until_us).overlap()}) = 0
        """,
        parameters,
    ).rows
    return [_known(*row) for row in rows]


def _known_by_declaration(database: Database) -> list[KnownRank]:
    """Every rank that has declared itself; ``at`` 0 (1970) is no engine time."""
    order = "(observed_at, seq, kind)"
    rows = database.query(
        f"""
        SELECT instance_id, dp_rank, argMaxIf(tuple({_DECLARED}), {order}, kind = 'declaration'), min(nullIf({_US}(at), 0)),
            if(argMax(kind, {order}) = 'departure', argMax({_US}(at), {order}), NULL)
        FROM rank_events FINAL
        WHERE kind IN ('declaration', 'departure')
        GROUP BY instance_id, dp_rank
        HAVING countIf(kind = 'declaration') > 0
        """
    ).rows
    return [_known(*row) for row in rows]


def _known(instance_id: str, dp_rank: int, declared: tuple[Any, ...], first_us: int | None, departed_us: int | None) -> KnownRank:
    workload, model, reuse_reporting, removals, kv_connector, key_epoch, canary = declared
    return KnownRank(
        instance_id, dp_rank, workload, model, reuse_reporting, removals, kv_connector, key_epoch, canary, first_us, departed_us
    )
