"""One rank of a forwarder, without sockets: what it writes beside the spool."""

from __future__ import annotations

from pathlib import Path

import pytest

from producers.config import ForwarderConfig
from producers.identity import ephemeral_key
from producers.lane import Lane
from tests.wire_engine import payload


def test_the_journal_of_identities_stays_in_proportion_to_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.bridge_journal._SPARE", 100)
    settings = ForwarderConfig("chat", "tcp://127.0.0.1:1", "127.0.0.1:1", ephemeral_key(), max_blocks=50, spool=tmp_path)
    lane = Lane(settings, "run", 0, b"scope", 0, None)
    sizes = []
    for seq in range(300):
        lane.take(lane.stream.feed(seq, payload(seq, blocks=5), 0))
        sizes.append((tmp_path / "bridge-0.journal").stat().st_size)
    known = {entry[0]: entry for entry in lane.resolver.entries()}
    lane.close()
    assert len(known) == 50
    assert max(sizes) == max(sizes[:100])  # 1,500 entries came; 200 are all that it ever holds
    successor = Lane(settings, "next", 0, b"scope", 0, lane.stream.position)
    assert known.items() <= {entry[0]: entry for entry in successor.resolver.entries()}.items()
    successor.close()


def test_what_the_spool_may_force_out_is_what_a_loss_can_stand_for(tmp_path: Path) -> None:
    settings = ForwarderConfig("chat", "tcp://127.0.0.1:1", "127.0.0.1:1", ephemeral_key(), spool=tmp_path)
    lane = Lane(settings, "run", 0, b"scope", 0, None)
    messages = [*lane.stream.start(0), *lane.stream.feed(0, payload(0), 0), *lane.stream.feed(1, b"garbage", 0)]
    messages += lane.stream.feed(3, payload(3), 0)
    assert [entry.kind for entry in lane.take(messages)] == ["keep", "batch", "batch", "keep", "batch"]
    lane.close()
