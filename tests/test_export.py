"""``kvcensus export``: Parquet that holds what SQL says, in files that are whole or not there."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result

from console.commands.export import export
from schemas.errors import KvcensusError
from schemas.records import Batch, DeadLetter, Op, RankMessage
from sql import embedded, migrate, rollups, store
from sql import export as export_tables
from sql.database import Database
from sql.export import NOT_EXPORTED, TABLES, VIEWS, Piece, Source, Timed, find, joined
from sql.export_files import FILE, ExportFolder
from sql.figures import assemble
from sql.rows import Row, TableRows
from sql.times import iso
from sql.totals import totals_from_records
from tests.sql_records import START_US, random_duplicate_windows, random_rank_windows, random_shared_prefixes, write

RNG = random.Random(7)
RANKS = random_rank_windows(RNG)
DUPLICATES = random_duplicate_windows(RNG)
MIDNIGHT_US = START_US - START_US % 86_400_000_000 + 86_400_000_000


def facts() -> Iterator[RankMessage]:
    """Batches around a midnight, of many ids."""
    for seq in range(400):
        ids = RNG.randbytes(16 * 5)
        stored = Op("STORE", block_ids=ids, content_ids=ids, parent_state="ROOT", block_size=16)
        yield RankMessage("a", seq % 3, "l", seq, MIDNIGHT_US + (seq - 200) * 7_000_123, 5, "f", batch=Batch([stored]))


def fill(database: Database) -> None:
    """Records of most kinds, a third of them twice."""
    rows = TableRows()
    records: list[Row] = [*RANKS, *RANKS[::3], *DUPLICATES, *DUPLICATES[::3], *random_shared_prefixes(RNG)]
    for record in records:
        rows.add(record)
    for offset, fact in enumerate(facts()):
        rows.add(fact, 0, offset)
    rows.add(DeadLetter("kvcensus.batches", 0, 7, "holder", "why", b"\xff/0", b"\xff\x00", 2))
    write(database, rows)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, Path]]:
    """An owned store with records in it, and its data folder."""
    data_dir = tmp_path_factory.mktemp("data")
    with store.connect(None, data_dir, own=True) as database:
        migrate.apply(database)
        fill(database)
        rollups.run(database)
        yield database, data_dir


def run(folder: Path, *arguments: str, data_dir: Path) -> Result:
    return CliRunner().invoke(export, [str(folder), *arguments, "--data-dir", str(data_dir)], catch_exceptions=False)


def manifest(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def exported(folder: Path, table: str) -> list[dict[str, Any]]:
    """The rows of an exported table, each checked to lie in the folder of its day."""
    data = pyarrow.dataset.dataset(folder / table, format="parquet", partitioning="hive").to_table()
    found: list[dict[str, Any]] = data.to_pylist()
    column = (TABLES.get(table) or VIEWS[table]).column
    for row in found:
        day = row.pop("day", None)
        assert (day is None) if column is None else day == row[column].date().isoformat()
    return found


def told(database: Database, table: str, where: str = "1") -> list[dict[str, Any]]:
    """The rows of a table as the driver reads them, ids in hex."""
    result = database.query(f"SELECT * FROM `{table}` WHERE {where}", final=True)
    return [{name: shown(value) for name, value in zip(result.column_names, row, strict=True)} for row in result.rows]


def shown(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return list(value.items())
    return [shown(each) for each in value] if isinstance(value, list | tuple) else value


def in_order(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(
        json.dumps(row, sort_keys=True, default=lambda value: int(value) if isinstance(value, Decimal) else str(value)) for row in rows
    )


def test_every_relation_of_the_schema_is_known_with_a_time_that_it_has(filled: tuple[Database, Path]) -> None:
    relations = dict(filled[0].query("SELECT name, engine FROM system.tables WHERE database = currentDatabase()").rows)
    views = {name for name, engine in relations.items() if engine == "View"}
    assert {view for view in views if not view.startswith("rollup_")} == set(VIEWS) | NOT_EXPORTED & views
    assert {name for name, engine in relations.items() if engine not in ("View", "MaterializedView")} == set(TABLES) | NOT_EXPORTED - views
    for table in {*TABLES, *VIEWS}:
        timed = find(table)
        kinds = {row[0]: row[1] for row in filled[0].query(f"DESCRIBE TABLE `{table}`").rows}
        if timed.column is not None:
            assert kinds[timed.column].startswith("Date"), table


def test_the_files_of_every_table_and_view_hold_what_sql_says(filled: tuple[Database, Path], tmp_path: Path) -> None:
    database, data_dir = filled
    views = [view for view in VIEWS if view[-3:] not in ("_5m", "_1h", "_1d")] + ["repeat_compute_1h", "duplicate_footprint_1h"]
    named = [argument for view in views for argument in ("--table", view)]
    document = manifest(run(tmp_path, "--all", *named, "--json", data_dir=data_dir))
    assert set(document["tables"]) == {*TABLES, *views}
    for table, said in document["tables"].items():
        rows = told(database, table)
        assert said["rows"] == len(rows), table
        if not rows:
            assert not (tmp_path / table).exists()
            continue
        found = exported(tmp_path, table)
        if table == "dead_letters":
            assert [(row["key"], row["payload"]) for row in found] == [(b"\xff/0", b"\xff\x00")]
            continue
        assert in_order(found) == in_order(rows), table
        for file in said["files"]:
            path = tmp_path / file["path"]
            assert file["bytes"] == path.stat().st_size
            assert pyarrow.parquet.read_metadata(path).num_rows == file["rows"]
    assert [file["day"] for file in document["tables"]["block_events"]["files"]] == [
        datetime.fromtimestamp(us / 1e6, UTC).date().isoformat() for us in (MIDNIGHT_US - 1, MIDNIGHT_US)
    ]
    # A figure without its coverage is half of what is known.
    figures = assemble(totals_from_records(RANKS, DUPLICATES))
    assert document["observed"]["span"] == figures["span"]
    assert document["observed"]["repeat_compute"] == {name: figures["repeat_compute"][name] for name in ("coverage", "register", "reasons")}
    assert document["warnings"] == figures["warnings"]
    assert json.loads(Path(document.pop("manifest")).read_text()) == document


def test_a_span_cuts_exactly_and_ids_can_be_bytes(filled: tuple[Database, Path], tmp_path: Path) -> None:
    database, data_dir = filled
    since, until = MIDNIGHT_US - 300_000_000, MIDNIGHT_US + 200_000_000
    arguments = ("--table", "block_events", "--since", iso(since), "--until", iso(until), "--ids", "binary")
    done = run(tmp_path, *arguments, data_dir=data_dir)
    assert done.exit_code == 0
    expected = told(database, "block_events", f"at >= fromUnixTimestamp64Micro({since}) AND at < fromUnixTimestamp64Micro({until})")
    assert f"block_events: {len(expected)} rows of 2 days" in done.stdout
    assert "coverage of the span: nothing was counted in it" in done.stdout
    found = exported(tmp_path, "block_events")
    assert {len(row["block_id"]) for row in found if isinstance(row["block_id"], bytes)} == {16}
    assert in_order([{name: shown(value) for name, value in row.items()} for row in found]) == in_order(expected)


@pytest.mark.parametrize("limit", [None, "64"])
def test_small_pieces_and_results_that_are_refused_for_their_size_make_the_same_rows(
    filled: tuple[Database, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    pieces: list[int] = []
    rows = Source._rows

    def watched(self: Source, start_us: int | None, end_us: int | None) -> Any:
        table = rows(self, start_us, end_us)
        pieces.append(table.num_rows)
        return table

    monkeypatch.setattr(Source, "_rows", watched)
    database: Database = filled[0]
    if limit is None:
        monkeypatch.setattr("sql.export.PIECE_BYTES", 8_000)
        monkeypatch.setattr("sql.export.FIRST_ROWS", 100)
    else:
        monkeypatch.setitem(embedded.READ_SETTINGS, "max_result_rows", limit)
        database = embedded.EmbeddedDatabase(store.store_folder(filled[1]), "kvcensus")
    source = Source(database, "block_events", "hex")
    plan = source.plan(None, None)
    found = [row for day in plan.days for table in source.read(plan, day) for row in table.to_pylist()]
    if limit is not None:
        database.close()
    assert in_order(found) == in_order(told(filled[0], "block_events"))
    assert len(pieces) > 20
    assert max(pieces) <= 100


def test_neighbours_are_read_together_while_they_are_few() -> None:
    pieces = [Piece(0, 10, 5), Piece(20, 30, 5), Piece(30, 40, 90), Piece(40, 50, 1), Piece(60, 70, 9)]
    assert joined(pieces, 10) == [Piece(0, 30, 10), Piece(30, 40, 90), Piece(40, 70, 10)]
    assert joined([], 10) == []


def test_a_day_is_replaced_whole_and_never_by_less(filled: tuple[Database, Path], tmp_path: Path) -> None:
    data_dir = filled[1]
    whole = ("--table", "block_events", "--since", iso(MIDNIGHT_US + 60_000_000), "--whole-days")
    first = manifest(run(tmp_path, *whole, "--json", data_dir=data_dir))
    (file,) = first["tables"]["block_events"]["files"]
    assert file["rows"] == 1000
    assert first["since"] == iso(MIDNIGHT_US)
    with pytest.raises(KvcensusError, match=r"holds more of its day than this span.*--whole-days"):
        run(tmp_path, "--table", "block_events", "--since", iso(MIDNIGHT_US + 60_000_000), data_dir=data_dir)
    again = manifest(run(tmp_path, "--table", "block_events", "--json", data_dir=data_dir))
    assert again["tables"]["block_events"]["rows"] == 2000
    assert len(exported(tmp_path, "block_events")) == 2000
    assert len(list((tmp_path / "manifests").iterdir())) == 2
    # What somebody else put there stays.
    (tmp_path / file["path"]).write_bytes(b"mine")
    with pytest.raises(KvcensusError, match="was not written by an export"):
        run(tmp_path, "--table", "block_events", data_dir=data_dir)
    assert (tmp_path / file["path"]).read_bytes() == b"mine"


def test_a_file_with_fewer_rows_than_before_is_said(filled: tuple[Database, Path], tmp_path: Path) -> None:
    data_dir = filled[1]
    assert run(tmp_path, "--table", "block_events", data_dir=data_dir).exit_code == 0
    path = next(tmp_path.glob(f"block_events/*/{FILE}"))
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(pyarrow.concat_tables([table, table]), path)
    assert f"the file that it replaced had {2 * table.num_rows:,}" in run(tmp_path, "--table", "block_events", data_dir=data_dir).stderr


def test_an_empty_span_says_so(filled: tuple[Database, Path], tmp_path: Path) -> None:
    done = run(tmp_path, "--table", "rank_windows", "--since", "1999-01-01", "--until", "1999-01-02", data_dir=filled[1])
    assert done.exit_code == 0
    assert done.stdout == (
        "rank_windows: no rows in this span\nnothing to export from 1999-01-01T00:00:00.000000Z to 1999-01-02T00:00:00.000000Z\n"
    )
    assert not (tmp_path / "rank_windows").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a --table, or --all"),
        (["--table", "nothing"], "no table or view 'nothing'; tables: rank_windows, recomputes"),
        (["--table", "rank_windows; DROP"], "no table or view"),
        (["--all", "--since", "now", "--until", "1h"], "must lie before"),
        (["--all", "--since", "yesterday"], "is no time"),
    ],
)
def test_wrong_use_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(tmp_path / "out", *arguments, data_dir=tmp_path)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_name_is_not_the_one_where_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(export, ["", "--all", "--data-dir", str(tmp_path)])
    assert (result.exit_code, "a folder has a name" in result.output, list(tmp_path.iterdir())) == (2, True, [])


def test_failures_are_one_line(filled: tuple[Database, Path], tmp_path: Path) -> None:
    with pytest.raises(KvcensusError, match="there is no store in"):
        run(tmp_path / "out", "--all", data_dir=tmp_path)
    with ExportFolder(tmp_path / "out"), pytest.raises(KvcensusError, match="another export writes to"):
        run(tmp_path / "out", "--all", data_dir=filled[1])
    (tmp_path / "file").write_text("")
    with pytest.raises(KvcensusError, match=r"cannot write to .*file"):
        run(tmp_path / "file" / "below", "--all", data_dir=filled[1])


def test_a_table_that_the_schema_lacks_is_said(filled: tuple[Database, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(export_tables.TABLES, "of_a_later_version", Timed("at"))
    with pytest.raises(KvcensusError, match=r"has no of_a_later_version: .*kvcensus migrate"):
        run(tmp_path, "--table", "of_a_later_version", data_dir=filled[1])


def test_killed_in_the_middle_it_leaves_no_half_file_and_the_next_run_makes_it_whole(filled: tuple[Database, Path], tmp_path: Path) -> None:
    rows = 300_000
    filled[0].command(
        "INSERT INTO recomputes (instance_id, life_id, seq, cause, block_id, tokens, back_at) SELECT 'a', 'l', number, 'evicted', "
        f"reinterpretAsFixedString(toUInt128(cityHash64(number))), 16, fromUnixTimestamp64Micro(toInt64({START_US} + number * 1000)) "
        f"FROM numbers({rows})"
    )
    command = [sys.executable, "-m", "console.cli", "export", str(tmp_path), "--table", "recomputes", "--data-dir", str(filled[1])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob("recomputes/*/.*")):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL, "it was to be killed while it wrote"
    assert [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")] == []
    assert list(tmp_path.glob("recomputes/*/.*")), "the draft that the killed process left"
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"recomputes: {rows:,} rows" in done.stdout
    assert pyarrow.dataset.dataset(tmp_path / "recomputes", format="parquet").count_rows() == rows
    assert list(tmp_path.glob("recomputes/*/.*")) == []
