"""The totals of a span, summed by ClickHouse from its tables: the same as :func:`sql.totals.totals_from_records` of their records."""

# ruff: noqa: S608 - the SQL is put together from this module's own text; every value is a bound parameter

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.records import GroupCounters
from sql.database import Database
from sql.totals import (
    DUPLICATE_ENDS,
    DUPLICATE_MAXIMA,
    DUPLICATE_SUMS,
    RESIDENT_FIELDS,
    SUMMED_FIELDS,
    By,
    DuplicateTotals,
    GroupsOfLife,
    LifeKey,
    LifeTotals,
    Totals,
    duplicate_order,
    life_order,
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
)
_US = "toUnixTimestamp64Micro"


def load(database: Database, since_us: int | None = None, until_us: int | None = None, by: By | None = None) -> Totals:
    """Totals from ``since_us`` to ``until_us`` (engine time, microseconds), each open where ``None``.

    Raises :class:`sql.database.StoreError`, with ``schema_missing`` set where the tables have not been created.
    """
    asked = (since_us, until_us)
    versions = _versions(database, _Bounds(since_us, until_us))
    if not versions:
        return Totals(settle_span(since_us, until_us, None, None), asked, None, [], [], [], by)
    newest = versions[0]
    bounds = _Bounds(since_us, until_us, newest)
    if since_us is not None or until_us is not None:
        bounds = _Bounds(*widened(since_us, until_us, _base_window(database, bounds)), newest)
    lives = _lives(database, bounds)
    return Totals(
        span=settle_span(
            bounds.since_us,
            bounds.until_us,
            min((life.first_batch_us for life in lives if life.first_batch_us), default=None),
            max((life.last_batch_us for life in lives if life.last_batch_us), default=None),
        ),
        asked=asked,
        semantics_version=newest,
        left_out_versions=versions[1:],
        lives=lives,
        duplicates=_duplicates(database, bounds, scopes(by)),
        by=by,
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
    rows = database.query(
        f"""
        SELECT
            {_LIFE_KEY},
            toInt64(sum({bounds.share("observed_us", f"({_US}(window_start) + window_us)")})),
            min({_US}(first_batch)), max({_US}(last_batch)), max({_US}(window_start)),
            sumIf(batches, {inside}), sumIf(duplicate_batches, {inside}), sumIf(lost_batches, {inside}), sumIf(refused_batches, {inside}),
            sumIf(unknown_events, {inside}), sumIf(unresolved_blocks, {inside}),
            max(warmup), min(is_final), arraySort(groupUniqArrayArray(reasons))
        FROM rank_windows FINAL
        WHERE {bounds.overlap()}
        GROUP BY {_LIFE_KEY}
        """,
        bounds.parameters,
    ).rows
    groups = _groups(database, bounds)
    of_lives = _groups_of_lives(database, bounds)
    lives = []
    for row in rows:
        key: LifeKey = row[:10]
        life = LifeTotals(*key)
        for name, value in zip(_LIFE_SUMS, row[10:], strict=True):
            setattr(life, name, value)
        life.groups = with_groups_of_life(groups.get(key, []), of_lives.get(key[:3], {}))
        lives.append(life)
    return sorted(lives, key=life_order)


def _groups(database: Database, bounds: _Bounds) -> dict[LifeKey, list[GroupCounters]]:
    inside = bounds.starts_inside()
    joined = ", ".join(f"`groups.{name}` AS g_{name}" for name in ("group_idx", *SUMMED_FIELDS, *RESIDENT_FIELDS))
    sums = ", ".join(f"sumIf(g_{name}, {inside})" for name in SUMMED_FIELDS)
    # In a tuple, because argMax passes over NULL.
    last = ", ".join(f"argMax(tuple(g_{name}), window_start).1" for name in RESIDENT_FIELDS)
    rows = database.query(
        f"""
        SELECT {_LIFE_KEY}, g_group_idx, {sums}, {last}
        FROM rank_windows FINAL
        ARRAY JOIN {joined}
        WHERE {bounds.overlap()}
        GROUP BY {_LIFE_KEY}, g_group_idx
        """,
        bounds.parameters,
    ).rows
    names = ("group_idx", *SUMMED_FIELDS, *RESIDENT_FIELDS)
    found: dict[LifeKey, list[GroupCounters]] = {}
    for row in rows:
        found.setdefault(row[:10], []).append(GroupCounters(**dict(zip(names, row[10:], strict=True))))
    return found


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
    maxima = ", ".join(f"max({name})" for name in DUPLICATE_MAXIMA)
    ends = ", ".join(f"argMax({name}, window_start)" for name in DUPLICATE_ENDS)
    as_of = end if bounds.until_us is None else f"least({end}, {{until:Int64}})"
    rows = database.query(
        f"""
        SELECT scope, scope_key, tier, {sums}, {maxima}, {ends}, max({as_of}), min(is_final), min(CAST(shards_reported >= shards, 'Bool'))
        FROM duplicate_windows FINAL
        WHERE scope IN {{scopes:Array(String)}} AND {bounds.counted()}
        GROUP BY scope, scope_key, tier
        """,
        bounds.parameters | {"scopes": list(wanted)},
    ).rows
    names = ("scope", "scope_key", "tier", *DUPLICATE_SUMS, *DUPLICATE_MAXIMA, *DUPLICATE_ENDS, "as_of_us", "final", "complete")
    return sorted((DuplicateTotals(**dict(zip(names, row, strict=True))) for row in rows), key=duplicate_order)
