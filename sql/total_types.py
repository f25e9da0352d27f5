"""What totals of a span consist of, and the rules that both ways of adding up share. Pure.

:func:`sql.totals.totals_from_records` makes them from records in memory and :func:`sql.load.load` has ClickHouse make them from the
tables; both follow what this module says and give the same, to the last integer:

* Of rows with one key only that with the highest version counts.
* Rows of one ``semantics_version`` are summed, the one asked for or the newest in the span; others are left out and named.
* Windows are half-open. Asked for a span, it is widened to borders of the base window: the longest row that holds a
  batch (only rows without one are longer) in the span, or anywhere if there is none in it, or else the shortest row. Where
  a side is not given, the span ends with the first or last batch of any rank there, and no row is clipped on that side.
* A row that starts before the span or ends after it is constant over its length (it holds no batch) and counts in
  proportion; integer arithmetic is exact there. What it counts otherwise (losses, refusals) belongs to its start.
* A process life has one entry per declaration in force. Its groups are those of the whole life, in the span or not,
  because the primary group is chosen from them.
* A rank that was known when the span ended, had not departed before it began, and has no row in it, has an entry that counts nothing,
  without a life, for the reason ``absent`` (:mod:`sql.known`).
* Shared prefixes are those of the last instant in the span for which they were told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from schemas.records import Breach, GroupCounters, SharedPrefix
from sql.result_rows import GROUP_STATES, GROUP_SUMS

By = Literal["rank", "workload", "model"]

RESIDENT_FIELDS = GROUP_STATES
SUMMED_FIELDS = GROUP_SUMS

CAUSE_FIELDS = ("evicted", "cleared", "restarted", "concurrent", "ambiguous")
"""Causes as the fields ``recompute_<cause>_*`` name them."""

RATED_FIELDS = tuple(f"rated_{cause}_tokens" for cause in CAUSE_FIELDS)

DUPLICATE_SUMS = ("inside_token_us", "between_token_us", "inside_block_us", "between_block_us")
BYTE_SUMS = ("inside_byte_ms", "between_byte_ms")
DUPLICATE_MAXIMA = (
    "extra_tokens_max",
    "inside_tokens_max",
    "between_tokens_max",
    "extra_blocks_max",
    "inside_blocks_max",
    "between_blocks_max",
    "late_changes",
)
DUPLICATE_ENDS = (
    "inside_tokens_end",
    "between_tokens_end",
    "inside_blocks_end",
    "between_blocks_end",
    "inside_bytes_end",
    "between_bytes_end",
    "ranks",
    "rank_lag_us",
)

PAIRS = "workload_pair"
"""The scope of content that ranks of two workloads hold; its key is a JSON list of both."""

PREFIXES = 10
"""Shared prefixes that are read where nobody says how many."""

BREACHES_KEPT = 10
"""So many contradictions with the engine's metrics are listed of a life: those by the most blocks."""


@dataclass(frozen=True)
class Span:
    """[``start_us``, ``end_us``) of engine time, microseconds."""

    start_us: int
    end_us: int

    @property
    def length_us(self) -> int:
        """Its length; never negative."""
        return max(0, self.end_us - self.start_us)


class GroupTotals(GroupCounters):
    """Sums of one cache group. ``rated_*_tokens``: recomputed tokens for which a prefill rate was known, as :func:`rated` says."""

    rated_evicted_tokens: int = 0
    rated_cleared_tokens: int = 0
    rated_restarted_tokens: int = 0
    rated_concurrent_tokens: int = 0
    rated_ambiguous_tokens: int = 0


@dataclass
class LifeTotals:
    """Sums of one rank in one process life under one declaration, over the span.

    ``observed_us`` is the part of the span demonstrably observed. ``first_batch_us`` and ``last_batch_us`` are ``None`` where
    the span holds no batch. ``groups`` are in the order of their index: sums, but ``resident_*`` and ``kv_bytes_per_token``, which are the
    last row's; ``spec_kind`` and ``gpu`` hold for the whole life. ``last_window_us`` is the start of the last row, and what follows it in
    time (``prefill_rate`` to ``departed``) is that row's. ``rate_sources`` are of the rows that hold GPU time. ``breaches``: see
    :data:`BREACHES_KEPT`. ``final`` is false if any row will be replaced. Without ``life_id``, the rank is absent.
    """

    instance_id: str
    dp_rank: int
    life_id: str
    workload: str | None
    model: str | None
    reuse_reporting: str
    removals: str
    kv_connector: str | None
    key_epoch: int
    canary: str
    observed_us: int = 0
    first_batch_us: int | None = None
    last_batch_us: int | None = None
    last_window_us: int = 0
    batches: int = 0
    duplicate_batches: int = 0
    lost: int = 0
    refused: int = 0
    unknown_events: int = 0
    unresolved: int = 0
    warmup: bool = False
    final: bool = True
    reasons: list[str] = field(default_factory=list)
    groups: list[GroupTotals] = field(default_factory=list)
    scrapes: int = 0
    breaches_found: int = 0
    breaches: list[Breach] = field(default_factory=list)
    rate_sources: list[str] = field(default_factory=list)
    prefill_rate: float | None = None
    prefill_rate_source: str | None = None
    gpus_per_rank: float | None = None
    pool_blocks: int | None = None
    departed: bool = False


LIFE_ENDS = ("prefill_rate", "prefill_rate_source", "gpus_per_rank", "pool_blocks", "departed")
"""What of a life is its last row's."""


@dataclass
class DuplicateTotals:
    """Extra copies of one scope and tier over the span: sums in copies x microseconds, maxima, and the last row's end.

    Bytes (x milliseconds in the sums) are ``None`` if any row does not know them. ``as_of_us`` is the engine time up to which extra
    copies are counted, ``ranks`` how many ranks are, ``rank_lag_us`` how far the shards were behind it; ``complete`` says that all shards
    reported in every row. ``reasons`` are those of all rows.
    """

    scope: str
    scope_key: str
    tier: str
    inside_token_us: int = 0
    between_token_us: int = 0
    inside_block_us: int = 0
    between_block_us: int = 0
    inside_byte_ms: int | None = 0
    between_byte_ms: int | None = 0
    extra_tokens_max: int = 0
    inside_tokens_max: int = 0
    between_tokens_max: int = 0
    extra_blocks_max: int = 0
    inside_blocks_max: int = 0
    between_blocks_max: int = 0
    extra_bytes_max: int | None = 0
    inside_tokens_end: int = 0
    between_tokens_end: int = 0
    inside_blocks_end: int = 0
    between_blocks_end: int = 0
    inside_bytes_end: int | None = 0
    between_bytes_end: int | None = 0
    late_changes: int = 0
    ranks: int = 0
    rank_lag_us: int = 0
    as_of_us: int = 0
    final: bool = True
    complete: bool = True
    reasons: list[str] = field(default_factory=list)


@dataclass
class Totals:
    """Everything :func:`sql.figures.assemble` needs. ``asked`` is the span as asked for, before it was widened; a side may be ``None``.

    ``prefixes`` are of one instant, the first place first.
    """

    span: Span
    asked: tuple[int | None, int | None]
    semantics_version: int | None
    left_out_versions: list[int]
    lives: list[LifeTotals]
    duplicates: list[DuplicateTotals]
    by: By | None = None
    prefixes: list[SharedPrefix] = field(default_factory=list)


LifeKey = tuple[str, int, str, str | None, str | None, str, str, str | None, int, str]
GroupsOfLife = dict[tuple[str, int, str], dict[int, tuple[bool, str | None]]]
"""(instance, rank, life) -> group -> (on a GPU, kind)."""


def scopes(by: By | None) -> list[str]:
    """Scopes of duplicates that are needed for figures by ``by``."""
    return ["fleet", PAIRS] if by is None else ["fleet", PAIRS, by]


def widened(since_us: int | None, until_us: int | None, base_us: int) -> tuple[int | None, int | None]:
    """The given sides moved outwards to borders of the base window; 0 moves nothing."""
    if not base_us:
        return since_us, until_us
    since = None if since_us is None else since_us // base_us * base_us
    until = None if until_us is None else -(-until_us // base_us) * base_us
    return since, until


def settle_span(since_us: int | None, until_us: int | None, first_us: int | None, last_us: int | None) -> Span:
    """The span whose open sides are the first and last batch; empty, at the side that is known, where there is none."""
    start = since_us if since_us is not None else first_us
    end = until_us if until_us is not None else last_us
    if start is None:
        start = end if end is not None else 0
    return Span(start, max(start, end if end is not None else start))


def chosen_version(found: Iterable[int], asked: int | None) -> tuple[int | None, list[int]]:
    """The ``semantics_version`` whose rows are summed, and those that are left out, newest first."""
    versions = sorted(set(found), reverse=True)
    chosen = asked if asked is not None else versions[0] if versions else None
    return chosen, [version for version in versions if version != chosen]


def rated(row: GroupCounters, cause: str) -> int:
    """Recomputed tokens of one row and cause for which a prefill rate was known: at least so many, and in nearly every row exactly.

    A row tells GPU time by cause, but the tokens without a rate over all causes. Causes without GPU time have no rate at all; what they
    do not explain is taken from the others.
    """
    if not getattr(row, f"recompute_{cause}_gpu_us"):
        return 0
    silent = sum(int(getattr(row, f"recompute_{each}_tokens")) for each in CAUSE_FIELDS if not getattr(row, f"recompute_{each}_gpu_us"))
    tokens: int = getattr(row, f"recompute_{cause}_tokens")
    return max(0, tokens - max(0, row.unrated_tokens - silent))


def listed_breaches(breaches: Iterable[Breach]) -> list[Breach]:
    """The :data:`BREACHES_KEPT` by the most blocks, of equals the earliest."""

    def order(each: Breach) -> tuple[int, int, str, int, int]:
        return each.bound - each.found, each.at_us, each.kind, each.scraped_at_ms, each.found

    return sorted(breaches, key=order)[:BREACHES_KEPT]


def with_groups_of_life(groups: Iterable[GroupTotals], of_life: dict[int, tuple[bool, str | None]]) -> list[GroupTotals]:
    """``groups`` in order, with what the life as a whole says of each, and those that do nothing in the span added."""
    found = {group.group_idx: group for group in groups}
    for index, (gpu, kind) in of_life.items():
        group = found.setdefault(index, GroupTotals(group_idx=index))
        group.gpu = gpu
        group.spec_kind = kind
    return [found[index] for index in sorted(found)]


def life_order(life: LifeTotals) -> tuple[str, ...]:
    """The order in which lives are listed."""
    return (
        life.instance_id,
        f"{life.dp_rank:010d}",
        f"{life.last_window_us:020d}",
        life.life_id,
        life.workload or "",
        life.model or "",
        life.reuse_reporting,
        life.removals,
        life.kv_connector or "",
        f"{life.key_epoch:020d}",
        life.canary,
    )


def duplicate_order(totals: DuplicateTotals) -> tuple[str, str, str]:
    """The order in which duplicates are listed."""
    return totals.scope, totals.scope_key, totals.tier
