"""``kvcensus demo``, with all its processes: that it counts exactly, is found by other commands, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from console.cli import cli
from console.demo import children, fleet, screen, verdict
from console.demo.folder import MARK, DemoFolder
from console.demo.readings import Reading
from console.demo.verdict import Published
from producers import wire
from producers.simulate.presets import DEMO_SEED
from schemas.errors import KvcensusError
from sql.figures import assemble
from sql.totals import LifeTotals, Span, Totals
from tests.counting import differences, expected

PATIENCE_S = 120
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def environment(data_dir: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVCENSUS_")}
    return {**clean, "KVCENSUS_DATA_DIR": str(data_dir)}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "console.cli", *words]


def start(data_dir: Path) -> subprocess.Popen[str]:
    out = (data_dir.parent / f"{data_dir.name}.out").open("w")
    with out:
        return subprocess.Popen(command("demo"), env=environment(data_dir), stdout=out, stderr=out, text=True)


def output(data_dir: Path) -> str:
    return (data_dir.parent / f"{data_dir.name}.out").read_text()


def run(data_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), env=environment(data_dir), capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (result := found()):
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.1)
    return result


def children_in(data_dir: Path) -> list[int]:
    """Processes that work in the demo's folder: every child does, and nothing else."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == data_dir / "demo" and (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def counts(data_dir: Path) -> bool:
    shown = run(data_dir, "show", "repeat-compute", "--json")
    return shown.returncode == 0 and bool(json.loads(shown.stdout)["repeat_compute"]["evicted"]["tokens"])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of a demo that was killed while its figures moved, after what must hold beside a running one."""
    data_dir = tmp_path_factory.mktemp("demo") / "data"
    running = start(data_dir)
    try:
        until(lambda: running.poll() is not None or counts(data_dir), "figures beside a running demo")
        assert running.poll() is None, output(data_dir)
        # Ten: broker, worker, and a forwarder for each of the eight ranks.
        assert sys.platform != "linux" or len(children_in(data_dir)) == 10
        second = run(data_dir, "demo", "--once")
        assert (second.returncode, second.stdout) == (1, "")
        assert second.stderr.startswith(f"kvcensus: a demo is already running on {data_dir} (process {running.pid})")
        assert second.stderr.count("\n") == 1
    finally:
        running.kill()
        running.wait()
    return data_dir


@pytest.fixture(scope="module")
def once(killed: Path) -> subprocess.CompletedProcess[str]:
    """A finite demo on the folder that the killed one left."""
    return run(killed, "demo", "--once", "--json")


@linux_only
def test_a_killed_demo_leaves_no_process_behind(killed: Path) -> None:
    until(lambda: not children_in(killed), "end of the children")


def test_a_finite_run_counts_exactly_what_was_published(once: subprocess.CompletedProcess[str], killed: Path) -> None:
    assert once.returncode == 0, once.stderr
    document = json.loads(once.stdout)
    sources = fleet.finite(20, DEMO_SEED)
    assert differences(document, expected(sources)) == []
    about = document["demo"]
    assert (about["ok"], about["failures"]) == (True, [])
    published = sum(len(list(source.batches)) for source in sources)
    assert about["batches"] == {"published": published, "counted": published, "lost": 0}
    assert [rank["counted"] for rank in about["ranks"]] == [source.batches_per_life() for source in sources]
    assert {rank["source"] for rank in about["ranks"]} == {"simulated", "recorded from vLLM 0.32.0"}
    assert sys.platform != "linux" or children_in(killed) == []


def test_no_figure_of_a_demo_is_zero(once: subprocess.CompletedProcess[str]) -> None:
    document = json.loads(once.stdout)
    assert verdict.zeros(document) == []
    assert document["repeat_compute"]["register"] == "lower_bound"


def test_figures_stay_readable_after_a_demo_and_nothing_points_there(once: subprocess.CompletedProcess[str], killed: Path) -> None:
    assert not (killed / "broker.json").exists()
    assert not (killed / "store.json").exists()
    shown = run(killed, "show", "all", "--json", "--data-dir", str(killed / "demo"))
    document = json.loads(once.stdout)
    again = json.loads(shown.stdout)
    for rank in again["ranks"]:
        rank["departed"] = False  # its forwarder has stopped since, if the worker still heard so
    for name in ("repeat_compute", "duplicate_footprint", "ranks"):
        assert verdict.settled(again[name]) == verdict.settled(document[name])
    rolled_up = (
        "SELECT (SELECT max(touched_at) FROM rollup_touched) <= (SELECT max(mark) FROM rollup_marks WHERE name = 'counted'), "
        "uniqExact(instance_id, dp_rank) FROM repeat_compute_1d"
    )
    asked = run(killed, "sql", rolled_up, "--format", "csv", "--data-dir", str(killed / "demo"))
    assert asked.stdout.splitlines()[1:] == [f"1,{len(document['ranks'])}"], asked.stderr


@linux_only
def test_sigint_ends_a_demo_and_all_its_children(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    running = start(data_dir)
    try:
        until(lambda: running.poll() is not None or " batches, " in output(data_dir), "figures on the screen")
        running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE_S) == 0, output(data_dir)
    finally:
        running.kill()
        running.wait()
    assert children_in(data_dir) == []
    assert "stopped; the figures stay" in output(data_dir)


@linux_only
def test_sigterm_during_the_start_ends_a_demo_and_all_its_children(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    running = start(data_dir)
    try:
        until(lambda: running.poll() is not None or len(children_in(data_dir)) >= 3, "children")
        running.terminate()
        assert running.wait(PATIENCE_S) == 0, output(data_dir)
    finally:
        running.kill()
        running.wait()
    assert children_in(data_dir) == []


@linux_only
def test_a_demo_whose_worker_dies_says_so_and_ends(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    running = start(data_dir)
    try:
        store = until(lambda: running.poll() is not None or (data_dir / "store.json").exists(), "store") and data_dir / "store.json"
        worker = json.loads(store.read_text())["pid"]
        os.kill(worker, signal.SIGKILL)
        assert running.wait(PATIENCE_S) == 1
    finally:
        running.kill()
        running.wait()
    last = output(data_dir).strip().splitlines()[-1]
    assert last.startswith(
        f"kvcensus: the worker (process {worker}) was killed by signal 9; its log {data_dir / 'demo' / 'logs' / 'worker.log'}"
    )
    assert children_in(data_dir) == []


# -- the folder ------------------------------------------------------------------------------------------------------


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "demo" / "thesis.tex"
    foreign.parent.mkdir()
    foreign.write_text("not yours")
    with pytest.raises(KvcensusError, match="was not made by a demo"), DemoFolder(tmp_path):
        pass
    assert [path.name for path in foreign.parent.iterdir()] == ["thesis.tex"]


def test_a_new_demo_removes_what_demos_make_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "clickhouse").mkdir()
    (tmp_path / "clickhouse" / "data").touch()
    with DemoFolder(tmp_path) as folder:
        (folder.path / "clickhouse").mkdir()
        (folder.path / "clickhouse" / "data").touch()
        folder.log("forward-chat-a/0").touch()
        (folder.path / "note.txt").touch()
    with DemoFolder(tmp_path) as folder:
        assert not (folder.path / "clickhouse").exists()
        assert list(folder.logs.iterdir()) == []
        assert (folder.path / "note.txt").exists()
        assert (folder.path / MARK).exists()
        assert (tmp_path / "clickhouse" / "data").exists()


def test_pointers_lead_to_the_demo_and_go_with_it_unless_another_took_their_place(tmp_path: Path) -> None:
    with DemoFolder(tmp_path) as folder:
        for name, point in (("broker.json", folder.point_to_broker), ("store.json", folder.point_to_store)):
            (folder.path / name).write_text(json.dumps({"pid": 1}))
            point()
            assert json.loads((tmp_path / name).read_text()) == {"pid": 1}
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        (tmp_path / "store.json").write_text(json.dumps({"pid": 2}))
    assert not (tmp_path / "broker.json").exists()
    assert json.loads((tmp_path / "store.json").read_text()) == {"pid": 2}


def test_a_data_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KvcensusError, match="cannot use the data folder"), DemoFolder(tmp_path / "file"):
        pass


# -- the fleet -------------------------------------------------------------------------------------------------------


def test_captures_run_beside_the_simulated_ranks_in_one_time() -> None:
    sources = fleet.finite(20, DEMO_SEED)
    recorded = [source for source in sources if fleet.is_recorded(source.instance_id)]
    assert {source.instance_id for source in recorded} == {"capture-g_dp2", "capture-a_shared_prefix"}
    assert len({source.origin_us for source in sources}) == 1
    for source in recorded:
        assert source.declaration.reuse_reporting == "unlabelled"
        batches = list(source.batches)
        assert all(wire.decode(batch.payload).at_us == batch.at_us for batch in batches)
        assert 0 <= batches[0].at_us - source.origin_us < 1_000_000


def test_a_lasting_fleet_goes_on_with_new_sessions_and_the_same_prompts() -> None:
    first, again = ([list(islice(source.batches, 200)) for source in fleet.lasting(3)] for _ in range(2))
    assert first == again
    source = fleet.lasting(3)[0]
    at = -1
    for batch in source.batches:
        assert batch.at_us >= at
        at = batch.at_us
        if at - source.origin_us > 620_000_000:  # into the third stretch of requests
            break
    else:
        pytest.fail("the load ended")


# -- the verdict -----------------------------------------------------------------------------------------------------


def life(instance: str, life_id: str, batches: int, first_us: int, **counted: Any) -> LifeTotals:
    return LifeTotals(
        instance,
        0,
        life_id,
        None,
        "m",
        "none",
        "per_copy",
        None,
        0,
        "",
        batches=batches,
        first_batch_us=first_us,
        last_batch_us=9,
        **counted,
    )


def totals(*lives: LifeTotals) -> Totals:
    return Totals(Span(1, 9), (None, None), 1, [], list(lives), [])


def test_counted_batches_are_compared_life_by_life() -> None:
    published = [Published("a", 0, (3, 2)), Published("b", 0, (4,))]
    # Life ids are random: the order is that of time. A declaration that changed within a life gives it two entries.
    complete = totals(life("a", "z", 3, 1), life("a", "c", 2, 5), life("b", "y", 1, 2), life("b", "y", 3, 3))
    assert verdict.missing(published, complete) == []
    assert verdict.missing(published, totals(life("a", "z", 3, 1), life("a", "c", 1, 5))) == [
        "a/0: counted 3+1 of 3+2 batches",
        "b/0: counted 0 of 4 batches",
    ]
    assert verdict.missing(published[1:], totals(life("b", "y", 5, 1))) == ["b/0: counted 5 of 4 batches"]


def test_losses_refusals_and_repetitions_are_named() -> None:
    found = verdict.unexpected(
        totals(life("a", "x", 3, 1, lost=2), life("b", "y", 3, 1, refused=1, duplicate_batches=4), life("c", "z", 1, 1))
    )
    assert found == ["a/0: 2 batches lost", "b/0: 1 batches refused", "b/0: 4 batches came twice"]


def test_figures_that_are_zero_or_absent_are_named() -> None:
    found = verdict.zeros(assemble(totals(life("a", "x", 3, 1))))
    assert "repeat_compute.evicted.tokens" in found
    assert "duplicate_footprint.between_instances.extra_blocks.max" in found
    assert len(found) == 4 * 2 + 2 * 2 * 2


def test_scrapes_that_go_on_do_not_keep_a_run_from_settling() -> None:
    def document(scrapes: int, tokens: int) -> dict[str, Any]:
        return {"ranks": [{"scrapes": scrapes, "stored_tokens": tokens}], "span": {"until_us": 1}}

    assert verdict.settled(document(1, 5)) == verdict.settled(document(2, 5)) != verdict.settled(document(2, 6))


# -- the screen and the command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_fits_a_small_terminal(once: subprocess.CompletedProcess[str], width: int) -> None:
    document = json.loads(once.stdout)
    until_us = document["span"]["until_us"]
    counted = totals(*(life(rank["instance_id"], "x", rank["batches"], 1) for rank in document["ranks"]))
    note = "the recorded ranks were played once and have ended: unobserved from there on"
    for reading in (Reading(counted, document), Reading(counted, document, document, until_us)):
        console = Console(width=width, force_terminal=False)
        with console.capture() as shown:
            console.print(screen.view(screen.Moment(3_725, 123_456, reading, width, note)))
        lines = shown.get().splitlines()
        assert len(lines) <= 24
        assert max(len(line.rstrip()) for line in lines) <= width
        text = "\n".join(lines)
        for word in (
            "1:02:05",
            "123,456 batches",
            "Ctrl-C ends",
            note,
            "evicted",
            "cleared",
            "restarted",
            "concurrent",
            "inside",
            "between",
            "lower bound",
        ):
            assert word in text
        assert ("nothing settled yet" in text) == (reading.settled is None)
        assert sum(line.startswith(("chat-", "agents-", "capture-")) for line in lines) == len(document["ranks"])


def test_the_screen_says_when_nothing_is_counted_yet() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as shown:
        console.print(screen.view(screen.Moment(1, 5, None, 80)))
    assert "nothing counted yet" in shown.get()


@pytest.mark.parametrize("words", [["--json"], ["--seconds", "20"], ["--once", "--seconds", "3"], ["--broker", "rabbit"]])
def test_options_that_do_not_go_together_are_refused(words: list[str]) -> None:
    assert CliRunner().invoke(cli, ["demo", *words]).exit_code == 2


def test_help_teaches() -> None:
    text = CliRunner().invoke(cli, ["demo", "--help"]).output
    assert "kvcensus show" in text
    assert "Ctrl-C" in text


def test_what_a_process_said_when_it_ended_is_shown_without_what_libraries_logged(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("INFO holds\nTraceback (most recent call last):\nRuntimeError: Event loop is closed\nkvcensus: no broker answers\n")
    assert children.died("worker", 7, 1, log).endswith(f"its log {log} ends: no broker answers")
    log.write_text("Traceback (most recent call last):\nMemoryError\n")
    assert children.died("worker", 7, -9, log).endswith("ends: Traceback (most recent call last): | MemoryError")
