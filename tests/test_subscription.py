"""One engine's sockets against the real wire: late attach, gaps, holes, silence, restarts, several ranks, malformed messages.

What follows for a rank's messages is tested with them, where it takes an engine that was away, or a forwarder that was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import zmq

from producers.continuity import Arrival
from producers.identity import Identity, IdentityKey
from producers.ranks import Ranks
from producers.resolver import RankResolver
from producers.stream import Position, RankStream
from producers.subscription import MalformedError, Subscription, check_endpoint, parse_live, parse_replay
from schemas.errors import KvcensusError
from schemas.records import Declaration, RankMessage
from tests.wire_engine import END, WireEngine, payload

PATIENCE = 20.0


@contextmanager
def attached(
    engine: WireEngine, *, replay_timeout: float = PATIENCE, topic: str = "", positions: Iterable[Position] = ()
) -> Iterator[Subscription]:
    """A subscription that the engine knows of."""
    with Subscription(
        engine.endpoint, engine.replay_endpoint, topic=topic, replay_timeout=replay_timeout, positions=positions
    ) as subscription:
        engine.wait_subscribed()
        yield subscription


def take(subscription: Subscription, enough: Callable[[list[Arrival]], bool]) -> list[Arrival]:
    """What comes out, until it is ``enough`` and nothing more is on its way."""
    got: list[Arrival] = []
    deadline = time.monotonic() + PATIENCE
    while not enough(got) or subscription.waiting:
        assert time.monotonic() < deadline, [arrival.seq for arrival in got]
        ready = subscription.poll(0.05)
        while ready:
            got.append(ready.popleft())
    return got


def take_until(subscription: Subscription, seq: int) -> list[Arrival]:
    return take(subscription, lambda got: bool(got) and got[-1].seq == seq)


def seqs(arrivals: list[Arrival]) -> list[int]:
    return [arrival.seq for arrival in arrivals]


@pytest.mark.parametrize("layout", ["topic", "bare"])
def test_late_attach_takes_what_is_buffered_and_each_batch_once(layout: str) -> None:
    with WireEngine(layout) as engine:
        engine.publish(10)
        with attached(engine) as subscription:
            engine.publish(5)
            got = take_until(subscription, 14)
        assert seqs(got) == list(range(15))
        assert [arrival.payload for arrival in got] == [body for _, body in engine.buffer]
        assert all(arrival.replayed for arrival in got[:10])


def test_late_attach_to_a_buffer_that_no_longer_reaches_back() -> None:
    with WireEngine() as engine:
        engine.publish(10)
        engine.forget(range(6))
        with attached(engine) as subscription:
            engine.publish(2)
            assert seqs(take_until(subscription, 11)) == list(range(6, 12))


@pytest.mark.parametrize("layout", ["topic", "bare"])
def test_a_gap_is_healed_in_order(layout: str) -> None:
    with WireEngine(layout) as engine, attached(engine) as subscription:
        engine.publish(3)
        assert seqs(take_until(subscription, 2)) == [0, 1, 2]
        replayed = subscription.continuity.counters.replayed
        engine.publish(4, missed=True)
        engine.publish(3)
        assert seqs(take_until(subscription, 9)) == list(range(3, 10))
        assert engine.questions[-1] == 2
        assert subscription.continuity.counters.replayed - replayed == 4


@pytest.mark.parametrize("layout", ["topic", "bare"])
def test_a_hole_in_a_replay_is_asked_for_once_more(layout: str) -> None:
    """The end marker came all the same."""
    with WireEngine(layout) as engine, attached(engine) as subscription:
        engine.publish(2)
        assert seqs(take_until(subscription, 1)) == [0, 1]
        asked = len(engine.questions)
        engine.holes = [4, 6]
        engine.publish(6, missed=True)
        engine.publish()
        assert seqs(take_until(subscription, 8)) == list(range(2, 9))
        assert engine.questions[asked:] == [1, 4]


def test_a_hole_that_stays_is_left_as_a_jump() -> None:
    with WireEngine() as engine, attached(engine) as subscription:
        engine.publish(2)
        take_until(subscription, 1)
        engine.holes = [4, 4, 4]
        engine.publish(6, missed=True)
        engine.publish()
        assert seqs(take_until(subscription, 8)) == [2, 3, 5, 6, 7, 8]
        assert subscription.continuity.counters.jumps_left == 1


def test_a_large_replay_that_the_engine_drops_from_stays_in_order() -> None:
    """The end marker may be among what is dropped."""
    with WireEngine(router_hwm=50) as engine:
        engine.publish(3_000)
        with attached(engine, replay_timeout=0.5) as subscription:
            engine.publish()
            got = seqs(take_until(subscription, 3_000))
        assert got == sorted(set(got))
        assert got[0] == 0


def test_without_a_replay_socket_a_gap_is_a_jump() -> None:
    with WireEngine(replay=None) as engine, attached(engine) as subscription:
        engine.publish(2)
        engine.publish(3, missed=True)
        engine.publish(2)
        assert seqs(take_until(subscription, 6)) == [0, 1, 5, 6]
        assert not engine.questions


def test_a_replay_socket_that_never_answers_is_waited_for_only_so_long() -> None:
    with WireEngine(replay="silent") as engine:
        engine.publish(4)
        with attached(engine, replay_timeout=0.3) as subscription:
            engine.publish(2)
            assert seqs(take_until(subscription, 5)) == [4, 5]
            engine.publish(1, missed=True)
            engine.publish(2)
            assert seqs(take_until(subscription, 8)) == [7, 8]
            assert engine.questions[0] == 0
            assert engine.questions[-1] == 5
            assert subscription.continuity.counters.replays_overdue >= 2


def test_a_replay_endpoint_where_nobody_listens() -> None:
    with (
        WireEngine(replay=None) as engine,
        Subscription(engine.endpoint, "tcp://127.0.0.1:9", replay_timeout=0.3) as subscription,
    ):
        engine.wait_subscribed()
        engine.publish(2)
        assert seqs(take_until(subscription, 1)) == [0, 1]


def test_restart_on_the_same_sockets_seen_from_its_first_batch() -> None:
    with WireEngine() as engine, attached(engine) as subscription:
        engine.publish(4)
        take_until(subscription, 3)
        asked = len(engine.questions)
        engine.restart()
        engine.publish(2)
        assert seqs(take_until(subscription, 1)) == [0, 1]
        assert len(engine.questions) == asked


def test_restart_seen_late_is_taken_from_its_first_batch() -> None:
    with WireEngine() as engine, attached(engine) as subscription:
        engine.publish(6)
        take_until(subscription, 5)
        engine.restart()
        engine.publish(3, missed=True)
        engine.publish(2)
        got = take_until(subscription, 4)
        assert seqs(got) == [0, 1, 2, 3, 4]
        assert [arrival.payload for arrival in got] == [body for _, body in engine.buffer]


@pytest.mark.parametrize("published_before_we_are_back", [0, 2, 9])
def test_an_engine_that_crashes_and_comes_back_on_its_port(published_before_we_are_back: int) -> None:
    """Also when the new life has passed the old number before anybody subscribes again."""
    with WireEngine() as engine, attached(engine) as subscription:
        engine.publish(5)
        old = take_until(subscription, 4)
        engine.crash()
        engine.restart()
        engine.publish_unheard(published_before_we_are_back)
        engine.start()
        engine.wait_subscribed(lambda: subscription.poll(0))
        engine.publish(3)
        new = take_until(subscription, published_before_we_are_back + 2)
        assert [arrival.payload for arrival in new] == [body for _, body in engine.buffer]
        assert seqs(old) == [0, 1, 2, 3, 4]
        assert subscription.connections == 2


def test_the_tail_missed_while_disconnected_comes_without_waiting_for_the_next_batch() -> None:
    with WireEngine() as engine, attached(engine) as subscription:
        engine.publish(3)
        take_until(subscription, 2)
        engine.crash()
        engine.publish_unheard(4)
        engine.start()
        assert seqs(take_until(subscription, 6)) == [3, 4, 5, 6]


def test_what_is_published_between_connecting_and_subscribing_is_not_lost() -> None:
    with WireEngine() as engine, Subscription(engine.endpoint, engine.replay_endpoint, replay_timeout=PATIENCE) as subscription:
        engine.publish(50)
        engine.wait_subscribed(lambda: engine.publish(1))
        engine.publish(1)
        got = take_until(subscription, engine.next_seq - 1)
        assert [arrival.payload for arrival in got] == [body for _, body in engine.buffer]


@pytest.mark.parametrize("replay", ["answers", None])
def test_a_connection_that_broke_is_told_unless_the_replay_proves_the_same_life(replay: str | None) -> None:
    with WireEngine(replay=replay) as engine, attached(engine) as subscription:
        engine.publish(3)
        assert not any(arrival.reconnected for arrival in take_until(subscription, 2))
        engine.crash()
        engine.publish_unheard(2)
        engine.start()
        engine.wait_subscribed(lambda: subscription.poll(0))
        take(subscription, lambda got: subscription.connections == 2)
        engine.publish(2)
        got = take_until(subscription, 6) if replay is None else []
        assert [(arrival.seq, arrival.reconnected) for arrival in got] == ([] if replay else [(5, True), (6, False)])
        if replay:
            assert not any(arrival.reconnected for arrival in take_until(subscription, 6))


# -- to the messages of a rank, also over a forwarder's end

KEY = IdentityKey(bytes(range(32)), bytes(32))


class Follower:
    """A forwarder's first half: a subscription and the ranks on it. Its places outlive it."""

    def __init__(self, engine: WireEngine, kept: Mapping[int, Position] | None = None, *, replay_timeout: float = PATIENCE) -> None:
        self.started_us: int | None = None
        self.ranks = Ranks(self._make, positions=kept)
        self._attached = attached(engine, replay_timeout=replay_timeout, positions=self.ranks.positions.values())
        self.subscription = self._attached.__enter__()

    def _make(self, dp_rank: int, position: Position | None) -> RankStream:
        resolver = RankResolver(Identity(KEY, None), KEY)
        declaration = Declaration("unlabelled", "per_copy")
        return RankStream("inst", dp_rank, resolver, declaration, "run", position=position)

    def take(self, enough: Callable[[list[RankMessage]], bool]) -> list[RankMessage]:
        """The messages that come, without declarations, until they are ``enough``."""
        got: list[RankMessage] = []
        deadline = time.monotonic() + PATIENCE
        while not enough(got) or self.subscription.waiting:
            assert time.monotonic() < deadline, [(message.dp_rank, message.seq) for message in got]
            ready = self.subscription.poll(0.05)
            while ready:
                arrival = ready.popleft()
                if arrival.reconnected and self.started_us is not None:
                    self.ranks.process_started(self.started_us)
                got += [message for message in self.ranks.feed(arrival) if message.declaration is None]
        return got

    def until(self, seq: int) -> list[RankMessage]:
        """The messages until the batch of number ``seq``, a rank's or the socket's."""
        return self.take(lambda got: bool(got) and any(message.batch is not None and message.seq == seq for message in got))

    def end(self) -> dict[int, Position]:
        """End; the places."""
        self._attached.__exit__(None, None, None)
        return self.ranks.positions


@contextmanager
def following(engine: WireEngine, kept: Mapping[int, Position] | None = None, *, replay_timeout: float = PATIENCE) -> Iterator[Follower]:
    follower = Follower(engine, kept, replay_timeout=replay_timeout)
    try:
        yield follower
    finally:
        follower.end()


def kept_after(engine: WireEngine, batches: int) -> dict[int, Position]:
    """Follow ``batches`` batches and end; the places."""
    follower = Follower(engine)
    engine.publish(batches)
    follower.until(engine.next_seq - 1)
    return follower.end()


def lines(messages: list[RankMessage]) -> list[tuple[str, int] | tuple[str, int, int]]:
    out: list[tuple[str, int] | tuple[str, int, int]] = []
    for message in messages:
        if message.loss is not None:
            out.append(("loss", message.loss.first_seq, message.loss.last_seq))
        else:
            out.append(("batch" if message.batch is not None else "reset", message.seq))
    return out


def batches(first: int, last: int) -> list[tuple[str, int]]:
    return [("batch", seq) for seq in range(first, last + 1)]


@pytest.mark.parametrize("layout", ["topic", "bare"])
def test_what_a_replay_cannot_return_is_declared_lost_with_its_exact_range(layout: str) -> None:
    """A hole that stays although the end marker came twice, and then a buffer that no longer reaches back."""
    with WireEngine(layout) as engine, following(engine) as follower:
        engine.publish(2)
        follower.until(1)
        engine.holes = [3, 4, 3, 4]
        engine.publish(4, missed=True)
        engine.publish(1)
        assert lines(follower.until(6)) == [("batch", 2), ("loss", 3, 4), ("batch", 5), ("batch", 6)]
        engine.publish(5, missed=True)
        engine.forget(range(10))
        engine.publish(1)
        assert lines(follower.until(12)) == [("loss", 7, 9), *batches(10, 12)]
        assert follower.ranks.counters.lost == 5


def test_started_again_it_goes_on_where_it_ended() -> None:
    with WireEngine() as engine:
        kept = kept_after(engine, 4)
        engine.publish_unheard(3)
        with following(engine, kept) as follower:
            engine.publish(2)
            got = follower.until(8)
            assert lines(got) == batches(4, 8)
            assert engine.questions[-1] == 3
            assert {message.life_id for message in got} == {kept[0].life_id}


@pytest.mark.parametrize("published_before_we_are_back", [1, 3, 9])
def test_an_engine_that_restarted_while_we_were_down(published_before_we_are_back: int) -> None:
    """Also when its new life has reached or passed the old number: the batch before it, asked for, is another one."""
    with WireEngine() as engine:
        kept = kept_after(engine, 4)
        engine.restart()
        engine.publish_unheard(published_before_we_are_back)
        with following(engine, kept) as follower:
            engine.publish(1)
            got = follower.until(published_before_we_are_back)
            assert lines(got) == [("reset", 0), *batches(0, published_before_we_are_back)]
            assert kept[0].life_id not in {message.life_id for message in got}


def test_a_buffer_that_no_longer_reaches_back_to_where_we_ended() -> None:
    with WireEngine() as engine:
        kept = kept_after(engine, 4)
        engine.publish_unheard(6)
        engine.forget(range(8))
        with following(engine, kept) as follower:
            engine.publish(1)
            got = follower.until(10)
            assert lines(got) == [("loss", 4, 7), *batches(8, 10)]
            assert got[0].loss is not None
            assert "nothing proves that the engine is still in the same life" in got[0].loss.reason


@pytest.mark.parametrize("replay", [None, "silent"])
@pytest.mark.parametrize("started_meanwhile", [False, True])
def test_without_an_answer_the_process_start_tells_a_life_that_has_passed_the_old_number(
    replay: str | None, started_meanwhile: bool
) -> None:
    with WireEngine(replay=replay) as engine:
        follower = Follower(engine, replay_timeout=0.2)
        engine.publish(4)
        follower.until(3)
        kept = follower.end()
        if started_meanwhile:
            engine.restart()
        engine.publish_unheard(6)
        with following(engine, kept, replay_timeout=0.2) as again:
            again.started_us = (1_700_000_500 if started_meanwhile else 1_699_999_000) * 1_000_000
            engine.publish(2)
            missing: list[tuple[str, int] | tuple[str, int, int]]
            missing = [("reset", 0), ("loss", 0, 5)] if started_meanwhile else [("loss", 4, 9)]
            first = 6 if started_meanwhile else 10
            assert lines(again.until(first + 1)) == [*missing, *batches(first, first + 1)]


def test_without_an_answer_the_time_tells_a_life_that_has_not_reached_the_old_number() -> None:
    with WireEngine(replay=None) as engine:
        kept = kept_after(engine, 6)
        engine.restart()
        engine.publish_unheard(2)
        with following(engine, kept) as follower:
            engine.publish(1)
            assert lines(follower.until(2)) == [("reset", 0), ("loss", 0, 1), ("batch", 2)]


def test_a_process_start_means_nothing_while_the_connection_holds() -> None:
    """An API server may start anew beside an engine that goes on."""
    with WireEngine() as engine, following(engine) as follower:
        engine.publish(2)
        follower.until(1)
        follower.started_us = 1_700_000_000_015_000
        engine.publish(2)
        assert lines(follower.until(3)) == batches(2, 3)


# -- several ranks on one socket


def of_rank(messages: list[RankMessage], rank: int) -> list[tuple[str, int] | tuple[str, int, int]]:
    return lines([message for message in messages if message.dp_rank == rank])


def all_of(rank_ends: dict[int, int]) -> Callable[[list[RankMessage]], bool]:
    def enough(got: list[RankMessage]) -> bool:
        return all(any((message.dp_rank, message.seq) == end and message.batch for message in got) for end in rank_ends.items())

    return enough


@pytest.mark.parametrize("layout", ["topic", "bare"])
def test_ranks_with_numbers_of_their_own(layout: str) -> None:
    with WireEngine(layout) as engine:
        engine.publish_as(0, 1, 0, 1, 0, own=True)
        follower = Follower(engine)
        engine.publish_as(1, 0, 0, own=True)
        got = follower.take(all_of({0: 4, 1: 2}))
        assert (of_rank(got, 0), of_rank(got, 1)) == (batches(0, 4), batches(0, 2))
        engine.publish_as(1, 1, own=True, missed=True)
        engine.publish_as(0, 1, own=True)
        got = follower.take(all_of({0: 5, 1: 5}))
        assert (of_rank(got, 0), of_rank(got, 1)) == (batches(5, 5), batches(3, 5))
        kept = follower.end()
        engine.publish_as(0, 1, own=True, missed=True)
        with following(engine, kept) as again:
            engine.publish_as(0, own=True)
            got = again.take(all_of({0: 7, 1: 6}))
            assert (of_rank(got, 0), of_rank(got, 1)) == (batches(6, 7), batches(6, 6))
            assert again.ranks.counters.lost == again.ranks.counters.publisher_restarts == 0
            assert engine.questions[-1] == 5


def test_ranks_that_are_numbered_together() -> None:
    with WireEngine() as engine:
        engine.publish_as(0, 1, 1, 0, own=False)
        follower = Follower(engine)
        engine.publish_as(1, 0, own=False)
        got = follower.take(all_of({0: 5, 1: 4}))
        assert of_rank(got, 0) == [("batch", 0), ("batch", 3), ("batch", 5)]
        assert [message.skipped for message in got if message.dp_rank == 1] == [1, 0, 1]
        engine.publish_as(0, 0, own=False, missed=True)
        engine.forget([6])
        engine.publish_as(1, own=False)
        got = follower.take(all_of({0: 7, 1: 8}))
        assert (of_rank(got, 0), of_rank(got, 1)) == ([("loss", 6, 6), ("batch", 7)], [("loss", 6, 6), ("batch", 8)])
        kept = follower.end()
        engine.restart()
        engine.publish_as(1, 0, own=False, missed=True)
        with following(engine, kept) as again:
            engine.publish_as(1, own=False)
            got = again.take(all_of({0: 1, 1: 2}))
            assert of_rank(got, 0) == [("reset", 0), ("batch", 1)]
            assert of_rank(got, 1) == [("reset", 0), ("batch", 0), ("batch", 2)]


# -- what else comes


def test_only_the_topic_asked_for() -> None:
    with WireEngine(topic=b"kv@a") as engine, attached(engine, topic="kv@a") as subscription:
        engine.publish(1)
        engine.send_frames([b"other", (1).to_bytes(8, "big"), payload(1)])
        engine.publish(1)
        assert [arrival.payload for arrival in take_until(subscription, 1)] == [payload(0), payload(1)]


def test_malformed_messages_are_counted_and_left_behind() -> None:
    with WireEngine() as engine, attached(engine) as subscription:
        engine.publish(1)
        for frames in (
            [b"kv-events"],
            [b"kv-events", (1).to_bytes(8, "big")],
            [b"kv-events", b"\0\0\0\1", payload(1)],
            [b"kv-events", END, payload(1)],
            [b"kv-events", (2**60).to_bytes(8, "big"), payload(1)],
            [b"kv-events", b"", (1).to_bytes(8, "big"), payload(1)],
        ):
            engine.send_frames(frames)
        engine.publish(1)
        got = take_until(subscription, 1)
        assert (seqs(got), [arrival.begins_life for arrival in got]) == ([0, 1], [False, False])
        assert subscription.malformed == 6


def test_the_replay_layouts() -> None:
    seq = (7).to_bytes(8, "big")
    assert parse_replay([b"", seq, b"body"]) == (7, b"body")
    assert parse_replay([b"", b"kv", seq, b"body"]) == (7, b"body")
    assert parse_replay([b"", END, b""]) is None
    assert parse_replay([b"", b"", END, b""]) is None
    for frames in ([seq, b"body"], [b"x", seq, b"body"], [b"", b"short", b"body"], [b"", b"", b"", seq, b"body"], []):
        with pytest.raises(MalformedError):
            parse_replay(frames)
    with pytest.raises(MalformedError):
        parse_live([b"kv", (2**48).to_bytes(8, "big"), b"body"])
    assert parse_live([b"kv", (2**48 - 1).to_bytes(8, "big"), b"body"]) == (2**48 - 1, b"body")


@pytest.mark.parametrize(
    "address", ["", "foo", "tcp://", "tcp://host", "tcp://*:5557", "tcp://host:0", "tcp://host:99999", "http://host:1"]
)
def test_an_address_that_cannot_be_connected_to_is_refused(address: str) -> None:
    with pytest.raises(KvcensusError, match="tcp://HOST:PORT"):
        check_endpoint(address)
    with pytest.raises(KvcensusError):
        Subscription("tcp://127.0.0.1:1", address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://engine-0.pods.example:5557", "ipc:///run/kv.sock"])
def test_an_address_that_can_be(address: str) -> None:
    check_endpoint(address)


def test_an_engine_on_an_ipv6_address_is_heard_and_asked() -> None:
    context = zmq.Context()
    live, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    try:
        for server in (live, router):
            server.setsockopt(zmq.IPV6, 1)
            try:
                server.bind("tcp://[::1]:*")
            except zmq.ZMQError:
                pytest.skip("this machine has no IPv6 loopback")
        endpoints = [server.getsockopt_string(zmq.LAST_ENDPOINT) for server in (live, router)]
        with Subscription(endpoints[0], endpoints[1]) as subscription:
            deadline = time.monotonic() + PATIENCE
            while not live.poll(10) or not router.poll(10):
                assert time.monotonic() < deadline
                subscription.poll(0.01)
            peer, *_ = router.recv_multipart()
            router.send_multipart([peer, b"", b"kv", (0).to_bytes(8, "big"), payload(0)])
            router.send_multipart([peer, b"", b"", END, b""])
            live.send_multipart([b"kv", (1).to_bytes(8, "big"), payload(1)])
            assert seqs(take_until(subscription, 1)) == [0, 1]
    finally:
        context.destroy(linger=0)
