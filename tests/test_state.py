"""Snapshots and manifests: whatever was written when a worker ended, what is read back is whole or is not used."""

from __future__ import annotations

import os
import random
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Consumer, TopicPartition

from schemas.topics import BATCHES
from streams.settings import WorkerSettings
from streams.snapshots import resume_position
from streams.state import (
    CHUNK_BYTES,
    NOTHING_NEEDED,
    Book,
    Manifest,
    Pair,
    Restored,
    Rules,
    Saved,
    StateLog,
    chunks,
    manifest_key,
    saved_as,
)
from streams.state_topic import StateTopic
from streams.tables import STATE
from tests.kafka import Kafka

RULES = Rules(semantics_version=2, window_us=10_000_000, partitions=4, grace_us=0, history_us=0, history_blocks=0, input_id="one")


class Partition:
    """A state partition as its messages; ``write`` appends, ``restore`` reads it like a worker that starts."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []

    def write(self, pairs: list[Pair]) -> int:
        self.pairs += pairs
        return len(self.pairs) - len(pairs)

    def restore(self, rules: Rules = RULES, *, upto: int | None = None, agent: str = "holder") -> Restored:
        log = StateLog()
        for key, value in self.pairs[:upto]:
            log.take(key, value)
        return log.restore(agent, rules)

    def save(self, book: Book, owner: str, data: bytes, position: int) -> None:
        """One snapshot with its manifest, as the worker writes it."""
        snapshot = book.snapshot_id()
        first = self.write(chunks(book.agent, owner, snapshot, data))
        book.keep(owner, saved_as(snapshot, data, position, first))
        self.write([(manifest_key(book.agent), msgspec.msgpack.encode(book.manifest(position)))])
        self.write(book.replaced())


def test_ended_after_any_message_the_last_whole_state_is_read() -> None:
    chance = random.Random(1)
    partition = Partition()
    wholes: list[tuple[int, int, dict[str, bytes]]] = [(0, 0, {})]
    book = Book("holder", RULES, Restored(), "w")
    known: dict[str, bytes] = {}
    for position in range(1, 12):
        owner = f"a/{position % 3}"
        known = {**known, owner: chance.randbytes(chance.choice((0, 10, CHUNK_BYTES, CHUNK_BYTES + 1)))}
        before = len(partition.pairs)
        partition.save(book, owner, known[owner], position)
        manifest_at = next(n for n in range(before, len(partition.pairs)) if partition.pairs[n][0] == manifest_key("holder"))
        wholes.append((manifest_at + 1, position, known))
    for upto in range(len(partition.pairs) + 1):
        _, resume, owners = max((each for each in wholes if each[0] <= upto), key=lambda each: each[0])
        found = partition.restore(upto=upto)
        assert (found.resume, {owner: data for owner, (_, data) in found.owners.items()}) == (resume, owners), upto
        assert found.why is None


def test_a_log_that_is_compacted_holds_nothing_that_is_not_needed() -> None:
    partition = Partition()
    book = Book("holder", RULES, Restored(), "w")
    for position in range(20):
        partition.save(book, "a/0", os.urandom(CHUNK_BYTES * 2), position)
    partition.write(chunks("holder", "a/0", "of a worker that was ended", b"half"))
    restored = partition.restore()
    assert len(restored.strays) == 1
    after = Book("holder", RULES, restored, "x")
    partition.save(after, "a/0", b"new", 21)
    compacted = {key: value for key, value in partition.pairs if key is not None}
    assert sum(value is not None for value in compacted.values()) == 2, "the manifest and its only chunk"
    partition.pairs = list(compacted.items())
    assert partition.restore().owners == {"a/0": (21, b"new")}


def test_a_worker_that_lost_its_partition_unknowingly_does_no_harm() -> None:
    partition = Partition()
    old = Book("holder", RULES, Restored(), "old")
    partition.save(old, "a/0", b"both know this", 5)
    new = Book("holder", RULES, partition.restore(), "new")
    assert not new.ours("a/0"), "so it is written again before anything else can happen to it"
    partition.save(new, "a/0", b"newer", 9)
    partition.save(old, "a/0", b"older, written later", 7)
    assert partition.restore().owners == {"a/0": (9, b"newer")}


def test_a_snapshot_of_other_rules_or_another_topic_is_not_used_and_said_so() -> None:
    partition = Partition()
    partition.save(Book("holder", RULES, Restored(), "w"), "a/0", b"x", 5)
    for changed, word in (({"semantics_version": 3}, "semantics_version 2, now 3"), ({"input_id": "two"}, "input_id one, now two")):
        found = partition.restore(msgspec.structs.replace(RULES, **changed))
        assert (found.resume, found.owners, found.found) == (0, {}, False)
        assert word in (found.why or "")
    assert partition.restore(msgspec.structs.replace(RULES, input_id="")).found, "a broker that tells no id"
    assert partition.restore(agent="fleet").why is None, "it never had one"
    partition.pairs[0] = (partition.pairs[0][0], b"y")
    assert partition.restore().why == "not whole"
    partition.write([(b"\x93", b""), (b"", b""), (manifest_key("holder"), b"rubbish")])
    assert partition.restore().resume == 0


def test_a_manifest_of_somebody_else_is_not_believed() -> None:
    partition = Partition()
    partition.save(Book("holder", RULES, Restored(), "w"), "a/0", b"x", 5)
    whole = msgspec.msgpack.decode(partition.pairs[1][1] or b"", type=Manifest)
    saved = whole.owners["a/0"]
    for other in (
        msgspec.structs.replace(whole, resume=9, owners={"a/0": msgspec.structs.replace(saved, chunks=2**62)}),
        msgspec.structs.replace(whole, resume=9, owners={"a/0": msgspec.structs.replace(saved, position=-1)}),
        msgspec.structs.replace(whole, epoch=9, resume=-1),
    ):
        partition.write([(manifest_key("holder"), msgspec.msgpack.encode(other))])
        assert partition.restore().owners == {"a/0": (5, b"x")}
    partition.write([(manifest_key("fleet"), msgspec.msgpack.encode({"format": 99}))])
    assert partition.restore(agent="fleet").why == "of another kind", "a newer version may write what this one cannot read"


def test_reading_begins_at_what_any_owner_lacks() -> None:
    def saved(position: int) -> Saved:
        return saved_as("s", b"", position, 0)

    assert resume_position(50, {}, {}) == 50
    assert resume_position(50, {"a": (10, 49)}, {}) == 10, "never written"
    assert resume_position(50, {"a": (10, 49)}, {"a": saved(40)}) == 40
    assert resume_position(50, {"a": (10, 20)}, {"a": saved(30)}) == 50, "nothing was counted for it since"
    assert resume_position(50, {"a": (10, 20), "b": (45, 49)}, {"a": saved(30)}) == 45
    assert resume_position(35, {"a": (10, 39)}, {"a": saved(40)}) == 35, "while it reads again what its snapshot holds"


def test_an_agent_without_state_needs_nothing_and_one_that_was_restored_does_not_know_yet() -> None:
    assert Book("holder", RULES, Restored(), "w").needs == NOTHING_NEEDED
    assert Book("holder", RULES, Restored(found=True), "w").needs is None


@pytest.mark.parametrize("size", [0, 100, 3 * CHUNK_BYTES + 1])
def test_the_topic_gives_back_what_was_written(kafka: Kafka, tmp_path: Path, size: int) -> None:
    settings = WorkerSettings(kafka.bootstrap_servers, tmp_path)
    data = os.urandom(size)
    topic = StateTopic(settings)
    wanted = {number: {"holder": RULES} for number in range(kafka.partitions)}
    restored = topic.restore(wanted)
    assert not any(each.found for each in restored.values())
    book = Book("holder", RULES, restored[1, "holder"], "w")
    for position in (3, 7):
        snapshot = book.snapshot_id()
        offsets = topic.write(1, chunks("holder", "a/0", snapshot, data))
        book.keep("a/0", saved_as(snapshot, data, position, min(offsets)))
        topic.write(1, [(manifest_key("holder"), msgspec.msgpack.encode(book.manifest(position)))])
        topic.write(1, book.replaced())
    topic.commit({(BATCHES.name, 1): 7, (STATE.name, 1): min(offsets)})
    topic.close()
    other = StateTopic(settings)
    found = other.restore(wanted)
    assert found[1, "holder"].owners == {"a/0": (7, data)}
    assert (found[1, "holder"].resume, found[1, "holder"].strays, found[0, "holder"].found) == (7, [], False)
    # A position too far on hides what is needed: then all of the partition is read.
    other.commit({(STATE.name, 1): max(offsets) + 2})
    assert other.restore(wanted)[1, "holder"].owners == {"a/0": (7, data)}
    other.close()
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": f"{settings.group}-state"})
    assert [place.offset for place in consumer.committed([TopicPartition(BATCHES.name, 1)], timeout=20)] == [7]
    consumer.close()
