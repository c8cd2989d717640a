#!lua flags=allow-oom
-- A running sample failed in the engine: set aside again, or FAILED at the last allowed time. Counts once an attempt.
-- KEYS: the run's keys, group, then for each of its samples: sample, tokens
-- ARGV: service epoch, nonce, group id, index, sample id, worker, attempt, error, max failures
-- Replies with the group's state if the sample is now FAILED, else "".
local group, sample = KEYS[OWN + 1], KEYS[OWN + 2 + 2 * tonumber(ARGV[4])]
local id, attempt = ARGV[5], ARGV[7]
local stop = superseded_service(ARGV[1]) or replayed(ARGV[2])
if not stop and redis.call('HGET', sample, 'failed_attempt') == attempt then
  local failed = redis.call('HGET', sample, 'state') == 'failed'
  return {'ok', failed and redis.call('HGET', GROUPS, ARGV[3]) or ''}
end
stop = stop or lost_lease(sample, id, ARGV[6], attempt)
if stop then return stop end
local state = redis.call('HGET', sample, 'state')
if state == 'pooled' then return {'ok', ''} end -- it is in no group that could go on without it
if state ~= 'running' then return no_transition('sample', id, state, 'failed') end
local failures = redis.call('HINCRBY', sample, 'failures', 1)
redis.call('HSET', sample, 'error', ARGV[8], 'failed_attempt', attempt)
if failures < tonumber(ARGV[9]) then
  set_aside(sample, id)
  return {'ok', ''}
end
fail_sample(group, sample, id, 'engine_error', ARGV[8])
return settled(ARGV[2], ARGV[3])
