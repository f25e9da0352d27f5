"""``kvcensus show deploy`` and ``show change``: what they read from a store and how they print it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from console.change_tables import render_change
from console.commands.show import show
from schemas.errors import KvcensusError
from schemas.records import Deploy
from sql import migrate, store
from sql.change import Cut, compare
from sql.rows import Row, TableRows
from sql.times import iso
from tests.command import kvcensus
from tests.sql_records import WINDOW_US, duplicate_window, rank_window
from tests.test_change import AFTER, AT_US, BEFORE, WINDOWS, rows, totals

HOURS = str(WINDOWS * WINDOW_US / 3_600_000_000)
MADE = rows(lambda rank, after: {"workload": "chat" if rank else "code", "reuse_reporting": "unlabelled"})
MADE[1].append(duplicate_window(scope="workload", scope_key="chat", inside_token_us=7 * WINDOW_US))
# Time has gone on: the side after is over.
MADE[0].append(rank_window(instance_id="b", window_start_us=AFTER.end_us, first_batch_us=AFTER.end_us, last_batch_us=AFTER.end_us + 1))
DEPLOYS = [
    Deploy("aaaa0001", 1, "raise max-num-seqs", AT_US),
    Deploy("aaab0002", 1, "chat only", AT_US, "chat"),
    Deploy("bbbb0003", 2, "taken back", BEFORE.start_us, removed=True),
    Deploy("cccc0004", 1, "too early", AFTER.end_us - WINDOW_US),
    Deploy("dddd0005", 1, "to come", AFTER.end_us + 90 * WINDOW_US),
    Deploy("eeee0006", 1, "both", AT_US, "chat", "m"),
]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an owned store that holds the rows and the deploys, some of them twice."""
    folder = tmp_path_factory.mktemp("data")
    with store.connect(None, folder, own=True) as database:
        migrate.apply(database)
        stood = Deploy("bbbb0003", 1, "taken back", BEFORE.start_us)
        records: list[Row] = [*MADE[0], *MADE[1], *MADE[0][::3], *DEPLOYS, *DEPLOYS, stood]
        made = TableRows()
        for record in records:
            made.add(record)
        for batch in made.batches():
            database.insert(batch.table, batch.column_names, batch.columns)
        yield folder


def run(*arguments: str, data_dir: Path, code: int = 0) -> Result:
    result = CliRunner().invoke(show, [*arguments, "--data-dir", str(data_dir)])
    if isinstance(result.exception, KvcensusError):
        result.exit_code = 1
    assert result.exit_code == code, (result.output, result.exception)
    return result


def document(*arguments: str, data_dir: Path) -> Any:
    return json.loads(run(*arguments, "--json", data_dir=data_dir).output)


def expected(cut: Cut | None = None, **options: Any) -> dict[str, Any]:
    """The document of the records in memory; JSON has text where Python has tuples."""
    by = cut.by if cut else None
    return compare(totals(MADE, BEFORE, by=by), totals(MADE, AFTER, by=by), cut, **options)


def test_the_time_before_a_deploy_against_the_time_after(data_dir: Path) -> None:
    found = document("deploy", "aaaa", "--hours", HOURS, data_dir=data_dir)
    assert found["deploy"] == {
        "deploy_id": "aaaa0001", "label": "raise max-num-seqs", "at": iso(AT_US), "at_us": AT_US, "workload": None, "model": None,
        "removed": False,
    }  # fmt: skip
    others = [warning for warning in found["warnings"] if warning.startswith("another deploy")]
    assert others == [f"another deploy lies in the span after: cccc0004 at {iso(AFTER.end_us - WINDOW_US)} (too early)"]
    found["warnings"] = [warning for warning in found["warnings"] if warning not in others]
    assert found == {"deploy": found["deploy"], **expected()}
    assert found["comparable"]
    assert found["repeat_compute"]["causes"]["evicted"]["tokens"]["difference"] == -720


def test_a_deploy_is_looked_at_for_what_it_concerned(data_dir: Path) -> None:
    found = document("deploy", "AAAB0002", "--hours", HOURS, data_dir=data_dir)
    cut = Cut(workload="chat")
    assert {name: found[name] for name in ("before", "after", "repeat_compute", "duplicate_footprint")} == {
        name: expected(cut)[name] for name in ("before", "after", "repeat_compute", "duplicate_footprint")
    }
    assert found["before"]["ranks"] == ["a/1", "b/0"]
    both = document("deploy", "eeee", "--hours", HOURS, data_dir=data_dir)
    assert both["duplicate_footprint"]["refused"][0]["reason"] == "two_cuts"
    assert both["repeat_compute"]["causes"]["evicted"]["tokens"]["difference"] == -480


def test_two_spans_by_hand(data_dir: Path) -> None:
    spans = ("--before", iso(BEFORE.start_us + 5), iso(BEFORE.end_us - 5), "--after", f"{AFTER.start_us / 1e6}", iso(AFTER.end_us))
    found = document("change", *spans, "--workload", "chat", "--min-coverage", "0.25", data_dir=data_dir)
    assert found["deploy"] is None
    assert found["repeat_compute"] == expected(Cut("chat"), min_coverage=0.25)["repeat_compute"]
    assert found["min_coverage"] == 0.25
    swapped = document("change", "--before", *spans[4:], "--after", *spans[1:3], data_dir=data_dir)
    assert swapped["repeat_compute"]["causes"]["evicted"]["tokens"]["difference"] == 720
    itself = document("change", "--before", *spans[1:3], "--after", *spans[1:3], data_dir=data_dir)
    assert itself["repeat_compute"]["causes"]["evicted"]["tokens"] == {"before": 1800, "after": 1800, "difference": 0, "ratio": 1}


def test_what_is_not_over_yet_is_cut_on_both_sides(data_dir: Path) -> None:
    found = document("deploy", "aaaa0001", "--hours", "1", data_dir=data_dir)
    assert found["warnings"][0] == f"not over yet: engine time has reached {iso(AFTER.end_us)}, so both sides are cut to 1 min"
    assert (found["before"], found["after"]) == (expected()["before"], expected()["after"])
    assert found["repeat_compute"]["causes"]["evicted"]["tokens"]["difference"] == -720
    later = document("deploy", "dddd", data_dir=data_dir)
    assert later["comparable"] is False
    assert {why["reason"] for why in later["refused"]} == {"no_windows"}


def test_the_screen_says_what_is_compared_and_what_is_not(data_dir: Path) -> None:
    output = run("deploy", "aaaa", "--hours", HOURS, data_dir=data_dir).output
    text = " ".join(output.split())
    for said in (
        f"Deploy aaaa0001 at {iso(AT_US)}: raise max-num-seqs",
        "before 2023-11-14T22:13:20Z to 2023-11-14T22:14:20Z (1 min, 3 ranks)",
        "evicted tokens 1,800 1,080 -720 0.60",
        "concurrent tokens cannot tell cannot tell - -",
        "before 100% lower bound unlabelled",
        "inside instances tokens, mean 400.0 200.0 -200.0 0.50",
        "Warning: another deploy lies in the span after: cccc0004",
        "unlabelled: stores cannot be told from announcements of reuse",
    ):
        assert said in text
    refused = run("deploy", "dddd", data_dir=data_dir).output
    assert "Not comparable: no window of any rank was counted after." in refused
    both = document("deploy", "eeee", "--hours", HOURS, data_dir=data_dir)
    for found in (document("deploy", "aaaa", "--hours", HOURS, data_dir=data_dir), both):
        for width in (80, 120):
            console = Console(width=width, force_terminal=False, highlight=False, markup=False)
            with console.capture() as shown:
                render_change(found, console)
            assert max(len(line.rstrip()) for line in shown.get().splitlines()) <= width
            assert "…" not in shown.get()


def test_a_deploy_that_is_not_there(data_dir: Path, tmp_path: Path) -> None:
    for given, said in (
        ("ffff", "no deploy has the id 'ffff' (see `kvcensus deploy list`)"),
        ("aaa", "'aaa' is no id of a deploy: give at least its first 4 digits (see `kvcensus deploy list`)"),
        ("bbbb", "the deploy bbbb0003 (taken back) was taken back"),
    ):
        assert str(run("deploy", given, data_dir=data_dir, code=1).exception) == said
    missing = run("deploy", "aaaa", data_dir=tmp_path, code=1)
    assert str(missing.exception).startswith(f"No figures yet: there is no store in {tmp_path}.")
    nothing = ("change", "--before", "2h", "1h", "--after", "1h", "now")
    assert run(*nothing, data_dir=tmp_path).output.startswith("No figures yet: there is no store in ")
    empty = document(*nothing, data_dir=tmp_path)
    assert (empty["comparable"], empty["warnings"][-1][:14]) == (False, "No figures yet")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["deploy"], "Missing argument 'ID'"),
        (["--json", "deploy"], "`deploy` comes before any option: kvcensus show deploy -h"),
        (["deploy", "aaaa", "--hours", "nan"], "not a finite number"),
        (["deploy", "aaaa", "--hours", "0"], "not in the range"),
        (["change", "--before", "2h", "1h"], "Missing option '--after'"),
        (["change", "--before", "1h", "2h", "--after", "1h", "now"], "must lie before"),
        (["change", "--before", "noon", "2h", "--after", "1h", "now"], "'noon' is no time"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    assert said in " ".join(run(*arguments, data_dir=tmp_path, code=2).output.split())


def test_the_command_line_knows_them() -> None:
    done = kvcensus("show", "deploy", "--hours", "x", "aaaa")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("kvcensus show deploy: ") or "show deploy: " in done.stderr
    assert "Usage:" in kvcensus("show", "change", "-h").stdout
