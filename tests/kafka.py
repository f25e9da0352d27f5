"""A Kafka for one test: an embedded broker of its own, or the one in $KVCENSUS_TEST_BOOTSTRAP_SERVERS, emptied."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from console.broker import Broker, start_broker
from console.topic_admin import connect, create_topics
from schemas.topics import DEFAULT_PARTITIONS

EXTERNAL_VARIABLE = "KVCENSUS_TEST_BOOTSTRAP_SERVERS"
"""Names a Kafka for the tests. **Every topic and group of kvcensus on it is deleted, again and again.**"""

_OURS = ("kvcensus.", "kvcensus-", "kvcensus_")
_SETTLE_SECONDS = 30.0


@dataclass
class Kafka:
    """What a test gets: topics made, nothing in them. ``broker`` is None where the broker is not ours to stop."""

    bootstrap_servers: str
    partitions: int
    broker: Broker | None

    @property
    def embedded(self) -> bool:
        """Whether this is an embedded broker."""
        return self.broker is not None


def external_servers() -> str | None:
    """The Kafka that the tests were told to use, if any."""
    return os.environ.get(EXTERNAL_VARIABLE) or None


@contextmanager
def empty_kafka(data_dir: Path, partitions: int = DEFAULT_PARTITIONS) -> Iterator[Kafka]:
    """A Kafka with the topics of kvcensus, all empty, and no consumer group."""
    external = external_servers()
    if external is None:
        with start_broker(None, data_dir) as broker:
            create_topics(broker.bootstrap_servers, partitions)
            yield Kafka(broker.bootstrap_servers, partitions, broker)
        return
    wipe(external)
    create_topics(external, partitions)
    yield Kafka(external, partitions, None)


def wipe(bootstrap_servers: str) -> None:
    """Delete every topic and consumer group of kvcensus, and wait until they are gone."""
    admin = connect(bootstrap_servers)
    # Groups of a consumer that has just left may still have members for a moment.
    _until_gone(lambda: _delete_groups(admin), "consumer groups")
    _until_gone(lambda: _delete_topics(admin), "topics")


def _delete_groups(admin: AdminClient) -> list[str]:
    groups = admin.list_consumer_groups(request_timeout=10).result(10).valid
    ours = [group.group_id for group in groups or () if group.group_id.startswith(("kvcensus", *_OURS))]
    return _still_there(admin.delete_consumer_groups(ours, request_timeout=10)) if ours else []


def _delete_topics(admin: AdminClient) -> list[str]:
    ours = [name for name in admin.list_topics(timeout=10).topics if name.startswith(_OURS)]
    if ours:
        _still_there(admin.delete_topics(ours, operation_timeout=10))
    return [name for name in admin.list_topics(timeout=10).topics if name.startswith(_OURS)]


def _still_there(futures: Mapping[str, Future[None]]) -> list[str]:
    left: list[str] = []
    for name, future in futures.items():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() not in (KafkaError.GROUP_ID_NOT_FOUND, KafkaError.UNKNOWN_TOPIC_OR_PART):
                left.append(name)
    return left


def _until_gone(delete: Callable[[], list[str]], what: str) -> None:
    deadline = time.monotonic() + _SETTLE_SECONDS
    while left := delete():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} that do not go away: {', '.join(left)}")
        time.sleep(0.2)
