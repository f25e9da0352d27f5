"""``kvcensus key``: make an identity key, and show what may be seen of one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from producers.identity import MAX_EPOCH, create_key, load_key

_FILE = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))


@click.group()
def key() -> None:
    """The key that makes ids comparable: one file, shared by all forwarders of a fleet, kept secret."""


@key.command()
@_FILE
def create(file: Path) -> None:
    """Write a new random key to FILE, 64 bytes, mode 0600. Never replaces a file."""
    made = create_key(file)
    click.echo(f"{file}: a new identity key, canary {made.canary} in epoch {made.epoch}; copy it to every host of the fleet, mode 0600")


@key.command()
@_FILE
@click.option("--epoch", type=click.IntRange(0, MAX_EPOCH), default=0, show_default=True, help="Epoch to show the canary of.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def show(file: Path, epoch: int, as_json: bool) -> None:
    """Show the canary of the key in FILE: equal canaries mean the same key and epoch. Nothing secret is shown."""
    loaded = load_key(file, epoch)
    if as_json:
        click.echo(json.dumps({"file": str(file), "epoch": loaded.epoch, "canary": loaded.canary}, indent=2))
    else:
        click.echo(f"{file}: canary {loaded.canary} in epoch {loaded.epoch}")
