"""The Grafana dashboards, described: ``python -m infra.grafana.build`` writes them as JSON."""
