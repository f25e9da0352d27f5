"""The rollups beside a sink, and `kvcensus rollup`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from console.commands.rollup import rollup
from schemas import topics
from sql import rollups
from sql.database import Database
from sql.store import connect
from streams import rollup_job
from streams.rollup_job import RollupJob, sink_with_rollups
from streams.settings import WorkerSettings
from tests.kafka import Kafka
from tests.rollup_records import empty
from tests.sinking import Feed, sinking, until
from tests.sql_records import START_US, WINDOW_US, duplicate_window, insert, rank_window
from tests.test_rollups import _Failing, check

ROWS = [rank_window(window_start_us=START_US + number * WINDOW_US) for number in range(5)]
COPIES = [
    duplicate_window(window_start_us=START_US + number * WINDOW_US, as_of_us=START_US + (number + 1) * WINDOW_US) for number in range(5)
]


def windows(database: Database) -> list[tuple[Any, ...]]:
    """(grain, windows of ranks in it)."""
    return database.query("SELECT grain, sum(windows) FROM rank_rollups FINAL GROUP BY grain ORDER BY grain").rows


# -- beside the sink --------------------------------------------------------------------------------------------------


def test_rounds_go_on_between_deliveries_and_a_last_one_at_the_end(
    module_kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollup_job, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(rollup_job, "REST", 0)
    monkeypatch.setattr(rollup_job, "LAST_SECONDS", 60.0)
    job, seen = RollupJob(), []

    def beside(store: Database) -> None:
        job(store)
        seen.append(windows(store))

    feed = Feed(module_kafka)
    with sinking(module_kafka, tmp_path, beside=beside, session_ms=3000) as sink:
        job.sink = sink
        feed.send(topics.RANK_WINDOWS, *ROWS[:3])
        until(lambda: [("1d", 3), ("1h", 3), ("5m", 3)] in seen, "rollups of what was delivered")
        monkeypatch.setattr(rollup_job, "EVERY_SECONDS", 3600.0)
        until(lambda: job._work is None, "the end of a round")
        feed.send(topics.RANK_WINDOWS, *ROWS[3:])
        feed.send(topics.DUPLICATE_WINDOWS, *COPIES)
        until(lambda: sink.inserted == 10, "all rows")
    with connect(None, tmp_path) as database:
        check(database, [*ROWS, *COPIES])
        assert rollups.run(database).idle


def test_a_sink_keeps_them_only_with_the_first_partition(module_store: Database, module_kafka: Kafka, tmp_path: Path) -> None:
    sink = sink_with_rollups(WorkerSettings(module_kafka.bootstrap_servers, tmp_path))
    assert not sink.leads  # it has joined no group
    job = RollupJob()
    job.sink = sink
    empty(module_store)
    insert(module_store, ROWS)
    job(module_store)
    assert windows(module_store) == []


def test_a_round_that_fails_is_said_once_and_begun_again(
    module_store: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollup_job, "SLICE_SECONDS", 60.0)
    empty(module_store)
    insert(module_store, ROWS)
    failing, job = _Failing(module_store, 4), RollupJob()
    with caplog.at_level(logging.INFO, "kvcensus.rollups"):
        for _ in range(3):
            job._due = 0.0
            job(failing)
        job(failing)  # not due
        assert len(caplog.records) == 1
        assert "the rollups stay behind and are tried again" in caplog.text
        failing.left, job._due = 10**6, 0.0
        job(failing)
    assert caplog.records[-1].getMessage() == "rolled up again"
    check(module_store, ROWS)


def test_a_round_goes_on_where_it_was(module_store: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollup_job, "SLICE_SECONDS", 1e-9)  # one step at a time
    empty(module_store)
    insert(module_store, [*ROWS, *COPIES])
    job, turns = RollupJob(), 0
    while not turns or job._work is not None:
        job(module_store)
        turns += 1
    assert turns > 4
    check(module_store, [*ROWS, *COPIES])


# -- the command ------------------------------------------------------------------------------------------------------


def invoke(data_dir: Path, *arguments: str) -> Result:
    """`kvcensus rollup` on the store in ``data_dir``."""
    return CliRunner().invoke(rollup, [*arguments, "--data-dir", str(data_dir)])


def test_the_command_rolls_up_what_has_changed_and_a_span_on_demand(module_store: Database) -> None:
    folder = Path(module_store.place).parent
    empty(module_store)
    insert(module_store, [*ROWS, *COPIES])
    first = invoke(folder)
    assert first.exit_code == 0, first.output
    assert first.output == "rank_windows: 1 windows of 5 minutes rolled up\nduplicate_windows: 1 windows of 5 minutes rolled up\n"
    assert invoke(folder).output == "nothing has changed: the rollups are up to date\n"
    again = invoke(folder, "--since", str(START_US // 10**6), "--json")
    assert json.loads(again.stdout) == {"windows": {"rank_windows": 1, "duplicate_windows": 1}, "expired": 0, "absences": 0}
    assert invoke(folder, "--until", str(START_US // 10**6)).output == "nothing has changed: the rollups are up to date\n"
    check(module_store, [*ROWS, *COPIES])


def test_the_command_says_in_a_line_what_is_wrong(tmp_path: Path) -> None:
    assert "there is no store in" in str(invoke(tmp_path / "none").exception)
    bad = invoke(tmp_path, "--since", "2026-01-02", "--until", "2026-01-01")
    assert bad.exit_code == 2
    assert "must lie before" in bad.output
