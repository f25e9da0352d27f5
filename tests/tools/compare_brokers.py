"""What the brokers get right and wrong, measured: the figures of docs/broker.md.

    python -m tests.tools.compare_brokers tansu noida apache

Prints one JSON document per broker. ``apache`` needs Maven and Java (see apache_kafka.py). Takes about a minute each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, cast

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from console.broker import Broker, BrokerKind, start_broker
from schemas.errors import KvcensusError
from tests.tools.apache_kafka import ApacheKafka

Result = str | int | float | bool | None
SESSION_MS = 6000


class Rig(Protocol):
    """A broker that can be stopped, killed and started again over the same data."""

    servers: str

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def pid(self) -> int: ...


class Embedded:
    def __init__(self, kind: BrokerKind, folder: Path) -> None:
        self._kind = kind
        self._folder = folder
        self._broker: Broker | None = None
        self._port = 0
        self.servers = ""

    def start(self) -> None:
        self._broker = start_broker(self._kind, self._folder, self._port)
        self.servers = self._broker.bootstrap_servers
        self._port = int(self.servers.rpartition(":")[2])

    def stop(self) -> None:
        if self._broker:
            self._broker.stop()

    def kill(self) -> None:
        if self._broker:
            self._broker.kill()

    def pid(self) -> int:
        return self._broker.pid if self._broker else 0


class Apache:
    def __init__(self, folder: Path) -> None:
        self._kafka = ApacheKafka(folder)
        self.servers = self._kafka.bootstrap_servers
        self.start, self.stop, self.kill = self._kafka.start, self._kafka.stop, self._kafka.kill

    def pid(self) -> int:
        return self._kafka.pid or 0


def memory_mb(pid: int) -> float:
    """Resident memory of a process, MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def create(servers: str, name: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    config = {"max.message.bytes": "16777216"}
    for future in admin.create_topics([NewTopic(name, partitions, config=config)]).values():
        future.result()
    time.sleep(0.3)


def producer(servers: str) -> Producer:
    return Producer(
        {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "message.max.bytes": 16_777_216,
            "linger.ms": 5,
        }
    )


def consumer(servers: str, group: str, session_ms: int = SESSION_MS, reset: str = "earliest") -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "session.timeout.ms": session_ms,
            "heartbeat.interval.ms": 1000,
            "auto.offset.reset": reset,
            "enable.auto.commit": False,
        }
    )


def read_all(servers: str, topic: str, partition: int, seconds: float = 3) -> list[tuple[bytes | None, bytes | None]]:
    """(key, value) of everything in one partition, without a group; ends when nothing comes for a while."""
    reader = consumer(servers, "reader")
    reader.assign([TopicPartition(topic, partition, 0)])
    got: list[tuple[bytes | None, bytes | None]] = []
    quiet = time.monotonic()
    while time.monotonic() - quiet < seconds:
        for message in reader.consume(1000, 0.2):
            if message.error() is None:
                got.append((message.key(), message.value()))
                quiet = time.monotonic()
    reader.close()
    return got


def seconds_until(condition: Callable[[], bool], limit: float) -> float | None:
    start = time.monotonic()
    while time.monotonic() - start < limit:
        if condition():
            return round(time.monotonic() - start, 2)
    return None


def join_seconds(servers: str, group: str, session_ms: int, limit: float) -> float | None:
    """From subscribing to the first assignment."""
    member = consumer(servers, group, session_ms)
    member.subscribe(["join"])
    try:
        return seconds_until(lambda: member.poll(0.05) is not None or bool(member.assignment()), limit)
    finally:
        member.close()


def rebalance(servers: str) -> dict[str, Result]:
    """A second member joins, then the first leaves silently (its process would have been killed)."""
    one, two = consumer(servers, "pair"), consumer(servers, "pair")
    one.subscribe(["join"])
    seconds_until(lambda: one.poll(0.05) is not None or len(one.assignment()) == 4, 30)
    two.subscribe(["join"])

    def both() -> bool:
        one.poll(0.05)
        two.poll(0.05)
        return len(one.assignment()) == 2 and len(two.assignment()) == 2

    shared = seconds_until(both, 40)
    # A consumer that isn't polled goes on sending heartbeats for max.poll.interval.ms; so a child that is killed.
    one.close()
    after_leave = seconds_until(lambda: two.poll(0.05) is not None or len(two.assignment()) == 4, 40)
    victim = os.fork()
    if victim == 0:
        with suppress(BaseException):
            third = consumer(servers, "pair")
            third.subscribe(["join"])
            for _ in range(2400):
                third.poll(0.05)
        os._exit(0)
    split = seconds_until(lambda: two.poll(0.05) is None and len(two.assignment()) == 2, 30)
    os.kill(victim, 9)
    os.waitpid(victim, 0)
    after_kill = seconds_until(lambda: two.poll(0.05) is None and len(two.assignment()) == 4, 60) if split else None
    two.close()
    return {"second_member_s": shared, "after_leave_s": after_leave, "third_member_s": split, "after_kill_s": after_kill}


def end_offsets(servers: str) -> dict[str, Result]:
    create(servers, "ends", 1)
    sender = producer(servers)
    for n in range(10):
        sender.produce("ends", str(n), partition=0)
    sender.flush(10)
    reader = consumer(servers, "ends")
    _, first = reader.get_watermark_offsets(TopicPartition("ends", 0), timeout=5)
    for n in range(10):
        sender.produce("ends", str(n), partition=0)
    sender.flush(10)
    _, second = reader.get_watermark_offsets(TopicPartition("ends", 0), timeout=5)
    reader.close()
    return {"end_after_10": first, "end_after_20": second}


def latest_reset(servers: str) -> Result:
    """A new group that starts at "latest" must not get what was there before; returns how many old messages it got."""
    reader = consumer(servers, "latest", reset="latest")
    reader.assign([TopicPartition("ends", 0)])
    old = len([m for m in reader.consume(100, 4) if m.error() is None])
    reader.close()
    return old


def out_of_range(servers: str) -> Result:
    """Reading from far beyond the end: a reset to the beginning (how many come), or nothing."""
    reader = consumer(servers, "beyond")
    reader.assign([TopicPartition("ends", 0, 1_000_000)])
    got = len([m for m in reader.consume(20, 6) if m.error() is None])
    reader.close()
    return got


def order_and_partitions(servers: str) -> dict[str, Result]:
    create(servers, "keys", 4)
    sender = producer(servers)
    sent: dict[bytes | None, list[bytes | None]] = {}
    for n in range(20_000):
        key, value = f"rank/{n % 7}".encode(), str(n).encode()
        sent.setdefault(key, []).append(value)
        sender.produce("keys", value, key)
        sender.poll(0)
    sender.flush(30)
    place: dict[bytes | None, set[int]] = {}
    got: dict[bytes | None, list[bytes | None]] = {}
    for partition in range(4):
        for k, v in read_all(servers, "keys", partition):
            place.setdefault(k, set()).add(partition)
            got.setdefault(k, []).append(v)
    create(servers, "placed", 4)
    for n in range(400):
        sender.produce("placed", str(n), "same key", partition=n % 4)
    sender.flush(30)
    placed = all([value for _, value in read_all(servers, "placed", p)] == [str(n).encode() for n in range(p, 400, 4)] for p in range(4))
    return {
        "order_kept": got == sent,
        "one_partition_per_key": all(len(where) == 1 for where in place.values()),
        "explicit_partitions": placed,
    }


def large(servers: str, size: int) -> Result:
    name = f"large-{size}"
    create(servers, name, 1)
    sender = producer(servers)
    value = os.urandom(size)
    failed: list[KafkaError] = []
    sender.produce(name, value, on_delivery=lambda error, _: failed.append(error) if error else None)
    if sender.flush(30) or failed:
        return f"not taken: {failed}"
    return [got for _, got in read_all(servers, name, 0, 5)] == [value]


def throughput(servers: str) -> dict[str, Result]:
    create(servers, "fast", 4)
    sender = producer(servers)
    value, count = os.urandom(500), 100_000
    start = time.monotonic()
    for n in range(count):
        while True:
            try:
                sender.produce("fast", value, str(n % 16))
                break
            except BufferError:
                sender.poll(0.05)
        if n % 1000 == 0:
            sender.poll(0)
    sender.flush(60)
    into = time.monotonic() - start
    reader = consumer(servers, "fast")
    reader.assign([TopicPartition("fast", p, 0) for p in range(4)])
    got, start = 0, time.monotonic()
    while got < count and time.monotonic() - start < 60:
        got += len(reader.consume(10_000, 1.0))
    out = time.monotonic() - start
    reader.close()
    return {"in_per_s": round(count / into), "out_per_s": round(got / out), "all_read": got == count}


def committed(servers: str, topic: str, offset: int | None = None) -> int:
    """The offset that a group has committed, after committing ``offset`` if given."""
    member = consumer(servers, f"group-{topic}")
    try:
        if offset is not None:
            member.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
        offsets: list[TopicPartition] = member.committed([TopicPartition(topic, 0)], timeout=10)
        return offsets[0].offset
    finally:
        member.close()


def restart(rig: Rig, topic: str, end: Callable[[], None]) -> dict[str, Result]:
    """How many of 1,000 acknowledged messages, and whether a committed offset, are there after an end and a new start."""
    create(rig.servers, topic, 1)
    sender = producer(rig.servers)
    for n in range(1000):
        sender.produce(topic, str(n))
    assert sender.flush(10) == 0
    committed(rig.servers, topic, 17)
    end()
    try:
        rig.start()
    except KvcensusError as error:
        return {"comes_back": str(error)[:200]}
    if topic not in AdminClient({"bootstrap.servers": rig.servers}).list_topics(timeout=10).topics:
        return {"topic_kept": False, "messages_kept": 0}
    kept = len(read_all(rig.servers, topic, 0))
    return {"topic_kept": True, "messages_kept": kept, "committed_kept": committed(rig.servers, topic) == 17}


def rides_out(rig: Rig) -> Result:
    """A client that stays connected over kill and restart: are messages produced meanwhile delivered, and in order?"""
    create(rig.servers, "ride", 1)
    sender = producer(rig.servers)
    stop = threading.Event()
    sent: list[bytes] = []
    failed: list[str] = []

    def send() -> None:
        while not stop.is_set():
            value = str(len(sent)).encode()
            sent.append(value)
            sender.produce("ride", value, on_delivery=lambda error, _: failed.append(error.str()) if error else None)
            sender.poll(0.005)

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(1)
    rig.kill()
    time.sleep(1)
    rig.start()
    time.sleep(2)
    stop.set()
    thread.join()
    left = sender.flush(20)
    got = [value for _, value in read_all(rig.servers, "ride", 0) if value is not None]
    if failed or left:
        return f"{len(failed)} failed ({failed[0] if failed else ''}), {left} never delivered of {len(sent)}; {len(got)} there"
    return f"all {len(sent)} acknowledged, {len(set(got))} there, {'in' if got == sorted(got, key=int) else 'out of'} order"


def measure(name: str, rig: Rig) -> dict[str, Result | dict[str, Result]]:
    found: dict[str, Result | dict[str, Result]] = {"broker": name}

    def note(key: str, what: Callable[[], Result | dict[str, Result]]) -> None:
        try:
            found[key] = what()
        except Exception as error:  # every failure is a finding
            found[key] = f"failed: {str(error)[:200]}"
        sys.stderr.write(f"{name} {key}: {found[key]}\n")

    start = time.monotonic()
    rig.start()
    found["start_s"] = round(time.monotonic() - start, 3)
    sys.stderr.write(f"{name} start_s: {found['start_s']}\n")
    note("memory_mb", lambda: memory_mb(rig.pid()))
    create(rig.servers, "join", 4)
    note("join_s_session_6s", lambda: join_seconds(rig.servers, "g6", SESSION_MS, 60))
    note("join_again_s", lambda: join_seconds(rig.servers, "g6", SESSION_MS, 60))
    note("join_s_session_45s", lambda: join_seconds(rig.servers, "g45", 45_000, 60))
    note("rebalance", lambda: rebalance(rig.servers))
    note("end_offsets", lambda: end_offsets(rig.servers))
    note("old_messages_at_latest", lambda: latest_reset(rig.servers))
    note("out_of_range_reset_reads", lambda: out_of_range(rig.servers))
    note("order", lambda: order_and_partitions(rig.servers))
    note("message_5_mb", lambda: large(rig.servers, 5_000_000))
    note("message_15_mb", lambda: large(rig.servers, 15_000_000))
    note("throughput", lambda: throughput(rig.servers))
    note("memory_after_mb", lambda: memory_mb(rig.pid()))
    note("restart_after_sigterm", lambda: restart(rig, "stopped", rig.stop))
    note("restart_after_kill", lambda: restart(rig, "killed", rig.kill))
    note("rides_out_a_kill", lambda: rides_out(rig))
    start = time.monotonic()
    rig.stop()
    found["stop_s"] = round(time.monotonic() - start, 3)
    return found


def main() -> None:
    """Measure the brokers named on the command line."""
    for name in sys.argv[1:] or ("tansu", "noida"):
        with tempfile.TemporaryDirectory(prefix="kvcensus-compare-") as folder:
            rig: Rig = Apache(Path(folder)) if name == "apache" else Embedded(cast("BrokerKind", name), Path(folder))
            try:
                print(json.dumps(measure(name, rig), indent=2), flush=True)
            finally:
                rig.stop()


if __name__ == "__main__":
    main()
