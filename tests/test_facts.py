"""Facts come back from the store as the messages they were, in their order."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from schemas.errors import KvcensusError
from schemas.records import (
    NO_ID,
    Batch,
    DeadLetter,
    Declaration,
    Departure,
    HolderReset,
    IdentityRefused,
    Loss,
    Op,
    OpKind,
    RankMessage,
    Refusal,
    Scrape,
)
from sql import facts as facts_module
from sql.database import Database
from sql.facts import Fact, facts
from sql.rows import TableRows

HOUR_US = 3_600_000_000
START_US = 1_700_000_000_000_000 // HOUR_US * HOUR_US


@pytest.fixture
def database(module_store: Database) -> Database:
    for table in ("batches", "rank_messages", "block_events", "rank_events", "dead_letters"):
        module_store.command(f"TRUNCATE TABLE {table}")
    return module_store


def store(database: Database, placed: Iterable[tuple[int, int, Any]], *, twice: bool = False) -> None:
    """Write records at (partition, offset) as the sink does."""
    rows = TableRows()
    for partition, offset, record in placed:
        rows.add(record, partition, offset)
    for _ in range(2 if twice else 1):
        for batch in rows.batches():
            database.insert(batch.table, batch.column_names, batch.columns)


def message(seq: int, *, instance: str = "a", life: str = "l", at: int | None = None, skipped: int = 0, **said: Any) -> RankMessage:
    """A message of rank ``instance/1``, a second of engine time after the one with the number before."""
    at_us = START_US + seq * 1_000_000 if at is None else at
    return RankMessage(instance, 1, life, seq, at_us, at_us // 1000 + 7, "f", skipped=skipped, **said)


def block(rng: random.Random) -> bytes:
    return rng.randbytes(15) + rng.choice([b"\x00", b"x"])  # ends in zeros, too: fixed strings are padded with them


KINDS: tuple[OpKind, ...] = ("STORE", "STORE", "REMOVE", "CLEAR")


def random_op(rng: random.Random) -> Op:
    kind: OpKind = rng.choice(KINDS)
    group, tier = rng.choice([0, 1, None]), rng.choice(["GPU", "CPU", None])
    if kind == "CLEAR":
        return Op("CLEAR", group, tier, rng.choice([None, "LOCAL"]))
    count = rng.choice([0, 1, 1, 2, 5])
    contents = [rng.choice([NO_ID, block(rng)]) for _ in range(count)]
    if not any(content != NO_ID for content in contents):
        contents = []
    op = Op(
        kind, group, tier, rng.choice([None, "REMOTE"]), rng.choice([0, 16]), b"".join(block(rng) for _ in range(count)), b"".join(contents)
    )
    if kind == "STORE":
        op.spec_kind, op.reused = rng.choice([None, "mamba"]), rng.random() < 0.2
        op.parent_state = rng.choice(["ROOT", "CONTENT", "UNKNOWN"])
        if op.parent_state != "ROOT":
            op.parent_block_id = rng.choice([None, block(rng)])
        if op.parent_state == "CONTENT":
            op.parent_content_id = block(rng)
    return op


def random_batch(rng: random.Random) -> Batch:
    return Batch([random_op(rng) for _ in range(rng.choice([0, 1, 3]))], rng.choice([0, 2]), rng.choice([0, 5]))


SAID: tuple[dict[str, Any], ...] = (
    {"holder_reset": HolderReset(START_US, "went back", "rekeyed")},
    {"loss": Loss(3, 9, "gap"), "skipped": 2},
    {"refusal": Refusal("no batch", 12), "skipped": 1},
    {"declaration": Declaration("labelled", "last_copy", "chat", "m", labels={"a": "b"}, prefill_rate=1.5, kv_bytes_by_group={"0": 7})},
    {"identity_refused": IdentityRefused(1, 5, 6, 7)},
    {"scrape": Scrape(5, 0.25, 100, 16, 2, 1_000, 10, None)},
    {"departure": Departure("stopped")},
)


@pytest.mark.parametrize("seed", range(3))
def test_every_message_comes_back_in_its_place(database: Database, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "CHUNK_BATCHES", 7)  # so that chunks begin everywhere
    monkeypatch.setattr(facts_module, "CHUNK_BLOCKS", 10)
    monkeypatch.setattr(facts_module, "_LEAST_CHUNK", 5)
    rng = random.Random(seed)
    placed: list[tuple[int, int, RankMessage]] = []
    for offset in range(120):
        instance, life = rng.choice("ab"), f"l{offset // 50}"
        if rng.random() < 0.3:
            said = message(offset, instance=instance, life=life, **rng.choice(SAID))
        else:
            # Over hours, now and then a step back.
            at = START_US + offset * HOUR_US // 40 - rng.choice([0, 0, 0, HOUR_US // 20])
            said = message(offset, instance=instance, life=life, at=at, skipped=rng.choice([0, 1]), batch=random_batch(rng))
        placed.append((3, offset, said))
        if rng.random() < 0.1:
            placed.append((3, 1_000 + offset, said))  # the forwarder said it once more
    store(database, placed, twice=True)
    found = list(facts(database))
    for instance in "ab":
        last = max(offset for _, offset, each in placed if each.instance_id == instance)
        expected = sorted((offset, each) for _, offset, each in placed if each.instance_id == instance and offset <= last)
        assert [(fact.offset, fact.message) for fact in found if fact.instance_id == instance] == expected
    times = [fact.message.at_us for fact in found if fact.message is not None and fact.message.batch is not None]
    assert len(times) == sum(each.batch is not None for _, _, each in placed)
    assert facts(database, ranks=["b/1"]).batches == sum(each.batch is not None and each.instance_id == "b" for _, _, each in placed)


def offsets(found: Iterable[Fact]) -> list[int]:
    return [fact.offset for fact in found]


def one(seq: int) -> dict[str, Any]:
    return {"batch": Batch([Op("REMOVE", block_ids=bytes([seq]) * 16)])}


def test_a_span_begins_with_the_declaration_in_force_and_ends_with_the_batch_that_proves_it(database: Database) -> None:
    declared: dict[str, Any] = {"declaration": Declaration("none", "per_copy")}
    said = [message(0, **declared), message(0, **one(0)), message(1, **one(1)), message(2, **declared), message(2, **one(2))]
    said += [message(3, **one(3)), message(4, loss=Loss(4, 5, "gap")), message(6, **one(6)), message(7, **one(7))]
    store(database, [(0, 10 + number, each) for number, each in enumerate(said)])
    assert offsets(facts(database)) == list(range(10, 19))
    assert offsets(facts(database, since_us=START_US + 1)) == [10, 12, 13, 14, 15, 16, 17, 18]
    assert offsets(facts(database, since_us=START_US + 2_000_000)) == [10, 13, 14, 15, 16, 17, 18], (
        "a redeclaration stands before its batch"
    )
    assert offsets(facts(database, since_us=START_US + 3_000_000, until_us=START_US + 4_000_000)) == [13, 15, 16, 17]
    assert offsets(facts(database, until_us=START_US + 2_000_000)) == [10, 11, 12, 13, 14]
    assert offsets(facts(database, since_us=START_US + 20_000_000)) == []
    with pytest.raises(KvcensusError, match=r"rank z/9 in this span"):
        facts(database, ranks=["a/1", "z/9"])


def test_a_message_that_was_set_aside_is_told_in_its_place(database: Database) -> None:
    letter = DeadLetter("kvcensus.batches", 0, 1, "holder", "bad Avro", b"a/1", b"x", 1)
    others = [
        DeadLetter("kvcensus.batches", 0, 1, "holder", "bad Avro", b"b/1", b"x", 1),
        DeadLetter("kvcensus.residency", 0, 1, "fleet", "", b"a/1", b"x", 1),
    ]
    # One that the sink alone could not write is there all the same, and counts.
    later = DeadLetter("kvcensus.batches", 0, 2, "holder", "choked", b"a/1", b"x", 1)
    store(database, [(0, 0, message(0, **one(0))), (0, 2, message(2, **one(2))), *((0, 9, each) for each in (*others, letter, later))])
    found = list(facts(database))
    assert [(fact.offset, fact.message is None) for fact in found] == [(0, False), (1, True), (2, False)]


def test_a_batch_whose_blocks_are_gone_is_left_out_and_counted(database: Database) -> None:
    store(database, [(0, seq, message(seq, **one(seq))) for seq in range(4)])
    database.command("ALTER TABLE block_events DELETE WHERE seq = 2 SETTINGS mutations_sync = 2")
    stored = facts(database)
    assert offsets(stored) == [0, 1, 3]
    assert stored.missing == {"a/1": 1}


def test_a_topic_made_anew_is_read_behind_the_one_before(database: Database) -> None:
    store(database, [(0, seq, message(seq, **one(seq))) for seq in range(4)])
    store(database, [(0, seq, message(100 + seq, life="m", **one(seq))) for seq in range(1, 3)])
    store(database, [(1, 0, message(200, life="n", **one(0)))])
    found = list(facts(database))
    assert [(fact.offset, fact.message.seq) for fact in found if fact.message] == [
        *((seq, seq) for seq in range(4)),
        *((4 + seq, 100 + seq) for seq in range(1, 3)),
        (7, 200),
    ]
    assert [fact.message.seq for fact in facts(database, since_us=START_US + 100_000_000) if fact.message] == [101, 102, 200]
    assert [fact.message.seq for fact in facts(database, until_us=START_US + 50_000_000) if fact.message] == [0, 1, 2, 3]


def test_places_that_stand_for_two_messages_of_one_life_are_refused(database: Database) -> None:
    store(database, [(0, seq, message(seq, **one(seq))) for seq in range(4)])
    store(database, [(0, seq, message(100 + seq, **one(seq))) for seq in range(2)])
    with pytest.raises(KvcensusError, match="made anew"):
        facts(database)
