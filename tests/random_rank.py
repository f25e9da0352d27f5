"""Seeded streams of one rank that use every kind of message and operation, thick with collisions."""

from __future__ import annotations

import random
from collections.abc import Iterator

from schemas.records import (
    NO_ID,
    Batch,
    Declaration,
    Departure,
    HolderReset,
    IdentityRefused,
    Loss,
    Op,
    ParentState,
    RankMessage,
    Refusal,
    ReuseReporting,
    Scrape,
)

START = 1_700_000_000_000_000


class RandomRank:
    """Messages of one rank; ``blocks`` different block ids of chains eight blocks long."""

    def __init__(self, seed: int, *, blocks: int = 40) -> None:
        self._random = random.Random(seed)
        self._ids = [bytes([1 + number // 8, number % 8]) * 8 for number in range(blocks)]
        self._life = 0
        self._seq = 0
        self._at = START
        self._at_ms = 1_000
        self._computed = 0
        self._groups = self._random.choice(([0], [0], [0, 1]))

    def messages(self, count: int) -> Iterator[RankMessage]:
        """``count`` messages in their order; the first declares."""
        yield self._message(declaration=self._declaration())
        for _ in range(count - 1):
            yield self._next()

    def _message(self, **what: object) -> RankMessage:
        made = RankMessage("a", 0, f"life {self._life}", self._seq, self._at, 0, "run")
        for name, value in what.items():
            setattr(made, name, value)
        return made

    def _next(self) -> RankMessage:
        pick = self._random
        kind = pick.choices(
            ("batch", "declaration", "loss", "gap", "refusal", "reset", "attach", "scrape", "departure", "refused", "again"),
            (200, 3, 2, 2, 2, 2, 1, 20, 1, 1, 3),
        )[0]
        if kind == "declaration":
            return self._message(declaration=self._declaration())
        if kind == "loss":
            first, self._seq = self._seq, self._seq + pick.randint(1, 3)
            return self._message(loss=Loss(first, self._seq - 1, "gone"))
        if kind == "refusal":
            self._seq += 1
            made = self._message(refusal=Refusal("broken", 3))
            made.seq -= 1
            return made
        if kind == "reset":
            self._life, self._seq = self._life + 1, 0
            boundary = self._at + pick.choice((0, 0, 1_000_000))
            return self._message(holder_reset=HolderReset(boundary, "new", pick.choice(("restarted", "restarted", "rekeyed"))))
        if kind == "attach":
            self._life += 1
            self._at -= pick.choice((0, 5_000_000))
        if kind == "scrape":
            return self._message(scrape=self._scrape())
        if kind == "departure":
            return self._message(departure=Departure("stopped"))
        if kind == "refused":
            return self._message(identity_refused=IdentityRefused(0, 1, self._at, self._at))
        if kind == "gap":
            self._seq += pick.randint(1, 2)
        if kind == "again":
            made = self._batch()
            made.seq = max(0, made.seq - 2)
            return made
        return self._batch()

    def _batch(self) -> RankMessage:
        pick = self._random
        self._at += pick.choice((0, 1_000, 700_000, 3_000_000, 12_000_000, 40_000_000, -2_000_000 if pick.random() < 0.1 else 5))
        ops = [self._op() for _ in range(pick.randint(0, 5))]
        made = self._message(batch=Batch(ops, 0, sum(not op.content_ids for op in ops if op.kind == "STORE")))
        self._seq += 1
        return made

    def _op(self) -> Op:
        pick = self._random
        group, tier = pick.choice(self._groups), pick.choice(("GPU", "GPU", "GPU", None, "CPU", "DISK"))
        locality = "REMOTE" if pick.random() < 0.03 else None
        kind = pick.choices(("STORE", "REMOVE", "CLEAR"), (10, 8, 0.3))[0]
        start = pick.randrange(len(self._ids))
        end = min(start + pick.randint(1, 4), (start // 8 + 1) * 8)
        ids = self._ids[start:end]
        if kind == "CLEAR":
            return Op("CLEAR", pick.choice((None, group)), pick.choice((None, "GPU", "CPU")), locality)
        if kind == "REMOVE":
            return Op("REMOVE", group, tier, locality, block_ids=b"".join(ids))
        root = start % 8 == 0
        known = pick.random() < 0.9
        contents = b"".join(_content(each) if known or pick.random() < 0.5 else NO_ID for each in ids)
        state: ParentState = "UNKNOWN" if not known else "ROOT" if root else "CONTENT"
        return Op(
            "STORE",
            group,
            tier,
            locality,
            0 if tier == "DISK" and pick.random() < 0.3 else 16,
            b"".join(ids),
            contents if pick.random() < 0.9 else b"",
            state,
            None if root or not known else _content(self._ids[start - 1]),
            "full_attention" if group == 0 else "sliding_window",
            reused=pick.random() < 0.1,
            parent_block_id=None if root else self._ids[start - 1],
        )

    def _declaration(self) -> Declaration:
        pick = self._random
        modes: tuple[ReuseReporting, ...] = ("none", "labelled", "unlabelled")
        return Declaration(
            pick.choice(modes),
            pick.choice(("per_copy", "per_copy", "last_copy")),
            workload=pick.choice((None, "chat", "batch")),
            model="m",
            kv_connector=pick.choice((None, None, None, "shared")),
            key_epoch=pick.choice((0, 0, 1)),
            prefill_rate=pick.choice((None, None, 1234.5)),
            gpus_per_rank=pick.choice((None, 2.0)),
            kv_bytes_per_token=pick.choice((None, 1000)),
            kv_bytes_by_group=pick.choice(({}, {"0": 500}, {"0": 500, "1": 100})),
            staleness_ms=pick.choice((0, 30_000)),
        )

    def _scrape(self) -> Scrape:
        pick = self._random
        self._at_ms += pick.choice((4_000, 11_000, 700_000))
        self._computed += pick.choice((0, 10_000, 30_000))
        return Scrape(
            self._at_ms,
            kv_cache_usage=pick.choice((None, 0.2, 0.9)),
            num_gpu_blocks=pick.choice((None, 30, 80)),
            block_size=16,
            requests_running=pick.choice((0, 1)),
            prompt_tokens=pick.choice((None, self._computed)),
            prompt_tokens_cached=pick.choice((None, self._computed // 3)),
            external_prefix_cache_hits=pick.choice((None, 0, 0, 0, 0, 5)),
        )


def _content(block_id: bytes) -> bytes:
    return bytes(255 - byte for byte in block_id)
