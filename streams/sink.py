"""From the result topics (and the facts) into ClickHouse: a consumer of its own, committed only after the insert.

It reads in a group of its own, apart from the counting half: that one never commits, because its state begins at the start of the
topics; this one has no state but the rows it has not inserted yet. Rows are keyed and versioned, so a row that comes twice is one row.
docs/sink.md says what is guaranteed, and what each line in the log means.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas.errors import KvcensusError
from schemas.topics import DEAD_LETTERS, RANK_WINDOWS
from sql import migrate
from sql.columns import ColumnBatch
from sql.store import Database, StoreError, connect
from streams.dead_letters import Letterbox
from streams.positions import Place
from streams.settings import DEFAULT_SESSION_MS, WorkerSettings
from streams.sink_gathered import KINDS, Gathered
from streams.sink_rows import Inserter, Origin, column_kinds, excerpt
from streams.sink_trouble import Waiting, advice, may_pass

log = logging.getLogger("kvcensus.sink")
_client_log = logging.getLogger("kvcensus.librdkafka")

MAX_ROWS = 20_000
"""Rows that are gathered for a delivery; the last message may bring more."""

MAX_BYTES = 8 * 1024 * 1024
"""Bytes of messages that are gathered for a delivery; the last message may bring more."""

INSERT_ROWS = 50_000
"""A delivery of more rows in one table, of one message then, is inserted in pieces of so many."""

MAX_SECONDS = 1.0
"""Longest time a row waits for others."""

_GATHER = 500
_POLL_SECONDS = 0.1
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
_LETTER_SECONDS = 10.0
_REPORT_SECONDS = 60.0
_BREATH_SECONDS = 5.0
_IDLE_SECONDS = 1.0
_NAMED_ROWS = 3
_POLL_INTERVAL_MS = 900_000  # an insert may take as long as the store is waited for, several times in one delivery

Beside = Callable[[Database], None]
"""What is done with the store in the sink's thread: after each delivery, about once a second while there are none, and at the end."""


class _Stopping(Exception):
    """The worker stops: what has not been inserted is read again by the next."""


class _Moved(Exception):
    """A rebalance took partitions away: the rows at hand were not committed, and whoever has the partitions reads them again."""


class Sink:
    """The consumer loop. :meth:`run` blocks until :meth:`stop` is called from another thread, or raises.

    It writes to the store of the settings, owned by this process if it is embedded. What it has done is counted: rows ``inserted`` by
    now, messages ``poisoned`` (they could not be read), ``bad_rows`` that the store refused for their values.
    """

    def __init__(self, settings: WorkerSettings, beside: Beside | None = None) -> None:
        self.inserted = 0
        self.poisoned = 0
        self.bad_rows = 0
        self._deliveries = 0
        self._waiting = Waiting()
        self._settings = settings
        self._beside = beside
        self._stop = threading.Event()
        self._gathered = Gathered()
        self._letterbox = Letterbox(settings.client_config())
        self._next: dict[Place, int] = {}
        self._busy = False
        self._held: list[Message[bytes, bytes]] = []
        self._paused = False
        self._moved = False
        self._since = 0.0
        self._polled = self._reported = self._idled = time.monotonic()
        self._told = (0, 0, 0)
        self._store: Database | None = None
        self._inserter: Inserter | None = None
        self._consumer: Consumer | None = None

    @property
    def waiting(self) -> bool:
        """Whether it waits for the store, or for the broker to take what is set aside."""
        return self._waiting.since is not None

    @property
    def stopping(self) -> bool:
        """Whether it was asked to end."""
        return self._stop.is_set()

    @property
    def leads(self) -> bool:
        """Whether it has the first partition of the rank windows: of all sinks of a group one has."""
        return self._consumer is not None and any(
            each.topic == RANK_WINDOWS.name and not each.partition for each in self._consumer.assignment()
        )

    def stop(self) -> None:
        """Ask :meth:`run` to end: rows at hand are inserted first if the store takes them at once."""
        self._stop.set()

    def positions(self) -> dict[Place, int]:
        """(topic, partition) to next offset; nothing while the sink waits for the store or works for it, which is no stall."""
        return {} if self.waiting or self._busy else dict(self._next)

    def prepare(self) -> None:
        """Open the store already now, so that one that cannot be used is known at once; :meth:`run` waits for one that may come round.

        Raises :class:`KvcensusError`.
        """
        try:
            self._store = self._migrated_store()
        except StoreError as error:
            if not may_pass(error):
                raise
            log.debug("the store does not answer yet: %s", error)

    def run(self) -> None:
        """Open the store, bring its schema up to date, and insert what the topics bring.

        Raises :class:`KvcensusError` for a store that cannot be used and a group that cannot be joined.
        """
        try:
            self._open_store()
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
            "fetch.max.bytes": 16 * 1024 * 1024,
            "max.poll.interval.ms": _POLL_INTERVAL_MS,
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
                self._do_beside()
            elif time.monotonic() - self._idled >= _IDLE_SECONDS:
                self._do_beside()
            self._report()
        if self._gathered.next:
            self._deliver()
        if not self.waiting:
            self._do_beside()

    def _gather(self) -> None:
        """Take what has arrived, or wait a moment for it; no more than makes a delivery."""
        held, self._held = self._held, []
        for kept in held:
            self._take(kept)
        # One at a time: what a call returns after a rebalance callback ran in it is of the new assignment, never of the old one.
        timeout = _POLL_SECONDS
        for _ in range(_GATHER):
            if self._full():
                return
            message = self._poll(timeout)
            self._drop_if_moved()
            if message is None:
                return
            self._take(message)
            timeout = 0.0

    def _poll(self, seconds: float) -> Message[bytes, bytes] | None:
        assert self._consumer is not None
        message = self._consumer.poll(seconds)
        self._polled = time.monotonic()
        return message

    def _drop_if_moved(self) -> None:
        """After a rebalance reading begins at the committed offsets: what was gathered before comes again."""
        if self._moved:
            self._moved = False
            self._gathered.clear()

    def _full(self) -> bool:
        return len(self._gathered.rows) >= MAX_ROWS or self._gathered.bytes >= MAX_BYTES

    def _due(self) -> bool:
        return bool(self._gathered.next) and (self._full() or time.monotonic() - self._since >= MAX_SECONDS)

    def _take(self, message: Message[bytes, bytes]) -> None:
        error = message.error()
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if error is not None or topic is None or partition is None or offset is None:
            self._complain(error)
            return
        if not self._gathered.next:
            self._since = time.monotonic()
        problem = self._gathered.take(Origin(topic, partition, offset, message.key(), message.value()))
        if problem is not None:
            self.poisoned += 1
            log.warning("not written: %s[%d] offset %d: %s", topic, partition, offset, problem)
        self._next[topic, partition] = offset + 1

    def _complain(self, error: KafkaError | None) -> None:
        if error is None:
            return
        if error.fatal():
            raise KvcensusError(f"Kafka: {error.str()}")
        log.debug("Kafka: %s", error.str())  # the client tries again by itself

    # -- writing ------------------------------------------------------------------------------------------------

    def _migrated_store(self) -> Database:
        return connect(self._settings.clickhouse_url, self._settings.data_dir, own=True, prepare=migrate.apply)

    def _open_store(self) -> None:
        """The store with its schema up to date; waits for one that may come round."""
        pause = _FIRST_PAUSE
        while True:
            try:
                self._store = self._store or self._migrated_store()
                self._inserter = Inserter(self._store, column_kinds(self._store), self._breathe)
            except StoreError as error:
                if not may_pass(error):
                    raise
                if self._waiting.begin(error, time.monotonic()):
                    log.warning("%s; waiting for it: %s", error, advice(error))
                if self._stop.wait(pause):
                    raise _Stopping from None
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            if self._waiting.end(time.monotonic()) is not None:
                log.info("the store answers")
            return

    def _deliver(self) -> None:
        """Insert what was gathered, set aside what cannot be, and commit. Waits while the store is away, then nothing more is read."""
        gathered = self._gathered
        self._busy = True
        try:
            for batch in gathered.rows.batches():
                for start in range(0, len(batch), INSERT_ROWS):
                    self._patiently(partial(self._insert, batch, start))
            if gathered.letters:
                self._send_letters()
        except _Moved:
            self._drop_if_moved()
            self._waiting.end(time.monotonic())
            return
        finally:
            self._busy = False
        self.inserted += len(gathered.rows)
        self._deliveries += 1
        self._commit()
        gathered.clear()

    def _insert(self, batch: ColumnBatch, start: int) -> None:
        assert self._inserter is not None
        refused = self._inserter.insert(batch, start, min(start + INSERT_ROWS, len(batch)))
        for row, problem in refused[:_NAMED_ROWS]:
            log.warning("not written: row of %s (%s, ...): %s", batch.table, excerpt(batch, row), problem)
        if len(refused) > _NAMED_ROWS:
            log.warning("not written: %d more rows of %s; all are in %s", len(refused) - _NAMED_ROWS, batch.table, DEAD_LETTERS.name)
        self.bad_rows += len(refused)
        for place, problems in self._gathered.origins.of(batch, refused).items():
            reason = problems[0] if len(problems) == 1 else f"{problems[0]} (and {len(problems) - 1} more rows)"
            self._gathered.set_aside(place, reason)

    def _patiently(self, insert: Callable[[], None]) -> None:
        """``insert``, until the store takes it."""
        pause = _FIRST_PAUSE
        while True:
            try:
                insert()
            except StoreError as error:
                if self._waiting.begin(error, time.monotonic()):
                    log.warning("%s; results wait on their topics. What to do: %s", error, advice(error))
                if self._stop.is_set():
                    raise _Stopping from error
                self._wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                self._resume("the store takes rows again")
                return

    def _send_letters(self) -> None:
        """Only what the broker has acknowledged counts as set aside: the offset behind it is committed next."""
        left, pause = list(self._gathered.letters), _FIRST_PAUSE
        while left := self._letterbox.send(left, _LETTER_SECONDS):
            cause = f"{len(left)} messages cannot be set aside on {DEAD_LETTERS.name}: no answer"
            if self._waiting.begin(cause, time.monotonic()):
                log.warning("%s; trying again", cause)
            if self._stop.is_set():
                raise _Stopping
            self._wait(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        self._resume(f"{DEAD_LETTERS.name} takes messages again")

    def _commit(self) -> None:
        assert self._consumer is not None
        offsets = [TopicPartition(*place, offset) for place, offset in self._gathered.next.items() if place in self._next]
        if not offsets:
            return
        try:
            if self._stop.is_set():
                self._consumer.commit(offsets=offsets, asynchronous=False)
            else:
                self._consumer.commit(offsets=offsets)
        except KafkaException as error:  # the rows are in; reading them again replaces them with themselves
            log.debug("offsets not committed: %s", error.args[0].str())

    def _do_beside(self) -> None:
        self._idled = time.monotonic()
        if self._beside is None:
            return
        assert self._store is not None
        self._busy = True
        try:
            self._beside(self._store)
        except StoreError as error:  # whatever it is, it comes again; and if the store is away the next delivery waits for it
            log.warning("%s; trying again after the next delivery", error)
        finally:
            self._busy = False

    # -- waiting ------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> None:
        """Let time pass without reading on, but stay a member of the group. Raises if the rows at hand are no longer ours."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stop.is_set():
            self._poll_paused(_POLL_SECONDS)
            self._report()

    def _breathe(self) -> None:
        """Where one insert becomes many: the group takes a member that never asks for gone."""
        if self._stop.is_set():
            raise _Stopping
        if time.monotonic() - self._polled >= _BREATH_SECONDS:
            self._poll_paused(0.0)

    def _poll_paused(self, seconds: float) -> None:
        assert self._consumer is not None
        if not self._paused:
            self._paused = True
            self._consumer.pause(self._consumer.assignment())
        message = self._poll(seconds)
        if self._moved:
            self._held = [] if message is None else [message]
            self._read_on()
            raise _Moved
        if message is not None:
            self._held.append(message)

    def _resume(self, news: str) -> None:
        took = self._waiting.end(time.monotonic())
        if took is not None:
            log.info("%s after %.0f s", news, took)
        self._read_on()

    def _read_on(self) -> None:
        assert self._consumer is not None
        if self._paused:
            self._paused = False
            self._consumer.resume(self._consumer.assignment())

    def _report(self) -> None:
        """A line a minute on what was done, unless that is nothing."""
        now = time.monotonic()
        done = (self.inserted, self.poisoned, self.bad_rows)
        if now - self._reported < _REPORT_SECONDS or (done == self._told and not self.waiting):
            return
        self._reported, before, self._told = now, self._told, done
        waits = "" if self._waiting.since is None else f"; waiting for {now - self._waiting.since:.0f} s: {self._waiting.cause}"
        log.info(
            "%d rows written since the start (%d since this was last said) in %d deliveries; messages not readable: %d, rows refused: %d%s",
            self.inserted, self.inserted - before[0], self._deliveries, self.poisoned, self.bad_rows, waits,
        )  # fmt: skip
