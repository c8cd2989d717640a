"""Traces, length statistics, the simulator that runs the service's scheduler, and what to do with the ratio."""
