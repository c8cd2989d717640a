"""Docker Compose: Redis, service, trainer, Prometheus and Grafana on one machine."""
