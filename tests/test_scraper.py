"""The scraper against real HTTP servers on loopback, those included that no engine should be."""

from __future__ import annotations

import logging
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from producers import scraper as module
from producers.scraper import MAX_BODY_BYTES, Scraper
from schemas.errors import KvcensusError

PAGE = 'vllm:num_requests_running{engine="0"} 3\nprocess_start_time_seconds 100\n'


def answer(body: bytes | str, status: str = "200 OK", headers: str = "") -> bytes:
    data = body.encode() if isinstance(body, str) else body
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n{headers}\r\n".encode() + data


class Engine(socketserver.ThreadingTCPServer):
    """Answers each request as ``behave`` says at that moment: bytes to send, or something done with the connection."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int = 0) -> None:
        self.behave: bytes | Callable[[socket.socket], None] = answer(PAGE)
        self.requests: list[bytes] = []
        self.ending = threading.Event()
        super().__init__(("127.0.0.1", port), _Request)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    def end(self) -> None:
        self.ending.set()
        self.shutdown()
        self.server_close()


class _Request(socketserver.BaseRequestHandler):
    server: Engine

    def handle(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            part = self.request.recv(65_536)
            if not part:
                return
            head += part
        self.server.requests.append(head)
        behave = self.server.behave
        try:
            if isinstance(behave, bytes):
                self.request.sendall(behave)
            else:
                behave(self.request)
        except OSError:
            pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.end()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def hang(engine: Engine) -> Callable[[socket.socket], None]:
    """Silence."""

    def behave(_: socket.socket) -> None:
        engine.ending.wait(60)

    return behave


def hang_within(engine: Engine, start: bytes) -> Callable[[socket.socket], None]:
    """A beginning, and then silence."""

    def behave(connection: socket.socket) -> None:
        connection.sendall(start)
        engine.ending.wait(60)

    return behave


def drip(engine: Engine, start: bytes) -> Callable[[socket.socket], None]:
    """Never silent for long, and never done."""

    def behave(connection: socket.socket) -> None:
        connection.sendall(start)
        while not engine.ending.wait(0.02):
            connection.sendall(b"x")

    return behave


def flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(MAX_BODY_BYTES // 65_536 + 20):
        connection.sendall(b"#" * 65_535 + b"\n")


def test_it_reads_again_and_again(engine: Engine) -> None:
    with Scraper(engine.url, 0, interval_s=0.02, timeout_s=30) as scraper:
        until(lambda: scraper.scrapes >= 3)
    taken = scraper.take()
    assert len(taken) == scraper.scrapes
    assert taken[-1] is scraper.latest
    assert [each.began for each in taken] == sorted(each.began for each in taken)
    record = taken[0].record("i", 0, "life", "run")
    assert (record.instance_id, record.life_id, record.requests_running, record.at_ms) == ("i", "life", 3, taken[0].at_ms)
    assert scraper.take() == []
    assert (scraper.failed, scraper.last_failure, scraper.ok) == (0, None, True)
    head = engine.requests[0].decode().lower()
    assert head.startswith("get /metrics http/1.1")
    assert "authorization" not in head
    assert "cookie" not in head


def test_what_nobody_takes_is_bounded_and_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    with Scraper(engine.url, 0, interval_s=0.001, timeout_s=30) as scraper:
        until(lambda: scraper.scrapes >= 5)
    assert len(scraper.take()) == 2
    assert scraper.forgotten == scraper.scrapes - 2


CASES: dict[str, tuple[Callable[[Engine], bytes | Callable[[socket.socket], None]], str]] = {
    "500": (lambda _: answer(PAGE, "500 Oops"), "HTTP 500"),
    "404": (lambda _: answer(PAGE, "404 Not Found"), "HTTP 404"),
    "redirect": (lambda e: answer("", "307 Temporary Redirect", f"Location: {e.url}\r\n"), "HTTP 307, and redirects are not followed"),
    "html": (lambda _: answer("<html></html>"), "no metrics of a known engine"),
    "binary": (lambda _: answer(bytes(range(256)) * 40), "no metrics of a known engine"),
    "broken line": (lambda _: answer('vllm:num_requests_running{engine="0 3\n'), "the metrics cannot be read"),
    "other rank": (lambda _: answer(PAGE + 'vllm:num_requests_running{engine="4"} 1\n'), "ranks 0, 4, not 2"),
    "no http": (lambda _: b"\x00\x01\x02 no http at all\r\n\r\n", "no valid HTTP"),
    # "No valid HTTP", or no metrics, should the connection end before the client has seen too many of them.
    "endless headers": (lambda _: b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 500, "no "),
    "gzip": (lambda _: answer(PAGE, headers="Content-Encoding: gzip\r\n"), "is encoded"),
    "cut short": (lambda _: answer(PAGE)[:-5], "cut short"),
    "huge, declared": (lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", "too large: 99999999 bytes"),
    "huge": (lambda _: flood, "too large: more than"),
    "closed": (lambda _: lambda connection: connection.close(), "closed without an answer"),
    "hangs": (hang, "no complete answer within"),
    "drips headers": (lambda e: drip(e, b"HTTP/1.1 200 OK\r\nx: "), "no complete answer within"),
    "drips a body": (lambda e: drip(e, b"HTTP/1.1 200 OK\r\n\r\n" + PAGE.encode() + b"#"), "no complete answer within"),
    "hangs in a body": (lambda e: hang_within(e, answer(PAGE)[:-5]), "no complete answer within"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_engine_that_fails_is_asked_again(engine: Engine, case: str, caplog: pytest.LogCaptureFixture) -> None:
    behave, reason = CASES[case]
    patient = reason != "no complete answer within"
    engine.behave = behave(engine)
    with caplog.at_level(logging.WARNING), Scraper(engine.url, 2, interval_s=0.01, timeout_s=30 if patient else 0.15) as scraper:
        until(lambda: scraper.failed >= 2)
        assert scraper.last_failure is not None
        assert reason in scraper.last_failure
        assert scraper.ok is False
        assert scraper.latest is None
        engine.behave = answer(PAGE)
        until(lambda: scraper.ok)
        assert scraper.last_failure is not None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, "once when it fails, once when it is back"
    assert reason in told[0]
    assert told[1].endswith("answers again")


def test_an_engine_that_vanishes_and_comes_back() -> None:
    first = Engine()
    with Scraper(first.url, 0, interval_s=0.01, timeout_s=30) as scraper:
        until(lambda: scraper.scrapes)
        first.end()
        until(lambda: scraper.failed >= 2)
        assert scraper.last_failure == "Connection refused"
        known = scraper.scrapes
        second = Engine(first.port)
        until(lambda: scraper.scrapes > known)
        second.end()


def test_the_process_start_is_of_a_page_asked_for_later(engine: Engine) -> None:
    with Scraper(engine.url, 0, interval_s=1_000, timeout_s=30) as scraper:
        until(lambda: scraper.scrapes == 1)
        assert scraper.process_started_us(0.0, 0.0) == 100_000_000
        assert scraper.scrapes == 1, "the page at hand is recent enough"
        engine.behave = answer(PAGE.replace("100", "200"))
        assert scraper.process_started_us(time.monotonic(), 60) == 200_000_000
        assert scraper.scrapes == 2
        # A page that does not say, and none at all.
        engine.behave = answer('vllm:num_requests_running{engine="0"} 3\n')
        assert scraper.process_started_us(time.monotonic(), 60) is None
        engine.behave = answer("", "503 Not Yet")
        assert scraper.process_started_us(time.monotonic(), 0.05) is None
        assert scraper.failed <= 2, "a failing engine is not hammered"


def test_a_page_on_its_way_is_too_old(engine: Engine) -> None:
    release = threading.Event()

    def late(connection: socket.socket) -> None:
        release.wait(60)
        connection.sendall(answer(PAGE))

    engine.behave = late
    with Scraper(engine.url, 0, interval_s=1_000, timeout_s=60) as scraper:
        until(lambda: engine.requests)
        engine.behave = answer(PAGE.replace("100", "200"))
        after = time.monotonic()
        threading.Timer(0.05, release.set).start()
        assert scraper.process_started_us(after, 60) == 200_000_000


@pytest.mark.parametrize("behave", [hang, lambda e: drip(e, b"HTTP/1.1 200 OK\r\n\r\n")])
def test_stopping_breaks_off_a_scrape(engine: Engine, behave: Callable[[Engine], Callable[[socket.socket], None]]) -> None:
    engine.behave = behave(engine)
    scraper = Scraper(engine.url, 0, interval_s=0.01, timeout_s=1_000).start()
    until(lambda: engine.requests)
    waiting = threading.Thread(target=scraper.process_started_us, args=(time.monotonic(), 1_000))
    waiting.start()
    scraper.stop()
    scraper.stop()
    assert not scraper._thread.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()
    assert (scraper.scrapes, scraper.failed) == (0, 0)


def test_no_proxy_is_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Scraper(engine.url, 0, interval_s=0.01, timeout_s=30) as scraper:
        until(lambda: scraper.scrapes)
    assert scraper.failed == 0


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://h/metrics", "must be like"),
        ("file:///etc/passwd", "must be like"),
        ("127.0.0.1:8000", "must be like"),
        ("http://", "must be like"),
        ("http://user:secret@h/metrics", "no credential"),
        ("http://h:99999/", "cannot be read"),
        ("http://[::1/", "cannot be read"),
        ("http://h/a b", "must be escaped"),
        ("http://h/\r\nX: y", "must be escaped"),
    ],
)
def test_a_url_that_cannot_be_scraped_is_refused(url: str, reason: str) -> None:
    with pytest.raises(KvcensusError, match=reason) as caught:
        Scraper(url, 0)
    assert "secret" not in str(caught.value)


def test_a_url_without_a_path_means_metrics(engine: Engine) -> None:
    with Scraper(f"http://localhost:{engine.port}", None, interval_s=0.01, timeout_s=30) as scraper:
        until(lambda: scraper.scrapes)
    assert engine.requests[0].startswith(b"GET /metrics HTTP/1.1")


def test_a_certificate_nobody_vouches_for_is_refused(engine: Engine, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(key)),
            *("-out", str(certificate), "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("no openssl to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    engine.socket = context.wrap_socket(engine.socket, server_side=True)
    url = engine.url.replace("http:", "https:")
    with Scraper(url, 0, interval_s=0.01, timeout_s=30) as scraper:
        until(lambda: scraper.failed)
        assert "certificate verify failed" in (scraper.last_failure or "").lower()
    trusted = Scraper(url, 0, interval_s=0.01, timeout_s=30)
    assert trusted._target.tls is not None
    trusted._target.tls.load_verify_locations(certificate)
    with trusted:
        until(lambda: trusted.scrapes)
