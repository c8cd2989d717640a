#!lua
-- Admit groups and move the data cursor in one transaction; the cursor's own check makes a second call change nothing.
-- KEYS: the run's keys, then for each group: group, sample...
-- ARGV: service epoch, first seq, version, cursor before, cursor after, then for each group: samples, prompt, origin
local stop = superseded_service(ARGV[1])
if stop then return stop end
local seq, cursor = tonumber(ARGV[2]), redis.call('HGET', META, 'cursor')
if cursor ~= ARGV[4] then
  return refuse('conflict', 'the data cursor is at "' .. cursor .. '", not at "' .. ARGV[4] .. '": go on from there')
end
if number(META, 'group_seq') ~= seq then return {'moved', 'other groups were admitted meanwhile: try again'} end
local key, admitted = OWN + 1, 0
for arg = 6, #ARGV, 3 do
  local count, id = tonumber(ARGV[arg]), group_id(seq + admitted)
  redis.call('HSET', KEYS[key], 'seq', seq + admitted, 'num_samples', count, 'admitted_version', ARGV[3],
    'prompt', ARGV[arg + 1], 'origin', ARGV[arg + 2])
  for index = 0, count - 1 do
    redis.call('HSET', KEYS[key + 1 + index], 'state', 'queued', 'num_tokens', 0, 'attempt', 0)
    redis.call('ZADD', IN_STATE.queued, 0, sample_id(id, index))
  end
  redis.call('HSET', GROUPS, id, 'open')
  key, admitted = key + 1 + count, admitted + 1
end
redis.call('HSET', META, 'cursor', ARGV[5], 'group_seq', seq + admitted)
redis.call('HINCRBY', LEDGER, 'admitted', admitted)
redis.call('HINCRBY', LEDGER, 'open', admitted)
return {'ok'}
