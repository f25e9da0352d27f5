"""The ClickHouse engine behind ClickHouse's HTTP interface, writes and all: what a server is to the client, for tests.

Run as a process of its own, since a process can have one embedded engine: ``python -m tests.clickhouse_http FOLDER``. It prints its
port and serves until standard input ends. Requests are answered one at a time; the credentials must be ``tester``/``secret``.

It answers with an error as long as a test wants it to: :func:`refusing`.

With the name of a cluster as a second argument it is the one node of that cluster: Distributed tables are the engine's own. It has no
keeper, so ``ON CLUSTER`` is left out and replicated engines are taken as the plain ones. There is a cluster ``NAME_twice`` as well, whose
two shards are both this node: every row is there twice, but a query must be one that several shards can answer.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

USER, PASSWORD = "tester", "secret"

_REFUSAL = "refusal.json"
_INSERT = re.compile(rb"\s*INSERT INTO (.*?) FORMAT Native\n", re.DOTALL)
_TRANSPORT = {
    "client_protocol_version",
    "compress",
    "database",
    "enable_http_compression",
    "http_headers_progress_interval_ms",
    "query",
    "query_id",
    "send_progress_in_http_headers",
    "wait_end_of_query",
    "cancel_http_readonly_queries_on_client_close",
}


# The engine reads config.xml where it is started. It takes a shard for its own by the port of a listener, which here is none.
_CONFIG = """\
<clickhouse>
  <tcp_port>9000</tcp_port>
  <macros><shard>1</shard><replica>1</replica></macros>
  <remote_servers>
    <{cluster}>
      <shard><internal_replication>true</internal_replication><replica><host>127.0.0.1</host><port>9000</port></replica></shard>
    </{cluster}>
    <{cluster}_twice>
      <shard><internal_replication>true</internal_replication><replica><host>127.0.0.1</host><port>9000</port></replica></shard>
      <shard><internal_replication>true</internal_replication><replica><host>127.0.0.1</host><port>9000</port></replica></shard>
    </{cluster}_twice>
  </remote_servers>
</clickhouse>
"""
_ON_CLUSTER = re.compile(r" ON CLUSTER '[^']*'")
_REPLICATED = re.compile(r"\bReplicated(\w*MergeTree)\('[^']*', '[^']*'(?:, )?")


def without_keeper(statement: str) -> str:
    """A statement for a cluster as it runs on one node that has no keeper."""
    return _REPLICATED.sub(r"\1(", _ON_CLUSTER.sub("", statement))


@contextmanager
def clickhouse_server(folder: Path, cluster: str | None = None) -> Iterator[str]:
    """A server on ``folder``, as a URL without a database; with ``cluster`` the one node of that, its settings beside ``folder``."""
    root = Path(__file__).parents[1]
    if cluster is not None:
        (folder.parent / "config.xml").write_text(_CONFIG.format(cluster=cluster), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.clickhouse_http", str(folder), *([cluster] if cluster else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder.parent if cluster else root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    try:
        assert process.stdout is not None
        yield f"http://{USER}:{PASSWORD}@127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.communicate(timeout=60)


@contextmanager
def refusing(folder: Path, code: int | None, text: str, *, status: int = 500, all_requests: bool = False) -> Iterator[Callable[[], None]]:
    """The server on ``folder`` refuses inserts, or all requests, until the end or until what it gives is called.

    It gives ClickHouse's error ``code``; with none it answers as a proxy before it would.
    """
    place = folder.parent / _REFUSAL
    draft = place.with_suffix(".draft")
    draft.write_text(json.dumps({"code": code, "text": text, "status": status, "all": all_requests}), encoding="utf-8")
    draft.replace(place)
    try:
        yield lambda: place.unlink(missing_ok=True)
    finally:
        place.unlink(missing_ok=True)


class _Engine:
    def __init__(self, folder: str, clustered: bool) -> None:
        self._written: Callable[[str], str] = without_keeper if clustered else str
        chdb: Any = importlib.import_module("chdb")
        self._connect: Callable[[], Any] = lambda: chdb.connect(folder)
        self._connection: Any = self._connect()
        self._lock = threading.Lock()

    def run(self, sql: bytes, parameters: dict[str, str], database: str | None, settings: dict[str, str]) -> bytes:
        with self._lock:
            previous, self._connection = self._connection, self._connect()  # a session per request, as HTTP has it
            previous.close()
            for name, value in settings.items():
                self._connection.query(f"SET {name} = '{value}'", "TabSeparated")
            if database:
                self._connection.query(f"USE `{database}`", "TabSeparated")
            insert = _INSERT.match(sql)
            if insert is None:
                return bytes(self._connection.query(self._written(sql.decode()), "TabSeparated", params=parameters).bytes() or b"")
            with tempfile.NamedTemporaryFile(suffix=".native") as file:
                file.write(sql[insert.end() :])
                file.flush()
                statement = f"INSERT INTO {insert.group(1).decode()} FROM INFILE '{file.name}' FORMAT Native"
                return bytes(self._connection.query(statement, "TabSeparated").bytes() or b"")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: _Engine
    refusal: Path

    def do_POST(self) -> None:
        body = self._body()
        if body is None:
            self._send(400, b"Code: 33. DB::Exception: the body ends early. (CANNOT_READ_ALL_DATA)", 33)
            return
        expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != expected:
            self._send(403, b"Code: 516. DB::Exception: tester: Authentication failed. (AUTHENTICATION_FAILED)", 516)
            return
        given = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        parameters = {name.removeprefix("param_"): value for name, value in given.items() if name.startswith("param_")}
        settings = {name: value for name, value in given.items() if not name.startswith("param_") and name not in _TRANSPORT}
        sql = given.get("query", "").encode() + body
        if self._refused(sql):
            return
        try:
            result = self.engine.run(sql, parameters, given.get("database"), settings)
        except Exception as error:
            code = re.search(r"Code: (\d+)", str(error))
            self._send(500, str(error).encode(), int(code.group(1)) if code else 1)
            return
        self._send(200, result)

    do_GET = do_POST

    def _refused(self, sql: bytes) -> bool:
        try:
            refusal = json.loads(self.refusal.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return False
        if refusal["all"] or _INSERT.match(sql):
            self._send(refusal["status"], refusal["text"].encode(), refusal["code"], plain=True)
            return True
        return False

    def _body(self) -> bytes | None:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        body = b"".join(parts)
        if self.headers.get("Content-Encoding") == "lz4":  # the client's first choice
            lz4: Any = importlib.import_module("lz4.frame")
            with lz4.open(io.BytesIO(body)) as frames:  # one frame per block of the insert; lz4.decompress would read the first alone
                try:
                    body = frames.read()
                except (RuntimeError, EOFError):  # a client that found a value it cannot send ends its insert in the middle
                    return None
        return body

    def _send(self, status: int, body: bytes, code: int | None = None, *, plain: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-ClickHouse-Timezone", "UTC")
        if code is None and not plain:
            self.send_header("X-ClickHouse-Format", "Native")
        elif code is not None:
            self.send_header("X-ClickHouse-Exception-Code", str(code))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


if __name__ == "__main__":
    _Handler.engine = _Engine(sys.argv[1], len(sys.argv) > 2)
    _Handler.refusal = Path(sys.argv[1]).parent / _REFUSAL
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()
    server.shutdown()
    os._exit(0)  # the engine's own threads now and then keep an interpreter from ending
