"""The same input for the oracle and for the real path, and the comparison of the figures of both."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from producers.identity import Identity, IdentityKey, ephemeral_key
from producers.resolver import RankResolver
from producers.simulate.recording import from_capture
from producers.simulate.source import RankSource
from producers.stream import RankStream
from schemas.records import Declaration, RankMessage
from tests.oracle.oracle import RankInput, figures

CAUSES = ("evicted", "cleared", "restarted", "ambiguous_reload")


def capture_sources(*paths: tuple[str, Path], declaration: Declaration) -> list[RankSource]:
    """Ranks of captures, each file one instance."""
    return [source for name, path in paths for source in from_capture(name, path, declaration)]


def expected(sources: Sequence[RankSource]) -> dict[str, Any]:
    """The oracle's figures of these ranks."""
    return figures(
        [
            RankInput(
                source.instance_id,
                source.dp_rank,
                [(batch.seq, batch.payload) for batch in source.batches],
                reuse_reporting=source.declaration.reuse_reporting,
                removals=source.declaration.removals,
                workload=source.declaration.workload,
                model=source.declaration.model,
            )
            for source in sources
        ]
    )


def messages(sources: Sequence[RankSource], key: IdentityKey | None = None) -> list[list[RankMessage]]:
    """What forwarders would send for these ranks, a list per rank."""
    shared = key or ephemeral_key()
    return [_rank_messages(source, shared) for source in sources]


def _rank_messages(source: RankSource, key: IdentityKey) -> list[RankMessage]:
    lives = itertools.count()
    resolver = RankResolver(Identity(key, source.declaration.model), key)
    stream = RankStream(source.instance_id, source.dp_rank, resolver, source.declaration, "test", lambda *_: f"{source.key}-{next(lives)}")
    out = stream.start(0)
    for batch in source.batches:
        out += stream.feed(batch.seq, batch.payload, 0)
    return out


def differences(document: Mapping[str, Any], oracle: Mapping[str, Any]) -> list[str]:
    """Every figure in which a JSON document differs from the oracle; empty if they agree exactly."""
    found: list[str] = []

    def same(what: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            found.append(f"{what}: {ours} instead of {theirs}")

    repeat, wanted = document["repeat_compute"], oracle["repeat_compute"]
    for cause in CAUSES:
        same(f"repeat_compute.{cause}", _counts(repeat[cause]), _counts(wanted[cause]))
    same("repeat_compute.concurrent", _counts(repeat["concurrent"]), _counts(wanted["concurrent"]))
    same("coverage", repeat["coverage"], float(oracle["coverage"]))
    footprint, wanted = document["duplicate_footprint"], oracle["duplicate_footprint"]
    same("duplicate coverage", footprint["coverage"], float(oracle["coverage"]))
    for place in (None, "inside_instances", "between_instances"):
        ours, theirs = (footprint, wanted) if place is None else (footprint[place], wanted[place])
        for unit in ("extra_tokens", "extra_blocks"):
            same(f"{place or 'duplicate_footprint'}.{unit}", _levels(ours[unit]), _mean(theirs[unit]))
    ranks = {(rank["instance_id"], rank["dp_rank"]): rank for rank in document["ranks"]}
    same("ranks", sorted(ranks), sorted((rank["instance_id"], rank["dp_rank"]) for rank in oracle["ranks"]))
    for theirs in oracle["ranks"]:
        ours = ranks.get((theirs["instance_id"], theirs["dp_rank"]))
        if ours is None:
            continue
        for name in ("stored_tokens", "evicted_tokens"):
            same(f"{theirs['instance_id']}/{theirs['dp_rank']}.{name}", ours[name], theirs[name])
    return found


def _counts(cause: Mapping[str, int] | None) -> tuple[int, int] | None:
    return None if cause is None else (cause["tokens"], cause["blocks"])


def _levels(extra: Mapping[str, Any]) -> tuple[float, int, int]:
    return extra["mean"], extra["max"], extra["end"]


def _mean(extra: Mapping[str, Any]) -> tuple[float, int, int]:
    numerator, denominator = extra["mean"]
    return numerator / denominator, extra["max"], extra["end"]


def interleaved(ranks: Iterable[list[RankMessage]], pick: Any) -> list[RankMessage]:
    """Messages of several ranks in one order, each rank's own kept; ``pick(n)`` chooses the next of n ranks."""
    queues = [list(reversed(messages)) for messages in ranks if messages]
    out: list[RankMessage] = []
    while queues:
        index = pick(len(queues))
        out.append(queues[index].pop())
        if not queues[index]:
            del queues[index]
    return out
