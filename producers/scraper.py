"""Reads an engine's ``/metrics`` over and over, on a thread of its own: whatever that page does, the forwarder goes on.

Bounded in time and size, straight to the address given: no proxy, no redirect, no credential. An engine that fails is asked again.
"""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
import threading
import time
from collections import deque
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from producers import engine_metrics
from schemas.errors import KvcensusError
from schemas.records import EngineMetrics

logger = logging.getLogger("kvcensus.scraper")

MAX_BODY_BYTES = 8 << 20
"""Longest page that is read."""
MAX_KEPT = 64
"""Most scrapes that wait for :meth:`Scraper.take`; the oldest gives way, counted in ``forgotten``."""
_AGAIN = 0.25
"""Seconds between two attempts while somebody waits for an answer."""
_JOIN_SECONDS = 2.0


@dataclass(frozen=True)
class Scrape:
    """One page that was read. ``began`` is the monotonic clock when it was asked for, ``at_ms`` the wall clock when it had come."""

    began: float
    at_ms: int
    page: engine_metrics.Page

    def record(self, instance_id: str, dp_rank: int, life_id: str, incarnation: str) -> EngineMetrics:
        """What it says about one rank. Raises :class:`producers.engine_metrics.MetricsError` where that rank is not on the page."""
        return self.page.of(dp_rank, instance_id=instance_id, life_id=life_id, incarnation=incarnation, at_ms=self.at_ms)


class _ScrapeError(Exception):
    """Why a page could not be had, in a few words."""


@dataclass(frozen=True)
class _Target:
    """A URL taken apart. Raises :class:`KvcensusError` for one that cannot be scraped."""

    url: str
    tls: ssl.SSLContext | None = field(init=False, repr=False)
    host: str = field(init=False)
    port: int = field(init=False)
    path: str = field(init=False)

    def __post_init__(self) -> None:
        if any(character <= " " or character > "~" for character in self.url):
            raise KvcensusError("the metrics URL holds a space or another character that must be escaped")
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise KvcensusError(f"the metrics URL cannot be read: {error}") from None
        if parts.username is not None or parts.password is not None:
            raise KvcensusError("the metrics URL must hold no credential: the forwarder carries none")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise KvcensusError(f"the metrics URL must be like http://127.0.0.1:8000/metrics, not {self.url}")
        path = parts.path if parts.path not in ("", "/") else "/metrics"
        found = {
            "tls": ssl.create_default_context() if parts.scheme == "https" else None,
            "host": parts.hostname,
            "port": port or (443 if parts.scheme == "https" else 80),
            "path": path + (f"?{parts.query}" if parts.query else ""),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)


class Scraper:
    """Reads ``url`` every ``interval_s`` seconds, each time for at most ``timeout_s``. Start it once; any thread may ask it.

    ``dp_rank``: a page without this rank is a failure; None takes any. Raises :class:`KvcensusError` for a URL that is none of
    http or https, or holds a credential. A URL without a path means ``/metrics``.
    """

    def __init__(self, url: str, dp_rank: int | None, interval_s: float = 5.0, timeout_s: float = 3.0) -> None:
        self._target = _Target(url)
        self._dp_rank = dp_rank
        self._interval = interval_s
        self._timeout = timeout_s
        self._changed = threading.Condition()
        self._kept: deque[Scrape] = deque()
        self._latest: Scrape | None = None
        self._wanted_by = 0
        self._stopping = False
        self._ok: bool | None = None
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="kvcensus-scraper", daemon=True)
        self.scrapes = 0
        """Pages read."""
        self.failed = 0
        """Pages that could not be read."""
        self.forgotten = 0
        """Pages read that nobody took in time."""
        self.last_failure: str | None = None
        """Why the last that failed did; it stays when the engine answers again."""

    def start(self) -> Self:
        """Begin, with a first scrape at once."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread; a scrape in progress is broken off. May be called twice."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._break_off()
        if self._thread.is_alive():
            # Looking up a name cannot be broken off; such a thread dies with the process.
            self._thread.join(_JOIN_SECONDS)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    @property
    def latest(self) -> Scrape | None:
        """The newest page read, taken or not."""
        return self._latest

    @property
    def ok(self) -> bool | None:
        """Whether the last attempt succeeded; None before the first has ended."""
        return self._ok

    def take(self) -> list[Scrape]:
        """The pages read since the last call, oldest first, :data:`MAX_KEPT` at most."""
        with self._changed:
            taken = list(self._kept)
            self._kept.clear()
        return taken

    def process_started_us(self, after: float, patience_s: float) -> int | None:
        """When the engine's process started, by a page asked for at ``after`` (monotonic clock) or later.

        Asks now unless there is one already, again while that fails, and waits for at most ``patience_s`` seconds. None: no such page
        came, or it does not say.
        """
        now = time.monotonic()
        after, deadline = min(after, now), now + patience_s
        with self._changed:
            self._wanted_by += 1
            self._changed.notify_all()
            try:
                while not self._stopping:
                    found = self._latest
                    if found is not None and found.began >= after:
                        return found.page.process_started_us
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return None
                    self._changed.wait(left)
            finally:
                self._wanted_by -= 1
        return None

    # -- the thread

    def _run(self) -> None:
        while not self._stopping:
            began = time.monotonic()
            try:
                page = engine_metrics.read(self._fetch(began + self._timeout))
                if self._dp_rank is not None:
                    page.of(self._dp_rank)
            except (_ScrapeError, engine_metrics.MetricsError) as error:
                self._note_failure(str(error))
            except Exception as error:  # the page of somebody else's process: nothing it does may end this thread
                self._note_failure(f"{type(error).__name__}: {error}")
            else:
                self._note_page(Scrape(began, time.time_ns() // 1_000_000, page))
            self._wait_until(began)

    def _wait_until(self, began: float) -> None:
        """Until the next is due: an interval after the last began, or sooner if somebody waits."""
        ended = time.monotonic()
        with self._changed:
            while not self._stopping:
                due = began + self._interval
                if self._wanted_by:
                    due = min(due, ended if self._ok else ended + _AGAIN)
                left = due - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def _note_page(self, scrape: Scrape) -> None:
        with self._changed:
            if self._ok is False:
                logger.warning("%s answers again", self._target.url)
            self._ok = True
            self.scrapes += 1
            self._latest = scrape
            if len(self._kept) >= MAX_KEPT:
                self._kept.popleft()
                self.forgotten += 1
            self._kept.append(scrape)
            self._changed.notify_all()

    def _note_failure(self, reason: str) -> None:
        with self._changed:
            if self._stopping:
                return
            if self._ok is not False:
                logger.warning("no metrics from %s: %s; trying again", self._target.url, reason)
            self._ok = False
            self.failed += 1
            self.last_failure = reason
            self._changed.notify_all()

    # -- one page

    def _fetch(self, deadline: float) -> str:
        # Socket timeouts are for one step; a server that sends a byte now and then is cut off by the timer.
        late = threading.Event()

        def cut_off() -> None:
            late.set()
            self._break_off()

        timer = threading.Timer(max(deadline - time.monotonic(), 0.0), cut_off)
        timer.daemon = True
        timer.start()
        try:
            body = self._request(deadline)
            if late.is_set():  # a page without a declared length looks complete wherever it is cut
                raise TimeoutError
        except (OSError, http.client.HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise _ScrapeError(f"no complete answer within {self._timeout:g} s") from error
            raise _ScrapeError(_reason(error)) from error
        finally:
            timer.cancel()
            self._socket = None
        return body.decode("utf-8", "replace")

    def _request(self, deadline: float) -> bytes:
        target = self._target
        connection = http.client.HTTPConnection(target.host, target.port)
        with closing(connection):
            connection.sock = self._connect(deadline)
            connection.request("GET", target.path, headers={"Accept": "text/plain", "Accept-Encoding": "identity", "Connection": "close"})
            response = connection.getresponse()
            with closing(response):
                if response.status != http.client.OK:
                    moved = ", and redirects are not followed" if 300 <= response.status < 400 else ""
                    raise _ScrapeError(f"HTTP {response.status}{moved}")
                if (coding := response.getheader("Content-Encoding", "identity")) != "identity":
                    raise _ScrapeError(f"the answer is encoded ({coding[:40]}), which was not asked for")
                return _body(response)

    def _connect(self, deadline: float) -> socket.socket:
        target = self._target
        failure: OSError = OSError(f"no address for {target.host}")
        for family, kind, protocol, _, address in socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM):
            made = socket.socket(family, kind, protocol)
            try:
                self._socket = made
                made.settimeout(max(deadline - time.monotonic(), 0.001))
                made.connect(address)
                if target.tls is not None:
                    made = target.tls.wrap_socket(made, server_hostname=target.host, do_handshake_on_connect=False)
                    self._socket = made
                    made.do_handshake()
            except OSError as error:
                made.close()
                failure = error
            else:
                if self._stopping:
                    made.close()
                    raise _ScrapeError("stopped")
                return made
        raise failure

    def _break_off(self) -> None:
        """Make whatever waits on the socket return."""
        current = self._socket
        if current is not None:
            with suppress(OSError):
                current.shutdown(socket.SHUT_RDWR)


def _body(response: http.client.HTTPResponse) -> bytes:
    if (response.length or 0) > MAX_BODY_BYTES:
        raise _ScrapeError(f"the page is too large: {response.length} bytes, {MAX_BODY_BYTES} at most")
    parts: list[bytes] = []
    room = MAX_BODY_BYTES + 1
    while part := response.read1(min(room, 1 << 16)):
        parts.append(part)
        room -= len(part)
        if room <= 0:
            raise _ScrapeError(f"the page is too large: more than {MAX_BODY_BYTES} bytes")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)


def _reason(error: OSError | http.client.HTTPException) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "the answer was cut short"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the connection was closed without an answer"
    if isinstance(error, http.client.HTTPException):
        return f"no valid HTTP ({type(error).__name__})"
    return error.strerror or str(error) or type(error).__name__
