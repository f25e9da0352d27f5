"""The parts of the worker that need no broker."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import Producer

from schemas import codec
from schemas.errors import KvcensusError
from schemas.records import DuplicateWindow, RankWindow, ResidencyChanges, ResidencyStep
from schemas.topics import BATCHES, RECORD_TOPICS
from streams.emit import IN_FLIGHT, Outbox, parts
from streams.positions import Positions
from streams.settings import WorkerSettings, faust_config, faust_security, from_environment, untranslated
from streams.sink import Sink
from streams.startup import check_layout, needed_topics
from streams.tables import CHANGELOGS, IDLE_SECONDS, WindowLedger, group_of_key, row_key
from streams.watchdog import Stalls, Watchdog
from tests.kafka import Kafka
from tests.sql_records import duplicate_window, rank_window

WINDOW_US = 10_000_000

# -- positions ------------------------------------------------------------------------------------------------------


def test_positions_take_each_message_once_and_only_of_held_partitions() -> None:
    positions = Positions("t")
    assert not positions.take(0, 0)
    assert positions.hold({0, 1}) == set()
    assert [positions.take(0, offset) for offset in (0, 1, 1, 0, 2)] == [True, True, False, False, True]
    assert positions.all() == {("t", 0): 3, ("t", 1): 0}
    assert positions.hold({1, 2}) == {0}
    assert not positions.take(0, 3)
    positions.hold({0})
    assert positions.take(0, 0), "a partition that comes back is read from its start"


def test_positions_do_not_go_on_behind_a_hole() -> None:
    positions = Positions("t")
    positions.hold({0, 1})
    positions.take(0, 0)
    assert [positions.take(0, offset) for offset in (3, 4)] == [False, False]
    assert positions.holes() == {("t", 0): 1}
    assert [positions.take(0, offset) for offset in (1, 2, 3)] == [True, True, True]
    assert positions.holes() == {}
    assert not positions.take(0, 9)
    positions.starts_at(0, 9)  # nothing lies between, says the broker
    assert positions.take(0, 9)
    assert positions.holes() == {}
    assert not positions.take(1, 5)
    positions.hold({0})
    assert positions.holes() == {}, "what moved away is somebody else's"


# -- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", [rank_window(instance_id="a|b/c", dp_rank=3), duplicate_window(scope="workload", scope_key="x|y", tier="GPU|1")]
)
def test_the_group_of_a_row_can_be_read_from_its_key(row: RankWindow | DuplicateWindow) -> None:
    group = group_of_key(row_key(row, WINDOW_US))
    assert group == ("a|b/c/3" if isinstance(row, RankWindow) else "workload|x|y|GPU|1")


def ledger(table: dict[str, bytes], **options: Any) -> WindowLedger[RankWindow]:
    return WindowLedger(table, RankWindow, base_us=WINDOW_US, **options)


def give_out(book: WindowLedger[RankWindow], row: RankWindow) -> None:
    book.given_out(row, codec.encode(row))


def test_a_row_is_news_if_its_version_is_above_the_one_given_out() -> None:
    table: dict[str, bytes] = {}
    book = ledger(table)
    give_out(book, rank_window(version=5))
    assert [book.is_news(rank_window(version=version)) for version in (4, 5, 6)] == [False, False, True]
    assert book.withheld == 2
    again = ledger(table)  # a restart: only the table is left
    again.rebuild()
    assert [again.is_news(rank_window(version=version)) for version in (5, 6)] == [False, True]
    assert again.is_news(rank_window(version=1, life_id="another life"))
    assert again.is_news(rank_window(version=1, semantics_version=99))
    assert WindowLedger(table, RankWindow, base_us=2 * WINDOW_US).is_news(rank_window(version=1)), "another window length is another row"
    assert ledger(table, rules=".more history").is_news(rank_window(version=5)), "what was counted otherwise is another row"


def test_an_entry_that_cannot_be_read_counts_as_absent() -> None:
    row = rank_window(version=1)
    assert ledger({row_key(row, WINDOW_US): b"rubbish"}).is_news(row)


def test_entries_leave_the_table_when_their_rank_has_moved_on() -> None:
    table: dict[str, bytes] = {}
    book = ledger(table, retention_us=3 * WINDOW_US)
    for number in range(6):
        give_out(book, rank_window(window_start_us=number * WINDOW_US))
        give_out(book, rank_window(instance_id="slow", window_start_us=WINDOW_US))
    starts = sorted(int(key.rsplit("|", 1)[1]) // WINDOW_US for key in table if not key.startswith("slow"))
    assert starts == [2, 3, 4, 5]
    assert sum(key.startswith("slow") for key in table) == 1
    give_out(book, rank_window(window_start_us=0))  # too old to be kept
    assert len(table) == 5
    table.clear()
    book.rebuild()
    give_out(book, rank_window(window_start_us=0))
    assert len(table) == 1


def test_a_rank_that_went_away_leaves_the_table() -> None:
    table: dict[str, bytes] = {}
    book = ledger(table)
    for name in ("gone", "here"):
        for number in range(2):
            give_out(book, rank_window(instance_id=name, window_start_us=number * WINDOW_US))
    assert book.expire(0) == 0
    give_out(book, rank_window(instance_id="here", window_start_us=WINDOW_US, version=9))
    book.rebuild()  # partitions moved; what was idle stays idle
    assert book.expire(IDLE_SECONDS - 1) == 0
    assert book.expire(IDLE_SECONDS) == 2
    assert all(key.startswith("here") for key in table)
    assert book.is_news(rank_window(instance_id="gone", window_start_us=0, version=1)), "back again, it is given out again"
    assert book.expire(3 * IDLE_SECONDS) == 2
    assert not table


# -- sending --------------------------------------------------------------------------------------------------------


def changes(*steps: ResidencyStep) -> ResidencyChanges:
    return ResidencyChanges("a", 0, "w", "m", 99, 990, list(steps))


def step(offset: int, blocks: int) -> ResidencyStep:
    return ResidencyStep(offset, offset * 10, "GPU", 16, bytes(16 * blocks))


def test_changes_are_cut_between_source_offsets_and_lose_nothing() -> None:
    whole = changes(step(1, 10), step(1, 10), step(2, 1), step(3, 40), step(4, 1))
    cut = list(parts(whole, limit=640))
    assert [[each.source_offset for each in part.steps] for part in cut] == [[1, 1, 2], [3], [4]]
    assert [(part.source_offset, part.watermark_us) for part in cut] == [(2, 20), (3, 30), (99, 990)]
    assert [each for part in cut for each in part.steps] == whole.steps
    assert list(parts(changes())) == [changes()], "a watermark goes out also with no steps"
    assert [len(part.steps) for part in parts(changes(step(1, 9), step(1, 9)), limit=10)] == [2], "an offset stays whole"


class Broker:
    """Acknowledges when told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes | None, bytes, int | None]] = []
        self.waiting: list[asyncio.Future[None]] = []

    async def send(self, *, key: bytes | None, value: bytes, partition: int | None = None) -> Awaitable[None]:
        self.sent.append((key, value, partition))
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]


def test_the_outbox_waits_for_acknowledgements_and_bounds_what_is_in_flight() -> None:
    async def scene() -> None:
        broker, outbox, done = Broker(), Outbox(), []
        for number in range(IN_FLIGHT):
            await outbox.send(broker, b"x", key="k", partition=number % 3, then=lambda: done.append(1))
        one_more = asyncio.ensure_future(outbox.send(broker, b"y"))
        await asyncio.sleep(0)
        assert not one_more.done()
        assert len(broker.sent) == IN_FLIGHT
        assert done == []
        for future in broker.waiting:
            future.set_result(None)
        await one_more
        assert len(done) == IN_FLIGHT
        assert broker.sent[0] == (b"k", b"x", 0)
        assert broker.sent[-1] == (None, b"y", None)
        broker.waiting[-1].set_exception(RuntimeError("refused"))
        with pytest.raises(RuntimeError, match="refused"):
            await outbox.settle()
        await outbox.settle()

    asyncio.run(scene())


# -- starting -------------------------------------------------------------------------------------------------------


def counts(many: int = 4) -> dict[str, int]:
    return {topic.name: 1 if topic.single_partition else many for topic in needed_topics()}


def test_topics_fit_or_the_worker_says_what_does_not() -> None:
    assert check_layout({**counts(), "other": 7}, "host:1").shards == 4
    assert {topic.name for topic in (*RECORD_TOPICS, *CHANGELOGS)} == counts().keys()
    with pytest.raises(KvcensusError, match=r"topics missing on host:1: kvcensus.batches; run: kvcensus topics create"):
        check_layout({name: count for name, count in counts().items() if name != BATCHES.name}, "host:1")
    with pytest.raises(KvcensusError, match=r"differ in their partition counts: kvcensus.batches 5"):
        check_layout({**counts(), BATCHES.name: 5}, "host:1")
    with pytest.raises(KvcensusError, match=r"one partition each: kvcensus.duplicate-steps"):
        check_layout({**counts(), "kvcensus.duplicate-steps": 4}, "host:1")


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    found = from_environment(
        {
            "KVCENSUS_BOOTSTRAP_SERVERS": "k:1,k:2",
            "KVCENSUS_DATA_DIR": str(tmp_path),
            "KVCENSUS_CLICKHOUSE_URL": "http://c:8123",
            "KVCENSUS_WINDOW_SECONDS": "2.5",
            "KVCENSUS_FLUSH_SECONDS": "0.25",
            "KVCENSUS_SINK": "no",
            "KVCENSUS_GRACE_SECONDS": "0",
            "KVCENSUS_HISTORY_HOURS": "0.5",
            "KVCENSUS_HISTORY_BLOCKS": "7",
            "KVCENSUS_SNAPSHOT_SECONDS": "5",
            "KVCENSUS_KAFKA_SESSION_TIMEOUT_MS": "6000",
        },
        ["client.id=me"],
    )
    assert found == WorkerSettings(
        "k:1,k:2",
        tmp_path,
        {"session.timeout.ms": "6000", "client.id": "me"},
        "http://c:8123",
        2_500_000,
        0.25,
        False,
        grace_us=0,
        history_us=1_800_000_000,
        history_blocks=7,
        snapshot_seconds=5,
    )
    assert from_environment({"KVCENSUS_DATA_DIR": str(tmp_path)}) == WorkerSettings("127.0.0.1:9092", tmp_path)
    positive = ("KVCENSUS_WINDOW_SECONDS", "KVCENSUS_FLUSH_SECONDS", "KVCENSUS_SNAPSHOT_SECONDS")
    for variable in (*positive, "KVCENSUS_GRACE_SECONDS", "KVCENSUS_HISTORY_HOURS", "KVCENSUS_HISTORY_BLOCKS"):
        endless = () if variable in positive[1:] else ("1" + 300 * "0",)
        for value in ("-1", "soon", "inf", "nan", *endless, *(("0",) if variable in positive else ())):
            with pytest.raises(KvcensusError, match="window" if value in endless and variable == positive[0] else variable):
                from_environment({variable: value, "KVCENSUS_DATA_DIR": str(tmp_path)})


def test_a_demos_broker_is_found_as_long_as_it_lives(tmp_path: Path) -> None:
    (tmp_path / "broker.json").write_text(f'{{"bootstrap_servers": "127.0.0.1:7", "pid": {os.getpid()}}}')
    assert from_environment({"KVCENSUS_DATA_DIR": str(tmp_path)}).bootstrap_servers == "127.0.0.1:7"
    (tmp_path / "broker.json").write_text('{"bootstrap_servers": "127.0.0.1:7", "pid": 4194305}')
    assert from_environment({"KVCENSUS_DATA_DIR": str(tmp_path)}).bootstrap_servers == "127.0.0.1:9092"


def options(**given: str) -> dict[str, str]:
    return {name.replace("_", "."): value for name, value in given.items()}


def test_kafka_security_is_translated_for_the_counting_half() -> None:
    assert faust_security({}) == {}
    plain = faust_security(
        options(security_protocol="sasl_plaintext", sasl_mechanism="SCRAM-SHA-512", sasl_username="u", sasl_password="p")
    )["broker_credentials"]
    assert (plain.protocol.value, plain.mechanism.value, plain.username, plain.password) == ("SASL_PLAINTEXT", "SCRAM-SHA-512", "u", "p")
    tls = faust_security(options(security_protocol="SSL", enable_ssl_certificate_verification="false"))["broker_credentials"]
    assert (tls.protocol.value, tls.context.verify_mode) == ("SSL", ssl.CERT_NONE)
    both = faust_security(options(security_protocol="sasl_ssl", sasl_mechanisms="PLAIN", ssl_endpoint_identification_algorithm="none"))
    context = both["broker_credentials"].ssl_context
    assert (both["broker_credentials"].protocol.value, context.check_hostname, context.verify_mode) == (
        "SASL_SSL",
        False,
        ssl.CERT_REQUIRED,
    )


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (options(security_protocol="sasl_ssl", sasl_mechanism="OAUTHBEARER"), "OAUTHBEARER"),
        (options(security_protocol="tls"), "security.protocol=TLS"),
        (options(security_protocol="ssl", ssl_ca_location="/nowhere/ca.pem"), "certificate files"),
        ({"session.timeout.ms": "soon"}, "session.timeout.ms=soon"),
    ],
)
def test_kafka_options_that_cannot_be_used_are_told(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(KvcensusError, match=complaint):
        faust_config(WorkerSettings("k:1", Path(), given))


@pytest.mark.parametrize(("given", "session"), [({}, 10_000), ({"session.timeout.ms": "6000"}, "6000")])
def test_both_halves_of_a_worker_have_one_session_timeout(
    given: dict[str, str], session: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []

    def consumer(config: dict[str, Any], logger: object) -> Mock:
        told.append(config)
        return Mock()

    monkeypatch.setattr("streams.sink.Consumer", consumer)
    settings = WorkerSettings("127.0.0.1:9", tmp_path, options=given)
    Sink(settings)._subscribe()
    assert told[0]["session.timeout.ms"] == session
    assert faust_config(settings)["broker_session_timeout"] == int(session) / 1000


def test_options_that_only_the_other_client_knows_are_named() -> None:
    given = WorkerSettings("k:1", Path(), {"session.timeout.ms": "6000", "fetch.min.bytes": "1", "group.id": "mine"})
    assert untranslated(given) == ["fetch.min.bytes"]
    assert (given.group, given.sink_group) == ("mine", "mine-sink")
    assert "group.id" not in given.client_config()
    assert faust_config(given)["broker_session_timeout"] == 6.0


# -- watchdog -------------------------------------------------------------------------------------------------------

HERE = ("t", 0)


def test_a_partition_stalls_when_it_does_not_move_though_there_is_more() -> None:
    stalls = Stalls(60)
    assert stalls.note({HERE: 5}, {HERE: 9}, 0) == []
    assert stalls.note({HERE: 5}, {HERE: 9}, 59) == []
    assert stalls.note({HERE: 5}, {HERE: 9}, 60) == [HERE]
    assert stalls.note({HERE: 6}, {HERE: 9}, 70) == [], "it moved"
    assert stalls.note({HERE: 6}, {HERE: 6}, 140) == [], "there is nothing to read"
    assert stalls.note({HERE: 6}, {}, 280) == [], "nobody knows whether there is something to read"
    assert stalls.note({}, {}, 290) == []
    assert stalls.note({HERE: 6}, {HERE: 9}, 500) == [], "it was given away meanwhile"


def test_a_partition_of_a_worker_that_is_busy_with_others_has_more_time() -> None:
    there = ("t", 7)
    stalls = Stalls(60)
    for now in range(0, 600, 10):
        assert stalls.note({HERE: 5, there: now}, {HERE: 9, there: 9_999}, now) == []
    assert stalls.note({HERE: 5, there: 600}, {HERE: 9, there: 9_999}, 600) == [HERE], "it never comes to its turn"
    stalls = Stalls(60)
    for now in range(0, 60, 10):
        assert stalls.note({HERE: 5, there: now}, {HERE: 9, there: now}, now) == []
    assert stalls.note({HERE: 5, there: 60}, {HERE: 9, there: 60}, 60) == [HERE], "the other has nothing left to read"


def test_the_watchdog_tells_a_stall_from_a_partition_that_has_been_read(kafka: Kafka, tmp_path: Path) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for _ in range(3):  # one by one: an embedded broker counts its end by batches
        producer.produce(BATCHES.name, b"x", partition=1)
        producer.flush()
    told: list[str] = []
    heard = threading.Event()

    def stalled(message: str) -> None:
        told.append(message)
        heard.set()

    async def watch(position: int, patience: float) -> None:
        settings = WorkerSettings(kafka.bootstrap_servers, tmp_path)
        dog = Watchdog(settings, [lambda: {(BATCHES.name, 1): position}], stalled, stall_seconds=0.5, check_seconds=0.1)
        await dog.start()
        await asyncio.to_thread(heard.wait, patience)
        await dog.stop()

    asyncio.run(watch(3, 2))
    assert told == []
    asyncio.run(watch(2, 60))
    assert told == ["no progress for 0.5 s on kvcensus.batches[1] at offset 2, though there is more to read"]
