"""Engine batches as columns of ``block_events``, a row per block. Pure, and the one place where rows come by the million.

Names are those of the public record contract for such facts (1.10): kinds ``store``, ``evict`` and ``clear``, ``n_tokens``, ``parent_id``.
"""

from __future__ import annotations

from schemas.errors import KvcensusError
from schemas.records import ID_BYTES, NO_ID, Op, RankMessage, split_ids
from sql.columns import ColumnBatch

_KINDS = {"STORE": "store", "REMOVE": "evict", "CLEAR": "clear"}
_NO_KEYS: list[bytes] = []
_RARE = ("spec_sliding_window", "lora_id", "extra_keys", "session_id", "ownership")


class BlockEventColumns(ColumnBatch):
    """``block_events``: one row per block of every STORE and REMOVE, and one per CLEAR."""

    table = "block_events"
    column_names: tuple[str, ...] = (
        "instance_id",
        "dp_rank",
        "life_id",
        "seq",
        "at",
        "observed_at",
        "event_index",
        "block_index",
        "kind",
        "group_idx",
        "tier",
        "locality",
        "n_tokens",
        "block_id",
        "content_id",
        "parent_id",
        "parent_unknown",
        "parent_content_id",
        "spec_kind",
        "lora_name",
        "reused",
    )
    # Most fleets have none of these, and each column costs its share of every insert.
    rare_columns = _RARE

    def clear(self) -> None:
        """See :class:`ColumnBatch`."""
        self.column_names = type(self).column_names
        super().clear()

    def add(self, record: RankMessage) -> None:
        """The rows of a message's batch; none if it carries something else. Raises :class:`KvcensusError` for ids of a wrong length."""
        if record.batch is None:
            return
        (
            instance_ids, dp_ranks, life_ids, seqs, ats, observed, event_indexes, block_indexes, kinds, groups, tiers, localities,
            sizes, block_ids, content_ids, parent_ids, parents_unknown, parent_contents, spec_kinds, loras, reused, *_,
        ) = self.columns  # fmt: skip
        before = len(self)
        ops = record.batch.ops
        counts = [_blocks(op, record) for op in ops]

        def fill(op: Op, rows: int) -> None:
            """The columns that are equal for all blocks of ``op``, and of those after it that are like it."""
            kinds.extend([_KINDS[op.kind]] * rows)
            groups.extend([op.group_idx] * rows)
            tiers.extend([op.tier] * rows)
            localities.extend([op.locality] * rows)
            sizes.extend([op.block_size] * rows)
            spec_kinds.extend([op.spec_kind] * rows)
            loras.extend([op.lora_name] * rows)
            reused.extend([op.reused] * rows)
            if op.kind != "STORE":  # only a store has parents
                parent_ids.extend([None] * rows)
                parents_unknown.extend([False] * rows)
                parent_contents.extend([None] * rows)

        like: Op | None = None
        waiting = 0
        for index, (op, count) in enumerate(zip(ops, counts, strict=True)):
            if not count:
                continue
            # Removals come one block at a time, many alike in a row.
            if like is None or not _alike(op, like):
                if like is not None:
                    fill(like, waiting)
                like, waiting = op, 0
            waiting += count
            if op.kind == "CLEAR":
                event_indexes.append(index)
                block_indexes.append(0)
                block_ids.append(NO_ID)
                content_ids.append(None)
                continue
            if count == 1:
                event_indexes.append(index)
                block_indexes.append(0)
                block_ids.append(op.block_ids)
                content = op.content_ids
                content_ids.append(content if content and content != NO_ID else None)
                if op.kind == "STORE":
                    parent_ids.append(op.parent_block_id)
                    parents_unknown.append(op.parent_block_id is None and op.parent_state != "ROOT")
                    parent_contents.append(op.parent_content_id if op.parent_state == "CONTENT" else None)
                continue
            event_indexes.extend([index] * count)
            block_indexes.extend(range(count))
            ids = split_ids(op.block_ids)
            block_ids.extend(ids)
            contents: list[bytes | None] = [*split_ids(op.content_ids)] if op.content_ids else [None] * count
            if NO_ID in contents:
                contents = [None if content == NO_ID else content for content in contents]
            content_ids.extend(contents)
            if op.kind != "STORE":
                continue
            # A run whose parent's content is unknown still says which block that is, unless its hashes cannot be assigned.
            if op.parent_block_id is None and op.parent_state == "UNKNOWN":
                parent_ids.extend([None] * count)
                parents_unknown.extend([True] * count)
            else:
                parent_ids.append(op.parent_block_id)
                parent_ids.extend(ids[:-1])
                parents_unknown.append(op.parent_block_id is None and op.parent_state != "ROOT")
                parents_unknown.extend([False] * (count - 1))
            if op.parent_state == "UNKNOWN":
                parent_contents.extend([None] * count)
            else:
                parent_contents.append(op.parent_content_id if op.parent_state == "CONTENT" else None)
                parent_contents.extend(contents[:-1])
        if like is not None:
            fill(like, waiting)
        rows = sum(counts)
        instance_ids.extend([record.instance_id] * rows)
        dp_ranks.extend([record.dp_rank] * rows)
        life_ids.extend([record.life_id] * rows)
        seqs.extend([record.seq] * rows)
        ats.extend([record.at_us] * rows)
        observed.extend([record.observed_at_ms] * rows)
        if len(self.columns) > len(type(self).column_names) or any(_has_rare(op) for op in ops):
            self._add_rare(ops, counts, before)

    def _add_rare(self, ops: list[Op], counts: list[int], before: int) -> None:
        """The rare columns of ``ops``; one that appears is empty for the rows ``before``."""
        for name in _RARE:
            if name not in self.column_names:
                if all(getattr(op, name) in (None, []) for op in ops):
                    continue
                self.column_names = (*self.column_names, name)
                self.columns.append([_NO_KEYS if name == "extra_keys" else None] * before)
            column = self.columns[self.column_names.index(name)]
            for op, count in zip(ops, counts, strict=True):
                if name != "extra_keys":
                    column.extend([getattr(op, name)] * count)
                elif op.extra_keys and op.kind != "CLEAR":
                    column.extend([split_ids(keys) for keys in op.extra_keys])
                else:
                    column.extend([_NO_KEYS] * count)


def _has_rare(op: Op) -> bool:
    return (
        bool(op.extra_keys)
        or op.session_id is not None
        or op.lora_id is not None
        or op.spec_sliding_window is not None
        or op.ownership is not None
    )


def _alike(op: Op, other: Op) -> bool:
    return (
        op.kind == other.kind
        and op.group_idx == other.group_idx
        and op.tier == other.tier
        and op.locality == other.locality
        and op.block_size == other.block_size
        and op.spec_kind == other.spec_kind
        and op.lora_name == other.lora_name
        and op.reused == other.reused
    )


def _blocks(op: Op, record: RankMessage) -> int:
    """How many rows ``op`` makes, once it is sure that it makes them whole."""
    if op.kind == "CLEAR":
        return 1
    count, rest = divmod(len(op.block_ids), ID_BYTES)
    if rest or (op.content_ids and len(op.content_ids) != len(op.block_ids)):
        raise KvcensusError(
            f"{_place(record)}: {len(op.block_ids)} bytes of block ids and {len(op.content_ids)} of content ids "
            f"are no whole ids of {ID_BYTES} bytes"
        )
    if op.extra_keys and (len(op.extra_keys) != count or any(len(keys) % ID_BYTES for keys in op.extra_keys)):
        raise KvcensusError(f"{_place(record)}: extra keys of {len(op.extra_keys)} blocks for {count}, or not of {ID_BYTES} bytes each")
    return count


def _place(record: RankMessage) -> str:
    return f"{record.instance_id}/{record.dp_rank} life {record.life_id} seq {record.seq}"
