"""The counting path of `report` agrees exactly with the oracle: every capture, seeded fleets, any interleaving."""

from __future__ import annotations

import heapq
import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from console.cli import cli
from producers.simulate import fleet, presets
from producers.simulate.source import RankSource
from schemas.records import Declaration, RankMessage
from sql.figures import assemble
from sql.totals import totals_from_records
from streams.offline import count
from tests.counting import capture_sources, differences, expected, interleaved, messages
from tests.shared_data import CAPTURE_NAMES, SHIPPED, capture_path, shared_path

FLEETS = presets.test_fleets()
REPLAYS = ("e_replay.jsonl.gz", "g_dp2_replay.jsonl.gz", "j_v0.16.0_array_replay.jsonl.gz")


def report(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["report", "--json", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def figures_of(stream: list[RankMessage], *, shards: int = 1, window_us: int = 10_000_000) -> dict[str, Any]:
    counted = count(stream, shards=shards, window_us=window_us)
    document: dict[str, Any] = assemble(totals_from_records(counted.rank_windows, counted.duplicate_windows))
    return document


@pytest.fixture(scope="module")
def fleets() -> dict[str, tuple[list[RankSource], dict[str, Any], list[list[RankMessage]]]]:
    made = {}
    for name, spec in FLEETS.items():
        sources = fleet.sources(spec)
        made[name] = sources, expected(sources), messages(sources)
    return made


@pytest.mark.parametrize("reuse", ["none", "labelled", "unlabelled"])
@pytest.mark.parametrize("removals", ["per_copy", "last_copy"])
@pytest.mark.parametrize("name", [*CAPTURE_NAMES, *REPLAYS])
def test_a_capture_reports_the_oracles_figures(name: str, reuse: Any, removals: Any) -> None:
    path = capture_path(name) if name in CAPTURE_NAMES else shared_path(f"captures/{name}")
    wanted = expected(capture_sources(("engine", path), declaration=Declaration(reuse, removals)))
    document = report(f"engine={path}", "--reuse-reporting", reuse, "--removals", removals)
    assert differences(document, wanted) == []


def test_what_the_captures_are_known_for() -> None:
    pressure = report(str(shared_path("captures/b_pressure.frames.jsonl.gz")), "--reuse-reporting", "none")["repeat_compute"]
    assert pressure["concurrent"]["blocks"] == 35, "35 stores of content that was still cached"
    assert (pressure["evicted"]["tokens"], pressure["evicted"]["blocks"]) == (17_184, 537)
    offload = report(str(shared_path("captures/i_offload_cpu.frames.jsonl.gz")))["repeat_compute"]
    assert (offload["ambiguous_reload"]["tokens"], offload["ambiguous_reload"]["blocks"]) == (512, 16)
    assert offload["concurrent"] is None, "nobody can tell on an unlabelled stream"


def test_a_restart_and_a_data_parallel_engine_are_told_apart() -> None:
    restart = report(str(SHIPPED / "j_v0.16.0_array_restart.frames.jsonl.gz"))
    restarted = restart["repeat_compute"]["restarted"]
    assert (restarted["tokens"], restarted["blocks"]) == (192, 6)
    assert restart["repeat_compute"]["coverage"] == 45_611 / 14_207_710
    parallel = report(f"dp={SHIPPED / 'g_dp2.frames.jsonl.gz'}")
    assert [(rank["instance_id"], rank["dp_rank"]) for rank in parallel["ranks"]] == [("dp", 0), ("dp", 1)]
    assert parallel["duplicate_footprint"]["inside_instances"]["extra_tokens"] == {"mean": 183_772_448 / 1_927_099, "max": 128, "end": 96}


def test_all_captures_as_one_fleet() -> None:
    paths = [(name.split(".")[0] + str(index), capture_path(name)) for index, name in enumerate(CAPTURE_NAMES)]
    wanted = expected(capture_sources(*paths, declaration=Declaration("unlabelled", "per_copy")))
    assert differences(report(*(f"{name}={path}" for name, path in paths)), wanted) == []


@pytest.mark.parametrize("name", FLEETS)
def test_a_fleet_agrees_with_the_oracle(name: str, fleets: Any) -> None:
    _, wanted, ranks = fleets[name]
    stream = list(heapq.merge(*ranks, key=lambda message: message.at_us))
    assert differences(figures_of(stream, shards=3), wanted) == []
    headline = wanted["repeat_compute"]
    assert any(headline[cause]["tokens"] for cause in ("evicted", "cleared", "restarted")), "a fleet that shows nothing tests nothing"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FLEETS)
def test_neither_interleaving_nor_window_nor_shards_change_a_figure(name: str, seed: int, fleets: Any) -> None:
    _, wanted, ranks = fleets[name]
    rng = random.Random(f"{name} {seed}")
    stream = interleaved(ranks, rng.randrange)
    document = figures_of(stream, shards=rng.randint(1, 5), window_us=rng.choice([250_000, 1_000_000, 60_000_000]))
    assert differences(document, wanted) == []


def test_one_rank_after_the_other_is_late_data_and_counts_the_same(fleets: Any) -> None:
    _, wanted, ranks = fleets["shared-ticks"]
    stream = [message for rank in reversed(ranks) for message in rank]
    assert differences(figures_of(stream, shards=2), wanted) == []


@pytest.mark.parametrize("name", ["pressure", "thrash"])
def test_deliveries_repeated_change_nothing(name: str, fleets: Any) -> None:
    _, wanted, ranks = fleets[name]
    rng = random.Random(name)
    repeated = []
    for rank in ranks:
        out: list[RankMessage] = []
        for message in rank:
            out.append(message)
            if rng.random() < 0.3:  # a successor sends again what its predecessor had sent
                out.extend(out[-rng.randint(1, min(9, len(out))) :])
        repeated.append(out)
    assert differences(figures_of(interleaved(repeated, rng.randrange)), wanted) == []


def test_the_oracle_would_notice(fleets: Any) -> None:
    _, wanted, ranks = fleets["pressure"]
    broken = [list(rank) for rank in ranks]
    lost = next(index for index, message in enumerate(broken[0]) if message.batch is not None and index > 50)
    del broken[0][lost]
    assert differences(figures_of([message for rank in broken for message in rank]), wanted) != []


def test_a_written_fleet_reads_back_the_same(tmp_path: Path) -> None:
    written = tmp_path / "fleet.frames.jsonl.gz"
    result = CliRunner().invoke(cli, ["simulate", "--preset", "pressure", "--write", str(written), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    files = sorted(tmp_path.glob("*.gz"))
    paths = [(path.name, path) for path in files]
    declaration = Declaration("none", "per_copy")
    wanted = expected(capture_sources(*paths, declaration=declaration))
    assert differences(report(*(f"{name}={path}" for name, path in paths), "--reuse-reporting", "none"), wanted) == []


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["no-such-file.gz"], 1, "no such file"),
        (["--wat"], 2, "No such option"),
        ([], 2, "Missing argument"),
        (["a=x", "--reuse-reporting", "sometimes"], 2, "sometimes"),
    ],
)
def test_bad_usage_is_one_clear_line(arguments: list[str], code: int, says: str) -> None:
    from tests.command import kvcensus

    done = kvcensus("report", *arguments)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_truncated_capture_names_the_file_and_line(tmp_path: Path) -> None:
    from tests.command import kvcensus

    cut = tmp_path / "cut.frames.jsonl.gz"
    cut.write_bytes((SHIPPED / "a_shared_prefix.frames.jsonl.gz").read_bytes()[:3000])
    done = kvcensus("report", str(cut))
    assert done.returncode == 1
    assert "cut.frames.jsonl.gz" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_captures_of_one_name_are_refused() -> None:
    from tests.command import kvcensus

    path = SHIPPED / "a_shared_prefix.frames.jsonl.gz"
    done = kvcensus("report", str(path), str(path))
    assert done.returncode == 2
    assert "NAME=PATH" in done.stderr
