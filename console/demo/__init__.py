"""The demo: a broker, a worker with its ClickHouse, simulated engines and one forwarder per rank, all on this machine."""
