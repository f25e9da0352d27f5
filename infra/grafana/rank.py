"""One rank: everything that is known of it. Pure text."""

# ruff: noqa: S608 - the SQL is put together from this module's own text

from __future__ import annotations

from infra.grafana import fragments as f
from infra.grafana import variables
from infra.grafana.dashboard import Annotation, Dashboard
from infra.grafana.panels import Row, bars, stat, strip, table, trend

_WINDOWS, _COPIES = "${repeat_compute}", "${duplicate_footprint}"
_REPEAT = f"FROM {_WINDOWS} AS r WHERE {f.in_range(_WINDOWS)} AND {f.RULES} AND {f.THE_RANK}"
_FOOTPRINT = f"""
    FROM {_COPIES} AS r
    WHERE {f.in_range(_COPIES)} AND {f.RULES} AND scope = 'rank' AND scope_key = ${{rank:singlequote}} AND {f.TIER}
"""
_TWO_HOURS = "greatest($__fromTime, $__toTime - INTERVAL 2 HOUR)"
_NEWEST = f"window_start >= {_TWO_HOURS} AND window_start <= $__toTime AND {f.RULES} AND {f.THE_RANK}"
_BY_FORWARDER = f"$__timeFilter(observed_at) AND {f.THE_RANK}"
_SAID = f"FROM engine_metrics FINAL WHERE $__timeFilter(at) AND {f.THE_RANK}"
_BOUND = "A lower bound, at the coverage and register shown."
_NEVER_ADDED = "The causes are never added together; a value that is missing cannot be told."
_NEWEST_EPOCH = "Of several key epochs in the range the newest is shown."

RESTARTS = Annotation(
    "Interruptions",
    f"""
    SELECT if(toYear(at) > 1970, at, observed_at) AS time, concat(kind, ': ', ifNull(reason, '')) AS text, kind AS tags
    FROM interruptions
    WHERE {_BY_FORWARDER}
    ORDER BY time
    LIMIT 200
    """,
    "red",
)


def _numbers() -> Row:
    return Row(
        "${rank}: two numbers, never added together",
        [
            stat(
                "Repeat compute: ${unit:text} in the range, by cause",
                f"What did this rank compute again? {_BOUND} {_NEVER_ADDED} {_NEWEST_EPOCH}",
                f.repeat_total(_REPEAT),
            ),
            stat(
                "Duplicate KV footprint that it bears: extra ${size:text} on ${tier}, mean of the range",
                "How many extra copies does this rank bear, inside its instance and between instances? Coverage is that of the whole "
                "fleet. "
                f"{_BOUND} {_NEWEST_EPOCH}",
                f.footprint_total(_FOOTPRINT),
            ),
            strip(
                "Coverage of the rank",
                "Was the rank demonstrably observed? A cell for each window; green from 99 %, red below 80 %.",
                f"SELECT window_start AS time, {f.COVERAGE} AS coverage {_REPEAT} GROUP BY window_start ORDER BY time",
            ),
        ],
    )


def _over_time() -> Row:
    held = f"""
        SELECT window_start AS time, r.key_epoch AS key_epoch,
            sum(r.stored_tokens) * 3.6e9 / any(r.window_us) AS "stored per hour",
            sum(r.removed_tokens) * 3.6e9 / any(r.window_us) AS "evicted per hour",
            max(r.resident_tokens) AS resident, {f.COVERAGE} AS coverage, {f.SUMMED_REGISTER} AS register
        {_REPEAT}
        GROUP BY window_start, r.key_epoch
    """
    return Row(
        "Over time; up to two hours from the windows themselves",
        [
            trend(
                "Repeat compute by cause, ${unit:text} per hour",
                f"What does this rank compute again, and why? {_BOUND} {_NEVER_ADDED} The newest window is still filling.",
                f.repeat_series(_REPEAT),
            ),
            trend(
                "GPU time of repeat compute, GPU seconds per hour",
                "How much GPU time goes into computing again? Seconds of one GPU: an estimate by the declared or measured prefill rate. "
                f"{_BOUND} {_NEVER_ADDED}",
                f.repeat_series(_REPEAT, "gpu_seconds"),
                unit="s",
            ),
            trend(
                "Stored, evicted and resident, tokens",
                "What does the rank store and evict, and what does it hold at the end of each window? Tokens of the primary group; stored "
                "is "
                f"missing where copies cannot be told from announcements. {_BOUND}",
                f.series(held, '"stored per hour", "evicted per hour", resident, coverage', f.SUMMED_SERIES),
            ),
            trend(
                "Extra copies that it bears on ${tier}, ${size:text}, mean of each window",
                f"How much of what this rank holds is held elsewhere too? Coverage is that of the whole fleet. {_BOUND}",
                f.footprint_series(_FOOTPRINT),
            ),
        ],
    )


def _blocks() -> Row:
    by_cause = ", ".join(f"sumIf(r.blocks, r.what = '{what}') AS {what}" for what in ("evicted", "cleared", "restarted", "lifetime"))
    return Row(
        "Blocks, newest two hours of the range",
        [
            bars(
                "How soon lost content came back, and how long it had lasted, blocks",
                "How long was content away before it was stored again, by how it was lost? Lifetime: how long evicted content had been "
                "resident. Unit: blocks of the primary group. Lower bounds; coverage and register are in the table beside.",
                f"""
                SELECT {f.WITHIN} AS within, evicted, cleared, restarted, lifetime
                FROM (SELECT {f.SECONDS} AS s, {by_cause} FROM return_times AS r WHERE {_NEWEST} GROUP BY s ORDER BY s)
                """,
                over="within",
                unit="short",
                beside="Blocks computed again, the newest 200",
            ),
            table(
                "Blocks computed again, the newest 200",
                "Which blocks were computed again? One row per block and cache group; figures count the primary group. Away: how long it "
                "was gone. GPU time is an estimate, missing where no prefill rate was known. Coverage and register are those of the window "
                "in which it came back.",
                # The view recomputed_blocks looks for that window among all there are; here among those of the range.
                f"""
                SELECT r.back_at AS back, toString(r.cause) AS cause, r.tokens AS tokens, r.elapsed_us / 1e6 AS away,
                    r.gpu_us / 1e6 AS "GPU time", r.stored_at AS stored, r.lost_at AS lost,
                    lower(hex(r.content_id)) AS content, lower(hex(r.parent_content_id)) AS "content before",
                    if(w.window_us > 0, w.observed_us / w.window_us, 0) AS coverage,
                    if(w.window_us > 0, {f.in_words("w.register")}, 'indeterminate') AS register, r.group_idx AS "cache group"
                FROM (
                    SELECT * FROM recomputes FINAL
                    WHERE back_at >= {_TWO_HOURS} AND back_at <= $__toTime AND {f.RULES} AND {f.THE_RANK}
                ) AS r
                ASOF LEFT JOIN (
                    SELECT instance_id, dp_rank, life_id, window_start, window_us, observed_us, register FROM rank_windows FINAL
                    WHERE window_start >= {_TWO_HOURS} - INTERVAL 1 HOUR AND window_start <= $__toTime AND {f.RULES} AND {f.THE_RANK}
                ) AS w
                ON r.instance_id = w.instance_id AND r.dp_rank = w.dp_rank AND r.life_id = w.life_id AND r.back_at >= w.window_start
                ORDER BY back DESC
                LIMIT 200
                """,
                units={"away": "s", "GPU time": "s"},
                width=12,
                height=10,
            ),
        ],
    )


def _health() -> Row:
    return Row(
        "Health",
        [
            table(
                "Health by window",
                "Was the rank seen, and is what it says believable? Lag: seconds of silence at the end of the window.",
                f"""
                SELECT window_start AS window, coverage, {f.in_words("register")} AS register, lag_seconds AS lag, lives, restarts, batches,
                    lost_batches AS lost, refused_batches AS refused, duplicate_batches AS repeated, breaches_found AS contradictions,
                    scrapes, identity_coverage AS "identity coverage", resident_blocks AS "resident blocks", pool_blocks AS "pool blocks",
                    arrayStringConcat(reasons, ', ') AS reasons
                FROM rank_health${{grain}}
                WHERE {f.in_range()} AND {f.RULES} AND {f.THE_RANK}
                ORDER BY window DESC
                LIMIT 500
                """,
                units={"lag": "s"},
            ),
            table(
                "Interruptions, by the forwarder's clock",
                "What interrupted the rank's stream? Engine restarts, lost ranges, refused payloads, identities given up, departures: what "
                "the forwarder declared.",
                f"""
                SELECT observed_at AS noticed, if(toYear(at) > 1970, at, NULL) AS "engine time", kind, reason, batches_lost AS lost,
                    first_seq AS "from number", last_seq AS "to number", payload_bytes AS "payload bytes",
                    blocks_forgotten AS "blocks forgotten", life_id AS life
                FROM interruptions
                WHERE {_BY_FORWARDER}
                ORDER BY noticed DESC
                LIMIT 200
                """,
                units={"payload bytes": "bytes"},
                width=12,
                height=8,
                figures=False,
            ),
            table(
                "Contradictions with the engine's metrics, newest two hours of the range",
                "Where does what the events say contradict the engine's own metrics? Unit: blocks. cached_over_pool: found are counted as "
                "cached, the pool has bound. in_use_over_cached: found are in use, at most bound can be.",
                f"""
                SELECT at, kind, found, bound, coverage, {f.in_words("register")} AS register, breaches_found AS "in this window",
                    scraped_at AS scraped, arrayStringConcat(reasons, ', ') AS reasons
                FROM metric_breaches
                WHERE {_NEWEST}
                ORDER BY at DESC
                LIMIT 200
                """,
                width=12,
                height=8,
            ),
        ],
    )


def _engine() -> Row:
    step = "$__timeInterval(at)"
    before = "OVER (PARTITION BY life_id, process_started ORDER BY at ROWS BETWEEN 1 PRECEDING AND CURRENT ROW)"
    hits, queries = (
        f"greatest(0, prefix_cache_{each} - lagInFrame(prefix_cache_{each}) {before}) AS {each}" for each in ("hits", "queries")
    )
    return Row(
        "What the engine says of itself, by the forwarder's clock",
        [
            trend(
                "The engine: cache in use and prefix cache hits, share of 1",
                "What the engine's own metrics say: share of blocks that running requests hold, and share of queried tokens found in its "
                "prefix cache.",
                f"""
                SELECT {step} AS time, avg(kv_cache_usage) AS "in use", sum(hits) / nullIf(sum(queries), 0) AS "prefix cache hits"
                FROM (SELECT at, kv_cache_usage, {hits}, {queries} {_SAID})
                GROUP BY time
                ORDER BY time
                """,
                unit="percentunit",
                figures=False,
            ),
            trend(
                "The engine: requests",
                "What the engine's own metrics say: requests running and waiting, mean of each step.",
                f"""
                SELECT {step} AS time, avg(requests_running) AS running, avg(requests_waiting) AS waiting
                {_SAID}
                GROUP BY time
                ORDER BY time
                """,
                figures=False,
            ),
        ],
    )


DASHBOARD = Dashboard(
    "rank",
    "kvcensus: one rank",
    "Everything for one rank: both numbers, the blocks behind them, interruptions, and what its engine says of itself.",
    (
        variables.GRAIN,
        variables.view_of_rank("repeat_compute"),
        variables.view_of_rank("duplicate_footprint"),
        variables.RULES_VERSION,
        variables.RANK,
        variables.TIER,
        variables.UNIT,
        variables.SIZE,
    ),
    (variables.DEPLOYS, RESTARTS),
    (_numbers(), _over_time(), _blocks(), _health(), _engine()),
    since="now-2h",
)
