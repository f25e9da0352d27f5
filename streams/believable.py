"""What a message may say at all: beyond it lie numbers that no forwarder sends, and that no sum of them has room for. Pure."""

from __future__ import annotations

from math import isfinite

from schemas.records import NO_SEQ, Batch, Declaration, Loss, RankMessage

MOST_US = 2**33 * 1_000_000
"""Engine times from the epoch up to here (the year 2242) are believed, as forwarders do."""

MOST_SEQ = 2**48 - 1
MOST_TOKENS = 2**24
MOST = 2**40
"""Of everything else that is counted."""

_RATES = (1e-3, 1e12)
"""Prompt tokens per second, the least and the most."""

_MOST_GPUS = 1e5


def unbelievable(message: RankMessage) -> str | None:
    """What in ``message`` cannot be true, if anything: such a message is not counted at all."""
    if not 0 <= message.at_us <= MOST_US:
        return f"engine time {message.at_us} is none"
    if not (0 <= message.seq <= MOST_SEQ or message.seq == NO_SEQ) or not 0 <= message.skipped <= MOST_SEQ:
        return f"number {message.seq}, {message.skipped} skipped, is none"
    if message.batch is not None:
        return _of_batch(message.batch)
    if message.declaration is not None:
        return _of_declaration(message.declaration)
    if message.loss is not None:
        return _of_loss(message.loss)
    if message.holder_reset is not None and not 0 <= message.holder_reset.boundary_us <= MOST_US:
        return f"boundary {message.holder_reset.boundary_us} is no engine time"
    if message.scrape is not None and message.scrape.kv_cache_usage is not None and not isfinite(message.scrape.kv_cache_usage):
        return f"usage {message.scrape.kv_cache_usage} is no share"
    return None


def _of_batch(batch: Batch) -> str | None:
    for op in batch.ops:
        if not 0 <= op.block_size <= MOST_TOKENS:
            return f"a block of {op.block_size} tokens"
    if not 0 <= batch.unknown_events <= MOST:
        return f"{batch.unknown_events} unknown events"
    return None if 0 <= batch.unresolved_blocks <= MOST else f"{batch.unresolved_blocks} unresolved blocks"


def _of_loss(loss: Loss) -> str | None:
    if 0 <= loss.first_seq <= MOST_SEQ and 0 <= loss.last_seq <= MOST_SEQ:
        return None
    return f"a loss of {loss.first_seq} to {loss.last_seq}"


def _of_declaration(declared: Declaration) -> str | None:
    low, high = _RATES
    if declared.prefill_rate is not None and not low <= declared.prefill_rate <= high:
        return f"prefill rate {declared.prefill_rate} is none"
    if declared.gpus_per_rank is not None and not 0 < declared.gpus_per_rank <= _MOST_GPUS:
        return f"{declared.gpus_per_rank} GPUs"
    if not 0 <= declared.staleness_ms <= MOST:
        return f"stale after {declared.staleness_ms} ms"
    sizes = [*declared.kv_bytes_by_group.values()]
    if declared.kv_bytes_per_token is not None:
        sizes.append(declared.kv_bytes_per_token)
    return next((f"{size} bytes per token" for size in sizes if not 0 <= size <= MOST), None)
