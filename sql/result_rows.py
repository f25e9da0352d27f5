"""Result records as columns for ClickHouse. Pure."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from schemas.records import Breach, DeadLetter, Deploy, DuplicateWindow, GroupCounters, RankWindow, Recompute, SharedPrefix
from sql.columns import ColumnBatch

GROUP_FIELDS: tuple[str, ...] = GroupCounters.__struct_fields__
"""Fields of a cache group, each a column ``groups.<field>`` of ``rank_windows``."""

HISTOGRAMS: tuple[str, ...] = ("lifetime", "back_evicted", "back_cleared", "back_restarted")
"""Histograms of a group: ``<name>_buckets`` and ``<name>_counts``."""

GROUP_STATES: tuple[str, ...] = ("resident_blocks", "resident_tokens", "resident_copies", "kv_bytes_per_token")
"""Those fields that tell a state at the end of the row, and so do not add up over rows."""

GROUP_SUMS: tuple[str, ...] = tuple(
    field
    for field in GROUP_FIELDS
    if field not in ("group_idx", "spec_kind", "gpu", *GROUP_STATES) and not field.endswith(("_buckets", "_counts"))
)
"""Those that count, and add up."""


class RankWindowColumns(ColumnBatch):
    """``rank_windows``: one row per record, its groups as arrays."""

    table = "rank_windows"
    column_names = (
        "instance_id",
        "dp_rank",
        "life_id",
        "window_start",
        "window_us",
        "semantics_version",
        "version",
        "is_final",
        "workload",
        "model",
        "reuse_reporting",
        "removals",
        "kv_connector",
        "key_epoch",
        "canary",
        "observed_us",
        "first_batch",
        "last_batch",
        "batches",
        "duplicate_batches",
        "lost_batches",
        "refused_batches",
        "unknown_events",
        "unresolved_blocks",
        "warmup",
        "reasons",
        "register",
        "prefill_rate",
        "prefill_rate_source",
        "gpus_per_rank",
        "pool_blocks",
        "scrapes",
        "breaches_found",
        "departed",
        "breaches.kind",
        "breaches.at",
        "breaches.scraped_at",
        "breaches.found",
        "breaches.bound",
        *(f"groups.{field}" for field in GROUP_FIELDS),
    )

    def add(self, record: RankWindow) -> None:
        """One row."""
        groups = record.groups
        values = (
            record.instance_id,
            record.dp_rank,
            record.life_id,
            record.window_start_us,
            record.window_us,
            record.semantics_version,
            record.version,
            record.final,
            record.workload,
            record.model,
            record.reuse_reporting,
            record.removals,
            record.kv_connector,
            record.key_epoch,
            record.canary,
            record.observed_us,
            record.first_batch_us or None,
            record.last_batch_us or None,
            record.batches,
            record.duplicate_batches,
            record.lost_batches,
            record.refused_batches,
            record.unknown_events,
            record.unresolved_blocks,
            record.warmup,
            record.reasons,
            record.register,
            record.prefill_rate,
            record.prefill_rate_source,
            record.gpus_per_rank,
            record.pool_blocks,
            record.scrapes,
            record.breaches_found,
            record.departed,
            *([getattr(breach, field) for breach in record.breaches] for field in Breach.__struct_fields__),
            *([getattr(group, field) for group in groups] for field in GROUP_FIELDS),
        )
        self.append(values)


class _NamedColumns(ColumnBatch):
    """One row per record; the columns are the record's fields, times without their unit."""

    record: ClassVar[type[msgspec.Struct]]
    renamed: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls) -> None:
        cls.column_names = tuple(cls.renamed.get(field, field) for field in cls.record.__struct_fields__)

    def add(self, record: msgspec.Struct) -> None:
        """One row."""
        self.append(getattr(record, field) for field in self.record.__struct_fields__)


class RecomputeColumns(_NamedColumns):
    """``recomputes``: one row per record."""

    table = "recomputes"
    record = Recompute
    renamed: ClassVar[dict[str, str]] = {
        "index": "block_index",
        "stored_at_us": "stored_at",
        "lost_at_us": "lost_at",
        "back_at_us": "back_at",
    }


class DuplicateWindowColumns(_NamedColumns):
    """``duplicate_windows``: one row per record."""

    table = "duplicate_windows"
    record = DuplicateWindow
    renamed: ClassVar[dict[str, str]] = {"window_start_us": "window_start", "as_of_us": "as_of", "final": "is_final"}


class SharedPrefixColumns(_NamedColumns):
    """``shared_prefixes``: one row per record."""

    table = "shared_prefixes"
    record = SharedPrefix
    renamed: ClassVar[dict[str, str]] = {"as_of_us": "as_of", "first_seen_us": "first_seen"}


class DeadLetterColumns(_NamedColumns):
    """``dead_letters``: one row per record."""

    table = "dead_letters"
    record = DeadLetter


class DeployColumns(_NamedColumns):
    """``deploys``: one row per record."""

    table = "deploys"
    record = Deploy
    renamed: ClassVar[dict[str, str]] = {"at_us": "at"}
