#!lua flags=allow-oom
-- Become the run's service: every older epoch is fenced from now on.
-- KEYS: the run's keys
-- ARGV: service id, nonce
-- Replies with the service epoch.
local before = replayed(ARGV[2])
if before then return before end
local epoch = redis.call('HINCRBY', META, 'service_epoch', 1)
redis.call('HSET', META, 'service_id', ARGV[1])
return remember(ARGV[2], {'ok', epoch})
