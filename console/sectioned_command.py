"""A command with many options: its help lists them under headings, and its mistakes say which variable they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

ARGUMENTS = "kvcensus.arguments"
"""Under this name, ``ctx.meta`` holds the command's own arguments as they were typed."""


class BriefOption(click.Option):
    """An option whose help leaves out the range: a bound against nonsense teaches nobody."""

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        """As click has it, without the range."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class SectionedCommand(click.Command):
    """A command whose options each also read ``PREFIX_`` + their name: said once, not with each of them.

    ``sections`` maps a heading to the names of the parameters under it, in order; what is named nowhere stands under *Other*.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections
        for parameter in self.params:
            if isinstance(parameter, click.Option):
                parameter.show_envvar = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments, and name the environment variable in what is wrong with a value of it."""
        ctx.meta[ARGUMENTS] = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            parameter = error.param
            if (
                isinstance(parameter, click.Option)
                and parameter.name is not None
                and error.param_hint is None
                and ctx.get_parameter_source(parameter.name) is ParameterSource.ENVIRONMENT
            ):
                error.param_hint = f"{parameter.get_error_hint(ctx)} (environment variable {parameter.envvar})"
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, a table for each section."""
        by_name = {parameter.name: parameter for parameter in self.get_params(ctx)}
        for heading, names in self.sections.items():
            self._write(heading, [by_name.pop(name) for name in names], ctx, formatter)
        self._write("Other", list(by_name.values()), ctx, formatter)

    @staticmethod
    def _write(heading: str, parameters: Sequence[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = [record for parameter in parameters if (record := parameter.get_help_record(ctx)) is not None]
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)
