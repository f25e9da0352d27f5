"""The statements that roll windows up to 5 minutes, 1 hour and 1 day. Pure text: whole numbers are the only values put into it.

A longer window is counted from the windows in it, each as it stands now (FINAL), and replaces what was counted before: so a window that is
given out again under a higher version is never counted twice. What is added up is kept apart by everything that figures must not be added
across: life, rules (``semantics_version``), key, and what the rank declared. Each such *part* of a rank's (or scope's) window is one row.
"""

# ruff: noqa: S608 - the SQL is put together from this module's own text and whole numbers

from __future__ import annotations

from dataclasses import dataclass

from sql.result_rows import GROUP_STATES, GROUP_SUMS, HISTOGRAMS

_US = "toUnixTimestamp64Micro"
_SECOND = 1_000_000


@dataclass(frozen=True)
class Grain:
    """A length of time to which windows are rolled up; ``finer`` is what it is counted from (``None``: the windows themselves)."""

    name: str
    seconds: int
    finer: str | None

    @property
    def us(self) -> int:
        """Its length in microseconds."""
        return self.seconds * _SECOND


GRAINS = (Grain("5m", 300, None), Grain("1h", 3_600, "5m"), Grain("1d", 86_400, "1h"))
"""Finest first. Each is a whole number of the one before."""

_PART = "life_id, semantics_version, workload, model, reuse_reporting, removals, kv_connector, key_epoch, canary"
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
_DEPARTURE_DAYS = 7
_RANK_ROLLUP_COLUMNS = (
    *("grain", "window_start", "window_us", "instance_id", "dp_rank", "part", "version", "is_deleted"),
    *_PART.split(", "),
    *("windows", "is_final", "expected_us", "expected_until", "observed_us", "first_window", "last_window", "first_batch", "last_batch"),
    *_COUNTS,
    *("warmup", "reasons", "register", *_LAST),
    "groups.group_idx",
    *(f"groups.{name}" for name in (*GROUP_SUMS, *GROUP_STATES)),
    *(f"groups.{name}_{side}" for name in HISTOGRAMS for side in ("buckets", "counts")),
)


def _time(us: int) -> str:
    return f"fromUnixTimestamp64Micro({us}, 'UTC')"


def _second(us: int) -> str:
    return f"toDateTime({us // _SECOND}, 'UTC')"


@dataclass(frozen=True)
class Chunk:
    """What one statement builds anew: windows of a grain that start in [``start_us``, ``end_us``), whole ones.

    ``chosen`` is a subquery of (window_start, instance_id), for duplicates of window_start alone: only those. ``longest_us``: of any row.
    """

    start_us: int
    end_us: int
    chosen: str
    version: int
    longest_us: int = 0


def cut(grain: Grain) -> str:
    """The windows of ``grain`` that a row reaches into, as an array of DateTime."""
    first, last = f"intDiv({_US}(window_start), {grain.us})", f"intDiv({_US}(window_start) + window_us - 1, {grain.us})"
    return f"arrayMap(n -> toDateTime(n * {grain.seconds}, 'UTC'), range(toUInt32({first}), toUInt32({last}) + 1))"


def _shared(value: str, end: str, grain: Grain, kind: str = "toInt64") -> str:
    """The part of ``value``, spread evenly from ``window_start`` to ``end``, that lies in the window ``at`` of ``grain``.

    Shares are differences of a running whole, so that those of neighbours add up to the value.
    """
    start_us, end_us = f"{_US}(window_start)", end
    from_us = f"greatest({start_us}, toInt64(toUnixTimestamp(at)) * {_SECOND})"
    to_us = f"least({end_us}, toInt64(toUnixTimestamp(at)) * {_SECOND} + {grain.us})"
    whole = f"{from_us} = {start_us} AND {to_us} = {end_us}"
    until = "intDiv(toInt128({value}) * greatest(toInt64(0), {edge} - {start}), greatest(toInt64(1), {end} - {start}))"
    high = until.format(value=value, edge=to_us, start=start_us, end=end_us)
    low = until.format(value=value, edge=from_us, start=start_us, end=end_us)
    return f"if({whole}, {kind}({value}), {kind}({high} - {low}))"


# -- ranks ----------------------------------------------------------------------------------------------------------


def _rank_source(grain: Grain, chunk: Chunk) -> str:
    groups = ", ".join(
        f"`groups.{name}`"
        for name in (
            "group_idx",
            *GROUP_SUMS,
            *GROUP_STATES,
            *(f"{each}_{side}" for each in HISTOGRAMS for side in ("buckets", "counts")),
        )
    )
    same = f"instance_id, dp_rank, {_PART}, is_final, first_batch, last_batch, {', '.join(_COUNTS)}, warmup, reasons, register"
    same += f", {', '.join(_LAST)}, {groups}"
    if grain.finer is None:
        seen = _shared("observed_us", f"({_US}(window_start) + window_us)", grain)
        return f"""
            SELECT at, {same}, window_start >= at AS inside, toUInt64(1) AS windows, {seen} AS observed_us,
                window_start AS first_window, window_start AS last_window, toInt64(0) AS expected_us,
                window_end AS expected_until
            FROM
            (
                SELECT window_start, window_us, window_end, observed_us, {same} FROM rank_windows FINAL
                PREWHERE window_start >= {_time(chunk.start_us - chunk.longest_us)} AND window_start < {_time(chunk.end_us)}
                WHERE window_end > {_time(chunk.start_us)}
            )
            ARRAY JOIN {cut(grain)} AS at
            WHERE at >= {_second(chunk.start_us)} AND at < {_second(chunk.end_us)} AND (at, instance_id) IN ({chunk.chosen})
        """
    return f"""
        SELECT toDateTime(intDiv(toUnixTimestamp(window_start), {grain.seconds}) * {grain.seconds}, 'UTC') AS at, {same}, true AS inside,
            windows, observed_us, first_window, last_window, expected_us, expected_until
        FROM
        (
            SELECT window_start, windows, observed_us, first_window, last_window, expected_us, expected_until, {same}
            FROM rank_rollups FINAL
            WHERE grain = '{grain.finer}' AND window_start >= {_second(chunk.start_us)} AND window_start < {_second(chunk.end_us)}
        )
        WHERE (at, instance_id) IN ({chunk.chosen})
    """


def rank_rollup(grain: Grain, chunk: Chunk) -> str:
    """Fill ``rank_rollups`` with the ``chosen`` windows of ``grain``."""
    order = "(s.last_window, s.expected_until)"
    counts = ", ".join(f"sumIf(s.{name}, s.inside) AS {name}" for name in _COUNTS)
    last = ", ".join(f"argMax(tuple(s.{name}), {order}).1 AS {name}" for name in _LAST)
    sums = ", ".join(f"s.`groups.{name}`" for name in GROUP_SUMS)
    states = ", ".join(f"s.`groups.{name}`" for name in GROUP_STATES)
    histograms = ", ".join(
        f"sumMapIf({_histogram_keys(name)}, arrayFlatten(s.`groups.{name}_counts`), s.inside) AS h_{name}" for name in HISTOGRAMS
    )
    if grain.finer is None:
        join = """
            LEFT JOIN (SELECT instance_id, dp_rank, min(first_window) AS first FROM known_ranks GROUP BY instance_id, dp_rank) AS k
            USING (instance_id, dp_rank)"""
        begins = "greatest(toDateTime64(at, 6, 'UTC'), if(part_of_rules = 1, k.first, first_window))"
        ends = f"multiIf(part_of_rules < parts_of_rules, next_window, departed, until, toDateTime64(at, 6, 'UTC') + {grain.seconds})"
        expected = f"greatest(toInt64(0), {_US}({ends}) - {_US}({begins})), {ends}"
    else:
        join, expected = "", "finer_us, until"
    return f"""
        INSERT INTO rank_rollups ({", ".join(f"`{name}`" for name in _RANK_ROLLUP_COLUMNS)})
        SELECT
            '{grain.name}', at, {grain.us}, instance_id, dp_rank, toUInt16(part_of_rank - 1), {chunk.version}, 0, {_PART},
            windows, is_final, {expected}, observed_us, first_window, last_window, first_batch, last_batch,
            {", ".join(_COUNTS)}, warmup, reasons, register, {", ".join(_LAST)}, {_groups()}
        FROM
        (
            SELECT
                *, arraySort(arrayDistinct(arrayConcat(sums.1, state.1))) AS keys,
                row_number() OVER (PARTITION BY at, instance_id, dp_rank ORDER BY first_window, {_PART}) AS part_of_rank,
                row_number() OVER of_rules AS part_of_rules,
                count() OVER (PARTITION BY at, instance_id, dp_rank, semantics_version) AS parts_of_rules,
                leadInFrame(first_window) OVER (of_rules ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) AS next_window
            FROM
            (
                SELECT
                    s.at AS at, instance_id, dp_rank, {_PART},
                    sum(s.windows) AS windows, min(s.is_final) AS is_final, sum(s.observed_us) AS observed_us,
                    sum(s.expected_us) AS finer_us, max(s.expected_until) AS until,
                    min(s.first_window) AS first_window, max(s.last_window) AS last_window,
                    min(s.first_batch) AS first_batch, max(s.last_batch) AS last_batch, {counts},
                    max(s.warmup) AS warmup, arraySort(groupUniqArrayArray(s.reasons)) AS reasons, {_weakest("register")}, {last},
                    sumMapIf(s.`groups.group_idx`, arrayMap(g -> toUInt8(1), s.`groups.group_idx`), {sums}, s.inside) AS sums,
                    argMax((s.`groups.group_idx`, {states}), {order}) AS state, {histograms}
                FROM ({_rank_source(grain, chunk)}) AS s
                GROUP BY at, instance_id, dp_rank, {_PART}
            )
            WINDOW of_rules AS (PARTITION BY at, instance_id, dp_rank, semantics_version ORDER BY first_window, {_PART})
        ) AS p{join}
    """


def _weakest(register: str) -> str:
    weakest = f"max(s.{register} = 'indeterminate'), 'indeterminate', max(s.{register} = 'lower_bound'), 'lower_bound', 'exact'"
    return f"multiIf({weakest}) AS {register}"


def _histogram_keys(name: str) -> str:
    """Group and bucket as one number, so that one map adds up the histograms of all groups."""
    of_group = f"arrayMap(b -> toInt64(g) * {_HISTOGRAM_BASE} + b, bs)"
    return f"arrayFlatten(arrayMap((g, bs) -> {of_group}, s.`groups.group_idx`, s.`groups.{name}_buckets`))"


def _groups() -> str:
    """The columns ``groups.*``: ``sums`` is (groups, ones, each sum), ``state`` (groups, each state), ``keys`` the groups of either."""
    columns = ["keys"]
    columns += [f"arrayMap(g -> sums.{number}[indexOf(sums.1, g)], keys)" for number, _ in enumerate(GROUP_SUMS, 3)]
    columns += [f"arrayMap(g -> state.{number}[indexOf(state.1, g)], keys)" for number, _ in enumerate(GROUP_STATES, 2)]
    for name in HISTOGRAMS:
        mine = f"intDiv(x, {_HISTOGRAM_BASE}) = g"
        columns.append(f"arrayMap(g -> arrayMap(x -> x % {_HISTOGRAM_BASE}, arrayFilter(x -> {mine}, h_{name}.1)), keys)")
        columns.append(f"arrayMap(g -> arrayFilter((n, x) -> {mine}, h_{name}.2, h_{name}.1), keys)")
    return ", ".join(columns)


def absent_ranks(chunk: Chunk) -> str:
    """Give each rank that was expected in one of the ``chosen`` windows of 5 minutes, and has no row in it, one that says so.

    Expected is a rank from its first window on, unless it had departed and was not heard of again. ``chosen``: of window_start alone.
    """
    grain = GRAINS[0]
    within = f"grain = '{grain.name}' AND {_within(chunk)}"
    starts_us = f"toInt64(toUnixTimestamp(w.at)) * {_SECOND}"
    declared = ", ".join(f"k.d.{number}" for number in range(1, 9))
    return f"""
        INSERT INTO rank_rollups
            (grain, window_start, window_us, instance_id, dp_rank, part, version, is_deleted, {_PART},
             windows, is_final, expected_us, expected_until, observed_us, first_window, last_window, reasons, register)
        SELECT
            '{grain.name}', w.at, {grain.us}, k.instance_id, k.dp_rank, 0, {chunk.version}, 0, '', {declared},
            0, true, {starts_us} + {grain.us} - greatest({starts_us}, {_US}(k.first)), toDateTime64(w.at, 6, 'UTC') + {grain.seconds}, 0,
            w.at, w.at, ['absent'], 'indeterminate'
        FROM
        (
            SELECT a.at AS at, r.*, 1 AS one
            FROM (SELECT DISTINCT window_start AS at FROM ({chunk.chosen}) WHERE {_within(chunk)}) AS a
            CROSS JOIN (SELECT DISTINCT instance_id, dp_rank FROM rank_states) AS r
            WHERE (at, instance_id, dp_rank) NOT IN (SELECT window_start, instance_id, dp_rank FROM rank_rollups FINAL WHERE {within})
        ) AS w
        INNER JOIN
        (
            SELECT instance_id, dp_rank, min(first) AS first, max(newest) AS newest, max(departed) AS departed, argMaxMerge(declared) AS d
            FROM rank_states GROUP BY instance_id, dp_rank
        ) AS k ON k.instance_id = w.instance_id AND k.dp_rank = w.dp_rank
        ASOF LEFT JOIN
        (
            SELECT instance_id, dp_rank, window_start, argMax(departed, last_window) AS gone
            FROM rank_rollups FINAL
            WHERE grain = '{grain.name}' AND windows > 0 AND window_start < {_second(chunk.end_us)}
                AND window_start >= {_second(chunk.start_us)} - toIntervalDay({_DEPARTURE_DAYS})
                AND (instance_id, dp_rank) IN
                (
                    SELECT instance_id, dp_rank FROM rank_states GROUP BY instance_id, dp_rank
                    HAVING max(departed) > toDateTime64(0, 6, 'UTC')
                )
            GROUP BY instance_id, dp_rank, window_start
        ) AS b ON b.instance_id = w.instance_id AND b.dp_rank = w.dp_rank AND b.window_start < w.at
        WHERE k.first < w.at + toIntervalSecond({grain.seconds}) AND NOT b.gone AND NOT (k.departed = k.newest AND k.departed < w.at)
    """


def _within(chunk: Chunk) -> str:
    return f"window_start >= {_second(chunk.start_us)} AND window_start < {_second(chunk.end_us)}"


# -- duplicates -----------------------------------------------------------------------------------------------------


_SUMS = ("inside_token_us", "between_token_us", "inside_block_us", "between_block_us")
_BYTE_SUMS = ("inside_byte_ms", "between_byte_ms")
_MAXIMA = ("extra_tokens_max", "inside_tokens_max", "between_tokens_max", "extra_blocks_max", "inside_blocks_max", "between_blocks_max")
_ENDS = ("inside_tokens_end", "between_tokens_end", "inside_blocks_end", "between_blocks_end", "inside_bytes_end", "between_bytes_end")
_REGISTERS = ("register", "inside_register", "between_register")
_SCOPE = "scope, scope_key, tier, semantics_version, key_epoch"
_DUPLICATE_ROLLUP_COLUMNS = (
    *(
        "grain",
        "window_start",
        "window_us",
        "scope",
        "scope_key",
        "tier",
        "part",
        "version",
        "is_deleted",
        "semantics_version",
        "key_epoch",
    ),
    *("windows", "is_final", "complete", "as_of", "covered_us", "expected_ranks", "expected_us", "observed_us", "ranks", "late_changes"),
    *(*_SUMS, *_BYTE_SUMS, *_MAXIMA, "extra_bytes_max", *_ENDS, *_REGISTERS, "reasons"),
)


def _duplicate_source(grain: Grain, chunk: Chunk) -> str:
    same = ", ".join((_SCOPE, "is_final", "as_of", "expected_ranks", "ranks", "late_changes", *_MAXIMA, "extra_bytes_max", *_ENDS))
    same += f", {', '.join(_REGISTERS)}, reasons"
    if grain.finer is None:
        end = f"{_US}(as_of)"
        sums = ", ".join(f"{_shared(name, end, grain, 'toInt128')} AS {name}" for name in _SUMS)
        byte_sums = ", ".join(
            f"if({name} IS NULL, NULL, {_shared(f'assumeNotNull({name})', end, grain, 'toInt128')}) AS {name}" for name in _BYTE_SUMS
        )
        covered = _shared(f"({end} - {_US}(window_start))", end, grain)
        return f"""
            SELECT at, {same}, complete, toUInt64(1) AS windows, {covered} AS covered_us, covered_us * expected_ranks AS expected_us,
                {_shared("observed_us", end, grain)} AS observed_us, {sums}, {byte_sums}
            FROM
            (
                SELECT
                    window_start, window_us, observed_us, shards_reported >= shards AS complete, {", ".join((*_SUMS, *_BYTE_SUMS))}, {same}
                FROM duplicate_windows FINAL
                PREWHERE window_start >= {_time(chunk.start_us - chunk.longest_us)} AND window_start < {_time(chunk.end_us)}
                WHERE window_end > {_time(chunk.start_us)}
            )
            ARRAY JOIN {cut(grain)} AS at
            WHERE at >= {_second(chunk.start_us)} AND at < {_second(chunk.end_us)} AND at IN ({chunk.chosen})
        """
    more = ", ".join(("complete", "windows", "covered_us", "expected_us", "observed_us", *_SUMS, *_BYTE_SUMS))
    return f"""
        SELECT toDateTime(intDiv(toUnixTimestamp(window_start), {grain.seconds}) * {grain.seconds}, 'UTC') AS at, {same}, {more}
        FROM (SELECT window_start, {same}, {more} FROM duplicate_rollups FINAL WHERE grain = '{grain.finer}' AND {_within(chunk)})
        WHERE at IN ({chunk.chosen})
    """


def duplicate_rollup(grain: Grain, chunk: Chunk) -> str:
    """Fill ``duplicate_rollups`` with the ``chosen`` windows of ``grain``, every scope of them."""
    sums = ", ".join(f"sum(s.{name}) AS {name}" for name in _SUMS)
    byte_sums = ", ".join(f"if(countIf(s.{name} IS NULL) > 0, NULL, sum(s.{name})) AS {name}" for name in _BYTE_SUMS)
    maxima = ", ".join(f"max(s.{name}) AS {name}" for name in _MAXIMA)
    bytes_max = "if(countIf(s.extra_bytes_max IS NULL) > 0, NULL, max(s.extra_bytes_max)) AS extra_bytes_max"
    ends = ", ".join(f"argMax(tuple(s.{name}), s.as_of).1 AS {name}" for name in _ENDS)
    return f"""
        INSERT INTO duplicate_rollups ({", ".join(_DUPLICATE_ROLLUP_COLUMNS)})
        SELECT
            '{grain.name}', at, {grain.us}, scope, scope_key, tier,
            toUInt16(row_number() OVER (PARTITION BY at, scope, scope_key, tier ORDER BY as_of, semantics_version, key_epoch) - 1),
            {chunk.version}, 0, semantics_version, key_epoch, {", ".join(_DUPLICATE_ROLLUP_COLUMNS[11:])}
        FROM
        (
            SELECT
                s.at AS at, {_SCOPE}, sum(s.windows) AS windows, min(s.is_final) AS is_final, min(s.complete) AS complete,
                max(s.as_of) AS as_of, sum(s.covered_us) AS covered_us, argMax(s.expected_ranks, s.as_of) AS expected_ranks,
                sum(s.expected_us) AS expected_us, sum(s.observed_us) AS observed_us, argMax(s.ranks, s.as_of) AS ranks,
                max(s.late_changes) AS late_changes, {sums}, {byte_sums}, {maxima}, {bytes_max}, {ends},
                {", ".join(_weakest(name) for name in _REGISTERS)}, arraySort(groupUniqArrayArray(s.reasons)) AS reasons
            FROM ({_duplicate_source(grain, chunk)}) AS s
            GROUP BY at, {_SCOPE}
        )
    """


# -- what is left over ----------------------------------------------------------------------------------------------

RANK_KEY = "window_start, instance_id, dp_rank"
DUPLICATE_KEY = "window_start, scope, scope_key, tier"


def leftovers(table: str, grain: Grain, chunk: Chunk) -> str:
    """Delete parts of the windows just written (those of ``chunk.version``) that were not written again: there are fewer than before."""
    key = RANK_KEY if table == "rank_rollups" else DUPLICATE_KEY
    within = f"grain = '{grain.name}' AND {_within(chunk)}"
    return f"""
        INSERT INTO {table} (grain, {key}, part, version, is_deleted)
        SELECT grain, {key}, part, {chunk.version}, 1 FROM {table} FINAL
        WHERE {within} AND version < {chunk.version}
            AND ({key}) IN (SELECT {key} FROM {table} FINAL WHERE {within} AND version = {chunk.version})
    """


def expired(chunk: Chunk, *, duplicates: bool) -> str:
    """Which of the ``chosen`` windows of 5 minutes hold fewer rows than were counted before: retention took some, so they stay as they are."""
    grain = GRAINS[0]
    table, rollup = ("duplicate_windows", "duplicate_rollups") if duplicates else ("rank_windows", "rank_rollups")
    key = "window_start" if duplicates else "window_start, instance_id"
    held = "at" if duplicates else "at, instance_id"
    only = "AND scope = 'fleet' AND tier = 'GPU'" if duplicates else ""
    return f"""
        SELECT {key} FROM
        (
            SELECT {key}, sum(windows) AS counted FROM {rollup} FINAL
            WHERE grain = '{grain.name}' AND {_within(chunk)} AND ({key}) IN ({chunk.chosen}) {only}
            GROUP BY {key}
        ) AS r
        LEFT JOIN
        (
            SELECT at AS window_start{"" if duplicates else ", instance_id"}, count() AS here FROM
            (
                SELECT window_start, window_us{"" if duplicates else ", instance_id"} FROM {table} FINAL
                PREWHERE window_start >= {_time(chunk.start_us - chunk.longest_us)} AND window_start < {_time(chunk.end_us)}
                WHERE window_end > {_time(chunk.start_us)} {only}
            )
            ARRAY JOIN {cut(grain)} AS at
            GROUP BY {held}
        ) AS b USING ({key})
        WHERE counted > here
    """
