"""From one socket's batches in order to the messages of each rank that publishes on it. Pure.

How ranks are named: without a configured rank by the number that their batches carry (0 where they carry none). With one, the first
rank seen on the socket is called so, since engines behind a balancer all say 0; batches of a further rank are kept apart under
their own number, and counted as mismatches. Positions remember who was called what.

Where the socket numbers its ranks together, what befalls the numbers befalls every rank: a gap is a loss of each, a restart
resets each, a batch that nobody can read is refused in each, since it may have been any rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from producers import wire
from producers.continuity import Arrival
from producers.numbering import MAX_RANKS, read_rank
from producers.stream import Position, RankStream, StreamCounters
from schemas.records import RankMessage

OTHER_ENGINE = "another engine answers under the same address: the engine restarted"


class Ranks:
    """The streams of one socket. ``make(dp_rank, position)`` makes one rank's, resumed where the position is not None.

    ``dp_rank`` is the configured rank, None for whatever the batches name. ``positions`` are those that :attr:`positions` gave before
    another process's end; those that were named under another configured rank are left. Give the socket
    (:class:`producers.subscription.Subscription`) the values of :attr:`positions` as they are after this.
    """

    def __init__(
        self,
        make: Callable[[int, Position | None], RankStream],
        *,
        dp_rank: int | None = None,
        positions: Mapping[int, Position] | None = None,
        max_payload_bytes: int = wire.MAX_PAYLOAD_BYTES,
    ) -> None:
        self.streams: dict[int, RankStream] = {}
        """The streams by the name of their rank."""
        self._make = make
        self._max_payload_bytes = max_payload_bytes
        self._by_wire: dict[int, RankStream] = {}
        self._shared = False
        self._process_started_us: int | None = None
        for name, position in sorted(usable_positions(dp_rank, positions or {}).items()):
            stream = self.streams[name] = make(name, position)
            if stream.wire_rank is None and dp_rank is None:
                stream.wire_rank = name
            if stream.wire_rank is not None:
                self._by_wire[stream.wire_rank] = stream
        if dp_rank is not None and dp_rank not in self.streams:
            self.streams[dp_rank] = make(dp_rank, None)
        self._configured = None if dp_rank is None else self.streams[dp_rank]
        if any(stream.shared for stream in self.streams.values()):
            self._number_together(True)

    @property
    def positions(self) -> dict[int, Position]:
        """Where each rank stands, by its name: to be kept, for another process to go on from."""
        return {name: stream.position for name, stream in self.streams.items()}

    @property
    def counters(self) -> StreamCounters:
        """The sum over the ranks."""
        total = StreamCounters()
        for stream in self.streams.values():
            for name in StreamCounters.__struct_fields__:
                setattr(total, name, getattr(total, name) + getattr(stream.counters, name))
        return total

    def start(self, observed_at_ms: int) -> list[RankMessage]:
        """What opens the streams known so far: the operator's declaration, for each rank. A further one's comes with its first batch."""
        return [message for stream in self.streams.values() for message in stream.start(observed_at_ms)]

    def process_started(self, started_us: int) -> None:
        """Tell when the engine's process started, before an arrival that is ``reconnected``: see :meth:`RankStream.process_started`."""
        self._process_started_us = started_us

    def feed(self, arrival: Arrival) -> list[RankMessage]:
        """The messages that a batch gives rise to: each rank's in order, those of several ranks where a socket numbers them together."""
        started_us, self._process_started_us = self._process_started_us, None
        if arrival.shared is not None and arrival.shared != self._shared:
            self._number_together(arrival.shared)
        rank = arrival.rank
        if rank is None:
            rank = read_rank(arrival.payload, self._by_wire, self._max_payload_bytes)
        stream = self._by_wire.get(rank) if rank is not None else None
        if stream is not None and not self._shared:
            return self._feed(stream, arrival, started_us)
        messages: list[RankMessage] = []
        if stream is None:
            if rank is None and self._shared:
                return [message for each in list(self.streams.values()) for message in self._feed(each, arrival, started_us)]
            stream = self._nameless(arrival, messages) if rank is None else self._name(rank, arrival, messages)
        if stream is None:
            assert rank is not None
            messages.append(self._refuse(rank, arrival))
        else:
            life_id = stream.life_id
            own = self._feed(stream, arrival, started_us)
            messages += own
            reset = next((message.holder_reset for message in own if message.holder_reset is not None), None)
            if self._shared and reset is not None and stream.life_id != life_id:
                others = (other for other in self.streams.values() if other is not stream)
                messages += [other.restart(reset.boundary_us, reset.reason, arrival.at_ms) for other in others]
        if self._shared:
            messages += self._pass_over(stream, arrival)
        return messages

    # -- one rank

    def _feed(self, stream: RankStream, arrival: Arrival, started_us: int | None) -> list[RankMessage]:
        if started_us is not None:
            stream.process_started(started_us)
        if arrival.begins_life and stream.next_seq is not None:
            stream.engine_restarted(OTHER_ENGINE)
        batches = stream.counters.batches
        messages = stream.feed(arrival.seq, arrival.payload, arrival.at_ms, digest=arrival.digest, reconnected=arrival.reconnected)
        if self._configured is not None and stream is not self._configured:
            stream.counters.rank_mismatches += stream.counters.batches - batches
        return messages

    def _refuse(self, rank: int, arrival: Arrival) -> RankMessage:
        if self._configured is not None and rank == self._configured.dp_rank:
            reason = f"names rank {rank}, which the configured rank already calls the engine's rank {self._configured.wire_rank}"
            return self._configured.refuse(arrival.payload, reason, arrival.at_ms)
        first = next(iter(self.streams.values()))
        return first.refuse(arrival.payload, f"names rank {rank}, one more than the {MAX_RANKS} kept apart on one socket", arrival.at_ms)

    # -- names

    def _nameless(self, arrival: Arrival, messages: list[RankMessage]) -> RankStream | None:
        """Whose a batch is that nobody can read, where it may be one rank's only."""
        if self._configured is not None:
            return self._configured
        return next(iter(self.streams.values()), None) or self._name(0, arrival, messages)

    def _name(self, rank: int, arrival: Arrival, messages: list[RankMessage]) -> RankStream | None:
        """The stream of a rank that was not seen before, opened in ``messages``; None if it can be given no name."""
        configured = self._configured
        if configured is not None and configured.wire_rank is None:
            configured.wire_rank = rank
            self._by_wire[rank] = configured
            return configured
        if rank in self.streams or len(self.streams) >= MAX_RANKS:
            return None
        stream = self.streams[rank] = self._by_wire[rank] = self._make(rank, None)
        stream.wire_rank = rank
        messages += stream.start(arrival.at_ms)
        if self._shared:
            self._join(stream)
        return stream

    # -- numbers that the ranks share

    def _number_together(self, shared: bool) -> None:
        self._shared = shared
        for stream in self.streams.values():
            if shared:
                self._join(stream)
            else:
                stream.part()

    def _join(self, stream: RankStream) -> None:
        known = next((other for other in self.streams.values() if other is not stream and other.next_seq is not None), None)
        if known is None:
            stream.shared = True
        else:
            stream.join(known)

    def _pass_over(self, stream: RankStream | None, arrival: Arrival) -> list[RankMessage]:
        """Tell every other rank that this number is none of its own."""
        at_us = 0
        if stream is not None:
            if stream.next_seq is None or arrival.seq >= stream.next_seq:
                return []  # a number that is not believed
            at_us = stream.position.newest_us
        messages: list[RankMessage] = []
        for other in self.streams.values():
            if other is not stream:
                messages += other.pass_over(arrival.seq, at_us, arrival.digest, arrival.at_ms, reconnected=arrival.reconnected)
        return messages


def usable_positions(dp_rank: int | None, positions: Mapping[int, Position]) -> dict[int, Position]:
    """Those of ``positions`` that were named as they would be now, under the configured ``dp_rank``."""
    if dp_rank is None:
        return {name: position for name, position in positions.items() if position.wire_rank in (None, name)}
    return dict(positions) if dp_rank in positions else {}
