#!lua flags=allow-oom
-- Move a policy version on; ACTIVE supersedes the one that was active.
-- KEYS: the run's keys
-- ARGV: service epoch, version, state, outcome (JSON with error and install_s)
local stop = superseded_service(ARGV[1])
if stop then return stop end
if redis.call('HEXISTS', POLICIES, ARGV[2]) == 0 then
  return refuse('missing', 'there is no policy version ' .. ARGV[2] .. ': publish it first')
end
local active = redis.call('HGET', META, 'active_version') or '0'
if ARGV[3] == 'active' and active ~= ARGV[2] then
  if redis.call('HEXISTS', POLICIES, active) == 1 then
    redis.call('HSET', POLICIES, active .. ':state', 'superseded')
  end
  redis.call('HSET', META, 'active_version', ARGV[2])
end
redis.call('HSET', POLICIES, ARGV[2] .. ':state', ARGV[3], ARGV[2] .. ':outcome', ARGV[4])
return {'ok'}
