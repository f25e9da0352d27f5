"""The simulated engines' sockets and the ``kvcensus simulate`` command, over real ZeroMQ and real files."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from click.testing import CliRunner, Result

from console.cli import cli
from producers import capture, wire
from producers.simulate import fleet, presets, recording
from producers.simulate.encode import encode_batch
from producers.simulate.events import AllBlocksCleared
from producers.simulate.fleet import FleetSpec, InstanceSpec
from producers.simulate.server import END_MARKER, EngineServer, RankEndpoint, ServerOptions
from producers.simulate.source import RankSource, SourceBatch
from producers.simulate.workload import WorkloadSpec
from schemas.errors import KvcensusError
from schemas.records import Declaration
from tests.shared_data import capture_path

DECLARED = Declaration(reuse_reporting="none", removals="per_copy", model="m", workload="w")
START_US = 1_796_000_000_000_000
PATIENCE_S = 60
"""Long enough for any machine: what is waited for comes, or the test fails."""

FAST = ServerOptions(speed=None, wait_subscribers=1)


def batch(seq: int, life: int = 0, at_us: int | None = None, filler: bytes = b"") -> SourceBatch:
    at = START_US + seq * 1000 + life * 10_000_000 if at_us is None else at_us
    return SourceBatch(life, seq, at, encode_batch(at, [AllBlocksCleared()], 0) + filler)


def source(batches: list[SourceBatch], name: str = "sim", dp_rank: int = 0) -> RankSource:
    return RankSource(name, dp_rank, batches, DECLARED, START_US)


def frames_of(one: RankSource) -> list[list[bytes]]:
    return [[one.topic, b.seq.to_bytes(8, "big"), b.payload] for b in one.batches]


@contextmanager
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield made
    finally:
        made.destroy(linger=0)


class Client:
    """A subscriber and a replay client of one rank."""

    def __init__(self, owner: zmq.Context[zmq.Socket[bytes]], rank: RankEndpoint, topic: bytes = b"") -> None:
        self.sub = owner.socket(zmq.SUB)
        self.sub.set_hwm(0)
        self.sub.setsockopt(zmq.RECONNECT_IVL, 20)
        self.sub.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
        self.sub.subscribe(topic)
        self.sub.connect(rank.endpoint)
        self.dealer = owner.socket(zmq.DEALER)
        self.dealer.set_hwm(0)
        self.dealer.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
        self.dealer.connect(rank.replay_endpoint)

    def take(self, count: int) -> list[list[bytes]]:
        return [self.sub.recv_multipart() for _ in range(count)]

    def nothing_more(self) -> bool:
        return not self.sub.poll(100)

    def replay(self, start: int) -> list[list[bytes]]:
        """Every answer up to and with the end marker."""
        self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        answers = []
        while True:
            answers.append(self.dealer.recv_multipart())
            if answers[-1][-2] == END_MARKER:
                return answers


def test_a_subscriber_gets_every_batch_of_its_rank_in_order() -> None:
    ranks = [source([batch(seq) for seq in range(50)]), source([batch(seq) for seq in range(30)], dp_rank=1)]
    with EngineServer(ranks, FAST) as server, context() as owner:
        endpoints = server.endpoints()
        assert [(rank.instance_id, rank.dp_rank, rank.batches_per_life) for rank in endpoints] == [("sim", 0, [50]), ("sim", 1, [30])]
        assert all(rank.declaration == DECLARED for rank in endpoints)
        assert len({rank.endpoint for rank in endpoints} | {rank.replay_endpoint for rank in endpoints}) == 4
        clients = [Client(owner, rank) for rank in endpoints]
        for one, client in zip(ranks, clients, strict=True):
            assert client.take(len(list(one.batches))) == frames_of(one)
        assert server.wait_finished(PATIENCE_S)
        assert all(client.nothing_more() for client in clients)
        assert [(rank.published, rank.finished, rank.subscribers) for rank in server.progress()] == [(50, True, 1), (30, True, 1)]


@pytest.mark.parametrize("layout", ["topic", "bare"])
def test_replay_answers_from_the_number_asked_for_in_both_layouts(layout: Any) -> None:
    one = source([batch(seq) for seq in range(20)])
    with EngineServer([one], replace(FAST, wait_subscribers=0, replay_layout=layout)) as server, context() as owner:
        assert server.wait_finished(PATIENCE_S)
        client = Client(owner, server.endpoints()[0])
        lead = [b"", one.topic] if layout == "topic" else [b""]
        end = [*([b"", b""] if layout == "topic" else [b""]), END_MARKER, b""]
        everything = [[*lead, *frames[1:]] for frames in frames_of(one)]
        assert client.replay(0) == [*everything, end]
        assert client.replay(15) == [*everything[15:], end]
        assert client.replay(20) == [end]
        assert server.progress()[0].replays == 3


def test_the_replay_buffer_keeps_the_newest_batches_and_a_malformed_request_gets_no_answer() -> None:
    one = source([batch(seq) for seq in range(20)])
    with EngineServer([one], replace(FAST, wait_subscribers=0, buffer_batches=5)) as server, context() as owner:
        assert server.wait_finished(PATIENCE_S)
        client = Client(owner, server.endpoints()[0])
        client.dealer.send_multipart([b"", b"too", b"many"])
        client.dealer.send_multipart([b"nothing"])
        assert [answer[-2] for answer in client.replay(0)[:-1]] == [seq.to_bytes(8, "big") for seq in range(15, 20)]
        assert not client.dealer.poll(100)
        assert server.progress()[0].bad_requests == 2


def test_a_request_socket_gets_the_first_answer() -> None:
    one = source([batch(seq) for seq in range(3)])
    with EngineServer([one], replace(FAST, wait_subscribers=0)) as server, context() as owner:
        assert server.wait_finished(PATIENCE_S)
        asking = owner.socket(zmq.REQ)
        asking.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
        asking.connect(server.endpoints()[0].replay_endpoint)
        asking.send((1).to_bytes(8, "big"))
        assert asking.recv_multipart() == [one.topic, (1).to_bytes(8, "big"), batch(1).payload]


def test_a_large_replay_has_holes_as_vllms_has_unless_the_queue_is_unbounded() -> None:
    # Larger than what the kernel and both queues take while the client does not read.
    one = source([batch(seq, filler=bytes(60_000)) for seq in range(3_000)])
    for replay_hwm, whole in ((1_000, False), (0, True)):
        with EngineServer([one], replace(FAST, wait_subscribers=0, replay_hwm=replay_hwm)) as server, context() as owner:
            assert server.wait_finished(PATIENCE_S)
            asking = owner.socket(zmq.DEALER)
            asking.setsockopt(zmq.RCVHWM, 1)
            asking.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
            asking.connect(server.endpoints()[0].replay_endpoint)
            asking.send_multipart([b"", bytes(8)])
            while not server.progress()[0].replays:
                threading.Event().wait(0.01)
            if whole:
                answers = [asking.recv_multipart() for _ in range(3_001)]
                assert answers[-1][-2] == END_MARKER
            else:
                received = 0
                while asking.poll(300):
                    asking.recv_multipart()
                    received += 1
                assert 0 < received < 3_000


def test_replay_is_answered_while_batches_are_being_published() -> None:
    one = source([batch(seq) for seq in range(10)] + [batch(10, at_us=START_US + 3600 * 1_000_000)])
    with EngineServer([one], ServerOptions(wait_subscribers=1)) as server, context() as owner:
        client = Client(owner, server.endpoints()[0])
        assert client.take(10) == frames_of(one)[:10]
        assert [answer[-2:] for answer in client.replay(4)[:-1]] == [frames[1:] for frames in frames_of(one)[4:10]]
        assert not server.wait_finished(0)
    # Leaving in the middle of an hour's pause ends at once.


@pytest.mark.parametrize("rebind", [False, True])
def test_a_restart_begins_at_zero_with_an_empty_replay_buffer_on_the_same_endpoint(rebind: bool) -> None:
    one = source([batch(seq) for seq in range(8)] + [batch(seq, life=1) for seq in range(5)])
    with EngineServer([one], replace(FAST, rebind=rebind)) as server, context() as owner:
        (rank,) = server.endpoints()
        assert rank.batches_per_life == [8, 5]
        client = Client(owner, rank)
        assert client.take(13) == frames_of(one)
        assert server.wait_finished(PATIENCE_S)
        assert [answer[-1] for answer in client.replay(0)[:-1]] == [b.payload for b in list(one.batches)[8:]]
        assert server.progress()[0].life == 1
        # The endpoint is the one that was announced.
        late = Client(owner, rank)
        assert len(late.replay(0)) == 6


def test_a_process_is_not_back_at_once_and_meanwhile_the_old_life_is_replayed_and_the_others_go_on() -> None:
    back = source([batch(seq) for seq in range(3)] + [batch(0, life=1)])
    other = source([batch(seq, at_us=START_US + seq * 60_000_000) for seq in range(40)], "other")
    with EngineServer([back, other], replace(FAST, restart_pause_s=3600.0)) as server, context() as owner:
        one, two = (Client(owner, rank) for rank in server.endpoints())
        assert two.take(40) == frames_of(other)
        assert one.take(3) == frames_of(back)[:3]
        assert one.nothing_more()
        assert [answer[-1] for answer in one.replay(0)[:-1]] == [b.payload for b in list(back.batches)[:3]]
        assert not server.wait_finished(0)


def test_nothing_is_published_before_every_rank_has_its_subscriber() -> None:
    ranks = [source([batch(0)]), source([batch(0)], dp_rank=1)]
    with EngineServer(ranks, FAST) as server, context() as owner:
        first = Client(owner, server.endpoints()[0])
        assert first.nothing_more()
        assert not server.wait_started(0)
        second = Client(owner, server.endpoints()[1])
        assert first.take(1) == second.take(1) == frames_of(ranks[0])


def test_waiting_for_subscribers_can_be_bounded_and_stopped() -> None:
    with EngineServer([source([batch(0)])], FAST, wait_timeout_s=0.05) as server:
        assert server.wait_finished(PATIENCE_S)
    with EngineServer([source([batch(0)])], FAST) as server:
        server.stop()
        assert server.progress()[0].published == 0
        server.stop()


def test_a_subscriber_to_another_topic_hears_nothing() -> None:
    one = source([batch(0)])
    with EngineServer([one], FAST) as server, context() as owner:
        client = Client(owner, server.endpoints()[0], b"kv@")
        assert server.wait_finished(PATIENCE_S)
        assert client.nothing_more()


def test_without_pacing_a_slow_subscriber_is_waited_for() -> None:
    """A real engine would not outrun it for long; here the queue is so short that anything lost would show."""
    one = source([batch(seq, filler=bytes(20_000)) for seq in range(3_000)])
    with EngineServer([one], replace(FAST, hwm=10)) as server, context() as owner:
        client = Client(owner, server.endpoints()[0])
        client.sub.setsockopt(zmq.RCVHWM, 10)
        assert [frames[1] for frames in client.take(3_000)] == [seq.to_bytes(8, "big") for seq in range(3_000)]


def test_rebasing_moves_engine_time_to_now_and_keeps_the_distances() -> None:
    unreadable = SourceBatch(0, 3, START_US + 3000, b"\xc1 no msgpack")
    one = source([*(batch(seq) for seq in range(3)), unreadable])
    with EngineServer([one], replace(FAST, rebase=True)) as server, context() as owner:
        client = Client(owner, server.endpoints()[0])
        *moved, kept = client.take(4)
        assert kept[2] == unreadable.payload
        times = [wire.decode(frames[2]).at_us for frames in moved]
        assert [times[1] - times[0], times[2] - times[1]] == [1000, 1000]
        assert times[0] > START_US + 1_000_000 or times[0] < START_US - 1_000_000
        assert [wire.decode(frames[2]).events for frames in moved] == [wire.decode(b.payload).events for b in list(one.batches)[:3]]
        assert [answer[-1] for answer in client.replay(0)[:-1]] == [frames[2] for frames in [*moved, kept]]


def test_scaled_time_keeps_up_with_the_clock() -> None:
    one = source([batch(0, at_us=START_US), batch(1, at_us=START_US + 50_000_000)])
    with EngineServer([one], ServerOptions(speed=1000.0, rebase=True, scale_time=True, wait_subscribers=1)) as server, context() as owner:
        times = [wire.decode(frames[2]).at_us for frames in Client(owner, server.endpoints()[0]).take(2)]
        assert times[1] - times[0] == 50_000


def test_sources_of_different_times_start_together() -> None:
    early, late = source([batch(seq) for seq in range(3)], "early"), source([batch(seq, life=0) for seq in range(3)], "late")
    far = [b._replace(at_us=b.at_us + 10**12) for b in late.batches]
    late = replace(late, batches=far, origin_us=START_US + 10**12)
    with EngineServer([early, late], ServerOptions(wait_subscribers=1)) as server, context() as owner:
        clients = [Client(owner, rank) for rank in server.endpoints()]
        assert [len(client.take(3)) for client in clients] == [3, 3]
        assert server.wait_finished(PATIENCE_S)


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_a_port_in_use_is_said_and_leaves_nothing_open() -> None:
    with taken_port() as port, pytest.raises(KvcensusError, match=rf"127.0.0.1:{port}: can't be bound: .* in use; choose another --port"):
        EngineServer([source([batch(0)])], ServerOptions(port=port)).start()


def free_ports(count: int) -> int:
    """The first of ``count`` neighbouring ports that are free at the moment."""
    for first in range(21_000, 32_000, count):
        held = []
        try:
            for port in range(first, first + count):
                held.append(socket.socket())
                held[-1].bind(("127.0.0.1", port))
        except OSError:
            continue
        else:
            return first
        finally:
            for one in held:
                one.close()
    raise AssertionError("no free ports")


def test_ranks_take_neighbouring_ports_and_replay_comes_behind_them() -> None:
    first = free_ports(6)
    ranks = [source([batch(0)], dp_rank=rank) for rank in range(3)]
    with EngineServer(ranks, ServerOptions(port=first, speed=None)) as server:
        assert [rank.endpoint for rank in server.endpoints()] == [f"tcp://127.0.0.1:{first + n}" for n in range(3)]
        assert [rank.replay_endpoint for rank in server.endpoints()] == [f"tcp://127.0.0.1:{first + 3 + n}" for n in range(3)]


@pytest.mark.parametrize(
    ("options", "ranks", "complaint"),
    [
        (ServerOptions(speed=0.0), 1, "speed must be above 0"),
        (ServerOptions(port=5557, replay_port=5558), 2, "collide from rank 1 on"),
        (ServerOptions(port=65_535), 2, "--port 65535"),
        (ServerOptions(), 0, "nothing to serve"),
    ],
)
def test_options_that_cannot_work_are_refused(options: ServerOptions, ranks: int, complaint: str) -> None:
    with pytest.raises(KvcensusError, match=complaint):
        EngineServer([source([batch(0)], dp_rank=rank) for rank in range(ranks)], options)


def test_two_sources_of_one_rank_are_refused() -> None:
    with pytest.raises(KvcensusError, match="two sources for sim/0"):
        EngineServer([source([batch(0)]), source([batch(1)])])


def test_a_source_that_fails_ends_the_server_with_its_error() -> None:
    class Failing:
        def __iter__(self) -> Iterator[SourceBatch]:
            yield batch(0)
            raise KvcensusError("no more")

    server = EngineServer([RankSource("sim", 0, Failing(), DECLARED, START_US)], ServerOptions(speed=None)).start()
    with pytest.raises(KvcensusError, match="no more"):
        server.wait_finished(PATIENCE_S)
    server.stop()


def test_a_whole_fleet_is_served_from_batches_made_on_the_way() -> None:
    spec = presets.test_fleets()["flush-and-restart"]
    with EngineServer(fleet.sources(spec, lazy=True), FAST) as server, context() as owner:
        clients = [Client(owner, rank) for rank in server.endpoints()]
        for one, client in zip(fleet.sources(spec), clients, strict=True):
            assert client.take(len(list(one.batches))) == frames_of(one)


# -------------------------------------------------------------------------------------------------------------- captures


def test_the_ranks_of_a_capture_are_served_apart() -> None:
    path = capture_path("g_dp2.frames.jsonl.gz")
    ranks = recording.from_capture("g", path, DECLARED)
    assert [one.key for one in ranks] == ["g/0", "g/1"]
    with EngineServer(ranks, FAST) as server, context() as owner:
        clients = [Client(owner, rank) for rank in server.endpoints()]
        for number, client in enumerate(clients):
            recorded = [[f.topic, f.seq.to_bytes(8, "big"), f.payload] for f in capture.ranks(path)[number]]
            assert client.take(len(recorded)) == recorded


def test_a_capture_that_does_not_begin_at_zero_is_served_as_it_is() -> None:
    (one,) = recording.from_capture("b", capture_path("b_pressure.frames.jsonl.gz"), DECLARED)
    with EngineServer([one], replace(FAST, wait_subscribers=0)) as server, context() as owner:
        assert server.wait_finished(PATIENCE_S)
        answers = Client(owner, server.endpoints()[0]).replay(0)
        assert int.from_bytes(answers[0][-2], "big") == 46
        assert len(answers) == len(list(one.batches)) + 1


def test_what_is_written_reads_back_as_it_was_and_is_the_same_each_time(tmp_path: Path) -> None:
    spec = presets.demo_fleet()
    made = fleet.sources(spec)
    written = recording.write(made, tmp_path / "fleet.frames.jsonl.gz")
    assert {name: target.name for name, (target, _) in written.items()} == {
        name: f"fleet.{name}.frames.jsonl.gz" for name in ("chat-a", "chat-b", "agents-a", "agents-b")
    }
    for name, (target, count) in written.items():
        back = recording.from_capture(name, target, made[0].declaration)
        originals = [one for one in made if one.instance_id == name]
        # A capture of frames holds no metrics.
        assert [list(one.batches) for one in back] == [[batch._replace(reading=None) for batch in one.batches] for one in originals]
        assert count == sum(len(list(one.batches)) for one in originals)
    first = {target: target.read_bytes() for target, _ in written.values()}
    again = recording.write(fleet.sources(spec, lazy=True), tmp_path / "fleet.frames.jsonl.gz")
    assert {target: target.read_bytes() for target, _ in again.values()} == first


def test_repeated_frames_of_a_capture_are_no_restart(tmp_path: Path) -> None:
    one = source([batch(0), batch(1), batch(1), batch(0, life=1)])
    ((target, _),) = recording.write([one], tmp_path / "x.frames.jsonl.gz").values()
    (back,) = recording.from_capture("x", target, DECLARED)
    assert [(b.life, b.seq) for b in back.batches] == [(0, 0), (0, 1), (0, 1), (1, 0)]


# --------------------------------------------------------------------------------------------------------------- command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", *arguments])


def run_raising(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", *arguments], catch_exceptions=False)


def test_the_command_writes_captures_of_a_synthetic_fleet(tmp_path: Path) -> None:
    target = tmp_path / "fleet.frames.jsonl.gz"
    shape = ["--synthetic", "--ranks", "4", "--dp-size", "2", "--seed", "5", "--duration", "8", "--restart-every", "3", "--salts", "2"]
    done = run(*shape, "--write", str(target), "--json")
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    files = json.loads(line)["files"]
    assert [one["instance_id"] for one in files] == ["sim-0", "sim-1"]
    for one in files:
        ranks = recording.from_capture(one["instance_id"], Path(one["path"]), DECLARED)
        assert [rank.dp_rank for rank in ranks] == [0, 1]
        assert all(len(rank.batches_per_life() or ()) == 2 for rank in ranks)
        assert one["messages"] == sum(len(list(rank.batches)) for rank in ranks)


def test_a_capture_that_cannot_be_written_whole_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.frames.jsonl.gz"
    target.write_bytes(b"before")
    before = recording._write_one

    def full(ranks: Sequence[RankSource], raw: io.BufferedWriter) -> int:
        before(ranks, raw)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recording, "_write_one", full)
    with pytest.raises(KvcensusError, match="can't be written: No space left"):
        run_raising("--synthetic", "--instances", "1", "--duration", "2", "--write", str(target))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(target.name, b"before")]


def test_the_command_writes_a_trace_and_says_what_does_not_fit(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1000, "output_length": 4, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(line) + "\n" + json.dumps({**line, "timestamp": 500, "input_length": 3000, "hash_ids": [1, 2, 3, 4, 5, 6]}))
    target = tmp_path / "t.frames.jsonl.gz"
    done = run("--trace", str(trace), "--instances", "1", "--pool-blocks", "100", "--write", str(target))
    assert done.exit_code == 0, done.output
    assert "1 requests were refused" in done.stderr
    events = [event for frame in capture.read(target) for event in wire.decode(frame.payload).events]
    assert sum(len(event.block_hashes) for event in events if isinstance(event, wire.Stored)) == 62


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ([], 2, "nothing to serve"),
        (["--synthetic", "--preset", "demo"], 2, "give one"),
        (["--synthetic", "--ranks", "3", "--dp-size", "2"], 2, "no multiple"),
        (["--synthetic", "--ranks", "4", "--instances", "2"], 2, "give one"),
        (["--synthetic", "--limit", "3"], 2, "--limit has no effect on --synthetic"),
        (["--preset", "demo", "--pool-blocks", "3"], 2, "--pool-blocks has no effect on --preset demo"),
        (["--synthetic", "--scale-time"], 2, "--rebase"),
        (["--synthetic", "--metrics-fault", "busy"], 2, "--metrics-port"),
        (["--synthetic", "--speed", "fast"], 2, "neither a number above 0 nor 'max'"),
        (["--synthetic", "--duration", "0"], 2, "--duration"),
        (["--preset", "nothing"], 2, "--preset"),
        (["x=a.gz", "y=b.gz", "--instance", "z"], 2, "--instance names one capture"),
        (["no-such.frames.jsonl.gz"], 1, "no-such.frames.jsonl.gz"),
        (["--trace", "no-such.jsonl"], 1, "no such trace"),
        (["--preset", "demo", "--write", "no/such/folder/x.frames.jsonl.gz"], 1, "can't be written"),
    ],
)
def test_mistakes_are_one_clear_line(arguments: list[str], code: int, complaint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "console.cli", "simulate", *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == code, done.stderr
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def served(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "console.cli", "simulate", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_waits_for_its_subscriber_and_ends_cleanly_on_a_signal(ending: signal.Signals, tmp_path: Path) -> None:
    one = source([batch(seq) for seq in range(5)])
    ((target, _),) = recording.write([one], tmp_path / "x.frames.jsonl.gz").values()
    arguments = (f"mine={target}", "--speed", "max", "--wait-subscribers", "1", "--json", "--model", "m", "--removals", "last_copy")
    facts = ("--gpus-per-rank", "2", "--kv-bytes-per-token", "128KiB", "--prefill-rate", "12345678.5")
    told = "--gpus-per-rank 2 --kv-bytes-per-token 131072 --prefill-rate 12345678.5"
    with served(*arguments, *facts) as process, context() as owner:
        assert process.stdout is not None
        serving = json.loads(process.stdout.readline())
        (rank,) = serving["ranks"]
        assert (rank["instance_id"], rank["dp_rank"], rank["batches_per_life"]) == ("mine", 0, [5])
        assert rank["declaration"]["reuse_reporting"] == "unlabelled"
        forward = " ".join(rank["forward"])
        assert forward.startswith("kvcensus forward ")
        for part in (rank["endpoint"], rank["replay_endpoint"], "--instance mine", "--model m", "--removals last_copy", told):
            assert part in forward
        subscriber = owner.socket(zmq.SUB)
        subscriber.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
        subscriber.subscribe(b"")
        subscriber.connect(rank["endpoint"])
        assert [subscriber.recv_multipart() for _ in range(5)] == frames_of(one)
        assert json.loads(process.stdout.readline()) == {"event": "started"}
        finished = json.loads(process.stdout.readline())
        assert (finished["event"], finished["ranks"][0]["published"]) == ("finished", 5)
        process.send_signal(ending)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_command_that_is_interrupted_before_its_end_says_so_by_its_code() -> None:
    with served("--synthetic", "--wait-subscribers", "1", "--json") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_the_command_ends_by_itself_after_its_linger() -> None:
    done = run("--synthetic", "--duration", "2", "--instances", "1", "--speed", "max", "--linger", "0")
    assert done.exit_code == 0, done.output
    assert "kvcensus forward --endpoint tcp://127.0.0.1:" in done.stdout
    assert "--reuse-reporting none" in done.stdout
    assert "all batches are published" in done.stderr


def test_a_port_in_use_is_one_line_and_code_1() -> None:
    with taken_port() as port:
        done = subprocess.run(
            [sys.executable, "-m", "console.cli", "simulate", "--synthetic", "--duration", "1", "--instances", "1", "--port", str(port)],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"{port}: can't be bound" in done.stderr


def test_flushes_and_restarts_take_turns_among_the_instances(tmp_path: Path) -> None:
    target = tmp_path / "f.frames.jsonl.gz"
    done = run("--synthetic", "--instances", "2", "--duration", "10", "--flush-every", "3", "--rate", "20", "--write", str(target))
    assert done.exit_code == 0, done.output
    cleared = {
        name: [
            type(event) for frame in capture.read(tmp_path / f"f.{name}.frames.jsonl.gz") for event in wire.decode(frame.payload).events
        ].count(wire.Cleared)
        for name in ("sim-0", "sim-1")
    }
    # At 3 s the first, at 6 s the second, at 9 s the first again.
    assert cleared == {"sim-0": 2, "sim-1": 1}


def test_a_spec_made_by_hand_is_served_like_a_preset() -> None:
    spec = FleetSpec((InstanceSpec("a", "w", model="m"),), (WorkloadSpec("w", rate=20.0),), 3.0)
    (one,) = fleet.sources(spec)
    with EngineServer([one], FAST) as server, context() as owner:
        (rank,) = server.endpoints()
        assert rank.declaration == Declaration(reuse_reporting="none", removals="per_copy", workload="w", model="m")
        assert Client(owner, rank).take(len(list(one.batches))) == frames_of(one)
