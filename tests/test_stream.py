"""One rank's frames in arrival order: continuity, losses, duplicates, restarts, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers import capture
from producers.continuity import payload_digest
from producers.identity import Identity, IdentityKey
from producers.resolver import RankResolver
from producers.stream import Position, RankStream, begins_life
from schemas import codec
from schemas.records import Declaration, HolderReset, Loss, RankMessage
from tests.shared_data import CAPTURE_NAMES, capture_path

KEY = IdentityKey(bytes(range(32)), bytes(32))
DECLARATION = Declaration("unlabelled", "per_copy", workload="chat", canary=KEY.canary)
BROKEN = b"\xc1"


def rank_stream(**more: Any) -> RankStream:
    lives = (f"life-{n}" for n in itertools.count())
    return RankStream("inst", 1, RankResolver(Identity(KEY, None), KEY), DECLARATION, "run-1", lambda *_: next(lives), **more)


def payload(at: float, block: int = 0, rank: int | None = 1) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [block], "parent_block_hash": None, "token_ids": [block] * 4, "block_size": 4}
    return msgspec.msgpack.encode([at, [event], rank])


def kinds(messages: list[RankMessage]) -> list[str]:
    names = ("batch", "holder_reset", "loss", "refusal", "declaration")
    out = []
    for message in messages:
        (kind,) = (name for name in names if getattr(message, name) is not None)
        out.append(kind)
        assert codec.decode(codec.encode(message), RankMessage) == message
    return out


def test_the_declaration_comes_first() -> None:
    stream = rank_stream()
    (message,) = stream.start(5)
    assert message == RankMessage("inst", 1, "life-0", 0, 0, 5, "run-1", declaration=DECLARATION)


def test_consecutive_frames_are_batches() -> None:
    stream = rank_stream()
    for seq in range(3):
        (message,) = stream.feed(seq, payload(100 + seq, seq), 7)
        assert (message.seq, message.at_us, message.life_id, message.observed_at_ms) == (seq, (100 + seq) * 1_000_000, "life-0", 7)
        assert message.batch is not None
        assert len(message.batch.ops) == 1
    assert stream.next_seq == 3
    counters = stream.counters
    assert (counters.batches, counters.blocks_stored, counters.lost, counters.unresolved_blocks) == (3, 3, 0, 0)


def test_attaching_late_is_no_loss() -> None:
    stream = rank_stream()
    before = stream.next_seq
    assert before is None
    assert stream.verdict(46, payload(1)) == "next"
    assert kinds(stream.feed(46, payload(1), 1)) == ["batch"]
    assert (stream.next_seq, stream.counters.lost) == (47, 0)


def test_a_jump_ahead_is_a_declared_loss() -> None:
    stream = rank_stream()
    stream.feed(0, payload(1), 1)
    assert stream.verdict(5, payload(2)) == "gap"
    loss, batch = stream.feed(5, payload(2), 1)
    assert (loss.loss, loss.seq, loss.at_us) == (Loss(1, 4, "missing in the stream"), 5, 1_000_000)
    assert (batch.seq, stream.next_seq, stream.counters.lost) == (5, 6, 4)


def test_the_same_frame_again_is_a_duplicate() -> None:
    stream = rank_stream()
    for seq in range(3):
        stream.feed(seq, payload(seq, seq), 1)
    for seq in range(3):
        assert stream.verdict(seq, payload(seq, seq)) == "duplicate"
        assert stream.feed(seq, payload(seq, seq), 1) == []
    assert (stream.next_seq, stream.counters.duplicates, stream.counters.batches) == (3, 3, 3)


def test_another_frame_under_an_old_number_is_a_restart() -> None:
    stream = rank_stream()
    for seq in range(3):
        stream.feed(seq, payload(10 + seq, seq), 1)
    assert stream.verdict(0, payload(50)) == "restart"
    reset, batch = stream.feed(0, payload(50), 9)
    assert reset.holder_reset is not None
    assert reset.holder_reset.boundary_us == 50_000_000
    assert "from 3 to 0" in reset.holder_reset.reason
    assert (reset.life_id, reset.seq, reset.at_us) == ("life-1", 0, 12_000_000)
    assert (batch.life_id, batch.seq, batch.at_us) == ("life-1", 0, 50_000_000)
    assert (stream.next_seq, stream.life_id, stream.counters.publisher_restarts) == (1, "life-1", 1)


def test_a_restart_is_known_even_if_the_clock_fell_back() -> None:
    """Same number, other payload, an older time: the remembered frame tells that it is another process."""
    stream = rank_stream()
    stream.feed(0, payload(100), 1)
    stream.feed(1, payload(101), 1)
    assert kinds(stream.feed(0, payload(90, 5), 1)) == ["holder_reset", "batch"]
    assert kinds(stream.feed(1, payload(91, 6), 1)) == ["batch"]
    assert stream.position.newest_us == 91_000_000  # of this life
    loss, _ = stream.feed(3, payload(93, 7), 1)
    assert (kinds([loss]), loss.at_us) == (["loss"], 91_000_000)


def test_the_hashes_of_the_last_life_mean_nothing_in_the_next() -> None:
    stream = rank_stream()
    stream.feed(0, payload(1, 7), 1)
    child = {"type": "BlockStored", "block_hashes": [8], "parent_block_hash": 7, "token_ids": [1] * 4, "block_size": 4}
    _, batch = stream.feed(0, msgspec.msgpack.encode([2, [child]]), 1)
    assert batch.batch is not None
    assert batch.batch.ops[0].parent_state == "UNKNOWN"
    assert batch.batch.unresolved_blocks == stream.counters.unresolved_blocks == 1


def test_the_ids_of_another_key_mean_nothing_from_there_on_though_the_engine_goes_on() -> None:
    stream = rank_stream()
    stream.feed(0, payload(1, 7), 1)
    reset = stream.rekey("another key", 1)
    assert reset.holder_reset is not None
    assert (reset.holder_reset.cause, reset.holder_reset.boundary_us, reset.life_id) == ("rekeyed", 1_000_000, "life-1")
    child = {"type": "BlockStored", "block_hashes": [8], "parent_block_hash": 7, "token_ids": [1] * 4, "block_size": 4}
    (batch,) = stream.feed(1, msgspec.msgpack.encode([2, [child]]), 1)
    assert batch.batch is not None
    assert (batch.life_id, batch.batch.ops[0].parent_state) == ("life-1", "UNKNOWN")


def test_a_restart_seen_late_declares_what_it_missed() -> None:
    stream = rank_stream()
    for seq in range(5):
        stream.feed(seq, payload(seq, seq), 1)
    messages = stream.feed(2, payload(50), 1)
    assert kinds(messages) == ["holder_reset", "loss", "batch"]
    assert messages[1].loss == Loss(0, 1, "missing in the stream")
    assert {message.life_id for message in messages} == {"life-1"}


def test_frames_of_the_last_life_are_remembered_no_longer() -> None:
    stream = rank_stream()
    stream.feed(0, payload(1), 1)
    stream.feed(0, payload(2), 1)
    assert kinds(stream.feed(1, payload(3), 1)) == ["batch"]
    assert kinds(stream.feed(0, payload(9, 9), 1)) == ["holder_reset", "batch"]
    assert stream.life_id == "life-2"


def test_a_forgotten_frame_is_told_by_its_time() -> None:
    stream = rank_stream(remembered=2)
    for seq in range(5):
        stream.feed(seq, payload(10 + seq, seq), 1)
    assert stream.feed(0, payload(10, 0), 1) == []  # forgotten, but not newer than what this life has shown
    assert stream.feed(1, payload(14, 77), 1) == []
    assert stream.counters.duplicates == 2
    assert kinds(stream.feed(1, payload(15, 1), 1)) == ["holder_reset", "loss", "batch"]


def test_a_late_frame_that_was_declared_lost_is_dropped_and_counted() -> None:
    stream = rank_stream()
    stream.feed(0, payload(1), 1)
    stream.feed(2, payload(3), 1)
    assert stream.feed(1, payload(2), 1) == []
    assert (stream.counters.duplicates, stream.counters.publisher_restarts) == (1, 0)
    stream.feed(0, payload(11, 11), 1)
    stream.feed(1, payload(12, 12), 1)
    stream.feed(0, payload(21, 21), 1)
    stream.feed(2, payload(23, 23), 1)
    assert stream.feed(1, payload(22, 22), 1) == []  # that another life had the number before proves nothing
    assert (stream.counters.duplicates, stream.counters.publisher_restarts) == (2, 2)


# -- what cannot be read


def test_an_unreadable_payload_is_refused_and_its_number_consumed() -> None:
    stream = rank_stream()
    stream.feed(0, payload(4), 1)
    (message,) = stream.feed(1, BROKEN, 8)
    assert message.refusal is not None
    assert (message.refusal.payload_bytes, message.seq, message.at_us) == (1, 1, 4_000_000)
    assert "not msgpack" in message.refusal.reason
    assert kinds(stream.feed(2, payload(5), 1)) == ["batch"]
    assert (stream.counters.refused, stream.counters.lost, stream.counters.batches) == (1, 0, 2)


def test_an_unreadable_payload_after_a_gap_declares_both() -> None:
    stream = rank_stream()
    stream.feed(0, payload(1), 1)
    messages = stream.feed(3, BROKEN, 1)
    assert kinds(messages) == ["loss", "refusal"]
    assert messages[0].loss == Loss(1, 2, "missing in the stream")
    assert stream.next_seq == 4


def test_an_unreadable_payload_under_an_old_number_is_no_restart() -> None:
    stream = rank_stream()
    for seq in range(3):
        stream.feed(seq, payload(seq, seq), 1)
    assert stream.verdict(1, BROKEN) == "stray"
    (message,) = stream.feed(1, BROKEN, 1)
    assert message.refusal is not None
    assert (message.life_id, message.seq, stream.next_seq) == ("life-0", 1, 3)
    assert stream.counters.publisher_restarts == 0


def test_a_refused_frame_seen_again_is_a_duplicate() -> None:
    stream = rank_stream()
    stream.feed(0, BROKEN, 1)
    stream.feed(1, payload(1), 1)
    assert stream.feed(0, BROKEN, 1) == []
    assert (stream.counters.refused, stream.counters.duplicates) == (1, 1)


def test_the_first_frame_may_be_unreadable() -> None:
    stream = rank_stream()
    assert kinds(stream.feed(9, BROKEN, 1)) == ["refusal"]
    assert kinds(stream.feed(10, payload(1), 1)) == ["batch"]


@pytest.mark.parametrize("seq", [-1, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_number_out_of_range_is_refused_and_not_believed(seq: int) -> None:
    stream = rank_stream()
    stream.feed(0, payload(1), 1)
    assert kinds(stream.feed(seq, payload(2), 1)) == ["refusal"]
    assert kinds(stream.feed(1, payload(3), 1)) == ["batch"]


# -- hints and resuming


def test_a_restart_that_the_sequence_does_not_show() -> None:
    stream = rank_stream()
    stream.feed(0, payload(1), 1)
    stream.engine_restarted("process start time changed")
    assert kinds(stream.feed(1, BROKEN, 1)) == ["refusal"]  # whose it is cannot be told
    messages = stream.feed(2, payload(9), 1)
    assert kinds(messages) == ["holder_reset", "loss", "batch"]
    assert messages[0].holder_reset == HolderReset(9_000_000, "process start time changed")
    assert kinds(stream.feed(3, payload(10), 1)) == ["batch"]


def test_a_stream_goes_on_where_another_process_left_it() -> None:
    first = rank_stream()
    for seq in range(3):
        first.feed(seq, payload(10 + seq, seq), 1)
    assert first.position == Position("life-0", 3, 12_000_000, payload_digest(payload(12, 2)))
    second = rank_stream(position=first.position)
    assert second.verdict(3, payload(13)) == "next"
    for seq in range(3):  # a replay from the start
        assert second.feed(seq, payload(10 + seq, seq), 1) == []
    (message,) = second.feed(3, payload(13), 1)
    assert (message.life_id, message.seq) == ("life-0", 3)
    third = rank_stream(position=second.position)
    assert kinds(third.feed(0, payload(99), 1)) == ["holder_reset", "batch"]


def test_what_has_the_number_of_the_last_batch_is_told_by_its_digest_also_in_another_process() -> None:
    first = rank_stream()
    for seq in range(3):
        first.feed(seq, payload(10 + seq, seq), 1)
    again, other = rank_stream(position=first.position), rank_stream(position=first.position)
    assert again.verdict(2, payload(12, 2)) == "duplicate"
    assert kinds(other.feed(2, payload(11, 9), 1)) == ["holder_reset", "loss", "batch"]  # though its time is older


def test_payloads_that_are_too_large_are_refused_unread_and_counted_apart() -> None:
    stream = rank_stream(max_payload_bytes=len(payload(1)) - 1)
    (message,) = stream.feed(0, payload(1), 1)
    assert message.refusal is not None
    assert (message.refusal.payload_bytes, "larger than" in message.refusal.reason) == (len(payload(1)), True)
    stream.feed(1, BROKEN, 1)
    assert (stream.counters.refused, stream.counters.oversized) == (2, 1)


def test_events_are_counted_with_those_of_unknown_types() -> None:
    stream = rank_stream()
    events = [{"type": "AllBlocksCleared"}, {"type": "Unheard"}]
    stream.feed(0, msgspec.msgpack.encode([1.0, events]), 1)
    stream.feed(1, payload(2), 1)
    assert (stream.counters.events, stream.counters.unknown_events) == (3, 1)


def test_a_loss_after_a_broken_connection_says_so() -> None:
    stream = rank_stream()
    stream.feed(0, payload(1), 1)
    loss, batch = stream.feed(3, payload(2), 1, reconnected=True)
    assert loss.loss is not None
    assert "the connection had broken" in loss.loss.reason
    assert batch.life_id == loss.life_id == "life-0"


@pytest.mark.parametrize(
    ("newest", "started", "at", "begins"),
    [(10, 11, 12, True), (10, 12, 12, True), (10, 10, 12, False), (10, 13, 12, False), (0, 5, 12, False), (10, 9, 12, False)],
)
def test_a_process_began_a_life_if_it_started_after_the_old_one_and_not_after_the_new(
    newest: int, started: int, at: int, begins: bool
) -> None:
    assert begins_life(newest, started, at) is begins


def test_a_batch_of_another_rank_is_counted() -> None:
    stream = rank_stream()
    stream.feed(0, payload(1, rank=1), 1)
    stream.feed(1, payload(2, rank=None), 1)
    stream.feed(2, payload(3, rank=0), 1)
    assert stream.counters.rank_mismatches == 1


# -- against a model


STEPS = st.lists(
    st.one_of(st.tuples(st.just("next"), st.just(0)), st.tuples(st.sampled_from(["again", "lose", "broken", "restart"]), st.integers(0, 5)))
)


@given(STEPS)
def test_every_batch_is_sent_once_or_accounted_for(steps: list[tuple[str, int]]) -> None:
    """An engine that publishes, loses, repeats, breaks and restarts; its clock only moves ahead."""
    stream = rank_stream()
    seq = life = 0
    published: list[tuple[int, bytes]] = []
    sent: list[tuple[str, int]] = []
    expected: list[tuple[str, int]] = []
    lost = refused = 0
    for clock, (step, number) in enumerate(steps, start=1):
        frame: tuple[int, bytes] | None = None
        if step == "again" and published:
            frame = published[number % len(published)]
        elif step == "lose" and published:
            seq += number
            lost += number
        elif step == "restart" and published:
            life, seq, published = life + 1, 0, []
        elif step == "broken" and published:
            frame = (seq, BROKEN + bytes([clock % 256, life % 256]) + clock.to_bytes(4, "big"))
            seq += 1
            refused += 1
            published.append(frame)
        if frame is None:
            frame = (seq, payload(clock, clock))
            published.append(frame)
            expected.append((f"life-{life}", seq))
            seq += 1
        messages = stream.feed(*frame, clock)
        kinds(messages)
        sent += [(message.life_id, message.seq) for message in messages if message.batch is not None]
    assert sent == expected
    assert stream.counters.lost == lost
    assert stream.counters.refused == refused
    assert stream.counters.publisher_restarts == life
    assert len(sent) + stream.counters.duplicates + refused == len(steps)


@pytest.mark.parametrize("name", CAPTURE_NAMES)
def test_real_captures_stream_whole(name: str) -> None:
    for rank, frames in capture.ranks(capture_path(name)).items():
        stream = rank_stream()
        stream.dp_rank = rank
        messages = [message for frame in frames for message in stream.feed(frame.seq, frame.payload, 1)]
        restarts = 1 if "restart" in name else 0
        assert kinds(messages).count("batch") == len(frames) == stream.counters.batches
        assert len(messages) == len(frames) + restarts
        counters = stream.counters
        assert (counters.publisher_restarts, counters.lost, counters.refused, counters.duplicates) == (restarts, 0, 0, 0)
        assert counters.rank_mismatches == 0
