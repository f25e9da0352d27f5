"""One rank's sockets against the real wire: late attach, gaps, holes, silence, restarts, malformed messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from producers.continuity import Arrival
from producers.forwarder import engine_time
from producers.subscription import MalformedError, Subscription, check_endpoint, parse_live, parse_replay
from schemas.errors import KvcensusError
from tests.wire_engine import END, WireEngine, payload

PATIENCE = 20.0


@contextmanager
def attached(engine: WireEngine, *, replay_timeout: float = PATIENCE, topic: str = "") -> Iterator[Subscription]:
    """A subscription that the engine knows of."""
    with Subscription(
        engine.endpoint, engine.replay_endpoint, engine_time=engine_time, topic=topic, replay_timeout=replay_timeout
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


def test_a_hole_in_a_replay_is_asked_for_once_more() -> None:
    with WireEngine() as engine, attached(engine) as subscription:
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
        Subscription(engine.endpoint, "tcp://127.0.0.1:9", engine_time=engine_time, replay_timeout=0.3) as subscription,
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
            [b"kv-events", b"", (1).to_bytes(8, "big"), payload(1)],
        ):
            engine.send_frames(frames)
        engine.publish(1)
        assert seqs(take_until(subscription, 1)) == [0, 1]
        assert subscription.malformed == 5


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
        parse_live([b"kv", (2**63).to_bytes(8, "big"), b"body"])
    assert parse_live([b"kv", (2**63 - 1).to_bytes(8, "big"), b"body"]) == (2**63 - 1, b"body")


@pytest.mark.parametrize(
    "address", ["", "foo", "tcp://", "tcp://host", "tcp://*:5557", "tcp://host:0", "tcp://host:99999", "http://host:1"]
)
def test_an_address_that_cannot_be_connected_to_is_refused(address: str) -> None:
    with pytest.raises(KvcensusError, match="tcp://HOST:PORT"):
        check_endpoint(address)
    with pytest.raises(KvcensusError):
        Subscription("tcp://127.0.0.1:1", address, engine_time=engine_time)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://engine-0.pods.example:5557", "ipc:///run/kv.sock"])
def test_an_address_that_can_be(address: str) -> None:
    check_endpoint(address)
