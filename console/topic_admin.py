"""Creating and checking the Kafka topics, on any broker of the Kafka protocol."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import cast

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, TopicMetadata

from schemas.errors import KvcensusError
from schemas.topics import DEFAULT_PARTITIONS, RECORD_TOPICS, Topic
from streams.tables import CHANGELOGS

ALL_TOPICS: tuple[Topic, ...] = (*RECORD_TOPICS, *CHANGELOGS)
"""What ``create`` makes and ``check`` looks for: the topics of the records, and the changelogs of the worker's tables."""

CONNECT_SECONDS = 10.0
"""How long an unreachable broker is waited for."""

_SETTLE_SECONDS = 30.0
_REQUEST_SECONDS = 10.0

# A longer retention or a larger message than asked for is no fault; -1 is "no limit" for retention.ms.
_AT_LEAST = ("retention.ms", "max.message.bytes")

_TRANSIENT = (
    KafkaError.TOPIC_ALREADY_EXISTS,  # while its deletion is under way: see _create
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError.NOT_CONTROLLER,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.INVALID_REPLICATION_FACTOR,  # brokers of a starting cluster not all registered yet
)


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it should be: ``what`` is ``topic``, ``partitions`` or the name of a configuration."""

    topic: str
    what: str
    found: str
    expected: str

    def __str__(self) -> str:
        if self.what == "topic":
            return f"{self.topic}: missing"
        return f"{self.topic}: {self.what} is {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class TopicsReport:
    """What there is. ``notes`` are things that could not be compared or asked of this broker; they are no fault."""

    partitions: int
    created: list[str] = field(default_factory=list)
    existing: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def create_topics(
    bootstrap_servers: str,
    partitions: int | None = None,
    options: Mapping[str, str] | None = None,
    *,
    replication_factor: int = -1,
    topics: Sequence[Topic] = ALL_TOPICS,
) -> TopicsReport:
    """Create the missing ones of ``topics`` and report how all of them compare; safe to run again.

    ``partitions`` None means: as many as those that exist have, else 4. ``replication_factor`` -1 is the broker's default. What exists is
    never changed: it shows as a difference. Returns when each topic has a leader for every partition. Raises
    :class:`KvcensusError` when the broker can't be reached or refuses.
    """
    admin = connect(bootstrap_servers, options)
    found = _metadata(admin, bootstrap_servers)
    count = partitions or _count_in_use(found, topics)
    missing = [topic for topic in topics if topic.name not in found]
    notes = _create(admin, bootstrap_servers, missing, count, replication_factor)
    found = _wait_for_leaders(admin, bootstrap_servers, topics)
    differences, more = _compare(admin, found, topics, count)
    created = [topic.name for topic in missing]
    existing = [topic.name for topic in topics if topic.name not in created]
    return TopicsReport(count, created, existing, differences, notes + more)


def check_topics(
    bootstrap_servers: str,
    partitions: int | None = None,
    options: Mapping[str, str] | None = None,
    *,
    topics: Sequence[Topic] = ALL_TOPICS,
) -> TopicsReport:
    """Compare what the broker has with ``topics``; changes nothing. Partition counts must be equal among the topics.

    ``partitions`` None compares with the count that most of them have.
    """
    admin = connect(bootstrap_servers, options)
    found = _metadata(admin, bootstrap_servers)
    count = partitions or _count_in_use(found, topics)
    differences, notes = _compare(admin, found, topics, count)
    return TopicsReport(count, [], [topic.name for topic in topics if topic.name in found], differences, notes)


def partition_count(topic: Topic, partitions: int) -> int:
    """How many partitions ``topic`` has where the others have ``partitions``."""
    return 1 if topic.single_partition else partitions


def connect(bootstrap_servers: str, options: Mapping[str, str] | None = None) -> AdminClient:
    """An admin client whose broker has answered. Raises :class:`KvcensusError`, one line, when none does within 10 s."""
    problem: list[KafkaError] = []
    # librdkafka writes to stderr by itself unless it is given a logger.
    quiet = logging.getLogger("kvcensus.kafka")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    settings = {**(options or {}), "bootstrap.servers": bootstrap_servers, "error_cb": problem.append}
    try:
        # The client's annotation leaves callbacks out.
        admin = AdminClient(cast("dict[str, str | int | float | bool]", settings), logger=quiet)
    except (KafkaException, ValueError, TypeError) as error:
        raise KvcensusError(f"Kafka client options: {_reason(error)}") from error
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            admin.list_topics(timeout=1.0)
            return admin
        except KafkaException as error:
            admin.poll(0)
            said = next((e for e in problem if e.code() == KafkaError._AUTHENTICATION), problem[0] if problem else None)
            if time.monotonic() > deadline or (said is not None and said.code() == KafkaError._AUTHENTICATION):
                raise KvcensusError(f"Kafka at {bootstrap_servers} cannot be reached: {said.str() if said else _reason(error)}") from error


def _metadata(admin: AdminClient, bootstrap_servers: str) -> dict[str, TopicMetadata]:
    try:
        return {name: topic for name, topic in admin.list_topics(timeout=_REQUEST_SECONDS).topics.items() if topic.error is None}
    except KafkaException as error:
        raise KvcensusError(f"Kafka at {bootstrap_servers} does not list its topics: {_reason(error)}") from error


def _count_in_use(found: Mapping[str, TopicMetadata], topics: Sequence[Topic]) -> int:
    counts = Counter(len(found[topic.name].partitions) for topic in topics if topic.name in found and not topic.single_partition)
    return counts.most_common(1)[0][0] if counts else DEFAULT_PARTITIONS


def _create(admin: AdminClient, servers: str, missing: Sequence[Topic], partitions: int, replication_factor: int) -> list[str]:
    """Create ``missing``, again and again while the reason for a failure may pass. Returns notes."""
    notes: list[str] = []
    pending = {topic.name: topic for topic in missing}
    without_config: set[str] = set()
    deadline = time.monotonic() + _SETTLE_SECONDS
    while pending:
        asked = [
            NewTopic(
                name,
                num_partitions=partition_count(topic, partitions),
                replication_factor=replication_factor,
                config={} if name in without_config else topic.config,
            )
            for name, topic in pending.items()
        ]
        failed: dict[str, KafkaError] = {}
        futures: dict[str, Future[None]] = admin.create_topics(asked, operation_timeout=_REQUEST_SECONDS)
        for name, future in futures.items():
            try:
                future.result()
                del pending[name]
            except KafkaException as error:
                failed[name] = error.args[0]
        for name, refused in failed.items():
            if refused.code() == KafkaError.INVALID_CONFIG and name not in without_config:
                without_config.add(name)
                notes.append(f"{name}: made without its configuration, which the broker refused: {refused.str()}")
            elif refused.code() not in _TRANSIENT or time.monotonic() > deadline:
                raise KvcensusError(f"Kafka at {servers} refuses to create {name}: {refused.str()}")
        if pending:
            # Somebody else may have created it meanwhile; a topic that is being deleted "exists" too, but isn't listed.
            listed = _metadata(admin, servers)
            pending = {name: topic for name, topic in pending.items() if name not in listed}
            time.sleep(0.2)
    return notes


def _wait_for_leaders(admin: AdminClient, servers: str, topics: Sequence[Topic]) -> dict[str, TopicMetadata]:
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        found = _metadata(admin, servers)
        late = [topic.name for topic in topics if topic.name not in found or not _has_leaders(found[topic.name])]
        if not late:
            return found
        if time.monotonic() > deadline:
            raise KvcensusError(f"Kafka at {servers}: no leader for every partition of {', '.join(late)} after {_SETTLE_SECONDS:.0f} s")
        time.sleep(0.1)


def _has_leaders(topic: TopicMetadata) -> bool:
    return bool(topic.partitions) and all(partition.leader >= 0 for partition in topic.partitions.values())


def _compare(
    admin: AdminClient, found: Mapping[str, TopicMetadata], topics: Sequence[Topic], partitions: int
) -> tuple[list[Difference], list[str]]:
    differences: list[Difference] = []
    notes: list[str] = []
    present = [topic for topic in topics if topic.name in found]
    configs = _configs(admin, [topic.name for topic in present])
    for topic in topics:
        if topic not in present:
            differences.append(Difference(topic.name, "topic", "missing", "present"))
            continue
        expected = partition_count(topic, partitions)
        count = len(found[topic.name].partitions)
        if count != expected:
            differences.append(Difference(topic.name, "partitions", str(count), str(expected)))
        config = configs[topic.name]
        if isinstance(config, str):
            notes.append(f"{topic.name}: its configuration cannot be read: {config}")
            continue
        for key, asked in topic.config.items():
            if key not in config:
                notes.append(f"{topic.name}: this broker does not report {key}")
            elif not _satisfies(key, config[key], asked):
                differences.append(Difference(topic.name, key, config[key], asked if key not in _AT_LEAST else f"at least {asked}"))
    return differences, notes


def _satisfies(key: str, value: str, asked: str) -> bool:
    if key in _AT_LEAST and value.lstrip("-").isdigit():
        return int(value) == -1 or int(value) >= int(asked)
    return value == asked


def _configs(admin: AdminClient, names: Sequence[str]) -> dict[str, dict[str, str] | str]:
    """Configuration of each topic, or the reason why it can't be read."""
    configs: dict[str, dict[str, str] | str] = {}
    # One request each: not every broker answers a request for several.
    for name in names:
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        try:
            entries = admin.describe_configs([resource])[resource].result(_REQUEST_SECONDS)
            configs[name] = {key: str(entry.value) for key, entry in entries.items()}
        except (KafkaException, TimeoutError) as error:
            configs[name] = _reason(error)
    return configs


def _reason(error: BaseException) -> str:
    first = error.args[0] if error.args else ""
    return first.str() if isinstance(first, KafkaError) else str(first) or type(error).__name__
