"""One rank's wire batches into records: runs to blocks, engine hashes to pseudonyms and content ids. Pure.

The *bridge* remembers, for one engine process life, what each engine hash was resolved to. It outlives eviction and clear
(a hash names content, not a place), ends with the life, and is bounded: the least recently stored is dropped, and counted.

A block gets a content id in one of two ways:

- *chained*: the run's tokens can be assigned to its hashes (as many tokens as hashes x block size) and the content
  id of the block before it is known, or the run starts a prompt. An unknown parent is not a root.
- *borrowed*: this life already resolved the same hash at the same block size, in whatever group or tier. Also where tokens
  are there and only the parent is unknown: the hash covers the content, and a later block of the run may chain onto it.

Otherwise it leaves without one and is counted.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec

from producers.identity import Identity, IdentityKey, Pseudonym, encode_extra, pack_tokens
from producers.wire import BlockHash, Cleared, Removed, Stored, WireBatch
from schemas.records import NO_ID, Batch, Op, ParentState

DEFAULT_MAX_BLOCKS = 4_000_000
"""Hashes the bridge keeps per rank: about 350 bytes each."""

DEFAULT_TIER = "GPU"
REMOTE = "REMOTE"

_Entry = tuple[bytes, int, bytes | None, dict[int, bytes | None] | None]
"""Block pseudonym, block size in tokens, content id (None: not resolved), and the content ids at other block sizes.

Where groups differ in block size, engines give a large block the hash of the small one that ends at the same token: two
contents under one hash. The sizes met later are kept beside the first, so that neither hides the other.
"""


class ResolverCounters(msgspec.Struct):
    """Cumulative over all lives. Blocks are counted once per store or remove event that names them.

    ``identity_conflicts``: a hash whose content came out differently from what this life had resolved it to; the first is
    kept. ``shared_contents``: a content id that this life already knew under another hash: the engine tells two contents
    apart that its events do not (salts or images, in engines whose events carry no extra keys). ``bridge_evictions``: hashes
    forgotten to stay within the bound.
    """

    blocks_stored: int = 0
    blocks_removed: int = 0
    unresolved_blocks: int = 0
    unknown_events: int = 0
    identity_conflicts: int = 0
    shared_contents: int = 0
    bridge_evictions: int = 0


class _Run:
    """A store that is not (yet) resolved whole. ``tokens`` None: its tokens can't be assigned to its hashes."""

    __slots__ = ("contents", "event", "extras", "linked", "parent", "sizes", "tokens")

    def __init__(self, event: Stored, tokens: bytes | None, extras: list[bytes] | None) -> None:
        count = len(event.block_hashes)
        self.event = event
        self.tokens = tokens
        self.extras = extras
        self.linked = False
        self.parent: bytes | None = None
        self.contents: list[bytes | None] = [None] * count
        self.sizes = [event.block_size] * count


class _Removal:
    """The op that consecutive removals of one place gather in; its ids are joined once, when it ends."""

    __slots__ = ("block_ids", "op", "place")

    def __init__(self) -> None:
        self.op: Op | None = None
        self.place: tuple[int, str | None, str | None] | None = None
        self.block_ids: list[bytes] = []

    def end(self) -> None:
        if self.op is not None:
            self.op.block_ids = b"".join(self.block_ids)
            self.op = self.place = None
            self.block_ids = []


class RankResolver:
    """Resolves one rank's batches in order. ``max_blocks`` bounds the bridge (hashes)."""

    def __init__(self, identity: Identity, key: IdentityKey, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self.identity = identity
        self.counters = ResolverCounters()
        self._pseudonym = Pseudonym(key)
        self._max_blocks = max(1, max_blocks)
        self._bridge: OrderedDict[BlockHash, _Entry] = OrderedDict()
        self._beside = 0
        self._contents: set[bytes] = set()

    def __len__(self) -> int:
        """Entries in the bridge: hashes, and once more for each further block size of a hash."""
        return len(self._bridge) + self._beside

    def new_life(self) -> None:
        """Forget every hash: the engine process is another one, and its hashes may mean other content."""
        self._bridge.clear()
        self._contents.clear()
        self._beside = 0

    def resolve(self, batch: WireBatch) -> Batch:
        """``batch`` as ops in the engine's order; consecutive removals of one group, tier and locality become one op."""
        slots: list[Op | _Run] = []
        pending: list[_Run] = []
        removal = _Removal()
        for event in batch.events:
            if isinstance(event, Removed):
                if event.block_hashes:
                    self._remove(event, removal, slots)
                continue
            if isinstance(event, Stored):
                if not event.block_hashes:  # a sliding-window group that kept nothing of the span
                    continue
                removal.end()
                slot = self._store(event)
                if isinstance(slot, _Run):
                    pending.append(slot)
                slots.append(slot)
            else:
                removal.end()
                slots.append(_clear(event))
        removal.end()
        if pending:
            self._retry(pending)
        unresolved = 0
        ops: list[Op] = []
        for slot in slots:
            if isinstance(slot, _Run):
                ops += self._finish(slot)
                if _held(slot.event):
                    unresolved += slot.contents.count(None)
            else:
                ops.append(slot)
        counters = self.counters
        counters.unresolved_blocks += unresolved
        counters.unknown_events += batch.unknown_events
        if len(self._bridge) + self._beside > self._max_blocks:
            self._shrink()
        return Batch(ops, batch.unknown_events, unresolved)

    # -- stores

    def _store(self, event: Stored) -> Op | _Run:
        hashes = event.block_hashes
        self.counters.blocks_stored += len(hashes)
        tokens, extras = _assignable(event)
        if tokens is None:
            run = _Run(event, None, None)
            self._walk(run)
            return run
        parent: bytes | None = None
        linked = event.parent_block_hash is None
        if event.parent_block_hash is not None:
            parent = self._content(event.parent_block_hash, event.block_size)
            linked = parent is not None
        if not linked or extras is not None:
            run = _Run(event, tokens, extras)
            run.linked, run.parent = linked, parent
            self._walk(run)
            if None in run.contents:
                return run
            return self._finish(run)[0]
        contents = self.identity.chain(parent, tokens, event.lora_name, event.block_size)
        block_ids = self._learn_chain(event, contents)
        if block_ids is None:  # this life knows one of the hashes as something else
            run = _Run(event, tokens, None)
            run.linked, run.parent = True, parent
            self._walk(run)
            return self._finish(run)[0]
        return _store_op(event, event.block_size, block_ids, b"".join(contents), "ROOT" if parent is None else "CONTENT", parent)

    def _learn_chain(self, event: Stored, contents: list[bytes]) -> bytes | None:
        """Enter a chained run; its packed block ids, or None (entering no more) at the first hash known as something else."""
        bridge, pseudonym, known_contents, size = self._bridge, self._pseudonym, self._contents, event.block_size
        block_ids = []
        for block_hash, content in zip(event.block_hashes, contents, strict=True):
            entry = bridge.get(block_hash)
            if entry is None:
                entry = bridge[block_hash] = (pseudonym(block_hash), size, content, None)
                if content in known_contents:
                    self.counters.shared_contents += 1
                known_contents.add(content)
            elif entry[2] == content:
                bridge.move_to_end(block_hash)
            elif self._content(block_hash, size) in (None, content):
                self._learn(block_hash, size, content)
            else:
                return None
            block_ids.append(entry[0])
        return b"".join(block_ids)

    def _walk(self, run: _Run) -> None:
        """Resolve what can be resolved of ``run`` now, block by block, and enter all of its hashes."""
        event = run.event
        linked, previous = run.linked, run.parent
        for index, block_hash in enumerate(event.block_hashes):
            size = event.block_size
            if size == 0:
                known, size = self._known_at_any_size(block_hash)
                run.sizes[index] = size
                run.contents[index] = known
                continue
            derived = self._derive(run, index, previous) if linked else None
            content = self._learn(block_hash, size, derived)
            run.contents[index] = content
            linked = content is not None and run.tokens is not None
            previous = content

    def _derive(self, run: _Run, index: int, previous: bytes | None) -> bytes | None:
        if run.tokens is None:
            return None
        event = run.event
        width = 4 * event.block_size
        extra = run.extras[index] if run.extras is not None else b""
        tokens = run.tokens[index * width : (index + 1) * width]
        return self.identity.content_id(previous, tokens, extra, event.lora_name, event.block_size)

    def _retry(self, pending: list[_Run]) -> None:
        """Fill in what later events of the batch made resolvable, until nothing changes; each block is visited once when it is filled."""
        waiting: dict[BlockHash, list[tuple[_Run, int]]] = {}
        for run in pending:
            if run.tokens is not None and not run.linked and run.event.parent_block_hash is not None:
                waiting.setdefault(run.event.parent_block_hash, []).append((run, -1))
            for index, content in enumerate(run.contents):
                if content is None:
                    waiting.setdefault(run.event.block_hashes[index], []).append((run, index))
        ready = deque(waiting)
        while ready:
            for run, index in waiting.get(ready.popleft(), ()):
                ready.extend(self._wake(run, index))

    def _wake(self, run: _Run, index: int) -> list[BlockHash]:
        """Look again at one block of ``run`` (-1: its parent) and at what chains onto it; the hashes resolved by that."""
        event = run.event
        if index >= 0 and run.contents[index] is not None:
            return []
        if event.block_size == 0:
            content, size = self._known_at_any_size(event.block_hashes[index])
            run.sizes[index] = size
            run.contents[index] = content
            return []  # whoever waits for this hash was told when it resolved
        block_hash = event.parent_block_hash if index < 0 else event.block_hashes[index]
        assert block_hash is not None
        content = self._content(block_hash, event.block_size)
        if content is None:
            return []
        if index >= 0:
            run.contents[index] = content
        elif run.linked:
            return []
        else:
            run.linked, run.parent = True, content
        resolved: list[BlockHash] = []
        if run.tokens is not None:
            for after in range(index + 1, len(run.contents)):
                if run.contents[after] is not None:
                    break
                content = self._learn(event.block_hashes[after], event.block_size, self._derive(run, after, content))
                run.contents[after] = content
                resolved.append(event.block_hashes[after])
        return resolved

    def _finish(self, run: _Run) -> list[Op]:
        """The ops of a run: one, or where the event gave no block size, one per stretch of equal known size."""
        event = run.event
        state: ParentState = "UNKNOWN"
        parent = None
        if run.linked:
            state, parent = ("ROOT", None) if run.parent is None else ("CONTENT", run.parent)
        block_ids = [self._block_id(block_hash) for block_hash in event.block_hashes]
        ops = []
        start = 0
        for end in range(1, len(block_ids) + 1):
            if end == len(block_ids) or run.sizes[end] != run.sizes[start]:
                contents = run.contents[start:end]
                packed = b"".join(content or NO_ID for content in contents) if any(contents) else b""
                ops.append(_store_op(event, run.sizes[start], b"".join(block_ids[start:end]), packed, state, parent))
                start = end
        return ops

    # -- removals

    def _remove(self, event: Removed, removal: _Removal, slots: list[Op | _Run]) -> None:
        self.counters.blocks_removed += len(event.block_hashes)
        place = (event.group_idx or 0, event.medium, event.locality)
        if place != removal.place:
            group, tier, locality = place[0], _tier(event.medium), _upper(event.locality)
            op = removal.op
            if op is None or (op.group_idx, op.tier, op.locality) != (group, tier, locality):
                removal.end()
                removal.op = Op("REMOVE", group, tier, locality)
                slots.append(removal.op)
            removal.place = place
        bridge = self._bridge
        for block_hash in event.block_hashes:
            entry = bridge.get(block_hash)
            removal.block_ids.append(entry[0] if entry is not None else self._pseudonym(block_hash))

    # -- the bridge

    def _block_id(self, block_hash: BlockHash) -> bytes:
        entry = self._bridge.get(block_hash)
        return entry[0] if entry is not None else self._pseudonym(block_hash)

    def _content(self, block_hash: BlockHash, size: int) -> bytes | None:
        """The content id of a hash at this block size, if this life knows it; a use, for the order of forgetting."""
        entry = self._bridge.get(block_hash)
        if entry is None:
            return None
        self._bridge.move_to_end(block_hash)
        if entry[1] == size:
            return entry[2]
        return entry[3].get(size) if entry[3] is not None else None

    def _known_at_any_size(self, block_hash: BlockHash) -> tuple[bytes | None, int]:
        """Content id and block size of a hash, for an event that gives no size; (None, 0) if unknown or of several sizes."""
        entry = self._bridge.get(block_hash)
        if entry is None or entry[3] is not None:
            return None, 0
        self._bridge.move_to_end(block_hash)
        return entry[2], entry[1]

    def _learn(self, block_hash: BlockHash, size: int, content: bytes | None) -> bytes | None:
        """Enter a hash; the content id that holds for it from now on (what was known first wins, and a difference is counted)."""
        bridge = self._bridge
        entry = bridge.get(block_hash)
        if entry is None:
            bridge[block_hash] = (self._pseudonym(block_hash), size, content, None)
            self._note_content(content)
            return content
        bridge.move_to_end(block_hash)
        pseudonym, first_size, known, others = entry
        if first_size == size:
            if known is None and content is not None:
                bridge[block_hash] = (pseudonym, size, content, others)
        else:
            if others is None:
                others = {}
                bridge[block_hash] = (pseudonym, first_size, known, others)
            if size not in others:
                self._beside += 1
            known = others.get(size)
            if known is None:
                others[size] = content
        if known is None:
            self._note_content(content)
            return content
        if content is not None and content != known:
            self.counters.identity_conflicts += 1
        return known

    def _note_content(self, content: bytes | None) -> None:
        if content is not None:
            if content in self._contents:
                self.counters.shared_contents += 1
            self._contents.add(content)

    def _shrink(self) -> None:
        while len(self._bridge) + self._beside > self._max_blocks:
            _, entry = self._bridge.popitem(last=False)
            contents = [entry[2], *(entry[3] or {}).values()]
            self._contents.difference_update(content for content in contents if content is not None)
            beside = len(contents) - 1
            self._beside -= beside
            self.counters.bridge_evictions += 1 + beside


def _assignable(event: Stored) -> tuple[bytes | None, list[bytes] | None]:
    """The run's packed tokens if each hash can be given its own, and the extra keys of each block (None: no block has any)."""
    hashes, token_ids = event.block_hashes, event.token_ids
    if not token_ids or len(token_ids) != len(hashes) * event.block_size:
        return None, None
    if not event.lora_name and _names_adapter(event.lora_id):
        return None, None  # an adapter known only by the engine's own number: its content is not the base model's
    extras = None
    try:
        if event.extra_keys and any(event.extra_keys):
            if len(event.extra_keys) != len(hashes):
                return None, None
            extras = [encode_extra(keys, event.lora_name) for keys in event.extra_keys]
            if not any(extras):
                extras = None
        return pack_tokens(token_ids), extras
    except (ValueError, OverflowError):  # keys or token ids of a kind that has no encoding
        return None, None


def _names_adapter(lora_id: int | str | None) -> bool:
    return lora_id > 0 if isinstance(lora_id, int) else bool(lora_id)


def _store_op(event: Stored, size: int, block_ids: bytes, contents: bytes, state: ParentState, parent: bytes | None) -> Op:
    return Op(
        "STORE",
        event.group_idx or 0,
        _tier(event.medium),
        _upper(event.locality),
        size,
        block_ids,
        contents,
        state,
        parent,
        event.spec_kind,
        event.lora_name,
        bool(event.reused),
    )


def _clear(event: Cleared) -> Op:
    return Op("CLEAR", event.group_idx, _upper(event.medium), _upper(event.locality))


def _held(event: Stored) -> bool:
    return event.locality is None or event.locality.upper() != REMOTE


def _tier(medium: str | None) -> str:
    return medium.upper() if medium else DEFAULT_TIER


def _upper(text: str | None) -> str | None:
    return text.upper() if text is not None else None
