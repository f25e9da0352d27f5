"""The one base of errors that a user can cause; the command line prints them as a line and exits with 1."""

from __future__ import annotations


class KvcensusError(Exception):
    """What went wrong, where, and what to do, in one line. Never a traceback for the user."""
