"""The forwarder against a real broker and the real wire: what goes in comes out once, in order, and nothing else does."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path

import pytest

from console.broker import start_broker
from console.topic_admin import create_topics
from producers import capture
from producers.forwarder import Forwarder, ForwarderConfig
from producers.identity import ephemeral_key
from schemas import topics
from schemas.errors import KvcensusError
from tests.forwarding import (
    PATIENCE,
    Running,
    command,
    config,
    ended,
    everything,
    forward_all,
    frozen_kafka_and_stopping_command,
    own_metrics,
    read_topics,
    running,
    wait_for,
)
from tests.kafka import Kafka
from tests.secret_forms import secret_forms
from tests.shared_data import capture_path
from tests.wire_engine import WireEngine, payload, quiet_port


def test_batches_arrive_once_in_order_under_the_rank_s_key(kafka: Kafka) -> None:
    with WireEngine() as engine:
        engine.publish(20)
        settings = config(
            engine, kafka.bootstrap_servers, dp_rank=3, model="m", workload="w", labels={"gpu": "H100"}, reuse_reporting="none"
        )

        def play(run: Running) -> None:
            engine.publish(300, blocks=3)
            wait_for(lambda: run.forwarder.tally.batches == 320, "batches")

        outcome = forward_all(settings, engine, play)
        found = everything(kafka.bootstrap_servers, outcome)
    assert outcome.reason == "stopped"
    assert outcome.undelivered == 0
    assert found.seqs() == list(range(320))
    assert {raw.key for raw in found.raw} == {b"chat/3"}
    assert len({raw.partition for raw in found.raw if raw.topic == topics.BATCHES.name}) == 1
    assert len({message.life_id for message in found.rank_messages}) == 1
    assert {message.incarnation for message in found.rank_messages} == {found.lifecycle[0].incarnation}
    first = found.rank_messages[0]
    assert first.declaration is not None
    assert first.declaration.reuse_reporting == "none"
    assert (first.declaration.model, first.declaration.workload) == ("m", "w")
    assert first.declaration.canary == settings.key.canary == found.lifecycle[0].canary
    assert first.declaration.labels == {"gpu": "H100"}
    start, *_, stop = found.lifecycle
    assert (start.kind, start.batches, start.life_id) == ("start", 0, first.life_id)
    assert (stop.kind, stop.reason, stop.batches, stop.blocks_stored, stop.lost) == ("stop", "stopped", 320, 920, 0)


def test_a_rank_attached_late_starts_where_the_buffer_starts(kafka: Kafka) -> None:
    with WireEngine("bare") as engine:
        engine.publish(12)
        engine.forget(range(5))
        outcome = forward_all(
            config(engine, kafka.bootstrap_servers), engine, lambda run: wait_for(lambda: run.forwarder.tally.batches == 7, "batches")
        )
        found = everything(kafka.bootstrap_servers, outcome)
    assert found.seqs() == list(range(5, 12))
    assert not [message for message in found.rank_messages if message.loss]
    assert found.lifecycle[-1].replayed == 7


@pytest.mark.parametrize("replay", [None, "silent"])
def test_what_cannot_be_asked_for_is_declared_lost_with_its_exact_range(kafka: Kafka, replay: str | None) -> None:
    with WireEngine(replay=replay) as engine:

        def play(run: Running) -> None:
            engine.publish(3)
            engine.publish(4, missed=True)
            engine.publish(2)
            wait_for(lambda: run.forwarder.tally.batches == 5, "batches")

        outcome = forward_all(config(engine, kafka.bootstrap_servers, replay_timeout=0.3), engine, play)
        found = everything(kafka.bootstrap_servers, outcome)
    assert found.seqs() == [0, 1, 2, 7, 8]
    places = [(message.loss.first_seq, message.loss.last_seq) if message.loss else message.seq for message in found.rank_messages]
    assert places == [0, 0, 1, 2, (3, 6), 7, 8, 9]  # the first is the declaration, the last the departure
    assert found.lifecycle[-1].lost == 4


def test_gaps_and_restarts_over_the_whole_way(kafka: Kafka) -> None:
    """A gap, a hole that stays, a restart seen from its first batch, one seen at its fourth, and a crash."""
    with WireEngine() as engine:

        def play(run: Running) -> None:
            def reached(batches: int) -> None:
                wait_for(lambda: run.forwarder.tally.batches == batches, f"{batches} batches, not {run.forwarder.tally.batches}")

            run.forwarder.attached.wait(PATIENCE)
            engine.publish(2)
            reached(2)
            engine.publish(3, missed=True)
            engine.publish(1)
            reached(6)
            engine.holes = [7, 7]
            engine.publish(3, missed=True)
            engine.publish(1)
            reached(9)
            engine.restart()
            engine.publish(5)
            reached(14)
            engine.restart()
            engine.publish(3, missed=True)
            engine.publish(1)
            reached(18)
            engine.crash()
            engine.restart()
            engine.publish_unheard(6)
            engine.start()
            reached(24)

        outcome = forward_all(config(engine, kafka.bootstrap_servers), engine, play)
        found = everything(kafka.bootstrap_servers, outcome)
    lives: dict[str, list[int]] = {}
    for message in found.batches:
        lives.setdefault(message.life_id, []).append(message.seq)
    assert list(lives.values()) == [[0, 1, 2, 3, 4, 5, 6, 8, 9], [0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    losses = [(message.loss.first_seq, message.loss.last_seq) for message in found.rank_messages if message.loss]
    assert losses == [(7, 7)]
    resets = [index for index, message in enumerate(found.rank_messages) if message.holder_reset]
    assert [found.rank_messages[index + 1].seq for index in resets] == [0, 0, 0]
    for index in resets:
        reset, following = found.rank_messages[index], found.rank_messages[index + 1]
        assert reset.holder_reset is not None
        assert reset.life_id == following.life_id
        assert reset.holder_reset.boundary_us == following.at_us
    stop = found.lifecycle[-1]
    assert (stop.batches, stop.lost, stop.publisher_restarts, stop.duplicates, stop.refused) == (24, 1, 3, 0, 0)


def test_what_cannot_be_read_is_refused_in_its_place_and_counted(kafka: Kafka) -> None:
    with WireEngine() as engine:

        def play(run: Running) -> None:
            run.forwarder.attached.wait(PATIENCE)
            engine.publish(1)
            engine.send(b"\x93garbage")
            engine.send_frames([b"kv-events", b"two frames"])
            engine.publish(1)
            wait_for(lambda: run.forwarder.tally.batches == 2, "batches")

        outcome = forward_all(config(engine, kafka.bootstrap_servers), engine, play)
        found = everything(kafka.bootstrap_servers, outcome)
    kinds = [("refusal" if message.refusal else "batch", message.seq) for message in found.rank_messages[1:-1]]
    assert found.rank_messages[-1].departure is not None
    assert kinds == [("batch", 0), ("refusal", 1), ("batch", 2)]
    assert found.lifecycle[-1].refused == 2


def test_an_engine_s_own_repetition_is_dropped_and_counted_but_not_what_came_by_replay_and_live(kafka: Kafka) -> None:
    with WireEngine() as engine:
        engine.publish(5)

        def play(run: Running) -> None:
            run.forwarder.attached.wait(PATIENCE)
            engine.publish(1)
            wait_for(lambda: run.forwarder.tally.batches == 6, "batches")
            engine.send_frames([b"kv-events", (2).to_bytes(8, "big"), payload(2)])  # its first live coming: no repetition
            engine.send_frames([b"kv-events", (5).to_bytes(8, "big"), payload(5)])
            engine.publish(1)
            wait_for(lambda: run.forwarder.tally.batches == 7, "batches")

        outcome = forward_all(config(engine, kafka.bootstrap_servers), engine, play)
        found = everything(kafka.bootstrap_servers, outcome)
    assert found.seqs() == list(range(7))
    assert found.lifecycle[-1].duplicates == 1


def test_heartbeats_come_while_the_engine_is_silent(kafka: Kafka) -> None:
    with WireEngine() as engine, running(config(engine, kafka.bootstrap_servers, heartbeat=0.05)) as run:
        found = read_topics(kafka.bootstrap_servers, lambda found: len(found.lifecycle) >= 4)
        run.finish()
    assert [record.kind for record in found.lifecycle[:4]] == ["start", "heartbeat", "heartbeat", "heartbeat"]
    assert {record.batches for record in found.lifecycle[:4]} == {0}


def test_a_forwarder_stops_by_itself_when_the_rank_is_idle(kafka: Kafka) -> None:
    with WireEngine() as engine:
        engine.publish(30)
        forwarder = Forwarder(config(engine, kafka.bootstrap_servers, idle=1.0))
        outcome = forwarder.run(threading.Event())
        found = everything(kafka.bootstrap_servers, outcome)
    assert outcome.reason == "idle"
    assert found.seqs() == list(range(30))
    assert found.lifecycle[-1].reason == "idle"


def test_each_run_is_an_incarnation_with_a_life_of_its_own(kafka: Kafka) -> None:
    with WireEngine() as engine:
        engine.publish(3)
        for _ in range(2):
            Forwarder(config(engine, kafka.bootstrap_servers, idle=0.5)).run(threading.Event())
        found = read_topics(kafka.bootstrap_servers, lambda found: len(found.batches) >= 6 and len(found.lifecycle) >= 4)
    assert len({message.incarnation for message in found.batches}) == 2
    assert len({message.life_id for message in found.batches}) == 2
    assert found.seqs() == [0, 1, 2, 0, 1, 2]


def test_a_broker_that_starts_after_the_forwarder(tmp_path: Path) -> None:
    port = quiet_port()
    with WireEngine() as engine, running(config(engine, f"127.0.0.1:{port}")) as run:
        engine.wait_subscribed()
        engine.publish(50)
        with start_broker(None, tmp_path / "broker", port) as broker:
            create_topics(broker.bootstrap_servers)
            engine.publish(50)
            wait_for(lambda: run.forwarder.tally.batches == 100, "batches")
            outcome = run.finish()
            assert everything(broker.bootstrap_servers, outcome).seqs() == list(range(100))


def test_batches_are_taken_in_while_the_broker_is_frozen_and_its_queue_is_full(tmp_path: Path) -> None:
    with start_broker(None, tmp_path / "broker") as broker, WireEngine() as engine:
        create_topics(broker.bootstrap_servers)
        settings = config(engine, broker.bootstrap_servers, kafka_options={"queue.buffering.max.messages": "20"})
        with running(settings) as run:
            engine.wait_subscribed()
            engine.publish(10)
            wait_for(lambda: run.forwarder.tally.batches == 10, "batches")
            os.kill(broker.pid, signal.SIGSTOP)
            try:
                engine.publish(200)
                engine.publish(3, missed=True)
                engine.publish(1)
                wait_for(lambda: engine.questions[-1] == 209, "the gap to be asked for although Kafka takes nothing")
                wait_for(lambda: run.forwarder.tally.batches == 214, "everything to be taken in although Kafka takes nothing")
            finally:
                os.kill(broker.pid, signal.SIGCONT)
            outcome = run.finish()
        found = everything(broker.bootstrap_servers, outcome)
    assert found.seqs() == list(range(214))
    assert found.lifecycle[-1].lost == 0


def test_a_broker_that_lost_everything_gets_what_it_had_not_acknowledged_and_all_after_it_in_order(tmp_path: Path) -> None:
    """An embedded broker keeps its topics in memory: killed and started again, it knows neither them nor the producer."""
    port = quiet_port()
    with WireEngine() as engine:
        broker = start_broker("tansu", tmp_path / "broker", port)
        create_topics(broker.bootstrap_servers)
        with running(config(engine, broker.bootstrap_servers)) as run:
            engine.wait_subscribed()
            engine.publish(20)
            read_topics(broker.bootstrap_servers, lambda found: len(found.batches) == 20)
            broker.kill()
            engine.publish(20)
            wait_for(lambda: run.forwarder.tally.batches == 40, "batches")
            with start_broker("tansu", tmp_path / "broker", port) as successor:
                create_topics(successor.bootstrap_servers)
                engine.publish(20)
                wait_for(lambda: run.forwarder.tally.batches == 60, "batches")
                outcome = run.finish()
                found = read_topics(successor.bootstrap_servers, lambda found: found.seqs()[-1:] == [59] and bool(found.lifecycle))
    assert outcome.undelivered == 0
    assert found.seqs() == list(range(20, 60))


def test_a_message_too_large_for_kafka_is_refused_in_its_place(kafka: Kafka) -> None:
    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, kafka_options={"message.max.bytes": "4000"}, metrics_listen=("127.0.0.1", 0))

        def play(run: Running) -> None:
            run.forwarder.attached.wait(PATIENCE)
            engine.publish(2)
            engine.publish(1, blocks=400)
            engine.publish(2)
            wait_for(lambda: run.forwarder.tally.batches == 5, "batches")
            wait_for(lambda: own_metrics(str(run.forwarder.metrics_url))["too_large_total"] == 1, "the count on the page")
            assert own_metrics(str(run.forwarder.metrics_url))["refused_total"] == 1

        outcome = forward_all(settings, engine, play)
        found = everything(kafka.bootstrap_servers, outcome)
    kinds = [("refusal" if message.refusal else "batch", message.seq) for message in found.rank_messages[1:-1]]
    assert found.rank_messages[-1].departure is not None
    assert kinds == [("batch", 0), ("batch", 1), ("refusal", 2), ("batch", 3), ("batch", 4)]
    assert found.lifecycle[-1].refused == 1


@pytest.mark.parametrize(
    "name", ["c_reset_salt.frames.jsonl.gz", "f_lora_salt_session.frames.jsonl.gz", "vllm-0.26.0-a10-cache-salt.jsonl.gz"]
)
def test_no_token_id_and_no_salt_in_any_byte_that_leaves(kafka: Kafka, name: str) -> None:
    frames = list(capture.read(capture_path(name)))
    with WireEngine() as engine:
        engine.next_seq = frames[0].seq
        for frame in frames:
            assert frame.seq == engine.next_seq
            engine.send(frame.payload, missed=True)

        def play(run: Running) -> None:
            wait_for(lambda: run.forwarder.tally.batches == len(frames), "batches")

        outcome = forward_all(config(engine, kafka.bootstrap_servers, kafka_options={"compression.type": "none"}), engine, play)
        found = everything(kafka.bootstrap_servers, outcome)
    assert found.seqs() == [frame.seq for frame in frames]
    secrets = list(secret_forms(frames))
    assert secrets
    left = b"\n".join(raw.key + b"\n" + raw.value for raw in found.raw)
    assert [secret for secret in secrets if secret in left] == []


def test_the_byte_scan_finds_what_it_looks_for() -> None:
    """The scan above is worth something: in the engine's own payloads it finds tokens and salts of every such capture."""
    frames = list(capture.read(capture_path("vllm-0.26.0-a10-cache-salt.jsonl.gz")))
    plain = b"\n".join(frame.payload for frame in frames)
    hits = [secret for secret in secret_forms(frames) if secret in plain]
    assert any(secret.isascii() and secret.decode().isprintable() for secret in hits)
    assert len(hits) > 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_command_cleanly(kafka: Kafka, tmp_path: Path, number: signal.Signals) -> None:
    with WireEngine() as engine:
        engine.publish(10)
        process = command(
            *("--instance", "chat", "--dp-rank", "1", "--endpoint", engine.endpoint, "--json"),
            *("--data-dir", str(tmp_path / "data")),
            KVCENSUS_BOOTSTRAP_SERVERS=kafka.bootstrap_servers,
            KVCENSUS_REPLAY_ENDPOINT=engine.replay_endpoint or "",
        )
        try:
            engine.wait_subscribed()
            engine.publish(10)
            read_topics(kafka.bootstrap_servers, lambda found: len(found.batches) == 20)
            process.send_signal(number)
            code, out, err = ended(process)
        finally:
            process.kill()
        report = json.loads(out)
        found = read_topics(kafka.bootstrap_servers, lambda found: len(found.raw) >= report["delivered"])
    assert code == 0, err
    assert (report["batches"], report["undelivered"], report["reason"]) == (20, 0, "stopped")
    assert found.lifecycle[-1].kind == "stop"
    assert found.seqs() == list(range(20))
    key = tmp_path / "data" / "identity.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert str(key) in err


def test_a_stop_while_kafka_takes_nothing_says_what_it_leaves_behind(tmp_path: Path) -> None:
    with frozen_kafka_and_stopping_command(tmp_path, "--stop-timeout", "0.5") as process:
        code, _, err = ended(process)
    assert code == 1
    assert "not delivered to Kafka" in err.splitlines()[-1]


def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    with frozen_kafka_and_stopping_command(tmp_path, "--stop-timeout", "1000") as process:
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 130


def test_the_command_ends_by_itself_when_told_to(kafka: Kafka, tmp_path: Path) -> None:
    with WireEngine() as engine:
        engine.publish(10)
        process = command(
            *("--instance", "chat", "--endpoint", engine.endpoint, "--replay-endpoint", str(engine.replay_endpoint)),
            *("--bootstrap-servers", kafka.bootstrap_servers, "--data-dir", str(tmp_path), "--once-idle", "1"),
        )
        code, out, err = ended(process)
    assert code == 0, err
    assert out == ""
    assert "10 batches" in err


SOON = ("--startup-timeout", "0.2", "--once-idle", "2.5", "--stop-timeout", "0.2")


def said_and_kept(tmp_path: Path, servers: str, says: str, *options: str) -> None:
    """A forwarder that cannot deliver says why at once and at its end, and keeps what it has."""
    with WireEngine() as engine:
        engine.publish(3)
        started = ("--instance", "x", "--endpoint", engine.endpoint, "--replay-endpoint", str(engine.replay_endpoint))
        code, out, err = ended(command(*started, "--bootstrap-servers", servers, "--data-dir", str(tmp_path), *SOON, *options))
    lines = [line for line in err.splitlines() if says in line]
    assert (code, out, len(lines)) == (1, "", 2), err
    assert "until then everything waits in" in lines[0]
    assert lines[1] == err.splitlines()[-1]
    # A declaration, the start, three batches and the stop.
    assert lines[1].startswith("kvcensus: 7 messages were not delivered to Kafka"), err
    assert f"they wait in {tmp_path / 'spool' / 'x' / 'any'}" in lines[1]


def test_an_unreachable_broker_is_said_and_costs_nothing(tmp_path: Path) -> None:
    said_and_kept(tmp_path, "127.0.0.1:9", "Kafka at 127.0.0.1:9 cannot be reached")


def test_refused_credentials_are_said_and_cost_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["security.protocol=SASL_PLAINTEXT", "sasl.mechanism=PLAIN", "sasl.username=u", "sasl.password=not-to-be-shown"]
    with start_broker("tansu", tmp_path / "broker") as broker:
        given = (part for option in options for part in ("--kafka-option", option))
        said_and_kept(tmp_path, broker.bootstrap_servers, f"Kafka at {broker.bootstrap_servers} refuses us", *given)
    assert "not-to-be-shown" not in "".join(capfd.readouterr())


def test_missing_topics_are_named_with_the_remedy_and_cost_nothing(tmp_path: Path) -> None:
    with start_broker(None, tmp_path / "broker") as broker:
        says = f"topic kvcensus.batches does not exist on {broker.bootstrap_servers}, or may not be seen: create it with `kvcensus topics"
        said_and_kept(tmp_path, broker.bootstrap_servers, says)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "--instance"),
        (("--instance", "x", "--nonsense"), 2, "--nonsense"),
        (("--instance", ""), 2, "--instance"),
        (("--instance", "x", "--endpoint", "localhost"), 2, "tcp://HOST:PORT"),
        (("--instance", "x", "--reuse-reporting", "maybe"), 2, "--reuse-reporting"),
        (("--instance", "x", "--kafka-option", "acks=0", "--bootstrap-servers", "127.0.0.1:9"), 2, "acks"),
        (("--instance", "x", "--kafka-option", "nonsense=1", "--bootstrap-servers", "127.0.0.1:9"), 2, "nonsense"),
        (("--instance", "x", "--kafka-option", "nonsense", "--bootstrap-servers", "127.0.0.1:9"), 2, "KEY=VALUE"),
        (("--instance", "x", "--key-file", "/nowhere/key", "--bootstrap-servers", "127.0.0.1:9"), 1, "/nowhere/key"),
        (("--instance", "x"), 1, "--bootstrap-servers"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(tmp_path: Path, arguments: tuple[str, ...], code: int, says: str) -> None:
    found, _, err = ended(command(*arguments, "--data-dir", str(tmp_path), KVCENSUS_BOOTSTRAP_SERVERS=""))
    assert found == code, err
    assert says in err


def test_an_endpoint_that_cannot_be_used_is_refused_by_the_api_too() -> None:
    with pytest.raises(KvcensusError, match="tcp://HOST:PORT"):
        Forwarder(ForwarderConfig("x", "nowhere", "127.0.0.1:9", ephemeral_key())).run(threading.Event())


# -- what people are told


def test_an_address_without_an_engine_is_told_and_so_is_the_engine_that_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("producers.forwarder._APART_SECONDS", 0.2)
    with WireEngine() as engine:
        engine.crash()
        with running(config(engine, None, segments=tmp_path)) as run:
            wait_for(lambda: f"no connection to the engine at {engine.endpoint}" in caplog.text, "the engine that is not there")
            engine.start()
            wait_for(lambda: f"connected to the engine at {engine.endpoint}" in caplog.text, "the engine that came")
            run.finish()
    assert caplog.text.count("no connection") == 1


def test_a_replay_socket_that_says_nothing_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with WireEngine(replay="silent") as engine, running(config(engine, None, segments=tmp_path, replay_timeout=0.2)) as run:
        engine.wait_subscribed()
        for _ in range(3):
            engine.publish(2, missed=True)
            engine.publish(2)
        wait_for(lambda: run.forwarder.tally.batches == 6, "batches")
        run.finish()
    assert caplog.text.count(f"no answer from the replay socket at {engine.replay_endpoint}") == 1


def test_batches_that_are_refused_one_after_another_do_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with WireEngine() as engine, running(config(engine, None, segments=tmp_path)) as run:
        engine.wait_subscribed()
        for _ in range(30):
            engine.send(b"no batch")
        wait_for(lambda: run.forwarder.tally.refused == 30, "refusals")
        run.finish()
    told = [record.message for record in caplog.records if "refused" in record.message]
    assert len(told) == 10
    assert "refused 0 (" in told[0]
    assert told[-1].endswith("more within 60 s are counted only")
