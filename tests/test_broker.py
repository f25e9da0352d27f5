"""The embedded broker: it comes up, carries messages, goes away, and never outlives its parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Message, Producer

from console import broker as broker_module
from console import child
from console.broker import BrokerKind, chosen_kind, find_bootstrap_servers, running_broker, start_broker
from console.topic_admin import create_topics
from schemas.errors import KvcensusError
from schemas.topics import BATCHES

KINDS: tuple[BrokerKind, ...] = ("tansu", "noida")

pytestmark = pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="no embedded broker for this platform")


def eventually(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether ``condition`` comes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def alive(pid: int) -> bool:
    """Whether a process of that number runs; one that has ended and waits to be collected doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> BrokerKind:
    chosen: BrokerKind = request.param
    if chosen == "noida":
        pytest.importorskip("noida_db")
    return chosen


def read(servers: str, topic: str, count: int) -> list[Message]:
    """The first ``count`` messages of ``topic``, read as a group from its beginning."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "kvcensus-test",
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 6000,
        }
    )
    consumer.subscribe([topic])
    messages: list[Message] = []
    try:
        deadline = time.monotonic() + 60
        while len(messages) < count and time.monotonic() < deadline:
            messages += consumer.consume(count - len(messages), 0.5)
    finally:
        consumer.close()
    assert not [message.error() for message in messages if message.error()]
    return messages


def test_messages_arrive_in_order_on_the_partition_of_their_key(kind: BrokerKind, tmp_path: Path) -> None:
    with start_broker(kind, tmp_path) as broker:
        create_topics(broker.bootstrap_servers, 4)
        producer = Producer(
            {
                "bootstrap.servers": broker.bootstrap_servers,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "message.max.bytes": 16_000_000,
            }
        )
        sent = [(f"rank/{n % 5}", str(n).encode()) for n in range(1000)] + [("rank/0", os.urandom(5_000_000))]
        for key, value in sent:
            producer.produce(BATCHES.name, key=key, value=value)
            producer.poll(0)
        assert producer.flush(60) == 0
        got = read(broker.bootstrap_servers, BATCHES.name, len(sent))
    for key in {key for key, _ in sent}:
        of_key = [message for message in got if message.key() == key.encode()]
        assert [message.value() for message in of_key] == [value for k, value in sent if k == key]
        assert len({message.partition() for message in of_key}) == 1


def test_stop_ends_it_and_may_be_called_again(kind: BrokerKind, tmp_path: Path) -> None:
    broker = start_broker(kind, tmp_path)
    assert running_broker(tmp_path) == broker.bootstrap_servers
    assert json.loads((tmp_path / "broker.json").read_text()) == {"bootstrap_servers": broker.bootstrap_servers, "pid": broker.pid}
    assert broker.bootstrap_servers.startswith("127.0.0.1:")
    assert broker.running
    broker.stop()
    broker.stop()
    assert not broker.running
    assert not alive(broker.pid)
    assert running_broker(tmp_path) is None
    assert not (tmp_path / "broker.json").exists()


def test_stop_ends_it_while_clients_are_connected(kind: BrokerKind, tmp_path: Path) -> None:
    broker = start_broker(kind, tmp_path)
    host, _, port = broker.bootstrap_servers.partition(":")
    with socket.create_connection((host, int(port))):
        broker.stop()
    assert not alive(broker.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_it_ends_with_its_parent_even_when_that_is_killed(kind: BrokerKind, tmp_path: Path) -> None:
    # Started from a thread that has long ended: the broker belongs to the process.
    program = (
        "import threading, sys, time, pathlib\n"
        "from console.broker import start_broker\n"
        "started = []\n"
        f"t = threading.Thread(target=lambda: started.append(start_broker({kind!r}, pathlib.Path({str(tmp_path)!r}))))\n"
        "t.start(); t.join(); time.sleep(0.3)\n"
        "assert started[0].running\n"
        "print(started[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert eventually(lambda: not alive(pid))
    # Its last thread may be a moment behind its first.
    assert eventually(lambda: running_broker(tmp_path) is None)


def test_a_second_one_for_the_same_folder_is_refused(tmp_path: Path) -> None:
    with start_broker(None, tmp_path) as broker, pytest.raises(KvcensusError, match=broker.bootstrap_servers):
        start_broker(None, tmp_path)


def test_a_taken_port_is_one_clear_error(kind: BrokerKind, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(KvcensusError, match=r"broker\.log"):
            start_broker(kind, tmp_path, taken.getsockname()[1])
    assert running_broker(tmp_path) is None


def test_a_port_lost_between_choice_and_start_is_chosen_again(kind: BrokerKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        choose = child.free_port
        ports = iter([taken.getsockname()[1]])
        monkeypatch.setattr(child, "free_port", lambda: next(ports, None) or choose())
        with start_broker(kind, tmp_path) as broker:
            assert broker.bootstrap_servers != f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_binary_without_its_execute_bit_is_copied(tmp_path: Path) -> None:
    binary = tmp_path / "package" / "tool"
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\necho hello\n")
    binary.chmod(0o444)
    copy = broker_module._executable(binary, tmp_path)
    if not os.access(binary, os.X_OK):
        assert copy.parent == tmp_path
    assert subprocess.run([copy], capture_output=True, text=True, check=True).stdout == "hello\n"


def test_the_kind_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCENSUS_BROKER", "noida")
    assert chosen_kind() == "noida"
    monkeypatch.setenv("KVCENSUS_BROKER", "rabbit")
    with pytest.raises(KvcensusError, match="rabbit"):
        chosen_kind()


def test_which_kafka(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCENSUS_BOOTSTRAP_SERVERS", raising=False)
    with pytest.raises(KvcensusError, match="--bootstrap-servers"):
        find_bootstrap_servers(None, tmp_path)
    with start_broker(None, tmp_path) as broker:
        assert find_bootstrap_servers(None, tmp_path) == broker.bootstrap_servers
        monkeypatch.setenv("KVCENSUS_BOOTSTRAP_SERVERS", "kafka:9092")
        assert find_bootstrap_servers(None, tmp_path) == "kafka:9092"
        assert find_bootstrap_servers("other:9092", tmp_path) == "other:9092"


def test_a_pointer_left_by_a_dead_broker_is_not_believed(tmp_path: Path) -> None:
    broker = start_broker(None, tmp_path)
    pointer = (tmp_path / "broker.json").read_text()
    broker.kill()
    (tmp_path / "broker.json").write_text(pointer)
    assert running_broker(tmp_path) is None
    for nonsense in ("", "[]", '{"pid": 1}', f'{{"bootstrap_servers": "127.0.0.1:x", "pid": {os.getpid()}}}'):
        (tmp_path / "broker.json").write_text(nonsense)
        assert running_broker(tmp_path) is None
