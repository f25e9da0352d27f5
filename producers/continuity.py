"""Order out of what one engine rank's sockets deliver: pure, no sockets, no clock of its own.

An engine numbers its batches from 0 in each process life, and that number is the only continuity there is. Live batches
come on one socket; another one, if the engine has it, plays back what it still buffers. :class:`Continuity` is told what
arrived and what time it is, says when to ask for a replay, and gives out batches in the order in which they are to be read:

- a jump ahead is asked for, from the last batch already given out: that one batch tells whether the engine that answers
  is still in the same life; live batches wait until the answer is complete or overdue;
- an answer with holes is asked for once more, from its first hole; what is still missing is left as a jump, to be declared
  by the reader of the order;
- a jump back is a restart: the buffer then belongs to the new life, so it is asked for from 0, and the batches of the new
  life come out from its first one on;
- every new connection is a reason to ask: the tail of what was missed shows in nothing else. An order that goes on where another
  process left it asks in the same way, so that what happened meanwhile is told like what happened while disconnected;
- where a connection broke and no answer proves that the engine is still in the same life, the first batch after it is marked.

What came by replay and live is given out once. What came live twice is given out twice: that is the engine's doing, for
the reader to judge and count.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Literal

import msgspec

REMEMBERED_BATCHES = 16_384
"""How many of the latest batches of a life are remembered by a digest, to tell a repetition from a restart."""


def payload_digest(payload: bytes) -> bytes:
    """16 bytes that tell one payload from another, the same in every process: what a batch is remembered by."""
    return hashlib.blake2b(payload, digest_size=16).digest()


class Arrival(msgspec.Struct, gc=False, eq=False):
    """One batch as an engine sent it.

    ``at_ms`` is this host's clock at receipt; ``replayed``: it came from the replay socket; ``begins_life``: it is the first of
    another engine life. ``reconnected``: it is the first one after the connection broke, or after another process's end, and no
    replay proves that the engine is still in the same life. ``rank`` is the data-parallel rank that the payload names (None:
    not looked at, or it cannot be read). ``shared`` tells how a socket with several ranks numbers them: all together (True), or
    each rank by itself (False); None: one rank only, so far. ``epoch`` counts the connections before it came.
    """

    seq: int
    payload: bytes
    at_ms: int
    replayed: bool = False
    begins_life: bool = False
    reconnected: bool = False
    rank: int | None = None
    shared: bool | None = None
    epoch: int = 0
    known_digest: bytes = b""

    @property
    def digest(self) -> bytes:
        """:func:`payload_digest` of the payload, made once."""
        if not self.known_digest:
            self.known_digest = payload_digest(self.payload)
        return self.known_digest


class Resume(msgspec.Struct, frozen=True):
    """Where another process left an order: the number expected next, the digest of the batch before it (empty: not known), and
    the newest engine time in microseconds."""

    next_seq: int
    anchor: bytes
    newest_us: int


Cause = Literal["attached", "gap", "restart", "other life", "nothing buffered", "doubt"]
"""Why a replay is asked for. The first two ask within the life given out so far, the others from 0 for all of a new one."""


@dataclass
class Exchange:
    """A question to the replay socket and what came back so far."""

    cause: Cause
    start: int
    deadline: float
    answered: dict[int, Arrival] = field(default_factory=dict)
    asked_again: bool = False
    asked_from: int = 0
    before: dict[int, Arrival] = field(default_factory=dict)
    """The answer that led to this question: what the engine buffered a moment earlier, unless it restarted since."""

    def all(self) -> list[Arrival]:
        """What came back, by number, with the earlier answer where the two agree or this one is empty."""
        shared = self.before.keys() & self.answered.keys()
        agree = not self.answered or (shared and all(self.before[seq].payload == self.answered[seq].payload for seq in shared))
        known = {**self.before, **self.answered} if agree else self.answered
        return [known[seq] for seq in sorted(known)]


@dataclass
class Counters:
    """What happened since the start.

    ``replayed``: batches given out as a replay brought them; ``overlaps``: batches that came by replay and live, given out once;
    ``jumps_left``: places where numbers are missing in what was given out.
    """

    replays_asked: int = 0
    replays_overdue: int = 0
    replayed: int = 0
    overlaps: int = 0
    jumps_left: int = 0


class Continuity:
    """The order of one rank's batches. ``ready`` holds what may be read; the reader takes from its left.

    ``engine_time`` gives a payload's engine time in microseconds, or None if it cannot be read; it is asked only around
    restarts and replays. ``replay_timeout`` is the longest silence of the replay socket, in seconds, that is waited out.
    ``resume`` goes on where another process left the order. Several orders may share one ``ready`` and one ``counters``.
    """

    def __init__(
        self,
        can_replay: bool,
        replay_timeout: float,
        engine_time: Callable[[bytes], int | None],
        *,
        resume: Resume | None = None,
        ready: deque[Arrival] | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.ready: deque[Arrival] = deque() if ready is None else ready
        self.counters = Counters() if counters is None else counters
        self.ask: int | None = None
        """A sequence number to ask the replay socket for, once; set back to None by :meth:`take_ask`."""
        self._can_replay = can_replay
        self._replay_timeout = replay_timeout
        self._engine_time = engine_time
        self._next: int | None = resume.next_seq if resume else None
        self._newest: bytes | None = None
        self._newest_us: int | None = resume.newest_us if resume else None
        self._given: dict[int, bytes] = {resume.next_seq - 1: resume.anchor} if resume and resume.anchor else {}
        self._epoch = 0
        self._unproven = False
        """The connection is another one than that of the last batch given out, and nothing yet proves the same engine life."""
        self._given_by_replay: set[int] = set()
        self._doubtful = False
        """The engine buffered nothing of the life given out so far: what comes next is looked at before it counts as its continuation."""
        self._exchange: Exchange | None = None
        self._held: deque[Arrival] = deque()

    @property
    def waiting(self) -> bool:
        """Whether a replay is under way, so that live batches wait."""
        return self._exchange is not None

    @property
    def held(self) -> int:
        """How many live batches wait for a replay."""
        return len(self._held)

    @property
    def next_seq(self) -> int | None:
        """The number expected next; None before the first batch."""
        return self._next

    @property
    def question(self) -> int | None:
        """The number from which the replay under way was last asked for; None without one."""
        return self._exchange.asked_from if self._exchange else None

    @property
    def deadline(self) -> float | None:
        """When :meth:`tick` has to be called at the latest, on the clock of the ``now`` arguments."""
        return self._exchange.deadline if self._exchange else None

    def take_ask(self) -> int | None:
        """The start number of a replay to ask for now, on a fresh socket: an older question's answers no longer count."""
        ask, self.ask = self.ask, None
        self.counters.replays_asked += ask is not None
        return ask

    def connected(self, now: float) -> None:
        """The live socket is connected (again): ask for what was published before."""
        self._epoch += 1
        self._unproven = self._next is not None
        if not self._can_replay:
            return
        if self._exchange is None:
            self._begin("attached", now)
        else:  # the question may have been lost with the old connection; the patience is not renewed
            self._exchange.answered.clear()
            self._exchange.asked_again = False
            self._put_ask(self._exchange.start)

    def live(self, arrival: Arrival, now: float) -> None:
        """A batch came on the live socket."""
        arrival.epoch = self._epoch
        if self._exchange is not None:
            self._held.append(arrival)
        elif arrival.seq == self._next and not self._doubtful:
            self._give(arrival)
        else:
            self._out_of_order(arrival, now)

    def replayed(self, arrival: Arrival, now: float) -> None:
        """A batch came on the replay socket. The first one of a number stands; one before what was asked for is somebody else's answer."""
        if self._exchange is None:
            return
        arrival.epoch = self._epoch
        self._exchange.deadline = now + self._replay_timeout
        if arrival.seq >= self._exchange.start:
            self._exchange.answered.setdefault(arrival.seq, arrival)

    def replay_ended(self, now: float) -> None:
        """The replay socket sent its end marker."""
        exchange = self._exchange
        if exchange is None:
            return
        other = self._other_life(exchange)
        if other is not None:
            self._begin(other, now, exchange.answered)
            return
        hole = None if exchange.asked_again else self._first_hole(exchange)
        if hole is None:
            self._settle(exchange, now)
            if not exchange.answered and exchange.cause in ("attached", "nothing buffered") and self._exchange is None:
                # Nothing buffered, though there may have been batches: the engine may have restarted and not published yet.
                self._doubtful = self._next is not None
            return
        exchange.asked_again = True
        exchange.deadline = now + self._replay_timeout
        self._put_ask(hole)

    def tick(self, now: float) -> None:
        """Time passed: give up a replay that has been silent for too long. Where it brought something, its end marker was lost."""
        exchange = self._exchange
        if exchange is None or now < exchange.deadline:
            return
        self.counters.replays_overdue += 1
        if exchange.answered:
            self.replay_ended(now)
        else:
            self._settle(exchange, now)

    def give_up(self, now: float) -> None:
        """Wait for no replay any more: give out what there is."""
        while self._exchange is not None:
            self._settle(self._exchange, now)

    # -- asking

    def _begin(self, cause: Cause, now: float, before: dict[int, Arrival] | None = None) -> None:
        within = cause in ("attached", "gap") and self._next is not None
        start = max(self._next - 1, 0) if within and self._next is not None else 0
        self._exchange = Exchange(cause, start, now + self._replay_timeout, before=before or {})
        self._doubtful = False
        self._put_ask(start)

    def _put_ask(self, start: int) -> None:
        assert self._exchange is not None
        self.ask = self._exchange.asked_from = start

    def _out_of_order(self, arrival: Arrival, now: float) -> None:
        cause: Cause | None = None
        if self._doubtful:
            cause = "doubt"
        elif self._follows(arrival):
            cause = "gap"
        elif self._restarted_by(arrival):
            cause = "restart"
        if cause is None or arrival.seq == 0 or not self._can_replay:
            self._accept(arrival)
        else:
            self._held.append(arrival)
            self._begin(cause, now)

    # -- judging

    def _repeats(self, arrival: Arrival) -> bool:
        return self._given.get(arrival.seq) == arrival.digest

    def _restarted_by(self, arrival: Arrival) -> bool:
        """Whether a batch with a number already passed is of a new engine life.

        A payload that cannot be read proves nothing. Where the number is remembered, another payload makes it a restart; where
        it is forgotten, only a newer engine time does.
        """
        if self._repeats(arrival):
            return False
        at_us = self._engine_time(arrival.payload)
        if at_us is None:
            return False
        if arrival.seq in self._given:
            return True
        newest_us = self._newest_time()
        return newest_us is None or at_us > newest_us

    def _newest_time(self) -> int | None:
        """Engine time of the last batch given out, or of the last one before it that could be read and was looked at."""
        if self._newest is not None:
            at_us = self._engine_time(self._newest)
            self._newest_us, self._newest = self._newest_us if at_us is None else at_us, None
        return self._newest_us

    def _is_new(self, answers: list[Arrival]) -> bool:
        """Whether an answer is of another life than the one given out so far."""
        return any(self._restarted_by(answer) for answer in answers if not self._follows(answer))

    def _other_life(self, exchange: Exchange) -> Cause | None:
        """What the answer to a question from the last batch given out says of the engine being in another life.

        The same life still buffers at least its newest batch, which is the last one given out or a later one. So another payload
        under that number proves another life, and an answer without any batch makes one likely.
        """
        if exchange.cause not in ("attached", "gap") or self._next is None:
            return None
        if not exchange.answered:
            return "nothing buffered"
        anchor = exchange.answered.get(self._next - 1)
        return None if anchor is None or self._repeats(anchor) else "other life"

    def _first_hole(self, exchange: Exchange) -> int | None:
        """The first number missing inside what the replay and the waiting live batches make up together.

        What lies before the first replayed batch is not a hole: the engine's buffer no longer reaches back there.
        """
        if not exchange.answered:
            return None
        expected = min(exchange.answered)
        known = set(exchange.answered)
        older = self._older(self._held, exchange.answered[expected])
        last = -1
        for arrival in islice(self._held, older, None):
            if arrival.seq <= last:
                break
            known.add(last := arrival.seq)
        for seq in sorted(known):
            if seq > expected:
                return expected
            if seq == expected:
                expected += 1
        return None

    # -- giving out

    def _settle(self, exchange: Exchange, now: float) -> None:
        """The replay is over: give out its batches and the waiting live ones in order, then go on live."""
        self._exchange = None
        self.ask = None
        held, self._held = self._held, deque()
        answers = exchange.all()
        anchor = exchange.answered.get(self._next - 1) if self._next is not None else None
        if anchor is not None and self._repeats(anchor):
            self._unproven = False
        if answers:
            for _ in range(self._older(held, answers[0])):
                self._accept(held.popleft())
            if exchange.cause == "other life" or self._is_new(answers):
                answers[0] = self._new_life(answers[0])
        for answer in answers:
            while held and self._follows(held[0]) and held[0].seq < answer.seq:
                self._give(held.popleft())  # the answer had a hole that a live batch fills
            given = answer
            if held and held[0].seq == answer.seq and held[0].payload == answer.payload:
                given = msgspec.structs.replace(held.popleft(), begins_life=answer.begins_life)
                self.counters.overlaps += 1
            if self._follows(given):
                self._give(given)
        if exchange.cause == "restart" and held and not self._follows(held[0]):
            self._accept(held.popleft())  # the restart that made us ask: not to be asked for again
        while held and self._follows(held[0]):
            self._give(held.popleft())  # jumps here were part of the question
        for arrival in held:
            self.live(arrival, now)

    def _older(self, held: deque[Arrival], first: Arrival) -> int:
        """How many waiting live batches were published before the ``first`` of the answer: in an earlier life, or no longer buffered."""
        begin_us = self._engine_time(first.payload)
        if begin_us is None:
            return 0
        times = (self._engine_time(arrival.payload) for arrival in held)
        return sum(1 for _ in takewhile(lambda at_us: at_us is not None and at_us < begin_us, times))

    def _follows(self, arrival: Arrival) -> bool:
        return self._next is None or arrival.seq >= self._next

    def _accept(self, arrival: Arrival) -> None:
        """Give out a live batch as it stands, asking nothing."""
        if self._follows(arrival):
            self._give(arrival)
        elif self._repeats(arrival):
            self._give_again(arrival)
        elif self._restarted_by(arrival):
            self._give(self._new_life(arrival))
        else:
            self.ready.append(arrival)

    def _new_life(self, first: Arrival) -> Arrival:
        """Forget the life so far; ``first`` as it is to be given out."""
        begins = self._next is not None
        self._given.clear()
        self._given_by_replay.clear()
        self._next = first.seq
        self._doubtful = self._unproven = False
        return msgspec.structs.replace(first, begins_life=True) if begins else first

    def _give(self, arrival: Arrival) -> None:
        seq = arrival.seq
        forgotten = seq - REMEMBERED_BATCHES
        if seq == self._next:
            self._given.pop(forgotten, None)
            self._given_by_replay.discard(forgotten)
        else:
            self.counters.jumps_left += self._next is not None
            self._given = {known: digest for known, digest in self._given.items() if known > forgotten}
            self._given_by_replay = {known for known in self._given_by_replay if known > forgotten}
        self._given[seq] = arrival.digest
        if arrival.replayed:
            self.counters.replayed += 1
            self._given_by_replay.add(seq)
        if self._unproven and arrival.epoch == self._epoch:
            self._unproven, arrival.reconnected = False, True
        self._newest = arrival.payload
        self._next = seq + 1
        self.ready.append(arrival)

    def _give_again(self, arrival: Arrival) -> None:
        """A live batch that was already given out: its first live coming after a replay is no repetition of the engine's."""
        if arrival.seq in self._given_by_replay:
            self._given_by_replay.discard(arrival.seq)
            self.counters.overlaps += 1
        else:
            self.ready.append(arrival)
