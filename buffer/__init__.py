"""The continuation buffer: unfinished samples, finished groups, leases and the ledger.

Imports only `protocol`. `ContinuationBuffer` is the interface; `RedisBuffer` keeps it on Redis and is the one that the
service runs on; `MemoryBuffer` is its twin for tests and simulation and passes the same contract tests.
"""
