"""Segments back into the topics: our own as they were written, those of other producers as far as their records tell."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from producers.segments import contract, reader, seal, shape
from producers.segments.foreign import CUT, SEGMENTS_DROPPED, foreign_id
from producers.segments.ingest import Ingest
from producers.segments.seal import SegmentError
from producers.segments.shape import Fact
from producers.stand_in import stand_in
from schemas import codec
from schemas.records import Departure, HolderReset, Lifecycle, Loss, RankMessage, Refusal
from schemas.topics import BATCHES, LIFECYCLE
from streams.offline import Counted, count
from tests.command import kvcensus
from tests.kafka import Kafka
from tests.segments import (
    CORPUS,
    DECLARED,
    STARTED_MS,
    batch,
    by_rank,
    heartbeat,
    ingested,
    open_writer,
    records_of,
    shipped_messages,
    write_lines,
    write_ranks,
)
from tests.shared_data import shared_path

RUN = f"{STARTED_MS}-4242"
AT = float(STARTED_MS)


@pytest.fixture(scope="module")
def ranks() -> list[list[RankMessage]]:
    return shipped_messages()


@pytest.fixture(scope="module")
def folder(ranks: list[list[RankMessage]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped captures as sealed segments, several for each rank."""
    parent = tmp_path_factory.mktemp("segments")
    write_ranks(parent, ranks, segment_bytes=40_000)
    assert len(list(parent.rglob("seg-*.parquet"))) > len(ranks)
    return parent


def counted(ranks: Iterable[Iterable[RankMessage]]) -> Counted:
    return count(message for rank in ranks for message in rank)


# -- ours


def test_ours_come_back_as_they_were_written(ranks: list[list[RankMessage]], folder: Path) -> None:
    facts, ingest = ingested(folder)
    found = by_rank(facts)
    assert len(found) == len(ranks)
    for rank in ranks:
        assert found[rank[0].instance_id, rank[0].dp_rank] == rank
    tally = ingest.tally
    assert (tally.losses, tally.refusals, tally.segments_missing, tally.unknown_kinds) == (0, 0, 0, 0)
    assert tally.batches == sum(message.batch is not None for rank in ranks for message in rank)


def test_ours_count_as_what_came_directly_also_twice(ranks: list[list[RankMessage]], folder: Path) -> None:
    direct = counted(ranks)
    found = by_rank(ingested(folder)[0])
    assert counted(found[rank[0].instance_id, rank[0].dp_rank] for rank in ranks) == direct
    twice = counted(rank + found[rank[0].instance_id, rank[0].dp_rank] for rank in ranks)
    assert [_recompute(row) for row in twice.recomputes] == [_recompute(row) for row in direct.recomputes]
    assert figures(twice) == figures(direct)


def figures(rows: Counted) -> set[Any]:
    """What the newest windows say, but for how often something came."""
    newest = {(row.instance_id, row.dp_rank, row.life_id, row.window_start_us): row for row in rows.rank_windows}
    return {(key, row.batches, row.observed_us, tuple(map(str, row.groups))) for key, row in newest.items()}


def test_lines_are_read_as_their_parquet_is(ranks: list[list[RankMessage]], folder: Path, tmp_path: Path) -> None:
    for path in folder.rglob("*.parquet"):
        target = tmp_path / path.parent.relative_to(folder)
        write_lines(target, [records_of(path)])
    assert ingested(tmp_path)[0] == ingested(folder)[0]


def test_the_encoding_is_told_from_the_content(folder: Path, tmp_path: Path) -> None:
    source = next(iter(sorted(folder.rglob("*.parquet"))))
    (tmp_path / "seg-1-1-0.jsonl").write_bytes(source.read_bytes())
    assert ingested(tmp_path)[0] == ingested(source)[0]


def test_numbers_order_as_numbers_and_runs_by_their_start(tmp_path: Path) -> None:
    for started in (STARTED_MS, STARTED_MS - 1):  # written later, begun earlier
        with open_writer(tmp_path, started_ms=started, segment_bytes=1) as writer:
            for seq in range(12):
                writer.write([batch(seq + (100 if started == STARTED_MS else 0))])
    facts, _ = ingested(tmp_path)
    assert [message.seq for message in by_rank(facts)["i0", 0] if message.batch] == [*range(12), *range(100, 112)]


def test_a_missing_segment_of_ours_is_a_loss_with_its_range(tmp_path: Path) -> None:
    with open_writer(tmp_path, segment_bytes=1) as writer:
        for seq in range(6):
            writer.write([batch(seq)])
    (tmp_path / f"seg-{RUN}-2.parquet").unlink()
    (tmp_path / f"seg-{RUN}-3.parquet").unlink()
    facts, ingest = ingested(tmp_path)
    found = by_rank(facts)["i0", 0]
    assert [(message.seq, message.loss) for message in found if message.loss] == [(4, Loss(2, 3, "missing in the segments"))]
    assert ingest.tally.segments_missing == 2
    # A number of its own rank was there all along where another rank had it.
    with open_writer(tmp_path / "b") as writer:
        skipping = batch(9)
        skipping.skipped = 8
        writer.write([batch(0), skipping])
    assert ingested(tmp_path / "b")[1].tally.losses == 0


def lost(first: int, last: int) -> RankMessage:
    message = batch(first)
    message.batch, message.loss = None, Loss(first, last, "missing in the segments")
    return message


def test_a_loss_that_was_declared_is_not_declared_again(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write([batch(0), lost(1, 4), batch(5)])
    assert ingested(tmp_path)[1].tally.losses == 1


def test_an_orphan_of_ours_keeps_its_place_in_time(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write([batch(0)])
    with open_writer(tmp_path, started_ms=STARTED_MS + 10_000) as writer:
        writer.write([batch(2)])
    marker = shape.segment_recovered(STARTED_MS + 10_000, attributed=False, dropped_bytes=9)
    write_lines(tmp_path, [[marker, *shape.records(batch(1), DECLARED)]])
    facts, ingest = ingested(tmp_path)
    assert [message.seq for message in by_rank(facts)["i0", 0]] == [0, 1, 2]
    assert (ingest.tally.orphans, ingest.tally.losses) == (1, 0)


def test_files_that_are_still_written_and_other_files_are_left_alone(folder: Path, tmp_path: Path) -> None:
    shipped = tmp_path / "prefix" / "2026-11-30" / "11" / "node-a"
    later = tmp_path / "prefix" / "2026-11-30" / "12" / "node-a"
    with open_writer(tmp_path / "own", segment_bytes=1) as writer:
        for seq in range(3):
            writer.write([batch(seq)])
    shipped.mkdir(parents=True)
    later.mkdir(parents=True)
    for number, target in enumerate((shipped, later, shipped)):
        (tmp_path / "own" / f"seg-{RUN}-{number}.parquet").rename(target / f"seg-{RUN}-{number}.parquet")
    (later / f"seg-{RUN}-0.parquet").write_bytes((shipped / f"seg-{RUN}-0.parquet").read_bytes())  # shipped twice
    (shipped / f"seg-{RUN}-2.jsonl").write_bytes(b"its Parquet is beside it")
    (shipped / "active.jsonl").write_bytes(b"{")
    (shipped / f"seg-{RUN}-9.parquet.tmp").write_bytes(b"PAR1")
    (shipped / "README").write_text("not a segment")
    facts, ingest = ingested(tmp_path)
    assert [message.seq for message in by_rank(facts)["i0", 0]] == [0, 1, 2]
    assert (ingest.tally.files, ingest.tally.repeated_files, ingest.tally.skipped_files) == (3, 1, 4)
    assert ingest.tally.refused_files == []


@pytest.mark.timeout(30)
def test_pipes_and_links_in_a_circle_hold_nobody_up(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "seg-1-1-0.parquet")
    (tmp_path / "a").symlink_to(folder)
    for name in "bcde":
        (tmp_path / name).symlink_to(tmp_path)
    facts, ingest = ingested(tmp_path)
    assert facts == ingested(folder)[0]
    assert (ingest.tally.repeated_files, ingest.tally.skipped_files) == (0, 1)


def test_a_folder_of_processes_that_come_and_go_is_one_line(tmp_path: Path) -> None:
    done = kvcensus("ingest", "/proc", "--dry-run")
    assert done.returncode == 1
    assert re.fullmatch(r"kvcensus: .*\n", done.stderr), done.stderr[-500:]


def test_folders_lie_as_deep_as_a_path_can_name(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(1_500):
        deep /= "d"
        deep.mkdir()
    (deep / "seg-1-1-0.parquet").touch()
    assert reader.find([tmp_path]).segments == [deep / "seg-1-1-0.parquet"]
    while deep != tmp_path:  # what clears up after the tests may not go that deep
        for path in deep.iterdir():
            path.unlink()
        deep.rmdir()
        deep = deep.parent


# -- what cannot be read


def test_a_file_that_cannot_be_read_whole_gives_nothing_and_the_others_all(folder: Path, tmp_path: Path) -> None:
    source = sorted(folder.rglob("*.parquet"))[0]
    lines = write_lines(tmp_path, [records_of(source)])
    (good,) = lines.iterdir()
    content = good.read_bytes()
    bad = {
        "seg-1-1-1.jsonl": content[:-5],
        "seg-1-1-2.jsonl": content[content.index(b"\n") + 1 :],
        "seg-1-1-3.jsonl": b"",
        "seg-1-1-4.parquet": source.read_bytes()[:-30],
        "seg-1-1-5.jsonl": content[: content.rindex(b"\n", 0, -1) + 1],
        "seg-1-1-6.jsonl": content + b'{"kind":"store","at_ms":1}\n',
        "seg-1-1-7.jsonl": b"[" * 100_000,
        "seg-1-1-8.jsonl": content[: content.index(b"\n") + 1] + b'{"kind":' + b"[" * 100_000 + b"\n",
    }
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    facts, ingest = ingested(tmp_path)
    assert facts == ingested(source)[0]
    assert ingest.tally.files == 1
    assert len(ingest.tally.refused_files) == len(bad)
    assert all("\n" not in line and str(tmp_path) in line for line in ingest.tally.refused_files)


def mutated(content: bytes, chance: random.Random) -> bytes:
    data = bytearray(content)
    how = chance.randrange(4)
    if how == 0:
        return bytes(data[: chance.randrange(len(data))])
    if how == 1:
        at = chance.randrange(len(data))
        del data[at : at + chance.randrange(1, 50)]
        return bytes(data)
    for _ in range(chance.choice((1, 1, 3, 20))):
        # The end of a Parquet file, its footer, says how all the rest is read.
        at = chance.randrange(len(data)) if how == 2 else chance.randrange(max(len(data) - 3_000, 0), len(data))
        data[at] = chance.choice((0, 0xFF, data[at] ^ 1 << chance.randrange(8), chance.randrange(256)))
    return bytes(data)


@pytest.mark.parametrize("form", ["ours.parquet", "ours.jsonl", "theirs.parquet", "theirs.jsonl"])
def test_a_damaged_segment_is_read_or_refused_and_never_more(form: str, tmp_path: Path) -> None:
    if form.startswith("theirs"):
        records = foreign_records()
    else:
        with open_writer(tmp_path / "own") as writer:
            writer.write([heartbeat(), *[batch(seq, blocks=3) for seq in range(5)]])
        (path,) = (tmp_path / "own").iterdir()
        records = records_of(path)
    wal = tmp_path / "seg-1-1-0.jsonl"
    wal.write_bytes(seal.lines(records))
    content = wal.read_bytes() if form.endswith("jsonl") else seal.convert(wal).read_bytes()
    whole = tmp_path / "whole.parquet"
    whole.write_bytes(content)
    expected = ingested(whole)[0]
    assert expected
    chance = random.Random(form)
    refused = 0
    damaged = tmp_path / "damaged.parquet"
    for _ in range(150):
        damaged.write_bytes(mutated(content, chance))
        facts, ingest = ingested(damaged)
        refused += len(ingest.tally.refused_files)
        for fact in facts:
            codec.encode(fact)  # whatever it says, it is a record
    assert 30 < refused <= 150


def test_a_bit_that_flips_in_a_page_is_never_misread(tmp_path: Path) -> None:
    with open_writer(tmp_path / "own") as writer:
        writer.write([batch(seq, blocks=3) for seq in range(40)])
    (path,) = (tmp_path / "own").iterdir()
    content = path.read_bytes()
    pages = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    expected = ingested(path)[0]
    damaged = tmp_path / "damaged.parquet"
    refused = 0
    for at in range(4, pages, max(pages // 70, 1)):
        data = bytearray(content)
        data[at] ^= 1
        damaged.write_bytes(data)
        facts, ingest = ingested(damaged)
        assert facts in (expected, [])
        refused += len(ingest.tally.refused_files)
    assert refused > 40


# -- theirs


def opened(seq: int = 0, run: str = RUN, **fields: Any) -> dict[str, Any]:
    bounds = {"contract_version": "1.10", "heartbeat_secs": 60, "max_segment_secs": 300, "key_epoch": 3, "workload_class": "agentic"}
    return {"kind": "segment_open", "at_ms": AT, "incarnation": run, "segment_seq": seq} | bounds | fields


def store(at: float, block: str, seq: int | None = None, **fields: Any) -> dict[str, Any]:
    record = {"kind": "store", "at_ms": AT + at, "instance_id": "i0", "block_id": block, "n_tokens": 16, "tier": "gpu"} | fields
    return record if seq is None else record | {"seq": seq}


def beat(at: float, dropped: int = 0, *endpoints: dict[str, Any], **fields: Any) -> dict[str, Any]:
    counters = dict.fromkeys(
        ("oversized", "unknown_types", "events_ingested", "content_unresolved", "content_bridge_entries", "content_bridge_evicted"), 0
    )
    own = {"source": "i0", "endpoint": "tcp://i0:5557", "msgs_seen": 9, "dropped": dropped, "last_msg_at_ms": AT}
    base = {"kind": "heartbeat", "at_ms": AT + at, "msgs_seen": 9, "dropped": dropped, "publisher_restarts": 0}
    return base | counters | {"endpoints": list(endpoints) or [own]} | fields


def foreign_records() -> list[dict[str, Any]]:
    """A bit of everything that a producer may write."""
    return [
        opened(gpu="some", vllm_version="0.26.0"),
        beat(0, canary="c0ffee", reuse_reporting="none"),
        store(1, "b1", 1, content_id="c1", dp_rank=0, group_idx=0),
        store(1, "b2", 1, content_id="c2", parent_id="b1", dp_rank=0, group_idx=0, extra_keys=["k"], lora_name="l", lora_id=3),
        {"kind": "evict", "at_ms": AT + 2, "instance_id": "i0", "block_id": "b1", "tier": None, "seq": 2},
        {"kind": "clear", "at_ms": AT + 3, "instance_id": "i0", "scope": "all", "seq": 3},
        {"kind": "holder_reset", "at_ms": AT + 9, "instance_id": "i0", "dp_rank": 0, "boundary_ms": AT + 4, "seq": 1},
        store(4, "b1", 1, parent_unknown=True),
        {
            "kind": "identity_refused",
            "at_ms": AT + 9,
            "instance_id": "i0",
            "dp_rank": 0,
            "group_idx": 1,
            "refused": 5,
            "window_start_ms": AT + 1,
            "window_end_ms": AT + 2,
        },
        {
            "kind": "segments_dropped",
            "at_ms": AT,
            "incarnation": "1-1",
            "count": 2,
            "first": "a",
            "last": "b",
            "first_seq": 4,
            "last_seq": 5,
        },
        {"kind": "something_new", "at_ms": AT, "instance_id": "i0"},
        beat(20),
        {"kind": "agent_stop", "reason": "signal", **{k: v for k, v in beat(30).items() if k != "kind"}},
    ]


def theirs(folder: Path, *segments: list[dict[str, Any]]) -> tuple[list[RankMessage], Ingest]:
    facts, ingest = ingested(write_lines(folder, segments))
    assert ingest.tally.refused_files == []
    return [fact for fact in facts if isinstance(fact, RankMessage)], ingest


def batches(messages: Iterable[RankMessage]) -> list[RankMessage]:
    return [message for message in messages if message.batch is not None]


def kinds(messages: Iterable[RankMessage]) -> list[str]:
    names = ("batch", "holder_reset", "loss", "refusal", "declaration", "identity_refused", "scrape", "departure")
    return [next(name for name in names if getattr(message, name) is not None) for message in messages]


def test_records_of_another_producer_become_batches_of_a_life(tmp_path: Path) -> None:
    messages, ingest = theirs(tmp_path, foreign_records())
    assert kinds(messages) == ["declaration", *["batch"] * 3, "holder_reset", "batch", "identity_refused", "departure"]
    declared = messages[0].declaration
    assert declared is not None
    assert (declared.workload, declared.reuse_reporting, declared.canary, declared.key_epoch) == ("agentic", "none", "c0ffee", 3)
    assert (declared.heartbeat_ms, declared.staleness_ms) == (60_000, 300_000)
    assert declared.labels == {"gpu": "some", "vllm_version": "0.26.0"}
    first = messages[1]
    assert first.batch is not None
    (run,) = first.batch.ops[:1]
    assert first.batch.ops[0].block_ids == foreign_id("b1")  # the second differs in its adapter: another run
    second = first.batch.ops[1]
    assert (run.parent_state, run.tier, run.block_size, run.content_ids) == ("ROOT", "GPU", 16, foreign_id("c1"))
    assert (second.parent_state, second.parent_content_id, second.parent_block_id) == ("CONTENT", foreign_id("c1"), foreign_id("b1"))
    assert (second.extra_keys, second.lora_name, second.lora_id) == ([foreign_id("k")], "l", 3)
    assert [message.seq for message in messages] == [0, 1, 2, 3, 1, 1, 2, 2]
    assert messages[-1].departure == Departure("signal")
    assert messages[-1].life_id == messages[5].life_id
    assert len({message.life_id for message in messages[:4]}) == 1
    reset = messages[4]
    assert reset.holder_reset == HolderReset((STARTED_MS + 4) * 1_000, "the producer saw the engine restart")
    assert reset.life_id == messages[5].life_id != messages[3].life_id
    assert messages[5].batch is not None
    assert messages[5].batch.ops[0].parent_state == "UNKNOWN"
    assert messages[5].batch.unresolved_blocks == 1
    assert ingest.tally.unknown_kinds == 1
    assert ingest.tally.segments_dropped == 2
    assert theirs(tmp_path / "again", foreign_records())[0] == messages


def test_their_lifecycle_is_told_for_every_rank(tmp_path: Path) -> None:
    endpoints = [{"source": "i0", "endpoint": f"tcp://i0:{port}", "msgs_seen": port, "dropped": 0} for port in (5557, 5558)]
    start = {"kind": "agent_start", "at_ms": AT, "agent_version": "9", "egress": "raw", "endpoint_count": 2, "max_payload_bytes": 1}
    records = [opened(), start, store(1, "b", 1, dp_rank=0), store(1, "b", 1, dp_rank=1), beat(5, 0, *endpoints, canary="c")]
    facts, _ = ingested(write_lines(tmp_path, [records]))
    lives = [fact for fact in facts if isinstance(fact, Lifecycle)]
    assert [(life.kind, life.dp_rank) for life in lives] == [("start", 0), ("start", 1), ("heartbeat", 0), ("heartbeat", 1)]
    assert [life.msgs_seen for life in lives[2:]] == [5557, 5558]
    assert {life.staleness_ms for life in lives} == {300_000}
    assert {life.forwarder_version for life in lives} == {"9"}
    assert [life.blocks_stored for life in lives] == [0, 0, 1, 1]


def test_a_chain_of_records_is_one_run(tmp_path: Path) -> None:
    chain = [store(1, "b0", 1), *[store(1, f"b{index}", 1, parent_id=f"b{index - 1}") for index in range(1, 5)]]
    messages, _ = theirs(tmp_path, [opened(), *chain, store(1, "x", 1), store(1, "y", 1, parent_id="nobody", tier=None)])
    (message,) = batches(messages)
    assert message.batch is not None
    assert [len(op.block_ids) // 16 for op in message.batch.ops] == [5, 1, 1]
    assert [op.tier for op in message.batch.ops] == ["GPU", "GPU", None]
    assert message.batch.ops[2].parent_state == "UNKNOWN"


def test_ids_of_our_own_form_are_kept_and_others_are_digested() -> None:
    assert foreign_id("0123456789abcdef" * 2) == bytes.fromhex("0123456789abcdef" * 2)
    odd = ["0" * 32, "0123456789ABCDEF" * 2, "11111111111111111111", "", "é", "a" * 31]
    assert len({foreign_id(text) for text in odd}) == len(odd)
    assert all(len(foreign_id(text)) == 16 and any(foreign_id(text)) for text in odd)


def test_a_missing_number_is_a_loss_of_that_range(tmp_path: Path) -> None:
    messages, _ = theirs(tmp_path, [opened(), store(1, "a", 5), store(2, "b", 6), store(3, "c", 9)])
    assert kinds(messages) == ["declaration", "batch", "batch", "loss", "batch"]
    assert messages[3].loss is not None
    assert (messages[3].loss.first_seq, messages[3].loss.last_seq) == (7, 8)


def test_ranks_that_number_together_lose_only_what_none_of_them_had(tmp_path: Path) -> None:
    records = [store(number, f"b{number}", number, dp_rank=number % 2) for number in (1, 2, 3, 4, 5, 8, 9)]
    messages, _ = theirs(tmp_path, [opened(), *records])
    losses = [(message.dp_rank, message.loss.first_seq, message.loss.last_seq) for message in messages if message.loss]
    assert sorted(losses) == [(0, 6, 7), (1, 6, 7)]  # nobody knows whose they were
    apart = [store(number, f"b{number}", seq, dp_rank=rank) for number, (seq, rank) in enumerate([(1, 0), (1, 1), (2, 1), (3, 0)])]
    messages, _ = theirs(tmp_path / "apart", [opened(), *apart])
    assert [(message.dp_rank, message.loss.first_seq) for message in messages if message.loss] == [(0, 2)]


def test_a_clear_that_names_no_rank_is_one_of_every_rank(tmp_path: Path) -> None:
    clear = {"kind": "clear", "at_ms": AT + 3, "instance_id": "i0", "scope": "all", "tier": "gpu"}
    messages, _ = theirs(tmp_path, [opened(), store(1, "a", 1, dp_rank=0), store(2, "b", 1, dp_rank=1), clear, store(4, "c", 2, dp_rank=1)])
    cleared = [
        (message.dp_rank, op.group_idx, op.tier)
        for message in batches(messages)
        for op in (message.batch.ops if message.batch else [])
        if op.kind == "CLEAR"
    ]
    assert sorted(cleared) == [(0, None, "GPU"), (1, None, "GPU")]
    for rank in by_rank(messages).values():
        found = [message.seq for message in batches(rank)]
        assert found == sorted(set(found))


def test_a_reset_told_for_each_group_is_one(tmp_path: Path) -> None:
    reset = {"kind": "holder_reset", "at_ms": AT + 9, "instance_id": "i0", "dp_rank": 0, "boundary_ms": AT + 4}
    messages, _ = theirs(tmp_path, [opened(), store(1, "a", 1), reset | {"group_idx": 0}, reset | {"group_idx": 1}, store(5, "b", 0)])
    assert kinds(messages) == ["declaration", "batch", "holder_reset", "batch"]


def test_lives_never_share_a_name_whatever_the_resets_say(tmp_path: Path) -> None:
    resets = [{"kind": "holder_reset", "at_ms": AT, "instance_id": "i0", "boundary_ms": AT + at} for at in (4, 5, 4)]
    messages, _ = theirs(tmp_path, [opened(), store(1, "a", 1), *resets, store(6, "b", 0)])
    assert kinds(messages) == ["declaration", "batch", "holder_reset", "holder_reset", "holder_reset", "batch"]
    assert len({message.life_id for message in messages}) == 4


def test_numbers_that_fall_while_time_goes_on_are_another_life_and_repeated_ones_are_not(tmp_path: Path) -> None:
    messages, _ = theirs(tmp_path / "fell", [opened(), store(1, "a", 7), store(2, "b", 8), store(3, "a", 0), store(4, "b", 1)])
    assert [message.seq for message in batches(messages)] == [7, 8, 0, 1]
    assert len({message.life_id for message in messages}) == 2
    assert sum(row.duplicate_batches for row in count(messages).rank_windows) == 0
    again = [opened(), store(1, "a", 7), store(2, "b", 8), store(1, "a", 7)]
    messages, _ = theirs(tmp_path / "again", again)
    assert len({message.life_id for message in messages}) == 1
    assert count(messages).rank_windows[-1].duplicate_batches == 1


def test_drops_without_a_range_make_their_stretch_unobserved(tmp_path: Path) -> None:
    records = [
        opened(),
        beat(0),
        store(1, "a"),
        store(2, "b"),
        beat(3),
        store(4, "c"),
        store(5, "d"),
        beat(6, 2),
        store(7, "e"),
        store(8, "f"),
    ]
    messages, _ = theirs(tmp_path, records)
    # The stretch from the second heartbeat to the third, and what joins it to its neighbours.
    assert kinds(messages) == ["declaration", "batch", "batch", "refusal", "batch", "refusal", "batch", "refusal", "batch", "batch"]
    rows = count(messages).rank_windows
    assert rows[-1].observed_us == 2_000  # a to b, and e to f
    assert rows[-1].lost_batches == 0


def test_a_missing_segment_makes_its_stretch_unobserved(tmp_path: Path) -> None:
    messages, ingest = theirs(tmp_path, [opened(9), store(1, "a"), store(2, "b")], [opened(10), store(3, "c")], [opened(12), store(4, "d")])
    assert kinds(messages) == ["declaration", "batch", "batch", "batch", "refusal", "batch"]
    assert messages[4].refusal is not None
    assert messages[4].refusal.reason == "segments are missing: 11 to 11"
    assert ingest.tally.segments_missing == 1
    row = count(messages).rank_windows[-1]
    assert (row.observed_us, row.lost_batches, row.refused_batches, row.warmup) == (2_000, 0, 1, True)


def dropped(first: int, last: int) -> dict[str, Any]:
    names = {"first": f"seg-1-1-{first}.jsonl", "last": f"seg-1-1-{last}.jsonl"}
    return {"kind": "segments_dropped", "at_ms": AT, "incarnation": "1-1", "count": 1, "first_seq": first, "last_seq": last, **names}


@pytest.mark.parametrize("seq", [None, 9])
def test_segments_that_their_producer_dropped_are_told_before_what_comes_next(seq: int | None, tmp_path: Path) -> None:
    messages, ingest = theirs(tmp_path, [opened(3), dropped(0, 2), store(1, "a", seq), store(2, "b", seq and seq + 1)])
    assert kinds(messages) == ["declaration", "refusal", "batch", "batch"]
    assert messages[1].refusal == Refusal(f"{SEGMENTS_DROPPED}: 0 to 2 of 1-1", 0)
    assert ingest.tally.segments_dropped == 1
    row = count(messages).rank_windows[-1]
    assert (row.observed_us, row.refused_batches, row.warmup) == (1_000, 1, True)


def test_a_recovered_segment_that_was_cut_ends_the_stretch(tmp_path: Path) -> None:
    cut = {"kind": "segment_recovered", "at_ms": AT, "attributed": True, "dropped_bytes": 9}
    messages, _ = theirs(tmp_path, [opened(), store(1, "a"), store(2, "b"), cut], [opened(1), store(3, "c")])
    assert kinds(messages) == ["declaration", "batch", "batch", "refusal", "batch"]
    assert messages[3].refusal == Refusal(f"{CUT}: 9 bytes", 0)


def test_their_stop_is_a_departure_of_every_rank(tmp_path: Path) -> None:
    stop = {**beat(5), "kind": "agent_stop", "reason": "duration"}
    messages, _ = theirs(tmp_path, [opened(), store(1, "a", dp_rank=0), store(1, "a", dp_rank=1), stop])
    departures = [message for message in messages if message.departure is not None]
    assert [(message.dp_rank, message.departure) for message in departures] == [(0, Departure("duration")), (1, Departure("duration"))]
    assert messages[-1] in departures


def test_where_nothing_is_numbered_the_place_names_a_batch_in_any_subset(tmp_path: Path) -> None:
    segments = [opened(0), store(1, "a"), store(2, "b")], [opened(1), store(3, "c")]
    whole, _ = theirs(tmp_path / "whole", *segments)
    alone, _ = theirs(tmp_path / "alone", segments[1])
    assert {(message.life_id, message.seq) for message in batches(alone)} < {(message.life_id, message.seq) for message in batches(whole)}


def test_an_orphan_of_theirs_proves_no_stretch(tmp_path: Path) -> None:
    marker = {"kind": "segment_recovered", "at_ms": AT, "attributed": False, "dropped_bytes": 1}
    messages, ingest = theirs(tmp_path, [marker, store(1, "a", content_id="c"), store(2, "b"), store(3, "c")])
    assert kinds(messages) == ["declaration", "batch", "refusal", "batch", "refusal", "batch"]
    assert ingest.tally.orphans == 1
    assert all(row.observed_us == 0 for row in count(messages).rank_windows)
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / "seg-by-another-name.parquet")
    assert ingested(tmp_path)[0] == messages


def test_a_declaration_that_changes_is_told_again(tmp_path: Path) -> None:
    messages, _ = theirs(
        tmp_path,
        [opened(0), store(1, "a", 1)],
        [opened(1, workload_class="batch"), store(2, "b", 2)],
    )
    assert [message.declaration.workload for message in messages if message.declaration] == ["agentic", "batch"]
    assert kinds(messages) == ["declaration", "batch", "declaration", "batch"]


def test_ours_read_as_anybody_s_count_the_same(ranks: list[list[RankMessage]], folder: Path, tmp_path: Path) -> None:
    """The contract's own records of our segments, without what only we write: the figures rest on the contract alone."""
    for path in folder.rglob("*.parquet"):
        records = []
        for record in records_of(path):
            if record["kind"] not in ("batch", "declaration", "loss", "refusal"):
                kept = {name: value for name, value in record.items() if name in contract.COLUMNS}
                if record["kind"] == "segment_open":
                    kept = {name: value for name, value in kept.items() if name not in ("instance_id", "dp_rank")}
                    kept["incarnation"] += f"-{path.parent.parent.name}-{path.parent.name}"  # one producer for each rank
                records.append(kept)
        write_lines(tmp_path / path.parent.relative_to(folder), [records])
    facts, ingest = ingested(tmp_path)
    assert ingest.tally.refused_files == []
    found = by_rank(facts)
    direct, foreign = counted(ranks), counted(found[rank[0].instance_id, rank[0].dp_rank] for rank in ranks)
    assert [_recompute(row) for row in foreign.recomputes] == [_recompute(row) for row in direct.recomputes]
    assert direct.recomputes


def _recompute(row: Any) -> tuple[Any, ...]:
    return row.instance_id, row.dp_rank, row.group_idx, row.cause, row.block_id, row.content_id, row.tokens, row.lost_at_us, row.back_at_us


@pytest.mark.parametrize("name", ["delivery", "orphan"])
def test_the_delivered_segments_of_the_contract_are_read(name: str, tmp_path: Path) -> None:
    fixture = json.loads(shared_path(f"{CORPUS}/delivery/records.json").read_text(encoding="utf-8"))
    if name == "delivery":
        messages, ingest = theirs(tmp_path, fixture["segment"]["lines"])
        twin = Ingest([shared_path(f"{CORPUS}/delivery")])
        assert [fact for fact in twin.facts() if isinstance(fact, RankMessage)] == messages
        assert (twin.tally.files, twin.tally.refused_files) == (1, [])
        assert kinds(messages).count("batch") == 6
    else:
        messages, ingest = theirs(tmp_path, fixture["orphan_segment"]["lines"])
        assert kinds(messages) == ["declaration", "batch", "refusal", "batch"]
    assert ingest.tally.unknown_kinds == 0


def test_every_reader_fixture_is_read_without_a_refusal(tmp_path: Path) -> None:
    paths = sorted(shared_path(f"{CORPUS}/reader").glob("*.json"))
    assert len(paths) > 40
    for path in paths:
        segments = json.loads(path.read_text(encoding="utf-8"))["segments"]
        facts, ingest = ingested(write_lines(tmp_path / path.stem, segments))
        assert ingest.tally.refused_files == []
        assert ingest.tally.files == len(segments)
        for fact in facts:
            codec.encode(fact)
        count(fact for fact in facts if isinstance(fact, RankMessage))


# -- into Kafka


def topic_records(servers: str, enough: Callable[[list[RankMessage], list[Lifecycle]], bool]) -> tuple[list[RankMessage], list[Lifecycle]]:
    """What lies on the topics, each rank's messages in their order, once it is ``enough``."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "read", "enable.auto.commit": False})
    messages: list[RankMessage] = []
    lives: list[Lifecycle] = []
    try:
        known = consumer.list_topics(timeout=20).topics
        consumer.assign(
            [
                TopicPartition(topic.name, number, OFFSET_BEGINNING)
                for topic in (BATCHES, LIFECYCLE)
                for number in known[topic.name].partitions
            ]
        )
        deadline = time.monotonic() + 60
        while not enough(messages, lives):
            assert time.monotonic() < deadline, f"{len(messages)} messages, {len(lives)} lifecycle records"
            message = consumer.poll(0.2)
            if message is None or message.error() is not None:
                continue
            value = message.value() or b""
            if message.topic() == BATCHES.name:
                messages.append(codec.decode(value, RankMessage))
            else:
                lives.append(codec.decode(value, Lifecycle))
    finally:
        consumer.close()
    return messages, lives


def test_captures_through_segments_and_kafka_are_what_they_were(
    ranks: list[list[RankMessage]], folder: Path, tmp_path: Path, module_kafka: Kafka
) -> None:
    with open_writer(tmp_path / "more") as writer:
        writer.write([heartbeat(batches=3)])
    (tmp_path / "seg-1-1-0.jsonl").write_bytes(b'{"kind":"segment_open"')
    done = kvcensus("ingest", str(folder), str(tmp_path), "--json", "--bootstrap-servers", module_kafka.bootstrap_servers)
    assert done.returncode == 1  # one file is refused; all others are there
    assert done.stderr.splitlines() == [
        f"refused: {tmp_path}/seg-1-1-0.jsonl: line 1: cut short",
        f"kvcensus: 1 of {len(list(folder.rglob('*.parquet'))) + 2} segments were refused",
    ]
    total = sum(map(len, ranks))
    summary = json.loads(done.stdout)
    assert (summary["messages"], summary["delivered"]) == (total, total + 1)
    messages, lives = topic_records(module_kafka.bootstrap_servers, lambda found, lives: len(found) >= total and bool(lives))
    found = by_rank(messages)
    for rank in ranks:
        assert found[rank[0].instance_id, rank[0].dp_rank] == rank
    assert lives == [heartbeat(batches=3)]
    assert counted(found[rank[0].instance_id, rank[0].dp_rank] for rank in ranks) == counted(ranks)


def test_a_dry_run_says_what_would_be_sent(folder: Path) -> None:
    done = kvcensus("ingest", str(folder), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "would be sent" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["ingest"], 2, "Missing argument"),
        (["ingest", "/nowhere", "--dry-run"], 1, "/nowhere: no such file or folder"),
        (["ingest", "{empty}", "--dry-run"], 1, "no sealed segment in"),
        (["ingest", "{segments}", "--startup-timeout", "0", "--bootstrap-servers", "127.0.0.1:1"], 1, "cannot be reached"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: list[str], code: int, says: str, folder: Path, tmp_path: Path) -> None:
    done = kvcensus(*[argument.format(empty=tmp_path, segments=folder) for argument in arguments])
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
    assert done.stdout == ""


def test_names_of_files_are_shown_escaped(tmp_path: Path) -> None:
    odd = os.fsdecode(b"seg-\x1b[2J\n\x7f\xc2\x9b\xff\xc3\xa9.jsonl")
    (tmp_path / odd).touch()
    shown = r"seg-\x1b[2J\n\x7f\x9b\udcffé.jsonl: empty"
    done = kvcensus("ingest", str(tmp_path), "--dry-run")
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, f"refused: {tmp_path}/{shown}")
    assert len(done.stderr.splitlines()) == 2
    done = kvcensus("ingest", str(tmp_path), "--dry-run", "--json")
    assert done.stdout.isascii()
    assert not set(done.stdout) & {"\x1b", "\x7f"}
    assert json.loads(done.stdout)["refused_files"] == [f"{tmp_path / odd}: empty"]
    done = kvcensus("ingest", str(tmp_path / "gone\x1b[2J\n"), "--dry-run")
    assert done.stderr == f"kvcensus: {tmp_path}/gone\\x1b[2J\\n: no such file or folder\n"


def test_what_is_too_large_for_kafka_goes_as_a_refusal_of_the_same_batch() -> None:
    sent = codec.encode(batch(7, blocks=1_000))
    kept = codec.decode(stand_in(sent), RankMessage)
    assert kept.seq == 7
    assert kept.batch is None
    assert kept.refusal is not None
    assert kept.refusal.payload_bytes == len(sent)
    beat = codec.encode(heartbeat())
    assert stand_in(beat) == beat


def test_segments_that_their_writer_takes_away_meanwhile_are_no_fault(tmp_path: Path) -> None:
    lines = write_lines(tmp_path, [[opened(0), store(1, "a", 1)], [opened(1), store(2, "b", 2)], [opened(2), store(3, "c", 3)]])
    ingest = Ingest([lines])
    seal.convert(tmp_path / f"seg-{RUN}-0.jsonl")
    (tmp_path / f"seg-{RUN}-1.jsonl").unlink()
    messages = [fact for fact in ingest.facts() if isinstance(fact, RankMessage)]
    assert kinds(messages) == ["declaration", "batch", "loss", "batch"]
    assert (ingest.tally.files, ingest.tally.vanished_files, ingest.tally.refused_files) == (2, 1, [])


def test_columns_of_other_widths_and_unknown_ones_are_read(tmp_path: Path) -> None:
    import pyarrow as pa

    table = pa.table(
        {
            "kind": pa.array(["segment_open", "store"]).dictionary_encode(),
            "at_ms": pa.array([AT, AT + 1]),
            "incarnation": ["1-1", None],
            "segment_seq": pa.array([0, None], pa.int32()),
            "instance_id": pa.array([None, "i0"], pa.large_string()),
            "block_id": [None, "b"],
            "n_tokens": pa.array([None, 16], pa.uint16()),
            "news": [None, 5],
        }
    )
    path = tmp_path / "seg-1-1-0.parquet"
    pq.write_table(table, path)
    rows = reader.read(path)
    assert rows[1].extra == {"news": "5"}
    assert (rows[1].n_tokens, rows[1].instance_id) == (16, "i0")
    pq.write_table(table.drop_columns("kind"), path)
    with pytest.raises(SegmentError, match="a record without kind"):
        reader.read(path)


def test_facts_of_several_runs_of_one_rank_follow_each_other(tmp_path: Path) -> None:
    """Another incarnation of a producer is another life, for its numbers do not say what went on between the two."""
    segments = [[opened(0, f"{STARTED_MS + run}-1"), store(run * 10 + 1, "a", 1), store(run * 10 + 2, "b", 2)] for run in (1, 0)]
    messages, ingest = theirs(tmp_path, *segments)
    assert [message.seq for message in batches(messages)] == [1, 2, 1, 2]
    assert [message.at_us for message in batches(messages)] == sorted(message.at_us for message in batches(messages))
    lives = [life for life, _ in itertools.groupby(message.life_id for message in messages)]
    assert len(lives) == len(set(lives)) == 2
    assert ingest.tally.incarnations == 2


def test_facts_are_told_whichever_path_names_them(folder: Path) -> None:
    paths = sorted(folder.rglob("*.parquet"))
    facts: list[Fact] = ingested(*paths)[0]
    assert facts == ingested(folder, *paths)[0]
