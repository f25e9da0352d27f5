"""What one rank holds, what it lost and what it computed again: the holder core. Pure, no clocks, no I/O.

:class:`RankCore` takes the messages of one rank in their order and gives, at each :meth:`RankCore.drain`, the windows that
changed, the recomputes, and what changed for the fleet (content opened or closed on this rank). Here are the order of the stream and its
lives; :mod:`streams.holdings` counts blocks, and :mod:`streams.rank_windows` keeps the rows they are counted in.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.errors import KvcensusError
from schemas.records import (
    ID_BYTES,
    NO_SEQ,
    Breach,
    Declaration,
    HolderReset,
    Loss,
    Op,
    RankMessage,
    RankWindow,
    Recompute,
    ResidencyChanges,
    Scrape,
)
from streams.blocks import AMBIGUOUS, GPU, NONE, RESTARTED
from streams.engine_view import EngineView
from streams.fleet_news import FleetNews, told
from streams.history import HISTORY_BLOCKS, HISTORY_US, History, Past
from streams.holdings import SEMANTICS_VERSION, Holdings
from streams.known_blocks import is_remote
from streams.rank_rows import Row, Tally, tally_of
from streams.rank_state import RankState, decode, dump_holdings, encode, restore_holdings
from streams.rank_windows import LONGEST_OBSERVED_US, RankWindows

__all__ = ["GPU", "LONGEST_OBSERVED_US", "PAST_LIVES", "SEMANTICS_VERSION", "Drained", "RankCore"]

PAST_LIVES = 1_000
"""So many lives of a rank are remembered as ended; what comes of one before them would count as another life."""

_DECLARED = ("reuse_reporting", "removals", "workload", "model", "kv_connector", "key_epoch", "canary")
"""What a row carries of a declaration, or is counted by."""


@dataclass(slots=True)
class Drained:
    """What a rank has to say since the last drain. ``changes`` is indexed by content shard: the messages for it, in their order."""

    windows: list[RankWindow]
    recomputes: list[Recompute]
    changes: list[list[ResidencyChanges]]


class RankCore(RankWindows):
    """Residency, recompute and window counters of one rank.

    ``window_us`` is the base window in microseconds, ``shards`` the number of content shards. What was lost is remembered for
    ``history_us`` of engine time, and of at most ``history_blocks`` blocks.
    """

    def __init__(
        self,
        instance_id: str,
        dp_rank: int,
        *,
        window_us: int = 10_000_000,
        shards: int = 1,
        history_us: int = HISTORY_US,
        history_blocks: int = HISTORY_BLOCKS,
    ) -> None:
        fleet, history = FleetNews(instance_id, dp_rank, shards), History(history_us, history_blocks)
        super().__init__(instance_id, dp_rank, window_us, fleet, Holdings(instance_id, dp_rank, fleet, history))
        self._shards = shards
        self._history = history
        self._past_lives: dict[str, None] = {}
        self._next_seq: int | None = None
        self._muted_until_us = -1
        self._muted_at_us = -1
        self._pending_reasons: set[str] = set()
        self._pending_lost = 0
        self._pending_refused = 0
        self._pending_scrapes = 0
        self._pending_breaches: list[Breach] = []
        self._byte_groups: set[int] = set()
        self._apply_declaration()

    # -- input -----------------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        """Whether a drain would give anything."""
        return bool(self._dirty) or self._fleet.pending

    def apply(self, message: RankMessage, offset: int) -> None:
        """Count one message. ``offset`` grows from message to message; one that does not is a redelivery and is ignored."""
        if offset <= self.offset:
            return
        self.offset = offset
        if message.life_id in self._past_lives:
            self._count_duplicate()
            return
        # First of all, since what is sealed for the fleet must hold nothing of this message.
        if message.declaration is not None:
            self._fleet.tell(told(message.declaration, self._byte_groups, self.watermark_us), offset, self.watermark_us)
        elif message.batch is not None:
            self._announce(message, message.batch.ops)
        if self._departed:
            self._depart(False)
        if message.holder_reset is not None:
            if message.life_id == self._life_id:
                return
            self._reset(message.life_id, message.holder_reset)
        elif message.life_id != self._life_id:
            self._attach(message.life_id)
        if message.batch is not None:
            self._batch(message)
        elif message.declaration is not None:
            self._declare(message.declaration)
        elif message.scrape is not None:
            self._scrape(message.scrape)
        elif message.loss is not None:
            self._lose(message.loss, message.skipped)
        elif message.refusal is not None:
            self._refuse(message.seq, message.skipped)
        elif message.identity_refused is not None:
            self._note("identity_refused")
        elif message.departure is not None:
            self._depart(True)

    def unreadable(self, offset: int) -> None:
        """The message of this rank at ``offset`` could not be read or counted: the stream is not contiguous there.

        One that :meth:`apply` gave up on half way has its offset taken already.
        """
        if offset < self.offset:
            return
        self.offset = offset
        self._break("unreadable")

    def _is_duplicate(self, seq: int) -> bool:
        if self._next_seq is not None and seq < self._next_seq:
            self._count_duplicate()
            return True
        return False

    def _count_duplicate(self) -> None:
        if self.watermark_us:
            self._touch(self.watermark_us).duplicate_batches += 1

    def _break(self, reason: str, *, lost: int = 0, refused: int = 0) -> None:
        """The stream is not contiguous here: note why, in the row of the newest batch or else in that of the next."""
        self._contiguous = False
        self._pending_reasons.add(reason)
        if not self.watermark_us:
            self._pending_lost += lost
            self._pending_refused += refused
            return
        row = self._touch(self.watermark_us)
        self._name(row, reason)
        row.lost_batches += lost
        row.refused_batches += refused

    def _note(self, reason: str) -> None:
        """Name ``reason`` in the row of the newest batch and in that of the next."""
        self._pending_reasons.add(reason)
        if self.watermark_us:
            self._name(self._touch(self.watermark_us), reason)

    def _depart(self, departed: bool) -> None:
        """Until the rank's next message nobody expects to hear of it."""
        self._departed = departed
        self._restand()
        if departed:
            self._fleet.depart(self.offset, self.watermark_us, True)
        if self.watermark_us:
            self._touch(self.watermark_us)

    def _lose(self, loss: Loss, skipped: int) -> None:
        first = loss.first_seq if self._next_seq is None else max(loss.first_seq, self._next_seq)
        if loss.last_seq < first:
            return
        self._next_seq = loss.last_seq + 1
        self._break("lost", lost=max(loss.last_seq - first + 1 - skipped, 0))

    def _refuse(self, seq: int, skipped: int) -> None:
        if seq < NO_SEQ:
            if self._is_duplicate(seq):
                return
            self._advance(seq, skipped)
        self._break("refused", refused=1)

    def _advance(self, seq: int, skipped: int) -> None:
        """The stream goes on with ``seq``, which is not behind; what lies between and was not declared is lost all the same.

        The ``skipped`` numbers before it belong to other ranks.
        """
        first = seq - skipped
        if self._next_seq is None:
            self._warmup = first > 0
            if self._warmup:
                self._pending_reasons.add("late_attach")
                self._restand()
        elif first > self._next_seq:
            self._break("undeclared_gap", lost=first - self._next_seq)
        self._next_seq = seq + 1

    def _batch(self, message: RankMessage) -> None:
        batch = message.batch
        assert batch is not None
        seq = message.seq
        if self._is_duplicate(seq):
            return
        since = self.watermark_us
        self._advance(seq, message.skipped)
        counting = message.at_us > self._muted_until_us
        # Events apply in the engine's order; where its clock stepped back, they take the newest time it has shown.
        at = max(message.at_us, since)
        row = self._touch(at)
        if counting:
            if at != message.at_us:
                self._name(row, "clock_stepped_back")
            self._observe(row, at)
            row.batches += 1
            row.unknown_events += batch.unknown_events
            row.unresolved_blocks += batch.unresolved_blocks
            if not row.first_batch_us:
                row.first_batch_us = at
            row.last_batch_us = at
        if self._pending_reasons or self._pending_lost or self._pending_refused or self._pending_scrapes:
            self._take_pending(row)
        self._contiguous = True
        self.watermark_us = at
        # A muted batch repeats what an earlier attachment already counted: it changes state, not figures. What it tells of
        # is as old as it says; only the fleet hears of it now.
        if not counting:
            self._muted_at_us = max(self._muted_at_us, message.at_us)
        holdings = self._holdings
        holdings.at = at if counting else self._muted_at_us
        holdings.seq, holdings.version, holdings.counting = seq, self.offset, counting
        holdings.unidentified, holdings.ambiguous = 0, False
        tallies: dict[int, Tally] = row.groups if counting else {}
        index = 0
        for op in batch.ops:
            kind = op.kind
            if op.locality is not None and is_remote(op):
                if kind == "STORE":  # rule 0: reachable, not held; but it may tell what a held block is
                    holdings.learn(op)
                index += len(op.block_ids) // ID_BYTES
            elif kind == "STORE":
                holdings.store(op, tallies, index)
                index += len(op.block_ids) // ID_BYTES
            elif kind == "REMOVE":
                holdings.remove(op, tallies)
                index += len(op.block_ids) // ID_BYTES
            else:
                holdings.clear(op, tallies)
                index += 1
        if counting:
            if holdings.unidentified:
                self._name(row, "identity")
            if holdings.ambiguous:
                self._name(row, "ambiguous_reload")
        forgotten = self._history.forget(at, holdings.groups)
        if forgotten:
            self._count_forgotten(row, forgotten)
        self._fill(row)
        self._fleet.flush(self.offset, at)
        if self._fleet.at_once:
            self._fleet.counted(self.offset, at)

    def _announce(self, message: RankMessage, ops: list[Op]) -> None:
        """Before a batch is counted: that the rank is back, and what its blocks weigh now that it shows another cache group."""
        new_life = message.life_id != self._life_id
        if not new_life and self._next_seq is not None and message.seq < self._next_seq:
            return
        since = self.watermark_us
        if since and message.at_us // self._window_us > since // self._window_us:
            # No message to the fleet spans windows: which of them hold a batch is then told wherever messages are cut.
            self._fleet.seal(self.offset - 1, since)
        self._fleet.depart(self.offset, since, False)
        known = {} if new_life else self._holdings.groups
        shown = set()
        for op in ops:
            if op.kind == "STORE" and (op.group_idx or 0) not in known and self._holdings.opens(op):
                shown.add(op.group_idx or 0)
        if shown:
            self._byte_groups = shown.union(known)
            now = told(self._declaration, self._byte_groups, max(message.at_us, since) if since else 0)
            self._fleet.tell(now, self.offset, since)

    def _take_pending(self, row: Row) -> None:
        """What came before any batch stands in the row of the first; what broke the stream stands on both sides of the break."""
        for reason in sorted(self._pending_reasons):
            self._name(row, reason)
        self._pending_reasons.clear()
        row.lost_batches += self._pending_lost
        row.refused_batches += self._pending_refused
        row.scrapes += self._pending_scrapes
        self._contradicted(row, self._pending_breaches)
        self._pending_lost = self._pending_refused = self._pending_scrapes = 0
        self._pending_breaches = []

    def _count_forgotten(self, row: Row, forgotten: dict[int, int]) -> None:
        """From the first loss that is forgotten on, every row says so."""
        for group, blocks in forgotten.items():
            tally_of(row.groups, group).counters.forgotten_blocks += blocks
        if not self._forgot:
            self._forgot = True
            self._restand()
            self._stand(row)

    # -- declarations and the engine's own metrics ---------------------------------------------------------------

    def _declare(self, declaration: Declaration) -> None:
        """What holds from here on. Within a life, a change is named in the row in which it falls: that one mixes both."""
        if self._next_seq is not None and any(getattr(declaration, name) != getattr(self._declaration, name) for name in _DECLARED):
            self._note("redeclared")
        self._declaration = declaration
        self._apply_declaration()

    def _apply_declaration(self) -> None:
        declaration = self._declaration
        self._holdings.reuse_reporting = declaration.reuse_reporting
        self._holdings.last_copy = declaration.removals == "last_copy"
        self._restand()

    def _scrape(self, scrape: Scrape) -> None:
        """Hold what was counted so far against what the engine says of itself."""
        if not self._engine.take(scrape):
            return
        self._restand()
        holdings = self._holdings
        found = self._engine.contradictions(
            scrape,
            self.watermark_us,
            copies=sum(copies for _, _, copies in holdings.resident.values()),
            distinct=sum(blocks for blocks, _, _ in holdings.resident.values()),
            groups=len(holdings.gpu_groups),
            unlabelled=self._declaration.reuse_reporting == "unlabelled",
        )
        if found:
            self._contiguous = False  # something went unseen: the stretch to the next batch proves nothing
        if not self.watermark_us:
            self._pending_scrapes += 1
            self._pending_breaches += found
            return
        row = self._touch(self.watermark_us)
        row.scrapes += 1
        self._contradicted(row, found)

    # -- lives ---------------------------------------------------------------------------------------------------

    def _reset(self, life_id: str, reset: HolderReset) -> None:
        """The engine came back empty: everything ends at the boundary, before anything else of that instant (rule 1).

        Where only the ids are others from here on (``rekeyed``), what was open ends without a cause, and no history compares.
        """
        at = max(reset.boundary_us, self.watermark_us)
        rekeyed = reset.cause == "rekeyed"
        if self._life_id:
            holdings = self._holdings
            row = self._touch(at)
            self._name(row, reset.cause)
            if rekeyed:
                self._history.carried.clear()
            else:
                self._carry_history()
            for group, block in holdings.blocks_of(list(holdings.groups)):
                ended = holdings.close_all(group, block, None)
                if ended is None or rekeyed:
                    continue
                if ended:
                    counters = tally_of(row.groups, group).counters
                    counters.restarted_blocks += ended
                    counters.restarted_tokens += ended * block.size
                if block.content is not None:
                    cause = AMBIGUOUS if block.cause == AMBIGUOUS else RESTARTED
                    self._history.carry(group, block.content, Past(block.stored_at, at, cause))
            self._fill(row)
            self._fleet.flush(self.offset, at)
            self.watermark_us = at
        self._begin_life(life_id)
        self._pending_reasons.add(reset.cause)
        self._muted_until_us = -1

    def _attach(self, life_id: str) -> None:
        """Another forwarder run attached without knowing what became of the engine: what was open ends unobserved.

        If it replays what was already counted, engine time tells: such batches only rebuild the state.
        """
        if self.watermark_us:  # else there was no batch to have missed any after
            self._carry_history()
            for group, block in self._holdings.blocks_of(list(self._holdings.groups)):
                self._holdings.close_all(group, block, None)
            self._fleet.flush(self.offset, self.watermark_us)
            self._pending_reasons.add("reattached")
            self._muted_until_us = self.watermark_us
        self._begin_life(life_id)

    def _carry_history(self) -> None:
        """Residencies that ended in this life stay known by content."""
        for group, block in self._holdings.blocks_of(list(self._holdings.groups)):
            if block.cause != NONE and block.content is not None and not block.gpu and not block.off_gpu():
                self._history.carry(group, block.content, Past(block.stored_at, block.lost_at, block.cause))

    def _begin_life(self, life_id: str) -> None:
        if self._life_id:
            self._past_lives[self._life_id] = None
            if len(self._past_lives) > PAST_LIVES:
                del self._past_lives[next(iter(self._past_lives))]
        self._life_id = life_id
        self._next_seq = None
        self._contiguous = False
        self._warmup = False
        self._muted_at_us = -1
        self._current = None
        self._history.end_life()
        self._holdings.begin_life(life_id)
        self._engine = EngineView(pool_blocks=self._engine.pool_blocks)
        self._restand()

    # -- output --------------------------------------------------------------------------------------------------

    def drain(self) -> Drained:
        """Everything that changed since the last drain; empty lists where nothing did."""
        recomputes, self._holdings.recomputes = self._holdings.recomputes, []
        return Drained(self._take_rows(), recomputes, self._fleet.drain(self.offset, self.watermark_us))

    def dump(self) -> bytes:
        """All that is known, to be called right after a drain: :meth:`restored` goes on from it."""
        if self.dirty or self._holdings.recomputes:
            raise ValueError("only a core that was drained can be dumped")
        return encode(
            RankState(
                instance_id=self.instance_id,
                dp_rank=self.dp_rank,
                window_us=self._window_us,
                shards=self._shards,
                watermark_us=self.watermark_us,
                offset=self.offset,
                declaration=self._declaration,
                life_id=self._life_id,
                past_lives=list(self._past_lives),
                next_seq=self._next_seq,
                contiguous=self._contiguous,
                warmup=self._warmup,
                departed=self._departed,
                forgot=self._forgot,
                muted_until_us=self._muted_until_us,
                muted_at_us=self._muted_at_us,
                pending_reasons=sorted(self._pending_reasons),
                pending_lost=self._pending_lost,
                pending_refused=self._pending_refused,
                pending_scrapes=self._pending_scrapes,
                pending_breaches=self._pending_breaches,
                byte_groups=sorted(self._byte_groups),
                engine=self._engine,
                rows=list(self._windows.values()),
                told=self._fleet.told,
                told_departed=self._fleet.departed,
                holdings=dump_holdings(self._holdings, self.watermark_us),
            )
        )

    @classmethod
    def restored(
        cls,
        data: bytes,
        *,
        window_us: int = 10_000_000,
        shards: int = 1,
        history_us: int = HISTORY_US,
        history_blocks: int = HISTORY_BLOCKS,
    ) -> RankCore:
        """The core that :meth:`dump` wrote, under the same options; it ignores every message up to the offset it had reached.

        Raises :class:`KvcensusError` if ``data`` is no such state, of other counting rules, or of another window or number of shards.
        """
        state = decode(data)
        if (state.window_us, state.shards) != (window_us, shards):
            raise KvcensusError(f"the state of a rank is of {state.shards} shards and windows of {state.window_us} us")
        core = cls(
            state.instance_id,
            state.dp_rank,
            window_us=window_us,
            shards=shards,
            history_us=history_us,
            history_blocks=history_blocks,
        )
        core.watermark_us, core.offset = state.watermark_us, state.offset
        core._declaration = state.declaration
        core._life_id = core._holdings.life_id = state.life_id
        core._past_lives = dict.fromkeys(state.past_lives)
        core._next_seq, core._contiguous, core._warmup = state.next_seq, state.contiguous, state.warmup
        core._departed, core._forgot = state.departed, state.forgot
        core._muted_until_us, core._muted_at_us = state.muted_until_us, state.muted_at_us
        core._pending_reasons, core._pending_lost = set(state.pending_reasons), state.pending_lost
        core._pending_refused, core._pending_scrapes = state.pending_refused, state.pending_scrapes
        core._pending_breaches = state.pending_breaches
        core._byte_groups = set(state.byte_groups)
        core._engine = state.engine
        core._restore_rows(state.rows)
        core._fleet.told, core._fleet.departed = state.told, state.told_departed
        restore_holdings(state.holdings, core._holdings, core._history, core._fleet, state.watermark_us)
        core._apply_declaration()
        return core
