"""Counting stored facts again gives the rows of the worker, beside those of earlier rules."""

from __future__ import annotations

import heapq
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Producer

from console.cli import cli
from producers.simulate import fleet, presets
from schemas import codec, topics
from schemas.errors import KvcensusError
from schemas.records import DuplicateWindow, RankMessage, RankWindow, Scrape, rank_key
from sql import migrate
from sql.database import Database
from sql.facts import facts
from sql.rows import TableRows
from sql.store import connect
from streams.offline import Counted, OfflineFleet
from streams.reclassify import Recount
from streams.residency import SEMANTICS_VERSION
from streams.settings import WorkerSettings
from streams.sink import Sink
from tests.clickhouse_http import clickhouse_server
from tests.counting import interleaved, messages
from tests.kafka import Kafka
from tests.sql_records import rank_window, write

PLACES = ("partition", "offset")
RESULTS = ("rank_windows", "recomputes", "duplicate_windows", "shared_prefixes")

Placed = tuple[int, int, RankMessage]


@pytest.fixture(scope="module")
def stream() -> list[RankMessage]:
    """A small fleet with scrapes between its batches, ten times as slow as it was made, so that it fills windows."""
    sources = fleet.sources(presets.test_fleets()["salts-and-adapters"])
    rng = random.Random(7)
    ranks = []
    for said in messages(sources):
        mixed = []
        for number, each in enumerate(said):
            mixed.append(each)
            if number % 20 == 19:
                scrape = Scrape(each.observed_at_ms, 0.1, 1_000_000, 16, 1, number * 100, number * 10)
                mixed.append(msgspec.structs.replace(each, batch=None, seq=each.seq + 1, scrape=scrape))
        ranks.append(mixed)
    mixture = interleaved(ranks, rng.randrange)
    start = min(each.at_us for each in mixture if each.at_us)
    for each in mixture:
        each.at_us += max(each.at_us - start, 0) * 9
    return mixture


def placed(stream: Iterable[RankMessage]) -> list[Placed]:
    """The messages as they might lie on two partitions."""
    ends = [5, 900]
    out = []
    for message in stream:
        partition = message.dp_rank % 2
        out.append((partition, ends[partition], message))
        ends[partition] += 1
    return out


def counted(placed: Iterable[Placed], window_us: int = 10_000_000) -> Counted:
    """What a worker makes of them that is never behind."""
    offline = OfflineFleet(window_us=window_us)
    for _, offset, message in in_time(placed):
        offline.apply(message, offset)
        offline.drain()
    return offline.drain()


def in_time(placed: Iterable[Placed]) -> list[Placed]:
    """The ranks side by side, each in its order."""
    ranks: dict[str, list[Placed]] = {}
    for each in placed:
        ranks.setdefault(rank_key(each[2].instance_id, each[2].dp_rank), []).append(each)
    return list(heapq.merge(*ranks.values(), key=lambda each: each[2].at_us))


def insert(database: Database, records: Iterable[Any], places: Iterable[tuple[int, int]] | None = None) -> None:
    some = list(records)
    where = [(-1, -1)] * len(some) if places is None else list(places)
    for start in range(0, len(some), 2_000):  # the server of the tests takes no more than one block of rows
        rows = TableRows()
        for record, place in zip(some[start : start + 2_000], where[start : start + 2_000], strict=True):
            rows.add(record, *place)
        write(database, rows)


def insert_facts(database: Database, placed: Iterable[Placed]) -> None:
    some = list(placed)
    insert(database, [message for *_, message in some], [place for *place, _ in some])  # type: ignore[misc]


def insert_results(database: Database, results: Counted) -> None:
    insert(database, [*results.rank_windows, *results.recomputes, *results.duplicate_windows, *results.shared_prefixes])


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with connect(None, tmp_path) as database:
        migrate.apply(database)
        yield database


def table(database: Database, name: str, *, but: tuple[str, ...] = (), where: str = "1") -> list[tuple[Any, ...]]:
    """All rows of a table, without when they were inserted."""
    found = database.query(f"SELECT * EXCEPT ({', '.join(('inserted_at', *but))}) FROM {name} FINAL WHERE {where}", final=True)
    return sorted(found.rows, key=repr)


# What a merger tells of its own run: which shard said what when.
OF_THE_RUN = ("version", "shards", "shards_reported", "ranks", "rank_lag_us", "late_changes")


def results(database: Database, where: str = "1") -> dict[str, list[tuple[Any, ...]]]:
    """The result tables, but for what belongs to one run of the merger."""
    return {
        "rank_windows": table(database, "rank_windows", where=where),
        "recomputes": table(database, "recomputes", where=where),
        "duplicate_windows": table(database, "duplicate_windows", but=OF_THE_RUN, where=where),
        "shared_prefixes": table(database, "shared_prefixes", but=("version",), where=where),
    }


def reclassify(data_dir: Path, *arguments: str) -> dict[str, Any]:
    done = run(data_dir, *arguments, "--json")
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def run(data_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["reclassify", "--data-dir", str(data_dir), *arguments])


def forget(database: Database, *tables: str) -> None:
    for name in tables or RESULTS:
        database.command(f"TRUNCATE TABLE {name}")


def test_facts_counted_again_give_the_rows_of_the_worker(database: Database, tmp_path: Path, stream: list[RankMessage]) -> None:
    facts_of = placed(stream)
    insert_facts(database, facts_of)
    earlier = rank_window(semantics_version=1, version=10**9, window_start_us=stream[-1].at_us // 10_000_000 * 10_000_000)
    insert_results(database, counted(facts_of))
    insert(database, [earlier])
    expected = results(database, f"semantics_version = {SEMANTICS_VERSION}")
    old = table(database, "rank_windows", where="semantics_version = 1")
    assert all(expected[name] for name in ("rank_windows", "recomputes", "duplicate_windows")), "the stream tells something"
    assert len(old) == 1
    database.close()

    document = reclassify(tmp_path)  # what stands is as good
    assert document["facts"] == {"batches": sum(each.batch is not None for each in stream), "missing_batches": 0, "unreadable": 0}
    assert document["ranks"] == sorted({rank_key(each.instance_id, each.dp_rank) for each in stream})
    assert {name: tally["written"] for name, tally in document["rows"].items()} == dict.fromkeys(RESULTS, 0)

    with connect(None, tmp_path) as database:
        for name in RESULTS:
            database.command(f"ALTER TABLE {name} DELETE WHERE semantics_version = {SEMANTICS_VERSION} SETTINGS mutations_sync = 2")
    trial = reclassify(tmp_path, "--dry-run")
    with connect(None, tmp_path) as database:
        assert results(database, f"semantics_version = {SEMANTICS_VERSION}") == {name: [] for name in RESULTS}, "nothing but tried"
    document = reclassify(tmp_path)
    assert document["rows"] == trial["rows"]
    with connect(None, tmp_path) as database:
        assert results(database, f"semantics_version = {SEMANTICS_VERSION}") == expected
        versions = table(database, "duplicate_windows")
    document = reclassify(tmp_path)
    assert {tally["written"] for tally in document["rows"].values()} == {0}
    with connect(None, tmp_path) as database:
        assert table(database, "duplicate_windows") == versions, "a second time changes nothing"
        assert table(database, "rank_windows", where="semantics_version = 1") == old


def test_a_part_of_the_span_or_of_the_ranks(database: Database, tmp_path: Path, stream: list[RankMessage]) -> None:
    facts_of = placed(stream)
    insert_facts(database, facts_of)
    insert_results(database, counted(facts_of, 1_000_000))
    times = sorted(each.at_us for each in stream if each.batch is not None)
    since, until = times[len(times) // 3] // 1_000_000 * 1_000_000, times[2 * len(times) // 3] // 1_000_000 * 1_000_000
    inside = f"window_start >= fromUnixTimestamp64Micro({since}, 'UTC') AND window_start < fromUnixTimestamp64Micro({until}, 'UTC')"
    expected = {name: table(database, name, where=inside, but=OF_THE_RUN) for name in ("duplicate_windows",)}
    expected["rank_windows"] = table(database, "rank_windows", where=inside)
    instants = f"as_of > fromUnixTimestamp64Micro({since}, 'UTC') AND as_of <= fromUnixTimestamp64Micro({until}, 'UTC')"
    expected["shared_prefixes"] = table(database, "shared_prefixes", where=instants, but=("version",))
    assert all(expected.values())
    forget(database)
    database.close()
    reclassify(tmp_path, "--since", str(since // 1_000_000), "--until", str(until // 1_000_000), "--window", "1")
    with connect(None, tmp_path) as database:
        assert table(database, "rank_windows") == expected["rank_windows"]
        assert table(database, "duplicate_windows", but=OF_THE_RUN) == expected["duplicate_windows"]
        assert table(database, "shared_prefixes", but=("version",)) == expected["shared_prefixes"]
        forget(database)
    one = rank_key(stream[0].instance_id, stream[0].dp_rank)
    document = reclassify(tmp_path, "--rank", one)
    assert document["ranks"] == [one]
    assert "need all ranks" in document["warnings"][0]
    with connect(None, tmp_path) as database:
        rows = database.query("SELECT DISTINCT instance_id, dp_rank FROM rank_windows").rows
        assert [rank_key(*row) for row in rows] == [one]
        assert database.query("SELECT count() FROM duplicate_windows").rows == [(0,)]


def test_where_facts_are_gone_what_saw_more_stays(database: Database, tmp_path: Path, stream: list[RankMessage]) -> None:
    """The facts before some instant have been dropped: counting again attaches late there, and says so."""
    facts_of = placed(stream)
    insert_results(database, counted(facts_of))
    expected = results(database)
    times = sorted(each.at_us for each in stream if each.batch is not None)
    middle = times[len(times) // 2]
    insert_facts(database, [each for each in facts_of if each[2].at_us >= middle or each[2].declaration is not None])
    database.close()
    document = reclassify(tmp_path)
    assert document["rows"]["rank_windows"]["kept"] == document["rows"]["rank_windows"]["counted"] > 0
    with connect(None, tmp_path) as database:
        assert results(database) == expected
        forget(database)
    reclassify(tmp_path)
    with connect(None, tmp_path) as database:
        question = """
            SELECT instance_id, dp_rank, argMin(reasons, window_start), argMin(observed_us < window_us, window_start)
            FROM rank_windows FINAL GROUP BY instance_id, dp_rank
        """
        first = {(instance, rank): (reasons, partly) for instance, rank, reasons, partly in database.query(question).rows}
        cut = {(each.instance_id, each.dp_rank) for each in stream if each.batch is not None and each.at_us < middle} & first.keys()
        assert cut
        assert all("late_attach" in first[rank][0] and first[rank][1] for rank in cut)
        # A row that saw more takes the place of one that saw less.
        insert_facts(database, facts_of)
    document = reclassify(tmp_path)
    assert document["rows"]["rank_windows"]["written"] > 0
    with connect(None, tmp_path) as database:
        names = "instance_id, dp_rank, window_start, observed_us"
        found = set(database.query(f"SELECT {names} FROM rank_windows FINAL", final=True).rows)
        forget(database)
        insert_results(database, counted(facts_of))
        assert found == set(database.query(f"SELECT {names} FROM rank_windows FINAL", final=True).rows)


def test_a_server_is_read_and_written_as_the_embedded_store_is(tmp_path: Path, stream: list[RankMessage]) -> None:
    facts_of = placed(stream)
    with clickhouse_server(tmp_path / "server") as url:
        with connect(url, tmp_path) as database:
            migrate.apply(database)
            insert_results(database, counted(facts_of))
            expected = results(database)
            forget(database)
            insert_facts(database, facts_of)
        document = reclassify(tmp_path, "--clickhouse-url", url)
        assert document["rows"]["rank_windows"]["written"] > 0
        with connect(url, tmp_path) as database:
            assert results(database) == expected


def test_cut_short_while_it_counts_it_has_changed_nothing(database: Database, tmp_path: Path, stream: list[RankMessage]) -> None:
    insert_facts(database, placed(stream))
    database.close()
    program = (
        "import os, signal, sys\n"
        "from console import cli\n"
        "from streams.reclassify import Recount\n"
        "apply = Recount.apply\n"
        "def interrupted(self, *given):\n"
        "    if self.messages == 300:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return apply(self, *given)\n"
        "Recount.apply = interrupted\n"
        "cli.main()\n"
    )
    command = [sys.executable, "-c", program, "reclassify", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1], timeout=120)
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr
    with connect(None, tmp_path) as database:
        assert results(database) == {name: [] for name in RESULTS}


def test_what_a_user_can_get_wrong(database: Database, tmp_path: Path, stream: list[RankMessage]) -> None:
    def refused(*arguments: str, data_dir: Path = tmp_path, match: str, code: int = 1) -> None:
        done = run(data_dir, *arguments)
        said = str(done.exception) if isinstance(done.exception, KvcensusError) else done.output
        assert match in said, said
        assert (2 if done.exit_code == 2 else 1) == code

    refused("--since", "2h", "--until", "3h", match="must lie before", code=2)
    refused("--warm-up", "2", match="needs --since", code=2)
    refused("--rank", "nobody", match="expected INSTANCE/R", code=2)
    refused("--since", "soon", match="--since", code=2)
    for option in ("--grace", "--history-hours", "--history-blocks", "--warm-up"):
        refused("--since", "2h", option, "1" + 300 * "0", match=option, code=2)
    refused(data_dir=tmp_path / "none", match="there is no store")
    database.close()
    refused(match="no facts are stored")
    with connect(None, tmp_path) as database:
        insert_facts(database, placed(stream))
        insert(database, [rank_window(semantics_version=SEMANTICS_VERSION, window_us=20_000_000)])
    refused("--rank", "nobody/0", match="nobody/0")
    refused("--window", "10", match="windows of 20 s")
    with connect(None, tmp_path, own=True):
        refused(match="can only be asked: stop that process")
        assert reclassify(tmp_path, "--dry-run")["window_us"] == 20_000_000


def test_facts_that_a_sink_wrote_count_as_they_did_on_the_topic(kafka: Kafka, tmp_path: Path, stream: list[RankMessage]) -> None:
    feed: list[Placed] = []
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "partitioner": "murmur2_random", "linger.ms": 5})
    for message in stream:

        def delivered(error: object, sent: Any, message: RankMessage = message) -> None:
            assert error is None
            feed.append((sent.partition(), sent.offset(), message))

        key = rank_key(message.instance_id, message.dp_rank).encode()
        producer.produce(topics.BATCHES.name, codec.encode(message), key, on_delivery=delivered)
        producer.poll(0)
    assert producer.flush(60) == 0
    sink = Sink(WorkerSettings(kafka.bootstrap_servers, tmp_path, options={"session.timeout.ms": "6000"}))
    thread = threading.Thread(target=sink.run)
    thread.start()
    try:
        with connect_when_owned(tmp_path) as database:
            wanted = [(sum(each.batch is not None for each in stream),)]
            deadline = time.monotonic() + 120
            while not has_table(database, "batches") or database.query("SELECT count() FROM batches", final=True).rows != wanted:
                assert time.monotonic() < deadline
                time.sleep(0.1)
    finally:
        sink.stop()
        thread.join(60)
    with connect(None, tmp_path) as database:
        recount = Recount(OfflineFleet())
        found = facts(database)
        rows = [row for fact in found for row in recount.apply(fact.instance_id, fact.dp_rank, fact.offset, fact.message)]
        rows += recount.finish()
    expected = counted(feed)
    assert found.missing == {}
    assert newest_windows(rows) == newest_windows(expected.rank_windows)
    assert fleet_windows(rows) == fleet_windows(expected.duplicate_windows)


def connect_when_owned(data_dir: Path) -> Database:
    deadline = time.monotonic() + 60
    while True:
        database = None
        if (data_dir / "store.json").exists():
            database = connect(None, data_dir)
            if database.kind == "owner":
                return database
            database.close()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def has_table(database: Database, name: str) -> bool:
    return bool(database.query("SELECT 1 FROM system.tables WHERE name = {name:String}", {"name": name}).rows)


def newest_windows(rows: Iterable[Any]) -> dict[tuple[Any, ...], RankWindow]:
    found: dict[tuple[Any, ...], RankWindow] = {}
    for row in rows:
        if isinstance(row, RankWindow):
            key = (row.instance_id, row.dp_rank, row.life_id, row.window_start_us)
            if key not in found or row.version >= found[key].version:
                found[key] = row
    return found


def fleet_windows(rows: Iterable[Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    found: dict[tuple[Any, ...], DuplicateWindow] = {}
    for row in rows:
        if isinstance(row, DuplicateWindow):
            key = (row.scope, row.scope_key, row.tier, row.window_start_us)
            if key not in found or row.version >= found[key].version:
                found[key] = row
    fields = [name for name in DuplicateWindow.__struct_fields__ if name not in OF_THE_RUN]
    return {key: {name: getattr(row, name) for name in fields} for key, row in found.items()}
