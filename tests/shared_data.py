"""Where test data lies that the project does not ship: captures, traces and corpora in a folder beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "KVCENSUS_SHARED"
"""Environment variable that names the folder; default: ``shared`` beside the project."""

SHIPPED = Path(__file__).parents[1] / "console" / "data"
"""The captures that the project ships."""


def shared_folder() -> Path | None:
    """The folder of shared data, or None where there is none."""
    given = os.environ.get(VARIABLE)
    folder = Path(given) if given else Path(__file__).parents[1].parent / "shared"
    return folder if folder.is_dir() else None


def shared_path(relative: str) -> Path:
    """``relative`` in the folder of shared data; skips the test, visibly, where the folder or the file is missing."""
    folder = shared_folder()
    if folder is None:
        pytest.skip(f"no shared test data: set {VARIABLE} to run this case")
    path = folder / relative
    if not path.exists():
        pytest.skip(f"no {relative} in the shared test data ({folder})")
    return path


def captures() -> list[Path]:
    """Every capture of raw frames in the shared data (replay exchanges not among them), by name; empty without it.

    For parametrising; pair it with :func:`shared_path` so that an absent folder shows as a skip and not as nothing.
    """
    folder = shared_folder()
    if folder is None:
        return []
    found = folder.joinpath("captures").glob("*.jsonl.gz")
    return sorted(path for path in found if not path.name.endswith((".metrics.jsonl.gz", ".requests.jsonl.gz", "replay.jsonl.gz")))


CAPTURE_NAMES = (
    "a_shared_prefix.frames.jsonl.gz",
    "b_pressure.frames.jsonl.gz",
    "c_reset_salt.frames.jsonl.gz",
    "f_lora_salt_session.frames.jsonl.gz",
    "g_dp2.frames.jsonl.gz",
    "h_hybrid_swa.frames.jsonl.gz",
    "i_offload_cpu.frames.jsonl.gz",
    "j_v0.16.0_array.frames.jsonl.gz",
    "j_v0.16.0_array_restart.frames.jsonl.gz",
    "j_v0.23.0_array.frames.jsonl.gz",
    "vllm-0.26.0-a10-cache-salt.jsonl.gz",
)
"""The captures of raw frames known when the tests were written: parametrise with these and open them with :func:`capture_path`."""


def capture_path(name: str) -> Path:
    """Capture ``name``: from the shared data, else from those the project ships, else the test is skipped."""
    shipped = SHIPPED / name
    if shared_folder() is None and shipped.exists():
        return shipped
    return shared_path(f"captures/{name}")
