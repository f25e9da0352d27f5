"""``kvcensus demo``: the whole pipeline on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import click

from console.number_options import FiniteRange
from console.option_types import Folder
from schemas import environment
from schemas.errors import KvcensusError

_SHORTEST, _LONGEST = 15.0, 3_600.0


@click.command()
@click.option("--once", is_flag=True, help="A finite run: ends by itself once everything is counted, within a minute.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print one JSON document with the figures, and nothing else.")
@click.option(
    "--seconds",
    type=FiniteRange(_SHORTEST, _LONGEST),
    default=20.0,
    show_default=True,
    help="With --once: engine time to run. Less than 15 s would not show every cause.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=None, help="Seed of the simulated fleet.  [default: 7]")
@click.option(
    "--broker",
    type=click.Choice(["tansu", "noida"]),
    default=None,
    envvar="KVCENSUS_BROKER",
    show_envvar=True,
    help="Embedded broker.  [default: tansu]",
)
@click.option(
    "--data-dir",
    type=Folder(),
    envvar=environment.DATA_DIR,
    show_envvar=True,
    help="Data folder; the demo keeps its own files in `demo` there.  [default: kvcensus in your state folder]",
)
@click.pass_context
def demo(
    context: click.Context, once: bool, as_json: bool, seconds: float, seed: int | None, broker: str | None, data_dir: Path | None
) -> None:
    """Run the whole pipeline on this machine and watch the figures settle.

    Starts an embedded Kafka-protocol broker, a worker with its embedded ClickHouse, simulated vLLM engines and one forwarder for
    each engine rank: processes of their own, as in production, on free ports of the loopback interface. The fleet is four
    instances (one of them data parallel) with shared prompts, cache pressure, flushes, restarts and cache salts; beside them
    runs what two real vLLM engines were recorded to publish.

    The two numbers are shown as they settle: repeat compute by cause, and the duplicate KV footprint inside and between
    instances. A figure is settled where its windows are closed, and provisional from there on. Ctrl-C ends it; the load ends after
    an hour by itself (the broker keeps everything in memory), and then the figures stay on the screen.

    Beside a running demo, in another terminal:

    \b
      kvcensus show                    the figures
      kvcensus show repeat-compute --by workload
      kvcensus sql "SELECT cause, count() FROM recomputes GROUP BY cause"

    Each demo starts empty. Its figures stay in the data folder until the next one: kvcensus show --data-dir DATA_DIR/demo

    With --once it is a check: exit code 0 only if every batch that was published has been counted, nothing was lost, and no
    figure is zero.
    """
    if as_json and not once:
        raise click.UsageError("--json goes with --once: a demo that goes on prints no document (see `kvcensus show --json`)")
    if not once and context.get_parameter_source("seconds") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--seconds goes with --once")
    # Only now: what follows takes a second to import, and --help or a mistake in the options should not.
    from console.broker import BrokerKind  # noqa: PLC0415
    from console.demo import pipeline, run  # noqa: PLC0415
    from producers.simulate.presets import DEMO_SEED  # noqa: PLC0415

    options = run.Options(environment.data_dir(data_dir), DEMO_SEED if seed is None else seed, cast("BrokerKind | None", broker))
    if not once:
        run.run_live(options)
        return
    try:
        document, failures = run.run_once(options, seconds)
    except pipeline.Interrupted:
        raise click.Abort from None
    if as_json:
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        from console.figure_tables import console_for_output, render  # noqa: PLC0415

        render(document, "all", console_for_output())
    if failures:
        raise KvcensusError(f"not everything is as it should be: {'; '.join(failures)}")
