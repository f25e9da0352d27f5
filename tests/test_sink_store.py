"""The sink before a store that is full, busy, refuses, or lost its schema: it waits, says why and what to do, and goes on by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas import topics
from schemas.records import DeadLetter, Op
from sql import migrate, rollups
from sql.database import Database, StoreError, StoreUnavailable
from sql.embedded import EmbeddedDatabase
from sql.store import HttpDatabase, connect
from streams import rollup_job
from streams import sink as sink_module
from streams.settings import WorkerSettings
from streams.sink import Sink
from tests.clickhouse_http import clickhouse_server, refusing
from tests.kafka import Kafka
from tests.sinking import Feed, batch, committed, heartbeat, rows, sinking, until
from tests.sql_records import START_US, rank_window

REFUSALS: list[tuple[int | None, int, str, str]] = [
    (243, 500, "Cannot reserve 1.00 MiB, not enough space. (NOT_ENOUGH_SPACE)", "free disk space where ClickHouse keeps its data"),
    (252, 500, "Too many parts (3000) in table. (TOO_MANY_PARTS)", "merges are behind"),
    (241, 500, "Memory limit (total) exceeded. (MEMORY_LIMIT_EXCEEDED)", "nothing to do if it passes"),
    (242, 500, "Table is in readonly mode. (TABLE_IS_READ_ONLY)", "a replicated one has lost its keeper"),
    (159, 408, "Timeout exceeded: elapsed 300 seconds. (TIMEOUT_EXCEEDED)", "nothing to do if it passes"),
    (202, 500, "Too many simultaneous queries. (TOO_MANY_SIMULTANEOUS_QUERIES)", "nothing to do if it passes"),
    (319, 500, "Unknown status, client must retry. (UNKNOWN_STATUS_OF_INSERT)", "the rows are inserted again"),
    (164, 500, "Cannot execute query in readonly mode. (READONLY)", "may only read"),
    (497, 403, "tester: Not enough privileges: INSERT. (ACCESS_DENIED)", "let the user of --clickhouse-url INSERT"),
    (516, 403, "tester: Authentication failed. (AUTHENTICATION_FAILED)", "see user and password in --clickhouse-url"),
    (60, 404, "Table kvcensus.lifecycle does not exist. (UNKNOWN_TABLE)", "run `kvcensus migrate`"),
    (16, 404, "No such column x in table kvcensus.lifecycle. (NO_SUCH_COLUMN_IN_TABLE)", "run `kvcensus migrate`"),
    (None, 502, "<html>Bad Gateway</html>", "see the log of ClickHouse"),
]
"""ClickHouse's number (None: a proxy's page), HTTP status, what is said, and what the sink says is to be done."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A ClickHouse server for all tests of the module: its URL and folder."""
    folder = tmp_path_factory.mktemp("server") / "store"
    with clickhouse_server(folder) as url:
        with connect(url, Path("unused")) as store:
            migrate.apply(store)
        yield url, folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a test can wait for."""
    monkeypatch.setattr(sink_module, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(sink_module, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(sink_module, "_LONGEST_PAUSE", 0.2)


def empty(url: str, table: str) -> None:
    """Begin with an empty table: the tests of this module share the server."""
    with connect(url, Path("unused")) as store:
        store.command(f"TRUNCATE TABLE {table}")


@pytest.mark.usefixtures("quick")
def test_whatever_the_store_says_it_waits_says_so_once_and_goes_on(
    module_kafka: Kafka, server: tuple[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, folder = server
    feed = Feed(module_kafka)
    with caplog.at_level(logging.INFO, "kvcensus.sink"), sinking(module_kafka, tmp_path, url, session_ms=3000) as sink:
        for number, (code, status, text, advised) in enumerate(REFUSALS):
            caplog.clear()
            before = f"Code: {code}. DB::Exception: " if code else ""
            with refusing(folder, code, before + text, status=status):
                feed.send(topics.LIFECYCLE, heartbeat(number))
                until(lambda: "results wait on their topics" in caplog.text, text)
                time.sleep(0.2)  # some attempts more
                assert (sink.waiting, sink.inserted) == (True, number)
            until(lambda: "the store takes rows again" in caplog.text, "the store")
            said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            assert len(said) == 1, said
            assert "insert into lifecycle" in said[0]
            assert advised in said[0]
            assert "secret" not in said[0]
        caplog.clear()
        with connect(url, tmp_path) as store:
            store.command("RENAME TABLE lifecycle TO away")
            feed.send(topics.LIFECYCLE, heartbeat(1_000))
            until(lambda: "the schema is gone" in caplog.text, "the sink to miss its table")
            store.command("RENAME TABLE away TO lifecycle")
        wanted = len(REFUSALS) + 1
        until(lambda: committed(module_kafka, topics.LIFECYCLE) == wanted, "the commit")
        assert rows("SELECT count() FROM lifecycle", tmp_path, url) == [(wanted,)]
        assert (sink.inserted, sink.poisoned, sink.bad_rows) == (wanted, 0, 0)


def test_what_is_gathered_while_the_store_is_away_is_bounded_in_bytes_too(
    module_kafka: Kafka, server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, folder = server
    size = 100_000
    monkeypatch.setattr(sink_module, "MAX_BYTES", 1_000_000)
    feed = Feed(module_kafka)
    letters = [DeadLetter("kvcensus.batches", 0, number, "holder", "why", None, b"x" * size, size) for number in range(60)]
    empty(url, "dead_letters")
    with refusing(folder, 243, "Code: 243. DB::Exception: full (NOT_ENOUGH_SPACE)") as end:
        feed.send(topics.DEAD_LETTERS, *letters)
        with sinking(module_kafka, tmp_path, url, session_ms=3000) as sink:
            until(lambda: sink.waiting, "the sink to wait")
            for _ in range(10):
                held = sum(len(message.value() or b"") for message in sink._held)
                assert sink._gathered.bytes + held < 1_000_000 + 2 * size
                time.sleep(0.05)
            end()
            until(lambda: rows("SELECT count() FROM dead_letters", tmp_path, url) == [(60,)], "all letters")
            assert sink._deliveries >= 6


def test_a_message_of_very_many_rows_is_inserted_in_pieces(
    module_kafka: Kafka, server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "INSERT_ROWS", 100)
    url = server[0]
    ids = b"".join(number.to_bytes(16, "big") for number in range(1, 1_051))
    with sinking(module_kafka, tmp_path, url, session_ms=3000):
        Feed(module_kafka).send(topics.BATCHES, batch(77, Op("REMOVE", block_ids=ids)))
        until(lambda: rows("SELECT count() FROM block_events WHERE seq = 77", tmp_path, url) == [(1_050,)], "all blocks")


def test_nonsense_by_the_hundred_is_set_aside_and_what_comes_behind_is_written(
    module_kafka: Kafka, server: tuple[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = server[0]
    bad = [rank_window(version=-1, instance_id="bad", window_start_us=START_US + number) for number in range(300)]
    empty(url, "dead_letters")
    with caplog.at_level(logging.INFO, "kvcensus.sink"), sinking(module_kafka, tmp_path, url, session_ms=3000) as sink:
        Feed(module_kafka).send(topics.RANK_WINDOWS, *bad, rank_window(instance_id="good"))
        until(lambda: rows("SELECT count() FROM dead_letters", tmp_path, url) == [(300,)], "the dead letters")
        until(lambda: rows("SELECT instance_id FROM rank_windows", tmp_path, url) == [("good",)], "the good row")
        assert sink.bad_rows == 300
    assert (
        0
        < sum("not written: row" in record.getMessage() for record in caplog.records)
        <= 3 * caplog.text.count("more rows of rank_windows")
    )


def test_it_says_what_it_has_done_and_does_what_is_to_be_done_beside(
    module_kafka: Kafka, server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sink_module, "_REPORT_SECONDS", 0.0)
    seen: list[int] = []

    def beside(store: Database) -> None:
        seen.append(int(store.query("SELECT count() FROM lifecycle WHERE at = '2001-09-09 01:46:40'").rows[0][0]))
        if len(seen) == 1:
            raise StoreError("not now")

    with caplog.at_level(logging.INFO, "kvcensus.sink"), sinking(module_kafka, tmp_path, server[0], beside, session_ms=3000):
        until(lambda: seen, "an idle moment")
        Feed(module_kafka).send(topics.LIFECYCLE, heartbeat(10**12))
        until(lambda: seen[-1] == 1, "the moment after the delivery")
        until(lambda: "1 rows written since the start (1 since this was last said)" in caplog.text, "the sum of it")
    assert "not now; trying again after the next delivery" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_start_waits_for_what_may_pass_and_ends_for_what_will_not(
    module_kafka: Kafka, server: tuple[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, folder = server
    settings = WorkerSettings(module_kafka.bootstrap_servers, tmp_path, clickhouse_url=url)
    with refusing(folder, 516, "Code: 516. DB::Exception: who? (AUTHENTICATION_FAILED)", status=403, all_requests=True):
        with pytest.raises(StoreError, match="AUTHENTICATION_FAILED"):
            Sink(settings).prepare()
        with pytest.raises(StoreError, match="AUTHENTICATION_FAILED"):
            Sink(settings).run()
    busy = "Code: 202. DB::Exception: busy (TOO_MANY_SIMULTANEOUS_QUERIES)"
    with caplog.at_level(logging.INFO, "kvcensus.sink"), refusing(folder, 202, busy, all_requests=True) as end:
        Sink(settings).prepare()
        with sinking(module_kafka, tmp_path, url, session_ms=3000) as sink:
            until(lambda: sink.waiting and "waiting for it: nothing to do if it passes" in caplog.text, "the sink to wait")
            end()
            until(lambda: "the store answers" in caplog.text, "the sink to begin")


def test_a_start_waits_for_a_store_that_goes_away_while_its_schema_is_made(
    module_kafka: Kafka, server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WorkerSettings(module_kafka.bootstrap_servers, tmp_path, clickhouse_url=f"{server[0]}/fresh")
    made = "CREATE TABLE IF NOT EXISTS made (x Int8) ENGINE = Memory"
    monkeypatch.setattr(migrate, "shipped", lambda: [migrate.Migration(1, "one", made)])
    plain, left = HttpDatabase.command, [1]

    def command(self: HttpDatabase, sql: str) -> None:
        if sql == made and left.pop():
            left.append(0)
            raise StoreUnavailable("no answer")
        plain(self, sql)

    monkeypatch.setattr(HttpDatabase, "command", command)
    sink = Sink(settings)
    sink.prepare()
    assert (left, sink._store) == ([0], None)


def test_rollups_that_fail_in_any_way_do_not_end_the_sink(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def steps(store: Database) -> Iterator[tuple[int, int]]:
        yield 0, 1
        raise IndexError("an answer without rows")

    monkeypatch.setattr(rollups, "steps", steps)
    job = rollup_job.RollupJob()
    for _ in range(2):
        job(EmbeddedDatabase.__new__(EmbeddedDatabase))
        job._due = 0.0
    assert [record.getMessage() for record in caplog.records] == [
        "IndexError('an answer without rows'); the rollups stay behind and are tried again"
    ]
