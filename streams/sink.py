"""From the result topics (and the facts) into ClickHouse: a consumer of its own, committed only after the insert.

It reads in a group of its own, apart from the counting half: that one never commits, because its state begins at the start of the
topics; this one has no state but the rows it has not inserted yet. Rows are keyed and versioned, so a row that comes twice is one row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from mode import Service

from schemas import codec
from schemas.errors import KvcensusError
from schemas.records import (
    DeadLetter,
    Deploy,
    DuplicateWindow,
    EngineMetrics,
    Lifecycle,
    RankMessage,
    RankWindow,
    Recompute,
    SharedPrefix,
)
from schemas.topics import (
    BATCHES,
    DEAD_LETTERS,
    DEPLOYS,
    DUPLICATE_WINDOWS,
    ENGINE_METRICS,
    LIFECYCLE,
    RANK_WINDOWS,
    RECOMPUTES,
    SHARED_PREFIXES,
)
from sql import migrate
from sql.columns import ColumnBatch
from sql.rows import TableRows
from sql.store import Database, StoreError, StoreUnavailable, connect
from streams.dead_letters import Letterbox, dead_letter
from streams.positions import Place
from streams.settings import DEFAULT_SESSION_MS, WorkerSettings
from streams.sink_rows import Origin, Origins, insert

log = logging.getLogger("kvcensus.sink")
_client_log = logging.getLogger("kvcensus.librdkafka")

MAX_ROWS = 20_000
"""Rows that are gathered for one insert; one message may bring more."""

MAX_SECONDS = 1.0
"""Longest time a row waits for others."""

_GATHER = 500
_POLL_SECONDS = 0.1
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
_STOP_SECONDS = 6.0
_LETTER_SECONDS = 10.0
_LETTER_BYTES = 8 * 1024 * 1024

Sunk = RankWindow | Recompute | DuplicateWindow | SharedPrefix | DeadLetter | Deploy | Lifecycle | EngineMetrics | RankMessage

KINDS: Mapping[str, type[Sunk]] = {
    RANK_WINDOWS.name: RankWindow,
    RECOMPUTES.name: Recompute,
    DUPLICATE_WINDOWS.name: DuplicateWindow,
    SHARED_PREFIXES.name: SharedPrefix,
    DEAD_LETTERS.name: DeadLetter,
    DEPLOYS.name: Deploy,
    LIFECYCLE.name: Lifecycle,
    ENGINE_METRICS.name: EngineMetrics,
    BATCHES.name: RankMessage,
}
"""What is read: the results, the facts they were counted from, and what could not be counted."""


class _Stopping(Exception):
    """The worker stops: what has not been inserted is read again by the next."""


class _Moved(Exception):
    """A rebalance took partitions away: the rows at hand were not committed, and whoever has the partitions reads them again."""


class Sink:
    """The consumer loop. :meth:`run` blocks until :meth:`stop` is called from another thread, or raises.

    It writes to the store of the settings, owned by this process if it is embedded.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.inserted = 0
        self.poisoned = 0
        self.bad_rows = 0
        self.waiting = False
        self._settings = settings
        self._stop = threading.Event()
        self._rows = TableRows()
        self._origins = Origins(self._rows)
        self._letters: list[DeadLetter] = []
        self._letter_bytes = 0
        self._letterbox = Letterbox(settings.client_config())
        self._next: dict[Place, int] = {}
        self._uncommitted: set[Place] = set()
        self._held: list[Message[bytes, bytes]] = []
        self._paused = False
        self._moved = False
        self._since = 0.0
        self._store: Database | None = None
        self._consumer: Consumer | None = None

    def stop(self) -> None:
        """Ask :meth:`run` to end: rows at hand are inserted first if the store takes them at once."""
        self._stop.set()

    def positions(self) -> dict[Place, int]:
        """(topic, partition) to next offset; nothing while the sink waits for the store, which is no stall."""
        return {} if self.waiting else dict(self._next)

    def prepare(self) -> None:
        """Open the store already now, so that one that cannot be used is known at once; :meth:`run` waits for one that does not answer yet.

        Raises :class:`KvcensusError`.
        """
        try:
            self._store = self._migrated_store()
        except StoreUnavailable:
            log.debug("the store does not answer yet")

    def run(self) -> None:
        """Open the store, bring its schema up to date, and insert what the topics bring.

        Raises :class:`KvcensusError` for a store that cannot be used and a group that cannot be joined.
        """
        try:
            if self._store is None:
                self._store = self._open_store()
            self._consumer = self._subscribe()
            try:
                self._loop()
            finally:
                self._consumer.close()
        except _Stopping:
            pass
        finally:
            if self._store is not None:
                self._store.close()

    # -- reading ------------------------------------------------------------------------------------------------

    def _subscribe(self) -> Consumer:
        config: dict[str, Any] = {
            "auto.offset.reset": "earliest",
            "queued.max.messages.kbytes": 16_384,
            "fetch.message.max.bytes": 4 * 1024 * 1024,
            "session.timeout.ms": DEFAULT_SESSION_MS,  # as the counting half: the client's own is 45 s, of which a group may wait half
            **self._settings.client_config(),
            "group.id": self._settings.sink_group,
            "enable.auto.commit": False,
            "partition.assignment.strategy": "range",  # eager: see _revoked
        }
        try:
            consumer = Consumer(config, logger=_client_log)
        except KafkaException as error:
            raise KvcensusError(f"Kafka client options: {error.args[0].str()}") from error
        consumer.subscribe(list(KINDS), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)
        return consumer

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.assign(partitions)
        if self._paused:
            consumer.pause(partitions)

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # All partitions go at once (the assignment is eager), so nothing at hand is ours to commit any more.
        self._moved = True
        self._next.clear()

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._gather()
            if self._due():
                self._deliver()
        if self._uncommitted:
            self._deliver()

    def _gather(self) -> None:
        """Take what has arrived, or wait a moment for it."""
        assert self._consumer is not None
        held, self._held = self._held, []
        for kept in held:
            self._take(kept)
        # One at a time: what a call returns after a rebalance callback ran in it is of the new assignment, never of the old one.
        timeout = _POLL_SECONDS
        for _ in range(_GATHER):
            message = self._consumer.poll(timeout)
            self._drop_if_moved()
            if message is None:
                return
            self._take(message)
            timeout = 0.0

    def _drop_if_moved(self) -> None:
        """After a rebalance reading begins at the committed offsets: what was gathered before comes again."""
        if self._moved:
            self._moved = False
            self._forget()

    def _forget(self) -> None:
        self._rows.clear()
        self._origins.clear()
        self._letters.clear()
        self._letter_bytes = 0
        self._uncommitted.clear()

    def _due(self) -> bool:
        if not self._uncommitted:
            return False
        full = len(self._rows) >= MAX_ROWS or self._letter_bytes >= _LETTER_BYTES
        return full or time.monotonic() - self._since >= MAX_SECONDS

    def _take(self, message: Message[bytes, bytes]) -> None:
        error = message.error()
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if error is not None or topic is None or partition is None or offset is None:
            self._complain(error)
            return
        if not self._uncommitted:
            self._since = time.monotonic()
        origin = Origin(topic, partition, offset, message.key(), message.value())
        try:
            self._rows.add(codec.decode(origin.value or b"", KINDS[topic]), partition, offset)
        except KvcensusError as problem:
            self.poisoned += 1
            log.warning("not written: %s[%d] offset %d: %s", topic, partition, offset, problem)
            if topic != BATCHES.name:  # the counting half sets those aside itself
                self._set_aside(origin, str(problem))
        else:
            self._origins.note(origin)
        self._next[topic, partition] = offset + 1
        self._uncommitted.add((topic, partition))

    def _set_aside(self, origin: Origin, reason: str) -> None:
        """Keep a message for the dead letters; what is one already is only counted, or it would come back again and again."""
        if origin.topic == DEAD_LETTERS.name:
            return
        letter = dead_letter(
            origin.topic, origin.partition, origin.offset, reader="sink", reason=reason, key=origin.key, payload=origin.value
        )
        self._letters.append(letter)
        self._letter_bytes += len(letter.payload)

    def _complain(self, error: KafkaError | None) -> None:
        if error is None:
            return
        if error.fatal():
            raise KvcensusError(f"Kafka: {error.str()}")
        log.debug("Kafka: %s", error.str())  # the client tries again by itself

    # -- writing ------------------------------------------------------------------------------------------------

    def _migrated_store(self) -> Database:
        return connect(self._settings.clickhouse_url, self._settings.data_dir, own=True, prepare=migrate.apply)

    def _open_store(self) -> Database:
        """The store with its schema up to date; waits for a server that does not answer yet."""
        pause = _FIRST_PAUSE
        while True:
            try:
                store = self._migrated_store()
            except StoreUnavailable as error:
                if not self.waiting:
                    log.warning("%s; waiting for it", error)
                self.waiting = True
                if self._stop.wait(pause):
                    raise _Stopping from None
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                if self.waiting:
                    log.info("the store answers")
                self.waiting = False
                return store

    def _deliver(self) -> None:
        """Insert what was gathered, set aside what cannot be, and commit. Waits while the store is away, then nothing more is read."""
        rows = len(self._rows)
        try:
            for batch in self._rows.batches():
                self._insert_patiently(batch)
            self._send_letters()
        except _Moved:
            self._drop_if_moved()
            return
        self.inserted += rows
        self._commit()
        self._forget()

    def _send_letters(self) -> None:
        """Only what the broker has acknowledged counts as set aside: the offset behind it is committed next."""
        left, pause = list(self._letters), _FIRST_PAUSE
        while left:
            left = self._letterbox.send(left, _LETTER_SECONDS)
            if not left:
                break
            if not self.waiting:
                log.warning("%d messages cannot be set aside on %s: no answer; trying again", len(left), DEAD_LETTERS.name)
            if self._stop.is_set():
                raise _Stopping
            self._wait(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        if self.waiting:
            self._resume()

    def _insert_patiently(self, batch: ColumnBatch) -> None:
        began, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            try:
                self._insert_once(batch)
            except StoreError as error:
                if not self.waiting:
                    log.warning("%s; results wait on their topics", error)
                if self._stop.is_set():
                    raise _Stopping from error
                self._wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            if self.waiting:
                log.info("the store takes rows again after %.0f s", time.monotonic() - began)
                self._resume()
            return

    def _insert_once(self, batch: ColumnBatch) -> None:
        assert self._store is not None
        refused = insert(self._store, batch)
        if not refused:
            return
        for row, problem in refused:
            key = ", ".join(repr(column[row]) for column in batch.columns[:5])
            log.warning("not written: row of %s (%s, ...): %s", batch.table, key, problem)
        self.bad_rows += len(refused)
        for place, problems in self._origins.of(batch, refused).items():
            self._set_aside(place, problems[0] if len(problems) == 1 else f"{problems[0]} (and {len(problems) - 1} more rows)")

    def _commit(self) -> None:
        assert self._consumer is not None
        offsets = [TopicPartition(*place, self._next[place]) for place in self._uncommitted if place in self._next]
        if not offsets:
            return
        try:
            if self._stop.is_set():
                self._consumer.commit(offsets=offsets, asynchronous=False)
            else:
                self._consumer.commit(offsets=offsets)
        except KafkaException as error:  # the rows are in; reading them again replaces them with themselves
            log.debug("offsets not committed: %s", error.args[0].str())

    # -- waiting ------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> None:
        """Let time pass without reading on, but stay a member of the group. Raises if the rows at hand are no longer ours."""
        assert self._consumer is not None
        if not self._paused:
            self._paused = True
            self._consumer.pause(self._consumer.assignment())
        self.waiting = True
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stop.is_set():
            message = self._consumer.poll(_POLL_SECONDS)
            if self._moved:
                self._held = [] if message is None else [message]
                self._resume()
                raise _Moved
            if message is not None:
                self._held.append(message)

    def _resume(self) -> None:
        assert self._consumer is not None
        self._paused = self.waiting = False
        self._consumer.resume(self._consumer.assignment())


class SinkService(Service):
    """The sink beside the Faust app, in a thread of its own."""

    def __init__(self, settings: WorkerSettings, failed: Callable[[BaseException], None]) -> None:
        super().__init__()
        self.sink = Sink(settings)
        self._failed = failed
        self._thread: threading.Thread | None = None

    async def on_start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="kvcensus-sink", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.sink.run()
        except BaseException as error:
            self._failed(error)

    async def on_stop(self) -> None:
        """End the thread; it gets some seconds to insert what it has."""
        self.sink.stop()
        if self._thread is not None:
            await self.loop.run_in_executor(None, self._thread.join, _STOP_SECONDS)
            if self._thread.is_alive():
                log.warning("the sink did not end within %.0f s; what it had is read again by the next worker", _STOP_SECONDS)
