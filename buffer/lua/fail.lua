#!lua flags=allow-oom
-- FINISHED or RUNNING becomes FAILED; its group goes on, is READY or DROPPED. The same reason again changes nothing.
-- KEYS: the run's keys, group, then for each of its samples: sample, tokens
-- ARGV: service epoch, nonce, group id, index, sample id, min scored, reason, error
-- Replies with the group's state.
local group, sample = KEYS[OWN + 1], KEYS[OWN + 2 + 2 * tonumber(ARGV[4])]
local stop = superseded_service(ARGV[1]) or replayed(ARGV[2])
if stop then return stop end
local known = redis.call('HMGET', sample, 'state', 'fail_reason')
if not known[1] or known[1] == 'pooled' then
  return refuse('missing', 'there is no sample ' .. ARGV[5] .. ' in its group: the group is gone, or READY without it')
end
if known[1] == 'failed' and known[2] == ARGV[7] then return {'ok', redis.call('HGET', GROUPS, ARGV[3])} end
if known[1] ~= 'finished' and known[1] ~= 'running' then
  return no_transition('sample', ARGV[5], known[1], 'failed')
end
redis.call('HSET', group, 'min_scored', ARGV[6])
fail_sample(group, sample, ARGV[5], ARGV[7], ARGV[8])
return settled(ARGV[2], ARGV[3])
