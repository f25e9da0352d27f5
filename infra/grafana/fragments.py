"""Pieces of SQL that several panels have in common. Pure text; ``r`` is the view that is read, the rest is Grafana's to fill in."""

from __future__ import annotations

CAUSES = ("evicted", "cleared", "restarted", "concurrent", "ambiguous_reload")
"""Each a series or column of its own: never added together."""

CAUSE_COLUMNS = ", ".join(f'"{cause.replace("_", " ")}"' for cause in CAUSES)

GRAIN, STEP = "${grain}", "${step}"
"""Suffixes of views: of those that tables and totals read, and those that series read, which may be finer."""

RULES = "semantics_version = ${semantics_version}"
"""One version of the counting rules: figures are never added across two."""

TIER = "tier = ${tier:singlequote}"

UNDECLARED = "(undeclared)"


def in_range(view: str = GRAIN) -> str:
    """All windows of ``view`` that reach into the range: as elsewhere, it widens to whole windows."""
    # multiIf, because the engine works it out before it looks at the sorting key; transform it would not.
    steps = ", ".join(f"endsWith('{view}', '{suffix}'), {seconds}" for suffix, seconds in (("_5m", 300), ("_1h", 3_600), ("_1d", 86_400)))
    longest = f"multiIf({steps}, 10)"
    return f"window_start > $__fromTime - {longest} AND window_start < $__toTime"


def chosen(column: str) -> str:
    """Narrowed to what is chosen of the variable ``column`` (workload or model)."""
    return f"$__conditionalAll(ifNull(r.{column}, '{UNDECLARED}') IN (${{{column}:singlequote}}), ${column})"


CHOSEN = f"{chosen('workload')} AND {chosen('model')}"

RANK_NAME = "concat(instance_id, '/', toString(dp_rank))"
_RANK = "${rank:singlequote}"
THE_RANK = (
    f"instance_id = substring({_RANK}, 1, length({_RANK}) - length(splitByChar('/', {_RANK})[-1]) - 1)"
    f" AND dp_rank = toInt32OrZero(splitByChar('/', {_RANK})[-1])"
)
"""The rank that is chosen, in the columns that tables are sorted by."""

COVERAGE = "if(sum(r.expected_us) > 0, least(1, sum(r.observed_us) / sum(r.expected_us)), 0)"
"""Observed over expected time, a share of 1, over any rows."""

REASONS = "arrayStringConcat(arraySort(groupUniqArrayArray(r.reasons)), ', ')"

_LOWERED = "['exact', 'lower_bound', 'indeterminate']"
_IN_WORDS = "['exact', 'lower bound', 'indeterminate']"

SUMMED_REGISTER = """multiIf(
    countIf(r.register != 'indeterminate') = 0, 'indeterminate', countIf(r.register != 'exact') > 0, 'lower bound', 'exact'
)"""
"""Of a sum over windows: what one window cannot tell is missing from it."""

SUMMED_SERIES = """multiIf(
    countIf(register != 'indeterminate') @ = 0, 'indeterminate', countIf(register != 'exact') @ > 0, 'lower bound', 'exact'
)"""
"""For :func:`series`: as :data:`SUMMED_REGISTER`."""

SECONDS = "bitShiftLeft(toUInt64(1), toUInt8(ceil(log2(greatest(r.to_us, 1048576))))) / 1e6"
"""The bucket's upper bound, up to the next power of two of microseconds: about 1 s, 2 s, 4 s..."""

WITHIN = """multiIf(
    s < 60, concat('≤ ', toString(round(s)), ' s'),
    s < 3600, concat('≤ ', toString(round(s / 60, 1)), ' min'),
    s < 86400, concat('≤ ', toString(round(s / 3600, 1)), ' h'),
    concat('≤ ', toString(round(s / 86400, 1)), ' d')
)"""
"""``s``, seconds, in words."""


def in_words(register: str) -> str:
    """One register as people read it."""
    return f"replaceOne(toString({register}), '_', ' ')"


def weakest(column: str) -> str:
    """The weakest of the registers in ``column``: of a mean, which a window that says nothing spoils."""
    return f"{_IN_WORDS}[max(indexOf({_LOWERED}, toString({column})))]"


def summed(cause: str, unit: str = "${unit}") -> str:
    """What was computed again of one cause. GPU time is NULL where something was, and no rate was known of any of it."""
    return f"if(sum(r.{cause}_{unit}) = 0 AND sum(r.{cause}_tokens) > 0, NULL, sum(r.{cause}_{unit}))"


def sums(unit: str = "${unit}", per_hour: bool = False) -> str:
    """A column for each cause, in ``unit``, over the range or per hour."""
    rate = " * 3.6e9 / any(r.window_us)" if per_hour else ""
    return ",\n    ".join(f'{summed(cause, unit)}{rate} AS "{cause.replace("_", " ")}"' for cause in CAUSES)


def mean(place: str, unit: str = "${size}") -> str:
    """Extra copies ``inside`` or ``between`` (or both: ``extra``), weighted by time."""
    return f"sum(r.{place}_{unit}_mean * r.covered_us) / nullIf(sum(r.covered_us), 0)"


def repeat_series(source: str, unit: str = "${unit}") -> str:
    """Repeat compute by cause and hour, over time, of ``source`` (FROM and WHERE)."""
    inner = f"""
        SELECT window_start AS time, r.key_epoch AS key_epoch, {sums(unit, per_hour=True)},
            {COVERAGE} AS coverage, {SUMMED_REGISTER} AS register
        {source}
        GROUP BY window_start, r.key_epoch
    """
    return series(inner, f"{CAUSE_COLUMNS}, coverage", SUMMED_SERIES)


def footprint_series(source: str) -> str:
    """Extra copies over time, of ``source`` (FROM and WHERE, of one scope and key)."""
    inner = f"""
        SELECT window_start AS time, r.key_epoch AS key_epoch, r.inside_${{size}}_mean AS inside, r.between_${{size}}_mean AS between,
            r.coverage AS coverage, {in_words("r.inside_register")} AS inside_register, {in_words("r.between_register")} AS between_register
        {source}
    """
    both = ", ', between ', ".join(f"{_IN_WORDS}[max(indexOf({_IN_WORDS}, {each}_register)) @]" for each in ("inside", "between"))
    return series(inner, "inside, between, coverage", f"concat('inside ', {both})")


def series(inner: str, columns: str, register: str, key: str = "") -> str:
    """Rows of ``inner`` (time, key_epoch, registers...) as series whose names say how they may be read.

    ``register`` is an expression over all rows of one series, with ``@`` where their window stands; ``key`` a column whose every value is a
    series of its own. Two key epochs in the range are two series as well.
    """
    rows = f"OVER (PARTITION BY key_epoch{f', {key}' if key else ''})"
    epoch = "if(uniqExact(ifNull(key_epoch, -1)) OVER () = 1, '', concat(', key epoch ', ifNull(toString(key_epoch), 'mixed')))"
    lead = f"{key}, ' ', " if key else ""
    name = f"concat({lead}'(', {register.replace('@', rows)}, {epoch}, ')')"
    return f"SELECT time, {name} AS read, {columns}\nFROM ({inner})\nORDER BY time"


def repeat_total(source: str) -> str:
    """Both numbers' first, as one row: of several key epochs the newest."""
    return f"""
        SELECT {sums()},
            {COVERAGE} AS coverage, {SUMMED_REGISTER} AS register, count() OVER () AS "key epochs"
        {source}
        GROUP BY r.key_epoch
        ORDER BY r.key_epoch DESC
        LIMIT 1
    """


def footprint_total(source: str) -> str:
    """Both numbers' second, as one row: of several key epochs the newest."""
    return f"""
        SELECT {mean("inside")} AS inside, {mean("between")} AS between,
            max(r.extra_${{size}}_max) AS "both at most", argMax(r.extra_${{size}}_end, r.window_start) AS "both now",
            {COVERAGE} AS coverage,
            {weakest("r.inside_register")} AS "inside register", {weakest("r.between_register")} AS "between register",
            count() OVER () AS "key epochs"
        {source}
        GROUP BY r.key_epoch
        ORDER BY r.key_epoch DESC NULLS LAST
        LIMIT 1
    """
