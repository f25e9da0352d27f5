"""What a forwarder sends for the ranks the reference reads: the real stream code and the real codec, one message after another."""

from __future__ import annotations

import itertools

from producers.identity import Identity, IdentityKey
from producers.resolver import RankResolver
from producers.stream import RankStream
from schemas import codec
from schemas.records import Declaration, RankMessage, Scrape

from .rank import Declared, Departed, RankInput, Scraped


def declaration(declared: Declared) -> Declaration:
    """The record that says so."""
    return Declaration(
        declared.reuse_reporting,  # type: ignore[arg-type]
        declared.removals,  # type: ignore[arg-type]
        workload=declared.workload,
        model=declared.model,
        kv_connector=declared.kv_connector,
        key_epoch=declared.key_epoch,
        canary=declared.canary,
        prefill_rate=declared.prefill_rate,
        gpus_per_rank=declared.gpus_per_rank,
        kv_bytes_per_token=declared.kv_bytes_per_token,
        kv_bytes_by_group={str(group): size for group, size in declared.kv_bytes_by_group},
        staleness_ms=declared.staleness_ms,
    )


def scrape(scraped: Scraped) -> Scrape:
    """The record that says so."""
    return Scrape(
        scraped.at_ms,
        kv_cache_usage=scraped.usage,
        num_gpu_blocks=scraped.pool,
        requests_running=scraped.running,
        prompt_tokens=scraped.prompt_tokens,
        prompt_tokens_cached=scraped.prompt_tokens_cached,
        external_prefix_cache_hits=scraped.external_hits,
    )


def life_id(rank: RankInput, number: int) -> str:
    """What the messages of a rank's life are named by."""
    return f"{rank.instance_id}/{rank.dp_rank}-{number}"


def messages(rank: RankInput, key: IdentityKey) -> list[RankMessage]:
    """Everything of one rank, in order, as it comes out of Kafka."""
    lives = itertools.count()
    first = rank.first()
    resolver = RankResolver(Identity(key, first.model), key)
    stream = RankStream(rank.instance_id, rank.dp_rank, resolver, declaration(first), "run", lambda *_: life_id(rank, next(lives)))
    out = stream.start(0)
    for step in rank.frames:
        if isinstance(step, tuple):
            out += stream.feed(step[0], step[1], 0)
        elif isinstance(step, Declared):
            stream.declaration = declaration(step)
            out += stream.start(0)
        elif isinstance(step, Scraped):
            out.append(stream.scraped(scrape(step), step.at_ms))
        else:
            assert isinstance(step, Departed)
            out.append(stream.depart("stop", 0))
    return [codec.decode(codec.encode(message), RankMessage) for message in out]
