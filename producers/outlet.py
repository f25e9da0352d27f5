"""From the spool into Kafka: what waits goes out in order, and what Kafka acknowledged leaves the spool.

Whether Kafka is there, with the topics, is found out on a thread of its own: an answer that does not come must not keep the
engine's batches waiting. Until it is, nothing is handed over. Only so much is handed over unacknowledged: the rest stays where
the spool's bound can still force it out, oldest first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable

from producers.delivery import Delivery, DeliveryError
from producers.spool import Entry, Spool

logger = logging.getLogger("kvcensus.forwarder")

_IN_FLIGHT_BYTES = 16 * 1024 * 1024
_PROBE_SECONDS = 2.0
_PAUSE_SECONDS = 0.5
_JOIN_SECONDS = 0.2


class Outlet:
    """One spool's way into Kafka. Used by one thread. ``patience`` is how many seconds Kafka may be away at the start unmentioned."""

    def __init__(self, spool: Spool, delivery: Delivery, topics: Iterable[str], patience: float) -> None:
        self._spool = spool
        self._delivery = delivery
        self._topics = tuple(topics)
        self._in_flight_limit = max(min(_IN_FLIGHT_BYTES, spool.max_bytes // 4), 1)
        self._handed: deque[tuple[int, int]] = deque()
        self._handed_count = 0
        self._in_flight = 0
        self._waiting: deque[tuple[int, Entry]] = deque()
        self._open = False
        self._fault: str | None = None
        self._told_at = time.monotonic() + patience
        self._closing = threading.Event()
        self._probe = threading.Thread(target=self._find_kafka, name="kvcensus-kafka-probe", daemon=True)
        self._probe.start()

    @property
    def open(self) -> bool:
        """Whether Kafka has answered, with the topics, since the start."""
        return self._open

    @property
    def up(self) -> bool:
        """Whether Kafka takes messages, as far as is known."""
        return self._open and self._delivery.away is None

    @property
    def fault(self) -> str | None:
        """What is wrong with Kafka now, as far as is known."""
        return self._delivery.away if self._open else self._fault

    @property
    def in_flight(self) -> int:
        """Messages handed over and not acknowledged yet."""
        return len(self._handed)

    @property
    def delivered(self) -> int:
        """Messages that Kafka has acknowledged."""
        return self._delivery.delivered

    @property
    def too_large(self) -> int:
        """Messages that Kafka would not take for their size: a refusal went out instead."""
        return self._delivery.too_large

    def pump(self, timeout: float = 0.0) -> bool:
        """Hand over what there is room for, and let go of what was acknowledged; whether something is still under way.

        Waits up to ``timeout`` seconds for Kafka if there was nothing to hand over.
        """
        if not self._open:
            self._tell()
            if timeout:
                self._closing.wait(timeout)
            return self._spool.messages > 0
        moved = self._hand_over()
        self._delivery.poll(0 if moved else timeout)
        self._release()
        return bool(self._handed) or self._spool.messages > 0

    def close(self, deadline: float) -> None:
        """Go on until everything is acknowledged or ``deadline`` (on the monotonic clock); what is left stays in the spool."""
        while self.pump(0.05) and time.monotonic() < deadline:
            pass
        self._closing.set()
        if self._open:
            self._delivery.close(0.0)
            self._release()
        self._probe.join(_JOIN_SECONDS)  # one that waits for an answer ends with the process

    def _hand_over(self) -> bool:
        moved = False
        while self._in_flight < self._in_flight_limit:
            if not self._waiting:
                self._waiting.extend(self._spool.take(self._in_flight_limit - self._in_flight))
                if not self._waiting:
                    break
            index, entry = self._waiting[0]
            if not self._delivery.offer(entry.topic, entry.key, entry.value):
                break
            self._waiting.popleft()
            self._handed.append((index, len(entry.value)))
            self._in_flight += len(entry.value)
            moved = True
        return moved

    def _release(self) -> None:
        last = -1
        while self._handed and self._handed_count < self._delivery.acknowledged:
            last, size = self._handed.popleft()
            self._in_flight -= size
            self._handed_count += 1
        if last >= 0:
            self._spool.acknowledge(last)

    def _tell(self) -> None:
        if self._fault is not None and time.monotonic() >= self._told_at:
            self._told_at = float("inf")
            logger.warning("%s; until then everything waits in %s", self._fault, self._spool.place)

    def _find_kafka(self) -> None:
        while not self._closing.is_set():
            try:
                fault = self._delivery.probe(self._topics, _PROBE_SECONDS)
            except DeliveryError as error:
                fault = str(error)
            if fault is None:
                self._open = True
                if self._told_at == float("inf"):
                    logger.warning("Kafka is there: what waited goes out now")
                return
            self._fault = fault
            self._closing.wait(_PAUSE_SECONDS)
