"""Coverage and health: what was observed, what was not, and why. Pure text."""

# ruff: noqa: S608 - the SQL is put together from this module's own text

from __future__ import annotations

from infra.grafana import fragments as f
from infra.grafana import variables
from infra.grafana.dashboard import Dashboard
from infra.grafana.panels import RANK_LINK, Row, link_to, matrix, stat, table, trend

_COVERAGE, _COVERAGE_SERIES = (f"FROM coverage{grain} AS r WHERE {f.in_range(grain)} AND {f.RULES}" for grain in (f.GRAIN, f.STEP))
_HEALTH = f"WHERE {f.in_range()} AND {f.RULES} AND {f.CHOSEN}"
_NEWEST_DAY = "window_start >= greatest($__fromTime, $__toTime - INTERVAL 1 DAY) AND window_start <= $__toTime"
_LIFE_SIGNS = "l.at >= greatest($__fromTime, $__toTime - INTERVAL 15 MINUTE) AND l.at <= $__toTime"
_CELL_LINK = link_to(
    "One rank: ${__data.fields[0]}/${__field.name}",
    "kvcensus-rank",
    "var-rank=${__data.fields[0]}/${__field.name}&${semantics_version:queryparam}",
)


def _fleet() -> Row:
    return Row(
        "The fleet",
        [
            stat(
                "Coverage of the fleet in the range",
                "How much of the fleet was demonstrably observed, and how well can a figure of it be read at best? Silent ranks count as "
                "unobserved.",
                f"""
                SELECT {f.COVERAGE} AS coverage, min(r.lowest) AS "lowest coverage", {f.SUMMED_REGISTER} AS register,
                    max(r.ranks_expected) AS "ranks expected", argMax(r.ranks_heard, r.window_start) AS "heard last",
                    max(r.ranks_absent) AS "absent at most", sum(r.lost_batches) AS lost, sum(r.refused_batches) AS refused,
                    sum(r.breaches_found) AS contradictions
                {_COVERAGE}
                """,
                width=24,
            ),
            trend(
                "Coverage, share of 1",
                "How much of the fleet was demonstrably observed, and of the rank that was seen least?",
                f'SELECT window_start AS time, coverage, lowest AS "lowest rank" {_COVERAGE_SERIES} ORDER BY time',
                unit="percentunit",
                figures=False,
            ),
            trend(
                "Ranks: expected, heard, absent, with gaps",
                "How many ranks were expected, how many were heard of, and how many were not wholly observed?",
                f"""
                SELECT window_start AS time, ranks_expected AS expected, ranks_heard AS heard, ranks_absent AS absent,
                    ranks_with_gaps AS "with gaps"
                {_COVERAGE_SERIES}
                ORDER BY time
                """,
                figures=False,
            ),
        ],
    )


def _ranks() -> Row:
    return Row(
        "Ranks",
        [
            matrix(
                "Coverage of every rank: instances by data-parallel rank",
                "Which ranks were not wholly observed in the range? A cell for each rank; green from 99 %, red below 80 %, empty: no such "
                "rank. Click one to see it alone.",
                f"""
                SELECT r.instance_id AS instance, toString(r.dp_rank) AS rank, {f.COVERAGE} AS coverage
                FROM rank_health${{grain}} AS r
                {_HEALTH}
                GROUP BY r.instance_id, r.dp_rank
                ORDER BY r.instance_id, r.dp_rank
                """,
                row="instance",
                column="rank",
                value="coverage",
                link=_CELL_LINK,
            ),
            table(
                "Health of the ranks, least covered first",
                "Is each rank seen, and is what it says believable? Lag: seconds of silence at the end of its newest window. "
                "Contradictions are those with the engine's own metrics.",
                f"""
                WITH argMax(
                    (r.workload, r.model, r.lag_seconds, r.resident_blocks, r.pool_blocks, r.departed), r.window_start
                ) AS newest
                SELECT {f.RANK_NAME} AS rank,
                    ifNull(newest.1, '{f.UNDECLARED}') AS workload, ifNull(newest.2, '{f.UNDECLARED}') AS model,
                    {f.COVERAGE} AS coverage, {f.SUMMED_REGISTER} AS register,
                    newest.3 AS lag, sum(r.restarts) AS restarts, sum(r.batches) AS batches,
                    sum(r.lost_batches) AS lost, sum(r.refused_batches) AS refused, sum(r.duplicate_batches) AS repeated,
                    sum(r.unknown_events) AS "unknown events", sum(r.breaches_found) AS contradictions, sum(r.scrapes) AS scrapes,
                    min(r.identity_coverage) AS "lowest identity coverage", newest.4 AS "resident blocks", newest.5 AS "pool blocks",
                    if(newest.6, 'yes', '') AS departed, {f.REASONS} AS reasons
                FROM rank_health${{grain}} AS r
                {_HEALTH}
                GROUP BY r.instance_id, r.dp_rank
                ORDER BY coverage, rank
                LIMIT 2000
                """,
                units={"lag": "s"},
                links={"rank": RANK_LINK},
                height=12,
            ),
            table(
                "Why figures are less than exact",
                "Which reasons stand in the way, in how many windows and on how many ranks? What each means: kvcensus show explains it.",
                f"""
                SELECT reason, count() AS windows, uniqExact(r.instance_id, r.dp_rank) AS ranks, min(r.coverage) AS "lowest coverage"
                FROM rank_health${{grain}} AS r
                ARRAY JOIN r.reasons AS reason
                {_HEALTH}
                GROUP BY reason
                ORDER BY windows DESC
                """,
                width=8,
                figures=False,
            ),
            table(
                "Gaps, newest day of the range",
                "Where exactly was a rank not observed, and why? One row per rank and 5 minutes; unit: seconds not observed, batches.",
                f"""
                SELECT window_start AS window, {f.RANK_NAME} AS rank, missing_seconds AS missing, coverage,
                    {f.in_words("register")} AS register, lost_batches AS lost, refused_batches AS refused,
                    arrayStringConcat(reasons, ', ') AS reasons
                FROM coverage_gaps
                WHERE {_NEWEST_DAY} AND {f.RULES}
                ORDER BY window DESC, missing DESC
                LIMIT 500
                """,
                units={"missing": "s"},
                links={"rank": RANK_LINK},
                width=16,
            ),
        ],
    )


def _forwarders() -> Row:
    return Row(
        "Forwarders, by their own clock, and what was set aside",
        [
            table(
                "Interruptions",
                "What interrupted the streams? Engine restarts, lost ranges, refused payloads, identities given up, departures: what "
                "forwarders declared.",
                f"""
                SELECT observed_at AS noticed, {f.RANK_NAME} AS rank, if(toYear(at) > 1970, at, NULL) AS "engine time", kind, reason,
                    batches_lost AS lost, payload_bytes AS "payload bytes", blocks_forgotten AS "blocks forgotten", life_id AS life
                FROM interruptions
                WHERE $__timeFilter(observed_at)
                ORDER BY noticed DESC
                LIMIT 500
                """,
                units={"payload bytes": "bytes"},
                links={"rank": RANK_LINK},
                width=12,
                figures=False,
            ),
            table(
                "Last life signs, newest 15 minutes of the range",
                "Which forwarders live, and what have they counted since they started? Silent: seconds from the last life sign to the end "
                "of the range; spool: what waits on disk.",
                f"""
                SELECT {f.RANK_NAME} AS rank, incarnation, argMax(kind, l.at) AS last, max(l.at) AS at,
                    dateDiff('millisecond', max(l.at), $__toTime_ms) / 1e3 AS silent, argMax(batches, l.at) AS batches,
                    argMax(lost, l.at) AS lost, argMax(refused, l.at) AS refused, argMax(publisher_restarts, l.at) AS restarts,
                    argMax(tuple(spool_bytes), l.at).1 AS spool, argMax(tuple(spool_dropped), l.at).1 AS "spool dropped",
                    argMax(tuple(rss_bytes), l.at).1 AS memory, argMax(forwarder_version, l.at) AS version
                FROM lifecycle AS l
                WHERE {_LIFE_SIGNS}
                GROUP BY instance_id, dp_rank, incarnation
                ORDER BY silent DESC
                LIMIT 2000
                """,
                units={"silent": "s", "spool": "bytes", "memory": "bytes"},
                links={"rank": RANK_LINK},
                width=12,
                figures=False,
            ),
            table(
                "Messages set aside, by the server's clock, whatever the range",
                "What could not be read or counted? The newest 200: what cannot be read has no time of its own.",
                """
                SELECT inserted_at AS "set aside", topic, partition, offset, reader, reason, key, payload_bytes AS bytes
                FROM dead_letters FINAL
                ORDER BY "set aside" DESC, topic, partition, offset DESC
                LIMIT 200
                """,
                units={"bytes": "bytes", "offset": "none"},
                width=24,
                height=7,
                figures=False,
            ),
        ],
    )


DASHBOARD = Dashboard(
    "coverage",
    "kvcensus: coverage and health",
    "What was demonstrably observed, every gap with its reason, the health of ranks and forwarders.",
    (variables.GRAIN, variables.STEP, variables.RULES_VERSION, variables.WORKLOAD, variables.MODEL),
    (variables.DEPLOYS,),
    (_fleet(), _ranks(), _forwarders()),
)
