"""Speed of the edge on long prompts, one core: wire, identity, record, in each form that costs differently: `python -m benchmarks.edge`.

Batches are a scheduler's step each, one run of 64 new blocks of 16 tokens. Figures are the sum of each batch's best time over several
runs that take turns, so that what else the machine does weighs little; read the ratios.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from producers import wire
from producers.identity import Identity, ephemeral_key
from producers.resolver import RankResolver
from schemas import codec
from schemas.records import EngineProfile, RankMessage

RUNS = 8
BATCHES = 150
BLOCKS = 64
SIZE = 16


def payloads(arrays: bool, signed: bool, salt: bool) -> list[bytes]:
    """One run of new blocks each, from the root of a prompt."""
    rng = random.Random(1)
    out = []
    for number in range(BATCHES):
        hashes = [rng.getrandbits(64) - (2**63 if signed else 0) for _ in range(BLOCKS)]
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": [rng.randrange(128_000) for _ in range(BLOCKS * SIZE)],
            "block_size": SIZE,
            "lora_id": None,
            "medium": "GPU",
        }
        if signed:
            event |= {"cache_salt": f"tenant-{number % 10}"} if salt else {}
        else:
            keys = [[f"tenant-{number % 10}"], *[None] * (BLOCKS - 1)] if salt else [None] * BLOCKS
            event |= {"lora_name": None, "extra_keys": keys, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
        out.append(msgspec.msgpack.encode([1.7e9 + number, [[*event.values()] if arrays else event], 0]))
    return out


def edge(frames: list[bytes], profile: EngineProfile, collect: bool, encode: bool) -> Iterator[Callable[[], object]]:
    """One call for each batch."""
    key = ephemeral_key()
    resolver = RankResolver(Identity(key, "m"), key, profile=profile, collect_learned=collect)
    for payload in frames:

        def step(payload: bytes = payload) -> object:
            batch = resolver.resolve(wire.decode(payload, profile=profile))
            learned = resolver.take_learned()
            return codec.encode(RankMessage("bench", 0, "life", 1, 1, 1, "bench", batch=batch)) if encode else learned

        yield step


def main() -> None:
    """Let the forms take turns and print the table, then what a restored bridge costs."""
    forms: list[tuple[str, list[bytes], EngineProfile, bool, bool]] = [
        ("vllm, maps", payloads(False, False, False), "vllm", False, False),
        ("vllm, maps, to Avro", payloads(False, False, False), "vllm", False, True),
        ("vllm, maps, bridge written down", payloads(False, False, False), "vllm", True, False),
        ("vllm, arrays", payloads(True, False, False), "vllm", False, False),
        ("vllm, maps, salted", payloads(False, False, True), "vllm", False, False),
        ("sglang, maps", payloads(False, True, False), "sglang", False, False),
        ("sglang, maps, salted", payloads(False, True, True), "sglang", False, False),
    ]
    best = [[float("inf")] * BATCHES for _ in forms]
    for _ in range(RUNS):
        turns = [edge(*form[1:]) for form in forms]
        for number in range(BATCHES):
            for times, turn in zip(best, turns, strict=True):
                step = next(turn)
                before = time.perf_counter()
                step()
                times[number] = min(times[number], time.perf_counter() - before)
    table = Table(title=f"{BATCHES} batches of {BLOCKS} blocks of {SIZE} tokens; best of {RUNS} for each")
    for header in ("form", "blocks per second", "us per block", "x first"):
        table.add_column(header, justify="left" if header == "form" else "right")
    first = sum(best[0])
    for times, form in zip(best, forms, strict=True):
        each = sum(times) / (BATCHES * BLOCKS)
        table.add_row(form[0], f"{1 / each:,.0f}", f"{each * 1e6:.2f}", f"{sum(times) / first:.2f}")
    Console().print(table)
    restore()


def restore(count: int = 200_000) -> None:
    """How long a bridge takes to be read back, and what an entry of it holds in memory."""
    key = ephemeral_key()
    entries = [(2**63 + number, SIZE, number.to_bytes(16, "big"), 0) for number in range(count)]
    timed, traced = (RankResolver(Identity(key, "m"), key) for _ in range(2))
    before = time.perf_counter()
    timed.restore(entries)
    took = time.perf_counter() - before
    tracemalloc.start()
    traced.restore(entries)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    ids = count * (8 + 24 + 33 + 16)  # hash and content id, which came with the entries
    Console().print(f"restore: {count / took:,.0f} entries a second; {(held + ids) / count:.0f} bytes held for each")


if __name__ == "__main__":
    main()
