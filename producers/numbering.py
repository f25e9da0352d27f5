"""Order out of one socket on which several data-parallel ranks may publish: pure, like :mod:`producers.continuity`.

Nothing on the wire says whether an engine numbers the batches of all ranks of a socket together, or those of each rank by itself
(a proxy that carries several engines' batches on does). What comes tells: from the second rank's first batch on, batches wait
until one has a number that fits one way of numbering alone. A number that follows its rank's last one and not the socket's
proves numbers of their own, as does a new rank's number that is not above the socket's last; the other way round takes two, since
lost batches can feign it. The replay socket is asked for all it has, since an answer with several ranks tells at once. Where nothing
tells in time, the socket has one order.

With numbers of their own, each rank has its own :class:`Continuity`; the replay socket, which answers for all ranks at once, is
asked once for the lowest number any of them needs. A socket with one rank costs a look at the last byte of each payload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Literal

from producers import wire
from producers.continuity import Arrival, Continuity, Counters, Resume
from producers.stream import Position

MAX_RANKS = 1_024
"""Most ranks kept apart on one socket: a rank that a broken engine makes up costs memory."""

DECIDE_SECONDS = 30.0
"""How long batches wait for one that tells how their socket is numbered."""

_MOST_UNDECIDED = 10_000
_SHARED_VOTES = 2
_SEVERAL = -1
_WIDE = frozenset((0xCD, 0xD1))
_WIDER = frozenset((0xCE, 0xD2))
"""Openers of integers of 16 and of 32 bits: the last byte of the payload is then not the whole rank."""


def read_rank(payload: bytes, likely: Collection[int], max_bytes: int = wire.MAX_PAYLOAD_BYTES) -> int | None:
    """The data-parallel rank that a payload names, 0 where it names none; None if it cannot be read.

    A guess from the ends of the payload is good enough where it is one of the ``likely`` ranks; another one is believed only if
    the whole envelope can be read.
    """
    if len(payload) > 5:
        opener, last = payload[0], payload[-1]
        if opener == 0x93 and payload[-3] not in _WIDE and payload[-5] not in _WIDER:
            if last < 0x80:
                if last in likely:
                    return last
            elif last == 0xC0 and 0 in likely and payload[-2] != 0xCC:  # nil: it names none
                return 0
        elif opener == 0x92 and 0 in likely:
            return 0
    if len(payload) > max_bytes:
        return None
    try:
        return wire.dp_rank(payload) or 0
    except wire.WireError:
        return None


class _Witness:
    """One stretch of numbers as they came, and what a further one says of the numbering."""

    __slots__ = ("last", "own")

    def __init__(self) -> None:
        self.last: int | None = None
        self.own: dict[int, Arrival] = {}

    def vote(self, arrival: Arrival) -> Literal["own", "shared"] | None:
        if self.last is None or arrival.rank is None:
            return None
        before = self.own.get(arrival.rank)
        follows_socket = arrival.seq == self.last + 1
        if before is None:
            return "own" if self.own and arrival.seq <= self.last else None
        follows_rank = arrival.seq == before.seq + 1
        if follows_socket == follows_rank:
            return None
        return "shared" if follows_socket else "own"

    def note(self, arrival: Arrival) -> None:
        if self.last is not None and arrival.seq <= self.last and arrival.rank in self.own:
            self.own.clear()  # a fall that says nothing of the numbering may be a restart: older numbers prove nothing more
        self.last = arrival.seq
        if arrival.rank is not None:
            self.own[arrival.rank] = arrival


class SocketOrder:
    """The order of one socket's batches, with what :class:`Continuity` offers its user; ``ready`` holds what may be read.

    ``positions`` are where another process left the socket's ranks. ``decide_timeout`` is how many seconds batches wait for one that
    tells how the ranks are numbered. The other arguments are as in :class:`Continuity` and :func:`read_rank`.
    """

    def __init__(
        self,
        can_replay: bool,
        replay_timeout: float,
        engine_time: Callable[[bytes], int | None],
        *,
        positions: Iterable[Position] = (),
        max_payload_bytes: int = wire.MAX_PAYLOAD_BYTES,
        decide_timeout: float = DECIDE_SECONDS,
    ) -> None:
        self.ready: deque[Arrival] = deque()
        self.counters = Counters()
        self.numbering: Literal["own", "shared"] | None = None
        """How the ranks of the socket are numbered; None: one rank, or not told yet."""
        self._can_replay = can_replay
        self._replay_timeout = replay_timeout
        self._engine_time = engine_time
        self._max_payload_bytes = max_payload_bytes
        self._decide_timeout = decide_timeout
        self._decide_by: float | None = None
        self._undecided: deque[tuple[Literal["live", "replayed"], Arrival] | Literal["ended", "connected"]] = deque()
        self._shared_votes = 0
        self._probe: Literal["due", "done"] | None = None
        """Whether the replay socket is asked for all it has, to learn how the socket is numbered."""
        self._live = _Witness()
        self._replay = _Witness()
        self._connected = False
        self._question: int | None = None
        """The number from which the replay socket was last asked, until its answer ended."""
        known = [position for position in positions if position.next_seq is not None]
        self._ranks: dict[int, None] = {position.wire_rank: None for position in known if position.wire_rank is not None}
        self._only = next(iter(self._ranks)) if len(self._ranks) == 1 else _SEVERAL
        # Where several positions of one order differ, the lowest: what comes again is known to its stream.
        self._one = self._continuity(min(known, key=lambda position: position.next_seq or 0) if known else None)
        self._orders: dict[int, Continuity] = {}
        if len(self._ranks) > 1:
            self.numbering = "shared" if any(position.shared for position in known) else "own"
            if self.numbering == "own":
                self._orders = {position.wire_rank: self._continuity(position) for position in known if position.wire_rank is not None}

    # -- as a Continuity

    @property
    def waiting(self) -> bool:
        """Whether batches wait, for a replay or for what tells the numbering."""
        return bool(self._undecided) or any(order.waiting for order in self._all())

    @property
    def held(self) -> int:
        """How many live batches wait."""
        undecided = sum(1 for event in self._undecided if event[0] == "live")
        return undecided + sum(order.held for order in self._all())

    @property
    def deadline(self) -> float | None:
        """When :meth:`tick` has to be called at the latest, on the clock of the ``now`` arguments."""
        if self._undecided:
            return self._decide_by
        return min((order.deadline for order in self._all() if order.deadline is not None), default=None)

    @property
    def ask(self) -> int | None:
        """A sequence number to ask the replay socket for, once."""
        if self._probe == "due":
            return 0
        return min((order.ask for order in self._all() if order.ask is not None), default=None)

    def take_ask(self) -> int | None:
        """The start number of a replay to ask for now, on a fresh socket: an older question's answers no longer count.

        It covers all that any rank still waits for.
        """
        asked = sum(order.take_ask() is not None for order in self._all())
        if self._probe == "due":
            self._probe, self._question = "done", 0
        elif asked:
            self._question = min(order.question for order in self._all() if order.question is not None)
        else:
            return None
        self.counters.replays_asked += 1 - asked
        self._replay = _Witness()
        return self._question

    def connected(self, now: float) -> None:
        """The live socket is connected (again): ask for what was published before."""
        self._connected = True
        self._live = _Witness()
        if self._undecided:
            self._undecided.append("connected")
            self._probe = None  # the question may have been lost with the old connection
            self._ask_for_all()
            return
        for order in self._all():
            order.connected(now)

    def live(self, arrival: Arrival, now: float) -> None:
        """A batch came on the live socket."""
        arrival.rank = read_rank(arrival.payload, self._ranks, self._max_payload_bytes)
        if arrival.rank == self._only or self._is_single(arrival):
            self._live.last = arrival.seq
            self._one.live(arrival, now)
        else:
            self._several("live", arrival, now)

    def replayed(self, arrival: Arrival, now: float) -> None:
        """A batch came on the replay socket."""
        arrival.rank = read_rank(arrival.payload, self._ranks, self._max_payload_bytes)
        if arrival.rank == self._only or self._is_single(arrival):
            self._replay.last = arrival.seq
            self._one.replayed(arrival, now)
        else:
            self._several("replayed", arrival, now)

    def replay_ended(self, now: float) -> None:
        """The replay socket sent its end marker."""
        if not self._undecided:
            self._end(now)
            return
        self._undecided.append("ended")
        if self._shared_votes:  # a whole answer in one ascending order, of several ranks
            self._decide("shared", now)
        else:
            self._ask_for_all()

    def tick(self, now: float) -> None:
        """Time passed: give up waiting for what is overdue."""
        if self._undecided:
            if self._decide_by is not None and now >= self._decide_by:
                self._decide("shared", now)
            return
        for order in self._all():
            order.tick(now)
        if not self.waiting:  # and so nobody reads the answer any more
            self._question = None

    # -- how the socket is numbered

    def _is_single(self, arrival: Arrival) -> bool:
        """Whether all that came so far, with this one, is of one rank."""
        rank = arrival.rank
        if len(self._ranks) > 1:
            return False
        if rank is None:
            return True
        if not self._ranks:
            self._ranks[rank] = None
            self._only = rank
            return True
        for witness in (self._live, self._replay):
            if witness.last is not None:
                witness.own[self._only] = Arrival(witness.last, b"", 0)
        self._ranks[rank] = None
        self._only = _SEVERAL
        return False

    def _several(self, kind: Literal["live", "replayed"], arrival: Arrival, now: float) -> None:
        if arrival.rank is not None and len(self._ranks) < MAX_RANKS:
            self._ranks[arrival.rank] = None
        if self.numbering == "own":
            self._route(kind, arrival, now)
            return
        witness = self._live if kind == "live" else self._replay
        vote = witness.vote(arrival)
        self._shared_votes += vote == "shared"
        if self.numbering is None:
            if not self._undecided:
                self._decide_by = now + self._decide_timeout
                if not self._one.waiting:
                    self._ask_for_all()
            self._undecided.append((kind, arrival))
            if vote == "own":
                self._decide("own", now)
            elif self._shared_votes >= _SHARED_VOTES or len(self._undecided) >= _MOST_UNDECIDED:
                self._decide("shared", now)
        else:
            if vote == "own":
                self._split(now)
            self._route(kind, arrival, now)
        witness.note(arrival)

    def _ask_for_all(self) -> None:
        if self._can_replay and self._connected and self._probe is None:
            self._probe = "due"

    def _decide(self, numbering: Literal["own", "shared"], now: float) -> None:
        """Let go what waited. Until now the one order has seen one rank alone."""
        self.numbering = numbering
        if self._probe == "due":
            self._probe = None
        if numbering == "own":
            self._orders = {next(iter(self._ranks)): self._one}
        events, self._undecided = self._undecided, deque()
        for event in events:
            if event == "ended":
                self._end(now)
            elif event == "connected":
                for order in self._all():
                    order.connected(now)
            else:
                self._route(event[0], event[1], now)

    def _split(self, now: float) -> None:
        """What was taken for one order is one of each rank: each goes on from where the live socket last showed it."""
        self._one.give_up(now)
        self.numbering = "own"
        self._orders = {}
        for rank, last in self._live.own.items():
            resume = Resume(last.seq + 1, last.digest if last.payload else b"", self._engine_time(last.payload) or 0)
            self._orders[rank] = self._new_order(resume)

    # -- one order, or one of each rank

    def _all(self) -> Collection[Continuity]:
        return self._orders.values() if self.numbering == "own" else (self._one,)

    def _route(self, kind: Literal["live", "replayed"], arrival: Arrival, now: float) -> None:
        order: Continuity | None = self._one
        arrival.shared = self.numbering == "shared"
        if not arrival.shared:
            order = self._order_of(arrival, now)
            if order is None:  # more ranks than are kept apart: for the reader to refuse
                self.ready.append(arrival)
                return
        assert order is not None
        if kind == "live":
            order.live(arrival, now)
        else:
            order.replayed(arrival, now)

    def _order_of(self, arrival: Arrival, now: float) -> Continuity | None:
        if arrival.rank is None:
            arrival.rank = self._nearest(arrival.seq)
        order = self._orders.get(arrival.rank)
        if order is None and arrival.rank in self._ranks:
            order = self._orders[arrival.rank] = self._new_order(None)
            if self._connected:
                answering = self._question == 0 and self.ask is None
                order.connected(now)
                if answering:  # the question under way brings this rank's batches as well
                    order.ask = None
        return order

    def _nearest(self, seq: int) -> int:
        """Whose a batch is that nobody can read: the rank's that expects its number, or one soon before it."""

        def distance(rank: int) -> tuple[bool, int]:
            expected = self._orders[rank].next_seq
            return (True, 0) if expected is None else (seq < expected, abs(seq - expected))

        return min(self._orders, key=distance)

    def _end(self, now: float) -> None:
        question, self._question = self._question, None
        for order in list(self._all()):
            # One that has yet to ask waits for its own answer, unless this one was of everything.
            if order.waiting and (order.ask is None or question == 0):
                order.replay_ended(now)

    def _continuity(self, position: Position | None) -> Continuity:
        if position is None or position.next_seq is None:
            return self._new_order(None)
        return self._new_order(Resume(position.next_seq, position.anchor, position.newest_us))

    def _new_order(self, resume: Resume | None) -> Continuity:
        return Continuity(
            self._can_replay, self._replay_timeout, self._engine_time, resume=resume, ready=self.ready, counters=self.counters
        )
