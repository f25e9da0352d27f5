"""The worker as a plain Faust app: ``faust -A streams.app worker``, configured by ``KVCENSUS_*`` in the environment."""

from __future__ import annotations

from streams.pipeline import CensusApp
from streams.settings import from_environment

app = CensusApp(from_environment())
