"""Benchmarks: each module prints a table, `python -m benchmarks.NAME`."""
