"""Facts to records and back: the very same ones, through lines and through Parquet."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.segments import contract, reader, seal, shape, unshape
from producers.segments.ingest import own_facts
from producers.segments.shape import Fact
from schemas.records import (
    Batch,
    Declaration,
    Declared,
    Departure,
    EngineMetrics,
    Histogram,
    HolderReset,
    IdentityRefused,
    Lifecycle,
    Loss,
    Op,
    OpKind,
    RankMessage,
    Refusal,
    Scrape,
    split_ids,
)
from tests.segments import DECLARED, STARTED_MS, batch, heartbeat, records_of, violations

TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
COUNT = st.integers(0, 2**53)
ID = st.binary(min_size=16, max_size=16)
MICROS = st.integers(0, 8_000_000_000_000_000)


@st.composite
def ops(draw: st.DrawFn) -> Op:
    kind: OpKind = draw(st.sampled_from(get_args(OpKind)))
    blocks = draw(st.integers(0, 4))
    op = Op(
        kind,
        draw(st.none() | st.integers(0, 9)),
        draw(st.none() | st.sampled_from(["GPU", "CPU"])),
        draw(st.none() | st.sampled_from(["LOCAL", "REMOTE"])),
        draw(st.sampled_from([0, 16])),
        b"".join(draw(st.lists(ID, min_size=blocks, max_size=blocks))),
        b"".join(draw(st.just([]) | st.lists(ID | st.just(bytes(16)), min_size=blocks, max_size=blocks))),
        draw(st.sampled_from(["ROOT", "CONTENT", "UNKNOWN"])),
        draw(st.none() | ID),
    )
    if kind == "STORE" or draw(st.booleans()):
        op.spec_kind = draw(st.none() | TEXT)
        op.lora_name = draw(st.none() | TEXT)
        op.lora_id = draw(st.none() | st.integers(-(2**31), 2**31))
        op.spec_sliding_window = draw(st.none() | st.integers(0, 2**31 - 1))
        op.reused = draw(st.booleans())
        op.parent_block_id = draw(st.none() | ID)
        op.extra_keys = draw(st.just([]) | st.lists(st.binary(max_size=32), min_size=blocks, max_size=blocks))
    op.session_id = draw(st.none() | ID)
    op.ownership = draw(st.none() | TEXT)
    return op


@st.composite
def messages(draw: st.DrawFn) -> RankMessage:
    message = RankMessage(
        draw(TEXT), draw(st.integers(0, 9)), draw(TEXT), draw(COUNT), draw(MICROS), draw(st.integers(0, 2**40)), draw(TEXT)
    )
    message.skipped = draw(st.sampled_from([0, 3]))
    kind = draw(st.sampled_from(["batch", "holder_reset", "loss", "refusal", "declaration", "identity_refused", "scrape", "departure"]))
    if kind == "batch":
        message.batch = Batch(draw(st.lists(ops(), max_size=4)), draw(COUNT), draw(COUNT))
    elif kind == "holder_reset":
        message.holder_reset = HolderReset(draw(MICROS), draw(TEXT), draw(st.sampled_from(["restarted", "rekeyed"])))
    elif kind == "loss":
        message.loss = Loss(draw(COUNT), draw(COUNT), draw(TEXT))
    elif kind == "refusal":
        message.refusal = Refusal(draw(TEXT), draw(COUNT))
    elif kind == "identity_refused":
        message.identity_refused = IdentityRefused(draw(st.integers(0, 9)), draw(COUNT), draw(MICROS), draw(MICROS))
    elif kind == "scrape":
        message.scrape = Scrape(draw(COUNT), draw(st.none() | st.floats(0, 1)), *(draw(st.none() | COUNT) for _ in range(6)))
    elif kind == "departure":
        message.departure = Departure(draw(TEXT))
    else:
        labels = draw(st.dictionaries(TEXT, TEXT, max_size=2))
        message.declaration = Declaration(
            "labelled", "last_copy", draw(st.none() | TEXT), labels=labels, prefill_rate=0.5, kv_bytes_by_group={"0": 7}
        )
    return message


def through_lines(facts: list[Fact]) -> list[Fact]:
    records = [record for fact in facts for record in shape.records(fact, DECLARED)]
    for record in records:
        assert violations(record) == []
    rows = [seal.parse_line(line) for line in seal.lines(records).splitlines(keepends=True)]
    found, unknown = own_facts(rows)
    assert unknown == 0
    return found


def through_parquet(facts: list[Fact]) -> list[Fact]:
    header = shape.segment_open(
        STARTED_MS, incarnation="1-2", segment_seq=0, instance_id="i", dp_rank=0, declaration=DECLARED, max_segment_seconds=300
    )
    with tempfile.TemporaryDirectory() as folder:
        wal = Path(folder) / "seg-1-2-0.jsonl"
        wal.write_bytes(seal.lines([header, *[record for fact in facts for record in shape.records(fact, DECLARED)]]))
        target = seal.convert(wal)
        assert [path.name for path in Path(folder).iterdir()] == ["seg-1-2-0.parquet"]
        records_of(target)
        return own_facts(reader.read(target))[0]


@given(st.lists(messages(), max_size=3))
def test_any_message_comes_back_as_it_was_from_lines(facts: list[Fact]) -> None:
    assert through_lines(facts) == facts


@settings(max_examples=25)
@given(st.lists(messages(), max_size=3))
def test_any_message_comes_back_as_it_was_from_parquet(facts: list[Fact]) -> None:
    assert through_parquet(facts) == facts


def test_lifecycle_and_metrics_come_back_as_they_were() -> None:
    beat = heartbeat(
        batches=5, rss_bytes=9, reason="x", declared=[Declared("loss", "life", 1, 2, 3, "gone")], declared_more=1, heartbeat_ms=5
    )
    scrape = EngineMetrics("i0", 0, "life", "run", 7, histograms={"request_prefill_time": Histogram([0.1, float("1e9")], [1, 2], 3.5)})
    facts: list[Fact] = [beat, scrape]
    assert through_lines(facts) == facts
    assert through_parquet(facts) == facts


def test_a_run_is_told_block_by_block_with_its_parents() -> None:
    message = batch(7, blocks=3)
    assert message.batch is not None
    op = message.batch.ops[0]
    ids = [block.hex() for block in split_ids(op.block_ids)]

    def parents() -> list[tuple[object, object]]:
        return [(record.get("parent_id"), record.get("parent_unknown")) for record in shape.records(message, DECLARED)[1:]]

    assert parents() == [(None, None), (ids[0], None), (ids[1], None)]
    op.parent_state, op.parent_block_id = "CONTENT", b"p" * 16
    assert parents() == [((b"p" * 16).hex(), None), (ids[0], None), (ids[1], None)]
    op.parent_state = "UNKNOWN"  # known by name, not by content
    assert parents() == [((b"p" * 16).hex(), None), (ids[0], None), (ids[1], None)]
    op.parent_block_id = None  # hashes that cannot be assigned: of no block is the parent known
    assert parents() == [(None, True)] * 3


def test_extra_keys_leave_as_pseudonyms_one_list_for_each_block() -> None:
    message = batch(7, blocks=2)
    assert message.batch is not None
    message.batch.ops[0].extra_keys = [b"", b"a" * 16 + b"b" * 16]
    records = shape.records(message, DECLARED)
    assert "extra_keys" not in records[1]
    assert records[2]["extra_keys"] == [(b"a" * 16).hex(), (b"b" * 16).hex()]
    assert through_lines([message]) == [message]


@pytest.mark.parametrize(
    "change",
    [
        {"records": "2"},
        {"records": "x"},
        {"ops": "[]"},
        {"ops": '[{"records":-1}]'},
        {"ops": '[{"records":1,"op":"%%%"}]'},
        {"at_us": "soon"},
        {"ops": '[{"records":1,"parent_state":"NEVER"}]'},
    ],
)
def test_a_record_of_ours_that_was_tampered_with_is_refused(change: dict[str, str]) -> None:
    rows = [contract.row(record) for record in shape.records(batch(1), DECLARED)]
    rows[0].extra |= change
    with pytest.raises(contract.ContractError):
        own_facts(rows)


def test_rows_of_others_are_not_taken_for_ours() -> None:
    record = {"kind": "heartbeat", "at_ms": 1.0, "msgs_seen": 0, "dropped": 0, "endpoints": []}
    assert not unshape.is_own(contract.row(record))
    assert unshape.is_own(contract.row(shape.lifecycle(heartbeat(), DECLARED)))
    assert isinstance(unshape.fact(contract.row(shape.lifecycle(heartbeat(), DECLARED))), Lifecycle)
