"""Any sequence of records of another producer: everything in it is told once, in an order that can be counted."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from producers.segments import contract
from producers.segments.foreign import ForeignRun, Survey
from producers.segments.shape import Fact
from schemas import codec
from schemas.records import ID_BYTES, Lifecycle, RankMessage
from streams.offline import count
from tests.segments import STARTED_MS, by_rank

INSTANCES = ("i0", "i1")
BLOCKS = ("a", "b", "c")


@st.composite
def segments(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Segments of one run; times and numbers grow, mostly."""
    numbered = draw(st.sampled_from(["all", "none", "some"]))
    ranked = draw(st.booleans())
    at, seq, dropped = float(STARTED_MS), 0, 0
    found = []
    for number in sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=3))):
        header = {"kind": "segment_open", "at_ms": at, "incarnation": "1-2", "segment_seq": number, "heartbeat_secs": 60}
        records = [header | draw(st.sampled_from([{}, {"workload_class": "w"}, {"key_epoch": 4}]))]
        for _ in range(draw(st.integers(0, 8))):
            step = draw(st.integers(0, 3))
            at += step
            seq += min(step, draw(st.integers(1, 3)))
            kind = draw(st.sampled_from(["store", "store", "evict", "clear", "holder_reset", "heartbeat", "identity_refused", "other"]))
            record: dict[str, Any] = {"kind": kind, "at_ms": at, "instance_id": draw(st.sampled_from(INSTANCES))}
            if ranked and (kind not in ("clear", "holder_reset") or draw(st.booleans())):
                record["dp_rank"] = draw(st.integers(0, 1))
            if numbered == "all" or (numbered == "some" and draw(st.booleans())):
                record["seq"] = seq
            if kind in ("store", "evict"):
                record |= {"block_id": draw(st.sampled_from(BLOCKS)), "tier": draw(st.sampled_from([None, "gpu", "cpu"]))}
                record |= draw(st.sampled_from([{}, {"content_id": "x"}, {"group_idx": 1}, {"locality": "REMOTE"}]))
            if kind == "store":
                record |= {"n_tokens": 16} | draw(
                    st.sampled_from([{}, {"parent_id": "a"}, {"parent_unknown": True}, {"extra_keys": ["k"]}, {"reused": True}])
                )
            elif kind == "clear":
                record["scope"] = "all"
            elif kind == "holder_reset":
                record["boundary_ms"] = at
                seq = 0 if "dp_rank" not in record else seq
            elif kind == "identity_refused":
                record |= {"group_idx": 0, "refused": 3, "window_start_ms": at, "window_end_ms": at}
            elif kind == "heartbeat":
                del record["instance_id"]
                dropped += draw(st.sampled_from([0, 0, 2]))
                endpoint = {"source": "i0", "endpoint": "e", "msgs_seen": seq, "dropped": dropped}
                record |= {"dropped": dropped, "endpoints": draw(st.sampled_from([[endpoint], []]))}
            records.append(record)
        found.append(records)
    return found


def told(found: list[list[dict[str, Any]]], *, sequenced: bool = True) -> list[Fact]:
    rows = [[contract.row(record) for record in records] for records in found]
    survey = Survey()
    for segment in rows:
        for row in segment:
            survey.add(row)
    survey.end()
    run = ForeignRun("1-2", survey, sequenced=sequenced)
    facts = [fact for segment in rows for fact in run.segment(segment, segment[0].segment_seq if sequenced else None)]
    return [*facts, *run.end()]


@settings(max_examples=150)
@given(segments(), st.booleans())
def test_everything_is_told_once_and_can_be_counted(found: list[list[dict[str, Any]]], sequenced: bool) -> None:
    found = found if sequenced else found[:1]  # without an owner, a segment stands for itself
    facts = told(found, sequenced=sequenced)
    assert told(found, sequenced=sequenced) == facts
    for fact in facts:
        assert codec.decode(codec.encode(fact), type(fact)) == fact
    messages = [fact for fact in facts if isinstance(fact, RankMessage)]
    records = [record for segment in found for record in segment]
    for kind, name in (("STORE", "store"), ("REMOVE", "evict")):
        blocks = sum(len(op.block_ids) for message in messages if message.batch for op in message.batch.ops if op.kind == kind)
        assert blocks == ID_BYTES * sum(record["kind"] == name for record in records)
    cleared = {(message.instance_id, message.dp_rank) for message in messages if message.batch and message.batch.ops[0].kind == "CLEAR"}
    assert {rank[0] for rank in cleared} <= {record["instance_id"] for record in records if record["kind"] == "clear"}
    for rank in by_rank(facts).values():
        lives: list[str] = []
        for message in rank:
            if not lives or lives[-1] != message.life_id:
                assert message.life_id not in lives
                lives.append(message.life_id)
        rows = count(rank).rank_windows
        newest = {(row.life_id, row.window_start_us): row for row in rows}
        if not any("seq" in record for record in records):
            assert sum(row.duplicate_batches for row in newest.values()) == 0
            assert sum(row.batches for row in newest.values()) == sum(message.batch is not None for message in rank)


@given(segments())
def test_a_rank_is_declared_before_anything_of_it_is_counted(found: list[list[dict[str, Any]]]) -> None:
    declared: set[tuple[str, int]] = set()
    for fact in told(found):
        rank = fact.instance_id, fact.dp_rank
        if isinstance(fact, RankMessage):
            if fact.declaration is not None:
                declared.add(rank)
            assert fact.holder_reset is not None or rank in declared
        elif isinstance(fact, Lifecycle):
            assert rank in declared
