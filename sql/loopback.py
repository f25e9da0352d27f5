"""The owner of an embedded store answers other processes on this machine.

Only one process can have an embedded store open. It listens on 127.0.0.1, on a free port, and speaks the part of ClickHouse's
HTTP interface that a client needs to read, so that others use the client they would use for a server. Its address and a
bearer token stand in ``store.json`` in the data folder, readable by its user alone.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from schemas.errors import KvcensusError
from sql.database import StoreError
from sql.statements import trailing_format

STORE_FILE = "store.json"
MAX_BODY_BYTES = 1 << 20
SOCKET_TIMEOUT_S = 30.0
PING_TIMEOUT_S = 3.0
_POLL_S = 0.05  # how soon the server notices that it is to stop

_IGNORED = frozenset(
    {
        "client_protocol_version",
        "compress",
        "database",
        "default_format",
        "enable_http_compression",
        "final",
        "query",
        "query_id",
        "wait_end_of_query",
    }
)
"""Parameters of ClickHouse's HTTP interface that change nothing here; any other setting is refused, not passed over."""


class Answers(Protocol):
    """What the server asks: one read-only statement in, bytes of its FORMAT out; StoreError or KvcensusError if it fails."""

    def run(self, sql: str, parameters: Mapping[str, str]) -> bytes:
        """The result of ``sql``."""
        ...


@dataclass(frozen=True)
class Owner:
    """Who owns a store: where it answers, and with which token."""

    url: str
    token: str
    pid: int


def read_store_file(data_dir: Path) -> Owner | None:
    """What ``store.json`` says, or ``None`` if it is absent or not readable as such."""
    try:
        found = json.loads((data_dir / STORE_FILE).read_text(encoding="utf-8"))
        return Owner(str(found["url"]), str(found["token"]), int(found["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def live_owner(data_dir: Path) -> Owner | None:
    """The owner that ``store.json`` names, if that process lives and answers as such; a stale file counts as none."""
    owner = read_store_file(data_dir)
    if owner is None or not _alive(owner.pid) or not owner.url.startswith("http://127.0.0.1:"):
        return None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy: it is this machine
    request = urllib.request.Request(f"{owner.url}/ping", headers={"Authorization": f"Bearer {owner.token}"})  # noqa: S310
    try:
        with opener.open(request, timeout=PING_TIMEOUT_S) as response:
            return owner if json.loads(response.read(1024)).get("pid") == owner.pid else None
    except (urllib.error.URLError, OSError, ValueError, AttributeError):
        return None


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class StoreServer:
    """Answers on loopback until :meth:`close`. ``database`` is the only one that may be named."""

    def __init__(self, answers: Answers, database: str) -> None:
        self.token = secrets.token_urlsafe(32)
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.answers = answers
        self._server.token = self.token
        self._server.database = database
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="kvcensus-store", daemon=True)
        self._thread.start()
        self._file: Path | None = None

    def announce(self, data_dir: Path) -> None:
        """Write ``store.json``: complete or not at all, readable by this user alone."""
        path = data_dir / STORE_FILE
        draft = data_dir / f".{STORE_FILE}.{os.getpid()}"
        with suppress(FileNotFoundError):
            draft.unlink()
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"url": self.url, "token": self.token, "pid": os.getpid()}, file)
        draft.replace(path)
        self._file = path

    def close(self) -> None:
        """Remove ``store.json`` if it is still ours, and stop answering."""
        if self._file is not None:
            ours = read_store_file(self._file.parent)
            if ours is not None and ours.token == self.token:
                with suppress(FileNotFoundError):
                    self._file.unlink()
            self._file = None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    answers: Answers
    token: str
    database: str

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        """``/ping``, or a query in the URL."""
        if not self._authorised():
            return
        url = urlsplit(self.path)
        if url.path == "/ping":
            self._send(200, json.dumps({"pid": os.getpid()}).encode())
        else:
            self._query(url.query, b"")

    def do_POST(self) -> None:
        """A query in the body, or in the URL."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self._send(411, b"Content-Length is needed", close=True)
            return
        if int(length) > MAX_BODY_BYTES:
            self._discard(min(int(length), 8 * MAX_BODY_BYTES))
            self._send(413, f"a query may have {MAX_BODY_BYTES} bytes at most".encode(), close=True)
            return
        body = self.rfile.read(int(length))
        if not self._authorised():
            return
        if len(body) == int(length):
            self._query(urlsplit(self.path).query, body)

    def _discard(self, length: int) -> None:
        """Read on before refusing: closing on a client that is still sending would take the answer from it."""
        while length > 0 and (part := self.rfile.read(min(length, 1 << 16))):
            length -= len(part)

    def _authorised(self) -> bool:
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            return True
        self._send(401, b"the token in store.json is needed")
        return False

    def _query(self, url_query: str, body: bytes) -> None:
        given = dict(parse_qsl(url_query, keep_blank_values=True))
        parameters = {name.removeprefix("param_"): value for name, value in given.items() if name.startswith("param_")}
        settings = sorted(name for name in given if not name.startswith("param_") and name not in _IGNORED)
        if settings:
            self._send(400, f"settings cannot be changed here: {', '.join(settings)}".encode())
            return
        if given.get("database", self.server.database) != self.server.database:
            self._send(404, f"the only database here is {self.server.database}".encode(), code=81)
            return
        try:
            sql = (given.get("query", "") + "\n" + body.decode()).strip()
        except UnicodeDecodeError:
            self._send(400, b"the query is not UTF-8")
            return
        try:
            result = self.server.answers.run(sql, parameters)
        except StoreError as error:
            self._send(500, error.detail.encode(), code=error.code)
            return
        except KvcensusError as error:
            self._send(403, str(error).encode())
            return
        except Exception as error:
            self._send(500, f"{type(error).__name__}: {error}".encode())
            return
        self._send(200, result, fmt=trailing_format(sql) or "TabSeparated")

    def _send(self, status: int, body: bytes, *, code: int | None = None, fmt: str | None = None, close: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if fmt else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-ClickHouse-Timezone", "UTC")
        if fmt:
            self.send_header("X-ClickHouse-Format", fmt)
        if code is not None:
            self.send_header("X-ClickHouse-Exception-Code", str(code))
        if close:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a query is no event."""
