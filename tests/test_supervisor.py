"""Processes kept running as one: real ones, started again, stopped, killed; and a forwarder for each rank of an engine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from console.supervisor import FIRST_DELAY, LONGEST_DELAY, STEADY_SECONDS, Backoff, Ended, Result
from producers import capture
from producers.simulate import recording
from producers.simulate.server import EngineServer, ServerOptions
from schemas.records import Declaration
from tests.forwarding import Topics, frozen_kafka_and_stopping_command, read_topics
from tests.kafka import Kafka
from tests.shared_data import SHIPPED
from tests.wire_engine import quiet_port

ROOT = Path(__file__).parents[1]
PATIENCE = 60.0

# Supervises the programs of argv[1], a JSON list, and prints how it ended.
_SUPERVISE = """
import json, sys
from console.supervisor import Job, supervise
jobs = [Job(f"job {n}", (sys.executable, "-c", program)) for n, program in enumerate(json.loads(sys.argv[1]))]
result = supervise(jobs, lambda line: print(line, file=sys.stderr, flush=True))
print(json.dumps([result.code, [[job.code, job.restarts, job.output.decode()] for job in result.jobs]]))
"""

_UNTIL_TERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])
print("up", flush=True, file=sys.stderr)
while True: time.sleep(1)
"""
_NEVER = """
import os, signal, sys, time
print(f"pid {os.getpid()}", flush=True, file=sys.stderr)
while True: time.sleep(1)  # what we were started with holds SIGTERM back
"""


@contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def supervised(*programs: str) -> Iterator[subprocess.Popen[str]]:
    with running([sys.executable, "-c", _SUPERVISE, json.dumps(programs)]) as process:
        yield process


def ended(process: subprocess.Popen[str]) -> tuple[int, list[list[object]], str]:
    """(the code that stands for all, how each job ended, standard error)."""
    out, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in err, err
    code, jobs = json.loads(out)
    return code, jobs, err


def read_until(process: subprocess.Popen[str], wanted: Callable[[list[str]], bool]) -> list[str]:
    """Lines of standard error until they are what is ``wanted``."""
    assert process.stderr is not None
    lines: list[str] = []
    while not wanted(lines):
        line = process.stderr.readline()
        assert line, lines
        lines.append(line.rstrip())
    return lines


def is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has, too)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def test_the_wait_doubles_to_its_bound_and_begins_anew_after_a_steady_life() -> None:
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.after(STEADY_SECONDS - 0.1) == LONGEST_DELAY
    assert backoff.after(STEADY_SECONDS) == FIRST_DELAY
    assert backoff.after(1.0) == 2 * FIRST_DELAY


@pytest.mark.parametrize(
    ("codes", "killed", "code"),
    [
        ([0, 0], False, 0),
        ([0, 1], False, 1),
        ([0, None], False, 1),
        ([-9, 0], False, 1),
        ([1, 2], False, 2),
        ([0, -9], True, 130),
        ([2, -9], True, 2),
    ],
)
def test_one_code_stands_for_all(codes: list[int | None], killed: bool, code: int) -> None:
    assert Result([Ended("x", one, 0, b"") for one in codes], killed).code == code


def test_what_ends_well_has_ended_and_is_told_apart() -> None:
    with supervised(
        "import sys; print('document'); print('line', file=sys.stderr)", "import sys; sys.stderr.write('no newline')"
    ) as process:
        code, jobs, err = ended(process)
    assert (code, jobs) == (0, [[0, 0, "document\n"], [0, 0, ""]])
    assert sorted(err.splitlines()) == ["job 0: line", "job 1: no newline"]


def test_what_dies_is_started_again(tmp_path: Path) -> None:
    mark = tmp_path / "died"
    dies_once = (
        f"import os, pathlib; p = pathlib.Path({str(mark)!r}); f = p.exists(); p.touch(); f or os.kill(os.getpid(), 9); print('well')"
    )
    with supervised(dies_once, "pass") as process:
        code, jobs, err = ended(process)
    assert (code, jobs) == (0, [[0, 1, "well\n"], [0, 0, ""]])
    assert "job 0: was killed by signal 9; starting it again in 0.5 s" in err


def test_a_usage_error_stops_all() -> None:
    with supervised(_UNTIL_TERM, "raise SystemExit(2)") as process:
        code, jobs, err = ended(process)
    assert (code, jobs[1][:2]) == (2, [2, 0])
    assert jobs[0][:2] == [0, 0]
    assert "job 1: ended with code 2, and would again: stopping all" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_and_waited_for(number: signal.Signals) -> None:
    with supervised(_UNTIL_TERM, _UNTIL_TERM) as process:
        read_until(process, lambda lines: sorted(lines) == ["job 0: up", "job 1: up"])
        process.send_signal(number)
        code, jobs, _ = ended(process)
    assert (code, jobs) == (0, [[0, 0, ""], [0, 0, ""]])


def test_a_signal_that_comes_before_a_child_has_handlers_waits_for_them() -> None:
    slow = "import sys; print('begun', file=sys.stderr, flush=True); import time; time.sleep(0.5)\n" + _UNTIL_TERM
    with supervised(slow) as process:
        read_until(process, lambda lines: lines == ["job 0: begun"])
        process.send_signal(signal.SIGTERM)
        code, jobs, _ = ended(process)
    assert (code, jobs) == (0, [[0, 0, ""]])


def test_a_second_signal_kills() -> None:
    with supervised(_NEVER, _UNTIL_TERM) as process:
        read_until(process, lambda lines: len(lines) == 2)
        process.send_signal(signal.SIGTERM)
        read_until(process, lambda lines: lines[-1:] == ["stopping all; once more to leave at once"])
        process.send_signal(signal.SIGTERM)
        code, jobs, _ = ended(process)
    assert code == 130
    assert jobs[0][0] == -signal.SIGKILL


def test_a_stop_does_not_wait_for_what_waits_to_be_started_again() -> None:
    with supervised("raise SystemExit(1)") as process:
        read_until(process, lambda lines: lines[-1:] == ["job 0: ended with code 1; starting it again in 2 s"])
        process.send_signal(signal.SIGTERM)
        code, jobs, _ = ended(process)
    assert (code, jobs) == (1, [[1, 2, ""]])


@pytest.mark.skipif(sys.platform != "linux", reason="only the kernel of Linux promises it")
def test_children_end_with_a_parent_that_is_killed() -> None:
    with supervised(_NEVER, _NEVER) as process:
        lines = read_until(process, lambda lines: len(lines) == 2)
        pids = [int(line.rpartition(" ")[2]) for line in lines]
        assert not any(map(is_gone, pids))
        process.kill()
        wait_for(lambda: all(map(is_gone, pids)), "the children's end")


# -- the command


@contextmanager
def two_ranks() -> Iterator[tuple[int, int, dict[int, int]]]:
    """A data-parallel engine of two ranks that plays a capture: (event port, replay port, batches by rank)."""
    path = SHIPPED / "g_dp2.frames.jsonl.gz"
    sources = recording.from_capture("chat", path, Declaration(reuse_reporting="unlabelled", removals="per_copy"))
    assert [source.dp_rank for source in sources] == [0, 1]
    port, replay = _pair(), _pair()
    with EngineServer(sources, ServerOptions(speed=None, port=port, replay_port=replay, wait_subscribers=1)):
        yield port, replay, {rank: len(frames) for rank, frames in capture.ranks(path).items()}


def _pair() -> int:
    """The first of two neighbouring ports that are both free."""
    while True:
        port = quiet_port()
        if _free(port + 1):
            return port


def _free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def forward_many(port: int, replay: int, tmp_path: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "console.cli", "forward", "--instance", "chat", "--dp-size", "2", "--json"),
        *("--endpoint", f"tcp://127.0.0.1:{port}", "--replay-endpoint", f"tcp://127.0.0.1:{replay}"),
        *("--data-dir", str(tmp_path), "--metrics-listen", "127.0.0.1:0", *more),
    ]


def test_a_forwarder_for_each_rank(kafka: Kafka, tmp_path: Path) -> None:
    """Both ranks arrive whole; one forwarder is killed meanwhile and the stream goes on; one signal ends it all well."""
    with (
        two_ranks() as (port, replay, batches),
        running(forward_many(port, replay, tmp_path, "--bootstrap-servers", kafka.bootstrap_servers)) as process,
    ):
        read_topics(kafka.bootstrap_servers, lambda found: whole(found, batches))
        victim = _child(process.pid, "1")
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: _child(process.pid, "1") not in (None, victim), "another forwarder for rank 1")
        lines = read_until(process, lambda lines: sum("forwarding chat/1" in line for line in lines) == 2)
        # The successor speaks on its own: only then is there something to stop.
        read_topics(kafka.bootstrap_servers, lambda found: sum(record.kind == "start" for record in found.lifecycle) == 3)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)
        read_topics(kafka.bootstrap_servers, lambda found: sum(record.kind == "stop" for record in found.lifecycle) == 2)
    assert process.returncode == 0, err
    document = json.loads(out)
    assert (document["instance_id"], document["dp_size"]) == ("chat", 2)
    assert [(rank["dp_rank"], rank["exit_code"], rank["restarts"]) for rank in document["ranks"]] == [(0, 0, 0), (1, 0, 1)]
    assert document["ranks"][0]["batches"] == batches[0]
    assert [line for line in [*lines, *err.splitlines()] if not re.match(r"rank [01]: |\d forwarders|made a new|stopping all", line)] == []
    assert "rank 1: was killed by signal 9; starting it again in 0.5 s" in lines


def whole(found: Topics, batches: Mapping[int, int]) -> bool:
    """Whether every batch of every rank is there."""
    seen = {(message.dp_rank, message.seq) for message in found.batches}
    return seen == {(rank, seq) for rank, count in batches.items() for seq in range(count)}


def _child(parent: int, rank: str) -> int | None:
    """The process that forwards this rank for ``parent``."""
    for pid in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in pid.read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            if words[-3:-1] == ["--child-rank", rank]:
                return int(child)
    return None


def test_a_supervised_forwarder_takes_a_repeated_signal_for_one(tmp_path: Path) -> None:
    """Who stops a group of processes signals each of them, and the supervisor passes it on once more."""
    with frozen_kafka_and_stopping_command(tmp_path, "--stop-timeout", "0.5", "--dp-size", "1", "--child-rank", "0") as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, err
    assert "not delivered to Kafka" in err


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the file is read again")
def test_what_becomes_of_the_configuration_file_changes_nothing_until_the_end(tmp_path: Path) -> None:
    """A file that is broken while it runs must not end what runs."""
    file = tmp_path / "forwarder.toml"
    file.write_text("stop-timeout = 0.1\n[labels]\na = 'b'\n")
    command = forward_many(quiet_port(), quiet_port(), tmp_path, "--bootstrap-servers", "127.0.0.1:9", "--config", str(file))
    with running(command) as process:
        read_until(process, lambda lines: any("forwarders, for ranks" in line for line in lines))
        file.write_text("nonsense")
        wait_for(lambda: _child(process.pid, "1") is not None, "a forwarder for rank 1")
        os.kill(_child(process.pid, "1") or 0, signal.SIGKILL)
        read_until(process, lambda lines: any("starting it again" in line for line in lines))
        read_until(process, lambda lines: any("rank 1" in line and "own metrics" in line for line in lines))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, err
    assert [rank["exit_code"] for rank in json.loads(out)["ranks"]] == [1, 1]


def test_a_mistake_ends_all_before_anything_is_started(tmp_path: Path) -> None:
    with running(forward_many(1, 1, tmp_path, "--bootstrap-servers", "127.0.0.1:9", "--key-file", "/nowhere/key")) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (1, "")
    assert err == "kvcensus: key file /nowhere/key: No such file or directory; create one or name another with --key-file\n"
