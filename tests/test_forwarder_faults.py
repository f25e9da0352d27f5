"""What befalls a forwarder over real sockets, a real broker and real processes: killed, without Kafka, without room, without memory."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from console.broker import start_broker
from console.topic_admin import create_topics
from producers.engine_metrics import brief
from producers.identity import Identity, IdentityKey, load_or_create_key
from producers.resolver import RankResolver
from producers.restate import SPOOL_FULL
from producers.stream import RankStream
from producers.tally import in_brief
from schemas import records, topics
from schemas.records import Departure
from streams.offline import count
from tests.command import kvcensus
from tests.forwarding import (
    Topics,
    chained,
    command_for,
    config,
    everything,
    forward_until,
    killed,
    own_metrics,
    read_topics,
    read_whole,
    running,
    taken_in,
    wait_for,
)
from tests.kafka import Kafka
from tests.metrics_page import MetricsPage, vllm_page
from tests.segments import by_rank, ingested
from tests.wire_engine import WireEngine, quiet_port


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """An identity key that several forwarders use, one after another."""
    load_or_create_key(tmp_path / "key")
    return tmp_path / "key"


@contextmanager
def publishing(engine: WireEngine) -> Iterator[None]:
    """An engine that publishes a batch every few milliseconds, whoever listens."""
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(0.003):
            engine.publish(1)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def once(found: Topics) -> list[records.RankMessage]:
    """The batches without those that came again, which must be what came before to the last byte."""
    first: dict[tuple[str, int], bytes] = {}
    kept = []
    for raw, message in zip([raw for raw in found.raw if raw.topic == topics.BATCHES.name], found.rank_messages, strict=True):
        if message.batch is None:
            continue
        name = message.life_id, message.seq
        if name not in first:
            kept.append(message)
        assert first.setdefault(name, raw.value) == raw.value
    return kept


# -- killed


def test_killed_again_and_again_while_kafka_freezes_now_and_then_nothing_is_lost(tmp_path: Path, key_file: Path) -> None:
    generator = random.Random(3)
    folder = tmp_path / "spool"
    with start_broker(None, tmp_path / "broker") as broker, WireEngine() as engine:
        create_topics(broker.bootstrap_servers)
        settings = config(engine, broker.bootstrap_servers, spool=folder)
        try:
            with publishing(engine):
                for turn in range(10):
                    if turn in (2, 6):
                        os.kill(broker.pid, signal.SIGSTOP)
                    asked, taken = len(engine.questions), taken_in(folder)
                    with killed(command_for(settings, key_file, "--no-metrics")) as process:
                        if turn % 3 == 0:
                            wait_for(lambda: holder(folder) == process.pid, "a forwarder that takes up its spool")
                        elif turn % 3 == 1:
                            wait_for(lambda: len(engine.questions) > asked, "a forwarder that asks")  # noqa: B023
                        else:
                            wait_for(lambda: taken_in(folder) > taken, "a forwarder that took something in")  # noqa: B023
                        if turn == 4:
                            os.kill(broker.pid, signal.SIGSTOP)
                        time.sleep(generator.uniform(0, 0.3))  # whatever it is doing then
                        if turn == 5:
                            process.terminate()
                            time.sleep(generator.uniform(0, 0.1))
                    if turn in (3, 4, 6):
                        os.kill(broker.pid, signal.SIGCONT)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        last = replace(settings, key=load_or_create_key(key_file)[0])
        with running(last) as run:
            wait_for(lambda: taken_in(folder) == engine.next_seq, "everything")
            assert run.finish().undelivered == 0
        found = read_whole(broker.bootstrap_servers)
    assert engine.next_seq > 500
    assert [message.seq for message in once(found)] == list(range(engine.next_seq))
    assert len(found.lives()) == 1
    assert found.losses() == []
    assert found.resets() == []
    assert len({message.incarnation for message in found.batches}) > 2


def holder(folder: Path) -> int:
    """The process that uses this spool, or did last; 0 before any."""
    path = folder / "lock"
    return int(path.read_text() or 0) if path.exists() else 0


def test_killed_around_restarts_of_the_engine_each_life_is_told_once(kafka: Kafka, tmp_path: Path, key_file: Path) -> None:
    generator = random.Random(4)
    folder, key = tmp_path / "spool", load_or_create_key(key_file)[0]
    lives = [chained(400, lambda n: n + 1, generator, at=1_700_000_000 + 1_000 * life) for life in range(4)]
    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=folder, key=key)
        for life, payloads in enumerate(lives):
            with killed(command_for(settings, key_file, "--no-metrics")):
                if life:
                    engine.restart()
                engine.wait_subscribed()
                for body in payloads[:300]:
                    engine.send(body)
                time.sleep(generator.uniform(0, 0.1))  # whatever it is doing then
            for body in payloads[300:]:
                engine.send(body, missed=True)
            if life % 2:  # else it goes on in the next life, and the end of this one was never known
                forward_until(settings, 100)
        forward_until(settings, 0, lambda: wait_for(lambda: taken_in(folder) == 400, "everything"))
        found = read_whole(kafka.bootstrap_servers)
    told: dict[str, list[records.RankMessage]] = {}
    for message in once(found):
        told.setdefault(message.life_id, []).append(message)
    assert list(dict.fromkeys(message.life_id for message in found.rank_messages if message.holder_reset)) == list(told)[1:]
    numbers = [round(messages[0].at_us / 1_000_000 - 1_700_000_000) // 1_000 for messages in told.values()]
    assert numbers == sorted({1, 3, *numbers})  # of a life whose forwarder was killed at once nobody may know
    for messages, number in zip(told.values(), numbers, strict=True):
        expected = undisturbed(lives[number], key, settings.declaration(), "")[1:]
        assert [message.seq for message in messages] == list(range(len(messages)))
        assert [message.batch for message in messages] == [message.batch for message in expected[: len(messages)]]
        assert len(messages) == 400 or not number % 2
    assert found.losses() == []


def test_only_what_replay_could_not_return_is_lost_by_a_kill(kafka: Kafka, tmp_path: Path, key_file: Path) -> None:
    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool", key=load_or_create_key(key_file)[0])
        engine.publish(20)
        with killed(command_for(settings, key_file, "--no-metrics")):
            wait_for(lambda: taken_in(tmp_path / "spool") == 20, "everything")
        engine.publish_unheard(50)
        engine.forget(range(33))
        forward_until(settings, 37)
        found = read_whole(kafka.bootstrap_servers)
    assert [message.seq for message in once(found)] == [*range(20), *range(33, 70)]
    assert found.losses() == [(20, 32)]
    assert len(found.lives()) == 1
    assert found.resets() == []


@pytest.mark.parametrize("own", [True, False], ids=["numbered each by itself", "numbered together"])
def test_killed_again_and_again_several_ranks_on_one_socket_lose_nothing(kafka: Kafka, tmp_path: Path, key_file: Path, own: bool) -> None:
    generator = random.Random(6)
    folder = tmp_path / "spool"
    order = [generator.choice([0, 0, 1, 2]) for _ in range(900)]
    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=folder, dp_rank=None, key=load_or_create_key(key_file)[0])
        engine.publish_as(*order[:300], own=own, missed=True)
        for start in (300, 600):
            asked = len(engine.questions)
            with killed(command_for(settings, key_file, "--no-metrics")):
                wait_for(lambda: len(engine.questions) > asked, "a forwarder that asks")  # noqa: B023
                engine.publish_as(*order[start : start + 300], own=own)
                time.sleep(generator.uniform(0, 0.3))  # whatever it is doing then
        ends = {rank: order.count(rank) if own else len(order) for rank in (0, 1, 2)}
        with running(settings) as run:
            wait_for(lambda: all(taken_in(folder, rank) == end for rank, end in ends.items()), "everything")
            run.finish()
        found = read_whole(kafka.bootstrap_servers)
    assert found.losses() == []
    assert found.resets() == []
    for rank, end in ends.items():
        seqs = [message.seq for message in once(found.of(rank))]
        assert seqs == (list(range(end)) if own else [place for place, one in enumerate(order) if one == rank])
        assert len(found.of(rank).lives()) == 1


def test_a_forwarder_stops_although_the_engine_goes_on(kafka: Kafka, tmp_path: Path) -> None:
    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool")
        with publishing(engine):
            first = forward_until(settings, 10)
        with running(settings) as run:
            wait_for(lambda: taken_in(tmp_path / "spool") == engine.next_seq, "everything")
            second = run.finish()
        found = everything(kafka.bootstrap_servers, first, second)
    assert (first.undelivered, second.undelivered) == (0, 0)
    assert found.seqs() == list(range(engine.next_seq))


# -- more than the spool takes


def check_forced_out(found: Topics, published: int, newest: int) -> None:
    """Of two lives, of 50 batches and as many as were ``published``, every number is told once and in order, ``newest`` as batches."""
    old, new = dict.fromkeys(message.life_id for message in found.rank_messages)
    told: dict[str, list[int]] = {old: [], new: []}
    for message in found.rank_messages:
        if message.loss is not None:
            told[message.life_id] += range(message.loss.first_seq, message.loss.last_seq + 1)
        elif message.batch is not None:
            told[message.life_id].append(message.seq)
    assert told == {old: list(range(50)), new: list(range(published))}
    assert found.lives()[new][-newest:] == list(range(published - newest, published))
    assert [reset.cause for reset in found.resets()] == ["restarted"]
    assert found.rank_messages[0].declaration is not None
    assert {message.loss.reason for message in found.rank_messages if message.loss} == {SPOOL_FULL}


def test_what_a_full_spool_forces_out_is_the_oldest_and_declared(tmp_path: Path) -> None:
    port = quiet_port()
    with WireEngine() as engine:
        settings = config(engine, f"127.0.0.1:{port}", spool=tmp_path / "spool", spool_bytes=300_000)
        with running(settings) as run:

            def publish(count: int, *, missed: bool = False) -> None:
                before = run.forwarder.tally.batches
                engine.publish(count, blocks=60, missed=missed)
                engine.publish(1, blocks=60)
                wait_for(lambda: run.forwarder.tally.batches == before + count + 1, "batches")

            engine.wait_subscribed()
            publish(49)
            engine.restart()
            for _ in range(5):
                publish(39)
            publish(199, missed=True)  # more at once than there is room for
            with start_broker(None, tmp_path / "broker", port) as broker:
                create_topics(broker.bootstrap_servers)
                outcome = run.finish()
                found = everything(broker.bootstrap_servers, outcome)
    assert outcome.undelivered == 0
    check_forced_out(found, 400, 60)
    lost = sum(last - first + 1 for first, last in found.losses())
    assert lost > 200
    assert found.lifecycle[-1].spool_dropped == lost
    assert found.lifecycle[-1].lost == 0  # that is what the engine's replay could not return
    assert [record.kind for record in found.lifecycle][-1] == "stop"


def test_what_a_full_spool_forces_out_is_told_exactly_whatever_is_killed_meanwhile(tmp_path: Path, key_file: Path) -> None:
    port, folder = quiet_port(), tmp_path / "spool"
    with WireEngine() as engine:
        key = load_or_create_key(key_file)[0]
        settings = config(engine, f"127.0.0.1:{port}", spool=folder, spool_bytes=1 << 20, key=key)
        with killed(command_for(settings, key_file, "--no-metrics", "--spool-bytes", "1MiB")):
            engine.wait_subscribed()
            engine.publish(50, blocks=300)
            wait_for(lambda: taken_in(folder) == 50, "the first life")
            engine.restart()
            engine.publish(200, blocks=300)
            wait_for(lambda: 100 < taken_in(folder) != 50, "more than there is room for")
        with running(settings) as run:
            engine.wait_subscribed()
            engine.publish(100, blocks=300)
            wait_for(lambda: taken_in(folder) == 300, "everything")
            with start_broker(None, tmp_path / "broker", port) as broker:
                create_topics(broker.bootstrap_servers)
                outcome = run.finish()
                found = everything(broker.bootstrap_servers, outcome)
    assert outcome.undelivered == 0
    check_forced_out(found, 300, 30)
    assert len([message for message in found.rank_messages if message.declaration]) == 2


# -- metrics


def test_an_engine_s_metrics_land_under_the_rank_s_key_and_their_end_stops_nothing(kafka: Kafka) -> None:
    with WireEngine() as engine, MetricsPage(vllm_page(running=3)) as page:
        settings = config(
            engine, kafka.bootstrap_servers, metrics_url=page.url, metrics_interval=0.1, metrics_listen=("127.0.0.1", 0), heartbeat=0.1
        )
        with running(settings) as run:
            engine.wait_subscribed()
            engine.publish(5)
            read_topics(kafka.bootstrap_servers, lambda found: len(found.engine_metrics) >= 2)
            page.stop()
            assert run.forwarder.metrics_url is not None
            wait_for(lambda: own_metrics(str(run.forwarder.metrics_url))["scrapes_failed_total"] >= 2, "failures")
            engine.publish(5)
            wait_for(lambda: run.forwarder.tally.batches == 10, "batches")
            outcome = run.finish()
        found = everything(kafka.bootstrap_servers, outcome)
    assert found.seqs() == list(range(10))
    assert {raw.key for raw in found.raw if raw.topic == topics.ENGINE_METRICS.name} == {b"chat/0"}
    for record in found.engine_metrics:
        assert (record.requests_running, record.kv_cache_usage, record.prompt_tokens, record.model_name) == (3, 0.25, 700, "m")
        assert (record.instance_id, record.dp_rank, record.process_started_us) == ("chat", 0, 1_700_000_000_000_000)
        assert (record.incarnation, record.life_id) == (found.batches[0].incarnation, found.batches[0].life_id)
    stop = found.lifecycle[-1]
    assert stop.scrapes == len(found.engine_metrics)
    assert (stop.scrapes_failed or 0) >= 2
    scraped = [message for message in found.rank_messages if message.scrape is not None]
    assert [message.scrape for message in scraped] == [brief(record) for record in found.engine_metrics]
    assert {(message.life_id, message.incarnation) for message in scraped} == {(stop.life_id, stop.incarnation)}
    # Each stands where the rank's stream stood: its number is that of the batch behind it.
    expected = 0
    for message in found.rank_messages:
        assert message.batch is not None or message.seq == expected
        expected = message.seq + 1 if message.batch is not None else expected
    last = found.rank_messages[-1]
    assert last.departure == Departure("stopped")
    assert (last.life_id, last.seq) == (stop.life_id, 10)


def test_own_metrics_say_what_was_counted_and_what_waits(tmp_path: Path) -> None:
    with start_broker(None, tmp_path / "broker") as broker, WireEngine() as engine:
        create_topics(broker.bootstrap_servers)
        settings = config(engine, broker.bootstrap_servers, metrics_listen=("127.0.0.1", 0), spool_bytes=1 << 20)
        with running(settings) as run:
            engine.wait_subscribed()
            assert run.forwarder.attached.wait(60)
            url = str(run.forwarder.metrics_url)
            os.kill(broker.pid, signal.SIGSTOP)
            try:
                began = time.time()
                engine.publish(30, blocks=200)
                engine.send(b"\x93garbage")
                engine.publish(4, missed=True)
                engine.publish(1)
                wait_for(lambda: run.forwarder.tally.batches == 35, "batches")
                before = time.time()
                waiting = own_metrics(url)
                after = time.time()
            finally:
                os.kill(broker.pid, signal.SIGCONT)
            wait_for(lambda: own_metrics(url)["spool_messages"] == 0, "an empty spool")
            wait_for(lambda: own_metrics(url)["kafka_up"] == 1, "Kafka")
            later = own_metrics(url)
            tally = run.forwarder.tally
            run.finish()
    for page in (waiting, later):
        counted = {name: page[f"{name}_total"] for name in ("batches", "blocks_stored", "blocks_removed", "unresolved_blocks", "refused")}
        assert counted == {name: getattr(tally, name) for name in counted}
        assert (page["lost_batches_total"], page["replayed_batches_total"], page["connected"]) == (tally.lost, 4, 1)
    assert (waiting["batches_total"], waiting["blocks_stored_total"], waiting["refused_total"]) == (35, 6_005, 1)
    assert waiting["spool_messages"] >= 36
    assert waiting["spool_bytes"] > later["spool_bytes"]
    assert waiting["undelivered_messages"] > later["undelivered_messages"] == 0
    assert later["delivered_messages_total"] == waiting["delivered_messages_total"] + waiting["spool_messages"]
    newest = 1_700_000_000 + 35 * 0.01
    assert before - newest - 0.01 <= waiting["engine_lag_seconds"] <= after - newest + 0.01
    assert began - 0.01 <= waiting["last_message_timestamp_seconds"] <= after


def test_without_metrics_nothing_listens(tmp_path: Path, key_file: Path) -> None:
    with WireEngine() as engine:
        settings = config(engine, "127.0.0.1:9", spool=tmp_path / "a")
        others = command_for(replace(settings, spool=tmp_path / "b"), key_file, "--metrics-listen", "127.0.0.1:0")
        with killed(command_for(settings, key_file, "--no-metrics")) as silent, killed(others) as shown:
            wait_for(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists() and len(engine.questions) >= 2, "both to run")
            wait_for(lambda: listening(shown.pid) == 1, "a page")  # so the look is worth something
            assert listening(silent.pid) == 0


def listening(process: int) -> int:
    """How many TCP sockets of a process listen."""
    inodes = set()
    for line in [line for name in ("tcp", "tcp6") for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]]:
        fields = line.split()
        if fields[3] == "0A":
            inodes.add(f"socket:[{fields[9]}]")
    return sum(str(path.readlink()) in inodes for path in Path(f"/proc/{process}/fd").iterdir())


# -- bounds


def test_what_is_forgotten_for_the_bound_on_blocks_is_declared_and_heartbeats_name_what_was(kafka: Kafka) -> None:
    with WireEngine() as engine, running(config(engine, kafka.bootstrap_servers, max_blocks=10, heartbeat=0.05)) as run:
        engine.wait_subscribed()
        assert run.forwarder.attached.wait(60)
        engine.publish(30)
        engine.send(b"\x93garbage")
        engine.publish(2, missed=True)
        engine.forget([31, 32])
        engine.publish(2)
        wait_for(lambda: run.forwarder.tally.batches == 32, "batches")
        engine.restart()
        engine.publish(20)
        wait_for(lambda: run.forwarder.tally.batches == 52, "batches")
        found = everything(kafka.bootstrap_servers, run.finish())
    forgotten = [message.identity_refused for message in found.rank_messages if message.identity_refused]
    stop = found.lifecycle[-1]
    assert sum(record.refused for record in forgotten) == stop.content_bridge_evicted == 22 + 10
    assert stop.content_bridge_entries == 10
    assert {record.group_idx for record in forgotten} == {0}
    assert all(record.window_start_us <= record.window_end_us for record in forgotten)
    declared = [one for record in found.lifecycle for one in record.declared]
    assert declared == [brief for brief in map(in_brief, found.rank_messages) if brief is not None]
    assert {one.kind for one in declared} == {"declaration", "refusal", "loss", "holder_reset", "identity_refused"}
    assert sum(record.declared_more for record in found.lifecycle) == 0
    assert found.losses() == [(31, 32)]


def test_a_payload_above_the_bound_is_refused_in_its_place(kafka: Kafka) -> None:
    with WireEngine() as engine:
        engine.publish(2)
        engine.publish(1, blocks=100)
        engine.publish(2)
        outcome = forward_until(config(engine, kafka.bootstrap_servers, max_payload_bytes=2_000), 4)
        found = everything(kafka.bootstrap_servers, outcome)
    assert found.rank_messages[0].declaration is not None
    assert found.rank_messages[0].declaration.max_payload_bytes == 2_000
    kinds = [("refusal" if message.refusal else "batch", message.seq) for message in found.rank_messages[1:-1]]
    assert found.rank_messages[-1].departure is not None
    assert kinds == [("batch", 0), ("batch", 1), ("refusal", 2), ("batch", 3), ("batch", 4)]
    (refusal,) = [message.refusal for message in found.rank_messages if message.refusal]
    assert refusal.payload_bytes == len(engine.buffer[2][1])
    stop = found.lifecycle[-1]
    assert (stop.oversized, stop.refused, stop.malformed, stop.lost) == (1, 1, 0, 0)


# -- segments


def test_segments_beside_kafka_hold_the_same_messages(kafka: Kafka, tmp_path: Path) -> None:
    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool", segments=tmp_path / "segments")
        engine.publish(20, blocks=3)
        outcomes = [forward_until(settings, 20)]
        engine.send(b"\x93garbage")
        engine.restart()
        engine.publish_unheard(10)
        outcomes.append(forward_until(settings, 10))
        found = everything(kafka.bootstrap_servers, *outcomes)
        facts, _ = ingested(tmp_path / "segments")
    assert by_rank(facts) == {("chat", 0): found.rank_messages}
    assert [fact for fact in facts if isinstance(fact, records.Lifecycle)] == found.lifecycle


def test_segments_of_a_forwarder_that_was_killed_count_like_those_of_one_that_was_not(kafka: Kafka, tmp_path: Path, key_file: Path) -> None:
    payloads = chained(400, lambda n: n + 1, random.Random(5))
    with WireEngine() as engine:
        key = load_or_create_key(key_file)[0]
        settings = config(engine, None, spool=tmp_path / "spool", segments=tmp_path / "segments", key=key)
        with killed(command_for(settings, key_file, "--no-metrics")):
            engine.wait_subscribed()
            for body in payloads[:300]:
                engine.send(body)
            wait_for(lambda: taken_in(tmp_path / "spool") > 0, "some of it")
        for body in payloads[300:]:
            engine.send(body, missed=True)
        forward_until(settings, 400 - taken_in(tmp_path / "spool"))
    result = kvcensus("ingest", str(tmp_path / "segments"), "--bootstrap-servers", kafka.bootstrap_servers)
    assert result.returncode == 0, result.stderr
    found = read_whole(kafka.bootstrap_servers)
    (life_id,) = found.lives()
    assert found.losses() == []
    assert figures(found.rank_messages) == figures(undisturbed(payloads, key, settings.declaration(), life_id))


def undisturbed(payloads: list[bytes], key: IdentityKey, declaration: records.Declaration, life_id: str) -> list[records.RankMessage]:
    """What one forwarder makes of them that sees all of them."""
    resolver = RankResolver(Identity(key, None), key)
    stream = RankStream("chat", 0, resolver, declaration, "run", lambda *_: life_id)
    return stream.start(0) + [message for seq, body in enumerate(payloads) for message in stream.feed(seq, body, 0)]


def figures(messages: list[records.RankMessage]) -> list[object]:
    """Rows counted of ``messages``, without where in the topic they came from and what came twice."""
    counted = count(messages)
    windows = {(row.life_id, row.window_start_us): row for row in sorted(counted.rank_windows, key=lambda row: row.version)}
    for row in windows.values():
        row.version = row.duplicate_batches = 0
        row.departed = False
    for one in counted.recomputes:
        one.version = 0
    assert counted.recomputes
    return [*windows.values(), *counted.recomputes]
