"""Serves simulated engine ranks on vLLM's two sockets: a PUB with the batches and a ROUTER that replays recent ones.

As vLLM's publisher does it: frames ``[topic, 8-byte big-endian sequence, payload]``; a bounded buffer of batches for replay; a
request ``[b"", sequence]`` is answered with every buffered batch from there on and an end marker; publishing waits while a replay
is answered; a subscriber that doesn't keep up loses messages, a replay that is too large for the peer's queue has holes.

The publishing socket is an XPUB, which is a PUB that also tells its owner who subscribes: on the wire they are the same.
"""

from __future__ import annotations

import errno
import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import quote

import zmq

from producers.capture import restamp
from producers.page_server import PageServer
from producers.simulate.metrics import Fault, Reading, RecordedPages, faulty, page, read_pages
from producers.simulate.source import RankSource, SourceBatch
from producers.wire import WireError
from schemas.errors import KvcensusError
from schemas.records import Declaration

ReplayLayout = Literal["topic", "bare"]
"""``topic``: vLLM 0.26 and later, with the topic frame in each reply. ``bare``: up to 0.25, without it."""

END_MARKER = (-1).to_bytes(8, "big", signed=True)
VLLM_BUFFER_BATCHES = 10_000
VLLM_HWM = 100_000
_PUBLISH_AT_ONCE = 256
_REBIND_TIMEOUT_S = 10.0
_CLOSE_LINGER_MS = 2_000


_Due = tuple[int, int, SourceBatch]
"""A rank's next batch: its time since the origin in microseconds, the rank's number, the batch."""


@dataclass(frozen=True)
class ServerOptions:
    """How ranks are served.

    ``speed`` is engine seconds per second, ``None`` as fast as subscribers take it. ``rebase`` moves engine time so that each
    source starts now; ``scale_time`` also divides the time since the start by ``speed``, so that it keeps up with the wall clock.
    ``port`` and ``replay_port`` are those of the first rank, each further rank takes the next (``None``: any free port).
    ``wait_subscribers`` are needed on every rank before anything is published, for at most ``wait_timeout_s`` (``None``: however
    long it takes). ``rebind`` closes and reopens a rank's sockets when its process restarts; otherwise they stay and only the
    sequence and the replay buffer start anew. ``replay_hwm`` is the ROUTER's queue per peer (0: unbounded; a large replay then
    has no holes). ``restart_pause_s`` is the least real time between the last batch of a process life and the first of the next,
    at any speed: no engine is back sooner, and whoever asks for a replay in that time still gets the old life's.
    ``metrics_port`` is where the engines' own metrics are served, on loopback, each rank's at a path of its own (0: any free port,
    ``None``: nowhere); with a ``metrics_fault`` those of simulated engines contradict their events.
    """

    speed: float | None = 1.0
    rebase: bool = False
    scale_time: bool = False
    host: str = "127.0.0.1"
    port: int | None = None
    replay_port: int | None = None
    wait_subscribers: int = 0
    wait_timeout_s: float | None = None
    rebind: bool = False
    replay_layout: ReplayLayout = "topic"
    buffer_batches: int = VLLM_BUFFER_BATCHES
    hwm: int = VLLM_HWM
    replay_hwm: int = 1_000
    restart_pause_s: float = 0.5
    metrics_port: int | None = None
    metrics_fault: Fault | None = None


@dataclass(frozen=True)
class RankEndpoint:
    """Where one rank is served. ``batches_per_life`` is ``None`` for a source whose batches are made while it is served.

    ``metrics_url`` is ``None`` where no metrics are served.
    """

    instance_id: str
    dp_rank: int
    endpoint: str
    replay_endpoint: str
    topic: str
    declaration: Declaration
    batches_per_life: list[int] | None
    metrics_url: str | None = None


@dataclass
class RankProgress:
    """Counters of one rank, since the server started. ``at_us`` is the engine time last published, 0 before the first batch."""

    published: int = 0
    life: int = 0
    at_us: int = 0
    subscribers: int = 0
    replays: int = 0
    bad_requests: int = 0
    finished: bool = False


@dataclass
class _Served:
    """One rank's sockets and state; touched only by the server's thread once that runs, and read for its metrics."""

    source: RankSource
    coming: Iterator[SourceBatch]
    pub: zmq.Socket[bytes]
    router: zmq.Socket[bytes]
    pub_bound: str
    router_bound: str
    buffer: deque[tuple[int, bytes]]
    published_at_s: float = 0.0
    pages: RecordedPages | None = None
    reading: Reading | None = None
    source_at_us: int = 0
    process_started_s: float = field(default_factory=time.time)
    progress: RankProgress = field(default_factory=RankProgress)


class EngineServer:
    """Serves ``sources`` from a thread of its own. ``start`` binds in the caller, so that a port in use is the caller's error.

    ``settings`` are fields of :class:`ServerOptions` that differ from ``options``: ``EngineServer(sources, speed=None)``.
    """

    def __init__(self, sources: Sequence[RankSource], options: ServerOptions | None = None, **settings: Any) -> None:
        self.options = replace(options or ServerOptions(), **settings)
        if not sources:
            raise KvcensusError("nothing to serve: no rank in what was given")
        if self.options.speed is not None and self.options.speed <= 0:
            raise KvcensusError(f"the speed must be above 0, not {self.options.speed:g}")
        keys = [source.key for source in sources]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise KvcensusError(f"two sources for {', '.join(twice)}: name them apart (NAME=PATH)")
        _check_ports(self.options, len(sources))
        self._sources = list(sources)
        self._ranks: list[_Served] = []
        self._endpoints: list[RankEndpoint] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._started = threading.Event()
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._metrics: PageServer | None = None
        self._publishing_since: float | None = None

    def start(self) -> EngineServer:
        """Bind every socket and start serving. Raises :class:`KvcensusError` when an address can't be bound."""
        self._context = zmq.Context()
        try:
            if self.options.metrics_port is not None:
                self._metrics = PageServer(
                    self._page_at,
                    "127.0.0.1",
                    self.options.metrics_port,
                    "the simulated engines' metrics",
                    "choose another --metrics-port, or 0 for a free one",
                )
            for index, source in enumerate(self._sources):
                self._open(index, source)
        except BaseException:
            self._close()
            if self._metrics is not None:
                self._metrics.stop()
            raise
        self._thread = threading.Thread(target=self._serve, name="simulated-engines", daemon=True)
        self._thread.start()
        if self._metrics is not None:
            self._metrics.start()
        return self

    def stop(self) -> None:
        """End serving and close all sockets; may be called twice. Raises what ended the thread, if something did."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._metrics is not None:
            self._metrics.stop()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> EngineServer:
        return self.start()

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def endpoints(self) -> list[RankEndpoint]:
        """Where each rank is served, in the order of the sources."""
        return list(self._endpoints)

    def progress(self) -> list[RankProgress]:
        """A snapshot of each rank's counters, in the order of the sources."""
        return [RankProgress(**vars(rank.progress)) for rank in self._ranks]

    def wait_started(self, timeout_s: float | None = None) -> bool:
        """Wait until publishing has begun (subscribers are there, or are waited for no longer)."""
        return self._started.wait(timeout_s)

    def wait_finished(self, timeout_s: float | None = None) -> bool:
        """Wait until every batch has been published; replay goes on being answered. ``False`` if it took longer."""
        done = self._finished.wait(timeout_s)
        if self._error is not None:
            self.stop()
        return done

    def _page_at(self, path: str) -> bytes | None:
        """The metrics page of the rank whose path this is, as of its newest batch; runs in the page server's threads."""
        for rank in self._ranks:
            source = rank.source
            if path == _metrics_path(source) or (path == "/metrics" and len(self._sources) == 1):
                if rank.pages is not None:
                    return rank.pages.at(self._moment(rank))
                reading = rank.reading and faulty(rank.reading, self.options.metrics_fault)
                return page(reading, rank.process_started_s, source.declaration.model, source.dp_rank)
        return None

    def _moment(self, rank: _Served) -> int:
        """Where the rank's recording is now, microseconds: by its pace, or without one by its newest batch."""
        if self.options.speed is None or self._publishing_since is None:
            return rank.source_at_us
        return rank.source.origin_us + round((time.monotonic() - self._publishing_since) * self.options.speed * 1_000_000)

    # Everything below the sockets' opening runs in the server's own thread.

    def _open(self, index: int, source: RankSource) -> None:
        options = self.options
        ports = [base and base + index for base in (options.port, _first_replay_port(options, len(self._sources)))]
        pub = self._socket(zmq.XPUB)
        router: zmq.Socket[bytes] | None = None
        try:
            _bind(pub, options.host, ports[0])
            router = self._socket(zmq.ROUTER)
            _bind(router, options.host, ports[1])
        except BaseException:
            pub.close(linger=0)
            if router is not None:
                router.close(linger=0)
            raise
        served = _Served(
            source,
            iter(source.batches),
            pub,
            router,
            _bound(pub),
            _bound(router),
            deque(maxlen=options.buffer_batches),
            pages=read_pages(source.metrics) if source.metrics is not None and self._metrics is not None else None,
            source_at_us=source.origin_us,
        )
        self._ranks.append(served)
        self._endpoints.append(
            RankEndpoint(
                source.instance_id,
                source.dp_rank,
                _reachable(served.pub_bound),
                _reachable(served.router_bound),
                source.topic.decode("utf-8", "replace"),
                source.declaration,
                source.batches_per_life(),
                None if self._metrics is None else self._metrics.root + _metrics_path(source),
            )
        )

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        assert self._context is not None
        made = self._context.socket(kind)
        if kind == zmq.XPUB:
            made.set_hwm(self.options.hwm)
            # Count every subscription, not only the first of each topic.
            made.setsockopt(zmq.XPUB_VERBOSER, 1)
            # A real engine can't outrun its subscribers for long; served without pacing, it would: wait for them instead.
            made.setsockopt(zmq.XPUB_NODROP, 1 if self.options.speed is None else 0)
        else:
            made.setsockopt(zmq.SNDHWM, self.options.replay_hwm)
        return made

    def _serve(self) -> None:
        try:
            poller = zmq.Poller()
            for rank in self._ranks:
                self._register(poller, rank)
            if self._wait_for_subscribers(poller):
                self._started.set()
                self._publish_all(poller)
            self._finished.set()
            while not self._stopping.is_set():
                self._answer(poller, 100)
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()
            self._finished.set()
            self._close()

    def _register(self, poller: zmq.Poller, rank: _Served) -> None:
        poller.register(rank.pub, zmq.POLLIN)
        poller.register(rank.router, zmq.POLLIN)

    def _close(self) -> None:
        linger = _CLOSE_LINGER_MS if self._finished.is_set() else 0
        for rank in self._ranks:
            rank.pub.close(linger=linger)
            rank.router.close(linger=0)
        if self._context is not None:
            self._context.term()
            self._context = None

    def _wait_for_subscribers(self, poller: zmq.Poller) -> bool:
        """``False`` when the server was stopped meanwhile."""
        give_up = None if self.options.wait_timeout_s is None else time.monotonic() + self.options.wait_timeout_s
        while any(rank.progress.subscribers < self.options.wait_subscribers for rank in self._ranks):
            if self._stopping.is_set():
                return False
            if give_up is not None and time.monotonic() >= give_up:
                break
            self._answer(poller, 50)
        return True

    def _answer(self, poller: zmq.Poller, timeout_ms: int) -> None:
        """Wait for at most ``timeout_ms`` and deal with whatever subscribers and replay clients want."""
        ready = dict(poller.poll(timeout_ms))
        if not ready:
            return
        for rank in self._ranks:
            if rank.pub in ready:
                _count_subscriptions(rank)
            if rank.router in ready:
                self._replay(rank)

    def _replay(self, rank: _Served) -> None:
        with suppress(zmq.Again):
            while True:
                frames = rank.router.recv_multipart(zmq.NOBLOCK)
                if len(frames) != 3:
                    # vLLM gives a malformed request no answer.
                    rank.progress.bad_requests += 1
                    continue
                client, _, asked = frames
                head = [client, b"", rank.source.topic] if self.options.replay_layout == "topic" else [client, b""]
                first = int.from_bytes(asked, "big")
                for seq, payload in rank.buffer:
                    if seq >= first:
                        rank.router.send_multipart([*head, seq.to_bytes(8, "big"), payload])
                end = [client, b"", b""] if self.options.replay_layout == "topic" else [client, b""]
                # Counted first, so that whoever has the whole answer finds it counted.
                rank.progress.replays += 1
                rank.router.send_multipart([*end, END_MARKER, b""])

    def _publish_all(self, poller: zmq.Poller) -> None:
        """Publish every rank's batches in the order of their time since their source's start, paced as the options say."""
        started = self._publishing_since = time.monotonic()
        now_us = time.time_ns() // 1000
        due: list[_Due] = []
        held: list[tuple[float, _Due]] = []
        for index, rank in enumerate(self._ranks):
            self._advance(due, index, rank)
        speed = self.options.speed
        since_answer = 0
        while (due or held) and not self._stopping.is_set():
            while held and held[0][0] <= time.monotonic():
                heapq.heappush(due, heapq.heappop(held)[1])
            wait_s = held[0][0] - time.monotonic() if held else math.inf
            if due:
                wait_s = min(wait_s, 0.0 if speed is None else started + due[0][0] / 1_000_000 / speed - time.monotonic())
            if wait_s > 0.0005:
                # Short sleeps keep stop() prompt; a poll counts in whole milliseconds.
                self._answer(poller, int(min(100, max(1, wait_s * 1000))))
                since_answer = 0
                continue
            if since_answer >= _PUBLISH_AT_ONCE:
                self._answer(poller, 0)
                since_answer = 0
            if not due:
                continue
            offset_us, index, batch = due[0]
            rank = self._ranks[index]
            if batch.life != rank.progress.life:
                back_at = rank.published_at_s + self.options.restart_pause_s
                if time.monotonic() < back_at:
                    heapq.heappush(held, (back_at, heapq.heappop(due)))
                    continue
                self._restart(poller, rank, batch.life)
            if not self._publish(poller, rank, batch, offset_us, now_us):
                break
            since_answer += 1
            heapq.heappop(due)
            self._advance(due, index, rank)

    def _advance(self, due: list[_Due], index: int, rank: _Served) -> None:
        batch = next(rank.coming, None)
        if batch is None:
            rank.progress.finished = True
        else:
            heapq.heappush(due, (batch.at_us - rank.source.origin_us, index, batch))

    def _publish(self, poller: zmq.Poller, rank: _Served, batch: SourceBatch, offset_us: int, now_us: int) -> bool:
        """``False`` when the server was stopped while a subscriber kept it waiting."""
        payload, at_us = batch.payload, batch.at_us
        if self.options.rebase:
            scale = self.options.speed if self.options.scale_time and self.options.speed else 1.0
            at_us = now_us + round(offset_us / scale)
            with suppress(WireError):  # a recorded payload that nobody can read has no time to move
                payload = restamp(payload, at_us - batch.at_us)
        frames = [rank.source.topic, batch.seq.to_bytes(8, "big"), payload]
        # The buffer first: a subscriber that sees this batch may ask for it at once.
        rank.buffer.append((batch.seq, payload))
        while True:
            try:
                rank.pub.send_multipart(frames, zmq.NOBLOCK)
                break
            except zmq.Again:
                if self._stopping.is_set():
                    return False
                self._answer(poller, 5)
        # Behind the batch, as with a real engine: a page never tells of a batch that nobody could have read.
        rank.reading, rank.source_at_us = batch.reading, batch.at_us
        rank.published_at_s = time.monotonic()
        rank.progress.published += 1
        rank.progress.at_us = at_us
        return True

    def _restart(self, poller: zmq.Poller, rank: _Served, life: int) -> None:
        rank.buffer.clear()
        rank.progress.life = life
        rank.process_started_s, rank.reading = time.time(), None
        if not self.options.rebind:
            return
        had = rank.progress.subscribers
        poller.unregister(rank.pub)
        poller.unregister(rank.router)
        # What was published before the end still goes out: a process that dies between two steps has sent it.
        rank.pub.close(linger=_CLOSE_LINGER_MS)
        rank.router.close(linger=0)
        rank.progress.subscribers = 0
        rank.pub = self._reopen(zmq.XPUB, rank.pub_bound)
        rank.router = self._reopen(zmq.ROUTER, rank.router_bound)
        self._register(poller, rank)
        # An engine takes longer to load its model than a subscriber to come back; at a high speed that time has to be given.
        give_up = time.monotonic() + _REBIND_TIMEOUT_S
        while rank.progress.subscribers < had and time.monotonic() < give_up and not self._stopping.is_set():
            self._answer(poller, 20)

    def _reopen(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """Bind ``address`` again; the old socket leaves it a moment after it was closed."""
        give_up = time.monotonic() + _REBIND_TIMEOUT_S
        while True:
            made = self._socket(kind)
            try:
                made.bind(address)
            except zmq.ZMQError as error:
                made.close(linger=0)
                if error.errno != errno.EADDRINUSE or time.monotonic() >= give_up:
                    raise KvcensusError(f"{address}: can't be bound again after a simulated restart: {_why(error)}") from error
                time.sleep(0.01)
            else:
                return made


def _metrics_path(source: RankSource) -> str:
    return f"/{quote(source.instance_id, safe='')}/{source.dp_rank}/metrics"


def _count_subscriptions(rank: _Served) -> None:
    with suppress(zmq.Again):
        while True:
            message = rank.pub.recv(zmq.NOBLOCK)
            if message[:1] == b"\x01":
                rank.progress.subscribers += 1
            elif message[:1] == b"\x00":
                rank.progress.subscribers -= 1


def _first_replay_port(options: ServerOptions, ranks: int) -> int | None:
    if options.replay_port is not None or options.port is None:
        return options.replay_port
    return options.port + ranks


def _check_ports(options: ServerOptions, ranks: int) -> None:
    replay = _first_replay_port(options, ranks)
    for what, first in (("--port", options.port), ("--replay-port", replay)):
        if first is not None and not 1 <= first <= 65_536 - ranks:
            raise KvcensusError(f"{what} {first}: {ranks} ranks need that many ports from there on, between 1 and 65535")
    if options.port is not None and replay is not None and abs(options.port - replay) < ranks:
        raise KvcensusError(
            f"--port {options.port} and --replay-port {replay} collide from rank {abs(options.port - replay)} on: each rank takes the next "
            f"port of both, so keep them {ranks} apart"
        )


def _bind(made: zmq.Socket[bytes], host: str, port: int | None) -> None:
    address = f"tcp://{host}:{port if port is not None else '*'}"
    try:
        made.bind(address)
    except zmq.ZMQError as error:
        hint = "choose another --port, or leave it out for free ones" if error.errno == errno.EADDRINUSE else "check the host and the port"
        raise KvcensusError(f"{address}: can't be bound: {_why(error)}; {hint}") from error


def _why(error: zmq.ZMQError) -> str:
    # Not its own text, which repeats the address.
    return zmq.strerror(error.errno or 0)


def _bound(made: zmq.Socket[bytes]) -> str:
    raw = made.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(raw, bytes)
    return raw.rstrip(b"\0").decode()


def _reachable(bound: str) -> str:
    """What a client on this machine connects to: a wildcard address is reached through loopback."""
    return bound.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
