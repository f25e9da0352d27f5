"""Running the real command line in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def kvcensus(*arguments: str, timeout: float = 120, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``kvcensus ARGUMENTS`` to its end; ``environ`` replaces the environment."""
    return subprocess.run(
        [sys.executable, "-m", "console.cli", *arguments], capture_output=True, text=True, timeout=timeout, env=environ, check=False
    )
