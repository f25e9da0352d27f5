"""Numbers on the command line."""

from __future__ import annotations

import math

import click


class FiniteRange(click.FloatRange):
    """A range of floats without ``nan`` and ``inf``, which :class:`click.FloatRange` lets through."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, once it is seen to be one."""
        try:
            number = float(super().convert(value, param, ctx))
        except OverflowError:  # an integer beyond every float
            number = math.inf
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number
