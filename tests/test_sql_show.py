"""``kvcensus show`` and ``kvcensus sql``: what they print, and that the named views say the same."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from console.commands.show import show
from console.commands.sql import sql
from console.detail_tables import render_recomputes
from console.figure_tables import render
from schemas.errors import KvcensusError
from schemas.records import RankWindow, Recompute
from sql import migrate, store
from sql.database import Database
from sql.figure_parts import durations, primaries
from sql.figures import assemble, primary_group
from sql.rows import TableRows
from sql.times import iso
from sql.total_types import with_groups_of_life
from sql.totals import groups_of_lives, totals_from_records
from tests.sql_records import (
    START_US,
    WINDOW_US,
    duplicate_window,
    insert,
    random_duplicate_windows,
    random_rank_windows,
    random_shared_prefixes,
)

RNG = random.Random(11)
RANKS = random_rank_windows(RNG)
DUPLICATES = random_duplicate_windows(RNG)
TRUNKS = random_shared_prefixes(RNG)
CAUSES = ("evicted", "cleared", "restarted", "concurrent", "ambiguous_reload")
RECOMPUTES = [
    Recompute(
        "i0", n % 2, 0, "l", n, 0, 2 if n else 1, 1, CAUSES[n % 5], bytes([n]) * 16, bytes([n + 1]) * 16 if n % 3 else None, 16,
        START_US + n * WINDOW_US, START_US + n * WINDOW_US + 10, START_US + n * WINDOW_US + 2_000_010, 2_000_000,
        bytes([n]) * 16, None, 500 * n if n % 2 else None,
    )
    for n in range(12)
]  # fmt: skip
"""One per window, the first by an older version of the rules."""
PRIMARY = {
    (*life, version): primary.group_idx
    for version in (1, 2)
    for life, groups in groups_of_lives(row for row in RANKS if row.semantics_version == version).items()
    if (primary := primary_group(with_groups_of_life([], groups)))
}
"""(instance, rank, life, version of the rules) -> primary group."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, Path]]:
    """An owned store with random records in it, some of them twice."""
    data_dir = tmp_path_factory.mktemp("data")
    with store.connect(None, data_dir, own=True) as database:
        migrate.apply(database)
        insert(database, [*RANKS, *RANKS[::3], *DUPLICATES, *DUPLICATES[::3], *TRUNKS, *RECOMPUTES, *RECOMPUTES[::2]])
        yield database, data_dir


def run(command: Any, *arguments: str, data_dir: Path, **options: Any) -> Result:
    return CliRunner().invoke(command, [*arguments, "--data-dir", str(data_dir)], catch_exceptions=False, **options)


def printed(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_json_is_the_document_of_the_records(filled: tuple[Database, Path]) -> None:
    data_dir = filled[1]
    assert printed(run(show, "--json", data_dir=data_dir)) == assemble(totals_from_records(RANKS, DUPLICATES, shared_prefixes=TRUNKS))
    since, until = START_US + 3 * WINDOW_US + 7, START_US + 8 * WINDOW_US - 5
    for by in ("rank", "workload", "model"):
        found = printed(run(show, "all", "--json", "--by", by, "--since", iso(since), "--until", f"{until / 1e6:.6f}", data_dir=data_dir))
        expected = totals_from_records(RANKS, DUPLICATES, since_us=since, until_us=until, by=by, shared_prefixes=TRUNKS)
        assert found == assemble(expected)
    old = printed(run(show, "--json", "--semantics-version", "1", data_dir=data_dir))
    assert old == assemble(totals_from_records(RANKS, DUPLICATES, shared_prefixes=TRUNKS, semantics_version=1))
    assert old["warnings"][0] == "only rows of semantics_version 1 are summed; rows of 2 in this span are left out"
    none = run(show, "--semantics-version", "7", data_dir=data_dir).output
    assert none == "Nothing was counted by semantics_version 7 in this span; there are rows of 2, 1.\n"


def test_tables_show_coverage_and_register_with_every_figure(filled: tuple[Database, Path]) -> None:
    data_dir = filled[1]
    document = assemble(totals_from_records(RANKS, DUPLICATES))
    for part, heading in (
        ("repeat-compute", "Repeat compute, by cause (never added together)"),
        ("duplicates", "Duplicate KV footprint, GPU: extra copies"),
        ("ranks", "Ranks: tokens computed again, by cause"),
        ("coverage", "Ranks, least covered first"),
    ):
        output = run(show, part, data_dir=data_dir).output
        assert heading in output
        assert "coverage" in output
        assert document["span"]["since"] in output
        assert "semantics_version 2" in output
        assert ("register" in output) or ("lower bound" in output) or part == "coverage" or "indeterminate" in output
        assert all(len(line) <= 160 for line in output.splitlines())
    everything = run(show, data_dir=data_dir).output
    mean = document["duplicate_footprint"]["extra_tokens"]["mean"]
    assert f"{mean:,.1f}" in everything
    assert "cannot tell" in everything
    by_workload = run(show, "--by", "workload", data_dir=data_dir).output
    assert "(undeclared)" in by_workload
    assert "chat" in by_workload


@pytest.mark.parametrize("width", [80, 120, 200])
def test_tables_lose_nothing_in_a_narrow_terminal(width: int) -> None:
    document = assemble(totals_from_records(RANKS, DUPLICATES, shared_prefixes=TRUNKS))
    by = assemble(totals_from_records(RANKS, DUPLICATES, shared_prefixes=TRUNKS, by="workload"))
    for each in (document, by):
        console = Console(width=width, force_terminal=False, highlight=False, markup=False)
        with console.capture() as shown:
            render(each, "all", console)
        lines = shown.get().splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width
        text = " ".join(shown.get().split())
        for word in ("GPU time", "away, p90", "inside + between", "bytes", "chat + code", "Shared prefixes", "unreused", "resident"):
            assert word in text
        assert f"{document['repeat_compute']['evicted']['tokens']:,}" in text
        assert "…" not in text


def test_shared_prefixes_are_shown_as_many_as_asked(filled: tuple[Database, Path]) -> None:
    data_dir = filled[1]
    everything = printed(run(show, "prefixes", "--json", "--limit", "100", data_dir=data_dir))["shared_prefixes"]
    one = printed(run(show, "prefixes", "--json", "--limit", "1", data_dir=data_dir))["shared_prefixes"]
    assert one["trunks"] == everything["trunks"][:1]
    assert len(everything["trunks"]) > 1
    output = run(show, "prefixes", data_dir=data_dir).output
    assert everything["trunks"][0]["content_id"] in output
    assert everything["as_of"] in output
    nothing = run(show, "prefixes", "--until", iso(START_US + WINDOW_US), data_dir=data_dir).output
    assert "none were told in this span" in nothing


def test_the_records_behind_repeat_compute(filled: tuple[Database, Path]) -> None:
    data_dir = filled[1]
    document = printed(run(show, "recomputes", "--json", data_dir=data_dir))
    assert document["found"] == 11, "of the newest version of the rules"
    assert [each["seq"] for each in document["recomputes"]] == list(range(11, 0, -1)), "the newest first"
    whole = assemble(totals_from_records(RANKS, DUPLICATES))
    assert {name: document[name] for name in ("coverage", "register", "reasons")} == {
        name: whole["repeat_compute"][name] for name in ("coverage", "register", "reasons")
    }
    second = document["recomputes"][-2]
    assert second == {
        "instance_id": "i0", "dp_rank": 0, "group_idx": 0, "life_id": "l", "seq": 2, "block_index": 0, "cause": "restarted", "tokens": 16,
        "block_id": "02" * 16, "content_id": "03" * 16, "parent_block_id": None, "parent_content_id": "02" * 16,
        "stored": iso(START_US + 2 * WINDOW_US), "lost": iso(START_US + 2 * WINDOW_US + 10),
        "back": iso(START_US + 2 * WINDOW_US + 2_000_010), "held_seconds": 1e-05, "elapsed_seconds": 2.0, "gpu_seconds": None,
    }  # fmt: skip

    def listed(*options: str) -> tuple[int, list[int]]:
        found = printed(run(show, "recomputes", "--json", *options, data_dir=data_dir))
        return found["found"], [each["seq"] for each in found["recomputes"]]

    assert listed("--limit", "2") == (11, [11, 10])
    assert listed("--rank", "i0/1", "--cause", "cleared") == (2, [11, 1])
    assert listed("--cause", "cleared", "--cause", "evicted") == (5, [11, 10, 6, 5, 1])
    assert listed("--rank", "i9/0") == (0, [])
    assert listed("--since", iso(START_US + 3 * WINDOW_US), "--until", iso(START_US + 5 * WINDOW_US)) == (2, [4, 3])
    assert listed("--semantics-version", "1") == (1, [0])
    assert run(show, "recomputes", "--rank", "i9/0", data_dir=data_dir).output == "Nothing is known of rank i9/0 in this span.\n"
    two = printed(run(show, "recomputes", "--json", "--rank", "i9/0", "--rank", "i0/1", data_dir=data_dir))
    assert (two["found"] > 0, two["warnings"][-1]) == (True, "Nothing is known of rank i9/0 in this span")
    output = run(show, "recomputes", "--limit", "3", data_dir=data_dir).output
    assert "the last 3 of 11" in output
    assert "ambiguous reload" in output
    for width in (80, 120, 200):
        console = Console(width=width, force_terminal=False, highlight=False, markup=False)
        with console.capture() as shown:
            render_recomputes(document, console)
        lines = shown.get().splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width
        assert sum("i0/" in line for line in lines) == 11, "one line each"
    one = printed(run(show, "recomputes", "--json", "--rank", "i0/1", data_dir=data_dir))
    assert one["coverage"] == whole["ranks"][1]["coverage"], "that of the rank"


@pytest.mark.parametrize("what", ["all", "coverage", "recomputes", "prefixes"])
def test_rules_by_which_nothing_was_counted_are_said(filled: tuple[Database, Path], what: str) -> None:
    output = run(show, what, "--semantics-version", "77", data_dir=filled[1]).output
    assert output.splitlines() == ["Nothing was counted by semantics_version 77 in this span; there are rows of 2, 1."]


def test_a_span_beside_the_data_says_what_there_is(filled: tuple[Database, Path]) -> None:
    totals = totals_from_records(RANKS, DUPLICATES)
    output = run(show, "--since", "15m", data_dir=filled[1]).output
    assert f"the store holds engine times from {iso(totals.span.start_us)} to {iso(totals.span.end_us)}" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--since", "yesterday"], "is no time"),
        (["--since", "now", "--until", "1h"], "must lie before"),
        (["everything"], "is not one of"),
        (["--by", "tenant"], "is not one of"),
        (["--rank", "a/0"], "--rank goes with `show recomputes`"),
        (["duplicates", "--cause", "evicted"], "--cause goes with `show recomputes`"),
        (["--limit", "5"], "--limit goes with `show recomputes` or `show prefixes`"),
        (["recomputes", "--by", "rank"], "--by does not go with `show recomputes`"),
        (["coverage", "--by", "model"], "--by does not go with `show coverage`"),
        (["recomputes", "--rank", "a"], "expected INSTANCE/R"),
        (["recomputes", "--rank", "a/²"], "expected INSTANCE/R"),
        (["recomputes", "--limit", "0"], "not in the range"),
    ],
)
def test_wrong_use_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(show, *arguments, data_dir=tmp_path)
    assert result.exit_code == 2
    assert message in result.output


def test_sql_as_csv_json_and_parquet_keeps_what_numbers_lose(filled: tuple[Database, Path], tmp_path: Path) -> None:
    data_dir = filled[1]
    query = (
        "SELECT toUInt64(18446744073709551615) AS big, toFixedString(unhex('00ff'), 2) AS id, CAST(NULL, 'Nullable(Int8)') AS nothing, "
        "toDateTime64('2026-01-31 12:00:00.5', 6, 'UTC') AS at, 'a,\"b' AS text, [1, 2] AS list, nan AS none, true AS yes"
    )
    row = {
        "big": 2**64 - 1,
        "id": "00ff",
        "nothing": None,
        "at": "2026-01-31T12:00:00.500000Z",
        "text": 'a,"b',
        "list": [1, 2],
        "none": None,
        "yes": True,
    }
    assert printed(run(sql, query, "--format", "json", data_dir=data_dir)) == [row]
    found = list(csv.DictReader(io.StringIO(run(sql, query, "--format", "csv", data_dir=data_dir).output)))
    assert found == [
        {
            "big": str(2**64 - 1),
            "id": "00ff",
            "nothing": "",
            "at": row["at"],
            "text": row["text"],
            "list": "[1, 2]",
            "none": "null",
            "yes": "true",
        }
    ]
    for name in ("out.csv", "out.json", "out.parquet"):
        assert run(sql, query, "--out", str(tmp_path / name), data_dir=data_dir).exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text()) == [row]
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table.column("big").to_pylist() == [2**64 - 1]
    assert table.column("id").to_pylist() == [b"\x00\xff"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out.csv", "out.json", "out.parquet"]


def test_sql_for_people(filled: tuple[Database, Path]) -> None:
    data_dir = filled[1]
    output = run(sql, "SELECT number AS n, NULL AS nothing FROM numbers(1500)", data_dir=data_dir)
    assert "NULL" in output.output
    assert "500 more rows are not shown" in output.output
    keys = {(row.instance_id, row.dp_rank, row.life_id, row.window_start_us, row.semantics_version) for row in RANKS}
    counted = run(sql, "-", "--format", "csv", data_dir=data_dir, input="SELECT count() AS rows FROM rank_windows;\n")
    assert counted.output == f"rows\n{len(keys)}\n", "tables are read as if replaced"
    given = run(
        sql, "SELECT {a:String} AS a, {n:Int64} + 1 AS n", "--param", "a=x=y", "--param", "n=41", "--format", "csv", data_dir=data_dir
    )
    assert given.output == "a,n\nx=y,42\n"
    assert run(sql, "SELECT 1 AS a WHERE 0", "--format", "csv", data_dir=data_dir).output == "a\n"
    assert printed(run(sql, "SELECT 1 AS a WHERE 0", "--format", "json", data_dir=data_dir)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["SELECT 1 FORMAT JSON"], "use --format"),
        (["SELECT 1", "--format", "parquet"], "needs --out"),
        (["SELECT 1", "--out", "x.txt"], "name a --format"),
        (["SELECT 1", "--out", "x.csv", "--format", "table"], "for the terminal"),
        (["SELECT 1", "--param", "a"], "expected NAME=VALUE"),
    ],
)
def test_wrong_use_of_sql_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(sql, *arguments, data_dir=tmp_path)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("query", "message"), [("DROP TABLE rank_windows", "only queries"), ("SELECT nothing", "UNKNOWN_IDENTIFIER"), ("SELECT 1", "no store")]
)
def test_failures_of_sql_are_one_line(filled: tuple[Database, Path], tmp_path: Path, query: str, message: str) -> None:
    data_dir = tmp_path if message == "no store" else filled[1]
    with pytest.raises(KvcensusError, match=message) as caught:
        run(sql, query, data_dir=data_dir)
    assert "\n" not in str(caught.value)
    with pytest.raises(KvcensusError, match="--out"):
        run(sql, "SELECT 1", "--out", str(tmp_path / "no" / "folder.csv"), data_dir=filled[1])


def test_the_view_of_repeat_compute_adds_up_to_the_figures(filled: tuple[Database, Path]) -> None:
    database = filled[0]
    totals = totals_from_records(RANKS, DUPLICATES)
    found = {
        tuple(row[:3]): tuple(row[3:])
        for row in database.query(
            """
            SELECT instance_id, dp_rank, life_id,
                sum(ifNull(evicted_tokens, 0)), sum(ifNull(cleared_blocks, 0)), sum(ifNull(restarted_tokens, 0)),
                sum(ifNull(concurrent_tokens, 0)), sum(ifNull(ambiguous_reload_tokens, 0)), sum(removed_tokens),
                sum(ifNull(stored_tokens, 0))
            FROM repeat_compute
            WHERE semantics_version = {version:Int32}
            GROUP BY instance_id, dp_rank, life_id
            """,
            {"version": totals.semantics_version},
        ).rows
    }
    expected: dict[tuple[object, ...], list[int]] = {}
    for life in totals.lives:
        sums = expected.setdefault((life.instance_id, life.dp_rank, life.life_id), [0] * 7)
        primary = primary_group(life.groups)
        if primary is None:
            continue
        measurable, telling = life.kv_connector is None, life.reuse_reporting != "unlabelled"
        sums[0] += measurable * primary.recompute_evicted_tokens
        sums[1] += measurable * primary.recompute_cleared_blocks
        sums[2] += measurable * primary.recompute_restarted_tokens
        sums[3] += (measurable and telling) * primary.recompute_concurrent_tokens
        sums[4] += measurable * primary.recompute_ambiguous_tokens
        sums[5] += primary.evicted_tokens
        sums[6] += telling * primary.stored_tokens
    assert found == {key: tuple(sums) for key, sums in expected.items()}
    assert any(any(sums) for sums in expected.values())


def test_the_views_of_groups_and_duplicates(filled: tuple[Database, Path]) -> None:
    database = filled[0]
    count, stored = database.query("SELECT count(), sum(stored_tokens) FROM rank_window_groups").rows[0]
    assert count == sum(len(row.groups) for row in latest_ranks())
    assert stored == sum(each.stored_tokens for row in latest_ranks() for each in row.groups)
    window = duplicate_window(scope="fleet", tier="NVME", inside_token_us=3 * WINDOW_US, between_token_us=WINDOW_US, extra_tokens_max=9)
    opened = duplicate_window(scope="fleet", tier="NVME", window_start_us=START_US + WINDOW_US, as_of_us=START_US + WINDOW_US)
    rows = TableRows()
    rows.add(window)
    rows.add(opened)
    batch = rows.duplicate_windows
    database.insert(batch.table, batch.column_names, batch.columns)
    try:
        found = database.query(
            "SELECT scope_key, extra_tokens_mean, inside_tokens_mean, between_tokens_mean, extra_tokens_max, complete "
            "FROM duplicate_footprint WHERE scope = 'fleet' AND tier = 'NVME' ORDER BY window_start"
        ).rows
        assert found == [(None, 4.0, 3.0, 1.0, 9, 1), (None, 0.0, 0.0, 0.0, 0, 1)]
    finally:
        database.command("ALTER TABLE duplicate_windows DELETE WHERE tier = 'NVME' SETTINGS mutations_sync = 1")


def latest_ranks() -> list[RankWindow]:
    """The rows that count: of each key the highest version."""
    latest: dict[tuple[object, ...], RankWindow] = {}
    for row in RANKS:
        key = (row.instance_id, row.dp_rank, row.life_id, row.window_start_us, row.semantics_version)
        if key not in latest or row.version > latest[key].version:
            latest[key] = row
    return list(latest.values())


def test_the_view_of_return_times_has_the_histograms_of_the_figures(filled: tuple[Database, Path]) -> None:
    totals = totals_from_records(RANKS, DUPLICATES)
    found: dict[str, list[list[int]]] = {}
    for what, *bucket in (
        filled[0]
        .query(
            "SELECT what, from_us, to_us, sum(blocks) FROM return_times WHERE semantics_version = {version:Int32} "
            "GROUP BY what, from_us, to_us ORDER BY from_us",
            {"version": totals.semantics_version},
        )
        .rows
    ):
        found.setdefault(what, []).append(bucket)
    # Of ranks with a KV connector nobody knows what came back and what was loaded: no figure counts it, nor does the view.
    measurable = primaries(life for life in totals.lives if life.kv_connector is None)
    assert len(measurable) < len(primaries(totals.lives))
    assert found == {
        "evicted": durations(measurable, "back_evicted")["histogram"],
        "cleared": durations(measurable, "back_cleared")["histogram"],
        "restarted": durations(measurable, "back_restarted")["histogram"],
        "lifetime": durations(primaries(totals.lives), "lifetime")["histogram"],
    }


def test_every_row_of_a_view_says_how_it_may_be_read(filled: tuple[Database, Path]) -> None:
    database = filled[0]
    found = database.query("SELECT kind, found, bound, breaches_found FROM metric_breaches").rows
    breaches = [(breach.kind, breach.found, breach.bound, row.breaches_found) for row in latest_ranks() for breach in row.breaches]
    assert sorted(found) == sorted(breaches)
    for view in ("repeat_compute", "rank_window_groups", "return_times", "duplicate_footprint", "workload_pairs"):
        assert database.query(f"SELECT count() > 0, min(coverage) >= 0, countIf(register = '') FROM {view}").rows == [(1, 1, 0)]
    gpu = database.query(
        "SELECT sum(evicted_gpu_seconds), countIf(evicted_gpu_seconds IS NULL AND measurable), sum(unrated_tokens) FROM repeat_compute"
    ).rows[0]
    primary = [
        group
        for row in latest_ranks()
        if row.kv_connector is None
        for group in row.groups
        if group.group_idx == PRIMARY[(row.instance_id, row.dp_rank, row.life_id, row.semantics_version)]
    ]
    assert gpu[0] == pytest.approx(sum(group.recompute_evicted_gpu_us for group in primary) / 1e6)
    assert gpu[1] == sum(group.recompute_evicted_gpu_us == 0 and group.recompute_evicted_tokens > 0 for group in primary)
    assert gpu[2] == sum(group.unrated_tokens for group in primary)
    pairs = database.query("SELECT DISTINCT workload_a, workload_b FROM workload_pairs ORDER BY workload_b").rows
    assert pairs == [(None, "chat"), ("chat", "code")]
    assert database.query("SELECT count() FROM duplicate_footprint WHERE scope = 'workload_pair'").rows == [(0,)]


def test_every_table_and_view_says_what_it_is(filled: tuple[Database, Path]) -> None:
    rows = filled[0].query("SELECT name, engine, comment FROM system.tables WHERE database = currentDatabase() AND NOT is_temporary").rows
    assert {"repeat_compute", "duplicate_footprint", "rank_windows", "block_events"} <= {row[0] for row in rows}
    assert [row[0] for row in rows if not row[2] and row[1] != "MaterializedView"] == []
    assert [row[0] for row in rows if row[1] == "Kafka"] == []
