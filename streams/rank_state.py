"""The state of a holder core as bytes, and back. Pure.

Blocks go by column, one group after another, in the order in which the core came to know them: that order decides in which a clear ends
them. What follows from the blocks (running totals, what the rank holds by content) is not written but added up again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from schemas.errors import KvcensusError
from schemas.records import NO_ID, Breach, Declaration, split_ids
from streams.blocks import GPU, Block, Blocks
from streams.engine_view import EngineView
from streams.fleet_news import FleetNews, Told
from streams.history import History, Past
from streams.holdings import SEMANTICS_VERSION, Holdings
from streams.rank_rows import Row

FORMAT = 1
"""Version of this form."""

# How a block's parent is written: it has none, it is the block written before, or its id follows in a column of its own.
_NO_PARENT, _BLOCK_BEFORE, _BY_ID = range(3)


class GroupState(msgspec.Struct, array_like=True):
    """The blocks of one group by column; times are how long before the watermark, in microseconds.

    ``flags`` holds, from the lowest bit on: GPU open (1 bit), use (2), kind of parent (2), cause (3). ``lost_at`` is told of blocks with
    a cause, ``parents`` of those whose parent goes by its id; ``off_gpu`` are (number of the block, tier, copies, open).
    """

    group: int
    kind: str | None
    on_gpu: bool
    ids: bytes
    contents: bytes
    sizes: list[int]
    copies: list[int]
    flags: bytes
    stored_at: list[int]
    lost_at: list[int]
    parents: bytes
    off_gpu: list[tuple[int, str, int, bool]]


class HoldingsState(msgspec.Struct, array_like=True):
    """Blocks and history. ``lost`` is the queue of what is remembered as lost: group, and numbers of blocks in it, each less the one
    before; ``carried`` is in order of loss too, its content ids packed. ``tiers`` are all that were ever seen, in their order.
    """

    groups: list[GroupState]
    tiers: list[str]
    lost: list[tuple[int, list[int]]]
    lost_blocks: int
    carried_groups: list[int]
    carried_contents: bytes
    carried: list[Past]


class RankState(msgspec.Struct, array_like=True):
    """Everything a core knows right after a drain; names as in :class:`streams.residency.RankCore` and its parts."""

    instance_id: str
    dp_rank: int
    window_us: int
    shards: int
    watermark_us: int
    offset: int
    declaration: Declaration
    life_id: str
    past_lives: list[str]
    next_seq: int | None
    contiguous: bool
    warmup: bool
    departed: bool
    forgot: bool
    muted_until_us: int
    muted_at_us: int
    pending_reasons: list[str]
    pending_lost: int
    pending_refused: int
    pending_scrapes: int
    pending_breaches: list[Breach]
    byte_groups: list[int]
    engine: EngineView
    rows: list[Row]
    told: Told
    told_departed: bool
    holdings: HoldingsState


def encode(state: RankState) -> bytes:
    """``state`` as bytes, with the versions of rules and form before it."""
    return msgspec.msgpack.encode((FORMAT, SEMANTICS_VERSION, state))


def decode(data: bytes) -> RankState:
    """The state in ``data``. Raises :class:`KvcensusError` if it is none, or was made by other counting rules or in another form."""
    try:
        form, rules, packed = msgspec.msgpack.decode(data, type=tuple[int, int, msgspec.Raw])
        if (form, rules) != (FORMAT, SEMANTICS_VERSION):
            raise KvcensusError(f"the state of a rank is of form {form} and rules {rules}, not {FORMAT} and {SEMANTICS_VERSION}")
        return msgspec.msgpack.decode(packed, type=RankState)
    except msgspec.DecodeError as error:
        raise KvcensusError(f"the state of a rank cannot be read: {error}") from error


def dump_holdings(holdings: Holdings, now_us: int) -> HoldingsState:
    """The state of blocks and history at ``now_us``."""
    history = holdings.history
    return HoldingsState(
        groups=[_dump_group(holdings, group, list(blocks.values()), now_us) for group, blocks in holdings.groups.items()],
        tiers=list(holdings.fleet.held),
        lost=_dump_lost(holdings),
        lost_blocks=history.blocks,
        carried_groups=[group for group, _ in history.carried],
        carried_contents=b"".join([content for _, content in history.carried]),
        carried=list(history.carried.values()),
    )


def _dump_group(holdings: Holdings, group: int, blocks: list[Block], now_us: int) -> GroupState:
    ids = [block.id for block in blocks]
    before = [None, *ids]
    parents = [block.parent for block in blocks]
    kinds = [
        _NO_PARENT if parent is None else _BLOCK_BEFORE if parent == last else _BY_ID for parent, last in zip(parents, before, strict=False)
    ]
    return GroupState(
        group=group,
        kind=holdings.kinds.get(group),
        on_gpu=group in holdings.gpu_groups,
        ids=b"".join(ids),
        contents=b"".join([block.content or NO_ID for block in blocks]),
        sizes=[block.size for block in blocks],
        copies=[block.gpu for block in blocks],
        flags=bytes([block.gpu_open | block.use << 1 | kind << 3 | block.cause << 5 for block, kind in zip(blocks, kinds, strict=True)]),
        stored_at=[now_us - block.stored_at for block in blocks],
        lost_at=[now_us - block.lost_at for block in blocks if block.cause],
        parents=b"".join([parent for parent, kind in zip(parents, kinds, strict=True) if parent is not None and kind == _BY_ID]),
        off_gpu=[
            (number, tier, copies, is_open)
            for number, block in enumerate(blocks)
            if block.others
            for tier, (copies, is_open) in block.others.items()
            if copies
        ],
    )


def _dump_lost(holdings: Holdings) -> list[tuple[int, list[int]]]:
    numbers: dict[int, dict[bytes, int]] = {}
    out: list[tuple[int, list[int]]] = []
    last = 0
    for group, _, block in holdings.history.queue():
        if group not in numbers:
            numbers[group] = {block.id: number for number, block in enumerate(holdings.groups[group].values()) if block.cause}
        if not out or out[-1][0] != group:
            out.append((group, []))
            last = 0
        number = numbers[group][block.id]
        out[-1][1].append(number - last)
        last = number
    return out


def restore_holdings(state: HoldingsState, holdings: Holdings, history: History, fleet: FleetNews, now_us: int) -> None:
    """Fill ``holdings``, ``history`` and what ``fleet`` knows to be held, all of them new, from ``state``."""
    for tier in state.tiers:
        fleet.of_tier(tier)
    numbered: dict[int, list[Block]] = {}
    for group in state.groups:
        blocks = _restore_group(group, now_us)
        numbered[group.group] = blocks
        holdings.groups[group.group] = {block.id: block for block in blocks}
        _share_parents(blocks, holdings.groups[group.group])
        if group.kind is not None:
            holdings.kinds[group.group] = group.kind
        if group.on_gpu:
            holdings.gpu_groups.add(group.group)
        resident = [block for block in blocks if block.gpu]
        holdings.resident[group.group] = [
            len(resident),
            sum([block.size for block in resident]),
            sum([block.gpu for block in resident]),
        ]
        _hold(blocks, fleet)
    history.restore(_restore_lost(state.lost, numbered), _restore_carried(state), state.lost_blocks)


def _restore_group(state: GroupState, now_us: int) -> list[Block]:
    ids, contents, parents = split_ids(state.ids), split_ids(state.contents), iter(split_ids(state.parents))
    lost_at = iter(state.lost_at)
    blocks: list[Block] = []
    before: bytes | None = None
    columns = zip(ids, contents, state.sizes, state.copies, state.flags, state.stored_at, strict=True)
    for block_id, content, size, copies, flags, stored_at in columns:
        kind, cause = flags >> 3 & 3, flags >> 5
        blocks.append(
            Block(
                block_id,
                None if content == NO_ID else content,
                size,
                copies,
                bool(flags & 1),
                None,
                now_us - stored_at,
                now_us - next(lost_at) if cause else 0,
                cause,
                None if kind == _NO_PARENT else before if kind == _BLOCK_BEFORE else next(parents),
                flags >> 1 & 3,
            )
        )
        before = block_id
    for number, tier, copies, is_open in state.off_gpu:
        block = blocks[number]
        if block.others is None:
            block.others = {}
        block.others[tier] = (copies, is_open)
    return blocks


def _share_parents(blocks: list[Block], by_id: Blocks) -> None:
    """One object for each id."""
    for block in blocks:
        if block.parent is not None:
            parent = by_id.get(block.parent)
            if parent is not None:
                block.parent = parent.id


def _hold(blocks: Iterable[Block], fleet: FleetNews) -> None:
    """Count what the blocks hold by content. It was told of when it opened: nothing of it is touched."""
    held = fleet.of_tier(GPU)[0] if any(block.gpu_open for block in blocks) else {}
    for block in blocks:
        content = block.content
        if content is None:
            continue
        if block.gpu_open:
            held[content] = held.get(content, 0) + 1
        for tier, (_, is_open) in (block.others or {}).items():
            if is_open:
                elsewhere = fleet.of_tier(tier)[0]
                elsewhere[content] = elsewhere.get(content, 0) + 1


def _restore_lost(lost: list[tuple[int, list[int]]], numbered: dict[int, list[Block]]) -> list[tuple[int, Block]]:
    out = []
    for group, steps in lost:
        number = 0
        for step in steps:
            number += step
            out.append((group, numbered[group][number]))
    return out


def _restore_carried(state: HoldingsState) -> dict[tuple[int, bytes], Past]:
    return dict(zip(zip(state.carried_groups, split_ids(state.carried_contents), strict=True), state.carried, strict=True))
