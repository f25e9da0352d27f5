"""Tests of everything; ``pytest`` in the project's root runs them all."""
