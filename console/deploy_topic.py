"""The topic of deploys on the broker: reading all of it, and adding a record. Blocking."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer

from console.topic_admin import connect
from schemas import codec
from schemas.errors import KvcensusError
from schemas.records import Deploy
from schemas.topics import DEPLOYS
from streams.topic_reading import ANSWER_SECONDS, read_to_end

_WRITE_SECONDS = 30.0

_quiet = logging.getLogger("kvcensus.kafka")
_log = logging.getLogger("kvcensus.deploys")


class DeployTopic:
    """``kvcensus.deploys`` on one Kafka. It is tiny (one record per deploy once compacted), so it is always read whole.

    Raises :class:`KvcensusError`, one line, where no broker answers, where it refuses, and where the topic is missing.
    """

    def __init__(self, bootstrap_servers: str, options: Mapping[str, str]) -> None:
        """Waits for a broker, up to 10 s. ``options`` are librdkafka properties."""
        self._servers = bootstrap_servers
        self._config = {**options, "bootstrap.servers": bootstrap_servers}
        admin = connect(bootstrap_servers, options)
        # All topics are asked for: a broker may create one that is asked for by name.
        try:
            found = admin.list_topics(timeout=ANSWER_SECONDS).topics.get(DEPLOYS.name)
        except KafkaException as error:
            raise self._failed("does not list its topics", error) from error
        if found is None or found.error is not None or not found.partitions:
            raise KvcensusError(f"Kafka at {bootstrap_servers} has no topic {DEPLOYS.name}: run `kvcensus topics create`")
        self._partitions = sorted(found.partitions)

    def read(self) -> list[Deploy]:
        """Every record that the topic holds, in the order of its partitions. What cannot be read is named in the log and left out."""
        try:
            consumer = self._consumer()
            try:
                return self._read(consumer)
            finally:
                consumer.close()
        except KafkaException as error:
            raise self._failed(f"does not give out {DEPLOYS.name}", error) from error

    def _consumer(self) -> Consumer:
        # A group is asked for by the client, and never joined: partitions are assigned by hand and no offset is committed.
        config = {**self._config, "group.id": "kvcensus-deploys", "enable.auto.commit": False, "enable.partition.eof": True}
        return Consumer(config, logger=_quiet)

    def _read(self, consumer: Consumer) -> list[Deploy]:
        records: list[Deploy] = []

        def take(number: int, message: Message[bytes, bytes]) -> None:
            if (record := self._decoded(message.value(), number, message.offset())) is not None:
                records.append(record)

        read_to_end(consumer, DEPLOYS.name, dict.fromkeys(self._partitions, OFFSET_BEGINNING), take)
        return records

    @staticmethod
    def _decoded(value: str | bytes | None, partition: int, offset: int | None) -> Deploy | None:
        if value is None:  # somebody's tombstone: the records of that id are gone from the topic
            return None
        try:
            return codec.decode(value.encode() if isinstance(value, str) else value, Deploy)
        except codec.CodecError as error:
            _log.warning("%s[%s] offset %s cannot be read and is left out: %s", DEPLOYS.name, partition, offset, error)
            return None

    def write(self, record: Deploy) -> None:
        """Add ``record`` and wait until the broker has it for good."""
        refused: list[KafkaError] = []
        seconds = round(_WRITE_SECONDS * 1000)
        config = {**self._config, "acks": "all", "enable.idempotence": True, "message.timeout.ms": seconds, "error_cb": lambda _error: None}
        try:
            producer = Producer(config, logger=_quiet)
            producer.produce(
                DEPLOYS.name,
                codec.encode(record),
                key=record.deploy_id.encode(),
                on_delivery=lambda error, _message: refused.append(error) if error is not None else None,
            )
            left = producer.flush(_WRITE_SECONDS + 5)
        except KafkaException as error:
            raise self._failed("does not take the deploy", error) from error
        if refused or left:
            why = refused[0].str() if refused else "no answer"
            raise KvcensusError(f"Kafka at {self._servers} does not take the deploy: {why}")

    def _failed(self, what: str, error: KafkaException) -> KvcensusError:
        said = error.args[0] if error.args else ""
        return KvcensusError(f"Kafka at {self._servers} {what}: {said.str() if isinstance(said, KafkaError) else said}")
