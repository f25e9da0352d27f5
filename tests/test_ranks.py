"""Several ranks on one socket, numbered together or each by itself: told apart, named, resumed; against a model of such a socket."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers import checkpoint, wire
from producers.continuity import Arrival
from producers.identity import Identity, IdentityKey
from producers.numbering import MAX_RANKS, SocketOrder, read_rank
from producers.ranks import OTHER_ENGINE, Ranks
from producers.resolver import RankResolver
from producers.stream import Position, RankStream
from schemas import codec
from schemas.records import Declaration, Loss, RankMessage

KEY = IdentityKey(bytes(range(32)), bytes(32))
DECLARATION = Declaration("unlabelled", "per_copy")
BROKEN = b"\xc1"
TIMEOUT = 5.0
_lives = itertools.count()


def kept_over_an_end(positions: dict[int, Position]) -> dict[int, Position]:
    """Positions as another process gets them."""
    kept = checkpoint.decode(checkpoint.encode(checkpoint.Checkpoint(b"", positions)))
    assert kept is not None
    return kept.positions


def make(dp_rank: int, position: Position | None) -> RankStream:
    resolver = RankResolver(Identity(KEY, None), KEY)
    return RankStream("inst", dp_rank, resolver, DECLARATION, "run", lambda *_: f"life-{next(_lives)}", position=position)


def payload(at: float, rank: int | None, block: int = 0) -> bytes:
    event = {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU"}
    return msgspec.msgpack.encode([at, [event], rank])


def arrival(seq: int, at: float, rank: int | None = 0, **more: Any) -> Arrival:
    return Arrival(seq, payload(at, rank, seq), 7, **more)


def engine_time(body: bytes) -> int | None:
    try:
        return wire.decode(body).at_us
    except wire.WireError:
        return None


def brief(messages: Iterable[RankMessage]) -> list[tuple[Any, ...]]:
    """(rank, kind, ...) of each message."""
    out: list[tuple[Any, ...]] = []
    for message in messages:
        assert codec.decode(codec.encode(message), RankMessage) == message
        rank = message.dp_rank
        if message.batch is not None:
            out.append((rank, "batch", message.seq, message.skipped))
        elif message.loss is not None:
            out.append((rank, "loss", message.loss.first_seq, message.loss.last_seq))
        elif message.refusal is not None:
            out.append((rank, "refusal", message.seq))
        else:
            out.append((rank, "declaration" if message.declaration is not None else "holder_reset"))
    return out


def feed(ranks: Ranks, *arrivals: Arrival) -> list[tuple[Any, ...]]:
    return brief(message for each in arrivals for message in ranks.feed(each))


# -- the rank that a payload names


@pytest.mark.parametrize("rank", [None, 0, 1, 5, 127, 128, 192, 200, 255, 256, 261, 65_535, 65_536, 70_000])
@pytest.mark.parametrize("likely", [(), (0,), (0, 1, 5, 112, 128, 192, 200)])
def test_the_rank_is_read_whatever_was_seen_before(rank: int | None, likely: tuple[int, ...]) -> None:
    assert read_rank(payload(1.0, rank), likely) == (rank or 0)
    assert read_rank(msgspec.msgpack.encode([1.0, [], rank, "more"]), likely) == (rank or 0)
    assert read_rank(msgspec.msgpack.encode([1.0, []]), likely) == 0


@given(st.binary(max_size=40), st.sets(st.integers(0, 255), max_size=3))
def test_no_payload_makes_up_a_rank(junk: bytes, likely: set[int]) -> None:
    """A rank that was not seen before is believed only from an envelope that can be read."""
    rank = read_rank(junk, likely)
    if rank is not None and rank not in likely:
        assert wire.dp_rank(junk) in (rank, None)


def test_a_payload_that_is_too_large_names_no_rank() -> None:
    assert read_rank(payload(1.0, 3), (), max_bytes=10) is None


# -- names


def test_without_a_configured_rank_the_batches_name_it() -> None:
    ranks = Ranks(make)
    assert ranks.start(1) == []
    assert feed(ranks, arrival(0, 1, 3)) == [(3, "declaration"), (3, "batch", 0, 0)]
    assert feed(Ranks(make), arrival(0, 1, None)) == [(0, "declaration"), (0, "batch", 0, 0)]
    assert ranks.counters.rank_mismatches == 0


def test_the_first_rank_is_called_as_configured_and_another_is_kept_apart() -> None:
    ranks = Ranks(make, dp_rank=3)
    assert brief(ranks.start(1)) == [(3, "declaration")]
    assert feed(ranks, arrival(0, 1, 0), arrival(1, 2, 0)) == [(3, "batch", 0, 0), (3, "batch", 1, 0)]
    assert ranks.counters.rank_mismatches == 2
    assert feed(ranks, arrival(0, 3, 1, shared=False)) == [(1, "declaration"), (1, "batch", 0, 0)]
    assert ranks.counters.rank_mismatches == 3
    assert {name: position.wire_rank for name, position in ranks.positions.items()} == {3: 0, 1: 1}


def test_a_rank_whose_name_is_taken_is_refused() -> None:
    ranks = Ranks(make, dp_rank=1)
    feed(ranks, arrival(0, 1, 0))
    (message,) = ranks.feed(arrival(0, 2, 1, shared=False))
    assert message.refusal is not None
    assert "names rank 1, which the configured rank already calls the engine's rank 0" in message.refusal.reason
    assert feed(ranks, arrival(1, 3, 0)) == [(1, "batch", 1, 0)]
    assert ranks.counters.refused == 1


def test_no_more_ranks_than_can_be_kept() -> None:
    ranks = Ranks(make)
    for rank in range(MAX_RANKS):
        ranks.feed(arrival(0, 1, rank, shared=False))
    assert feed(ranks, arrival(0, 1, MAX_RANKS, shared=False)) == [(0, "refusal", 2**63 - 1)]
    assert len(ranks.streams) == MAX_RANKS


def test_names_and_places_outlive_the_process() -> None:
    ranks = Ranks(make, dp_rank=3)
    feed(ranks, arrival(0, 1, 0), arrival(5, 2, 1, shared=False), arrival(1, 3, 0))
    kept = kept_over_an_end(ranks.positions)
    assert kept == ranks.positions
    again = Ranks(make, dp_rank=3, positions=kept)
    assert [line[0] for line in brief(again.start(1))] == [1, 3]
    assert feed(again, arrival(6, 4, 1), arrival(1, 3, 0), arrival(2, 5, 0)) == [(1, "batch", 6, 0), (3, "batch", 2, 0)]
    assert again.streams[1].life_id == ranks.streams[1].life_id


def test_places_kept_under_another_name_are_left() -> None:
    ranks = Ranks(make, dp_rank=3)
    feed(ranks, arrival(0, 1, 0))
    for configured in (None, 4):
        assert all(position.next_seq is None for position in Ranks(make, dp_rank=configured, positions=ranks.positions).positions.values())


def test_a_first_batch_that_cannot_be_read_is_refused_all_the_same() -> None:
    assert brief(Ranks(make).feed(Arrival(4, BROKEN, 1))) == [(0, "declaration"), (0, "refusal", 4)]
    assert brief(Ranks(make, dp_rank=2).feed(Arrival(4, BROKEN, 1))) == [(2, "refusal", 4)]


# -- numbers that the ranks share


def test_shared_numbers_that_are_others_are_skipped_and_not_lost() -> None:
    ranks = Ranks(make)
    feed(ranks, arrival(0, 1, 0), arrival(1, 2, 0))
    assert feed(ranks, arrival(2, 3, 1, shared=True)) == [(1, "declaration"), (1, "batch", 2, 2)]
    assert feed(ranks, arrival(3, 4, 1, shared=True), arrival(4, 5, 0, shared=True)) == [(1, "batch", 3, 0), (0, "batch", 4, 2)]
    assert ranks.counters.lost == 0


def test_a_gap_in_shared_numbers_is_lost_to_every_rank() -> None:
    ranks = Ranks(make)
    feed(ranks, arrival(0, 1, 0), arrival(1, 2, 1, shared=True))
    assert feed(ranks, arrival(4, 3, 0, shared=True)) == [(0, "loss", 2, 3), (0, "batch", 4, 0), (1, "loss", 2, 3)]
    assert feed(ranks, arrival(5, 4, 0, shared=True), arrival(6, 4, 1, shared=True)) == [(0, "batch", 5, 0), (1, "batch", 6, 2)]


def test_a_restart_of_shared_numbers_resets_every_rank() -> None:
    ranks = Ranks(make)
    feed(ranks, arrival(0, 1, 0), arrival(1, 2, 1, shared=True), arrival(2, 3, 1, shared=True))
    got = feed(ranks, arrival(0, 9, 2, shared=True))
    assert sorted(got) == [(0, "holder_reset"), (1, "holder_reset"), (2, "batch", 0, 0), (2, "declaration"), (2, "holder_reset")]
    assert feed(ranks, arrival(1, 10, 1, shared=True), arrival(2, 11, 0, shared=True)) == [(1, "batch", 1, 1), (0, "batch", 2, 2)]


def test_a_batch_that_may_be_any_ranks_is_refused_in_each() -> None:
    ranks = Ranks(make)
    feed(ranks, arrival(0, 1, 0), arrival(1, 2, 1, shared=True))
    assert brief(ranks.feed(Arrival(2, BROKEN, 1, shared=True))) == [(0, "refusal", 2), (1, "refusal", 2)]
    assert feed(ranks, arrival(3, 4, 0, shared=True)) == [(0, "batch", 3, 0)]


def test_a_shared_number_again_is_dropped_whosever_it_is() -> None:
    ranks = Ranks(make)
    batches = [arrival(0, 1, 0), arrival(1, 2, 1, shared=True), arrival(2, 3, 0, shared=True)]
    feed(ranks, *batches)
    assert feed(ranks, *batches) == []
    assert ranks.counters.duplicates == 3
    again = Ranks(make, positions=ranks.positions)
    assert feed(again, batches[2], batches[1]) == []
    assert feed(again, arrival(3, 4, 1, shared=True)) == [(1, "batch", 3, 1)]


def test_a_refused_name_takes_its_shared_number_along() -> None:
    ranks = Ranks(make, dp_rank=1)
    feed(ranks, arrival(0, 1, 0))
    assert feed(ranks, arrival(1, 2, 1, shared=True)) == [(1, "refusal", 2**63 - 1)]
    assert feed(ranks, arrival(2, 3, 0, shared=True)) == [(1, "batch", 2, 1)]


# -- what a broken connection leaves open


def test_a_process_that_started_meanwhile_began_another_life() -> None:
    ranks = Ranks(make)
    feed(ranks, arrival(0, 10), arrival(1, 11))
    ranks.process_started(15_000_000)
    messages = ranks.feed(arrival(7, 20, reconnected=True))
    assert brief(messages) == [(0, "holder_reset"), (0, "loss", 0, 6), (0, "batch", 7, 0)]
    assert messages[0].holder_reset is not None
    assert messages[0].holder_reset.reason.startswith("the engine's process started at 1970-01-01 00:00:15 UTC")
    assert messages[1].loss == Loss(0, 6, "missing in the stream")


@pytest.mark.parametrize("started", [9.0, 11.0, 20.5])
def test_a_process_that_started_before_or_after_proves_nothing(started: float) -> None:
    ranks = Ranks(make)
    feed(ranks, arrival(0, 10), arrival(1, 11))
    ranks.process_started(round(started * 1_000_000))
    loss, batch = ranks.feed(arrival(7, 20, reconnected=True))
    assert loss.loss is not None
    assert loss.loss.reason.endswith("after the connection had broken, and nothing proves that the engine is still in the same life")
    assert (batch.seq, batch.life_id) == (7, loss.life_id)
    ranks.process_started(20_500_000)
    assert feed(ranks, arrival(8, 20.1)) == [(0, "batch", 8, 0)]
    assert feed(ranks, arrival(9, 21)) == [(0, "batch", 9, 0)]  # said of one batch alone


def test_a_process_start_is_judged_by_the_first_batch_that_can_be_read() -> None:
    ranks = Ranks(make)
    feed(ranks, arrival(0, 10))
    ranks.process_started(15_000_000)
    assert brief(ranks.feed(Arrival(1, BROKEN, 1, reconnected=True))) == [(0, "refusal", 1)]
    assert feed(ranks, arrival(2, 20))[0] == (0, "holder_reset")
    assert feed(ranks, arrival(3, 21)) == [(0, "batch", 3, 0)]


def test_a_first_batch_ends_no_life() -> None:
    ranks = Ranks(make, dp_rank=0)
    assert feed(ranks, arrival(4, 20, begins_life=True)) == [(0, "batch", 4, 0)]


def test_another_life_of_shared_numbers_told_by_the_order_resets_every_rank() -> None:
    ranks = Ranks(make)
    feed(ranks, arrival(0, 1, 0), arrival(1, 2, 1, shared=True))
    messages = ranks.feed(arrival(9, 20, 1, shared=True, begins_life=True))
    assert sorted(brief(messages)) == [
        (0, "holder_reset"),
        (0, "loss", 0, 8),
        (1, "batch", 9, 0),
        (1, "holder_reset"),
        (1, "loss", 0, 8),
    ]
    assert {message.holder_reset.reason for message in messages if message.holder_reset} == {OTHER_ENGINE}


# -- how a socket is numbered


def order(can_replay: bool = False) -> SocketOrder:
    made = SocketOrder(can_replay, TIMEOUT, engine_time)
    made.connected(0.0)
    return made


def came(socket: SocketOrder, *batches: tuple[int, int], now: float = 1.0) -> list[tuple[int | None, int, bool | None]]:
    """Take (rank, seq) live; (rank, seq, shared) of what came out by it."""
    for rank, seq in batches:
        socket.live(Arrival(seq, payload(now, rank, seq), 0), now)
    out = [(each.rank, each.seq, each.shared) for each in socket.ready]
    socket.ready.clear()
    return out


def test_one_rank_decides_nothing() -> None:
    socket = order()
    assert came(socket, (2, 5), (2, 6), (2, 9)) == [(2, 5, None), (2, 6, None), (2, 9, None)]
    assert socket.numbering is None
    assert not socket.waiting


def test_a_number_below_tells_numbers_of_their_own_at_once() -> None:
    socket = order()
    assert came(socket, (0, 5), (1, 3)) == [(0, 5, None), (1, 3, False)]
    assert came(socket, (0, 6), (1, 4)) == [(0, 6, False), (1, 4, False)]


def test_a_number_above_waits_for_one_that_tells() -> None:
    own, shared = order(), order()
    for socket in (own, shared):
        assert came(socket, (0, 5), (1, 9)) == [(0, 5, None)]
        assert (socket.waiting, socket.held) == (True, 1)
    assert came(own, (0, 6)) == [(1, 9, False), (0, 6, False)]
    assert came(shared, (0, 10)) == []
    assert came(shared, (1, 11)) == [(1, 9, True), (0, 10, True), (1, 11, True)]


def test_a_replay_of_all_is_asked_for_to_tell() -> None:
    socket = order(can_replay=True)
    socket.take_ask()
    socket.replayed(Arrival(4, payload(1.0, 0, 4), 0, replayed=True), 0.0)
    socket.replay_ended(0.0)
    assert came(socket, (0, 5), (1, 9)) == [(0, 4, None), (0, 5, None)]
    assert (socket.take_ask(), socket.take_ask()) == (0, None)
    for rank, seq in ((0, 4), (1, 8), (0, 5), (1, 9)):
        socket.replayed(Arrival(seq, payload(1.0, rank, seq), 0, replayed=True), 1.0)
    assert socket.take_ask() is None  # rank 1 has joined the question under way
    socket.replay_ended(1.0)
    assert [(each.rank, each.seq) for each in socket.ready] == [(1, 8), (1, 9)]
    assert (socket.numbering, socket.waiting) == ("own", False)


def test_where_nothing_tells_there_is_one_order() -> None:
    socket = order()
    came(socket, (0, 5), (1, 6), (1, 7))
    assert socket.deadline == 31.0
    socket.tick(30.9)
    assert socket.waiting
    socket.tick(31.0)
    assert came(socket) == [(1, 6, True), (1, 7, True)]


def test_what_was_taken_for_one_order_can_turn_out_to_be_two() -> None:
    socket = order()
    assert came(socket, (0, 0), (1, 1), (0, 2), (1, 3))[-1] == (1, 3, True)  # 1 of rank 0 and 2 of rank 1 were lost
    assert came(socket, (1, 4)) == [(1, 4, True)]
    assert came(socket, (0, 3)) == [(0, 3, False)]
    assert came(socket, (1, 5), (0, 4)) == [(1, 5, False), (0, 4, False)]


def test_what_waited_in_the_one_order_comes_out_when_it_turns_out_to_be_two() -> None:
    socket = order(can_replay=True)
    socket.take_ask()
    socket.replay_ended(1.0)
    assert came(socket, (0, 0), (1, 1), (0, 2), (1, 3))[-1] == (1, 3, True)
    assert came(socket, (1, 9)) == []  # asked for what is missing before it
    assert came(socket, (0, 3))[0] == (1, 9, True)


def test_numbers_from_before_a_restart_or_another_connection_prove_nothing() -> None:
    socket = order()
    came(socket, (0, 0), (1, 1), (0, 2), (1, 3), (1, 4), (0, 5))
    came(socket, (0, 2), (1, 5))  # restarted; 3 and 4 were lost, and rank 1 had 4 before
    assert socket.numbering == "shared"
    came(socket, (0, 6), (0, 7))
    socket.connected(2.0)
    came(socket, (1, 6))  # restarted meanwhile; rank 1 had 5 before
    assert socket.numbering == "shared"


def test_what_a_broken_engine_makes_up_costs_no_memory_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.numbering._MOST_UNDECIDED", 8)
    socket = order()
    came(socket, (0, 5), (1, 9))
    assert came(socket, *((1, seq) for seq in range(10, 16))) == []
    assert len(came(socket, (1, 16))) == 8
    monkeypatch.setattr("producers.numbering.MAX_RANKS", 4)
    socket = order()
    came(socket, *((rank, rank) for rank in range(50)))
    assert len(socket._ranks) == 4


def test_a_replay_tells_as_well() -> None:
    for own in (True, False):
        socket = order(can_replay=True)
        assert socket.take_ask() == 0
        for number, rank in enumerate((0, 1, 0, 1)):
            socket.replayed(Arrival(number // 2 if own else number, payload(number, rank, number), 0, replayed=True), 1.0)
        socket.replay_ended(1.0)
        assert socket.numbering == ("own" if own else "shared")
        if own:  # rank 1 joined the question under way
            assert socket.take_ask() is None
        came_out = [(each.rank, each.seq) for each in socket.ready]
        assert came_out == ([(0, 0), (0, 1), (1, 0), (1, 1)] if own else [(0, 0), (1, 1), (0, 2), (1, 3)])


def test_the_replay_socket_is_asked_once_for_the_lowest_number_needed() -> None:
    socket = order()
    came(socket, (0, 5), (1, 3))
    positions = [Position("a", 100, 1, b"", 0), Position("b", 7, 1, b"", 1)]
    socket = SocketOrder(True, TIMEOUT, engine_time, positions=positions)
    socket.connected(0.0)
    assert socket.take_ask() == 6
    assert socket.take_ask() is None
    assert socket.counters.replays_asked == 1
    positions = [Position("a", 9, 1, b"", 0, shared=True), Position("b", 7, 1, b"", 1, shared=True)]
    socket = SocketOrder(True, TIMEOUT, engine_time, positions=positions)
    socket.connected(0.0)
    assert socket.take_ask() == 6


def test_a_batch_that_cannot_be_read_goes_to_the_rank_that_expects_its_number() -> None:
    socket = order()
    came(socket, (0, 500), (1, 3))
    socket.live(Arrival(4, BROKEN, 0), 1.0)
    socket.live(Arrival(502, BROKEN, 0), 1.0)
    socket.live(Arrival(498, BROKEN, 0), 1.0)  # rank 0 had 500 already
    assert [(each.rank, each.seq) for each in socket.ready] == [(1, 4), (0, 502), (1, 498)]


# -- against a model

Numbering = Literal["own", "shared"]


@dataclass
class Socket:
    """A model of a socket with several ranks, and of a forwarder that may stop and start again.

    ``published`` are (life, rank, seq) in order; ``sent`` the same of what came out as batches, ``messages`` all that did.
    """

    numbering: Numbering
    keep: int
    ranks: int
    clock: int = 0
    life: int = 1
    connected: bool = True
    buffer: list[tuple[int, bytes]] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    published: list[tuple[int, int, int]] = field(default_factory=list)
    received: list[tuple[int, int, int]] = field(default_factory=list)
    sent: list[tuple[int, int, int]] = field(default_factory=list)
    messages: list[RankMessage] = field(default_factory=list)
    names: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.resume({})

    def resume(self, positions: dict[int, Position]) -> None:
        self.streams = Ranks(make, positions=positions)
        self.order = SocketOrder(True, TIMEOUT, engine_time, positions=self.streams.positions.values())
        if self.connected:
            self.order.connected(0.0)

    def stop(self) -> None:
        """End, and start again from what was kept; what waited is forgotten."""
        self.received = [name for name in self.received if name in self.sent]
        self.resume(kept_over_an_end(self.streams.positions))

    def publish(self, rank: int, heard: bool) -> None:
        self.clock += 1
        counter = 0 if self.numbering == "shared" else rank
        seq = self.numbers.get(counter, 0)
        self.numbers[counter] = seq + 1
        body = payload(self.clock, rank, self.clock)
        name = self.names[body] = (self.life, rank, seq)
        self.published.append(name)
        self.buffer = [*self.buffer, (seq, body)][-self.keep :]
        if heard and self.connected:
            self.received.append(name)
            self.order.live(Arrival(seq, body, 0), 0.0)

    def restart(self) -> None:
        self.life, self.connected, self.numbers, self.buffer = self.life + 1, False, {}, []

    def reconnect(self) -> None:
        self.connected = True
        self.order.connected(0.0)

    def serve(self, holes: set[int]) -> None:
        if not self.connected:  # a question waits until there is an engine again
            return
        start = self.order.take_ask()
        if start is None:
            return
        for index, (seq, body) in enumerate([entry for entry in self.buffer if entry[0] >= start]):
            if index not in holes:
                self.order.replayed(Arrival(seq, body, 0, replayed=True), 0.0)
            if self.order.ask is not None:  # a new question is due: answers to the old one no longer count
                return
        self.order.replay_ended(0.0)

    def drain(self) -> None:
        while self.order.ready:
            each = self.order.ready.popleft()
            for message in self.streams.feed(each):
                self.messages.append(message)
                if message.batch is not None:
                    self.sent.append(self.names[each.payload])

    def play(self, steps: list[Any], holes_allowed: bool) -> None:
        """Play ``steps``, then reconnect, answer everything outstanding, and let what is undecided be overdue."""
        for step in steps:
            if isinstance(step, tuple) and step[0] == "answer":
                self.serve(step[1] if holes_allowed else set())
            elif isinstance(step, tuple):
                self.publish(step[1] % self.ranks, step[0] == "live")
            else:
                getattr(self, step)()
            self.drain()
        self.reconnect()
        for now in (0.0, 100.0):
            while self.order.ask is not None:
                self.serve(set())
            self.order.tick(now)
        while self.order.ask is not None:
            self.serve(set())
        self.drain()
        assert not self.order.waiting

    def check(self) -> None:
        """In order, nothing twice, all that was received; and what is declared lost was not sent in the same life."""
        for rank in range(self.ranks):
            places = [self.published.index(name) for name in self.sent if name[1] == rank]
            assert places == sorted(set(places))
        assert set(self.received) <= set(self.sent)
        sent: dict[str, set[int]] = {}
        expected: dict[str, int] = {}
        for message in self.messages:
            life = message.life_id
            if message.batch is not None:
                assert message.seq - message.skipped >= expected.get(life, 0)
                if life in expected:
                    assert message.seq - message.skipped == expected[life]
                expected[life] = message.seq + 1
                sent.setdefault(life, set()).update(range(message.seq - message.skipped, message.seq + 1))
            elif message.loss is not None:
                assert message.loss.first_seq >= expected.get(life, 0)
                expected[life] = message.loss.last_seq + 1
                assert not sent.get(life, set()) & set(range(message.loss.first_seq, message.loss.last_seq + 1))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("live"), st.integers(0, 2)),
        st.tuples(st.just("live"), st.integers(0, 2)),
        st.tuples(st.just("missed"), st.integers(0, 2)),
        st.tuples(st.just("answer"), st.sets(st.integers(0, 8), max_size=2)),
        st.sampled_from(["restart", "reconnect", "reconnect", "stop"]),
    ),
    max_size=50,
)


def told(socket: Socket) -> None:
    """Begin with what tells the numbering: with losses among the first batches one can look like the other."""
    for rank in [*range(socket.ranks), *range(socket.ranks)] * 2:
        socket.publish(rank, heard=True)
    socket.serve(set())
    socket.drain()
    assert socket.order.numbering == (socket.numbering if socket.ranks > 1 else None)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, keep=st.integers(1, 30), holes=st.booleans(), ranks=st.integers(1, 3), numbering=st.sampled_from(["own", "shared"]))
def test_each_rank_comes_out_in_order_once_and_whole_also_over_an_end(
    steps: list[Any], keep: int, holes: bool, ranks: int, numbering: Numbering
) -> None:
    socket = Socket(numbering, keep, ranks)
    told(socket)
    socket.play(steps, holes)
    socket.check()


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, ranks=st.integers(1, 3), numbering=st.sampled_from(["own", "shared"]))
def test_nothing_of_the_last_life_is_missing_while_the_buffer_reaches_back(steps: list[Any], ranks: int, numbering: Numbering) -> None:
    socket = Socket(numbering, 1_000, ranks)
    told(socket)
    socket.play(steps, holes_allowed=False)
    socket.check()
    assert {name for name in socket.published if name[0] == socket.life} == {name for name in socket.sent if name[0] == socket.life}


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, ranks=st.integers(1, 3))
def test_shared_numbers_are_never_taken_for_anything_else(steps: list[Any], ranks: int) -> None:
    socket = Socket("shared", 1_000, ranks)
    socket.play(steps, holes_allowed=False)
    socket.check()
    assert socket.order.numbering in (None, "shared")


HEARD = st.lists(
    st.one_of(
        st.tuples(st.just("live"), st.integers(0, 2)),
        st.tuples(st.just("live"), st.integers(0, 2)),
        st.tuples(st.just("answer"), st.just(set[int]())),
        st.sampled_from(["restart", "reconnect", "stop"]),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(steps=HEARD, ranks=st.integers(1, 3))
def test_numbers_of_their_own_show_where_a_replay_answers(steps: list[Any], ranks: int) -> None:
    socket = Socket("own", 1_000, ranks)
    socket.play(steps, holes_allowed=False)
    socket.check()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["live", "replayed"]),
            st.integers(0, 2**63 - 1) | st.integers(0, 9),
            st.binary(max_size=12) | st.builds(payload, st.floats(0, 9), st.none() | st.integers(0, 3) | st.integers(0, 2**31 - 1)),
        ),
        max_size=30,
    ),
    st.none() | st.integers(0, 2),
)
def test_whatever_comes_is_taken_or_declared(frames: list[tuple[str, int, bytes]], configured: int | None) -> None:
    socket, ranks = order(can_replay=True), Ranks(make, dp_rank=configured)
    for kind, seq, body in frames:
        socket.take_ask()
        (socket.live if kind == "live" else socket.replayed)(Arrival(seq, body, 0), 0.0)
    for turn in range(len(frames) + 5):  # what waited may show another restart, and so be asked for itself
        socket.tick(100.0 * turn)
    came_out = list(socket.ready)
    assert not socket.waiting
    for each in came_out:
        for message in ranks.feed(each):
            assert codec.decode(codec.encode(message), RankMessage) == message
    assert Ranks(make, dp_rank=configured, positions=kept_over_an_end(ranks.positions)).positions == ranks.positions
