"""Sealed segments: the facts of a rank as files, written beside or instead of Kafka, and read back (docs/segments.md)."""
