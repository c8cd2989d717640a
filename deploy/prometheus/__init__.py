"""Prometheus: its configuration, alert rules with their tests, and the reference page of all metrics."""
