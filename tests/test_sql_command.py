"""``kvcensus sql``: what its formats make of unusual types, names and parameters, and of results that are too large."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from click import Command
from click.testing import CliRunner, Result

from console.commands.export import export
from console.commands.rollup import rollup
from console.commands.sql import sql
from schemas.errors import KvcensusError
from sql.database import Database
from tests.clickhouse_http import clickhouse_server

TYPES = (
    "SELECT toDateTime('2026-01-01 00:00:00', 'Europe/Berlin') AS at, toInt128(3) AS sum, CAST('a', 'Enum8(''a'' = 1)') AS word, "
    "unhex('ff00') AS bytes, map('a', [1, 2]) AS m, (1, 'x') AS pair, [(1, toFixedString('ab', 2))] AS pairs, "
    "toFixedString('ab', 2) AS id, toDecimal64(1.5, 2) AS d, "
    "CAST(NULL, 'Nullable(DateTime(''UTC''))') AS never, toDateTime('1970-01-01 00:00:01', 'UTC') AS second"
)
AT = datetime(2025, 12, 31, 23, tzinfo=UTC)


def run(*arguments: str, store: Database | None = None, **options: Any) -> Result:
    where = ["--data-dir", str(Path(store.place).parent)] if store is not None else []
    return CliRunner().invoke(sql, [*arguments, *where], catch_exceptions=False, **options)


def test_every_format_says_the_same_of_unusual_types(module_store: Database, tmp_path: Path) -> None:
    assert json.loads(run(TYPES, "--format", "json", store=module_store).stdout) == [
        {
            "at": "2025-12-31T23:00:00Z", "sum": 3, "word": "a", "bytes": "ff00", "m": {"a": [1, 2]}, "pair": [1, "x"],
            "pairs": [[1, "6162"]], "id": "6162", "d": "1.50", "never": None, "second": "1970-01-01T00:00:01Z",
        }
    ]  # fmt: skip
    assert run(TYPES, "--format", "csv", store=module_store).stdout == (
        "at,sum,word,bytes,m,pair,pairs,id,d,never,second\n"
        '2025-12-31T23:00:00Z,3,a,ff00,"{""a"": [1, 2]}","[1, ""x""]","[[1, ""6162""]]",6162,1.50,,1970-01-01T00:00:01Z\n'
    )
    assert run(TYPES, "--out", str(tmp_path / "a.parquet"), store=module_store).exit_code == 0
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist() == [
        {
            "at": AT, "sum": Decimal(3), "word": "a", "bytes": b"\xff\x00", "m": [("a", [1, 2])], "pair": {"1": 1, "2": "x"},
            "pairs": [{"1": 1, "2": b"ab"}], "id": b"ab", "d": Decimal("1.50"), "never": None, "second": datetime.fromtimestamp(1, UTC),
        }
    ]  # fmt: skip


def test_parquet_keeps_the_order_of_the_query_and_its_columns_where_there_are_no_rows(module_store: Database, tmp_path: Path) -> None:
    query = "SELECT toDateTime(cityHash64(number) % 1000000, 'UTC') AS at, number FROM numbers_mt(300000) ORDER BY at, number -- by time"
    assert run(query, "--out", str(tmp_path / "a.parquet"), store=module_store).exit_code == 0
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert table.num_rows == 300_000
    assert table.column("at").to_pylist() == sorted(table.column("at").to_pylist())
    assert run("SELECT * FROM deploys;", "--out", str(tmp_path / "b.parquet"), store=module_store).exit_code == 0
    assert pyarrow.parquet.read_schema(tmp_path / "b.parquet").names[:3] == ["deploy_id", "version", "label"]
    for query in ("SHOW TABLES", "DESCRIBE TABLE deploys", "EXPLAIN SELECT 1"):
        assert run(query, "--out", str(tmp_path / "c.parquet"), store=module_store).exit_code == 0
        assert pyarrow.parquet.read_table(tmp_path / "c.parquet").num_rows > 0


@pytest.mark.parametrize(
    "query", ["SELECT 1 AS x;", "/* a; b */ SELECT 1 AS x -- c;", "SELECT 1 AS x\n;\n-- done\n", "# why\nSELECT 1 AS x;;"]
)
def test_comments_and_semicolons_are_no_matter_also_on_standard_input(module_store: Database, query: str) -> None:
    assert json.loads(run(query, "--format", "json", store=module_store).stdout) == [{"x": 1}]
    assert run("-", "--format", "csv", store=module_store, input=query).stdout == "x\n1\n"


def test_parameters_of_every_shape(module_store: Database) -> None:
    query = (
        "SELECT {at:DateTime64(3, 'UTC')} AS at, {names:Array(String)} AS names, {pair:Tuple(String, UInt8)} AS pair, {text:String} AS text"
    )
    given = ["at=2026-01-01 00:00:00", "names=['it''s', \"b]\"]", "pair=('a', 1)", "text=['x']"]
    options = [word for each in given for word in ("--param", each)]
    assert json.loads(run(query, *options, "--format", "json", store=module_store).stdout) == [
        {"at": "2026-01-01T00:00:00Z", "names": ["its", "b]"], "pair": ["a", 1], "text": "['x']"}
    ]


def test_a_map_may_be_given_as_a_parameter(module_store: Database) -> None:
    query = "SELECT {m:Map(String, Array(Nullable(String)))} AS m, {n:Map(UInt8, Bool)} AS n"
    given = ["m={'it\\'s': ['a\\\\', None], \"b\": []}", "n={1: True}"]
    result = run(query, "--format", "json", *(word for each in given for word in ("--param", each)), store=module_store)
    assert json.loads(result.stdout) == [{"m": {"it's": ["a\\", None], "b": []}, "n": {"1": True}}]


def test_no_value_moves_the_cursor_or_becomes_a_picture(module_store: Database) -> None:
    shown = run("SELECT 'a' || char(27) || '[2J :smile: [b]' AS label, 'x\ny' AS lines", store=module_store).stdout
    assert "a\\x1b[2J :smile: [b]" in shown
    assert [line.split("│")[2].strip() for line in shown.splitlines() if "│" in line] == ["x", "y"]


def test_rows_whose_columns_do_not_fit_stand_one_below_the_other(module_store: Database) -> None:
    columns = [f"a_rather_long_name_{place}" for place in range(9)]
    query = f"SELECT number AS {columns[0]}, {', '.join(f'NULL AS {name}' for name in columns[1:])} FROM numbers(2)"
    lines = [line.strip("│ ") for line in run(query, store=module_store).stdout.splitlines()]
    assert [line for line in lines if line.startswith("row ")] == ["row 1", "row 2"]
    assert [tuple(line.replace("│", "").split()) for line in lines if line.startswith(columns[0])] == [(columns[0], "0"), (columns[0], "1")]
    assert sum(line.startswith(columns[8]) for line in lines) == 2
    assert run(f"{query} WHERE number > 5", store=module_store).stdout == f"no rows of {', '.join(columns)}\n"


def test_after_a_demo_it_says_where_its_figures_are(tmp_path: Path) -> None:
    left = tmp_path / "demo"
    (left / "clickhouse" / "metadata").mkdir(parents=True)
    commands: list[tuple[Command, list[str]]] = [(sql, ["SELECT 1"]), (export, [str(tmp_path / "out"), "--all"]), (rollup, [])]
    for command, arguments in commands:
        result = CliRunner().invoke(command, [*arguments, "--data-dir", str(tmp_path)])
        assert str(result.exception) == f"No figures here: nothing runs on {tmp_path}. Those of the last demo: --data-dir {left}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["SELECT {a:Array(String)}", "--param", "a=x,y"], "a=x,y: expected Array, as ['a', 'b']"),
        (["SELECT {a:Array(UInt8)}", "--param", "a=__import__('os')"], "expected Array"),
        (["SELECT {a:Int8}", "--param", "a=1", "--param", "a=2"], "a is given twice"),
    ],
)
def test_wrong_parameters_are_said(module_store: Database, arguments: list[str], message: str) -> None:
    result = run(*arguments, store=module_store)
    assert result.exit_code == 2
    assert message in result.output


def test_of_two_columns_with_one_name_none_is_lost(module_store: Database, tmp_path: Path) -> None:
    for arguments in (["--format", "json"], ["--out", str(tmp_path / "a.parquet")]):
        with pytest.raises(KvcensusError, match="several columns are named 1: give each a name of its own with AS"):
            run("SELECT 1, 1", *arguments, store=module_store)
    assert run("SELECT 1, 1", "--format", "csv", store=module_store).stdout == "1,1\n1,1\n"


def test_a_result_that_is_too_large_is_refused_by_a_server_too(module_store: Database, tmp_path: Path) -> None:
    query = "SELECT number FROM numbers(5100000)"
    with pytest.raises(KvcensusError, match=r"max rows: 5.00 million.* Add a LIMIT, or sum up; whole tables: `kvcensus export`\."):
        run(query, "--format", "csv", store=module_store)
    with clickhouse_server(tmp_path / "server") as url:
        at = ["--clickhouse-url", f"{url}/default"]
        for more in (["--format", "csv"], ["--out", str(tmp_path / "a.parquet")]):
            with pytest.raises(KvcensusError, match=r"max rows: 5.00 million.* Add a LIMIT"):
                run(query, *more, *at)
        assert run(f"{query} ORDER BY number DESC LIMIT 2 -- two", "--format", "csv", *at).stdout == "number\n5099999\n5099998\n"
    assert not (tmp_path / "a.parquet").exists()
