#!lua
-- Admit groups and move the data cursor in one transaction; all of them, or none if they need more than the caps.
-- KEYS: the run's keys, then for each group: group, sample...
-- ARGV: service epoch, nonce, first seq, version, cursor before, cursor after, groups and bytes that may be held,
--   bytes that a sample may need, then for each group: samples, prompt, origin
local FIRST = 10 -- where the groups start in ARGV
local stop = superseded_service(ARGV[1]) or replayed(ARGV[2])
if stop then return stop end
local seq, cursor = tonumber(ARGV[3]), redis.call('HGET', META, 'cursor')
if cursor ~= ARGV[5] then
  return refuse('conflict', 'the data cursor is at "' .. cursor .. '", not at "' .. ARGV[5] .. '": go on from there')
end
if number(META, 'group_seq') ~= seq then return {'moved', 'other groups were admitted meanwhile: try again'} end
local groups, sample_bytes = (#ARGV - FIRST + 1) / 3, tonumber(ARGV[9])
local bytes = (#KEYS - OWN - groups) * sample_bytes
stop = no_room(groups, bytes, tonumber(ARGV[7]), tonumber(ARGV[8]))
if stop then return stop end
local key, admitted = OWN + 1, 0
for arg = FIRST, #ARGV, 3 do
  local count, id = tonumber(ARGV[arg]), group_id(seq + admitted)
  redis.call('HSET', KEYS[key], 'seq', seq + admitted, 'num_samples', count, 'admitted_version', ARGV[4],
    'prompt', ARGV[arg + 1], 'origin', ARGV[arg + 2])
  for index = 0, count - 1 do
    redis.call('HSET', KEYS[key + 1 + index], 'state', 'queued', 'num_tokens', 0, 'attempt', 0)
    redis.call('ZADD', IN_STATE.queued, 0, sample_id(id, index))
  end
  redis.call('HSET', GROUPS, id, 'open')
  redis.call('HSET', SIZES, id, string.format('%.0f', count * sample_bytes))
  key, admitted = key + 1 + count, admitted + 1
end
redis.call('HSET', META, 'cursor', ARGV[6], 'group_seq', seq + admitted)
redis.call('HINCRBY', LEDGER, 'admitted', admitted)
redis.call('HINCRBY', LEDGER, 'open', admitted)
hold(admitted, bytes)
return remember(ARGV[2], {'ok'})
