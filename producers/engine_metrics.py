"""An engine's own ``/metrics`` page as :class:`schemas.records.EngineMetrics`. Pure.

Known are the names of vLLM (since 0.8; ``vllm:...``) and, where they say the same, those of SGLang (``sglang:...``). What an engine
does not report stays null, and so does what cannot be told for one rank: ranks are never summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from schemas.errors import KvcensusError
from schemas.records import EngineMetrics, Histogram, Scrape

_START = "process_start_time_seconds"
_CONFIG = "vllm:cache_config_info"

_RANK_LABELS = ("engine", "dp_rank")
"""vLLM's and SGLang's label for the data-parallel rank."""

_SHARD_LABELS = ("tp_rank", "pp_rank", "moe_ep_rank")
"""SGLang may report each shard of a rank. They all say the same, so the first is read."""

_GAUGES: dict[str, tuple[str, ...]] = {
    "requests_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "requests_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
}
_COUNTERS: dict[str, tuple[str, ...]] = {
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    # The older vllm:gpu_prefix_cache_* are left out: they counted blocks in some releases and tokens in others.
    "prefix_cache_queries": ("vllm:prefix_cache_queries_total",),
    "prefix_cache_hits": ("vllm:prefix_cache_hits_total",),
    "external_prefix_cache_queries": ("vllm:external_prefix_cache_queries_total",),
    "external_prefix_cache_hits": ("vllm:external_prefix_cache_hits_total",),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "prompt_tokens_cached": ("vllm:prompt_tokens_cached_total", "sglang:cached_tokens_total"),
    "generation_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
}
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_HISTOGRAMS: dict[str, tuple[str, ...]] = {
    "time_to_first_token": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "request_prefill_time": ("vllm:request_prefill_time_seconds",),
}
_SUMMED_OVER = {"sglang:cached_tokens_total": "cache_source"}
"""Parts of one figure by this label, and nothing that names the whole."""

_WANTED = frozenset(
    (
        _START,
        _CONFIG,
        *_USAGE,
        *(name for names in (*_GAUGES.values(), *_COUNTERS.values()) for name in names),
        *(name + part for names in _HISTOGRAMS.values() for name in names for part in ("_bucket", "_count", "_sum")),
    )
)
_ENGINE_PREFIXES = ("vllm:", "sglang:")
_BRIEF = tuple(name for name in Scrape.__struct_fields__ if name != "at_ms")


class MetricsError(KvcensusError):
    """A page that is no engine's metrics, or not this rank's."""


class _Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Page:
    """The samples of one page that matter here. ``ranks`` are the values of the rank label that occur, none on an engine without it."""

    samples: Mapping[str, list[_Sample]]
    ranks: frozenset[str]

    @property
    def process_started_us(self) -> int | None:
        """When the engine's process started, microseconds since the epoch; one process answers for all ranks of a page."""
        started = [_positive(sample.value) for sample in self.samples.get(_START, ())]
        return None if len(started) != 1 or started[0] is None else _whole(started[0] * 1_000_000)

    def of(self, dp_rank: int, *, instance_id: str = "", life_id: str = "", incarnation: str = "", at_ms: int = 0) -> EngineMetrics:
        """The record of one rank. Raises :class:`MetricsError` if the page is about several ranks and this is none of them.

        A page about one rank is taken for ours whatever it calls it: an engine of its own for each rank numbers it 0.
        """
        own = self._own(dp_rank)
        config = own.get(_CONFIG, [])
        record = EngineMetrics(
            instance_id,
            dp_rank,
            life_id,
            incarnation,
            at_ms,
            process_started_us=self.process_started_us,
            model_name=_agreed(sample.labels.get("model_name") for samples in own.values() for sample in samples),
            kv_cache_usage=_first(own, _USAGE),
            num_gpu_blocks=self._pool(config),
            block_size=_label_number(config, "block_size"),
            histograms={field: found for field, names in _HISTOGRAMS.items() if (found := _histogram(own, names)) is not None},
        )
        for field, names in (*_GAUGES.items(), *_COUNTERS.items()):
            value = _first(own, names)
            setattr(record, field, None if value is None else _whole(value))
        return record

    def _pool(self, config: list[_Sample]) -> int | None:
        """Blocks of one rank's pool. An API server that serves several ranks shows for each of them the sum over all."""
        blocks, ranks = _label_number(config, "num_gpu_blocks"), max(len(self.ranks), 1)
        return None if blocks is None or blocks % ranks else blocks // ranks

    def _own(self, dp_rank: int) -> dict[str, list[_Sample]]:
        """Per name the samples of this rank: its own, else (where there is one rank at most) those without a rank."""
        rank = str(dp_rank)
        if rank not in self.ranks and len(self.ranks) > 1:
            raise MetricsError(f"the page is about the ranks {', '.join(sorted(self.ranks))}, not {rank}")
        alone = len(self.ranks) <= 1
        own: dict[str, list[_Sample]] = {}
        for name, samples in self.samples.items():
            mine = [sample for sample in samples if (found := _rank(sample.labels)) == rank or (alone and found is not None)]
            # Without a rank's label, beside several ranks, a figure is of all of them.
            mine = mine or (samples if alone else [])
            if mine:
                first = min(_shard(sample.labels) for sample in mine)
                own[name] = [sample for sample in mine if _shard(sample.labels) == first]
        return own


def read(text: str) -> Page:
    """The page of an engine's ``/metrics`` in Prometheus's text format.

    Raises :class:`MetricsError`, and nothing else, for a text that is none or holds nothing of a known engine.
    """
    # A sample is one line, so other lines need not be understood: a page has thousands, and what is wrong with them is no matter.
    kept = "".join(line + "\n" for line in text.split("\n") if line.partition("{")[0].partition(" ")[0] in _WANTED)
    samples: dict[str, list[_Sample]] = {}
    ranks: set[str] = set()
    try:
        for family in text_string_to_metric_families(kept):
            for sample in family.samples:
                if sample.name in _WANTED:
                    samples.setdefault(sample.name, []).append(_Sample(sample.labels, float(sample.value)))
                    rank = _rank(sample.labels)
                    if rank is not None:
                        ranks.add(rank)
    except Exception as error:  # the parser answers bad text with whatever its string handling runs into
        raise MetricsError(f"the metrics cannot be read: {_brief(error)}") from error
    if not any(name.startswith(_ENGINE_PREFIXES) for name in samples):
        raise MetricsError("no metrics of a known engine (vLLM, SGLang) on the page")
    return Page(samples, frozenset(ranks))


def parse(text: str, dp_rank: int, *, instance_id: str = "", life_id: str = "", incarnation: str = "", at_ms: int = 0) -> EngineMetrics:
    """One rank's record from the text of a page; as :func:`read` and :meth:`Page.of`, and with their errors."""
    return read(text).of(dp_rank, instance_id=instance_id, life_id=life_id, incarnation=incarnation, at_ms=at_ms)


def brief(record: EngineMetrics) -> Scrape:
    """What of ``record`` stands in the rank's stream, for figures to be held against."""
    return Scrape(record.at_ms, **{name: getattr(record, name) for name in _BRIEF})


def _rank(labels: Mapping[str, str]) -> str | None:
    return next((labels[name] for name in _RANK_LABELS if labels.get(name)), None)


def _shard(labels: Mapping[str, str]) -> tuple[tuple[int, str], ...]:
    """Shorter numbers first, so that 2 comes before 10."""
    return tuple((len(value), value) for value in (labels.get(name, "") for name in _SHARD_LABELS))


def _first(own: Mapping[str, list[_Sample]], names: Iterable[str]) -> float | None:
    """The value under the first of ``names`` that is there."""
    for name in names:
        if name in own:
            return _one(own[name], _SUMMED_OVER.get(name))
    return None


def _one(samples: list[_Sample], summed_over: str | None) -> float | None:
    """The one value of ``samples``; several say one thing only if they are parts of a whole by ``summed_over``, or equal."""
    values = [_positive(sample.value) for sample in samples]
    if summed_over is not None and all(summed_over in sample.labels for sample in samples):
        parts = [value for value in values if value is not None]
        return sum(parts) if len(parts) == len(values) else None
    return values[0] if len(set(values)) == 1 else None


def _histogram(own: Mapping[str, list[_Sample]], names: Iterable[str]) -> Histogram | None:
    for name in names:
        buckets: dict[float, int] = {}
        for sample in own.get(f"{name}_bucket", ()):
            bound, count = _number(sample.labels.get("le", "")), _whole(sample.value)
            if bound is None or count is None or bound in buckets:
                return None
            buckets[bound] = count
        total = _one(own[f"{name}_sum"], None) if f"{name}_sum" in own else None
        if not buckets or total is None:
            continue
        bounds = sorted(buckets)
        counts = [buckets[bound] for bound in bounds]
        if bounds[-1] != math.inf or counts != sorted(counts):
            return None
        return Histogram(bounds, counts, total)
    return None


def _label_number(samples: list[_Sample], label: str) -> int | None:
    """A whole number that stands in a label; null for ``None``, as an engine writes it before it knows."""
    text = _agreed(sample.labels.get(label) for sample in samples)
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


def _agreed(values: Iterable[str | None]) -> str | None:
    found = {value for value in values if value}
    return found.pop() if len(found) == 1 else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def _positive(value: float) -> float | None:
    return value if math.isfinite(value) and value >= 0 else None


def _whole(value: float) -> int | None:
    return round(value) if math.isfinite(value) and 0 <= value < 2**63 else None


def _brief(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:200]
