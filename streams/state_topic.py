"""The state topic on the broker: reading partitions of it, writing to it, and committing how far it reaches.

Blocking; threads wait for each other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from schemas.errors import KvcensusError
from schemas.topics import MAX_MESSAGE_BYTES
from streams.positions import Place
from streams.settings import WorkerSettings
from streams.state import Pair, Restored, Rules, StateLog
from streams.tables import STATE
from streams.topic_reading import ANSWER_SECONDS, read_to_end

log = logging.getLogger("kvcensus.worker")

WRITE_SECONDS = 30.0
"""How long a snapshot may take to be acknowledged before it is given up; the next one is tried in its place."""

_quiet = logging.getLogger("kvcensus.librdkafka")


class StateTopic:
    """Clients of their own, so that neither Faust's buffers nor its group have a part in it.

    Positions are committed under the group ``GROUP-state``, which nobody joins: for the input topics, up to where the state on the topic
    reaches (never further); for the state topic, where the oldest chunk lies that is still needed.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        config = settings.client_config()
        self._consumer = Consumer(
            {
                **config,
                "group.id": f"{settings.group}-state",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "fetch.message.max.bytes": MAX_MESSAGE_BYTES,
            },
            logger=_quiet,
        )
        self._producer_config = {
            **config,
            "enable.idempotence": True,
            "linger.ms": 5,
            "message.max.bytes": MAX_MESSAGE_BYTES,
            "message.timeout.ms": round(WRITE_SECONDS * 1000),
        }
        self._producer = Producer(self._producer_config, logger=_quiet)
        self._admin = AdminClient(config, logger=_quiet)
        self._ids: dict[str, str] = {}
        # A rebalance may give up waiting for a thread that is still reading here, and ask again.
        self._lock = threading.Lock()
        self._abandoned = False

    def close(self) -> None:
        """Let go of the connections; what is not acknowledged yet is given up."""
        with self._lock:
            self._producer.purge()
            self._consumer.close()

    def abandon(self) -> None:
        """Have a write that is under way in another thread end soon: the process is about to."""
        self._abandoned = True

    # -- reading ------------------------------------------------------------------------------------------------

    def topic_id(self, topic: str) -> str:
        """The broker's own id of ``topic``, which a topic made anew does not have; empty where the broker tells none."""
        with self._lock:
            if topic not in self._ids:
                try:
                    asked = self._admin.describe_topics(TopicCollection([topic]), request_timeout=ANSWER_SECONDS)
                    self._ids[topic] = str(asked[topic].result(ANSWER_SECONDS).topic_id or "")
                except Exception as error:  # a broker that does not know the request, or does not answer it now
                    log.debug("id of %s: %s", topic, error)
            return self._ids.get(topic, "")

    def restore(self, wanted: Mapping[int, Mapping[str, Rules]]) -> dict[tuple[int, str], Restored]:
        """What ``wanted`` (partition to agents and their rules) begin with. Raises :class:`KvcensusError` if the broker does not answer."""
        with self._lock:
            return self._restore(wanted)

    def _restore(self, wanted: Mapping[int, Mapping[str, Rules]]) -> dict[tuple[int, str], Restored]:
        out: dict[tuple[int, str], Restored] = {}
        again: set[int] = set()
        try:
            hints = self._hints(wanted)
            for first in (True, False):
                partitions = set(wanted) if first else again
                if not partitions:
                    break
                logs = self._read({number: hints.get(number, OFFSET_BEGINNING) if first else OFFSET_BEGINNING for number in partitions})
                for number, read in logs.items():
                    for agent, rules in wanted[number].items():
                        out[number, agent] = read.restore(agent, rules)
                        # A worker that no longer owned the partition may have committed too far on.
                        if not out[number, agent].found and number in hints:
                            again.add(number)
        except KafkaException as error:
            raise KvcensusError(f"the state on {STATE.name} cannot be read: {error.args[0].str()}") from error
        return out

    def _hints(self, partitions: Collection[int]) -> dict[int, int]:
        """Where to begin reading, of the partitions for which that is known."""
        places = self._consumer.committed([TopicPartition(STATE.name, number) for number in partitions], timeout=ANSWER_SECONDS)
        return {place.partition: place.offset for place in places if place.offset >= 0}

    def _read(self, starts: Mapping[int, int]) -> dict[int, StateLog]:
        logs = {number: StateLog() for number in starts}

        def take(number: int, message: Message[bytes, bytes]) -> None:
            logs[number].take(_bytes(message.key()), _bytes(message.value()))

        read_to_end(self._consumer, STATE.name, starts, take)
        return logs

    # -- writing ------------------------------------------------------------------------------------------------

    def write(self, partition: int, pairs: Sequence[Pair]) -> list[int]:
        """Write ``pairs`` in order and wait until the broker has them; their offsets. Raises :class:`KvcensusError` if it refuses."""
        with self._lock:
            try:
                return self._write(partition, pairs)
            except KvcensusError:
                # An idempotent producer that had a fatal error takes nothing more.
                self._producer.purge()
                self._producer = Producer(self._producer_config, logger=_quiet)
                raise

    def _write(self, partition: int, pairs: Sequence[Pair]) -> list[int]:
        offsets: list[int] = []
        refused: list[str] = []

        def done(error: object, message: Message) -> None:
            if error is not None:
                refused.append(str(error))
            else:
                offsets.append(message.offset() or 0)

        try:
            for key, value in pairs:
                while True:
                    try:
                        self._producer.produce(STATE.name, value, key=key, partition=partition, on_delivery=done)
                        break
                    except BufferError:
                        self._producer.poll(0.1)
                        if self._abandoned:
                            raise KvcensusError(f"{STATE.name}[{partition}]: given up") from None
                self._producer.poll(0)
            deadline = time.monotonic() + WRITE_SECONDS
            while (left := self._producer.flush(0.2)) and not self._abandoned and time.monotonic() < deadline:
                pass
        except KafkaException as error:
            raise KvcensusError(f"{STATE.name}[{partition}] cannot be written: {error.args[0].str()}") from error
        if refused or left:
            raise KvcensusError(f"{STATE.name}[{partition}] cannot be written: {refused[0] if refused else 'the broker does not answer'}")
        return offsets

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Commit positions of the group that nobody joins; a broker that does not take them is told of in the log only."""
        try:
            with self._lock:
                self._consumer.commit(offsets=[TopicPartition(*place, offset) for place, offset in offsets.items()], asynchronous=False)
        except KafkaException as error:
            log.debug("positions not committed: %s", error)


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
