#!lua
-- Append to the audit record of live settings.
-- KEYS: the run's keys
-- ARGV: service epoch, nonce, change (JSON)
local KEPT_CHANGES = 1000 -- a person or a controller changes a setting a few times an hour; the oldest go
local stop = superseded_service(ARGV[1]) or replayed(ARGV[2])
if stop then return stop end
redis.call('RPUSH', CHANGES, ARGV[3])
redis.call('LTRIM', CHANGES, -KEPT_CHANGES, -1)
return remember(ARGV[2], {'ok'})
