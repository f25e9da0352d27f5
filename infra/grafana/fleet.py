"""Fleet overview: both numbers, by cause, workload, model and rank, and what lies behind them. Pure text."""

# ruff: noqa: S608 - the SQL is put together from this module's own text

from __future__ import annotations

from infra.grafana import fragments as f
from infra.grafana import variables
from infra.grafana.dashboard import Dashboard
from infra.grafana.panels import RANK_LINK, Panel, Row, bars, stat, strip, table, trend

_REPEAT, _REPEAT_SERIES = (
    f"FROM repeat_compute{grain} AS r WHERE {f.in_range(grain)} AND {f.RULES} AND {f.CHOSEN}" for grain in (f.GRAIN, f.STEP)
)
_FOOTPRINT, _FOOTPRINT_SERIES = (
    f"FROM duplicate_footprint{grain} AS r WHERE {f.in_range(grain)} AND {f.RULES} AND {f.TIER}" for grain in (f.GRAIN, f.STEP)
)
_DAYS = "window_start > $__toTime - INTERVAL 14 DAY AND window_start <= $__toTime"
_BACK = f"FROM return_times_1d AS r WHERE {_DAYS} AND {f.RULES} AND {f.chosen('workload')}"
_NEVER_ADDED = "The causes are never added together; a value that is missing cannot be told."
_BOUND = "A lower bound, at the coverage and register shown."
_ESTIMATE = "Seconds of one GPU: an estimate by the declared or measured prefill rate; unrated tokens had no rate and are in none of it."
_NEWEST_EPOCH = "Of several key epochs in the range the newest is shown; the tables below show each."


def _repeat_by(title: str, question: str, heading: str, order: str, *, height: int) -> Panel:
    """What each workload, model or rank (``heading``) computed again over the range, a column for each cause."""
    ranks = heading == "rank"
    declared = [f"argMax(ifNull(r.{each}, '{f.UNDECLARED}'), r.window_start) AS {each}" for each in ("workload", "model")]
    names = [f"{f.RANK_NAME} AS rank", *declared] if ranks else [f"ifNull(r.{heading}, '{f.UNDECLARED}') AS {heading}"]
    return table(
        title,
        f"{question} Unit: ${{unit:text}} of the primary group over the range. {_BOUND} {_NEVER_ADDED}",
        f"""
        SELECT {", ".join(names)},
            {f.COVERAGE} AS coverage, {f.SUMMED_REGISTER} AS register,
            {f.sums()},
            sum(r.unrated_tokens) AS "unrated tokens", sum(r.unreused_tokens) AS "unreused tokens at most", r.key_epoch AS "key epoch",
            {f.REASONS} AS reasons
        {_REPEAT}
        GROUP BY {"r.instance_id, r.dp_rank" if ranks else f"r.{heading}"}, r.key_epoch
        ORDER BY sum(r.{order}_${{unit}}) DESC NULLS LAST
        LIMIT {50 if ranks else 200}
        """,
        height=height,
        links={"rank": RANK_LINK} if ranks else None,
    )


def _borne_by(title: str, scope: str, *, width: int, height: int, limit: int = 200) -> Panel:
    """Extra copies that each rank, workload or model (``scope``) bears, inside and between."""
    ranks = scope == "rank"
    return table(
        title,
        f"Which {scope} bears how many of the extra copies, inside an instance and between instances? Unit: ${{size:text}}, means weighted "
        f"by time; a missing value: the size is not known of every rank. {_BOUND} Coverage is that of the whole fleet.",
        f"""
        SELECT {"r.scope_key" if ranks else f"ifNull(r.scope_key, '{f.UNDECLARED}')"} AS {scope},
            {f.mean("inside")} AS inside, {f.mean("between")} AS between, max(r.extra_${{size}}_max) AS "both at most",
            {f.COVERAGE} AS coverage,
            {f.weakest("r.inside_register")} AS "inside register", {f.weakest("r.between_register")} AS "between register",
            r.key_epoch AS "key epoch", {f.REASONS} AS reasons
        {_FOOTPRINT} AND scope = '{scope}'
        GROUP BY r.scope_key, r.key_epoch
        ORDER BY {f.mean("extra")} DESC NULLS LAST
        LIMIT {limit}
        """,
        width=width,
        height=height,
        links={"rank": RANK_LINK} if ranks else None,
    )


def _numbers() -> Row:
    return Row(
        "Two numbers, each with its coverage; never added together",
        [
            stat(
                "Repeat compute: ${unit:text} in the range, by cause",
                f"What did the chosen workloads and models compute again? {_BOUND} {_NEVER_ADDED} {_NEWEST_EPOCH}",
                f.repeat_total(_REPEAT),
            ),
            stat(
                "Duplicate KV footprint: extra ${size:text} on ${tier}, mean of the range",
                "How much KV cache holds content that another rank holds too, inside an instance and between instances? Of the whole "
                "fleet, "
                f"whatever workload or model is chosen. {_BOUND} {_NEWEST_EPOCH}",
                f.footprint_total(f"{_FOOTPRINT} AND scope = 'fleet'"),
            ),
            strip(
                "Coverage of the fleet",
                "How much of the fleet was demonstrably observed? A cell for each window; green from 99 %, red below 80 %. Silent ranks "
                "count as unobserved. Why not all: dashboard Coverage and health.",
                f"""
                SELECT window_start AS time, {f.COVERAGE} AS coverage
                FROM repeat_compute{f.STEP} AS r
                WHERE {f.in_range(f.STEP)} AND {f.RULES}
                GROUP BY window_start
                ORDER BY time
                """,
            ),
        ],
    )


def _repeat() -> Row:
    by_workload = f"""
        SELECT window_start AS time, ifNull(r.workload, '{f.UNDECLARED}') AS name, r.key_epoch AS key_epoch,
            {f.summed("${cause}")} * 3.6e9 / any(r.window_us) AS "${{cause}}",
            {f.COVERAGE} AS coverage, {f.SUMMED_REGISTER} AS register
        {_REPEAT_SERIES}
        GROUP BY window_start, name, r.key_epoch
    """
    return Row(
        "Repeat compute",
        [
            trend(
                "Repeat compute by cause, ${unit:text} per hour",
                f"What is computed again, and why? {_BOUND} {_NEVER_ADDED} The newest window is still filling.",
                f.repeat_series(_REPEAT_SERIES),
            ),
            trend(
                "GPU time of repeat compute, GPU seconds per hour",
                f"How much GPU time goes into computing again? {_ESTIMATE} {_BOUND} {_NEVER_ADDED}",
                f.repeat_series(_REPEAT_SERIES, "gpu_seconds"),
                unit="s",
            ),
            trend(
                "Repeat compute by workload: ${cause}, ${unit:text} per hour",
                f"Which workload computes again, of one cause? {_BOUND}",
                f.series(by_workload, '"${cause}", coverage', f.SUMMED_SERIES, "name"),
            ),
            table(
                "GPU time by workload and cause",
                f"How much GPU time did each workload spend on computing again? {_ESTIMATE} {_BOUND} Coverage is the lowest of any window.",
                f"""
                SELECT ifNull(r.workload, '{f.UNDECLARED}') AS workload, r.cause AS cause,
                    if(sum(r.gpu_seconds) = 0 AND sum(r.tokens) > 0, NULL, sum(r.gpu_seconds)) AS "GPU time", sum(r.tokens) AS tokens,
                    min(r.coverage) AS "lowest coverage", {f.SUMMED_REGISTER} AS register, r.key_epoch AS "key epoch"
                FROM gpu_time${{grain}} AS r
                WHERE {f.in_range()} AND {f.RULES} AND {f.chosen("workload")}
                GROUP BY r.workload, r.cause, r.key_epoch
                ORDER BY "GPU time" DESC NULLS LAST
                """,
                units={"GPU time": "s"},
                width=12,
            ),
            _repeat_by("By workload", "Which workload computed what again?", "workload", "evicted", height=7),
            _repeat_by("By model", "Which model computed what again?", "model", "evicted", height=7),
            _repeat_by(
                "Ranks with the most repeat compute: ${cause}",
                "Which ranks compute the most again, of one cause? Click one to see it alone.",
                "rank",
                "${cause}",
                height=10,
            ),
        ],
    )


def _footprint() -> Row:
    return Row(
        "Duplicate KV footprint",
        [
            trend(
                "Extra copies on ${tier}, ${size:text}, mean of each window",
                f"How much is held twice, inside an instance and between instances? Of the whole fleet. {_BOUND}",
                f.footprint_series(f"{_FOOTPRINT_SERIES} AND scope = 'fleet'"),
            ),
            table(
                "Who shares what: pairs of workloads",
                "Which workloads hold the same content? Unit: tokens that ranks of both hold, counted once. Never add pairs: content of "
                "three "
                f"workloads is in three of them. {_BOUND}",
                f"""
                SELECT ifNull(r.workload_a, '{f.UNDECLARED}') AS "workload", ifNull(r.workload_b, '{f.UNDECLARED}') AS "and workload",
                    sum(r.shared_tokens_mean * r.covered_us) / nullIf(sum(r.covered_us), 0) AS "shared tokens, mean",
                    max(r.shared_tokens_max) AS "at most", argMax(r.shared_tokens_end, r.window_start) AS now,
                    {f.COVERAGE} AS coverage, {f.weakest("r.register")} AS register, r.key_epoch AS "key epoch", {f.REASONS} AS reasons
                FROM workload_pairs${{grain}} AS r
                WHERE {f.in_range()} AND {f.RULES} AND {f.TIER}
                GROUP BY r.workload_a, r.workload_b, r.key_epoch
                ORDER BY "shared tokens, mean" DESC
                LIMIT 100
                """,
                width=12,
            ),
            _borne_by("Borne by workload", "workload", width=12, height=7),
            _borne_by("Borne by model", "model", width=12, height=7),
            _borne_by("Ranks that bear the most extra copies", "rank", width=24, height=9, limit=50),
        ],
    )


def _content() -> Row:
    by_cause = ", ".join(f"sumIf(r.blocks, r.what = '{what}') AS {what}" for what in ("evicted", "cleared", "restarted"))
    within = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    quantiles = ", ".join(f"h.1[arrayFirstIndex(x -> x >= blocks * {q}, c)] / 1e6 AS {name}" for name, q in within.items())
    in_time = f"$__timeFilter(as_of) AND {f.RULES}"
    return Row(
        "Content",
        [
            bars(
                "How soon lost content comes back, blocks, 14 days to the end of the range",
                "How long was content away before it was stored again, by how it was lost? Unit: blocks of the primary group, in whole "
                "days. Of several key epochs the newest. Lower bounds; coverage and register are in the table beside.",
                f"""
                SELECT {f.WITHIN} AS within, evicted, cleared, restarted
                FROM (
                    SELECT {f.SECONDS} AS s, {by_cause}
                    {_BACK} AND r.key_epoch = (SELECT max(key_epoch) FROM return_times_1d WHERE {_DAYS} AND {f.RULES})
                    GROUP BY s
                    ORDER BY s
                )
                """,
                over="within",
                unit="short",
                beside="How soon, and for how long: quantiles",
            ),
            table(
                "How soon, and for how long: quantiles",
                "How soon did evicted, cleared and restarted content come back, and how long had evicted content lasted (lifetime)? 14 "
                "days to the end of the range; unit: blocks, and seconds at most a quarter too high. Lower bounds; coverage is the lowest "
                "of any day and workload.",
                f"""
                SELECT what, blocks, {quantiles}, lowest AS "lowest coverage", register, key_epoch AS "key epoch"
                FROM (
                    SELECT what, key_epoch, sum(b) AS blocks, arraySort(groupArray((t, b))) AS h, arrayCumSum(h.2) AS c,
                        min(coverage) AS lowest, {f.weakest("registers")} AS register
                    FROM (
                        SELECT r.what AS what, r.key_epoch AS key_epoch, r.to_us AS t, sum(r.blocks) AS b, min(r.coverage) AS coverage,
                            replaceOne({f.weakest("r.register")}, ' ', '_') AS registers
                        {_BACK}
                        GROUP BY what, key_epoch, t
                    )
                    GROUP BY what, key_epoch
                )
                ORDER BY what
                """,
                units={"p50": "s", "p90": "s", "p99": "s"},
                width=12,
                height=10,
            ),
            table(
                "Shared prefixes with the most extra mass, at the newest instant of the range",
                "Which prefixes lie on several ranks at once? Unit: tokens beyond the first copy, length × (copies − 1); depth from the "
                "start of the prompt. Never add instants.",
                f"""
                SELECT place, lower(hex(content_id)) AS content, depth_tokens AS depth, tokens, copies, instances,
                    extra_tokens AS "extra tokens", extra_bytes AS "extra bytes", coverage, {f.in_words("register")} AS register,
                    arrayStringConcat(workloads, ', ') AS workloads, arrayStringConcat(models, ', ') AS models,
                    arrayStringConcat(ranks, ', ') AS ranks, first_seen AS "first seen", as_of AS "as of"
                FROM shared_prefixes FINAL
                WHERE {in_time} AND as_of = (SELECT max(as_of) FROM shared_prefixes WHERE {in_time})
                ORDER BY place
                """,
                units={"extra bytes": "bytes"},
            ),
        ],
    )


DASHBOARD = Dashboard(
    "fleet",
    "kvcensus: fleet overview",
    "What the fleet computed again, and how much KV cache holds the same twice. Two numbers, never added together, each with its coverage.",
    (
        variables.GRAIN,
        variables.STEP,
        variables.RULES_VERSION,
        variables.WORKLOAD,
        variables.MODEL,
        variables.TIER,
        variables.UNIT,
        variables.SIZE,
        variables.CAUSE,
    ),
    (variables.DEPLOYS,),
    (_numbers(), _repeat(), _footprint(), _content()),
)
