"""What the facts of single blocks say of the observation itself, asked of ClickHouse: an audit, contradictions, and what ripens.

The table of facts is large: where a span has too many rows, one block in n is looked at, with everything that is told of it.
"""

# ruff: noqa: S608 - the SQL is put together from this module's own text; every value is a bound parameter

from __future__ import annotations

from typing import Any

from sql.database import Database
from sql.observation import Audit

LOOKED_AT = 2_000_000
"""So many rows of ``block_events`` are joined or grouped at most, by and large."""

ORPHAN = "orphan-"
"""How lives of recovered segments without an owner are named: their records belong to no sequence."""

_CLAIMS = "(content_id IS NOT NULL OR position(life_id, '/') > 0)"
"""Whether a removal is held to what it says of its content: lives that ingest made for other producers are named with slashes."""

SKEW_US = 1_000_000
"""Content counts between instances once two have held it for so long."""


class Bounds:
    """Bounds of a span as conditions on columns of times, each by its own clock, with the parameters they need."""

    def __init__(self, since_us: int | None, until_us: int | None, version: int | None = None) -> None:
        self.parameters: dict[str, Any] = {} if version is None else {"version": version}
        if since_us is not None:
            self.parameters["since"] = since_us
        if until_us is not None:
            self.parameters["until"] = until_us

    def inside(self, column: str, *, upto: bool = False) -> str:
        """Whether a time lies in the span; with ``upto`` it may lie before it too."""
        return self.overlap(column, column, upto=upto)

    def windows(self) -> str:
        """Rank windows that reach into the span, of one version of the rules where one is asked for."""
        version = "semantics_version = {version:Int32}" if "version" in self.parameters else "1"
        return f"{version} AND {self.overlap('window_start', 'window_end', half_open=True)}"

    def overlap(self, start: str, end: str, *, upto: bool = False, half_open: bool = False) -> str:
        """Whether [start, end] reaches into the span, both inclusive; with ``half_open``, neither end counts."""
        conditions = ["1"]
        after, before = (">", "<") if half_open else (">=", "<=")
        if "since" in self.parameters and not upto:
            conditions.append(f"{end} {after} fromUnixTimestamp64Micro({{since:Int64}}, 'UTC')")
        if "until" in self.parameters:
            conditions.append(f"{start} {before} fromUnixTimestamp64Micro({{until:Int64}}, 'UTC')")
        return " AND ".join(conditions)


def sampling(database: Database, span: Bounds) -> int:
    """One block in so many is to be looked at, to stay within :data:`LOOKED_AT`."""
    rows = database.query(f"SELECT count() FROM block_events WHERE {span.inside('at')}", span.parameters).rows[0][0]
    return max(1, -(-int(rows) // LOOKED_AT))


def audit(database: Database, span: Bounds, sampled: int) -> list[Audit]:
    """Removals in the span against stores at any earlier time: a removal's store may lie long before the span."""
    holder = "instance_id, dp_rank, ifNull(group_idx, 0) AS g, upper(ifNull(tier, 'GPU')) AS t, block_id AS b"
    facts = "FROM block_events FINAL WHERE ifNull(upper(locality), '') != 'REMOTE' AND cityHash64(block_id) % {sampled:UInt64} = 0"
    evicted = f"{facts} AND kind = 'evict' AND {span.inside('at')}"
    parameters = span.parameters | {"sampled": sampled, "orphan": ORPHAN}
    found = {
        instance: Audit(instance, unclaimed=unclaimed, sampled=sampled)
        for instance, unclaimed in database.query(
            f"SELECT instance_id, countIf(NOT {_CLAIMS}) {evicted} GROUP BY instance_id ORDER BY instance_id", parameters
        ).rows
    }
    removals = f"SELECT {holder}, life_id AS life, content_id, at {evicted} AND {_CLAIMS}"
    before = f"{span.inside('at', upto=True)} AND instance_id IN (SELECT DISTINCT instance_id {evicted} AND {_CLAIMS})"
    stores = f"SELECT {holder}, toNullable(toString(life_id)) AS life, content_id, at {facts} AND kind = 'store' AND {before}"
    rows = database.query(
        f"""
        SELECT
            instance,
            countIf(joined AND (content = stored_content OR (same_life AND content IS NULL AND stored_content IS NULL))),
            countIf(joined AND same_life AND content != stored_content),
            countIf(joined AND same_life AND content IS NULL AND stored_content IS NOT NULL),
            countIf(joined),
            countIf(NOT joined)
        FROM
        (
            SELECT
                e.instance_id AS instance, e.content_id AS content, s.content_id AS stored_content, s.life IS NOT NULL AS joined,
                ifNull(e.life = s.life AND NOT startsWith(e.life, {{orphan:String}}), 0) AS same_life
            FROM ({removals}) AS e
            ASOF LEFT JOIN ({stores}) AS s
            ON e.instance_id = s.instance_id AND e.dp_rank = s.dp_rank AND e.g = s.g AND e.t = s.t AND e.b = s.b AND e.at > s.at
        )
        GROUP BY instance
        ORDER BY instance
        """,
        parameters,
    ).rows
    for instance, agreed, mismatched, underresolved, joined, unjoined in rows:
        # An instance may have come between the two questions, where a worker writes meanwhile.
        audited = found.setdefault(instance, Audit(instance, unclaimed=0, sampled=sampled))
        audited.agreed, audited.mismatched, audited.underresolved, audited.unjoined = agreed, mismatched, underresolved, unjoined
        audited.indeterminate = joined - agreed - mismatched - underresolved
    return [found[instance] for instance in sorted(found)]


def parent_conflicts(database: Database, span: Bounds, sampled: int) -> int:
    """Contents that were stored behind two different ones. A root is a parent like any other; an unresolved one is no claim."""
    rows = database.query(
        f"""
        SELECT count() FROM
        (
            SELECT content_id FROM block_events
            WHERE kind = 'store' AND content_id IS NOT NULL AND NOT parent_unknown AND (parent_id IS NULL OR parent_content_id IS NOT NULL)
                AND cityHash64(content_id) % {{sampled:UInt64}} = 0 AND {span.inside("at")}
            GROUP BY content_id
            HAVING uniqExact(ifNull(parent_content_id, toFixedString('', 16))) > 1
        )
        """,
        span.parameters | {"sampled": sampled},
    ).rows
    return int(rows[0][0])


def unripe(database: Database, span: Bounds) -> int:
    """Contents that two instances hold as the span ends, the newer of the two for less than the skew allowance.

    Nothing says that a copy which has just begun does not last, so a footprint of zero is no measured zero beside one. What any clear or
    reset of the rank may have ended is taken to have ended.
    """
    upto = span.inside("at", upto=True)
    rows = database.query(
        f"""
        WITH (SELECT max(at) FROM batches WHERE {upto}) AS ended, toIntervalMicrosecond({{skew:Int64}}) AS skew
        SELECT count() FROM
        (
            SELECT content_id FROM
            (
                SELECT content_id, instance_id, dp_rank, argMax(kind, (at, seq, event_index)) AS last, max(at) AS held
                FROM block_events
                WHERE {upto} AND kind IN ('store', 'evict')
                    AND upper(ifNull(tier, 'GPU')) = 'GPU' AND ifNull(upper(locality), '') != 'REMOTE'
                    AND content_id IN
                    (
                        SELECT content_id FROM block_events
                        WHERE kind = 'store' AND content_id IS NOT NULL AND at > ended - skew AND {upto}
                    )
                GROUP BY content_id, instance_id, dp_rank
            ) AS holders
            LEFT JOIN
            (
                SELECT instance_id, dp_rank, max(at) AS emptied FROM
                (
                    SELECT instance_id, dp_rank, at FROM block_events WHERE kind = 'clear' AND {upto}
                    UNION ALL
                    SELECT instance_id, dp_rank, ifNull(boundary, at) AS at FROM rank_events WHERE kind = 'holder_reset' AND {upto}
                )
                GROUP BY instance_id, dp_rank
            ) AS emptyings USING (instance_id, dp_rank)
            WHERE last = 'store' AND held > emptied
            GROUP BY content_id
            HAVING uniqExact(instance_id) > 1
        )
        """,
        span.parameters | {"skew": SKEW_US},
    ).rows
    return int(rows[0][0])
