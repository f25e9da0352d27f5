"""The embedded store: one process owns it and answers for the others on loopback, reading only, with the token."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from schemas.errors import KvcensusError
from sql import loopback, migrate, store
from sql.database import Database, StoreError
from sql.embedded import FolderLocked, ReadHandle
from sql.loopback import MAX_BODY_BYTES, Owner, live_owner, read_store_file
from sql.statements import OUTSIDE

ROOT = Path(__file__).parents[1]

VALUES = """
SELECT
    toUInt64(18446744073709551615) AS big, toInt128('-170141183460469231731687303715884105728') AS bigger,
    toFixedString(unhex('00ff01'), 3) AS id, CAST(NULL, 'Nullable(FixedString(2))') AS no_id,
    toDateTime64('2026-01-31 12:00:00.123456', 6, 'UTC') AS at, toDateTime(1, 'UTC') AS second,
    toDate('2026-01-31') AS day, toLowCardinality('x') AS low, CAST(['a', NULL], 'Array(LowCardinality(Nullable(String)))') AS list,
    map('k', 1) AS pairs, true AS yes, 0.1 AS share, nan AS none, 'é\\n\\t\\'"\\\\' AS text, [(1, 'a')] AS nested
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[store.OwnedDatabase]:
    with store.connect(None, tmp_path, own=True) as database:
        assert isinstance(database, store.OwnedDatabase)
        database.command("CREATE TABLE numbers (n UInt64) ENGINE = MergeTree ORDER BY n")
        database.insert("numbers", ["n"], [[1, 2, 3]])
        yield database


@pytest.fixture
def reader(owner: store.OwnedDatabase, tmp_path: Path) -> Iterator[Database]:
    with store.connect(None, tmp_path) as database:
        assert database.kind == "owner"
        yield database


def ask(url: str, body: bytes | None, token: str | None, path: str = "/") -> tuple[int, str]:
    """Status and body of one bare HTTP request."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(f"{url}{path}", data=body, headers=headers), timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


def test_values_keep_their_types_on_the_way_through_the_owner(owner: Database, reader: Database) -> None:
    direct, through = owner.query(VALUES), reader.query(VALUES)
    assert direct.column_names == through.column_names
    assert direct.column_types == through.column_types
    for name, left, right in zip(direct.column_names, direct.rows[0], through.rows[0], strict=True):
        assert type(left) is type(right), name
        assert left == right or (name == "none" and left != left and right != right), name
    row = dict(zip(direct.column_names, direct.rows[0], strict=True))
    assert row["big"] == 2**64 - 1
    assert row["bigger"] == -(2**127)
    assert row["id"] == b"\x00\xff\x01"
    assert row["at"].isoformat() == "2026-01-31T12:00:00.123456+00:00"
    without_map = VALUES.replace("toInt128('-170141183460469231731687303715884105728') AS bigger,\n", "").replace("nan AS none,", "")
    assert owner.query_arrow(without_map).equals(reader.query_arrow(without_map))


def test_names_and_types_are_there_without_rows(owner: Database, reader: Database) -> None:
    for database in (owner, reader):
        result = database.query("WITH 1 AS x SELECT n, x AS one FROM numbers WHERE n > {least:UInt64}", {"least": 100})
        assert (result.column_names, result.column_types, result.rows) == (("n", "one"), ("UInt64", "UInt8"), [])


TEXTS = ["x' OR 1 --", "\\'; DROP TABLE numbers; --", "{n:UInt64}", "%s %(a)s", "a\nb\tc\\d\0é\U0001f600", ""]


def test_parameters_are_values_whatever_they_hold(owner: Database, reader: Database) -> None:
    sql = "SELECT {t:String} AS t, {n:UInt64} AS n, {l:Array(String)} AS l, {x:Nullable(String)} AS x"
    for database in (owner, reader):
        for text in TEXTS:
            rows = database.query(sql, {"t": text, "n": 2**64 - 1, "l": [text, "b"], "x": None}).rows
            assert rows == [(text, 2**64 - 1, [text, "b"], None)]
    assert owner.query("SELECT '%' AS percent, count() FROM numbers").rows == [("%", 3)]


CHANGES = [
    "INSERT INTO numbers VALUES (4)",
    "DROP TABLE numbers",
    "SELECT 1 INTO OUTFILE '{folder}/written'",
    "SELECT 1; DROP TABLE numbers",
    "SET readonly = 0",
    "CREATE TEMPORARY TABLE t (x Int8)",
    "SELECT * FROM numbers SETTINGS readonly = 0",
    "SELECT * FROM file('/etc/passwd', LineAsString)",
    "SELECT * FROM url('http://127.0.0.1:9/', LineAsString)",
    "SELECT * FROM executable('id', TSV, 'a String')",
    "INSERT INTO FUNCTION file('{folder}/written') SELECT 1",
    "KILL QUERY WHERE 1",
    "SYSTEM SHUTDOWN",
]


def test_a_query_changes_nothing_and_leaves_the_database(owner: store.OwnedDatabase, reader: Database, tmp_path: Path) -> None:
    found = read_store_file(tmp_path)
    assert found is not None
    for change in CHANGES:
        sql = change.replace("{folder}", str(tmp_path))
        for database in (owner, reader):
            with pytest.raises(KvcensusError):
                database.query(sql)
        status, _ = ask(owner.url, sql.encode(), found.token)  # whatever a client of one's own sends
        assert status >= 400, sql
        assert reader.query("SELECT count() FROM numbers").rows == [(3,)], sql
        assert not (tmp_path / "written").exists(), sql


INSIDE = """
dictionary format fuzzjson fuzzquery generaterandom generateseries generate_series loop merge mergetreeanalyzeindexes
mergetreeanalyzeindexesuuid mergetreecodecblockcounts mergetreeindex mergetreeprojection mergetreetextindex null numbers numbers_mt
primes prometheusquery prometheusqueryrange sqlstandardvalues timeseriesdata timeseriesmetricfamilies timeseriesmetrics
timeseriessamples timeseriesselector timeseriestags values view viewexplain viewifpermitted zeros zeros_mt
"""
"""Table functions of the engine that stay within the store."""


def test_the_table_functions_that_reach_outside_are_known(owner: Database) -> None:
    """A newer engine brings new ones: each belongs into one of the two lists."""
    functions = {name.lower() for (name,) in owner.query("SELECT name FROM system.table_functions").rows if name}
    assert not functions - OUTSIDE - set(INSIDE.split())
    assert not OUTSIDE & set(INSIDE.split())


def test_a_long_query_does_not_hold_up_the_others(owner: store.OwnedDatabase, reader: Database, tmp_path: Path) -> None:
    slow = threading.Thread(target=reader.query, args=("SELECT sleep(3)",))
    with store.connect(None, tmp_path) as other:
        slow.start()
        time.sleep(0.5)
        began = time.monotonic()
        assert other.query("SELECT count() FROM numbers").rows == [(3,)]
        assert time.monotonic() - began < 2
        slow.join()


def test_others_cannot_write(reader: Database) -> None:
    assert not reader.can_write
    for change in (lambda: reader.insert("numbers", ["n"], [[4]]), lambda: reader.command("DROP TABLE numbers"), reader.create_database):
        with pytest.raises(StoreError, match="answers queries only"):
            change()


def test_only_the_token_opens(owner: store.OwnedDatabase, tmp_path: Path) -> None:
    found = read_store_file(tmp_path)
    assert found is not None
    assert found.pid == os.getpid()
    assert stat.S_IMODE((tmp_path / loopback.STORE_FILE).stat().st_mode) == 0o600
    assert ask(owner.url, b"SELECT 1", found.token) == (200, "1\n")
    for token in (None, "", "x", found.token + "x", found.token[:-1]):
        assert ask(owner.url, b"SELECT 1", token)[0] == 401
        assert ask(owner.url, None, token, "/ping")[0] == 401
    assert found.token not in ask(owner.url, b"SELECT 1", "x")[1]


def test_requests_are_bounded_and_settings_are_not_passed_over(owner: store.OwnedDatabase, tmp_path: Path) -> None:
    found = read_store_file(tmp_path)
    assert found is not None

    def status(body: bytes | None, path: str = "/") -> tuple[int, str]:
        return ask(owner.url, body, found.token, path)

    assert status(b"SELECT '" + b"x" * MAX_BODY_BYTES + b"'")[0] == 413
    assert status(b"SELECT 1", "/?max_threads=1") == (400, "settings cannot be changed here: max_threads")
    assert status(b"SELECT 1", "/?database=system")[0] == 404
    assert status(b"\xff")[0] == 400
    assert status(b"")[0] == 403
    assert status(None, "/?query=SELECT%201")[0] == 200
    assert status(b"SELECT {a:String}", "/?param_a=b") == (200, "b\n")
    assert ask(owner.url, b"SELECT count() FROM numbers", found.token) == (200, "3\n"), "it still answers"


def test_too_large_a_result_is_refused(owner: store.OwnedDatabase, reader: Database) -> None:
    for database in (owner, reader):
        for sql in ("SELECT number FROM numbers(6000000)", "SELECT repeat(toString(number % 10), 1000) AS t FROM numbers(500000)"):
            with pytest.raises(StoreError, match="Limit for result exceeded"):
                database.query(sql)
        assert database.query("SELECT 7 AS seven").rows == [(7,)]


FAILING = "SELECT throwIf(number = 100000) AS f, number FROM numbers(110000)"


def test_a_failed_query_leaves_nothing_behind(owner: store.OwnedDatabase, reader: Database) -> None:
    """The engine keeps what a query had produced before it failed, for the next one on the same handle."""
    for database in (owner, reader):
        with pytest.raises(StoreError) as caught:
            database.query(FAILING)
        assert caught.value.code == 395
        assert database.query("SELECT 7 AS seven").rows == [(7,)]
        with pytest.raises(StoreError):
            database.query_arrow(FAILING)
        assert database.query_arrow("SELECT 7 AS seven").to_pylist() == [{"seven": 7}]
    with pytest.raises(StoreError):
        owner.command(FAILING)
    assert owner.insert("numbers", ["n"], [[4]]) == 1
    assert owner.query("SELECT count() FROM numbers").rows == [(4,)]


def test_errors_read_the_same_on_both_ways(owner: store.OwnedDatabase, reader: Database) -> None:
    errors = []
    for database in (owner, reader):
        with pytest.raises(StoreError) as caught:
            database.query("SELECT nothing FROM numbers")
        errors.append(caught.value)
    assert errors[0].detail == errors[1].detail
    assert "UNKNOWN_IDENTIFIER" in errors[0].detail
    assert errors[0].code == errors[1].code == 47
    assert "\n" not in str(errors[1])
    assert "DB::Exception" not in str(errors[1])


def test_columns_of_unequal_length_are_refused(owner: Database) -> None:
    owner.command("CREATE TABLE pairs (a UInt8, b UInt8) ENGINE = Memory")
    with pytest.raises(StoreError, match=r"lengths \[1, 2\]"):
        owner.insert("pairs", ["a", "b"], [[1], [1, 2]])
    with pytest.raises(StoreError, match="insert into pairs"):
        owner.insert("pairs", ["a", "b"], [[1], [-1]])
    assert owner.insert("pairs", ["a", "b"], [[], []]) == 0
    assert owner.insert("pairs", ["a", "b"], [[1], [2]]) == 1
    assert owner.query("SELECT a, b FROM pairs").rows == [(1, 2)]


def test_reads_and_inserts_from_many_threads(owner: Database, reader: Database) -> None:
    failures: list[BaseException] = []

    def guarded(work: object, *arguments: object) -> None:
        try:
            for _ in range(15):
                work(*arguments)  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)

    def check(database: Database) -> None:
        count, total = database.query("SELECT count(), sum(n) FROM numbers").rows[0]
        assert total == 6 + (count - 3) * 10

    threads = [threading.Thread(target=guarded, args=(check, database)) for database in (owner, reader, reader)]
    threads += [threading.Thread(target=guarded, args=(owner.insert, "numbers", ["n"], [[10] * 50])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert reader.query("SELECT count() FROM numbers").rows == [(3 + 2 * 15 * 50,)]


def test_another_process_reads_through_the_owner(owner: store.OwnedDatabase, tmp_path: Path) -> None:
    run = run_python(
        "import sys; from console.cli import main; main()",
        "sql",
        "SELECT sum(n) AS s FROM numbers",
        "--format",
        "csv",
        "--data-dir",
        str(tmp_path),
    )
    assert (run.returncode, run.stdout) == (0, "s\n6\n"), run.stderr


def test_a_proxy_in_the_environment_is_not_asked(owner: store.OwnedDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with store.connect(None, tmp_path) as database:
        assert database.query("SELECT 1 AS one").rows == [(1,)]


def test_there_is_one_owner(owner: store.OwnedDatabase, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"has an owner already: process {os.getpid()}"):
        store.connect(None, tmp_path, own=True)


def test_closing_takes_the_file_away_and_frees_the_folder(tmp_path: Path) -> None:
    database = store.connect(None, tmp_path, own=True)
    assert live_owner(tmp_path) is not None
    database.close()
    database.close()
    assert not (tmp_path / loopback.STORE_FILE).exists()
    with pytest.raises(StoreError, match="closed"):
        database.query("SELECT 1")
    run = run_python(
        "import sys; from pathlib import Path; from sql.store import connect; print(connect(None, Path(sys.argv[1]), own=True).kind)",
        str(tmp_path),
    )
    assert run.stdout == "embedded\n", run.stderr
    assert (tmp_path / loopback.STORE_FILE).exists(), "that process ended without closing"
    with store.connect(None, tmp_path) as reopened:
        assert reopened.kind == "embedded", "its file is stale"


def test_closing_leaves_the_file_of_another_owner(tmp_path: Path) -> None:
    database = store.connect(None, tmp_path, own=True)
    other = json.dumps({"url": "http://127.0.0.1:9", "token": "other", "pid": 1})
    (tmp_path / loopback.STORE_FILE).write_text(other)
    database.close()
    assert (tmp_path / loopback.STORE_FILE).read_text() == other


class _Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"Ok.\n")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_stale_files_are_not_believed(tmp_path: Path) -> None:
    stranger = HTTPServer(("127.0.0.1", 0), _Stranger)
    threading.Thread(target=stranger.serve_forever, daemon=True).start()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    port = stranger.server_address[1]
    try:
        for content in (
            "",
            "{",
            "[]",
            '{"url": "http://127.0.0.1:1", "token": "t"}',
            json.dumps({"url": f"http://127.0.0.1:{port}", "token": "t", "pid": ended.pid}),
            json.dumps({"url": f"http://127.0.0.1:{port}", "token": "t", "pid": os.getpid()}),  # a number used again, a port too
            json.dumps({"url": "http://127.0.0.1:9", "token": "t", "pid": os.getpid()}),
            json.dumps({"url": f"http://localhost:{port}", "token": "t", "pid": os.getpid()}),
        ):
            (tmp_path / loopback.STORE_FILE).write_text(content)
            assert live_owner(tmp_path) is None, content
        with store.connect(None, tmp_path) as database:
            assert database.kind == "embedded"
    finally:
        stranger.shutdown()
        stranger.server_close()


def test_a_folder_held_by_a_process_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LOCK_PATIENCE_S", 0.2)
    script = """
import sys
from pathlib import Path
from sql.store import connect
database = connect(None, Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(FolderLocked, match=f"open in process {holder.pid}, which answers no queries") as caught:
            store.connect(None, tmp_path)
        assert "\n" not in str(caught.value)
    finally:
        holder.communicate(timeout=60)
    with store.connect(None, tmp_path) as database:
        assert database.query("SELECT 1 AS one").rows == [(1,)]


def test_a_folder_that_is_about_to_be_answered_for_is_waited_for(tmp_path: Path) -> None:
    """Between opening the folder and writing store.json an owner holds the lock and cannot be asked."""
    with store.connect(None, tmp_path) as opened:
        script = "import sys; from pathlib import Path; from sql.store import connect; print(connect(None, Path(sys.argv[1])).kind)"
        waiting = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        server = loopback.StoreServer(ReadHandle(Path(opened.place), opened.name), opened.name)
        server.announce(tmp_path)
        try:
            out, err = waiting.communicate(timeout=60)
            assert out == "owner\n", err
        finally:
            server.close()


def test_the_same_folder_twice_in_one_process(tmp_path: Path) -> None:
    with store.connect(None, tmp_path) as first, store.connect(None, tmp_path) as second:
        first.command("CREATE TABLE t (x UInt8) ENGINE = MergeTree ORDER BY x")
        second.insert("t", ["x"], [[1]])
        assert first.query("SELECT x FROM t").rows == [(1,)]


def test_nobody_is_answered_before_the_schema_is_ready(tmp_path: Path) -> None:
    owners: list[Owner | None] = []

    def prepare(database: Database) -> None:
        owners.append(live_owner(tmp_path))
        migrate.apply(database)

    with store.connect(None, tmp_path, own=True, prepare=prepare), store.connect(None, tmp_path) as asked:
        assert asked.kind == "owner"
        assert not migrate.pending(asked)
    assert owners == [None]
