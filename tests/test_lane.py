"""One rank of a forwarder, without sockets: what it writes beside the spool."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from producers import engine_metrics
from producers.config import ForwarderConfig
from producers.identity import ephemeral_key
from producers.lane import Lane
from producers.restate import Entry
from producers.scraper import Scrape
from schemas import codec, records, topics
from tests.metrics_page import vllm_page
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


class Scraping:
    """A lane that is fed batches and pages by hand."""

    def __init__(self, folder: Path) -> None:
        self.lane = Lane(
            ForwarderConfig("chat", "tcp://127.0.0.1:1", "127.0.0.1:1", ephemeral_key(), spool=folder), "run", 0, b"s", 0, None
        )

    def feed(self, *seqs: int) -> None:
        for seq in seqs:
            self.lane.take(self.lane.stream.feed(seq, payload(seq), 0))

    def page(self, started: float, began: float | None = None) -> list[records.RankMessage]:
        """What a page of a process that started then puts into the stream, asked for now or at ``began``."""
        scrape = Scrape(time.monotonic() if began is None else began, 77, engine_metrics.read(vllm_page(started, running=3)))
        beside, *entries = self.lane.take_scrape(scrape, scrape.record("chat", 0, self.lane.stream.life_id, "run"))
        assert beside.topic == topics.ENGINE_METRICS.name
        assert [entry.kind for entry in entries] == ["droppable"] * len(entries)
        return [_message(entry) for entry in entries]

    def restart(self) -> None:
        self.lane.stream.engine_restarted("the engine restarted")
        self.feed(0)


def _message(entry: Entry) -> records.RankMessage:
    assert (entry.topic, entry.key) == (topics.BATCHES.name, b"chat/0")
    return codec.decode(entry.value, records.RankMessage)


def test_a_scrape_stands_in_the_stream_behind_the_batches_before_it(tmp_path: Path) -> None:
    given = Scraping(tmp_path)
    given.feed(0, 1)
    (message,) = given.page(5.0)
    assert message.scrape == records.Scrape(77, kv_cache_usage=0.25, requests_running=3, prompt_tokens=700)
    assert (message.life_id, message.seq, message.observed_at_ms) == (given.lane.stream.life_id, 2, 77)
    assert message.at_us == given.lane.stream.position.newest_us > 0


def test_a_page_of_the_process_before_does_not_follow_into_a_new_life(tmp_path: Path) -> None:
    given = Scraping(tmp_path)
    given.feed(0, 1)
    assert len(given.page(5.0)) == 1
    before = time.monotonic()
    given.restart()
    assert given.page(5.0, began=before) == []
    assert [message.life_id for message in given.page(9.0)] == [given.lane.stream.life_id]


def test_a_page_of_the_process_after_does_not_count_for_the_life_before(tmp_path: Path) -> None:
    given = Scraping(tmp_path)
    given.feed(0, 1)
    assert len(given.page(5.0)) == 1
    assert given.page(9.0) == given.page(9.0) == []
    given.restart()
    assert len(given.page(9.0)) == 1


def test_an_api_server_that_starts_anew_while_its_engine_goes_on_is_believed_with_the_next_batch(tmp_path: Path) -> None:
    given = Scraping(tmp_path)
    given.feed(0, 1)
    assert len(given.page(5.0)) == 1
    assert given.page(9.0) == []
    given.feed(2)
    assert [message.seq for message in given.page(9.0)] == [3]


def test_the_spool_s_bound_may_take_a_scrape_but_not_a_departure(tmp_path: Path) -> None:
    lane = Scraping(tmp_path).lane
    messages = [lane.stream.scraped(records.Scrape(1), 0), lane.stream.depart("stopped", 0)]
    assert [entry.kind for entry in lane.take(messages)] == ["droppable", "keep"]
