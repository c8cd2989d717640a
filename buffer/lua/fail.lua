#!lua flags=allow-oom
-- FINISHED or RUNNING becomes FAILED; its group goes on, is READY or DROPPED. The same reason again changes nothing.
-- KEYS: the run's keys, group, then for each of its samples: sample, tokens
-- ARGV: service epoch, group id, index, sample id, min scored, reason, error
-- Replies with the group's state.
local group, sample = KEYS[OWN + 1], KEYS[OWN + 2 + 2 * tonumber(ARGV[3])]
local stop = superseded_service(ARGV[1])
if stop then return stop end
local known = redis.call('HMGET', sample, 'state', 'fail_reason')
if not known[1] then return refuse('missing', 'there is no sample ' .. ARGV[4] .. ': its group is gone') end
if known[1] == 'failed' and known[2] == ARGV[6] then return {'ok', redis.call('HGET', GROUPS, ARGV[2])} end
if known[1] ~= 'finished' and known[1] ~= 'running' then
  return no_transition('sample', ARGV[4], known[1], 'failed')
end
redis.call('HSET', group, 'min_scored', ARGV[5])
fail_sample(group, sample, ARGV[4], ARGV[6], ARGV[7])
return {'ok', settle(ARGV[2])}
