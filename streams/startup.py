"""What must be true before a worker starts: a broker that answers, and topics that fit together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from schemas.errors import KvcensusError
from schemas.topics import RECORD_TOPICS, RESIDENCY, Topic
from streams.settings import WorkerSettings
from streams.tables import CHANGELOGS

BROKER_SECONDS = 10.0
"""How long a broker may take to answer at start."""

_quiet = logging.getLogger("kvcensus.librdkafka")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Partition counts found on the broker; ``shards`` is the number of content shards."""

    partitions: Mapping[str, int]

    @property
    def shards(self) -> int:
        """Content shards: the partitions of the residency topic."""
        return self.partitions[RESIDENCY.name]


def needed_topics() -> tuple[Topic, ...]:
    """Every topic that a worker reads or writes."""
    return (*RECORD_TOPICS, *CHANGELOGS)


def check_layout(found: Mapping[str, int], where: str, needed: Iterable[Topic] | None = None) -> Layout:
    """The layout if it fits. ``found`` maps topic to partition count.

    Raises :class:`KvcensusError` for missing topics and for partition counts that would part what belongs together: a rank's
    batches, its content shards and its table entries are assigned to workers by partition number.
    """
    topics = tuple(needed_topics() if needed is None else needed)
    missing = [topic.name for topic in topics if topic.name not in found]
    hint = f"run: kvcensus topics create --bootstrap-servers {where}"
    if missing:
        raise KvcensusError(f"topics missing on {where}: {', '.join(missing)}; {hint}")
    many = {topic.name: found[topic.name] for topic in topics if not topic.single_partition}
    if len(set(many.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in many.items())
        raise KvcensusError(f"topics on {where} differ in their partition counts: {counts}; create them anew with equal counts")
    wrong = [topic.name for topic in topics if topic.single_partition and found[topic.name] != 1]
    if wrong:
        raise KvcensusError(f"topics on {where} must have one partition each: {', '.join(wrong)}; create them anew")
    return Layout({topic.name: found[topic.name] for topic in topics})


def find_layout(settings: WorkerSettings) -> Layout:
    """Ask the broker. Blocks up to :data:`BROKER_SECONDS`. Raises :class:`KvcensusError` if it does not answer or does not fit."""
    where = settings.bootstrap_servers
    try:
        admin = AdminClient(settings.client_config(), logger=_quiet)
        metadata = admin.list_topics(timeout=BROKER_SECONDS)
    except KafkaException as error:
        raise KvcensusError(f"no Kafka broker answers at {where}: {error.args[0].str()}") from error
    return check_layout({name: len(topic.partitions) for name, topic in metadata.topics.items()}, where)
