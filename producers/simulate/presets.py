"""Fleets that are ready made: the demo's, and a set for comparing figures with an independent count."""

from __future__ import annotations

from dataclasses import replace

from producers.simulate.engine import EngineSpec
from producers.simulate.fleet import FleetSpec, InstanceSpec
from producers.simulate.workload import WorkloadSpec

DEMO_SEED = 7
_MODEL = "demo-8b"
_KV_BYTES_PER_TOKEN = 128 * 1024
"""Of a model of that size in 16 bits: 32 layers, 8 KV heads of 128, keys and values."""
_PREFILL_RATE = 20_000.0
"""What these engines reach: steps of 1,024 prompt tokens take 49 ms."""


def _every(first_s: float, every_s: float, duration_s: float) -> tuple[float, ...]:
    times: list[float] = []
    at = first_s
    while at < duration_s:
        times.append(at)
        at += every_s
    return tuple(times)


def _declared(instance: InstanceSpec) -> InstanceSpec:
    return replace(instance, model=_MODEL, gpus_per_rank=1.0, kv_bytes_per_token=_KV_BYTES_PER_TOKEN, prefill_rate=_PREFILL_RATE)


def demo_fleet(duration_s: float = 20.0, seed: int = DEMO_SEED) -> FleetSpec:
    """Four instances (five ranks, ``chat-a`` is data parallel) under two workloads that share system prompts.

    Small pools under pressure; ``chat-b`` is flushed at 8 s and every 20 s from then on, ``agents-a`` restarts at 11 s and every
    30 s. In 20 s of engine time every cause of repeat compute and duplicates inside and between instances occur.
    """
    small = EngineSpec(pool_blocks=320, block_size=16)
    large = EngineSpec(pool_blocks=448, block_size=16)
    return FleetSpec(
        instances=(
            _declared(InstanceSpec("chat-a", "chat", large, dp_size=2)),
            _declared(InstanceSpec("chat-b", "chat", large, flush_at_s=_every(8.0, 20.0, duration_s))),
            _declared(InstanceSpec("agents-a", "agents", small, restart_at_s=_every(11.0, 30.0, duration_s))),
            _declared(InstanceSpec("agents-b", "agents", small)),
        ),
        workloads=(
            WorkloadSpec("chat", rate=6.0, system_prompts=5, system_tokens=(160, 480), fanout=0.3, salts=3, salted=0.2),
            WorkloadSpec(
                "agents",
                rate=5.0,
                mix=(("shared", 5.0), ("popular", 4.0), ("unique", 1.0)),
                system_prompts=5,
                system_tokens=(160, 480),
                popular_prompts=16,
                output_tokens=(4, 48),
                fanout=0.4,
            ),
        ),
        duration_s=duration_s,
        seed=seed,
        routing="round-robin",
    )


def _pressure() -> FleetSpec:
    engine = EngineSpec(pool_blocks=96, block_size=16, max_running=8)
    return FleetSpec(
        tuple(InstanceSpec(f"p{index}", "batch", engine, model="m") for index in range(4)),
        (
            WorkloadSpec(
                "batch", rate=14.0, user_tokens=(16, 120), system_tokens=(64, 256), popular_tokens=(64, 512), output_tokens=(4, 40)
            ),
        ),
        duration_s=12.0,
        seed=101,
        routing="random",
    )


def _flush_and_restart() -> FleetSpec:
    engine = EngineSpec(pool_blocks=256, block_size=16, restart_us=700_000)
    return FleetSpec(
        (
            InstanceSpec("f0", "chat", engine, dp_size=2, model="m", flush_at_s=(4.0, 9.0, 9.5)),
            InstanceSpec("f1", "chat", engine, dp_size=2, model="m", restart_at_s=(5.0, 6.0, 11.0)),
            InstanceSpec("f2", "chat", engine, model="m", flush_at_s=(6.0,), restart_at_s=(8.0,)),
        ),
        (WorkloadSpec("chat", rate=12.0, think_s=(0.2, 1.5), fanout=0.2),),
        duration_s=15.0,
        seed=202,
    )


def _mixed_blocks() -> FleetSpec:
    return FleetSpec(
        (
            InstanceSpec("b16", "chat", EngineSpec(pool_blocks=300, block_size=16), dp_size=2, model="m", restart_at_s=(7.0,)),
            InstanceSpec("b32", "chat", EngineSpec(pool_blocks=150, block_size=32, wire="array12"), dp_size=2, model="m"),
            InstanceSpec("b64", "chat", EngineSpec(pool_blocks=80, block_size=64, hash_form="bytes32"), model="m", flush_at_s=(6.0,)),
            InstanceSpec("b32-too", "chat", EngineSpec(pool_blocks=150, block_size=32), model="m"),
            InstanceSpec("other", "chat", EngineSpec(pool_blocks=300, block_size=16), model="another-model"),
        ),
        (WorkloadSpec("chat", rate=14.0, system_prompts=2, popular_tokens=(64, 640)),),
        duration_s=14.0,
        seed=303,
        routing="random",
    )


def _salts_and_adapters() -> FleetSpec:
    engine = EngineSpec(pool_blocks=200, block_size=16, hash_seed="fixed")
    return FleetSpec(
        (
            InstanceSpec("s0", "tenants", engine, dp_size=3, model="m", flush_at_s=(7.0,)),
            InstanceSpec("s1", "tenants", engine, model="m", restart_at_s=(5.0,)),
            InstanceSpec("s2", "tools", engine, model="m"),
            InstanceSpec("s3", "tools", EngineSpec(pool_blocks=200, block_size=16, wire="array12"), model="m"),
        ),
        (
            WorkloadSpec("tenants", rate=9.0, salts=4, salted=0.6, adapters=("summary", "sql"), system_prompts=2, popular_prompts=6),
            WorkloadSpec(
                "tools", rate=6.0, mix=(("shared", 1.0), ("popular", 1.0)), adapters=("sql",), system_prompts=2, popular_prompts=6
            ),
        ),
        duration_s=12.0,
        seed=404,
        routing="prefix",
    )


def _shared_ticks() -> FleetSpec:
    # Steps on a grid of 20 ms: ranks share time stamps, so that everything about ties is put to the test.
    engine = EngineSpec(pool_blocks=160, block_size=16, tick_us=20_000, restart_us=1_000_000)
    return FleetSpec(
        (
            InstanceSpec("t0", "chat", engine, dp_size=4, model="m", flush_at_s=(5.0,)),
            InstanceSpec("t1", "chat", engine, dp_size=2, model="m", restart_at_s=(5.0, 8.0)),
            InstanceSpec("t2", "chat", engine, dp_size=2, model="m"),
        ),
        (WorkloadSpec("chat", rate=16.0, fanout=0.3, popular_prompts=5, system_prompts=2),),
        duration_s=10.0,
        seed=505,
    )


def _many_ranks() -> FleetSpec:
    engine = EngineSpec(pool_blocks=128, block_size=16)
    old = EngineSpec(pool_blocks=96, block_size=16, wire="array8")
    return FleetSpec(
        (
            InstanceSpec("w0", "chat", engine, dp_size=8, model="m", restart_at_s=(6.0,)),
            InstanceSpec("w1", "chat", engine, dp_size=4, model="m", flush_at_s=(4.0, 8.0)),
            InstanceSpec("w2", "code", old, dp_size=2, model="m"),
            InstanceSpec("w3", "code", old, model="m", flush_at_s=(6.0,)),
            InstanceSpec("w4", "code", old, restart_at_s=(3.0, 7.0)),
        ),
        (
            WorkloadSpec("chat", rate=18.0, mix=(("chat", 3.0), ("shared", 3.0), ("popular", 2.0), ("unique", 2.0)), system_prompts=24),
            WorkloadSpec("code", rate=5.0, mix=(("popular", 2.0), ("shared", 1.0)), system_prompts=6, output_tokens=(2, 30)),
        ),
        duration_s=12.0,
        seed=606,
        routing="prefix",
    )


def _thrash() -> FleetSpec:
    # Hardly more room than one request needs: preemptions, evictions and stores mixed in every batch.
    engine = EngineSpec(pool_blocks=40, block_size=16, max_running=6, max_batched_tokens=128, prefill_chunk=48)
    return FleetSpec(
        tuple(InstanceSpec(f"x{index}", "tight", engine, dp_size=2, model="m", restart_at_s=(6.0 + index,)) for index in range(2)),
        (
            WorkloadSpec(
                "tight",
                rate=10.0,
                system_prompts=2,
                system_tokens=(48, 160),
                popular_prompts=5,
                popular_tokens=(48, 256),
                user_tokens=(16, 64),
                output_tokens=(16, 120),
                fanout=0.3,
            ),
        ),
        duration_s=14.0,
        seed=707,
    )


def test_fleets() -> dict[str, FleetSpec]:
    """Seven fleets of 4 to 16 ranks, each a few thousand block events, that together reach every rule of counting.

    In a test file, import this module and not the function: pytest would take it for a test.
    """
    return {
        "pressure": _pressure(),
        "flush-and-restart": _flush_and_restart(),
        "mixed-blocks": _mixed_blocks(),
        "salts-and-adapters": _salts_and_adapters(),
        "shared-ticks": _shared_ticks(),
        "many-ranks": _many_ranks(),
        "thrash": _thrash(),
    }
