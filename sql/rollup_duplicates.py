"""The statements that roll windows of extra copies up to 5 minutes, 1 hour and 1 day; see :mod:`sql.rollup_sql`. Pure text."""

# ruff: noqa: S608 - the SQL is put together from this module's own text and whole numbers

from __future__ import annotations

from sql.rollup_parts import GRAINS, US, Chunk, Grain, counted_last, or_as_before, rolled_up, shared, spread, weakest

_SUMS = ("inside_token_us", "between_token_us", "inside_block_us", "between_block_us")
_BYTE_SUMS = ("inside_byte_ms", "between_byte_ms")
_MAXIMA = ("extra_tokens_max", "inside_tokens_max", "between_tokens_max", "extra_blocks_max", "inside_blocks_max", "between_blocks_max")
_ENDS = ("inside_tokens_end", "between_tokens_end", "inside_blocks_end", "between_blocks_end", "inside_bytes_end", "between_bytes_end")
_REGISTERS = ("register", "inside_register", "between_register")
_SCOPE = "scope, scope_key, tier, semantics_version, key_epoch"
_DUPLICATE_ROLLUP_COLUMNS = (
    *("grain", "window_start", "window_us", "scope", "scope_key", "tier", "part", "version", "is_deleted"),
    *("semantics_version", "key_epoch"),
    *("windows", "is_final", "complete", "as_of", "covered_us", "expected_ranks", "expected_us", "observed_us", "ranks", "late_changes"),
    *(*_SUMS, *_BYTE_SUMS, *_MAXIMA, "extra_bytes_max", *_ENDS, *_REGISTERS, "reasons"),
)


_NEWEST = ("expected_ranks", "ranks", *_ENDS)
_SCOPE_UNIT = "at, scope, scope_key, tier, semantics_version"
_COUNTED_TO = f"greatest({US}(as_of), {US}(window_start) + 1)"


def _duplicate_source(grain: Grain, chunk: Chunk, kept: bool) -> str:
    same = ", ".join((_SCOPE, "is_final", "as_of", "expected_ranks", "ranks", "late_changes", *_MAXIMA, "extra_bytes_max", *_ENDS))
    same += f", {', '.join(_REGISTERS)}, reasons"
    if grain.finer is not None:
        return _rolled_up_duplicates(grain.finer, grain, chunk, same)
    sums = ", ".join(f"{shared(name, 'toInt128')} AS {name}" for name in _SUMS)
    byte_sums = ", ".join(f"if({name} IS NULL, NULL, {shared(f'assumeNotNull({name})', 'toInt128')}) AS {name}" for name in _BYTE_SUMS)
    columns = f"""
        at, {same}, shards_reported >= shards AS complete, toUInt64(1) AS windows, till - since AS covered_us,
        covered_us * expected_ranks AS expected_us, {shared("observed_us")} AS observed_us, {sums}, {byte_sums}
    """
    counted = f"WITH {spread(f'{US}(as_of)')} {chunk.rows_of('duplicate_windows', columns, _COUNTED_TO, ranks=False)}"
    if not kept:
        return counted
    before = _rolled_up_duplicates(grain.name, grain, chunk, same)
    return or_as_before(counted, before, expired_duplicates(chunk), _SCOPE_UNIT)


def _rolled_up_duplicates(finer: str, grain: Grain, chunk: Chunk, same: str) -> str:
    columns = f"{same}, {', '.join(('complete', 'windows', 'covered_us', 'expected_us', 'observed_us', *_SUMS, *_BYTE_SUMS))}"
    return rolled_up(finer, grain, chunk, columns, columns, duplicates=True)


def duplicate_rollup(grain: Grain, chunk: Chunk, *, kept: bool = False) -> str:
    """Fill ``duplicate_rollups`` with the windows of ``chunk``, every scope of them; ``kept`` as in :func:`rank_rollup`."""
    sums = ", ".join(f"sum(s.{name}) AS {name}" for name in _SUMS)
    byte_sums = ", ".join(f"if(countIf(s.{name} IS NULL) > 0, NULL, sum(s.{name})) AS {name}" for name in _BYTE_SUMS)
    maxima = ", ".join(f"max(s.{name}) AS {name}" for name in _MAXIMA)
    bytes_max = "if(countIf(s.extra_bytes_max IS NULL) > 0, NULL, max(s.extra_bytes_max)) AS extra_bytes_max"
    newest = ", ".join(f"s.{name}" for name in _NEWEST)
    values = ", ".join(f"newest.{_NEWEST.index(name) + 1}" if name in _NEWEST else name for name in _DUPLICATE_ROLLUP_COLUMNS[11:])
    return f"""
        INSERT INTO duplicate_rollups ({", ".join(_DUPLICATE_ROLLUP_COLUMNS)})
        SELECT
            '{grain.name}', at, {grain.us}, scope, scope_key, tier,
            toUInt16(row_number() OVER (PARTITION BY at, scope, scope_key, tier ORDER BY as_of, semantics_version, key_epoch) - 1),
            {chunk.version}, 0, semantics_version, key_epoch, {values}
        FROM
        (
            SELECT
                s.at AS at, {_SCOPE}, sum(s.windows) AS windows, min(s.is_final) AS is_final, min(s.complete) AS complete,
                max(s.as_of) AS as_of, sum(s.covered_us) AS covered_us,
                sum(s.expected_us) AS expected_us, sum(s.observed_us) AS observed_us, argMax(({newest}), s.as_of) AS newest,
                max(s.late_changes) AS late_changes, {sums}, {byte_sums}, {maxima}, {bytes_max},
                {", ".join(weakest(name) for name in _REGISTERS)}, arraySort(groupUniqArrayArray(s.reasons)) AS reasons
            FROM ({_duplicate_source(grain, chunk, kept)}) AS s
            GROUP BY at, {_SCOPE}
        )
    """


def expired_duplicates(chunk: Chunk) -> str:
    """As :func:`expired_ranks`, of (window of 5 minutes, scope, key, tier, rules)."""
    grain = GRAINS[0]
    columns = f"{_SCOPE_UNIT}, false AS before, toUInt64(1) AS windows"
    counted = counted_last(
        "window_start, scope, scope_key, tier, semantics_version, windows",
        f"grain = '{grain.name}' AND {chunk.among(grain, 'window_start')}",
        duplicates=True,
    )
    return f"""
        SELECT {_SCOPE_UNIT} FROM
        (
            SELECT window_start AS at, scope, scope_key, tier, semantics_version, true AS before, windows
            FROM ({counted})
            UNION ALL
            {chunk.rows_of("duplicate_windows", columns, _COUNTED_TO, ranks=False)}
        )
        GROUP BY {_SCOPE_UNIT}
        HAVING sumIf(windows, before) > sumIf(windows, NOT before)
    """
