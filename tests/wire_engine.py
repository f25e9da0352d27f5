"""A small engine for tests: vLLM's two sockets with nothing behind them, so that a test decides what is sent, missed and kept."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType

import msgspec
import zmq

QUIET_PORTS = 20_000, 32_000
"""Below the ports that the kernel gives to connections: one of those can be taken, while nobody listens there, by the very
connection that is tried to it."""

END = (-1).to_bytes(8, "big", signed=True)


def quiet_port() -> int:
    """A free loopback port that stays free while others try to connect to it."""
    while True:
        port = random.randrange(*QUIET_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def payload(seq: int, at: float = 1_700_000_000.0, blocks: int = 1, life: int = 0, rank: int | None = 0) -> bytes:
    """A readable batch: one run of ``blocks`` blocks of 16 tokens at the root, all its own. Engine time: 1000 s a life, 10 ms a number."""
    hashes = [1_000_000 * life + 1_000 * seq + index for index in range(blocks)]
    tokens = [100_000 * life + 1_000 + seq + index for index in range(16 * blocks)]
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens, "block_size": 16}
    return msgspec.msgpack.encode([at + life * 1_000 + seq * 0.01, [event], rank])


class WireEngine:
    """An engine's publisher. Sockets are bound to loopback ports that it keeps over :meth:`crash` and :meth:`start`.

    ``layout`` is that of replay answers: ``topic`` (vLLM 0.26 and later) or ``bare``. ``replay`` None: no replay socket;
    ``silent``: it takes questions and never answers. ``holes`` are numbers left out of an answer, each as many times as it is listed.
    """

    def __init__(
        self,
        layout: str = "topic",
        replay: str | None = "answers",
        topic: bytes = b"kv-events",
        router_hwm: int = 0,
        ports: tuple[int, int] | None = None,
    ) -> None:
        self.layout, self.replay, self.topic, self.router_hwm = layout, replay, topic, router_hwm
        self.buffer: list[tuple[int, bytes]] = []
        self.holes: list[int] = []
        self.questions: list[int] = []
        self.next_seq = 0
        self.own_numbers: dict[int, int] = {}
        self.life = 0
        self._ports = ports
        self._stop = threading.Event()
        self.start()

    @property
    def ports(self) -> tuple[int, int]:
        """Where it publishes and answers: another engine may be put there when this one is gone."""
        assert self._ports is not None
        return self._ports

    @property
    def endpoint(self) -> str:
        assert self._ports is not None
        return f"tcp://127.0.0.1:{self._ports[0]}"

    @property
    def replay_endpoint(self) -> str | None:
        assert self._ports is not None
        return None if self.replay is None else f"tcp://127.0.0.1:{self._ports[1]}"

    def start(self) -> None:
        """Bind the sockets (again)."""
        self._stop = threading.Event()
        self._context = zmq.Context()
        # An XPUB is a PUB that tells its owner who subscribes.
        self._live = self._context.socket(zmq.XPUB)
        self._live.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._live.setsockopt(zmq.LINGER, 0)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, self.router_hwm)
        if self._ports is None:
            self._ports = self._bind_anywhere(self._live), self._bind_anywhere(self._router)
        else:
            self._bind(self._live, self._ports[0])
            self._bind(self._router, self._ports[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def crash(self) -> None:
        """Take the sockets away; what was published stays in nobody's memory but ours."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def restart(self) -> None:
        """Another process life: the sequence starts at 0 and nothing is buffered. The sockets stay."""
        self.life += 1
        self.next_seq = 0
        self.own_numbers = {}
        self.buffer = []

    def wait_subscribed(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Until somebody subscribes: what is published from here on is received.

        A subscriber that reconnects does so in its own thread's next call, which may have to be made ``meanwhile``.
        """
        deadline = time.monotonic() + 20
        while not self._live.poll(20) or self._live.recv()[:1] != b"\x01":  # also tells of those who leave
            assert time.monotonic() < deadline, "nobody subscribed"
            meanwhile()

    def publish(self, count: int = 1, *, missed: bool = False, blocks: int = 1) -> None:
        """Publish batches, or only buffer them as an engine does with one that was ``missed``."""
        for _ in range(count):
            self.send(payload(self.next_seq, blocks=blocks, life=self.life), missed=missed)

    def publish_as(self, *ranks: int, own: bool, missed: bool = False) -> None:
        """Publish a batch of each of ``ranks`` in turn, numbered by the rank itself (``own``) or by the socket."""
        for rank in ranks:
            if not own:
                self.send(payload(self.next_seq, life=self.life, rank=rank), missed=missed)
                continue
            seq = self.own_numbers.get(rank, 0)
            self.own_numbers[rank] = seq + 1
            body = payload(seq, life=self.life, rank=rank)
            self.buffer.append((seq, body))
            if not missed:
                self.send_frames([self.topic, seq.to_bytes(8, "big"), body])

    def publish_unheard(self, count: int) -> None:
        """Buffer batches while the sockets are away."""
        self.publish(count, missed=True)

    def send(self, body: bytes, *, missed: bool = False) -> None:
        """Publish ``body`` under the next number."""
        self.buffer.append((self.next_seq, body))
        if not missed:
            self.send_frames([self.topic, self.next_seq.to_bytes(8, "big"), body])
        self.next_seq += 1

    def send_frames(self, frames: list[bytes]) -> None:
        """Publish a multipart message as it is."""
        self._live.send_multipart(frames)

    def forget(self, seqs: Iterable[int]) -> None:
        """The buffer no longer holds these."""
        gone = set(seqs)
        self.buffer = [entry for entry in self.buffer if entry[0] not in gone]

    def __enter__(self) -> WireEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.crash()

    def _bind_anywhere(self, bound: zmq.Socket[bytes]) -> int:
        return bound.bind_to_random_port("tcp://127.0.0.1", *QUIET_PORTS, max_tries=1_000)

    def _bind(self, bound: zmq.Socket[bytes], port: int) -> None:
        for _ in range(100):
            with suppress(zmq.ZMQError):
                bound.bind(f"tcp://127.0.0.1:{port}")
                return
            time.sleep(0.05)
        raise AssertionError(f"port {port} does not become free")

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(20):
                continue
            identity, empty, start = self._router.recv_multipart()
            assert empty == b""
            self.questions.append(int.from_bytes(start, "big"))
            if self.replay != "answers":
                continue
            for seq, body in list(self.buffer):
                if seq < self.questions[-1]:
                    continue
                if seq in self.holes:
                    self.holes.remove(seq)
                    continue
                self._answer(identity, self.topic, seq.to_bytes(8, "big"), body)
            self._answer(identity, b"", END, b"")

    def _answer(self, identity: bytes, topic: bytes, seq: bytes, body: bytes) -> None:
        self._router.send_multipart([identity, b"", topic, seq, body] if self.layout == "topic" else [identity, b"", seq, body])
