"""The order of one rank's batches, against a model of an engine: lives, lost batches, reconnects, replays with holes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.continuity import Arrival, Continuity, Resume, payload_digest

TIMEOUT = 5.0


def engine_time(payload: bytes) -> int | None:
    """Payloads of this test are ``LIFE:SEQ:TIME``."""
    text = payload.decode()
    return int(text.split(":")[2]) if ":" in text else None


def batch(life: int, seq: int, at: int | None = None) -> bytes:
    return f"{life}:{seq}:{life * 1_000_000 + seq if at is None else at}".encode()


def continuity(can_replay: bool = True) -> Continuity:
    return Continuity(can_replay, TIMEOUT, engine_time)


def given_out(order: Continuity) -> list[str]:
    """What came out, as ``LIFE:SEQ``."""
    return [arrival.payload.decode().rsplit(":", 1)[0] for arrival in order.ready]


def live(order: Continuity, life: int, *seqs: int, now: float = 0.0) -> None:
    for seq in seqs:
        order.live(Arrival(seq, batch(life, seq), 0), now)


def answer(order: Continuity, life: int, *seqs: int, end: bool = True, now: float = 0.0) -> None:
    order.take_ask()
    for seq in seqs:
        order.replayed(Arrival(seq, batch(life, seq), 0, replayed=True), now)
    if end:
        order.replay_ended(now)


def span(life: int, first: int, last: int) -> list[str]:
    return [f"{life}:{seq}" for seq in range(first, last + 1)]


def test_late_attach_takes_the_buffer_first_and_each_batch_once() -> None:
    order = continuity()
    order.connected(0.0)
    assert order.ask == 0
    live(order, 1, 3, 4, 5)
    assert not order.ready
    answer(order, 1, 0, 1, 2, 3, 4)
    live(order, 1, 6)
    assert given_out(order) == span(1, 0, 6)
    assert order.counters.overlaps == 2
    assert order.counters.replayed == 3


def test_a_live_batch_that_a_replay_brought_before_is_no_duplicate_but_a_second_live_one_is() -> None:
    order = continuity()
    order.connected(0.0)
    answer(order, 1, 0, 1, 2)
    live(order, 1, 2)
    assert given_out(order) == span(1, 0, 2)
    live(order, 1, 2)
    assert given_out(order) == [*span(1, 0, 2), "1:2"]


def test_a_buffer_that_no_longer_reaches_back_is_not_asked_again() -> None:
    order = continuity()
    order.connected(0.0)
    answer(order, 1, 7, 8)
    assert order.ask is None
    live(order, 1, 9)
    assert given_out(order) == span(1, 7, 9)


def test_a_gap_is_asked_for_from_the_last_known_batch() -> None:
    order = continuity()
    live(order, 1, 0, 1, 2, 6)
    assert order.ask == 2
    live(order, 1, 7)
    answer(order, 1, 2, 3, 4, 5, 6)
    assert given_out(order) == span(1, 0, 7)
    assert order.counters.jumps_left == 0


def test_holes_are_asked_for_once_more_and_then_left() -> None:
    order = continuity()
    live(order, 1, 0, 1, 9)
    answer(order, 1, 1, 2, 4, 6, 7)
    assert order.ask == 3
    answer(order, 1, 3, 6, 7)
    assert order.ask is None
    assert given_out(order) == [*span(1, 0, 4), "1:6", "1:7", "1:9"]
    assert order.counters.jumps_left == 2


def test_a_hole_before_the_waiting_live_batches_is_asked_for_once_more() -> None:
    order = continuity()
    live(order, 1, 0, 1, 9)
    answer(order, 1, 1, 2)
    assert order.ask == 3
    answer(order, 1, *range(3, 10))
    assert given_out(order) == span(1, 0, 9)


def test_without_a_replay_socket_nothing_waits() -> None:
    order = continuity(can_replay=False)
    order.connected(0.0)
    live(order, 1, 4, 5, 9)
    assert order.ask is None
    assert given_out(order) == ["1:4", "1:5", "1:9"]


def test_a_silent_replay_socket_is_given_up() -> None:
    order = continuity()
    live(order, 1, 0, 3, now=10.0)
    order.tick(14.9)
    assert given_out(order) == ["1:0"]
    order.tick(15.0)
    assert given_out(order) == ["1:0", "1:3"]
    assert order.counters.replays_overdue == 1


def test_patience_is_renewed_by_every_answer() -> None:
    order = continuity()
    live(order, 1, 0, 5, now=10.0)
    answer(order, 1, 0, 1, end=False, now=14.0)
    order.tick(18.9)
    assert (order.waiting, order.ask) == (True, None)
    order.tick(19.0)
    assert order.ask == 2  # something came, so its end was lost: once more from the first hole
    order.tick(24.0)
    assert given_out(order) == ["1:0", "1:1", "1:5"]


def test_patience_is_not_renewed_by_reconnects() -> None:
    order = continuity()
    live(order, 1, 0, 5, now=10.0)
    order.connected(14.0)
    order.tick(15.0)
    assert given_out(order) == ["1:0", "1:5"]


def test_a_hole_is_asked_for_once_more_also_after_a_reconnect() -> None:
    order = continuity()
    live(order, 1, 0, 5)
    answer(order, 1, 0, 2)
    assert order.take_ask() == 1
    order.connected(1.0)
    answer(order, 1, 0, 2)
    assert order.take_ask() == 1
    answer(order, 1, 1, 2, 3, 4, 5)
    assert given_out(order) == span(1, 0, 5)


def test_no_more_is_remembered_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.continuity.REMEMBERED_BATCHES", 4)
    order = continuity()
    order.connected(0.0)
    answer(order, 1, *range(20))
    live(order, 1, *range(20, 40), 60)
    order.give_up(0.0)
    assert sorted(order._given) == [60]
    order.connected(0.0)
    answer(order, 1, *range(60, 80))
    assert sorted(order._given) == sorted(order._given_by_replay) == [76, 77, 78, 79]
    order.live(Arrival(62, b"other:62:0", 0), 0.0)  # forgotten, and its time is not newer: it proves no restart
    assert order.ask is None


def test_restart_at_zero_needs_no_replay() -> None:
    order = continuity()
    live(order, 1, 0, 1, 2)
    live(order, 2, 0, 1)
    assert order.ask is None
    assert given_out(order) == [*span(1, 0, 2), *span(2, 0, 1)]


def test_restart_seen_late_is_taken_from_its_first_batch() -> None:
    order = continuity()
    live(order, 1, *range(6))
    live(order, 2, 3)
    assert order.ask == 0
    answer(order, 2, 0, 1, 2, 3)
    live(order, 2, 4)
    assert given_out(order) == [*span(1, 0, 5), *span(2, 0, 4)]
    assert order.counters.replayed == 3


def test_a_restart_is_asked_for_also_if_the_clock_fell_back() -> None:
    order = continuity()
    live(order, 1, *range(6))
    order.live(Arrival(3, batch(2, 3, at=0), 0), 0.0)
    assert order.ask == 0
    order.take_ask()
    for seq in range(4):
        order.replayed(Arrival(seq, batch(2, seq, at=0), 0, replayed=True), 0.0)
    order.replay_ended(0.0)
    order.live(Arrival(4, batch(2, 4, at=0), 0), 0.0)
    assert given_out(order) == [*span(1, 0, 5), *span(2, 0, 4)]


def test_restart_seen_late_with_a_silent_replay_socket_is_asked_for_once() -> None:
    order = continuity()
    live(order, 1, *range(6))
    live(order, 2, 3, now=0.0)
    live(order, 2, 4, now=1.0)
    order.tick(5.0)
    assert not order.waiting
    assert given_out(order) == [*span(1, 0, 5), "2:3", "2:4"]


def test_a_new_life_that_has_passed_the_old_number_is_told_by_the_anchor() -> None:
    order = continuity()
    live(order, 1, 0, 1, 2)
    order.connected(0.0)
    assert order.ask == 2
    live(order, 2, 7)
    answer(order, 2, 2, 3, 4, 5, 6, 7)
    assert order.ask == 0
    answer(order, 2, *range(8))
    assert given_out(order) == [*span(1, 0, 2), *span(2, 0, 7)]


def test_a_new_life_whose_beginning_is_no_longer_buffered_comes_out_as_far_back_as_it_was_seen() -> None:
    order = continuity()
    live(order, 1, 0, 1, 2)
    order.connected(0.0)
    answer(order, 2, *range(2, 8))
    assert order.ask == 0
    answer(order, 2, *range(5, 9))
    assert given_out(order) == [*span(1, 0, 2), *span(2, 2, 8)]


def test_a_new_life_whose_number_does_not_show_it_is_marked() -> None:
    order = continuity()
    live(order, 1, 0, 1, 2)
    order.connected(0.0)
    answer(order, 2, *range(2, 5))
    answer(order, 2, *range(7, 9))
    assert given_out(order) == [*span(1, 0, 2), *span(2, 7, 8)]
    assert [arrival.seq for arrival in order.ready if arrival.begins_life] == [7]


def test_what_proved_another_life_comes_out_also_when_no_second_answer_comes() -> None:
    order = continuity()
    live(order, 1, 0)
    order.connected(0.0)
    answer(order, 2, 0, 1, 2, 3, 4)
    order.take_ask()
    live(order, 2, 5)
    order.tick(5.0)
    assert given_out(order) == ["1:0", *span(2, 0, 5)]


def test_an_engine_that_had_nothing_buffered_is_looked_at_again_before_its_next_batch_counts_as_the_same_life() -> None:
    order = continuity()
    live(order, 1, 0)
    order.connected(0.0)
    answer(order, 2)
    answer(order, 2)
    assert not order.waiting
    live(order, 2, 1)
    assert order.ask == 0
    answer(order, 2, 0, 1)
    assert given_out(order) == ["1:0", "2:0", "2:1"]


def test_an_engine_whose_replay_is_always_empty_is_doubted_once() -> None:
    order = continuity()
    live(order, 1, 0)
    order.connected(0.0)
    answer(order, 1)
    answer(order, 1)
    live(order, 1, 1)
    answer(order, 1)
    live(order, 1, 2)
    assert order.ask is None
    assert given_out(order) == span(1, 0, 2)


def test_an_empty_answer_after_a_reconnect_means_a_younger_engine() -> None:
    order = continuity()
    live(order, 1, *range(6))
    order.connected(0.0)
    assert order.ask == 5
    answer(order, 2)
    assert order.ask == 0
    answer(order, 2, 0, 1)
    live(order, 2, 2)
    assert given_out(order) == [*span(1, 0, 5), *span(2, 0, 2)]


def test_live_batches_of_the_old_life_come_out_before_the_new_one() -> None:
    order = continuity()
    live(order, 1, 0, 1, 4)
    live(order, 1, 5)
    order.connected(0.0)
    answer(order, 2, end=True)
    answer(order, 2, 0, 1, 2)
    live(order, 2, 3)
    assert given_out(order) == ["1:0", "1:1", "1:4", "1:5", *span(2, 0, 3)]


def test_an_unreadable_batch_with_an_old_number_is_no_restart() -> None:
    order = continuity()
    live(order, 1, 0, 1, 2)
    order.live(Arrival(1, b"garbage", 0), 0.0)
    live(order, 1, 3)
    assert [arrival.payload for arrival in order.ready] == [batch(1, 0), batch(1, 1), batch(1, 2), b"garbage", batch(1, 3)]


# -- where another process left off, and connections that broke


def resumed(life: int, next_seq: int, can_replay: bool = True) -> Continuity:
    """An order that another process left after batch ``next_seq`` - 1 of ``life``; connected."""
    last = batch(life, next_seq - 1)
    at_us = engine_time(last)
    assert at_us is not None
    order = Continuity(can_replay, TIMEOUT, engine_time, resume=Resume(next_seq, payload_digest(last), at_us))
    order.connected(0.0)
    return order


def flagged(order: Continuity) -> list[int]:
    return [arrival.seq for arrival in order.ready if arrival.reconnected]


def test_a_digest_is_the_same_in_every_process() -> None:
    assert payload_digest(b"batch").hex() == "f191240f877efa34752a4dfc7379ca7d"
    assert payload_digest(b"batch") != payload_digest(b"other")


def test_resuming_asks_from_the_last_batch_and_gives_out_only_what_came_since() -> None:
    order = resumed(1, 5)
    assert order.ask == 4
    live(order, 1, 8)
    answer(order, 1, 4, 5, 6, 7, 8)
    assert given_out(order) == span(1, 5, 8)
    assert flagged(order) == []


def test_resuming_tells_another_life_by_the_batch_before() -> None:
    order = resumed(1, 5)
    answer(order, 2, 4, 5, 6)
    assert order.ask == 0
    answer(order, 2, *range(7))
    assert given_out(order) == span(2, 0, 6)
    assert [arrival.seq for arrival in order.ready if arrival.begins_life] == [0]


def test_resuming_tells_a_younger_life_by_its_empty_answer() -> None:
    order = resumed(1, 5)
    answer(order, 2)
    assert order.ask == 0
    answer(order, 2, 0, 1)
    assert given_out(order) == span(2, 0, 1)


def test_resuming_to_the_same_life_without_anything_new_gives_out_nothing() -> None:
    order = resumed(1, 5)
    answer(order, 1, 4)
    assert not order.ready
    live(order, 1, 5)
    assert given_out(order) == ["1:5"]
    assert flagged(order) == []


def test_without_proof_the_first_batch_after_another_processs_end_is_marked() -> None:
    silent, none, forgotten = resumed(1, 5), resumed(1, 5, can_replay=False), resumed(1, 5)
    live(silent, 1, 9, 10)
    silent.tick(5.0)
    live(none, 1, 9, 10)
    answer(forgotten, 1, 9, 10)
    for order in (silent, none, forgotten):
        assert given_out(order) == ["1:9", "1:10"]
        assert flagged(order) == [9]


def test_a_first_connection_leaves_nothing_open() -> None:
    order = continuity(can_replay=False)
    order.connected(0.0)
    live(order, 1, 3, 4)
    assert flagged(order) == []


def test_what_was_received_before_the_connection_broke_is_not_marked() -> None:
    order = continuity()
    live(order, 1, 0, 1, 4)
    order.connected(0.0)
    live(order, 1, 6)
    order.tick(5.0)
    assert given_out(order) == ["1:0", "1:1", "1:4", "1:6"]
    assert flagged(order) == [6]


def test_a_restart_that_shows_leaves_nothing_open() -> None:
    order = continuity(can_replay=False)
    live(order, 1, 0, 1, 2)
    order.connected(0.0)
    live(order, 2, 1, 2)
    assert [arrival.seq for arrival in order.ready if arrival.begins_life] == [1]
    assert flagged(order) == []


def test_answers_before_what_was_asked_for_prove_nothing() -> None:
    """Where one question is for several ranks, it starts at the lowest number that any needs."""
    order = continuity()
    live(order, 1, *range(5))
    order.connected(0.0)
    assert order.question == 4
    answer(order, 2, 2)
    assert order.ask == 0
    answer(order, 2, 0, 1, 2)
    assert given_out(order) == [*span(1, 0, 4), *span(2, 0, 2)]


@dataclass
class Engine:
    """A model of vLLM's publisher and of the wire: what was published, what is buffered, what is on its way to us."""

    keep: int
    life: int = 1
    clock: int = 0
    buffer: list[tuple[int, bytes]] = field(default_factory=list)
    next_seq: int = 0

    def publish(self) -> tuple[int, bytes]:
        self.clock += 1
        made = self.next_seq, batch(self.life, self.next_seq, self.clock)
        self.next_seq += 1
        self.buffer = [*self.buffer, made][-self.keep :]
        return made

    def restart(self) -> None:
        self.life, self.next_seq, self.buffer = self.life + 1, 0, []
        self.clock += 1


STEPS = st.lists(
    st.one_of(
        st.just("live"),
        st.just("live"),
        st.just("missed"),
        st.just("restart"),
        st.just("reconnect"),
        st.tuples(st.just("answer"), st.sets(st.integers(0, 8), max_size=2)),
    ),
    max_size=60,
)


@dataclass
class Played:
    """A played model: names of the batches published, of those that reached us live, and of what came out."""

    engine: Engine
    order: Continuity
    published: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)

    @property
    def out(self) -> list[str]:
        return given_out(self.order)


def play(steps: list[object], keep: int, holes_allowed: bool) -> Played:
    """Play ``steps``, then reconnect and answer everything outstanding."""
    engine, order = Engine(keep), continuity()
    played = Played(engine, order)
    connected = True
    order.connected(0.0)

    def serve(holes: set[int]) -> None:
        start = order.take_ask()
        if start is None:
            return
        for index, (seq, payload) in enumerate([entry for entry in engine.buffer if entry[0] >= start]):
            if not (holes_allowed and index in holes):
                order.replayed(Arrival(seq, payload, 0, replayed=True), 0.0)
        order.replay_ended(0.0)

    for step in steps:
        if step == "restart":
            engine.restart()
            connected = False
        elif step == "reconnect":
            connected = True
            order.connected(0.0)
        elif isinstance(step, tuple):
            serve(step[1])
        else:
            seq, payload = engine.publish()
            name = f"{engine.life}:{seq}"
            played.published.append(name)
            if step == "live" and connected:
                played.received.append(name)
                order.live(Arrival(seq, payload, 0), 0.0)
    order.connected(0.0)
    while order.ask is not None:
        serve(set())
    return played


def last_life_told(order: Continuity) -> list[str]:
    """What came out in the last life, as a reader can tell it: another life begins where the number falls or the mark stands."""
    begin, last = 0, -1
    for index, arrival in enumerate(order.ready):
        if arrival.begins_life or arrival.seq <= last:
            begin = index
        last = arrival.seq
    return given_out(order)[begin:]


@settings(max_examples=400)
@given(steps=STEPS, keep=st.integers(1, 30), holes=st.booleans())
def test_what_comes_out_is_in_order_and_once_and_all_that_was_received(steps: list[object], keep: int, holes: bool) -> None:
    played = play(steps, keep, holes)
    assert not played.order.waiting
    places = [played.published.index(name) for name in played.out]
    assert places == sorted(set(places))
    assert set(played.received) <= set(played.out)


@settings(max_examples=400)
@given(steps=STEPS)
def test_nothing_is_missing_of_the_last_life_while_the_buffer_reaches_back(steps: list[object]) -> None:
    played = play(steps, keep=1_000, holes_allowed=False)
    expected = [name for name in played.published if name.startswith(f"{played.engine.life}:")]
    assert [name for name in played.out if name in expected] == expected
    if expected:
        assert last_life_told(played.order) == expected
