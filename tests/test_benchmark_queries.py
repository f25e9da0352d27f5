"""The benchmark of queries runs: an hour of a small fleet is filled, rolled up and asked for everything, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import queries
from benchmarks.queries_fill import MARKER, Filled, filled_with
from benchmarks.queries_list import of_views, rank_hour
from benchmarks.queries_rollup import Rolled
from benchmarks.queries_rows import Fleet
from benchmarks.queries_run import Measured
from schemas.errors import KvcensusError
from sql.store import connect

FLEET = Fleet(days=1, ranks=26, fact_ranks=1, fact_rate=10, day_hours=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the store lies."""
    return tmp_path_factory.mktemp("benchmark")


@pytest.fixture(scope="module")
def run(folder: Path) -> tuple[list[Filled], list[Measured]]:
    """What filling and asking gave."""
    tables, rolled, results = queries.run(folder, FLEET, runs=0)
    assert rolled.windows > FLEET.windows
    return tables, results


def test_every_view_and_panel_answers(run: tuple[list[Filled], list[Measured]]) -> None:
    """Nothing fails, and what reads rows says how many."""
    results = run[1]
    assert [result for result in results if result.error is not None] == []
    assert any(result.name.startswith("panel ") for result in results)
    assert any(result.rows_read > 0 and result.bytes_read > 0 for result in results)


def test_the_views_have_something_to_say(run: tuple[list[Filled], list[Measured]]) -> None:
    """A view that answers nothing would be quick for no reason. An hour holds no restart and hardly a contradiction."""
    silent = {result.name for result in run[1] if not result.rows_out and not result.name.startswith("panel ")}
    of_deploys = {"deploy_effect", "deploy_effect_of: one deploy", "deploy_windows", "deploys_declared"}
    assert silent <= {"metric_breaches: a rank's hour"} | of_deploys


def test_what_was_filled_is_told(run: tuple[list[Filled], list[Measured]]) -> None:
    """One row of windows for each rank and 10 s, replaced ones once merged; and what the engine fills by itself."""
    tables = {table.table: table for table in run[0]}
    windows = tables["rank_windows"]
    assert windows.rows == FLEET.windows + FLEET.windows // 200
    assert FLEET.windows <= windows.stored <= windows.rows
    assert windows.bytes > 0
    assert {"known_ranks", "life_groups", "rank_rollups", "duplicate_rollups", "block_events", "lifecycle"} <= set(tables)


def test_a_filled_folder_is_used_again_and_no_other_fleet_put_into_it(run: tuple[list[Filled], list[Measured]], folder: Path) -> None:
    """The marker says what is in it."""
    assert run
    found = filled_with(folder)
    assert found is not None
    assert found[0] == FLEET
    before = (folder / MARKER).read_text()
    _, _, results = queries.run(folder, FLEET, only=("coverage_1h",), runs=0)
    assert (folder / MARKER).read_text() == before
    assert [result.name for result in results] == ["coverage_1h"]
    with pytest.raises(KvcensusError, match="name another folder"):
        queries.run(folder, Fleet(days=2), runs=0)


def test_rollups_without_their_mark_are_made_anew(run: tuple[list[Filled], list[Measured]], folder: Path) -> None:
    """As after a run that was cut short: what is left of it is neither taken for the whole nor doubled."""
    tables = {table.table: table for table in run[0]}
    marker = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps({name: value for name, value in marker.items() if name != "rolled"}))
    again, rolled, _ = queries.run(folder, FLEET, fill_only=True)
    assert rolled.windows == marker["rolled"]["windows"]
    with connect(None, folder) as database:
        for table in ("rank_rollups", "duplicate_rollups"):
            kept = database.query(f"SELECT count() FROM {table} WHERE NOT is_deleted").rows[0][0]
            assert 0 < kept <= tables[table].stored
    assert json.loads((folder / MARKER).read_text())["rolled"]["windows"] == rolled.windows
    assert again


def test_every_view_is_asked() -> None:
    """Also one that came after this was written."""
    views = ["repeat_compute_1h", "repeat_compute_1d", "something_new_1h", "something_new_5m", "something_else", "rollup_parts"]
    usual = {"repeat_compute_1h: one rank", "repeat_compute_1d: top ranks", "something_new_1h", "something_else"}
    asked = {query.name: query.target_ms for query in of_views(views, Fleet(), all_grains=True)}
    assert {query.name for query in of_views(views, Fleet())} == usual
    assert {name for name, target in asked.items() if target is not None} == usual
    assert set(asked) - usual == {"repeat_compute_1h: top ranks", "repeat_compute_1d: one rank", "something_new_5m"}
    assert next(query.name for query in rank_hour(["repeat_compute"], Fleet())) == "repeat_compute: a rank's hour"


def test_the_document_and_what_is_refused(run: tuple[list[Filled], list[Measured]], folder: Path) -> None:
    """``--json`` is one document; a rate that cannot be split into batches is a usage error."""
    assert run
    told = queries.document(FLEET, run[0], Rolled(1.0, 2, 0), run[1])
    assert json.loads(json.dumps(told))["fleet"]["ranks"] == FLEET.ranks
    refused = CliRunner().invoke(queries.main, ["--fact-rate", "25"])
    assert refused.exit_code == 2
    assert "--fact-rate" in refused.output
    other = CliRunner().invoke(queries.main, ["--data-dir", str(folder), "--days", "3"])
    assert other.exit_code == 1
    assert "name another folder" in other.output
