"""An engine's metrics page: every recorded one, the ranks of one page kept apart, and whatever else may come."""

from __future__ import annotations

import contextlib
import gzip
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producers.engine_metrics import MetricsError, parse, read
from schemas import codec
from schemas.records import EngineMetrics
from tests.shared_data import shared_path

RECORDED = {
    "a_shared_prefix": (0,),
    "b_pressure": (0,),
    "c_reset_salt": (0,),
    "g_dp2": (0, 1),
    "h_hybrid_swa": (0,),
    "j_v0.16.0_array": (0,),
    "j_v0.23.0_array": (0,),
}
COUNTERS = (
    "preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
)


def recorded(name: str) -> list[str]:
    """The pages of one recording, in order."""
    with gzip.open(shared_path(f"captures/{name}.metrics.jsonl.gz"), "rt") as file:
        return [json.loads(line)["text"] for line in file]


@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_page_says_everything(name: str) -> None:
    for rank in RECORDED[name]:
        before: EngineMetrics | None = None
        for text in recorded(name):
            found = parse(text, rank, instance_id="i", life_id="l", incarnation="n", at_ms=5)
            assert codec.decode(codec.encode(found), EngineMetrics) == found
            assert (found.instance_id, found.dp_rank, found.life_id, found.incarnation, found.at_ms) == ("i", rank, "l", "n", 5)
            # With several API processes nobody's start time is on the page.
            assert (found.process_started_us is None) == (name == "g_dp2")
            assert found.model_name == "tiny"
            assert found.block_size == 32
            # An API server of two ranks shows the sum over them for each: 128.
            assert found.num_gpu_blocks == (96 if name == "h_hybrid_swa" else 64)
            # A rank that has done nothing yet has no gauges.
            assert (found.kv_cache_usage is None) == (found.requests_running is None) == (found.requests_waiting is None)
            assert found.kv_cache_usage is not None or (name == "g_dp2" and found.prompt_tokens == 0)
            assert 0 <= (found.kv_cache_usage or 0.0) <= 1
            assert found.prompt_tokens_cached is not None
            assert found.prompt_tokens is not None
            assert found.prompt_tokens_cached <= found.prompt_tokens
            assert set(found.histograms) == {"time_to_first_token", "request_prefill_time"}
            for histogram in found.histograms.values():
                assert histogram.bounds == sorted(histogram.bounds)
                assert histogram.bounds[-1] == math.inf
                assert histogram.counts == sorted(histogram.counts)
                assert len(histogram.bounds) == len(histogram.counts)
            for field in COUNTERS if before is not None else ():
                assert getattr(found, field) >= getattr(before, field), field
            before = found


def test_the_last_page_of_a_recording_value_by_value() -> None:
    found = parse(recorded("b_pressure")[-1], 0)
    assert found.process_started_us == 1_796_022_455_840_000
    assert [getattr(found, field) for field in COUNTERS] == [9, 37_941, 10_880, 0, 0, 37_941, 10_880, 6_840]
    assert (found.requests_running, found.requests_waiting, found.kv_cache_usage) == (0, 0, 0.0)
    assert [histogram.counts[-1] for histogram in found.histograms.values()] == [217, 217]


def test_ranks_of_one_page_are_kept_apart() -> None:
    text = recorded("g_dp2")[-1]
    first, second = (parse(text, rank) for rank in (0, 1))
    assert (first.prompt_tokens, second.prompt_tokens) == (2_808, 3_120)
    assert (first.histograms["time_to_first_token"].counts[-1], second.histograms["time_to_first_token"].counts[-1]) == (18, 20)
    with pytest.raises(MetricsError, match="ranks 0, 1, not 2"):
        parse(text, 2)


RUNNING = 'vllm:num_requests_running{engine="0"} 3\n'


def test_a_page_about_one_engine_is_ours_whatever_it_calls_it() -> None:
    assert parse(RUNNING, 7).requests_running == 3
    assert parse("vllm:num_requests_running 4\n", 7).requests_running == 4
    # Beside one labelled rank, what carries no label is its own.
    assert parse(RUNNING + "vllm:prompt_tokens_total 9\n", 0).prompt_tokens == 9


def test_what_is_not_told_for_one_rank_is_null() -> None:
    both = RUNNING + 'vllm:num_requests_running{engine="1"} 5\nvllm:prompt_tokens_total 9\nprocess_start_time_seconds 2\n'
    found = parse(both, 1)
    assert (found.requests_running, found.prompt_tokens, found.process_started_us) == (5, None, 2_000_000)
    # Two values for one rank, and nothing that says which: neither, and not their sum.
    assert parse('vllm:prompt_tokens_total{x="a"} 1\nvllm:prompt_tokens_total{x="b"} 2\n', 0).prompt_tokens is None
    assert parse('vllm:prompt_tokens_total{x="a"} 2\nvllm:prompt_tokens_total{x="b"} 2\n', 0).prompt_tokens == 2


def test_names_of_older_engines() -> None:
    found = parse('vllm:gpu_cache_usage_perc{model_name="m"} 0.5\nvllm:gpu_prefix_cache_queries_total{model_name="m"} 8\n', 0)
    assert (found.kv_cache_usage, found.model_name) == (0.5, "m")
    assert found.prefix_cache_queries is None  # blocks or tokens, by release
    info = 'vllm:cache_config_info{{engine="{}",num_gpu_blocks="7"}} 1\n'
    assert parse(info.format(0), 0).num_gpu_blocks == 7
    assert parse(info.format(0) + info.format(1), 0).num_gpu_blocks is None  # no sum of two equal pools
    unknown = parse('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n', 0)
    assert (unknown.block_size, unknown.num_gpu_blocks) == (16, None)


SGLANG = """
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="q",pp_rank="0",tp_rank="0",dp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="q",pp_rank="0",tp_rank="2",dp_rank="1"} 4.0
sglang:num_running_reqs{engine_type="unified",model_name="q",pp_rank="0",tp_rank="10",dp_rank="1"} 5.0
sglang:num_queue_reqs{engine_type="unified",model_name="q",pp_rank="0",tp_rank="2",dp_rank="1"} 1.0
sglang:token_usage{engine_type="unified",model_name="q",pp_rank="0",tp_rank="2",dp_rank="1"} 0.25
sglang:cache_hit_rate{engine_type="unified",model_name="q",pp_rank="0",tp_rank="2",dp_rank="1"} 0.9
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="q"} 128.0
"""


def test_sglang_where_it_says_the_same() -> None:
    found = parse(SGLANG, 1)
    assert (found.requests_running, found.requests_waiting, found.kv_cache_usage, found.model_name) == (4, 1, 0.25, "q")
    assert found.prompt_tokens is None  # of the whole server
    alone = (
        'sglang:prompt_tokens_total{model_name="q"} 128\nsglang:num_retracted_requests_total{model_name="q"} 2\n'
        'sglang:cached_tokens_total{cache_source="device",model_name="q"} 60\n'
        'sglang:cached_tokens_total{cache_source="host",model_name="q"} 4\n'
        'sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="q"} 1\n'
        'sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="q"} 2\n'
        'sglang:time_to_first_token_seconds_sum{model_name="q"} 0.7\n'
    )
    found = parse(alone, 0)
    assert (found.prompt_tokens, found.prompt_tokens_cached, found.preemptions) == (128, 64, 2)
    assert found.histograms["time_to_first_token"].counts == [1, 2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>not found</html>",
        "process_start_time_seconds 1\n",
        "vllm:num_requests_running\n",
        'vllm:num_requests_running{engine="0 3\n',
        "vllm:num_requests_running{} x\n",
        "go_goroutines 7\n",
    ],
)
def test_what_is_no_engines_page_is_one_error(text: str) -> None:
    with pytest.raises(MetricsError):
        parse(text, 0)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e300"])
def test_values_that_cannot_be_are_null(value: str) -> None:
    found = parse(f"vllm:prompt_tokens_total {value}\nprocess_start_time_seconds {value}\n", 0)
    assert (found.prompt_tokens, found.process_started_us) == (None, None)


NAMES = st.sampled_from(
    [
        "vllm:num_requests_running",
        "vllm:prompt_tokens_total",
        "vllm:cache_config_info",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:time_to_first_token_seconds_sum",
        "sglang:token_usage",
        "sglang:cached_tokens_total",
        "process_start_time_seconds",
    ]
)
LABELS = st.dictionaries(st.sampled_from(["engine", "dp_rank", "le", "tp_rank", "block_size", "cache_source", "x"]), st.text(max_size=6))
VALUES = st.one_of(st.floats().map(repr), st.integers().map(str), st.text(max_size=8))


def line(name: str, labels: dict[str, str], value: str) -> str:
    inner = ",".join(f"{key}={json.dumps(text)}" for key, text in labels.items())
    return f"{name}{{{inner}}} {value}"


LINES = st.lists(
    st.one_of(st.builds(line, NAMES, LABELS, VALUES), st.text(max_size=40), st.builds(str.__add__, NAMES, st.text(max_size=30)))
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(LINES, st.integers(0, 3))
def test_no_page_does_more_than_be_refused(lines: list[str], rank: int) -> None:
    with contextlib.suppress(MetricsError):
        found = parse("\n".join(lines), rank)
        assert codec.decode(codec.encode(found), EngineMetrics) == found


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_damaged_page_does_no_more_than_be_refused(data: st.DataObject) -> None:
    text = recorded("a_shared_prefix")[-1]
    at = data.draw(st.integers(0, len(text)))
    damaged = text[:at] + data.draw(st.text(max_size=5)) + text[at + data.draw(st.integers(0, 40)) :]
    with contextlib.suppress(MetricsError):
        codec.encode(read(damaged).of(0))
