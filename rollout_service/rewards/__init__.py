"""Scorers, each in a worker process that can be killed."""
