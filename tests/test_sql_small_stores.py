"""``kvcensus show`` on stores that hold nothing or little, each in a folder of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from console.commands.show import show
from schemas.errors import KvcensusError
from sql import migrate, store
from sql.load import load
from sql.rows import TableRows
from sql.totals import totals_from_records
from tests.sql_records import BYTE_FIELDS, START_US, WINDOW_US, duplicate_window, group, insert, rank_window


def run(command: Any, *arguments: str, data_dir: Path) -> Result:
    return CliRunner().invoke(command, [*arguments, "--data-dir", str(data_dir)], catch_exceptions=False)


def printed(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_a_covered_span_never_rounds_up(tmp_path: Path) -> None:
    with store.connect(None, tmp_path) as database:
        migrate.apply(database)
        insert(database, [rank_window(observed_us=WINDOW_US - 1, groups=[group(stored_tokens=1234567, stored_blocks=1)])])
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


def test_rows_of_the_version_before_are_read_once_the_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    """They tell nothing of what they did not have, and their ranks are known."""
    row = rank_window(groups=[group(stored_tokens=64, recompute_evicted_tokens=16), group(group_idx=1)], register="exact")
    window = duplicate_window(inside_token_us=WINDOW_US, register="exact", extra_bytes_max=9)
    rows = TableRows()
    rows.add(row)
    rows.add(window)
    earlier = "of an earlier version; run `kvcensus migrate`"
    with store.connect(None, tmp_path) as database:
        migrate.apply(database, migrate.shipped()[:3])
    with pytest.raises(KvcensusError, match=earlier):
        run(show, data_dir=tmp_path)  # also while it is empty
    with store.connect(None, tmp_path) as database:
        for batch in (rows.rank_windows, rows.duplicate_windows):
            had = {name for name, *_ in database.query(f"DESCRIBE TABLE {batch.table}").rows}
            kept = [number for number, name in enumerate(batch.column_names) if name in had]
            database.insert(batch.table, [batch.column_names[n] for n in kept], [batch.columns[n] for n in kept])
    with pytest.raises(KvcensusError, match=earlier):
        run(show, data_dir=tmp_path)
    with store.connect(None, tmp_path) as database:
        migrate.apply(database)
        assert database.query("SELECT register, evicted_tokens, evicted_gpu_seconds FROM repeat_compute").rows == [
            ("indeterminate", 16, None)
        ]
        later = START_US + 5 * WINDOW_US
        assert [life.reasons for life in load(database, later, later + WINDOW_US).lives] == [["absent"]]
        totals = load(database)
    told = totals_from_records(
        [msgspec.structs.replace(row, register="indeterminate")],
        [msgspec.structs.replace(window, register="indeterminate", **dict.fromkeys(BYTE_FIELDS))],
    )
    assert totals == told
