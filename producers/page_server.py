"""Small pages over HTTP, to be read and nothing else: what serves a forwarder's own metrics and a simulated engine's."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from schemas.errors import KvcensusError

logger = logging.getLogger("kvcensus.page_server")

_MOST_AT_ONCE = 8
"""Requests answered at the same time; what comes beyond is closed unanswered."""
_REQUEST_SECONDS = 5.0


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS
    server_version = "kvcensus"
    sys_version = ""

    def do_GET(self) -> None:
        try:
            page = self.server.page_at(self.path.partition("?")[0])
        except Exception:
            logger.exception("%s could not be made", self.path)
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"the page could not be made\n")
            return
        if page is None:
            self._answer(HTTPStatus.NOT_FOUND, b"no such page\n")
        else:
            self._answer(HTTPStatus.OK, page, CONTENT_TYPE_PLAIN_0_0_4)

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], page_at: Callable[[str], bytes | None]) -> None:
        self.page_at = page_at
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(_MOST_AT_ONCE)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a client went away", exc_info=True)


class PageServer:
    """Answers ``GET`` at ``host``:``port`` (0: any free port), and no other method, from threads of its own.

    ``page_at`` gives the text for a path, None where there is none; it is called from those threads. Listens from the start, answers
    from :meth:`start` on. Raises :class:`KvcensusError` when the address cannot be had; ``what`` and ``hint`` are for its message.
    """

    def __init__(self, page_at: Callable[[str], bytes | None], host: str, port: int, what: str, hint: str) -> None:
        try:
            self._server = _Server((host, port), page_at)
        except (OSError, OverflowError) as error:
            raise KvcensusError(f"{what} at {_place(host, port)}: {_why(error)}; {hint}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="kvcensus-pages", daemon=True
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    @property
    def root(self) -> str:
        """``http://HOST:PORT``."""
        return f"http://{_place(str(self._server.server_address[0]), self.port)}"

    def start(self) -> Self:
        """Begin to answer."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Answer no more; may be called twice, and without a start."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        with suppress(OSError):
            self._server.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exception: object) -> None:
        self.stop()


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
