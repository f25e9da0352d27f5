"""Names of the environment variables, the data folder and the Kafka client options: the same in every process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from schemas.errors import KvcensusError

BOOTSTRAP_SERVERS = "KVCENSUS_BOOTSTRAP_SERVERS"
CLICKHOUSE_URL = "KVCENSUS_CLICKHOUSE_URL"
CLICKHOUSE_CLUSTER = "KVCENSUS_CLICKHOUSE_CLUSTER"
DATA_DIR = "KVCENSUS_DATA_DIR"
WINDOW_SECONDS = "KVCENSUS_WINDOW_SECONDS"
KAFKA_OPTION_PREFIX = "KVCENSUS_KAFKA_"
"""``KVCENSUS_KAFKA_SASL_MECHANISM=PLAIN`` becomes the librdkafka property ``sasl.mechanism``."""

DEFAULT_WINDOW_SECONDS = 10


def data_dir(given: str | os.PathLike[str] | None = None) -> Path:
    """The data folder: ``given``, else $KVCENSUS_DATA_DIR, else ``kvcensus`` in the user's state folder. Not created."""
    if given:
        return Path(given).expanduser()
    if os.environ.get(DATA_DIR):
        return Path(os.environ[DATA_DIR]).expanduser()
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kvcensus"


def kafka_options(given: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """librdkafka properties from the environment and from ``key=value`` options (which win).

    Raises :class:`KvcensusError` for an option without ``=``.
    """
    env = os.environ if environ is None else environ
    options = {
        name.removeprefix(KAFKA_OPTION_PREFIX).lower().replace("_", "."): value
        for name, value in env.items()
        if name.startswith(KAFKA_OPTION_PREFIX)
    }
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals:
            raise KvcensusError(f"--kafka-option {pair!r}: expected KEY=VALUE, e.g. security.protocol=SASL_SSL")
        options[key.strip()] = value
    return options
