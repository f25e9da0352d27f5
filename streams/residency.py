"""What one rank holds, what it lost and what it computed again: the holder core. Pure, no clocks, no I/O.

The rules are those of the design ("What counts", 0 to 4 and 8); the number of the rule stands beside the code that follows it.
:class:`RankCore` takes the messages of one rank in their order and gives, at each :meth:`RankCore.drain`, the windows that
changed, the recomputes, and what changed for the fleet (content opened or closed on this rank).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field

from schemas.records import (
    ID_BYTES,
    NO_ID,
    NO_SEQ,
    Declaration,
    GroupCounters,
    HolderReset,
    Loss,
    Op,
    RankMessage,
    RankWindow,
    Recompute,
    ResidencyChanges,
    ResidencyStep,
)
from streams.windows import cut, window_start

SEMANTICS_VERSION = 1
"""Version of the counting rules; on every result row. Raise it with every change of what a figure means."""

LONGEST_OBSERVED_US = 400 * 24 * 3_600 * 1_000_000
"""A step of engine time longer than this between two batches is a clock that jumped, not a stretch that was observed."""

_DECLARED = ("reuse_reporting", "removals", "workload", "model", "kv_connector", "key_epoch", "canary")
"""What a row carries of a declaration, or is counted by."""

GPU = "GPU"

# Causes of an ended residency, as small integers inside the core.
_NONE, _EVICTED, _CLEARED, _RESTARTED, _AMBIGUOUS, _CONCURRENT = range(6)
_CAUSE_NAMES = ("", "evicted", "cleared", "restarted", "ambiguous_reload", "concurrent")


class _Block:
    """One engine block id of one group in the present life: what is open, and how the last residency ended.

    ``gpu`` counts open copies in the GPU tier by the copy-counting reading; ``gpu_open`` is the reading of the duplicate
    footprint. ``others`` holds the same pair per offload tier, or ``None``.
    """

    __slots__ = ("cause", "content", "gpu", "gpu_open", "lost_at", "others", "size", "stored_at")

    def __init__(self, content: bytes | None, size: int) -> None:
        self.content = content
        self.size = size
        self.gpu = 0
        self.gpu_open = False
        self.others: dict[str, tuple[int, bool]] | None = None
        self.stored_at = 0
        self.lost_at = 0
        self.cause = _NONE

    def off_gpu(self) -> bool:
        """Whether any offload tier holds a copy."""
        return self.others is not None and any(copies for copies, _ in self.others.values())


@dataclass(slots=True)
class _History:
    """How content was last lost in an earlier life (rule 3: across lives only the content id matches)."""

    stored_at: int
    lost_at: int
    cause: int


@dataclass(slots=True)
class _Window:
    """Rank-level counters of one row and its groups."""

    start: int
    length: int
    life_id: str
    declared: Declaration
    warmup: bool = False
    changed_at: int = 0
    observed_us: int = 0
    first_batch_us: int = 0
    last_batch_us: int = 0
    batches: int = 0
    duplicate_batches: int = 0
    lost_batches: int = 0
    refused_batches: int = 0
    unknown_events: int = 0
    unresolved_blocks: int = 0
    reasons: set[str] = field(default_factory=set)
    groups: dict[int, GroupCounters] = field(default_factory=dict)


@dataclass(slots=True)
class Drained:
    """What a rank has to say since the last drain. ``changes`` is indexed by content shard."""

    windows: list[RankWindow]
    recomputes: list[Recompute]
    changes: list[ResidencyChanges]


class RankCore:
    """Residency, recompute and window counters of one rank.

    ``window_us`` is the base window in microseconds, ``shards`` the number of content shards.
    """

    def __init__(self, instance_id: str, dp_rank: int, *, window_us: int = 10_000_000, shards: int = 1) -> None:
        self.instance_id = instance_id
        self.dp_rank = dp_rank
        self.watermark_us = 0
        self.offset = -1
        self._window_us = window_us
        self._shards = shards
        self._declaration = Declaration(reuse_reporting="unlabelled", removals="per_copy")
        self._life_id = ""
        self._past_lives: set[str] = set()
        self._next_seq: int | None = None
        self._contiguous = False
        self._warmup = False
        self._muted_until_us = -1
        self._pending_reasons: set[str] = set()
        self._pending_lost = 0
        self._pending_refused = 0
        self._groups: dict[int, dict[bytes, _Block]] = {}
        self._kinds: dict[int, str] = {}
        self._gpu_groups: set[int] = set()
        self._resident: dict[int, list[int]] = {}
        self._offloaded = 0
        self._carried: dict[tuple[int, bytes], _History] = {}
        self._held: dict[str, dict[bytes, int]] = {}
        self._touched: dict[str, dict[bytes, tuple[bool, int]]] = {}
        self._windows: dict[tuple[str, int], _Window] = {}
        self._dirty: dict[tuple[str, int], None] = {}
        self._provisional: dict[tuple[str, int], None] = {}
        self._recomputes: list[Recompute] = []
        self._steps: list[list[ResidencyStep]] = [[] for _ in range(shards)]
        self._moved = False

    # -- input -----------------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        """Whether a drain would give anything."""
        return self._moved or bool(self._dirty)

    def apply(self, message: RankMessage, offset: int) -> None:
        """Count one message. ``offset`` grows from message to message; one that does not is a redelivery and is ignored."""
        if offset <= self.offset:
            return
        self.offset = offset
        if message.life_id in self._past_lives:
            self._count_duplicate()
            return
        if message.holder_reset is not None:
            if message.life_id == self._life_id:
                return
            self._reset(message.life_id, message.holder_reset)
        elif message.life_id != self._life_id:
            self._attach(message.life_id)
        if message.declaration is not None:
            self._declare(message.declaration)
        elif message.loss is not None:
            self._lose(message.loss, message.skipped)
        elif message.refusal is not None:
            self._refuse(message.seq, message.skipped)
        elif message.identity_refused is not None:
            self._note("identity_refused")
        elif message.batch is not None:
            self._batch(message)

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
        window = self._touch(self.watermark_us)
        window.reasons.add(reason)
        window.lost_batches += lost
        window.refused_batches += refused

    def _declare(self, declaration: Declaration) -> None:
        """What holds from here on. Within a life, a change is named in the row in which it falls: that one mixes both."""
        if self._next_seq is not None and any(getattr(declaration, name) != getattr(self._declaration, name) for name in _DECLARED):
            self._note("redeclared")
        self._declaration = declaration

    def _note(self, reason: str) -> None:
        """Name ``reason`` in the row of the newest batch and in that of the next."""
        self._pending_reasons.add(reason)
        if self.watermark_us:
            self._touch(self.watermark_us).reasons.add(reason)

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
        elif first > self._next_seq:
            self._break("undeclared_gap", lost=first - self._next_seq)
        self._next_seq = seq + 1

    def _batch(self, message: RankMessage) -> None:
        batch = message.batch
        assert batch is not None
        seq = message.seq
        if self._is_duplicate(seq):
            return
        self._advance(seq, message.skipped)
        counting = message.at_us > self._muted_until_us
        # Events apply in the engine's order; where its clock stepped back, they take the newest time it has shown.
        at = max(message.at_us, self.watermark_us)
        window = self._touch(at)
        if at != message.at_us and counting:
            window.reasons.add("clock_stepped_back")
        if counting:
            self._observe(at)
            window.batches += 1
            window.unknown_events += batch.unknown_events
            window.unresolved_blocks += batch.unresolved_blocks
            window.first_batch_us = min(window.first_batch_us or at, at)
            window.last_batch_us = max(window.last_batch_us, at)
        window.lost_batches += self._pending_lost
        window.refused_batches += self._pending_refused
        self._pending_lost = self._pending_refused = 0
        window.reasons |= self._pending_reasons
        self._pending_reasons.clear()
        self._contiguous = True
        self.watermark_us = at
        # A muted batch repeats what an earlier attachment already counted: it changes state, not figures. What it tells of
        # is as old as it says; only the fleet hears of it now.
        counters = window.groups if counting else {}
        happened = at if counting else message.at_us
        index = 0
        for op in batch.ops:
            if op.locality is not None and op.locality.upper() == "REMOTE":
                # Rule 0: reachable, not held; but it may tell what a held block is.
                if op.kind == "STORE":
                    self._learn(op)
                index += len(op.block_ids) // ID_BYTES
            elif op.kind == "STORE":
                self._store(op, happened, counters, seq, index, counting)
                index += len(op.block_ids) // ID_BYTES
            elif op.kind == "REMOVE":
                self._remove(op, happened, counters)
                index += len(op.block_ids) // ID_BYTES
            else:
                self._clear(op, happened, counters)
                index += 1
        self._note_resident(window)
        self._flush_step(at)
        self._moved = True

    # -- stores and ends (rules 1 to 3) ------------------------------------------------------------------------

    def _store(self, op: Op, at: int, counters: dict[int, GroupCounters], seq: int, first: int, counting: bool) -> None:
        mode = self._declaration.reuse_reporting
        if mode == "labelled" and op.reused:  # rule 3: a marked store changes nothing, but may tell what a block holds
            self._learn(op)
            return
        group = op.group_idx or 0
        tier = op.tier or GPU
        blocks = self._groups.get(group)
        if blocks is None:
            blocks = self._groups[group] = {}
        if op.spec_kind is not None:
            self._kinds[group] = op.spec_kind
        total = counters.get(group)
        if total is None:
            total = counters[group] = GroupCounters(group)
        ids, contents = op.block_ids, op.content_ids
        known = bool(contents)
        on_gpu = tier == GPU
        if on_gpu and ids:
            self._gpu_groups.add(group)
        single = len(self._groups) == 1
        held = self._held.setdefault(tier, {})
        touched = self._touched.setdefault(tier, {})
        resident = self._resident.setdefault(group, [0, 0])
        stored_tokens = resolved_tokens = 0
        for index, start in enumerate(range(0, len(ids), ID_BYTES), first):
            block_id = ids[start : start + ID_BYTES]
            content: bytes | None = None
            if known:
                content = contents[start : start + ID_BYTES]
                if content == NO_ID:
                    content = None
            block = blocks.get(block_id)
            if block is None:
                block = blocks[block_id] = _Block(content, op.block_size)
            elif block.size == 0:
                self._take_size(group, block, op.block_size)
            if content is not None:
                if block.content is None:
                    self._become_known(group, block, content)
                if not single:
                    self._tell_other_groups(group, block_id, content, op.block_size)
            size = block.size
            if on_gpu:
                stored_tokens += size
                if block.content is not None:
                    resolved_tokens += size
                if block.gpu:
                    # Rule 3: a second physical copy; one that an offload tier holds as well may have been loaded (rule 2).
                    if mode != "unlabelled" and not block.off_gpu():
                        self._recompute(total, group, block, block_id, _CONCURRENT, at, seq, index, counting)
                else:
                    self._first_copy(total, group, block, block_id, at, seq, index, counting)
                    resident[0] += 1
                    resident[1] += size
                block.gpu += 1
                if not block.gpu_open:
                    block.gpu_open = True
                    if block.content is not None:
                        _open(held, touched, block.content, size)
            else:
                others = block.others
                if others is None:
                    others = block.others = {}
                copies, is_open = others.get(tier, (0, False))
                if not copies:
                    self._offloaded += 1
                others[tier] = (copies + 1, True)
                if not is_open and block.content is not None:
                    _open(held, touched, block.content, size)
        if on_gpu:
            total.stored_blocks += len(ids) // ID_BYTES
            total.stored_tokens += stored_tokens
            total.resolved_tokens += resolved_tokens

    def _first_copy(
        self, total: GroupCounters, group: int, block: _Block, block_id: bytes, at: int, seq: int, index: int, counting: bool
    ) -> None:
        """A store into the GPU tier of something it does not hold (rule 2). Either way the history is consumed."""
        carried = None
        if block.content is not None and self._carried:
            carried = self._carried.pop((group, block.content), None)
        if block.off_gpu():
            total.reloaded_blocks += 1
            total.reloaded_tokens += block.size
        else:
            if carried is not None:
                if block.cause == _NONE:
                    block.stored_at, block.lost_at, block.cause = carried.stored_at, carried.lost_at, carried.cause
                elif carried.cause == _AMBIGUOUS:  # a mark outlives the life, too
                    block.cause = _AMBIGUOUS
            if block.cause != _NONE:
                self._recompute(total, group, block, block_id, block.cause, at, seq, index, counting)
        block.cause = _NONE
        block.stored_at = at

    def _recompute(
        self, total: GroupCounters, group: int, block: _Block, block_id: bytes, cause: int, at: int, seq: int, index: int, counting: bool
    ) -> None:
        size = block.size
        if cause == _EVICTED:
            total.recompute_evicted_blocks += 1
            total.recompute_evicted_tokens += size
        elif cause == _CLEARED:
            total.recompute_cleared_blocks += 1
            total.recompute_cleared_tokens += size
        elif cause == _RESTARTED:
            total.recompute_restarted_blocks += 1
            total.recompute_restarted_tokens += size
        elif cause == _CONCURRENT:
            total.recompute_concurrent_blocks += 1
            total.recompute_concurrent_tokens += size
        else:
            total.recompute_ambiguous_blocks += 1
            total.recompute_ambiguous_tokens += size
        if not counting:
            return
        lost_at = at if cause == _CONCURRENT else block.lost_at
        self._recomputes.append(
            Recompute(
                instance_id=self.instance_id,
                dp_rank=self.dp_rank,
                group_idx=group,
                life_id=self._life_id,
                seq=seq,
                index=index,
                semantics_version=SEMANTICS_VERSION,
                version=self.offset,
                cause=_CAUSE_NAMES[cause],
                block_id=block_id,
                content_id=block.content,
                tokens=size,
                stored_at_us=block.stored_at,
                lost_at_us=lost_at,
                back_at_us=at,
                elapsed_us=at - lost_at,
            )
        )

    def _remove(self, op: Op, at: int, counters: dict[int, GroupCounters]) -> None:
        group = op.group_idx or 0
        tier = op.tier or GPU
        total = counters.get(group)
        if total is None:
            total = counters[group] = GroupCounters(group)
        blocks = self._groups.get(group, {})
        unlabelled = self._declaration.reuse_reporting == "unlabelled"
        last_copy = self._declaration.removals == "last_copy"
        held = self._held.setdefault(tier, {})
        touched = self._touched.setdefault(tier, {})
        on_gpu = tier == GPU
        ids = op.block_ids
        for start in range(0, len(ids), ID_BYTES):
            block = blocks.get(ids[start : start + ID_BYTES])
            copies, is_open = 0, False
            if block is not None:
                copies, is_open = (block.gpu, block.gpu_open) if on_gpu else (block.others or {}).get(tier, (0, False))
            if block is None or not copies:  # rule 1: opens no history
                total.unjoined_evicts += 1
                continue
            left = 0 if last_copy else copies - 1
            # Rule 3, each reading can only undercount: announced stores may be no copies, so one removal ends at most one.
            ended = 1 if unlabelled else copies - left
            still_open = left > 0 and not unlabelled
            if is_open and not still_open and block.content is not None:
                _close(held, touched, block.content, block.size)
            if on_gpu:
                block.gpu, block.gpu_open = left, still_open
                total.evicted_blocks += ended
                total.evicted_tokens += ended * block.size
            else:
                assert block.others is not None
                block.others[tier] = (left, still_open)
            if not left:
                self._ended(group, block, on_gpu)
                if block.cause != _AMBIGUOUS:  # that mark stays until the next GPU store
                    block.cause = _EVICTED
                block.lost_at = at

    def _ended(self, group: int, block: _Block, on_gpu: bool) -> None:
        """Keep the running totals when a tier loses its last copy of a block."""
        if on_gpu:
            resident = self._resident[group]
            resident[0] -= 1
            resident[1] -= block.size
        else:
            self._offloaded -= 1

    def _clear(self, op: Op, at: int, counters: dict[int, GroupCounters]) -> None:
        """Close everything in the scope; every scope field the clear lacks means "all" (rule 1)."""
        groups = list(self._groups) if op.group_idx is None else [op.group_idx]
        # A reset of the GPU alone looks the same as one of all tiers: what lay off the GPU may still be there.
        ambiguous = op.tier is None and op.group_idx is None and any(block.off_gpu() for _, block in self._blocks_of(groups))
        for group, block in self._blocks_of(groups):
            marked = ambiguous and block.off_gpu()
            ended = self._close_all(group, block, op.tier)
            if ended is None:
                continue
            if ended:
                total = counters.get(group)
                if total is None:
                    total = counters[group] = GroupCounters(group)
                total.cleared_blocks += ended
                total.cleared_tokens += ended * block.size
            if block.cause != _AMBIGUOUS:
                block.cause = _AMBIGUOUS if marked else _CLEARED
            block.lost_at = at

    def _blocks_of(self, groups: Iterable[int]) -> Iterator[tuple[int, _Block]]:
        for group in groups:
            for block in self._groups.get(group, {}).values():
                yield group, block

    def _close_all(self, group: int, block: _Block, tier: str | None) -> int | None:
        """Close ``block`` in ``tier`` (None: in all): GPU copies ended, or ``None`` if nothing was open there."""
        found = False
        ended = 0
        if block.gpu and tier in (None, GPU):
            found = True
            ended = block.gpu
            if block.gpu_open and block.content is not None:
                _close(self._held[GPU], self._touched.setdefault(GPU, {}), block.content, block.size)
            block.gpu, block.gpu_open = 0, False
            self._ended(group, block, True)
        for name, (copies, is_open) in list((block.others or {}).items()):
            if copies and tier in (None, name):
                found = True
                if is_open and block.content is not None:
                    _close(self._held[name], self._touched.setdefault(name, {}), block.content, block.size)
                assert block.others is not None
                block.others[name] = (0, False)
                self._ended(group, block, False)
        return ended if found else None

    # -- lives ---------------------------------------------------------------------------------------------------

    def _reset(self, life_id: str, reset: HolderReset) -> None:
        """The engine came back empty: everything ends at the boundary, before anything else of that instant (rule 1).

        Where only the ids are others from here on (``rekeyed``), what was open ends without a cause, and no history compares.
        """
        at = max(reset.boundary_us, self.watermark_us)
        rekeyed = reset.cause == "rekeyed"
        if self._life_id:
            window = self._touch(at, self._life_id)
            window.reasons.add(reset.cause)
            if rekeyed:
                self._carried.clear()
            else:
                self._carry_history()
            for group, blocks in self._groups.items():
                for block in blocks.values():
                    ended = self._close_all(group, block, None)
                    if ended is None or rekeyed:
                        continue
                    if ended:
                        total = window.groups.setdefault(group, GroupCounters(group))
                        total.restarted_blocks += ended
                        total.restarted_tokens += ended * block.size
                    if block.content is not None:
                        cause = _AMBIGUOUS if block.cause == _AMBIGUOUS else _RESTARTED
                        self._carry(group, block.content, _History(block.stored_at, at, cause))
            self._note_resident(window)
            self._flush_step(at)
            self.watermark_us = at
            self._moved = True
        self._begin_life(life_id)
        self._pending_reasons.add(reset.cause)
        self._muted_until_us = -1

    def _attach(self, life_id: str) -> None:
        """Another forwarder run attached without knowing what became of the engine: what was open ends unobserved.

        If it replays what was already counted, engine time tells: such batches only rebuild the state.
        """
        if self.watermark_us:  # else there was no batch to have missed any after
            self._carry_history()
            for group, blocks in self._groups.items():
                for block in blocks.values():
                    self._close_all(group, block, None)
            self._flush_step(self.watermark_us)
            self._moved = True
            self._pending_reasons.add("reattached")
            self._muted_until_us = self.watermark_us
        self._begin_life(life_id)

    def _carry_history(self) -> None:
        """Residencies that ended in this life stay known by content."""
        for group, block in self._blocks_of(self._groups):
            if block.cause != _NONE and block.content is not None and not block.gpu and not block.off_gpu():
                self._carry(group, block.content, _History(block.stored_at, block.lost_at, block.cause))

    def _carry(self, group: int, content: bytes, history: _History) -> None:
        known = self._carried.get((group, content))
        if known is not None and known.cause == _AMBIGUOUS:  # that mark stays until the next GPU store, in whichever life
            history.cause = _AMBIGUOUS
        self._carried[group, content] = history

    def _begin_life(self, life_id: str) -> None:
        if self._life_id:
            self._past_lives.add(self._life_id)
        self._life_id = life_id
        self._next_seq = None
        self._contiguous = False
        self._warmup = False
        self._groups = {}
        self._kinds = {}
        self._gpu_groups = set()
        self._resident = {}
        self._offloaded = 0

    # -- identity ------------------------------------------------------------------------------------------------

    def _become_known(self, group: int, block: _Block, content: bytes) -> None:
        """The block's content becomes known: from this instant on it counts as held, not before (rule 2)."""
        block.content = content
        if block.gpu:  # what an earlier life knew of this content is overtaken by what is open now
            self._carried.pop((group, content), None)
        if block.gpu_open:
            _open(self._held.setdefault(GPU, {}), self._touched.setdefault(GPU, {}), content, block.size)
        for tier, (_, is_open) in (block.others or {}).items():
            if is_open:
                _open(self._held.setdefault(tier, {}), self._touched.setdefault(tier, {}), content, block.size)

    def _learn(self, op: Op) -> None:
        """Take the identities a run carries for blocks already known, and nothing else."""
        group = op.group_idx or 0
        blocks = self._groups.get(group, {})
        for start in range(0, len(op.content_ids), ID_BYTES):
            content = op.content_ids[start : start + ID_BYTES]
            if content == NO_ID:
                continue
            block_id = op.block_ids[start : start + ID_BYTES]
            block = blocks.get(block_id)
            if block is not None and block.content is None and block.size in (0, op.block_size):
                self._take_size(group, block, op.block_size)
                self._become_known(group, block, content)
            self._tell_other_groups(group, block_id, content, op.block_size)

    def _tell_other_groups(self, group: int, block_id: bytes, content: bytes, size: int) -> None:
        """The engine's hash covers content, not the group: what one group's store resolves holds for the others."""
        for other, blocks in self._groups.items():
            if other == group:
                continue
            block = blocks.get(block_id)
            if block is not None and block.content is None and block.size in (0, size):
                self._take_size(other, block, size)
                self._become_known(other, block, content)

    def _take_size(self, group: int, block: _Block, size: int) -> None:
        """A placeholder gave no size; one that is open on the GPU is resident with what is now known."""
        if block.size == 0 and size:
            block.size = size
            if block.gpu:
                self._resident[group][1] += size

    # -- windows and coverage (rule 8) -----------------------------------------------------------------------------

    def _touch(self, at: int, life_id: str | None = None, length: int | None = None) -> _Window:
        """The row that holds ``at``, marked as changed."""
        start = window_start(max(at, self.watermark_us), self._window_us) if length is None else at
        life = self._life_id if life_id is None else life_id
        key = (life, start)
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window(start, length or self._window_us, life, self._declaration)
        window.changed_at = self.offset
        window.declared = self._declaration
        window.warmup = self._warmup
        self._dirty[key] = None
        return window

    def _observe(self, at: int) -> None:
        """The stretch between two contiguous batches of one life was observed."""
        since = self.watermark_us
        if not self._contiguous or at <= since:
            return
        if at - since > LONGEST_OBSERVED_US:
            self._touch(at).reasons.add("clock_jump")
            return
        for start, length, part in cut(since, at, self._window_us):
            row = self._touch(start, length=length)
            row.observed_us += part
            if not row.groups:
                self._note_resident(row)

    def _note_resident(self, window: _Window) -> None:
        for group, (blocks, tokens) in self._resident.items():
            total = window.groups.get(group)
            if total is None:
                if not blocks:
                    continue
                total = window.groups[group] = GroupCounters(group)
            total.resident_blocks = blocks
            total.resident_tokens = tokens
        for group, total in window.groups.items():
            total.spec_kind = self._kinds.get(group)
            total.gpu = group in self._gpu_groups

    # -- output --------------------------------------------------------------------------------------------------

    def _flush_step(self, at: int) -> None:
        """Turn what the batch touched into steps: net of what it undid itself, so a content is opened or closed once."""
        for tier, touched in self._touched.items():
            if not touched:
                continue
            held = self._held[tier]
            parts: dict[tuple[int, int], tuple[list[bytes], list[bytes]]] = {}
            for content, (before, size) in touched.items():
                after = held.get(content, 0) > 0
                if before == after:
                    continue
                shard = int.from_bytes(content[:4], "big") % self._shards if self._shards > 1 else 0
                pair = parts.get((shard, size))
                if pair is None:
                    pair = parts[(shard, size)] = ([], [])
                pair[0 if after else 1].append(content)
            touched.clear()
            for (shard, size), (opened, closed) in parts.items():
                self._steps[shard].append(ResidencyStep(self.offset, at, tier, size, b"".join(opened), b"".join(closed)))

    def drain(self) -> Drained:
        """Everything that changed since the last drain; empty lists where nothing did."""
        due = dict(self._dirty)
        due.update(dict.fromkeys(key for key in self._provisional if self._is_past(self._windows[key])))
        windows = [self._row(key, self._windows[key]) for key in due]
        self._dirty = {}
        recomputes, self._recomputes = self._recomputes, []
        changes: list[ResidencyChanges] = []
        if self._moved:
            changes = [
                ResidencyChanges(
                    self.instance_id,
                    self.dp_rank,
                    self._declaration.workload,
                    self._declaration.model,
                    self.offset,
                    self.watermark_us,
                    steps,
                )
                for steps in self._steps
            ]
            self._steps = [[] for _ in range(self._shards)]
            self._moved = False
        return Drained(windows, recomputes, changes)

    def _is_past(self, window: _Window) -> bool:
        return self.watermark_us >= window.start + window.length

    def _row(self, key: tuple[str, int], window: _Window) -> RankWindow:
        declared = window.declared
        final = self._is_past(window)
        if final:  # engine time of a rank never goes back, so nothing can touch this row again
            self._provisional.pop(key, None)
            del self._windows[key]
        else:
            self._provisional[key] = None
        return RankWindow(
            instance_id=self.instance_id,
            dp_rank=self.dp_rank,
            life_id=window.life_id,
            window_start_us=window.start,
            window_us=window.length,
            semantics_version=SEMANTICS_VERSION,
            version=window.changed_at * 2 + final,
            final=final,
            workload=declared.workload,
            model=declared.model,
            reuse_reporting=declared.reuse_reporting,
            removals=declared.removals,
            kv_connector=declared.kv_connector,
            key_epoch=declared.key_epoch,
            canary=declared.canary,
            observed_us=window.observed_us,
            first_batch_us=window.first_batch_us,
            last_batch_us=window.last_batch_us,
            batches=window.batches,
            duplicate_batches=window.duplicate_batches,
            lost_batches=window.lost_batches,
            refused_batches=window.refused_batches,
            unknown_events=window.unknown_events,
            unresolved_blocks=window.unresolved_blocks,
            warmup=window.warmup,
            reasons=sorted(window.reasons),
            groups=[copy(total) for _, total in sorted(window.groups.items())],
        )


def _open(held: dict[bytes, int], touched: dict[bytes, tuple[bool, int]], content: bytes, size: int) -> None:
    """One more block of this rank and tier holds ``content``."""
    copies = held.get(content, 0)
    if content not in touched:
        touched[content] = (copies > 0, size)
    held[content] = copies + 1


def _close(held: dict[bytes, int], touched: dict[bytes, tuple[bool, int]], content: bytes, size: int) -> None:
    """One block fewer of this rank and tier holds ``content``."""
    copies = held[content]
    if content not in touched:
        touched[content] = (copies > 0, size)
    if copies == 1:
        del held[content]
    else:
        held[content] = copies - 1
