"""Options of every command that stands for what an operator declares about a rank."""

from __future__ import annotations

import click

from console.number_options import FiniteRange
from console.option_groups import C, with_options
from console.option_types import GroupSize, KeyValue, Name
from console.sectioned_command import BriefOption

YEAR_SECONDS = 366 * 86_400

_IDENTITY = (
    click.option(
        "--model",
        type=Name(optional=True),
        envvar="KVCENSUS_MODEL",
        show_envvar=True,
        help="Model that is served. Part of every content id.",
    ),
    click.option("--workload", type=Name(optional=True), envvar="KVCENSUS_WORKLOAD", show_envvar=True, help="What the traffic is for."),
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
        "--kv-connector",
        type=Name(optional=True),
        envvar="KVCENSUS_KV_CONNECTOR",
        show_envvar=True,
        help="KV connector that the engine uses, if any.",
    ),
)

_PROFILE = (
    click.option(
        "--engine-profile",
        type=click.Choice(["vllm", "sglang"]),
        default="vllm",
        show_default=True,
        envvar="KVCENSUS_ENGINE_PROFILE",
        show_envvar=True,
        help="Whose dialect of the event stream the engine speaks.",
    ),
)

_COSTS = (
    click.option(
        "--gpus-per-rank",
        cls=BriefOption,
        type=FiniteRange(min=0, max=1_000_000, min_open=True),
        metavar="NUMBER",
        envvar="KVCENSUS_GPUS_PER_RANK",
        show_envvar=True,
        help="GPUs that one rank computes on (its tensor- and pipeline-parallel size).",
    ),
    click.option(
        "--kv-bytes-per-token",
        type=GroupSize(),
        multiple=True,
        metavar="SIZE",
        envvar="KVCENSUS_KV_BYTES_PER_TOKEN",
        show_envvar=True,
        help="KV cache of one token, over all tensor-parallel shards of the rank. Where cache groups differ: GROUP=SIZE, repeatable; "
        "in the variable: separated by commas.",
    ),
    click.option(
        "--prefill-rate",
        cls=BriefOption,
        type=FiniteRange(min=0, max=1e12, min_open=True),
        metavar="TOKENS/S",
        envvar="KVCENSUS_PREFILL_RATE",
        show_envvar=True,
        help="Prompt tokens that the whole rank computes in a second; recomputed tokens become GPU time by it.",
    ),
)

_SIGNS = (
    click.option(
        "--staleness-seconds",
        cls=BriefOption,
        type=FiniteRange(min=0, max=YEAR_SECONDS, min_open=True),
        metavar="SECONDS",
        default=60.0,
        show_default=True,
        envvar="KVCENSUS_STALENESS_SECONDS",
        show_envvar=True,
        help="A rank whose forwarder was not heard of for that long is no longer counted on.",
    ),
    click.option(
        "--label",
        type=KeyValue(),
        multiple=True,
        metavar="KEY=VALUE",
        envvar="KVCENSUS_LABEL",
        show_envvar=True,
        help="A free label, such as hardware=H100 or version=0.26.0; repeatable. In the variable: separated by commas.",
    ),
)


def declaration_options(command: C) -> C:
    """Add ``--model``, ``--workload``, ``--reuse-reporting``, ``--removals`` and ``--kv-connector``, each with its variable."""
    return with_options(command, _IDENTITY)


def rank_facts_options(command: C) -> C:
    """Add ``--engine-profile``, ``--gpus-per-rank``, ``--kv-bytes-per-token``, ``--prefill-rate``, ``--staleness-seconds``, ``--label``."""
    return with_options(command, (*_PROFILE, *_COSTS, *_SIGNS))


def cost_options(command: C) -> C:
    """Add ``--gpus-per-rank``, ``--kv-bytes-per-token`` and ``--prefill-rate``, each with its variable."""
    return with_options(command, _COSTS)
