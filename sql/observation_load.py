"""The facts of observation, read from ClickHouse: :mod:`sql.observation` says what follows from them.

A span is applied to each table by the clock of its own rows: engine time for what the engine's stream tells, the forwarder's clock for life
signs and declarations. They are never converted into each other.
"""

# ruff: noqa: S608 - the SQL is put together from this module's own text; every value is a bound parameter

from __future__ import annotations

from dataclasses import replace
from typing import Any

from schemas.records import NO_SEQ
from sql.database import Database
from sql.observation import (
    Breach,
    DeadLetter,
    Declared,
    Drop,
    Gap,
    GapKind,
    KeySpace,
    Observation,
    Rank,
    RefusedIdentity,
    Run,
    explained,
)
from sql.observation_blocks import Bounds, audit, parent_conflicts, sampling, unripe

LISTED = 500
"""So many of the newest gaps, breaches, refused identities, declarations and dead letters are listed; all are counted."""

_US, _MS = "toUnixTimestamp64Micro", "toUnixTimestamp64Milli"

FACTS_US = 3_600_000_000
"""Single blocks are looked at over so much engine time before the span's end, where no start was asked for."""

_UNEXPLAINED = ("undeclared_gap", "clock_jump", "clock_stepped_back", "reattached")
"""Reasons of rank windows that tell of a gap which no row of ``rank_events`` does."""


def load_observation(
    database: Database,
    since_us: int | None = None,
    until_us: int | None = None,
    *,
    semantics_version: int | None = None,
    listed: int = LISTED,
) -> Observation:
    """The facts from ``since_us`` to ``until_us``, each by its own clock, open where ``None``.

    Windows are those of ``semantics_version`` alone, where one is named.

    Raises :class:`sql.database.StoreError`, with ``schema_missing`` set where the tables have not been created.
    """
    span = Bounds(since_us, until_us, semantics_version)
    runs, horizon = _runs(database, span)
    declared_gaps, gaps_found = _gaps(database, span, listed)
    gaps = explained(declared_gaps, runs)
    gaps += _undeclared(database, span, listed)
    key_spaces, undeclared = _declarations_in_force(database, span)
    breaches, breaches_found = _breaches(database, span, listed)
    letters, letters_found = _dead_letters(database, listed)
    facts = span if since_us is not None else Bounds(_facts_since(database, span), until_us)
    sampled = sampling(database, facts)
    return Observation(
        runs=runs,
        horizon_ms=horizon,
        gaps=gaps,
        gaps_found=gaps_found + len(gaps) - len(declared_gaps),
        refused_identities=_refused_identities(database, span, listed),
        declared=_declared(database, span, listed),
        key_spaces=key_spaces,
        models_undeclared=undeclared,
        breaches=breaches,
        breaches_found=breaches_found,
        audit=audit(database, facts, sampled),
        parent_conflicts=parent_conflicts(database, facts, sampled),
        parent_conflicts_sampled=sampled,
        facts_since_us=facts.parameters.get("since"),
        unripe_contents=unripe(database, span),
        dead_letters=letters,
        dead_letters_found=letters_found,
    )


def _facts_since(database: Database, span: Bounds) -> int | None:
    newest = database.query(f"SELECT {_US}(max(at)), count() FROM batches WHERE {span.inside('at')}", span.parameters).rows[0]
    return int(newest[0]) - FACTS_US if newest[1] else None


# -- forwarders


def _runs(database: Database, span: Bounds) -> tuple[list[Run], int | None]:
    inside = span.inside("at")
    drops: dict[tuple[str, int, str], list[Drop]] = {}
    counters = ("lost", "refused", "spool_dropped", "unknown_events")
    before = ", ".join(f"lagInFrame(toInt64(ifNull({name}, 0))) OVER signs AS {name}_before" for name in counters)
    grown = ", ".join(f"greatest(ifNull({name}, 0) - {name}_before, 0) AS {name}_more" for name in counters)
    for instance, rank, incarnation, *drop in database.query(
        f"""
        SELECT instance_id, dp_rank, incarnation, {_MS}(before), {_MS}(at), {grown}
        FROM
        (
            SELECT *, lagInFrame(toNullable(at)) OVER signs AS before, {before}
            FROM (SELECT * FROM lifecycle FINAL WHERE {inside})
            WINDOW signs AS
            (
                PARTITION BY instance_id, dp_rank, incarnation ORDER BY at, kind = 'stop' ROWS BETWEEN 1 PRECEDING AND CURRENT ROW
            )
        )
        WHERE before IS NOT NULL AND ({" OR ".join(f"{name}_more > 0" for name in counters)})
        ORDER BY at
        """,
        span.parameters,
    ).rows:
        drops.setdefault((instance, rank, incarnation), []).append(Drop(*drop))
    rows = database.query(
        f"""
        SELECT
            instance_id, dp_rank, incarnation, {_MS}(min(at)), {_MS}(max(at)),
            argMax(kind, (at, kind = 'stop')) = 'stop', argMax(reason, (at, kind = 'stop')), argMax(staleness_ms, at)
        FROM lifecycle FINAL
        WHERE {inside}
        GROUP BY instance_id, dp_rank, incarnation
        ORDER BY instance_id, dp_rank, min(at)
        """,
        span.parameters,
    ).rows
    runs = [
        Run(instance, rank, incarnation, first, last, bool(stopped), reason if stopped else None, staleness, tuple(drops.get(key, ())))
        for instance, rank, incarnation, first, last, stopped, reason, staleness in rows
        for key in [(instance, rank, incarnation)]
    ]
    return runs, max((run.last_ms for run in runs), default=None)


def _declared(database: Database, span: Bounds, listed: int) -> list[Declared]:
    rows = database.query(
        f"""
        SELECT
            instance_id, dp_rank, incarnation, {_MS}(observed_at), labels, workload, model,
            ifNull(reuse_reporting, ''), ifNull(heartbeat_ms, 0), ifNull(staleness_ms, 0)
        FROM rank_events FINAL
        WHERE kind = 'declaration' AND {span.inside("observed_at")}
        ORDER BY observed_at DESC, instance_id, dp_rank
        LIMIT {{listed:UInt32}}
        """,
        span.parameters | {"listed": listed},
    ).rows
    return [Declared(*row) for row in reversed(rows)]


# -- gaps


def _gaps(database: Database, span: Bounds, listed: int) -> tuple[list[Gap], int]:
    """Declared losses and refusals with the batches and life signs around them. Refusals that stand for no batch are one per stretch."""
    columns = "instance_id, dp_rank, life_id, incarnation, at, observed_at, seq AS place"
    events = f"""
        SELECT * FROM
        (
            SELECT
                {columns}, if(kind = 'loss', 'lost', 'refused') AS what, ifNull(reason, '') AS why, seq < {NO_SEQ} AS numbered,
                if(kind = 'loss', last_seq - first_seq + 1, 1) AS batches
            FROM rank_events FINAL
            WHERE kind IN ('loss', 'refusal') AND {span.inside("at")}
            UNION ALL
            -- Those without a number of their own look alike where they were noticed at one moment: only their places differ.
            SELECT {columns}, 'refused', JSONExtractString(body, 'reason'), 0, 1
            FROM rank_messages FINAL
            WHERE kind = 'refusal' AND seq >= {NO_SEQ} AND {span.inside("at")}
        )
        ORDER BY observed_at DESC, at DESC, place DESC
        LIMIT {{listed:UInt32}}
    """
    of_lives = "(instance_id, dp_rank, life_id) IN (SELECT instance_id, dp_rank, life_id FROM events)"
    rank = "e.instance_id = {0}.instance_id AND e.dp_rank = {0}.dp_rank"
    life, run = f"{rank} AND e.life_id = {{0}}.life_id", f"{rank} AND e.incarnation = {{0}}.incarnation"
    batches = (
        "SELECT instance_id, dp_rank, life_id, seq, at, toNullable(at) AS found FROM batches"
        f" WHERE {of_lives} AND at >= (SELECT min(at) FROM events)"
    )
    signs = (
        "SELECT DISTINCT instance_id, dp_rank, incarnation, at, toNullable(at) AS found FROM lifecycle"
        " WHERE (instance_id, dp_rank) IN (SELECT instance_id, dp_rank FROM events)"
    )
    rows = database.query(
        f"""
        WITH events AS ({events})
        SELECT
            e.instance_id, e.dp_rank, e.life_id, e.incarnation, e.what, e.why, e.numbered, e.batches,
            {_US}(e.at), {_US}(by_number.found), {_US}(by_time.found), {_MS}(e.observed_at), {_MS}(before.found), {_MS}(after.found)
        FROM events AS e
        ASOF LEFT JOIN ({batches}) AS by_number ON {life.format("by_number")} AND by_number.seq >= e.place
        ASOF LEFT JOIN ({batches}) AS by_time ON {life.format("by_time")} AND by_time.at > e.at
        ASOF LEFT JOIN ({signs}) AS before ON {run.format("before")} AND before.at <= e.observed_at
        ASOF LEFT JOIN ({signs}) AS after ON {run.format("after")} AND after.at > e.observed_at
        ORDER BY e.observed_at, e.at, e.place
        """,
        span.parameters | {"listed": listed},
    ).rows
    gaps: list[Gap] = []
    vague: dict[tuple[Any, ...], int] = {}
    for instance, dp_rank, life_id, incarnation, what, reason, numbered, count, at, by_number, by_time, observed, *around in rows:
        kind: GapKind = "lost" if what == "lost" else "refused"
        gap = Gap(
            instance,
            dp_rank,
            life_id,
            incarnation,
            kind,
            reason,
            count if numbered else None,
            at or None,
            by_number if numbered else by_time,
            around[0],
            around[1],
            observed,
            narrowed=bool(numbered and at) and by_number is not None,
        )
        key = (instance, dp_rank, life_id, incarnation, reason, around[0])
        if numbered or key not in vague:
            if not numbered:
                vague[key] = len(gaps)
            gaps.append(gap)
        else:
            gaps[vague[key]] = replace(gaps[vague[key]], to_us=gap.to_us)
    total = database.query(
        f"SELECT count() FROM rank_events FINAL WHERE kind IN ('loss', 'refusal') AND {span.inside('at')}", span.parameters
    ).rows[0][0]
    return gaps, total if len(rows) >= listed else len(gaps)


def _undeclared(database: Database, span: Bounds, listed: int) -> list[Gap]:
    rows = database.query(
        f"""
        SELECT instance_id, dp_rank, life_id, reason, {_US}(window_start), {_US}(window_end)
        FROM rank_windows FINAL
        ARRAY JOIN reasons AS reason
        WHERE reason IN {{unexplained:Array(String)}} AND {span.windows()}
        ORDER BY window_start DESC, instance_id, dp_rank, reason
        LIMIT {{listed:UInt32}}
        """,
        span.parameters | {"unexplained": list(_UNEXPLAINED), "listed": listed},
    ).rows
    return [
        Gap(instance, dp_rank, life_id, "", "undeclared", reason, None, start, end)
        for instance, dp_rank, life_id, reason, start, end in reversed(rows)
    ]


def _refused_identities(database: Database, span: Bounds, listed: int) -> list[RefusedIdentity]:
    rows = database.query(
        f"""
        SELECT instance_id, dp_rank, group_idx, ifNull(refused, 0), {_US}(ifNull(window_start, at)), {_US}(ifNull(window_end, at))
        FROM rank_events FINAL
        WHERE kind = 'identity_refused' AND {span.overlap("window_start", "window_end")}
        ORDER BY window_end DESC, instance_id, dp_rank, group_idx
        LIMIT {{listed:UInt32}}
        """,
        span.parameters | {"listed": listed},
    ).rows
    return [RefusedIdentity(*row) for row in reversed(rows)]


# -- what held


def _declarations_in_force(database: Database, span: Bounds) -> tuple[list[KeySpace], list[Rank]]:
    rows = database.query(
        f"""
        SELECT instance_id, dp_rank, key_epoch, canary, argMax(model, window_start)
        FROM rank_windows FINAL
        WHERE {span.windows()}
        GROUP BY instance_id, dp_rank, key_epoch, canary
        ORDER BY instance_id, dp_rank
        """,
        span.parameters,
    ).rows
    spaces: dict[tuple[int, str], list[Rank]] = {}
    for instance, rank, epoch, canary, _ in rows:
        spaces.setdefault((epoch, canary), []).append((instance, rank))
    keys = sorted(spaces, key=lambda key: (-len(spaces[key]), key))
    undeclared = sorted({(row[0], row[1]) for row in rows if row[4] is None})
    return [KeySpace(*key, tuple(spaces[key])) for key in keys], undeclared


def _breaches(database: Database, span: Bounds, listed: int) -> tuple[list[Breach], int]:
    where = span.windows()
    rows = database.query(
        f"""
        SELECT instance_id, dp_rank, kind, {_US}(at), {_MS}(scraped), found, bound
        FROM rank_windows FINAL
        ARRAY JOIN
            `breaches.kind` AS kind, `breaches.at` AS at, `breaches.scraped_at` AS scraped,
            `breaches.found` AS found, `breaches.bound` AS bound
        WHERE {where}
        ORDER BY at DESC, instance_id, dp_rank, kind
        LIMIT {{listed:UInt32}}
        """,
        span.parameters | {"listed": listed},
    ).rows
    total = database.query(f"SELECT sum(breaches_found) FROM rank_windows FINAL WHERE {where}", span.parameters).rows[0][0]
    return [Breach(*row) for row in reversed(rows)], total


def _dead_letters(database: Database, listed: int) -> tuple[list[DeadLetter], int]:
    """All of them, whatever the span: a message that could not be read has no time of its own."""
    rows = database.query(
        """
        SELECT topic, partition, offset, reader, reason, key, payload_bytes FROM dead_letters FINAL
        ORDER BY inserted_at DESC, topic, partition, offset DESC
        LIMIT {listed:UInt32}
        """,
        {"listed": listed},
    ).rows
    total = database.query("SELECT count() FROM dead_letters FINAL").rows[0][0]
    return [DeadLetter(*row) for row in reversed(rows)], total
