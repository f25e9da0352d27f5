"""One engine socket and its replay: the live SUB socket, its monitor, and a DEALER for each question to the replay socket.

Nothing is opened inbound. ZeroMQ's own thread receives, with no limit on what waits (RCVHWM 0), so that a slow reader never
makes the engine's publisher wait; reconnecting is ZeroMQ's too. The order is made by :class:`producers.numbering.SocketOrder`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from producers import wire
from producers.continuity import Arrival
from producers.numbering import SocketOrder
from producers.stream import Position
from schemas.errors import KvcensusError
from schemas.records import EngineProfile

MAX_SEQ = 2**48 - 1
"""Sequence numbers travel as 64-bit unsigned; beyond this (thousands of years of batches) they are no count of batches. Taken for one, such
a number would make every true one look like a restart, and sums of what was lost before it would leave the topics' 64 bits."""

_END_MARKER = b"\xff" * 8
_SEQ_BYTES = 8
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 2_000
_BURST = 1_000
"""Most messages taken from one socket before the others are looked at again."""


class MalformedError(KvcensusError):
    """A multipart message that is not a batch."""


def check_endpoint(endpoint: str) -> None:
    """Raise :class:`KvcensusError` unless ``endpoint`` can be connected to: ``tcp://HOST:PORT`` or ``ipc://PATH``."""
    try:
        parts = urlsplit(endpoint)
        usable = (parts.hostname not in (None, "", "*") and bool(parts.port)) if parts.scheme == "tcp" else parts.scheme == "ipc"
    except ValueError:  # a port that is no port
        usable = False
    if not usable:
        raise KvcensusError(f"{endpoint!r} is no address to connect to: expected tcp://HOST:PORT, e.g. tcp://127.0.0.1:5557")


def parse_live(frames: list[bytes]) -> tuple[int, bytes]:
    """(seq, payload) of ``[topic, 8-byte big-endian seq, payload]``. Raises :class:`MalformedError`."""
    if len(frames) != 3:
        raise MalformedError(f"{len(frames)} frames instead of topic, sequence and payload")
    return _seq(frames[1]), frames[2]


def parse_replay(frames: list[bytes]) -> tuple[int, bytes] | None:
    """(seq, payload) of ``[b"", seq, payload]`` (up to vLLM 0.25) or ``[b"", topic, seq, payload]`` (from 0.26); None: the end.

    Raises :class:`MalformedError`.
    """
    if len(frames) not in (3, 4) or frames[0]:
        raise MalformedError(f"{len(frames)} frames in a replay answer")
    if frames[-2] == _END_MARKER:
        return None
    return _seq(frames[-2]), frames[-1]


def _seq(frame: bytes) -> int:
    if len(frame) != _SEQ_BYTES:
        raise MalformedError(f"a sequence number of {len(frame)} bytes instead of {_SEQ_BYTES}")
    seq = int.from_bytes(frame, "big")
    if seq > MAX_SEQ:
        raise MalformedError(f"a sequence number of {seq}")
    return seq


class Subscription:
    """One socket's batches in order, most often one rank's. Used by one thread; a context manager.

    ``endpoint`` and ``replay_endpoint`` are ``tcp://host:port`` as seen from here; without the latter nothing missed can be
    asked for. ``topic`` is the prefix to subscribe to. ``positions`` are where another process left the socket's ranks: what came
    since is asked for. Payloads up to ``max_payload_bytes``, as engines of ``profile`` mean them, are read for their engine time.
    Raises :class:`KvcensusError` for an address that cannot be connected to.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        topic: str = "",
        replay_timeout: float = 5.0,
        positions: Iterable[Position] = (),
        max_payload_bytes: int = wire.MAX_PAYLOAD_BYTES,
        profile: EngineProfile = "vllm",
    ) -> None:
        self.messages = 0
        """Multipart messages that came, live or as an answer; ends of answers are not among them."""
        self.last_message_at_ms: int | None = None
        """This host's clock when the last of them came; None before the first."""
        self.malformed = 0
        """Multipart messages that were no batch: counted, left behind."""
        self.connections = 0
        """Times that the live socket finished its handshake."""
        self.connected = False
        self.continuity = SocketOrder(
            replay_endpoint is not None,
            replay_timeout,
            lambda payload: _engine_time(payload, max_payload_bytes, profile),
            positions=positions,
            max_payload_bytes=max_payload_bytes,
        )
        for address in (endpoint, replay_endpoint):
            if address is not None:
                check_endpoint(address)
        self._replay_endpoint = replay_endpoint
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        try:
            self._live = self._context.socket(zmq.SUB)
            self._prepare(self._live, endpoint)
            self._monitor = self._live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            self._live.subscribe(topic)
            self._live.connect(endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._poller.register(self._live, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    @property
    def waiting(self) -> bool:
        """Whether live batches wait, for a replay or for what tells how the ranks of the socket are numbered."""
        return self.continuity.waiting

    @property
    def held(self) -> int:
        """How many live batches wait."""
        return self.continuity.held

    def poll(self, timeout: float) -> deque[Arrival]:
        """Wait up to ``timeout`` seconds for anything to come; what is in order now, for the caller to take from the left."""
        wait = timeout
        deadline = self.continuity.deadline
        if deadline is not None:
            wait = max(0.0, min(wait, deadline - time.monotonic()))
        if self._poller.poll(int(wait * 1000) + (wait > 0)):
            # The monitor first: a handshake comes before the batches that follow it.
            self._take_monitor_events()
            self._take_replay()
            self._take_live()
        self.continuity.tick(time.monotonic())
        self._send_question()
        return self.continuity.ready

    def close(self) -> None:
        """Close every socket. What was not taken is left behind."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _prepare(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        if endpoint.startswith("tcp://["):  # else a name would be looked up as an IPv6 one alone
            socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        # A peer whose host vanished says nothing. TCP's own probes, since not every publisher answers ZeroMQ's heartbeats.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)

    def _take_monitor_events(self) -> None:
        while self._monitor.poll(0):
            event: dict[str, Any] = dict(recv_monitor_message(self._monitor))
            self.connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.connected:
                self.connections += 1
                self.continuity.connected(time.monotonic())

    def _take_live(self) -> None:
        for _ in range(_BURST):
            try:
                frames = self._live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            at_ms = self._count_message()
            try:
                seq, payload = parse_live(frames)
            except MalformedError:
                self.malformed += 1
                continue
            self.continuity.live(Arrival(seq, payload, at_ms), time.monotonic())

    def _take_replay(self) -> None:
        for _ in range(_BURST):
            if self._replay is None or self.continuity.ask is not None:
                return  # a new question is due: answers to the old one no longer count
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                answer = parse_replay(frames)
            except MalformedError:
                self._count_message()
                self.malformed += 1
                continue
            if answer is None:
                self.continuity.replay_ended(time.monotonic())
            else:
                self.continuity.replayed(Arrival(*answer, self._count_message(), replayed=True), time.monotonic())

    def _count_message(self) -> int:
        self.messages += 1
        self.last_message_at_ms = now_ms = time.time_ns() // 1_000_000
        return now_ms

    def _send_question(self) -> None:
        """Each question goes out on a socket of its own, so that late answers to an earlier one cannot be mistaken for its."""
        start = self.continuity.take_ask()
        if self._replay is not None and (start is not None or not self.continuity.waiting):
            self._poller.unregister(self._replay)
            self._replay.close(linger=0)
            self._replay = None
        if start is None or self._replay_endpoint is None:
            return
        self._replay = self._context.socket(zmq.DEALER)
        self._prepare(self._replay, self._replay_endpoint)
        self._replay.connect(self._replay_endpoint)
        self._replay.send_multipart([b"", start.to_bytes(_SEQ_BYTES, "big")])
        self._poller.register(self._replay, zmq.POLLIN)


def _engine_time(payload: bytes, max_bytes: int, profile: EngineProfile) -> int | None:
    try:
        return wire.decode(payload, max_bytes, profile).at_us
    except wire.WireError:
        return None
