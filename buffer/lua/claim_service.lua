#!lua flags=allow-oom
-- Become the run's service: every older epoch is fenced from now on.
-- KEYS: the run's keys
-- ARGV: service id
local epoch = redis.call('HINCRBY', META, 'service_epoch', 1)
redis.call('HSET', META, 'service_id', ARGV[1])
return {'ok', epoch}
