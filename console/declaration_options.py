"""Options of every command that stands for what an operator declares about a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

C = TypeVar("C", bound=Callable[..., Any])


def declaration_options(command: C) -> C:
    """Add ``--model``, ``--workload``, ``--reuse-reporting``, ``--removals`` and ``--kv-connector``, each with its variable."""
    for option in reversed(
        (
            click.option("--model", envvar="KVCENSUS_MODEL", show_envvar=True, help="Model that is served. Part of every content id."),
            click.option("--workload", envvar="KVCENSUS_WORKLOAD", show_envvar=True, help="What the traffic is for."),
            click.option(
                "--reuse-reporting",
                type=click.Choice(["none", "labelled", "unlabelled"]),
                default="unlabelled",
                show_default=True,
                envvar="KVCENSUS_REUSE_REPORTING",
                show_envvar=True,
                help="Whether the engine announces blocks it reuses as stores: never, with a mark, or perhaps and unmarked (any vLLM).",
            ),
            click.option(
                "--removals",
                type=click.Choice(["per_copy", "last_copy"]),
                default="per_copy",
                show_default=True,
                envvar="KVCENSUS_REMOVALS",
                show_envvar=True,
                help="Whether the engine publishes a removal for every physical copy of a block (vLLM) or for the last one only.",
            ),
            click.option(
                "--kv-connector", envvar="KVCENSUS_KV_CONNECTOR", show_envvar=True, help="KV connector that the engine uses, if any."
            ),
        )
    ):
        command = option(command)
    return command
