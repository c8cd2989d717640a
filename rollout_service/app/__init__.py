"""The HTTP side of the rollout service."""
