"""The ``kvcensus`` command: a table of subcommands, each imported only when it runs, and one place for errors."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from console.escape import escaped
from schemas.errors import KvcensusError

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("console.commands.demo:demo", "Run the whole pipeline on this machine and watch the figures settle."),
    "forward": ("console.commands.forward:forward", "Relay one engine rank's KV events into Kafka."),
    "key": ("console.commands.key:key", "Make an identity key, or show its canary."),
    "ingest": ("console.commands.ingest:ingest", "Send sealed segments from disk into Kafka."),
    "worker": ("console.commands.worker:worker", "Count: Kafka in, figures to topics and ClickHouse."),
    "simulate": ("console.commands.simulate:simulate", "Serve a capture, a trace or a synthetic fleet as vLLM would."),
    "report": ("console.commands.report:report", "The figures of capture files, without broker or database."),
    "show": ("console.commands.show:show", "Repeat compute, duplicates, ranks and coverage from ClickHouse."),
    "deploy": ("console.commands.deploy:deploy", "Declare deploys, and list them."),
    "reclassify": ("console.commands.reclassify:reclassify", "Count stored facts again by the present rules."),
    "rollup": ("console.commands.rollup:rollup", "Roll windows up to 5 minutes, 1 hour and 1 day."),
    "sql": ("console.commands.sql:sql", "Run one query on the figures' tables and views."),
    "export": ("console.commands.export:export", "Write tables and views as Parquet, one file a day."),
    "migrate": ("console.commands.migrate:migrate", "Create or update the ClickHouse schema."),
    "topics": ("console.commands.topics:topics", "Create or check the Kafka topics."),
}


class LazyGroup(click.Group):
    """A group whose commands live in modules that are imported only when one is asked for: ``--help`` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now; ``None`` if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command table, written without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvcensus")
def cli() -> None:
    """What a fleet of vLLM engines holds in its KV caches, and what it paid for twice."""


def main() -> None:
    """Entry point: errors a user can cause are one line on stderr; exit 2 for usage, 1 for failure, 130 for Ctrl-C."""
    for name in ("stdout", "stderr"):  # closed by the caller: Python then has none at all
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        code = 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.UsageError as error:
        # The parser itself does not say which command it was at.
        at = error.ctx.command_path if error.ctx else " ".join(["kvcensus", *(word for word in sys.argv[1:2] if word in COMMANDS)])
        click.echo(f"{at}: {' '.join(error.format_message().split())} (see `{at} -h`)", err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except KvcensusError as error:
        click.echo(f"kvcensus: {escaped(str(error))}", err=True)
        code = 1
    except BrokenPipeError:
        sys.stderr.close()
        code = 1
    except OSError as error:
        if error.filename is not None:  # a file that no command looked after: not the output
            raise
        # Standard output is full or closed. Its buffer would fail again when the interpreter flushes it at the end.
        with suppress(OSError):
            click.echo(f"kvcensus: cannot write the output: {error.strerror or error}", err=True)
        sys.stdout = None
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
