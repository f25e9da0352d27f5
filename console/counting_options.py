"""Options of every command that counts, now or again: the bounds of the counting cores, with a worker's variables and defaults."""

from __future__ import annotations

import click

from console.number_options import FiniteRange
from console.option_groups import C, with_options
from streams import settings

_BOUNDS = (
    click.option(
        "--grace",
        type=FiniteRange(min=0, max=settings.MOST_GRACE_SECONDS),
        envvar=settings.GRACE_SECONDS,
        default=settings.DEFAULT_GRACE_SECONDS,
        show_default=True,
        metavar="SECONDS",
        help="How far every rank must be past the end of a window, in engine time, before it is final.",
    ),
    click.option(
        "--history-hours",
        type=FiniteRange(min=0, max=settings.MOST_HISTORY_HOURS),
        envvar=settings.HISTORY_HOURS,
        default=settings.DEFAULT_HISTORY_HOURS,
        show_default=True,
        metavar="HOURS",
        help="How long a lost block is remembered, in engine time, so that its return is recognised.",
    ),
    click.option(
        "--history-blocks",
        type=click.IntRange(min=0, max=settings.MOST_HISTORY_BLOCKS),
        envvar=settings.HISTORY_BLOCKS,
        default=settings.DEFAULT_HISTORY_BLOCKS,
        show_default=True,
        metavar="N",
        help="How many lost blocks are remembered per rank.",
    ),
)


def counting_options(command: C) -> C:
    """Add ``--grace`` (seconds), ``--history-hours`` and ``--history-blocks``."""
    return with_options(command, _BOUNDS)
