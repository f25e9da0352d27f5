"""Forwarders, engines, Kafka and disks that fail together, in ways that no other test arranges: readers are told every batch once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import click
import pytest

from console.broker import start_broker
from console.topic_admin import create_topics
from producers.continuity import Arrival
from producers.forwarder import Forwarder
from producers.identity import load_or_create_key
from producers.ranks import Ranks
from producers.simulate import fleet
from producers.simulate.engine import EngineSpec
from producers.simulate.fleet import FleetSpec, InstanceSpec
from producers.simulate.source import RankSource
from producers.simulate.workload import WorkloadSpec
from schemas.records import RankMessage
from sql.figures import assemble
from sql.totals import totals_from_records
from streams.offline import count
from tests.counting import differences, expected, messages
from tests.forwarding import PATIENCE, Topics, command_for, config, forward_until, read_topics, read_whole, running, taken_in, wait_for
from tests.full_disk import Disk
from tests.kafka import Kafka
from tests.wire_engine import WireEngine


def test_leaving_at_once_between_a_batch_and_its_messages_loses_neither(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Ranks.feed

    def interrupted(self: Ranks, arrival: Arrival) -> list[RankMessage]:
        messages = feed(self, arrival)
        if arrival.seq == 17:
            monkeypatch.undo()
            raise click.Abort  # as a second signal does, wherever the first thread is
        return messages

    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool")
        engine.publish_unheard(10)
        forward_until(settings, 10)
        engine.publish_unheard(10)
        monkeypatch.setattr(Ranks, "feed", interrupted)
        with pytest.raises(click.Abort):
            Forwarder(settings).run(threading.Event())
        forward_until(settings, 10)
        found = read_whole(kafka.bootstrap_servers)
    assert list(dict.fromkeys(found.seqs())) == list(range(20))
    assert found.losses() == []
    assert len(found.lives()) == 1
    ends = [record.reason for record in found.lifecycle if record.kind == "stop"]
    assert list(dict.fromkeys(ends)) == ["stopped", "failed: Abort"]


def test_what_a_full_disk_never_took_of_a_life_is_not_mistaken_for_the_next_life(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk()
    monkeypatch.setattr("os.write", disk.write)
    with WireEngine() as engine:
        settings = config(engine, kafka.bootstrap_servers, spool=tmp_path / "spool")
        with running(settings) as run:
            assert run.forwarder.attached.wait(60)
            disk.room = 0
            engine.publish(10)
            read_topics(kafka.bootstrap_servers, lambda found: len(found.batches) == 10)
            shutil.copytree(tmp_path / "spool", tmp_path / "killed")  # all that a kill would leave
            disk.room = None
        engine.restart()
        engine.publish_unheard(30)
        forward_until(replace(settings, spool=tmp_path / "killed"), 30)
        found = read_whole(kafka.bootstrap_servers)
    assert list(found.lives().values()) == [list(range(10)), list(range(30))]


# -- everything at once

FLEET = FleetSpec(
    (
        InstanceSpec("chat", "w", EngineSpec(pool_blocks=200), model="m", restart_at_s=(3.0, 5.0)),
        InstanceSpec("code", "w", EngineSpec(pool_blocks=200, wire="array12", hash_form="bytes32"), model="m", flush_at_s=(4.0,)),
    ),
    (WorkloadSpec("w", rate=10.0, salts=2, salted=0.2, fanout=0.3, system_prompts=3),),
    duration_s=8.0,
    seed=11,
)


class Rank:
    """A simulated rank behind real sockets, and its forwarder in a process of its own; both can be disturbed."""

    def __init__(self, source: RankSource, servers: str, folder: Path) -> None:
        self.source = source
        self.coming = list(source.batches)
        self.engine = WireEngine()
        self.up = True
        self.folder = folder / source.instance_id
        self.key_file = folder / "key"
        self.settings = config(self.engine, servers, spool=self.folder, instance_id=source.instance_id)
        self.process: subprocess.Popen[str] | None = None

    def command(self) -> subprocess.Popen[str]:
        declared = ("--model", "m", "--workload", "w", "--reuse-reporting", "none")
        return command_for(self.settings, self.key_file, *declared, "--no-metrics", "--heartbeat-seconds", "0.5")

    def publish(self, most: int, generator: random.Random) -> None:
        """Publish up to ``most`` batches of this life; one in ten is missed, and all are while the sockets are away."""
        for _ in range(most):
            if not self.coming or self.coming[0].life != self.engine.life:
                return
            batch = self.coming.pop(0)
            assert batch.seq == self.engine.next_seq
            last = not self.coming or self.coming[0].life != batch.life
            self.engine.send(batch.payload, missed=not self.up or (generator.random() < 0.1 and not last))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def calm(self) -> None:
        """Everything runs again, and the forwarder has taken in all there is."""
        if not self.up:
            self.engine.start()
            self.up = True
        if self.process is None:
            self.process = self.command()
        process = self.process
        process.send_signal(signal.SIGCONT)

        def done() -> bool:
            assert process.poll() is None, process.communicate()
            return taken_in(self.folder) == self.engine.next_seq

        wait_for(done, "all that was published")

    def disturb(self, generator: random.Random) -> None:
        what = generator.choice(["nothing", "replace", "replace", "freeze", "go on", "vanish", "come back"])
        if what == "replace" or self.process is None:
            self.kill()
            if generator.random() < 0.8:  # else nobody is there for a while
                self.process = self.command()
        elif what in ("freeze", "go on") and self.process is not None:
            self.process.send_signal(signal.SIGSTOP if what == "freeze" else signal.SIGCONT)
        elif what == "vanish" and self.up:
            self.engine.crash()
            self.up = False
        elif what == "come back" and not self.up:
            self.engine.start()
            self.up = True

    def end(self) -> None:
        self.kill()
        if self.up:
            self.engine.crash()


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def of(found: Topics, instance_id: str) -> list[RankMessage]:
    return [message for message in found.rank_messages if message.instance_id == instance_id]


def test_whatever_is_killed_frozen_and_taken_away_the_figures_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    generator = random.Random(11)
    key, _ = load_or_create_key(tmp_path / "key")
    sources = fleet.sources(FLEET)
    with start_broker(None, tmp_path / "broker") as broker, ExitStack() as stack:
        create_topics(broker.bootstrap_servers)
        ranks = [Rank(source, broker.bootstrap_servers, tmp_path) for source in sources]
        for rank in ranks:
            stack.callback(rank.end)
            rank.calm()
        while any(rank.coming for rank in ranks):
            with ExitStack() as meanwhile:
                if generator.random() < 0.3:
                    meanwhile.enter_context(frozen(broker.pid))
                for rank in ranks:
                    rank.disturb(generator)
                    rank.publish(20, generator)
                time.sleep(generator.uniform(0.1, 1.2))
            for rank in ranks:
                if rank.coming and rank.coming[0].life != rank.engine.life:
                    rank.calm()  # else nobody could know how the life ended
                    rank.engine.restart()
        for rank in ranks:
            rank.calm()
            rank.kill()
            with running(replace(rank.settings, key=key, model="m", workload="w", reuse_reporting="none")) as run:
                assert run.forwarder.attached.wait(PATIENCE)
                assert run.finish().undelivered == 0
        found = read_whole(broker.bootstrap_servers)
    for source, undisturbed in zip(sources, messages(sources, key), strict=True):
        told = of(found, source.instance_id)
        first = {(message.life_id, message.seq): message for message in reversed(told) if message.batch is not None}
        lives = list(dict.fromkeys(message.life_id for message in told if message.batch is not None))
        assert [[seq for life_id, seq in sorted(first) if life_id == life] for life in lives] == [
            list(range(length)) for length in source.batches_per_life() or ()
        ]
        batches = [message.batch for message in undisturbed if message.batch is not None]
        assert [first[life, seq].batch for life in lives for seq in sorted(seq for of_life, seq in first if of_life == life)] == batches
        assert list(dict.fromkeys(message.life_id for message in told if message.holder_reset)) == lives[1:]
        assert not any(message.loss or message.refusal for message in told)
    assert len({record.incarnation for record in found.lifecycle}) > 2  # besides those killed before they said anything
    counted = count(found.rank_messages)
    assert differences(assemble(totals_from_records(counted.rank_windows, counted.duplicate_windows)), expected(sources)) == []
