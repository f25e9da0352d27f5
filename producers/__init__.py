"""Beside an engine: wire, identity, capture, forwarder and simulated engines."""
