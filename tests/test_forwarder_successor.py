"""A forwarder on the spool of one before it, over real sockets and a real broker, whatever the end of the one before."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from console.broker import start_broker
from console.topic_admin import create_topics
from producers.forwarder import Forwarder, ForwarderConfig
from producers.identity import Identity, IdentityKey, ephemeral_key, load_or_create_key
from producers.resolver import RankResolver
from producers.spool import Spool
from producers.stream import RankStream
from schemas import records
from schemas.errors import KvcensusError
from tests.forwarding import (
    Topics,
    chained,
    command_for,
    config,
    ended,
    everything,
    forward_until,
    killed,
    read_topics,
    read_whole,
    running,
    wait_for,
)
from tests.kafka import Kafka
from tests.metrics_page import MetricsPage, vllm_page
from tests.wire_engine import WireEngine, payload, quiet_port


def incarnations(messages: list[records.RankMessage]) -> list[str]:
    """In the order in which they first appear."""
    return list(dict.fromkeys(message.incarnation for message in messages))


# -- the same engine life


def test_what_kafka_has_is_noted_meanwhile_so_that_a_kill_sends_little_again(kafka: Kafka, tmp_path: Path) -> None:
    folder, copy = tmp_path / "spool", tmp_path / "killed"
    with WireEngine() as engine, running(config(engine, kafka.bootstrap_servers, spool=folder, heartbeat=600.0)) as run:
        engine.wait_subscribed()
        engine.publish(20)
        wait_for(lambda: run.forwarder.tally.batches == 20, "batches")

        def left_by_a_kill() -> int:
            shutil.rmtree(copy, ignore_errors=True)
            try:
                shutil.copytree(folder, copy)
            except shutil.Error:  # a file went meanwhile
                return -1
            with Spool(copy, 1 << 30) as left:
                return left.messages

        wait_for(lambda: left_by_a_kill() == 0, "a note on disk of what Kafka has")
        run.finish()


def test_a_successor_goes_on_in_the_same_life_and_asks_only_for_what_came_since(kafka: Kafka, tmp_path: Path) -> None:
    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool", spool_bytes=1 << 20)
        engine.publish(20, blocks=300)
        first = forward_until(settings, 20)
        with Spool(tmp_path / "spool", settings.spool_bytes) as left:  # everything was acknowledged, and is gone from the disk
            assert (left.messages, left.take(1 << 20)) == (0, [])
            assert left.bytes < sum(len(raw.value) for raw in everything(kafka.bootstrap_servers, first).raw) / 2
        engine.publish_unheard(5)
        engine.questions.clear()
        second = forward_until(settings, 10, engine.wait_subscribed, lambda: engine.publish(5))
        assert set(engine.questions) == {19}
        engine.questions.clear()
        third = forward_until(settings, 0, engine.wait_subscribed)
        found = everything(kafka.bootstrap_servers, first, second, third)
    assert list(found.lives().values()) == [list(range(30))]
    assert found.losses() == []
    assert found.resets() == []
    runs = incarnations(found.rank_messages)
    assert len(runs) == 3
    assert [message.incarnation for message in found.rank_messages if message.declaration] == runs
    assert [message.incarnation for message in found.batches] == [runs[0]] * 20 + [runs[1]] * 10
    assert [(record.kind, record.incarnation) for record in found.lifecycle] == [(kind, run) for run in runs for kind in ("start", "stop")]
    assert {record.life_id for record in found.lifecycle} == set(found.lives())
    assert found.lifecycle[-1].duplicates == 0


def test_what_a_forwarder_could_not_deliver_goes_out_before_what_its_successor_takes(tmp_path: Path) -> None:
    port = quiet_port()
    with WireEngine() as engine:
        settings = config(engine, f"127.0.0.1:{port}", spool=tmp_path / "spool")
        engine.publish(20)
        first = forward_until(replace(settings, stop_timeout=0.1), 20)
        assert (first.delivered, first.undelivered) == (0, 24)  # a declaration, the start, 20 batches, the departure and the stop
        assert first.waits_in == str(tmp_path / "spool")
        engine.publish_unheard(5)
        with start_broker(None, tmp_path / "broker", port) as broker:
            create_topics(broker.bootstrap_servers)
            second = forward_until(settings, 5)
            found = everything(broker.bootstrap_servers, second)
    assert (second.delivered, second.undelivered) == (24 + 9, 0)
    assert list(found.lives().values()) == [list(range(25))]
    assert len(found.raw) == 33
    # The first run's departure comes before anything of the second, whichever delivers it.
    assert [place for place, message in enumerate(found.rank_messages) if message.departure is not None] == [21, 28]
    assert [place for place, message in enumerate(found.rank_messages) if message.declaration is not None] == [0, 22]
    assert [record.kind for record in found.lifecycle] == ["start", "stop", "start", "stop"]


# -- identities


def undisturbed(payloads: list[bytes], key: IdentityKey) -> list[records.Batch | None]:
    """What one forwarder makes of them that sees all of them."""
    stream = RankStream("chat", 0, RankResolver(Identity(key, None), key), records.Declaration("unlabelled", "per_copy"), "run")
    return [message.batch for seq, body in enumerate(payloads) for message in stream.feed(seq, body, 0)]


@pytest.mark.parametrize("name", [lambda n: n + 2**63, lambda n: n.to_bytes(32, "big")], ids=["int", "sha256"])
def test_identities_outlive_a_stop_and_a_kill(kafka: Kafka, tmp_path: Path, name: Callable[[int], int | bytes]) -> None:
    payloads = chained(300, name, random.Random(7))
    key = load_or_create_key(tmp_path / "key")[0]
    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool", key=key)

        def send(start: int, stop: int) -> None:
            for body in payloads[start:stop]:
                engine.send(body, missed=True)

        send(0, 100)
        forward_until(settings, 100)
        send(100, 200)
        with killed(command_for(settings, tmp_path / "key")):
            read_topics(kafka.bootstrap_servers, lambda found: len(found.batches) == 200)
        send(200, 300)
        forward_until(settings, 100)
        found = read_whole(kafka.bootstrap_servers)
    expected = undisturbed(payloads, key)
    assert all(batch is not None and batch.unresolved_blocks == 0 for batch in expected)
    told = {message.seq: message.batch for message in found.batches}  # some twice: the one killed had not noted that Kafka has them
    assert list(told.values()) == expected
    assert len(found.lives()) == 1


def test_another_endpoint_is_attached_to_anew_and_may_be_another_rank(kafka: Kafka, tmp_path: Path) -> None:
    """A forwarder pointed at the wrong rank's socket and then set right must not go on as if it were one engine."""
    with WireEngine() as wrong, WireEngine() as right:
        for engine, rank in ((wrong, 1), (right, 0)):
            for seq in range(5):
                engine.send(payload(seq, rank=rank))
        runs = [forward_until(config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool", dp_rank=0), 5) for engine in (wrong, right)]
        found = everything(kafka.bootstrap_servers, *runs)
    assert list(found.lives().values()) == [list(range(5)), list(range(5))]
    assert not [message for message in found.rank_messages if message.refusal or message.holder_reset or message.loss]


# -- another engine life


@pytest.mark.parametrize("published", [5, 20, 30])
def test_an_engine_that_restarted_meanwhile_is_told_by_number_or_last_batch(kafka: Kafka, tmp_path: Path, published: int) -> None:
    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool")
        engine.publish(20)
        first = forward_until(settings, 20)
        engine.restart()
        engine.publish_unheard(published)
        second = forward_until(settings, published)
        third = forward_until(settings, 1, engine.wait_subscribed, lambda: engine.publish(1))
        found = everything(kafka.bootstrap_servers, first, second, third)
    assert list(found.lives().values()) == [list(range(20)), list(range(published + 1))]
    assert found.losses() == []
    (reset,) = found.resets()
    assert reset.cause == "restarted"
    place = next(place for place, message in enumerate(found.rank_messages) if message.holder_reset)
    following = found.rank_messages[place + 1]
    assert (following.seq, following.at_us, following.life_id) == (0, reset.boundary_us, found.rank_messages[place].life_id)


def test_an_engine_that_restarted_meanwhile_is_told_by_when_its_process_started(kafka: Kafka, tmp_path: Path) -> None:
    with WireEngine(replay=None) as engine, MetricsPage(vllm_page(1_700_000_999.5)) as page:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool", metrics_url=page.url)
        first = forward_until(settings, 20, engine.wait_subscribed, lambda: engine.publish(20))
        engine.restart()
        engine.publish_unheard(25)
        second = forward_until(settings, 3, engine.wait_subscribed, lambda: engine.publish(3))
        found = everything(kafka.bootstrap_servers, first, second)
    assert list(found.lives().values()) == [list(range(20)), [25, 26, 27]]
    (reset,) = found.resets()
    assert (reset.cause, reset.boundary_us) == ("restarted", 1_700_001_000_250_000)
    assert "process started at 2023-11-14 22:29:59 UTC" in reset.reason
    assert found.losses() == [(0, 24)]  # of the new life
    assert [message.life_id for message in found.rank_messages if message.loss] == list(found.lives())[1:]


def test_where_nothing_tells_of_a_restart_the_loss_says_so(kafka: Kafka, tmp_path: Path) -> None:
    with WireEngine(replay=None) as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool")
        first = forward_until(settings, 20, engine.wait_subscribed, lambda: engine.publish(20))
        engine.restart()
        engine.publish_unheard(25)
        second = forward_until(settings, 3, engine.wait_subscribed, lambda: engine.publish(3))
        found = everything(kafka.bootstrap_servers, first, second)
    assert list(found.lives().values()) == [[*range(20), 25, 26, 27]]
    assert found.resets() == []
    assert found.losses() == [(20, 24)]
    (loss,) = [message.loss for message in found.rank_messages if message.loss]
    assert loss.reason.endswith("nothing proves that the engine is still in the same life")


# -- other ids


def with_epoch(settings: ForwarderConfig) -> ForwarderConfig:
    return replace(settings, key=IdentityKey(settings.key.secret, settings.key.nonce, settings.key.epoch + 1))


@pytest.mark.parametrize("change", [with_epoch, lambda settings: replace(settings, model="m")], ids=["epoch", "model"])
def test_another_key_or_model_begins_another_life_before_anything_else(
    kafka: Kafka, tmp_path: Path, change: Callable[[ForwarderConfig], ForwarderConfig]
) -> None:
    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool")
        changed = change(settings)
        engine.publish(10)
        outcomes = [forward_until(settings, 10)]
        for told in (changed, changed):
            engine.publish_unheard(5)
            outcomes.append(forward_until(told, 5))
        found = everything(kafka.bootstrap_servers, *outcomes)
    assert list(found.lives().values()) == [list(range(10)), list(range(10, 20))]
    assert found.losses() == []
    reset, declaration = found.rank_messages[12:14]  # behind the declaration, ten batches and the departure
    assert reset.holder_reset is not None
    assert declaration.declaration is not None
    assert (reset.holder_reset.cause, reset.holder_reset.boundary_us, reset.seq) == ("rekeyed", 1_700_000_000_090_000, 10)
    assert (declaration.declaration.key_epoch, declaration.declaration.model) == (changed.key.epoch, changed.model)
    assert reset.life_id == declaration.life_id == list(found.lives())[1]
    assert len(found.resets()) == 1  # and not once more where nothing changed
    assert found.lifecycle[-1].publisher_restarts == 0


# -- the folder


def test_a_second_forwarder_on_the_same_spool_is_refused_in_one_line(tmp_path: Path) -> None:
    load_or_create_key(tmp_path / "key")
    with WireEngine() as engine:
        settings = config(engine, "127.0.0.1:9", spool=tmp_path / "spool", stop_timeout=0.1)
        with running(settings):
            engine.wait_subscribed()
            code, out, err = ended(command_for(settings, tmp_path / "key"))
            with pytest.raises(KvcensusError, match="another forwarder uses the spool folder"):
                Forwarder(settings).run(threading.Event())
    assert (code, out) == (1, "")
    assert f"another forwarder uses the spool folder {settings.spool}" in err.splitlines()[-1]
    assert len([line for line in err.splitlines() if line.startswith("kvcensus: ")]) == 1


def tear(folder: Path) -> None:
    """Take away the last third, as the end of a machine may do."""
    path = max(folder.glob("*.spool"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


def put_garbage(folder: Path) -> None:
    """Overwrite some of the middle."""
    path = min(folder.glob("*.spool"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = b"\xa5" * 40
    path.write_bytes(data)


def spoil_checkpoint(folder: Path) -> None:
    """Leave the messages, and for where the stream stood something that nobody can read."""
    with Spool(folder, 1 << 30) as spool:
        spool.append((), b"\xc1 not a checkpoint")


KEY = ephemeral_key()


@pytest.fixture(scope="module")
def full_spool(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, int]]:
    """What a forwarder leaves that took 50 batches and found no Kafka, and the engine's ports."""
    folder = tmp_path_factory.mktemp("full") / "spool"
    with WireEngine() as engine:
        settings = config(engine, f"127.0.0.1:{quiet_port()}", spool=folder, key=KEY, stop_timeout=0.1)
        with running(settings) as run:
            engine.wait_subscribed()
            while run.forwarder.tally.batches < 50:  # an append for each
                engine.publish(1)
                wait_for(lambda: run.forwarder.tally.batches == engine.next_seq, "a batch")
            run.finish()
        return folder, engine.ports


@pytest.mark.parametrize("damage", [tear, put_garbage, spoil_checkpoint])
def test_a_damaged_spool_is_said_and_costs_no_more_than_what_was_damaged(
    kafka: Kafka,
    tmp_path: Path,
    full_spool: tuple[Path, tuple[int, int]],
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "spool"
    shutil.copytree(full_spool[0], folder)
    damage(folder)
    with WireEngine(ports=full_spool[1]) as engine:
        engine.publish_unheard(60)
        outcome = forward_until(config(engine, kafka.bootstrap_servers, spool=folder, key=KEY), 10, engine.wait_subscribed)
        found = everything(kafka.bootstrap_servers, outcome)
    lives = list(found.lives().values())
    said = [record.message for record in caplog.records if str(folder) in record.message]
    assert outcome.undelivered == 0
    if damage is tear:  # the engine still has what is gone
        assert lives == [list(range(60))]
        assert [record.kind for record in found.lifecycle] == ["start", "start", "stop"]
    elif damage is put_garbage:
        assert any("cannot be read: they are set aside" in line for line in said)
        assert len(list(folder.glob("*.bad"))) == 1
        (life,) = lives
        assert len(life) in (58, 59)
        assert life == sorted(set(life))
    else:
        assert any("does not say where its stream stood" in line for line in said)
        assert lives == [list(range(50)), list(range(60))]  # attached anew, with all that the engine has


# -- several ranks on one socket


@pytest.mark.parametrize("own", [True, False], ids=["numbered each by itself", "numbered together"])
def test_several_ranks_on_one_socket_go_on_each_in_its_own_life(kafka: Kafka, tmp_path: Path, own: bool) -> None:
    order = [0, 1, 0, 1, 1, 0, 0, 1]
    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool", dp_rank=None)
        engine.publish_as(*order, own=own, missed=True)
        first = forward_until(settings, 8)
        engine.publish_as(*order, own=own, missed=True)
        second = forward_until(settings, 16, engine.wait_subscribed, lambda: engine.publish_as(*order, own=own))
        found = everything(kafka.bootstrap_servers, first, second)
    assert {raw.key for raw in found.raw} == {b"chat/0", b"chat/1"}
    assert len(found.lives()) == 2
    assert found.resets() == []
    assert found.losses() == []
    for rank in (0, 1):
        ours = found.of(rank)
        assert {message.dp_rank for message in ours.rank_messages} == {rank}
        assert len({raw.partition for raw in ours.raw if raw.topic == "kvcensus.batches"}) == 1
        (seqs,) = ours.lives().values()
        assert seqs == (list(range(12)) if own else [place for place, one in enumerate(order * 3) if one == rank])
        assert accounted(ours) == list(range(seqs[-1] + 1))
        assert [record.kind for record in ours.lifecycle] == ["start", "stop"] * 2
        assert [record.batches for record in ours.lifecycle] == [0, 4, 0, 8]
    # What a replay brought is told once for the socket, so that it may be summed.
    assert 16 <= sum(record.replayed for record in found.lifecycle if record.kind == "stop") <= 24
    assert {record.replayed for record in found.of(1).lifecycle} == {0}


def test_several_ranks_all_begin_another_life_by_when_their_engine_started(kafka: Kafka, tmp_path: Path) -> None:
    with WireEngine(replay=None) as engine, MetricsPage(vllm_page(1_700_000_999.5)) as page:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool", dp_rank=None, metrics_url=page.url)
        order = [0, 1, 2]
        first = forward_until(settings, 9, engine.wait_subscribed, lambda: engine.publish_as(*order * 3, own=True))
        engine.restart()
        engine.publish_as(*order * 5, own=True, missed=True)
        second = forward_until(settings, 3, engine.wait_subscribed, lambda: engine.publish_as(*order, own=True))
        found = everything(kafka.bootstrap_servers, first, second)
    for rank in order:
        assert list(found.of(rank).lives().values()) == [[0, 1, 2], [5]]
        assert found.of(rank).losses() == [(0, 4)]


def accounted(found: Topics) -> list[int]:
    """Numbers that the batches speak of, their own and those of other ranks before them."""
    return [number for message in found.batches for number in range(message.seq - message.skipped, message.seq + 1)]
