"""The statements that roll windows of ranks up to 5 minutes, 1 hour and 1 day. Pure text.

A longer window is counted from the windows in it, each as it stands now (FINAL), and replaces what was counted before: so a window that is
given out again under a higher version is never counted twice. What is added up is kept apart by everything that figures must not be added
across: life, rules (``semantics_version``), key, and what the rank declared. Each such *part* of a rank's (or scope's) window is one row.
"""

# ruff: noqa: S608 - the SQL is put together from this module's own text and whole numbers

from __future__ import annotations

from sql.result_rows import GROUP_STATES, GROUP_SUMS, HISTOGRAMS
from sql.rollup_parts import GRAINS, PART, ROW_END, US, Chunk, Grain, counted_last, or_as_before, rolled_up, shared, spread, weakest

_COUNTS = (
    "batches",
    "duplicate_batches",
    "lost_batches",
    "refused_batches",
    "unknown_events",
    "unresolved_blocks",
    "scrapes",
    "breaches_found",
)
_LAST = ("prefill_rate", "prefill_rate_source", "gpus_per_rank", "pool_blocks", "departed")
_HISTOGRAM_BASE = 65_536
_GROUPS = tuple(
    f"groups.{name}"
    for name in (
        "group_idx",
        *GROUP_SUMS,
        *GROUP_STATES,
        *(f"{each}_{side}" for each in HISTOGRAMS for side in ("buckets", "counts")),
    )
)
_RANK_ROLLUP_COLUMNS = (
    *("grain", "window_start", "window_us", "instance_id", "dp_rank", "part", "version", "is_deleted"),
    *PART.split(", "),
    *("windows", "is_final", "expected_us", "expected_until", "observed_us", "first_window", "last_window", "first_batch", "last_batch"),
    *_COUNTS,
    *("warmup", "reasons", "register", *_LAST),
    *_GROUPS,
)


_UNIT = "at, instance_id, dp_rank, life_id, semantics_version"


def _rank_source(grain: Grain, chunk: Chunk, kept: bool) -> str:
    groups = ", ".join(f"`{name}`" for name in _GROUPS)
    same = f"instance_id, dp_rank, {PART}, is_final, first_batch, last_batch, {', '.join(_COUNTS)}, warmup, reasons, register"
    same += f", {', '.join(_LAST)}, {groups}"
    if grain.finer is not None:
        return _rolled_up_ranks(grain.finer, grain, chunk, same)
    columns = f"""
        at, {same}, window_start >= at AS inside, arrayResize(emptyArrayInt64(), length(`groups.group_idx`)) AS nothing,
        toUInt64(1) AS windows, {shared("observed_us")} AS observed_us, window_start AS first_window, window_start AS last_window,
        toInt64(0) AS expected_us, window_end AS expected_until
    """
    counted = f"WITH {spread(ROW_END)} {chunk.rows_of('rank_windows', columns, ROW_END, ranks=True)}"
    if not kept:
        return counted
    before = f"SELECT * FROM ({_rolled_up_ranks(grain.name, grain, chunk, same)}) WHERE windows > 0"
    return or_as_before(counted, before, expired_ranks(chunk), _UNIT)


def _rolled_up_ranks(finer: str, grain: Grain, chunk: Chunk, same: str) -> str:
    more = "windows, observed_us, first_window, last_window, expected_us, expected_until"
    select = f"{same}, true AS inside, emptyArrayInt64() AS nothing, {more}"
    return rolled_up(finer, grain, chunk, f"{more}, {same}", select, duplicates=False)


def rank_rollup(grain: Grain, chunk: Chunk, *, kept: bool = False) -> str:
    """Fill ``rank_rollups`` with the windows of ``chunk``. ``kept``: what :func:`expired_ranks` tells is taken over as it was counted."""
    order = "(s.last_window, s.expected_until)"
    newest = "(last_window, ifNull(last_batch, toDateTime64(0, 6, 'UTC')), first_window, life_id)"
    counts = ", ".join(f"sumIf(s.{name}, s.inside) AS {name}" for name in _COUNTS)
    last = ", ".join(f"s.{name}" for name in _LAST)
    sums = ", ".join(f"s.`groups.{name}`" if grain.finer else f"if(s.inside, s.`groups.{name}`, s.nothing)" for name in GROUP_SUMS)
    states = ", ".join(f"s.`groups.{name}`" for name in GROUP_STATES)
    histograms = ", ".join(
        f"sumMapIf({_histogram_keys(name)}, arrayFlatten(s.`groups.{name}_counts`), s.inside) AS h_{name}" for name in HISTOGRAMS
    )
    if grain.finer is None:
        join = """
            LEFT JOIN (SELECT instance_id, dp_rank, min(first_window) AS first FROM known_ranks GROUP BY instance_id, dp_rank) AS k
            USING (instance_id, dp_rank)"""
        starts, over = "toDateTime64(at, 6, 'UTC')", f"toDateTime64(at, 6, 'UTC') + toIntervalSecond({grain.seconds})"
        begins = f"greatest({starts}, if(part_of_rules = 1, k.first, first_window))"
        ends = f"multiIf(part_of_rules < parts_of_rules, greatest({starts}, next_window), gone, least(until_of_rules, {over}), {over})"
        expected = f"greatest(toInt64(0), {US}({ends}) - {US}({begins})), {ends}"
        in_turn = f""",
                row_number() OVER of_rules AS part_of_rules,
                count() OVER all_of_rules AS parts_of_rules,
                leadInFrame(first_window) OVER (of_rules ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) AS next_window,
                argMax(last.{_LAST.index("departed") + 1}, {newest}) OVER all_of_rules AS gone,
                max(until) OVER all_of_rules AS until_of_rules"""
    else:
        join, expected, in_turn = "", "finer_us, until", ""
    return f"""
        INSERT INTO rank_rollups ({", ".join(f"`{name}`" for name in _RANK_ROLLUP_COLUMNS)})
        SELECT
            '{grain.name}', at, {grain.us}, instance_id, dp_rank, toUInt16(part_of_rank - 1), {chunk.version}, 0, {PART},
            windows, is_final, {expected}, observed_us, first_window, last_window, first_batch, last_batch,
            {", ".join(_COUNTS)}, warmup, reasons, register, {", ".join(f"last.{number}" for number, _ in enumerate(_LAST, 1))}, {_groups()}
        FROM
        (
            SELECT
                *, row_number() OVER (PARTITION BY at, instance_id, dp_rank ORDER BY first_window, {PART}) AS part_of_rank{in_turn}
            FROM
            (
                SELECT
                    s.at AS at, instance_id, dp_rank, {PART},
                    sum(s.windows) AS windows, min(s.is_final) AS is_final, sum(s.observed_us) AS observed_us,
                    sum(s.expected_us) AS finer_us, max(s.expected_until) AS until,
                    min(s.first_window) AS first_window, max(s.last_window) AS last_window,
                    min(s.first_batch) AS first_batch, max(s.last_batch) AS last_batch, {counts},
                    max(s.warmup) AS warmup, arraySort(groupUniqArrayArray(s.reasons)) AS reasons, {weakest("register")},
                    argMax(({last}), {order}) AS last,
                    sumMap(s.`groups.group_idx`, arrayMap(g -> toUInt8(1), s.`groups.group_idx`), {sums}) AS sums,
                    argMax((s.`groups.group_idx`, {states}), {order}) AS state, {histograms}
                FROM ({_rank_source(grain, chunk, kept)}) AS s
                GROUP BY at, instance_id, dp_rank, {PART}
            )
            WINDOW
                of_rules AS (PARTITION BY at, instance_id, dp_rank, semantics_version ORDER BY first_window, {PART}),
                all_of_rules AS (PARTITION BY at, instance_id, dp_rank, semantics_version)
        ) AS p{join}
    """


def _histogram_keys(name: str) -> str:
    """Group and bucket as one number, so that one map adds up the histograms of all groups."""
    of_group = f"arrayMap(b -> toInt64(g) * {_HISTOGRAM_BASE} + b, bs)"
    return f"arrayFlatten(arrayMap((g, bs) -> {of_group}, s.`groups.group_idx`, s.`groups.{name}_buckets`))"


def _groups() -> str:
    """The columns ``groups.*``: ``sums`` is (groups, ones, each sum), ``state`` (groups of the last row, each state)."""
    keys = "sums.1"
    columns = [keys, *(f"sums.{number}" for number, _ in enumerate(GROUP_SUMS, 3))]
    columns += [f"arrayMap(g -> state.{number}[indexOf(state.1, g)], {keys})" for number, _ in enumerate(GROUP_STATES, 2)]
    for name in HISTOGRAMS:
        mine = f"intDiv(x, {_HISTOGRAM_BASE}) = g"
        columns.append(f"arrayMap(g -> arrayMap(x -> x % {_HISTOGRAM_BASE}, arrayFilter(x -> {mine}, h_{name}.1)), {keys})")
        columns.append(f"arrayMap(g -> arrayFilter((n, x) -> {mine}, h_{name}.2, h_{name}.1), {keys})")
    return ", ".join(columns)


def expired_ranks(chunk: Chunk) -> str:
    """Which (window of 5 minutes, rank, life, rules) hold less than was counted before: retention took rows, as nothing else does.

    They stay as they were counted. Rows are missing if there are fewer, or if the first or last is gone.
    """
    grain = GRAINS[0]
    columns = f"{_UNIT}, false AS before, toUInt64(1) AS windows, window_start AS first_window, window_start AS last_window"
    counted = counted_last(
        "window_start, instance_id, dp_rank, life_id, semantics_version, windows, first_window, last_window",
        f"grain = '{grain.name}' AND {chunk.among(grain, 'window_start')}{chunk.of_instances()}",
        duplicates=False,
    )
    return f"""
        SELECT {_UNIT} FROM
        (
            SELECT window_start AS at, instance_id, dp_rank, life_id, semantics_version, true AS before, windows, first_window, last_window
            FROM ({counted})
            WHERE windows > 0
            UNION ALL
            {chunk.rows_of("rank_windows", columns, ROW_END, ranks=True)}
        )
        GROUP BY {_UNIT}
        HAVING sumIf(windows, before) > sumIf(windows, NOT before)
            OR (max(before) AND minIf(first_window, before) < minIf(first_window, NOT before))
            OR (max(before) AND maxIf(last_window, before) > maxIf(last_window, NOT before))
    """
