"""``kvcensus show coverage``: how far everything was observed, and every reason for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from console.coverage_tables import render_coverage
from console.figure_tables import console_for_output
from sql import store
from sql.database import StoreError
from sql.observation import Observation
from sql.observation_document import coverage_document
from sql.observation_load import load_observation


def show_coverage(
    figures: dict[str, Any],
    nothing: str | None,
    clickhouse_url: str | None,
    data_dir: Path,
    since_us: int | None,
    until_us: int | None,
    *,
    as_json: bool,
) -> None:
    """Print the coverage beside ``figures``, a document of the same span; ``nothing`` says why that is empty.

    Forwarders may be heard of where nothing was counted yet. Raises :class:`StoreError`.
    """
    observation = _observation(clickhouse_url, data_dir, since_us, until_us, figures["semantics_version"])
    document = coverage_document(figures, observation)
    if as_json:
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    elif nothing and not document["ranks"] and not document["dead_letters"]["found"]:
        click.echo(nothing)
    else:
        render_coverage(document, console_for_output())


def _observation(
    clickhouse_url: str | None, data_dir: Path, since_us: int | None, until_us: int | None, semantics_version: int | None
) -> Observation:
    if not store.exists(clickhouse_url, data_dir):
        return Observation()
    with store.connect(clickhouse_url, data_dir) as database:
        try:
            return load_observation(database, since_us, until_us, semantics_version=semantics_version)
        except StoreError as error:
            if not error.schema_missing:
                raise
            return Observation()
