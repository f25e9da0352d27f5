"""Forwarders, engines, Kafka and disks that fail together, in ways that no other test arranges: readers are told every batch once."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import click
import pytest

from producers.continuity import Arrival
from producers.forwarder import Forwarder
from producers.ranks import Ranks
from schemas.records import RankMessage
from tests.forwarding import config, forward_until, read_topics, read_whole, running
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
