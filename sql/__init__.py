"""ClickHouse: migrations, the embedded store, and the queries behind every figure."""
