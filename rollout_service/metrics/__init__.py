"""Prometheus metrics of the service."""

from rollout_service.metrics.service import ServiceMetrics

__all__ = ["ServiceMetrics"]
