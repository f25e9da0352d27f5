"""One rank's wire batches into records: runs to blocks, engine hashes to pseudonyms and content ids. Pure.

The *bridge* remembers, for one engine process life, what each engine hash was resolved to. It outlives eviction and clear
(a hash names content, not a place), ends with the life, and is bounded: the least recently stored is dropped, counted and
declared. It can be written down as it grows (:meth:`RankResolver.take_learned`) and read back by another process
(:meth:`RankResolver.restore`), so that a forwarder that comes back knows what its predecessor knew.

A block gets a content id in one of two ways:

- *chained*: the run's tokens can be assigned to its hashes (as many tokens as hashes x block size) and the content
  id of the block before it is known, or the run starts a prompt. An unknown parent is not a root.
- *borrowed*: this life already resolved the same hash at the same block size, in whatever group or tier. Also where tokens
  are there and only the parent is unknown: the hash covers the content, and a later block of the run may chain onto it.

Otherwise it leaves without one and is counted.

Where an engine's hash does not cover the salt (profile ``sglang``), one hash may stand for several contents: see
:mod:`producers.salted`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

from producers.identity import (
    EXTRA_KEY_CONTEXT,
    SESSION_CONTEXT,
    Identity,
    IdentityKey,
    Pseudonym,
    ValuePseudonym,
    encode_keys,
    encode_value,
    pack_tokens,
)
from producers.salted import SaltedHashes
from producers.wire import BlockHash, Cleared, Removed, Stored, WireBatch
from schemas.records import NO_ID, Batch, EngineProfile, IdentityRefused, Op, ParentState

DEFAULT_MAX_BLOCKS = 4_000_000
"""Hashes the bridge keeps per rank: about 360 bytes each."""

REMOTE = "REMOTE"
_MAX_LONG = 2**63 - 1

Learned: TypeAlias = tuple[int | bytes, int, bytes | None, int]
"""One entry of the bridge: engine hash, block size in tokens, content id, and the group whose event it was first seen in.

The content id is None where it is not known, and :data:`~schemas.records.NO_ID` where the hash was seen to stand for two
contents and is believed for neither. The hash may be one of :mod:`producers.salted`.
"""

_Entry: TypeAlias = tuple[bytes, int, bytes | None, dict[int, tuple[bytes | None, int]] | None, int]
"""Block pseudonym, block size in tokens, content id, the content ids and groups at other block sizes, and the group.

Content ids as in :data:`Learned`. Where groups differ in block size, engines give a large block the hash of the small one that
ends at the same token: two contents under one hash. The sizes met later are kept beside the first, so that neither hides the
other.
"""


class ResolverCounters(msgspec.Struct):
    """Cumulative over all lives. Blocks are counted once per store or remove event that names them.

    ``identity_conflicts``: a hash whose content came out differently from what this life had resolved it to; the first is
    kept (profile ``sglang``: neither is). ``shared_contents``: a content id that this life already knew under another hash: the
    engine tells two contents apart that its events do not (salts or images, in engines whose events carry no extra keys).
    ``bridge_evictions``: hashes forgotten to stay within the bound.
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

    __slots__ = ("contents", "event", "extras", "keys", "linked", "parent", "parent_id", "sizes", "tokens")

    def __init__(self, event: Stored, tokens: bytes | None, extras: list[bytes] | None, keys: list[bytes], parent_id: bytes | None) -> None:
        count = len(event.block_hashes)
        self.event = event
        self.tokens = tokens
        self.extras = extras
        self.keys = keys
        self.parent_id = parent_id
        self.linked = False
        self.parent: bytes | None = None
        self.contents: list[bytes | None] = [None] * count
        self.sizes = [event.block_size] * count


class _Removal:
    """The op that consecutive removals of one place gather in; its ids are joined once, when it ends."""

    __slots__ = ("block_ids", "op", "place")

    def __init__(self) -> None:
        self.op: Op | None = None
        self.place: tuple[int, str | None, str | None, str | None] | None = None
        self.block_ids: list[bytes] = []

    def end(self) -> None:
        if self.op is not None:
            self.op.block_ids = b"".join(self.block_ids)
            self.op = self.place = None
            self.block_ids = []


class RankResolver:
    """Resolves one rank's batches in order. ``max_blocks`` bounds the bridge (hashes).

    ``profile`` says which engine's events these are. With ``collect_learned`` (an attribute as well) what the bridge learns
    is gathered for :meth:`take_learned`.
    """

    def __init__(
        self,
        identity: Identity,
        key: IdentityKey,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        *,
        profile: EngineProfile = "vllm",
        collect_learned: bool = False,
    ) -> None:
        self.identity = identity
        self.counters = ResolverCounters()
        self.collect_learned = collect_learned
        self._pseudonym = Pseudonym(key).of
        self._key_pseudonym = ValuePseudonym(key, EXTRA_KEY_CONTEXT)
        self._session_pseudonym = ValuePseudonym(key, SESSION_CONTEXT)
        self._salted = SaltedHashes(self._key_pseudonym) if profile == "sglang" else None
        self._learned: list[Learned] = []
        self._dropped: dict[int, int] = {}
        self._forgotten: dict[int, IdentityRefused] = {}
        self._max_blocks = max(1, max_blocks)
        self._bridge: OrderedDict[BlockHash, _Entry] = OrderedDict()
        self._beside = 0
        self._contents: set[bytes] = set()

    def __len__(self) -> int:
        """Entries in the bridge: hashes, and once more for each further block size of a hash."""
        return len(self._bridge) + self._beside

    def new_life(self) -> None:
        """Forget every hash: the engine process is another one, and its hashes may mean other content.

        What was learned and not taken goes with it; what was forgotten stays to be taken.
        """
        self._bridge.clear()
        self._contents.clear()
        self._learned.clear()
        self._beside = 0
        if self._salted is not None:
            self._salted.clear()

    def take_learned(self) -> list[Learned]:
        """What is new or changed in the bridge since the last call, in that order; empty unless ``collect_learned`` is set.

        An entry may come twice, first without its content id; the later one holds. Uses are not told, so that after a restore the
        order of forgetting is that of learning.
        """
        learned, self._learned = self._learned, []
        return learned

    def entries(self) -> Iterator[Learned]:
        """The whole bridge, the first to be forgotten first. Do not resolve while iterating."""
        for block_hash, (_, size, content, others, group) in self._bridge.items():
            yield block_hash, size, content, group
            if others is not None:
                for other_size, (other_content, other_group) in others.items():
                    yield block_hash, other_size, other_content, other_group

    def restore(self, learned: Iterable[Learned]) -> None:
        """Enter what another resolver of the same life, key and model gave out, in its order; what exceeds the bound is forgotten."""
        for block_hash, size, content, group in learned:
            self._enter(block_hash, size, content, group)
            if len(self._bridge) + self._beside > self._max_blocks:
                self._shrink()

    def take_forgotten(self) -> list[IdentityRefused]:
        """What the bound made the bridge forget since the last call: one record for each group, lowest first.

        The window is from the engine time of the first batch that made it forget to that of the last. What a restore forgets
        belongs to the next batch resolved.
        """
        forgotten, self._forgotten = self._forgotten, {}
        return [forgotten[group] for group in sorted(forgotten)]

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
        if self._dropped:
            self._note_forgotten(batch.at_us)
        return Batch(ops, batch.unknown_events, unresolved)

    # -- stores

    def _store(self, event: Stored) -> Op | _Run:
        self.counters.blocks_stored += len(event.block_hashes)
        if self._salted is not None:
            event = self._salted.apart(event)
        token_ids, size = event.token_ids, event.block_size
        # As many tokens as its hashes have: only then are they each other's.
        in_number = bool(token_ids) and len(token_ids or ()) == len(event.block_hashes) * size
        tokens, extras, keys = self._assignable(event, in_number)
        parent: bytes | None = None
        parent_id: bytes | None = None
        linked = event.parent_block_hash is None
        if event.parent_block_hash is not None and in_number:
            entry = self._bridge.get(event.parent_block_hash)
            if entry is None:
                parent_id = self._pseudonym(event.parent_block_hash)
            else:
                self._bridge.move_to_end(event.parent_block_hash)
                parent_id, parent = entry[0], _at_size(entry, size)
                linked = parent is not None
        if tokens is None or not linked:
            run = _Run(event, tokens, extras, keys, parent_id)
            if tokens is not None:
                run.linked, run.parent = linked, parent
            self._walk(run)
            return run if tokens is None or None in run.contents else self._finish(run)[0]
        contents = self.identity.chain(parent, tokens, event.lora_name, size, extras)
        block_ids = self._learn_chain(event, contents)
        if block_ids is None:  # this life knows one of the hashes as something else
            run = _Run(event, tokens, extras, keys, parent_id)
            run.linked, run.parent = True, parent
            self._walk(run)
            return run if None in run.contents else self._finish(run)[0]
        state: ParentState = "ROOT" if parent is None else "CONTENT"
        return self._store_op(event, size, block_ids, b"".join(contents), state, parent, parent_id, keys)

    def _assignable(self, event: Stored, in_number: bool) -> tuple[bytes | None, list[bytes] | None, list[bytes]]:
        """What can be said of each hash of a run: its tokens, its extra keys as they go into the id, and their pseudonyms.

        ``in_number``: there are as many tokens as its hashes have. Tokens are None where they can't be assigned, extra keys where
        no block has any; the pseudonyms are packed per block, and empty where there are none or nobody can say whose they are.
        """
        extras: list[bytes] | None = None
        keys: list[bytes] = []
        if event.extra_keys and any(event.extra_keys):
            if len(event.extra_keys) != len(event.block_hashes):
                return None, None, keys
            try:
                encoded = [encode_keys(each, event.lora_name) if each else [] for each in event.extra_keys]
            except ValueError:  # of a kind that has no encoding
                return None, None, keys
            if any(encoded):
                extras = [b"".join(each) for each in encoded]
                pseudonym = self._key_pseudonym
                keys = [b"".join([pseudonym(key) for key in each]) if each else b"" for each in encoded]
        if not in_number or event.token_ids is None:
            return None, None, keys
        if not event.lora_name and _names_adapter(event.lora_id):
            return None, None, keys  # an adapter known only by the engine's own number: its content is not the base model's
        try:
            return pack_tokens(event.token_ids), extras, keys
        except OverflowError:  # no token's number
            return None, None, keys

    def _learn_chain(self, event: Stored, contents: list[bytes]) -> bytes | None:
        """Enter a chained run; its packed block ids, or None (entering no more) at the first hash known as something else."""
        bridge, pseudonym, known_contents, size = self._bridge, self._pseudonym, self._contents, event.block_size
        hashes, group = event.block_hashes, event.group_idx or 0
        learned = self._learned if self.collect_learned else None
        if self._salted is not None:
            for block_hash in hashes:
                self._salted.note(block_hash)
        block_ids = []
        for block_hash, content in zip(hashes, contents, strict=True):
            entry = bridge.get(block_hash)
            if entry is None:
                entry = bridge[block_hash] = (pseudonym(block_hash), size, content, None, group)
                if content in known_contents:
                    self.counters.shared_contents += 1
                known_contents.add(content)
                if learned is not None:
                    learned.append((block_hash, size, content, group))
            elif entry[2] == content:
                bridge.move_to_end(block_hash)
            elif self._content(block_hash, size) not in (None, content) or self._learn(block_hash, size, content, group) != content:
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
            content = self._learn(block_hash, size, derived, event.group_idx or 0)
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
                derived = self._derive(run, after, content)
                content = self._learn(event.block_hashes[after], event.block_size, derived, event.group_idx or 0)
                if content is None:
                    break
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
                blocks, keys = b"".join(block_ids[start:end]), run.keys[start:end]
                ops.append(self._store_op(event, run.sizes[start], blocks, packed, state, parent, run.parent_id, keys))
                start = end
        return ops

    def _store_op(
        self,
        event: Stored,
        size: int,
        block_ids: bytes,
        contents: bytes,
        state: ParentState,
        parent: bytes | None,
        parent_id: bytes | None,
        keys: list[bytes],
    ) -> Op:
        return Op(
            "STORE",
            event.group_idx or 0,
            event.medium.upper() if event.medium else None,
            event.locality.upper() if event.locality else None,
            size,
            block_ids,
            contents,
            state,
            parent,
            event.spec_kind,
            event.lora_name,
            bool(event.reused),
            parent_id,
            None if event.lora_id is None else _lora_number(event.lora_id),
            event.spec_sliding_window,
            keys,
            None if event.session_id is None else self._session(event.session_id),
            event.ownership.upper() if event.ownership else None,
        )

    def _session(self, session_id: object) -> bytes | None:
        try:
            return self._session_pseudonym(encode_value(session_id))
        except ValueError:  # of a kind that has no encoding
            return None

    # -- removals

    def _remove(self, event: Removed, removal: _Removal, slots: list[Op | _Run]) -> None:
        self.counters.blocks_removed += len(event.block_hashes)
        place = (event.group_idx or 0, event.medium, event.locality, event.ownership)
        if place != removal.place:
            group, tier = place[0], event.medium.upper() if event.medium else None
            locality = event.locality.upper() if event.locality else None
            ownership = event.ownership.upper() if event.ownership else None
            op = removal.op
            if op is None or (op.group_idx, op.tier, op.locality, op.ownership) != (group, tier, locality, ownership):
                removal.end()
                removal.op = Op("REMOVE", group, tier, locality)
                removal.op.ownership = ownership
                slots.append(removal.op)
            removal.place = place
        bridge = self._bridge
        hashes = event.block_hashes if self._salted is None else self._salted.meant(event.block_hashes, bridge)
        for block_hash in hashes:
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
        return _at_size(entry, size)

    def _known_at_any_size(self, block_hash: BlockHash) -> tuple[bytes | None, int]:
        """Content id and block size of a hash, for an event that gives no size; (None, 0) if unknown or of several sizes."""
        entry = self._bridge.get(block_hash)
        if entry is None or entry[3] is not None:
            return None, 0
        self._bridge.move_to_end(block_hash)
        return _believed(entry[2]), entry[1]

    def _learn(self, block_hash: BlockHash, size: int, content: bytes | None, group: int) -> bytes | None:
        """Enter a hash; the content id that holds for it from now on, or None.

        What was known first wins, and a difference is counted; where hashes do not cover the salt, a difference leaves none.
        """
        entry = self._bridge.get(block_hash)
        known: bytes | None = None
        new = entry is None
        if entry is not None:
            self._bridge.move_to_end(block_hash)
            if entry[1] == size:
                known, group = entry[2], entry[4]
            elif entry[3] is not None and size in entry[3]:
                known, group = entry[3][size]
            else:
                new = True
        if known is None:
            if content is not None:
                if content in self._contents:
                    self.counters.shared_contents += 1
            elif not new:
                return None
        elif content is None or content == known:
            return _believed(known)
        elif known == NO_ID:
            return None
        else:
            self.counters.identity_conflicts += 1
            if self._salted is None:
                return known
            content = NO_ID
        self._enter(block_hash, size, content, group)
        if self.collect_learned:
            self._learned.append((block_hash, size, content, group))
        return _believed(content)

    def _enter(self, block_hash: BlockHash, size: int, content: bytes | None, group: int) -> None:
        """Put an entry into the bridge; one that is there gets the content id, if there is one, and keeps its group."""
        bridge = self._bridge
        entry = bridge.get(block_hash)
        if content is not None and content != NO_ID:
            self._contents.add(content)
        if entry is None:
            bridge[block_hash] = (self._pseudonym(block_hash), size, content, None, group)
            if self._salted is not None:
                self._salted.note(block_hash)
            return
        pseudonym, first_size, known, others, first_group = entry
        bridge.move_to_end(block_hash)
        if first_size == size:
            if content is not None:
                bridge[block_hash] = (pseudonym, size, content, others, first_group)
            return
        if others is None:
            others = {}
            bridge[block_hash] = (pseudonym, first_size, known, others, first_group)
        if size not in others:
            self._beside += 1
            others[size] = (content, group)
        elif content is not None:
            others[size] = (content, others[size][1])

    def _shrink(self) -> None:
        while len(self._bridge) + self._beside > self._max_blocks:
            block_hash, (_, _, content, others, group) = self._bridge.popitem(last=False)
            gone = [(content, group), *(others.values() if others is not None else ())]
            for each, of_group in gone:
                if each is not None:
                    self._contents.discard(each)
                self._dropped[of_group] = self._dropped.get(of_group, 0) + 1
            self._beside -= len(gone) - 1
            self.counters.bridge_evictions += len(gone)
            if self._salted is not None:
                self._salted.forget(block_hash)

    def _note_forgotten(self, at_us: int) -> None:
        for group, count in self._dropped.items():
            record = self._forgotten.get(group)
            if record is None:
                self._forgotten[group] = IdentityRefused(group, count, at_us, at_us)
            else:
                record.refused += count
                record.window_start_us = min(record.window_start_us, at_us)
                record.window_end_us = max(record.window_end_us, at_us)
        self._dropped.clear()


def _at_size(entry: _Entry, size: int) -> bytes | None:
    content = entry[2] if entry[1] == size else entry[3][size][0] if entry[3] is not None and size in entry[3] else None
    return None if content == NO_ID else content


def _believed(content: bytes | None) -> bytes | None:
    return None if content == NO_ID else content


def _names_adapter(lora_id: int | str | None) -> bool:
    return lora_id > 0 if isinstance(lora_id, int) else bool(lora_id)


def _lora_number(lora_id: int | str) -> int | None:
    return lora_id if isinstance(lora_id, int) and abs(lora_id) <= _MAX_LONG else None


def _clear(event: Cleared) -> Op:
    return Op("CLEAR", event.group_idx, _upper(event.medium), _upper(event.locality))


def _held(event: Stored) -> bool:
    return event.locality is None or event.locality.upper() != REMOTE


def _upper(text: str | None) -> str | None:
    return text.upper() if text else None
