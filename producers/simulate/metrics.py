"""A simulated engine's own ``/metrics``: the pages that were recorded beside a capture, or what the simulated pool can say. Pure but for
reading the recording.
"""

from __future__ import annotations

import bisect
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.errors import KvcensusError

FRAMES, METRICS = ".frames.jsonl", ".metrics.jsonl"
"""How the files of one recording are told apart: ``NAME.frames.jsonl.gz`` has its pages in ``NAME.metrics.jsonl.gz``."""


class Reading(NamedTuple):
    """A simulated engine right after one of its batches; counters since its process began, tokens unless they say otherwise.

    ``used_blocks`` are held by running requests, of ``pool_blocks``. Prompts count when they are taken up.
    """

    running: int
    waiting: int
    used_blocks: int
    pool_blocks: int
    block_size: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    prompt_tokens_cached: int
    generation_tokens: int


Fault = Literal["small-pool", "busy"]
"""How pages may contradict the events: a pool smaller than what is cached in it; more blocks in use than any event told of."""


def faulty(reading: Reading, fault: Fault | None) -> Reading:
    """What a page says with this fault."""
    if fault == "small-pool":
        pool = max(reading.pool_blocks // 4, 1)
        return reading._replace(pool_blocks=pool, used_blocks=min(reading.used_blocks, pool))
    if fault == "busy":
        return reading._replace(pool_blocks=4 * reading.pool_blocks, used_blocks=4 * reading.pool_blocks)
    return reading


class _Line(msgspec.Struct):
    t: float
    text: str


class RecordedPages:
    """The pages of a recording, each from the moment it was recorded until the next."""

    def __init__(self, lines: list[tuple[int, str]]) -> None:
        self._times = [at_us for at_us, _ in lines]
        self._texts = [text for _, text in lines]

    def at(self, at_us: int) -> bytes:
        """The page at this moment of the recording, microseconds since the epoch; the first one before its time."""
        return self._texts[max(bisect.bisect_right(self._times, at_us) - 1, 0)].encode()


def beside(capture: Path) -> Path | None:
    """The file with the pages recorded beside this capture, if there is one."""
    if FRAMES not in capture.name:
        return None
    path = capture.with_name(capture.name.replace(FRAMES, METRICS))
    return path if path.is_file() else None


def read_pages(path: Path) -> RecordedPages:
    """The pages of a file of lines ``{"t": seconds, "text": page}``. Raises :class:`KvcensusError` for one that holds none."""
    lines: list[tuple[int, str]] = []
    decoder = msgspec.json.Decoder(_Line)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                row = decoder.decode(line)
                lines.append((round(row.t * 1_000_000), row.text))
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise KvcensusError(f"{path}: line {len(lines) + 1}: no recorded metrics: {error}") from None
    if not lines:
        raise KvcensusError(f"{path}: holds no recorded metrics")
    return RecordedPages(sorted(lines))


def page(reading: Reading | None, process_started_s: float, model: str | None, dp_rank: int) -> bytes:
    """A page as vLLM has it, of what is known; ``process_started_s`` in seconds since the epoch. Without a reading only the start."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(reading, process_started_s, {"engine": str(dp_rank), "model_name": model or "simulated"}))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, reading: Reading | None, process_started_s: float, labels: dict[str, str]) -> None:
        self._reading = reading
        self._started = process_started_s
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        started = GaugeMetricFamily("process_start_time_seconds", "Start time of the process since unix epoch in seconds.")
        started.add_metric([], self._started)
        yield started
        now = self._reading
        # One more than can be used: vLLM counts its null block. Before it knows, it says None.
        config = {
            "block_size": str(None if now is None else now.block_size),
            "engine": self._labels["engine"],
            "num_gpu_blocks": str(None if now is None else now.pool_blocks + 1),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(config))
        info.add_metric(list(config.values()), 1)
        yield info
        if now is None:
            return
        gauges = {
            "num_requests_running": ("Requests in the running batch.", now.running),
            "num_requests_waiting": ("Requests that wait to be processed.", now.waiting),
            "kv_cache_usage_perc": ("Share of the KV cache in use, 0 to 1.", now.used_blocks / now.pool_blocks),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
        counters = {
            "num_preemptions": ("Preemptions.", now.preemptions),
            "prefix_cache_queries": ("Prefix cache queries, in tokens.", now.prefix_queries),
            "prefix_cache_hits": ("Prefix cache hits, in tokens.", now.prefix_hits),
            "prompt_tokens": ("Prompt tokens taken up.", now.prompt_tokens),
            "prompt_tokens_cached": ("Prompt tokens found in the cache.", now.prompt_tokens_cached),
            "generation_tokens": ("Tokens generated.", now.generation_tokens),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
