"""The command line as a whole: what it says of mistakes and of an output it cannot write, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import kvcensus

CAPTURE = str(Path(__file__).parents[1] / "console" / "data" / "g_dp2.frames.jsonl.gz")


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """``command`` of a shell in which ``$@`` is ``kvcensus report CAPTURE``."""
    arguments = [sys.executable, "-m", "console.cli", "report", CAPTURE]
    return subprocess.run(["sh", "-c", command, "sh", *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["report"],
        ["report", "--nope"],
        ["show", "nothing"],
        ["demo", "--json"],
        ["topics", "x"],
        ["worker", "--window", "nan"],
        ["simulate", "--synthetic", "--ranks", "1000000000"],
        ["forward", "--instance"],
        ["forward", "--instance", "a", "--spool-dir", ""],
        ["forward", "--instance", "a", "--bootstrap-servers", "localhost:99999"],
        ["forward", "--instance", "a", "--bootstrap-servers", "127.0.0.1:9", "--dp-size", "2", "--kafka-option", "nope=1"],
        ["topics", "create", "--data-dir", ""],
        ["topics", "check", "--bootstrap-servers", "::::"],
    ],
)
def test_a_mistake_in_the_command_line_is_one_line(arguments: list[str]) -> None:
    done = kvcensus(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert arguments == ["nope"] or f" {arguments[0]}" in done.stderr.partition(":")[0]
    assert " -h`" in done.stderr


def test_without_a_command_there_is_help() -> None:
    done = kvcensus()
    assert done.returncode == 2
    assert "Commands:" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_that_is_full_is_one_line() -> None:
    done = shell('"$@" --json > /dev/full')
    assert done.returncode == 1
    assert done.stderr == "kvcensus: cannot write the output: No space left on device\n"


def test_nobody_has_to_listen() -> None:
    assert shell('"$@" >&-').stderr == ""
    cut = shell('"$@" | head -n 1')
    assert len(cut.stdout.splitlines()) == 1
    assert cut.stderr == ""


def test_a_folder_is_no_capture(tmp_path: Path) -> None:
    done = kvcensus("report", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"kvcensus: {tmp_path}: not a regular file\n"
