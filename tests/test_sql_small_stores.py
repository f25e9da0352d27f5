"""``kvcensus show`` on stores that hold nothing or little, each in a folder of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from console.commands.show import show
from sql import migrate, store
from sql.rows import TableRows
from tests.sql_records import WINDOW_US, group, rank_window


def run(command: Any, *arguments: str, data_dir: Path) -> Result:
    return CliRunner().invoke(command, [*arguments, "--data-dir", str(data_dir)], catch_exceptions=False)


def printed(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_a_covered_span_never_rounds_up(tmp_path: Path) -> None:
    with store.connect(None, tmp_path) as database:
        migrate.apply(database)
        rows = TableRows()
        rows.add(rank_window(observed_us=WINDOW_US - 1, groups=[group(stored_tokens=1234567, stored_blocks=1)]))
        for batch in rows.batches():
            database.insert(batch.table, batch.column_names, batch.columns)
    output = run(show, "ranks", data_dir=tmp_path).output
    assert "99.99%" in output
    assert "1,234,567" in output
    assert "100%" not in output


def test_an_empty_store_is_said_and_is_no_failure(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    result = run(show, data_dir=absent)
    assert result.exit_code == 0
    assert "there is no store in" in result.output
    assert not absent.exists(), "looking must not create a store"
    document = printed(run(show, "--json", data_dir=absent))
    assert document["repeat_compute"]["register"] == document["duplicate_footprint"]["register"] == "indeterminate"
    assert (document["repeat_compute"]["evicted"]["tokens"], document["repeat_compute"]["evicted"]["blocks"]) == (0, 0)
    assert "there is no store" in document["warnings"][0]
    with store.connect(None, tmp_path):
        pass
    assert "Run `kvcensus migrate`" in run(show, data_dir=tmp_path).output
    with store.connect(None, tmp_path) as database:
        migrate.apply(database)
    assert "nothing has been counted" in run(show, data_dir=tmp_path).output
    assert printed(run(show, "--json", "--by", "rank", data_dir=tmp_path))["repeat_compute"] == []
