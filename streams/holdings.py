"""What one rank holds in its present life, and what each store, removal and clear makes of it. Pure.

The rules are those of the design ("What counts", 0 to 4); the number of the rule stands beside the code that follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from schemas.histogram import bucket
from schemas.records import ID_BYTES, NO_ID, UNKNOWN_PARENT, Op, Recompute
from streams.blocks import (
    AMBIGUOUS,
    CAUSE_NAMES,
    CLEARED,
    CONCURRENT,
    CONTINUED,
    EVICTED,
    FRESH,
    GPU,
    NONE,
    USED,
    Block,
    Blocks,
    show_used,
)
from streams.fleet_news import FleetNews, close_content, open_content
from streams.history import History
from streams.known_blocks import KnownBlocks, first_parent, is_remote
from streams.rank_rows import Tally, tally_of

SEMANTICS_VERSION = 2
"""Version of the counting rules; on every result row. Raise it with every change of what a figure means."""


class Holdings(KnownBlocks):
    """Blocks of one rank, by group and block id, with running totals.

    Before the operations of a batch the caller says where they stand: ``at`` (engine time), ``seq``, ``version``, and whether they count
    (else they change the state alone); after them, ``unidentified`` is how many GPU stores had no content id, and ``ambiguous`` whether
    content came back of which nobody can say whether it was away.
    """

    def __init__(self, instance_id: str, dp_rank: int, fleet: FleetNews, history: History) -> None:
        super().__init__(fleet, history)
        self.life_id = ""
        self.kinds: dict[int, str] = {}
        self.gpu_groups: set[int] = set()
        self.reuse_reporting = "unlabelled"
        self.last_copy = False
        self.recomputes: list[Recompute] = []
        self.at = self.seq = self.version = self.unidentified = 0
        self.counting = True
        self.ambiguous = False
        self._rank = (instance_id, dp_rank)
        self._rate: float | None = None
        self._gpus: float = 1
        self._gpu_us: dict[int, int] = {}

    def set_rate(self, rate: float | None, gpus: float) -> None:
        """GPU time is estimated at ``rate`` prompt tokens per second on ``gpus`` GPUs from here on (rule 6; null: unknown)."""
        if (rate, gpus) != (self._rate, self._gpus):
            self._rate, self._gpus = rate, gpus
            self._gpu_us = {}

    def gpu_us(self, tokens: int) -> int | None:
        """GPU time of ``tokens``, microseconds; None where no rate is known."""
        if self._rate is None:
            return None
        known = self._gpu_us.get(tokens)
        if known is None:
            known = self._gpu_us[tokens] = int(tokens * self._gpus * 1_000_000 / self._rate)
        return known

    # -- stores (rules 1 to 3) -----------------------------------------------------------------------------------

    def _only_labels(self, op: Op) -> bool:
        """Rule 3: on a labelled stream a marked store changes nothing, but shows a use."""
        return op.reused and self.reuse_reporting == "labelled"

    def opens(self, op: Op) -> bool:
        """Whether a STORE opens residencies."""
        return not self._only_labels(op) and not is_remote(op)

    def store(self, op: Op, tallies: dict[int, Tally], first: int) -> None:
        """One run stored; ``first`` is the number of its first block in the batch."""
        group = op.group_idx or 0
        if self._only_labels(op):
            self._reused(group, op)
            return
        if group not in self.groups:
            self.groups[group] = {}
            self.resident[group] = [0, 0, 0]
        if op.spec_kind is not None:
            self.kinds[group] = op.spec_kind
        tier = op.tier or GPU
        if tier == GPU:
            self._store_on_gpu(group, op, tally_of(tallies, group), first)
        else:
            tally_of(tallies, group)
            self._store_off_gpu(group, tier, op)

    def _reused(self, group: int, op: Op) -> None:
        self.learn(op)
        blocks = self.groups.get(group, {})
        for start in range(0, len(op.block_ids), ID_BYTES):
            show_used(blocks, blocks.get(op.block_ids[start : start + ID_BYTES]))

    def _store_on_gpu(self, group: int, op: Op, tally: Tally, first: int) -> None:
        blocks = self.groups[group]
        ids, contents, given, at = op.block_ids, op.content_ids, op.block_size, self.at
        end = len(ids)
        if end:
            self.gpu_groups.add(group)
        single = len(self.groups) == 1
        tells_copies = self.reuse_reporting != "unlabelled"
        held, touched = self.fleet.of_tier(GPU)
        carried = self.history.carried
        linked, before = first_parent(op)
        before_id = op.parent_block_id
        chained = op.parent_state != "UNKNOWN" or before_id is not None  # else nobody can say that its blocks follow each other
        # The block before, until this store's going on from it was taken into account.
        previous = None if before_id is None else blocks.get(before_id)
        if previous is not None:
            before_id = previous.id  # one object for all who name it
        new_blocks = new_tokens = stored_tokens = resolved_tokens = unidentified = 0
        for index, start in enumerate(range(0, end, ID_BYTES), first):
            block_id = ids[start : start + ID_BYTES]
            content: bytes | None = None
            if contents:
                content = contents[start : start + ID_BYTES]
                if content == NO_ID:
                    content = None
            # A second store that goes on from a resident block is another request's: it found the block.
            if previous is not None and previous.use != USED and previous.gpu:
                if previous.use == CONTINUED:
                    show_used(blocks, previous)
                else:
                    previous.use = CONTINUED
            block = blocks.get(block_id)
            if block is None:
                # Made as it will be: what comes next in the run goes on from it.
                goes_on = chained and start + ID_BYTES < end
                block = blocks[block_id] = Block(
                    block_id, content, given, 1, True, None, at, 0, NONE, before_id, CONTINUED if goes_on else FRESH
                )
                if content is not None:
                    if not single:
                        self._tell_other_groups(group, block_id, content, given, before)
                    if carried:
                        self._come_back(tally, group, block, index, before, before_id)
                        block.stored_at = at
                    if content in held or content in touched:
                        open_content(held, touched, content, given, before)
                    else:
                        held[content] = 1
                        touched[content] = (False, given, before)
                    resolved_tokens += given
                else:
                    unidentified += 1
                stored_tokens += given
                new_blocks += 1
                new_tokens += given
                if chained:
                    previous, before_id = None, block_id
                if linked:
                    before = content or UNKNOWN_PARENT
                continue
            if not block.size:
                self._take_size(group, block, given)
            if content is not None:
                if block.content is None:
                    self._become_known(group, block, content, before)
                if not single:
                    self._tell_other_groups(group, block_id, content, given, before)
            size = block.size
            content = block.content
            stored_tokens += size
            if content is None:
                unidentified += 1
            else:
                resolved_tokens += size
            if block.parent is None:
                block.parent = before_id
            if block.gpu:
                # Rule 3: a second physical copy; one that an offload tier holds as well may have been loaded (rule 2).
                if tells_copies and not block.off_gpu():
                    self._recompute(tally, group, block, CONCURRENT, index, before, before_id)
                if block.use != USED:
                    show_used(blocks, block)
                block.gpu += 1
            else:
                if block.cause or block.others is not None or carried:
                    self._come_back(tally, group, block, index, before, before_id)
                block.stored_at = at
                block.use = FRESH
                block.gpu = 1
                new_blocks += 1
                new_tokens += size
            if not block.gpu_open:
                block.gpu_open = True
                if content is not None:
                    open_content(held, touched, content, size, before)
            if chained:
                previous, before_id = block, block.id
            if linked:
                before = content or UNKNOWN_PARENT
        count = end // ID_BYTES
        resident = self.resident[group]
        resident[0] += new_blocks
        resident[1] += new_tokens
        resident[2] += count
        self.unidentified += unidentified
        counters = tally.counters
        counters.stored_blocks += count
        counters.stored_tokens += stored_tokens
        counters.resolved_tokens += resolved_tokens

    def _store_off_gpu(self, group: int, tier: str, op: Op) -> None:
        blocks = self.groups[group]
        ids, contents = op.block_ids, op.content_ids
        single = len(self.groups) == 1
        held, touched = self.fleet.of_tier(tier)
        linked, before = first_parent(op)
        for start in range(0, len(ids), ID_BYTES):
            block_id = ids[start : start + ID_BYTES]
            content: bytes | None = contents[start : start + ID_BYTES] if contents else None
            if content == NO_ID:
                content = None
            block = blocks.get(block_id)
            if block is None:
                block = blocks[block_id] = Block(block_id, content, op.block_size)
            else:
                if not block.size:
                    self._take_size(group, block, op.block_size)
                if content is not None and block.content is None:
                    self._become_known(group, block, content, before)
            if content is not None and not single:
                self._tell_other_groups(group, block_id, content, op.block_size, before)
            if block.cause and not block.gpu and not block.off_gpu():
                self.history.blocks -= 1
            others = block.others
            if others is None:
                others = block.others = {}
            copies, is_open = others.get(tier, (0, False))
            others[tier] = (copies + 1, True)
            if not is_open and block.content is not None:
                open_content(held, touched, block.content, block.size, before)
            if linked:
                before = block.content or UNKNOWN_PARENT

    def _come_back(self, tally: Tally, group: int, block: Block, index: int, before: bytes, before_id: bytes | None) -> None:
        """A store into the GPU tier of something it does not hold (rule 2). Either way the history is consumed."""
        history = self.history
        carried = history.carried.pop((group, block.content), None) if block.content is not None and history.carried else None
        if block.off_gpu():
            tally.counters.reloaded_blocks += 1
            tally.counters.reloaded_tokens += block.size
        else:
            if block.cause:
                history.blocks -= 1
            if carried is not None:
                if block.cause == NONE:
                    block.stored_at, block.lost_at, block.cause = carried.stored_at, carried.lost_at, carried.cause
                elif carried.cause == AMBIGUOUS:  # a mark outlives the life, too
                    block.cause = AMBIGUOUS
            if block.cause:
                self._recompute(tally, group, block, block.cause, index, before, before_id)
        block.cause = NONE

    def _recompute(self, tally: Tally, group: int, block: Block, cause: int, index: int, before: bytes, before_id: bytes | None) -> None:
        if not self.counting:
            return
        size, at = block.size, self.at
        lost_at = at if cause == CONCURRENT else block.lost_at
        gpu_us = self.gpu_us(size)
        self.ambiguous = self.ambiguous or cause == AMBIGUOUS
        counted = tally.recomputed[cause]
        counted[0] += 1
        counted[1] += size
        if gpu_us is None:
            tally.counters.unrated_tokens += size
        else:
            counted[2] += gpu_us
        if cause <= 3:  # those that were away
            back = tally.back[cause]
            away = bucket(at - lost_at)
            back[away] = back.get(away, 0) + 1
        self.recomputes.append(
            Recompute(
                *self._rank,
                group,
                self.life_id,
                self.seq,
                index,
                SEMANTICS_VERSION,
                self.version,
                CAUSE_NAMES[cause],
                block.id,
                block.content,
                size,
                block.stored_at,
                lost_at,
                at,
                at - lost_at,
                None if before in (NO_ID, UNKNOWN_PARENT) else before,
                before_id,
                gpu_us,
            )
        )

    # -- ends (rules 1 and 3) ------------------------------------------------------------------------------------

    def remove(self, op: Op, tallies: dict[int, Tally]) -> None:
        """A run of blocks of which one copy each is removed."""
        group, tier = op.group_idx or 0, op.tier or GPU
        tally = tally_of(tallies, group)
        blocks = self.groups.get(group)
        if blocks is None:  # rule 1: opens no history
            tally.counters.unjoined_evicts += len(op.block_ids) // ID_BYTES
        elif tier == GPU:
            self._remove_from_gpu(group, blocks, op.block_ids, tally)
        else:
            self._remove_off_gpu(group, blocks, tier, op.block_ids, tally)

    def _remove_from_gpu(self, group: int, blocks: Blocks, ids: bytes, tally: Tally) -> None:
        unlabelled, last_copy = self.reuse_reporting == "unlabelled", self.last_copy
        held, touched = self.fleet.of_tier(GPU)
        lifetime, at = tally.lifetime, self.at
        stored_at, lived = at, 0
        unjoined = removed = ended_blocks = ended_tokens = gone_blocks = gone_tokens = unreused_blocks = unreused_tokens = 0
        lost: list[Block] = []
        for start in range(0, len(ids), ID_BYTES):
            block = blocks.get(ids[start : start + ID_BYTES])
            if block is None or not block.gpu:  # rule 1: opens no history
                unjoined += 1
                continue
            copies, size = block.gpu, block.size
            left = 0 if last_copy else copies - 1
            # Rule 3, each reading can only undercount: announced stores may be no copies, so one removal ends at most one.
            ended = 1 if unlabelled else copies - left
            if block.gpu_open and (unlabelled or not left):
                block.gpu_open = False
                content = block.content
                if content is not None:
                    if held[content] == 1 and content not in touched:
                        del held[content]
                        touched[content] = (True, size, UNKNOWN_PARENT)
                    else:
                        close_content(held, touched, content, size)
            block.gpu = left
            ended_blocks += ended
            ended_tokens += ended * size
            removed += copies - left
            if left:
                continue
            gone_blocks += 1
            gone_tokens += size
            if block.stored_at != stored_at:  # whole runs go together
                stored_at = block.stored_at
                lived = bucket(at - stored_at)
            lifetime[lived] = lifetime.get(lived, 0) + 1
            if block.use != USED:
                unreused_blocks += 1
                unreused_tokens += size
            block.cause = EVICTED
            block.lost_at = at
            if block.others is None or not block.off_gpu():
                lost.append(block)
        if lost:
            self.history.lost(group, at, lost)
        resident, counters = self.resident[group], tally.counters
        resident[0] -= gone_blocks
        resident[1] -= gone_tokens
        resident[2] -= removed
        counters.unjoined_evicts += unjoined
        counters.evicted_blocks += ended_blocks
        counters.evicted_tokens += ended_tokens
        counters.unreused_blocks += unreused_blocks
        counters.unreused_tokens += unreused_tokens

    def _remove_off_gpu(self, group: int, blocks: Blocks, tier: str, ids: bytes, tally: Tally) -> None:
        unlabelled = self.reuse_reporting == "unlabelled"
        held, touched = self.fleet.of_tier(tier)
        for start in range(0, len(ids), ID_BYTES):
            block = blocks.get(ids[start : start + ID_BYTES])
            copies, is_open = (0, False) if block is None or block.others is None else block.others.get(tier, (0, False))
            if block is None or block.others is None or not copies:
                tally.counters.unjoined_evicts += 1
                continue
            left = 0 if self.last_copy else copies - 1
            still_open = is_open and left > 0 and not unlabelled
            if is_open and not still_open and block.content is not None:
                close_content(held, touched, block.content, block.size)
            block.others[tier] = (left, still_open)
            if not left:
                self._lose(group, block, EVICTED)

    def _lose(self, group: int, block: Block, cause: int) -> None:
        """A tier, or several, lost the last copy of ``block``: remember how, and that nothing is open any more if so."""
        if block.cause != AMBIGUOUS:  # that mark stays until the next GPU store
            block.cause = cause
        block.lost_at = self.at
        if not block.gpu and not block.off_gpu():
            self.history.lost(group, self.at, [block])

    def clear(self, op: Op, tallies: dict[int, Tally]) -> None:
        """Close everything in the scope; every scope field the clear lacks means "all" (rule 1)."""
        groups = list(self.groups) if op.group_idx is None else [op.group_idx]
        # A reset of the GPU alone looks the same as one of all tiers: what lay off the GPU may still be there.
        ambiguous = op.tier is None and op.group_idx is None and any(block.off_gpu() for _, block in self.blocks_of(groups))
        for group, block in self.blocks_of(groups):
            marked = ambiguous and block.off_gpu()
            ended = self.close_all(group, block, op.tier)
            if ended is None:
                continue
            if ended:
                counters = tally_of(tallies, group).counters
                counters.cleared_blocks += ended
                counters.cleared_tokens += ended * block.size
            self._lose(group, block, AMBIGUOUS if marked else CLEARED)

    def blocks_of(self, groups: Iterable[int]) -> Iterator[tuple[int, Block]]:
        """Group and block of all blocks of ``groups``."""
        for group in groups:
            for block in self.groups.get(group, {}).values():
                yield group, block

    def close_all(self, group: int, block: Block, tier: str | None) -> int | None:
        """Close ``block`` in ``tier`` (None: in all): GPU copies ended, or ``None`` if nothing was open there."""
        found = False
        ended = 0
        if block.gpu and tier in (None, GPU):
            found = True
            ended = block.gpu
            if block.gpu_open and block.content is not None:
                close_content(*self.fleet.of_tier(GPU), block.content, block.size)
            block.gpu, block.gpu_open = 0, False
            resident = self.resident[group]
            resident[0] -= 1
            resident[1] -= block.size
            resident[2] -= ended
        if block.others is not None:
            for name, (copies, is_open) in block.others.items():
                if copies and tier in (None, name):
                    found = True
                    if is_open and block.content is not None:
                        close_content(*self.fleet.of_tier(name), block.content, block.size)
                    block.others[name] = (0, False)
        return ended if found else None

    def begin_life(self, life_id: str) -> None:
        """The blocks of the life before are gone; :meth:`History.end_life` is the caller's."""
        self.life_id = life_id
        self.groups, self.kinds, self.gpu_groups, self.resident = {}, {}, set(), {}
