"""What `kvcensus report` makes of what is declared beside a capture."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from console.cli import cli
from tests.shared_data import SHIPPED

CAPTURE = str(SHIPPED / "g_dp2.frames.jsonl.gz")


def report(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["report", "--json", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_costs_become_gpu_time_and_bytes() -> None:
    plain = report(CAPTURE, "--reuse-reporting", "none")
    costed = report(
        CAPTURE, "--reuse-reporting", "none", "--prefill-rate", "16000", "--gpus-per-rank", "2", "--kv-bytes-per-token", "100KiB"
    )
    before, after = plain["repeat_compute"]["cleared"], costed["repeat_compute"]["cleared"]
    assert (before["gpu_seconds"], before["method"]) == (None, None)
    assert after["gpu_seconds"] == after["tokens"] * 2 / 16_000
    assert (after["rated_tokens"], after["method"]) == (after["tokens"], "declared")
    assert after["elapsed"] == before["elapsed"]
    assert sum(count for _, _, count in after["elapsed"]["histogram"]) == after["blocks"]
    for rank in costed["ranks"]:
        assert rank["resident_bytes"] == rank["resident_tokens"] * 102_400
    assert {rank["resident_bytes"] for rank in plain["ranks"]} == {None}


@pytest.mark.parametrize("sizes", [("1KiB", "2KiB"), ("1KiB", "0=2KiB"), ("0=1KiB", "0=2KiB")])
def test_sizes_that_contradict_each_other_are_a_usage_error(sizes: tuple[str, ...]) -> None:
    given = [word for size in sizes for word in ("--kv-bytes-per-token", size)]
    result = CliRunner().invoke(cli, ["report", CAPTURE, *given])
    assert result.exit_code == 2
    assert "--kv-bytes-per-token" in result.output
