"""Simulated vLLM engines: their block pool, scheduler, workloads, wire format and sockets. Imports only ``schemas`` and ``producers``."""
