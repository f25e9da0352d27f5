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

from console.commands.show import show
from console.commands.sql import sql
from schemas.errors import KvcensusError
from schemas.records import RankWindow
from sql import migrate, store
from sql.database import Database
from sql.figures import assemble, primary_group
from sql.rows import TableRows
from sql.times import iso
from sql.totals import totals_from_records
from tests.sql_records import (
    START_US,
    WINDOW_US,
    duplicate_window,
    random_duplicate_windows,
    random_rank_windows,
)

RNG = random.Random(11)
RANKS = random_rank_windows(RNG)
DUPLICATES = random_duplicate_windows(RNG)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, Path]]:
    """An owned store with random records in it, some of them twice."""
    data_dir = tmp_path_factory.mktemp("data")
    with store.connect(None, data_dir, own=True) as database:
        migrate.apply(database)
        rows = TableRows()
        for row in [*RANKS, *RANKS[::3]]:
            rows.add(row)
        for window in [*DUPLICATES, *DUPLICATES[::3]]:
            rows.add(window)
        for batch in rows.batches():
            database.insert(batch.table, batch.column_names, batch.columns)
        yield database, data_dir


def run(command: Any, *arguments: str, data_dir: Path, **options: Any) -> Result:
    return CliRunner().invoke(command, [*arguments, "--data-dir", str(data_dir)], catch_exceptions=False, **options)


def printed(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_json_is_the_document_of_the_records(filled: tuple[Database, Path]) -> None:
    data_dir = filled[1]
    assert printed(run(show, "--json", data_dir=data_dir)) == assemble(totals_from_records(RANKS, DUPLICATES))
    since, until = START_US + 3 * WINDOW_US + 7, START_US + 8 * WINDOW_US - 5
    for by in ("rank", "workload", "model"):
        found = printed(run(show, "all", "--json", "--by", by, "--since", iso(since), "--until", f"{until / 1e6:.6f}", data_dir=data_dir))
        assert found == assemble(totals_from_records(RANKS, DUPLICATES, since_us=since, until_us=until, by=by))


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
    latest: dict[tuple[object, ...], RankWindow] = {}
    for row in RANKS:
        key = (row.instance_id, row.dp_rank, row.life_id, row.window_start_us, row.semantics_version)
        if key not in latest or row.version > latest[key].version:
            latest[key] = row
    count, stored = database.query("SELECT count(), sum(stored_tokens) FROM rank_window_groups").rows[0]
    assert count == sum(len(row.groups) for row in latest.values())
    assert stored == sum(each.stored_tokens for row in latest.values() for each in row.groups)
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


def test_every_table_and_view_says_what_it_is(filled: tuple[Database, Path]) -> None:
    rows = filled[0].query("SELECT name, engine, comment FROM system.tables WHERE database = currentDatabase() AND NOT is_temporary").rows
    assert {"repeat_compute", "duplicate_footprint", "rank_windows", "block_events"} <= {row[0] for row in rows}
    assert [row[0] for row in rows if not row[2] and row[1] != "MaterializedView"] == []
    assert [row[0] for row in rows if row[1] == "Kafka"] == []
