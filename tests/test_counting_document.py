"""docs/counting.md, read by machine: its events run through the real code, and every number in its tables is what comes out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from producers.identity import ephemeral_key
from schemas.histogram import bucket
from schemas.records import GroupCounters, RankMessage, RankWindow, SharedPrefix
from streams.offline import Counted, count
from tests.oracle import driver, rows
from tests.oracle.oracle import Contents, Declared, Rank, RankInput, Scraped

DOCUMENT = Path(__file__).parent.parent / "docs" / "counting.md"
SECOND = 1_000_000
START = 1_700_000_040 * SECOND
BLOCK = 16
BEFORE = {"P1": None, "P2": "P1", "a1": "P2", "b1": "P2", "c1": "P2"}
DECLARED = {
    "east/0": Declared("none", workload="chat", model="m", kv_bytes_per_token=1000, prefill_rate=1000.0, gpus_per_rank=2.0),
    "east/1": Declared("none", workload="chat", model="m", kv_bytes_per_token=1000),
    "west/0": Declared("none", workload="batch", model="m", kv_bytes_per_token=1000),
}
RANKS = list(DECLARED)

Table = list[dict[str, str]]


def tables() -> list[tuple[list[str], Table]]:
    """Every table of the document, behind the cells of its header."""
    found: list[tuple[list[str], Table]] = []
    lines = DOCUMENT.read_text().splitlines()
    at = 0
    while at < len(lines):
        if lines[at].startswith("|") and lines[at + 1].startswith("|---"):
            header = _cells(lines[at])
            table: Table = []
            found.append((header, table))
            at += 2
            while at < len(lines) and lines[at].startswith("|"):
                table.append(dict(zip(header, _cells(lines[at]), strict=True)))
                at += 1
        at += 1
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table(*header: str) -> Table:
    """The table whose header begins so."""
    (found,) = [lines for cells, lines in tables() if cells[: len(header)] == list(header)]
    return found


@dataclass
class Writer:
    """The frames of one rank, from the events as the document words them."""

    life: int = 0
    seq: int = 0
    steps: list[Any] = field(default_factory=list)

    def hash_of(self, name: str) -> int:
        return list(BEFORE).index(name) + 1 + 1000 * self.life

    def add(self, second: int, event: str) -> None:
        word, *rest = event.split()
        events: list[dict[str, Any]] = []
        medium = None
        if "on" in rest:
            medium, rest = rest[-1], rest[: rest.index("on")]
        if word == "scrape":
            said = dict(zip(rest[::2], rest[1::2], strict=True))
            at_ms = (START // SECOND + second) * 1000
            self.steps.append(Scraped(at_ms, prompt_tokens=int(said["prompt"]), prompt_tokens_cached=int(said["cached"])))
            return
        if word == "lost":
            self.seq += 1
            return
        if word == "restart":
            self.life, self.seq = self.life + 1, 0
        elif word == "store":
            before = BEFORE[rest[0]]
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [self.hash_of(name) for name in rest],
                    "parent_block_hash": None if before is None else self.hash_of(before),
                    "token_ids": [list(BEFORE).index(name) * BLOCK + n for name in rest for n in range(BLOCK)],
                    "block_size": BLOCK,
                    "medium": medium,
                }
            )
        elif word == "remove":
            events.append({"type": "BlockRemoved", "block_hashes": [self.hash_of(name) for name in rest], "medium": medium})
        elif word == "clear":
            events.append({"type": "AllBlocksCleared"})
        else:
            assert word == "nothing", event
        self.steps.append((self.seq, msgspec.msgpack.encode([START // SECOND + second, events])))
        self.seq += 1


def inputs() -> list[RankInput]:
    """The ranks of the example."""
    writers = {rank: Writer() for rank in RANKS}
    for row in table("time", "rank", "event"):
        writers[row["rank"]].add(int(row["time"]), row["event"])
    made = []
    for name, writer in writers.items():
        instance, dp_rank = name.split("/")
        made.append(RankInput(instance, int(dp_rank), writer.steps, declared=DECLARED[name]))
    return made


@pytest.fixture(scope="module")
def stream() -> list[RankMessage]:
    """Everything the forwarders would send, rank by rank in time."""
    key = ephemeral_key()
    sent = [message for rank in inputs() for message in driver.messages(rank, key)]
    return sorted(sent, key=lambda message: message.at_us)


@pytest.fixture(scope="module")
def counted(stream: list[RankMessage]) -> Counted:
    return count(stream, shards=3)


@pytest.fixture(scope="module")
def rank_rows(counted: Counted) -> dict[str, list[RankWindow]]:
    found: dict[str, list[RankWindow]] = {name: [] for name in RANKS}
    for row in rows.latest_rank_rows(counted.rank_windows):
        found[f"{row.instance_id}/{row.dp_rank}"].append(row)
    return found


def groups(rank_rows: list[RankWindow]) -> list[GroupCounters]:
    return [group for row in rank_rows for group in row.groups]


COUNTERS = {
    "evicted tokens computed again": "recompute_evicted_tokens",
    "cleared tokens computed again": "recompute_cleared_tokens",
    "restarted tokens computed again": "recompute_restarted_tokens",
    "concurrent tokens": "recompute_concurrent_tokens",
    "reloaded tokens": "reloaded_tokens",
    "evicted GPU ms": "recompute_evicted_gpu_us",
    "cleared GPU ms": "recompute_cleared_gpu_us",
    "restarted GPU ms": "recompute_restarted_gpu_us",
    "concurrent GPU ms": "recompute_concurrent_gpu_us",
    "stored tokens": "stored_tokens",
    "evicted tokens": "evicted_tokens",
    "cleared tokens": "cleared_tokens",
    "tokens ended by restart": "restarted_tokens",
    "never reused, tokens": "unreused_tokens",
}


def test_what_each_rank_did_and_computed_again(rank_rows: dict[str, list[RankWindow]]) -> None:
    tables_of_ranks = [lines for cells, lines in tables() if cells[:4] == ["figure", *RANKS]]
    said = {row["figure"]: row for of_ranks in tables_of_ranks for row in of_ranks}
    for figure, counter in COUNTERS.items():
        row, scale = said.pop(figure), 1000 if counter.endswith("_us") else 1
        found = [sum(getattr(group, counter) for group in groups(rank_rows[name])) for name in RANKS]
        assert [int(row[name]) * scale for name in RANKS] == found, figure
    of_rows: dict[str, Callable[[list[RankWindow]], float]] = {
        "resident tokens at the end": lambda mine: mine[-1].groups[0].resident_tokens,
        "observed seconds": lambda mine: sum(row.observed_us for row in mine) / SECOND,
        "lost batches": lambda mine: sum(row.lost_batches for row in mine),
    }
    for figure, get in of_rows.items():
        row = said.pop(figure)
        assert [int(row[name]) for name in RANKS] == [get(rank_rows[name]) for name in RANKS], figure
    assert not said, "every line of the document is looked at"
    assert [int(each) for each in re.findall(r"\d+", _line("Coverage from 0 to 70"))][-2:] == [188, 210]


def _line(begins: str) -> str:
    (found,) = [line for line in DOCUMENT.read_text().splitlines() if line.startswith(begins)]
    return found


def test_how_long_things_lasted(rank_rows: dict[str, list[RankWindow]]) -> None:
    said = {f"back_{row['cause']}": row for row in table("cause", *RANKS)} | {"lifetime": table("", *RANKS)[0]}
    assert said.keys() == set(rows.HISTOGRAMS)
    for histogram, row in said.items():
        for name in RANKS:
            found: dict[int, int] = {}
            for group in groups(rank_rows[name]):
                for number, times in zip(getattr(group, f"{histogram}_buckets"), getattr(group, f"{histogram}_counts"), strict=True):
                    found[number] = found.get(number, 0) + times
            seconds = [int(each) for each in row[name].split()]
            wanted: dict[int, int] = {}
            for each in seconds:
                wanted[bucket(each * SECOND)] = wanted.get(bucket(each * SECOND), 0) + 1
            assert found == wanted, (histogram, name)


def test_the_duplicate_footprint(counted: Counted) -> None:
    latest = {row.window_start_us: row for row in rows.latest_duplicate_rows(counted.duplicate_windows) if row.scope == "fleet"}
    for row in table("window", "inside token-seconds"):
        found = latest[START + int(row["window"]) * SECOND]
        assert int(row["inside token-seconds"]) * SECOND == found.inside_token_us, row
        assert int(row["between token-seconds"]) * SECOND == found.between_token_us, row
        assert int(row["highest extra tokens"]) == found.extra_tokens_max, row
        assert int(row["extra tokens at its end"]) == found.inside_tokens_end + found.between_tokens_end, row


def test_the_pair_of_workloads(counted: Counted) -> None:
    latest = [row for row in rows.latest_duplicate_rows(counted.duplicate_windows) if row.scope == "workload_pair"]
    assert {row.scope_key for row in latest} == {'["batch", "chat"]'}
    said = [int(each) * SECOND for each in re.findall(r"\d+", _line("The pair of workloads").split("per window")[1])]
    assert [row.between_token_us for row in latest[: len(said)]] == said


def test_the_trunk(counted: Counted) -> None:
    latest: dict[tuple[int, int], SharedPrefix] = {}
    for row in counted.shared_prefixes:
        latest[row.as_of_us, row.place] = row
    (said,) = table("blocks", "tokens")
    found = latest[START + 60 * SECOND, 1]
    assert said == {
        "blocks": str(found.blocks),
        "tokens": str(found.tokens),
        "depth in tokens": str(found.depth_tokens),
        "copies": str(found.copies),
        "extra tokens": str(found.extra_tokens),
        "extra bytes": str(found.extra_bytes),
        "ranks": " ".join(found.ranks),
        "workloads": " ".join(found.workloads),
    }
    assert [key for key in latest if key[0] == START + 60 * SECOND] == [(START + 60 * SECOND, 1)]


def test_the_reference_agrees(counted: Counted) -> None:
    contents = Contents()
    ranks = [Rank(given, contents, states=True) for given in inputs()]
    found = [line for rank in ranks for line in rows.rank_differences(rank, counted.rank_windows)]
    found += rows.recompute_differences(ranks, counted.recomputes)
    found += rows.fleet_differences(ranks, contents, counted.duplicate_windows, skew_us=SECOND, window_us=10 * SECOND)
    found += rows.coverage_differences(ranks, contents, counted.rank_windows, counted.duplicate_windows, skew_us=SECOND)
    found += rows.prefix_differences(ranks, contents, counted.shared_prefixes)
    assert found == []
