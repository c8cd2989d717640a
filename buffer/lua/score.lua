#!lua flags=allow-oom
-- FINISHED becomes SCORED, and the group READY or DROPPED with its last sample; the same reward again changes nothing.
-- KEYS: the run's keys, group, then for each of its samples: sample, tokens
-- ARGV: service epoch, nonce, group id, index, sample id, min scored, reward
-- Replies with the group's state.
local group, sample = KEYS[OWN + 1], KEYS[OWN + 2 + 2 * tonumber(ARGV[4])]
local stop = superseded_service(ARGV[1]) or replayed(ARGV[2])
if stop then return stop end
local known = redis.call('HMGET', sample, 'state', 'reward', 'oldest', 'newest')
if not known[1] or known[1] == 'pooled' then
  return refuse('missing', 'there is no sample ' .. ARGV[5] .. ' in its group: the group is gone, or READY without it')
end
if known[1] == 'scored' and known[2] == ARGV[7] then return {'ok', redis.call('HGET', GROUPS, ARGV[3])} end
if known[1] ~= 'finished' then return no_transition('sample', ARGV[5], known[1], 'scored') end
redis.call('HSET', sample, 'reward', ARGV[7])
move(sample, ARGV[5], 'scored')
redis.call('HSET', group, 'min_scored', ARGV[6])
redis.call('HINCRBY', group, 'num_scored', 1)
redis.call('HINCRBY', COUNTERS, 'samples_scored', 1)
if known[3] ~= known[4] then redis.call('HINCRBY', COUNTERS, 'samples_multi_version', 1) end
return settled(ARGV[2], ARGV[3])
