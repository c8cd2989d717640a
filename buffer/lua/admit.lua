#!lua
-- Admit groups and move the data cursor in one transaction; all of them, or none if they need more than the caps.
-- KEYS: the run's keys, then for each group: group, sample..., then for each sample that goes on (6_continue.lua): five
-- ARGV: service epoch, nonce, first seq, version, cursor before, cursor after, groups and bytes that may be held,
--   bytes that a sample may need, num groups, then for each group: samples, wanted or "", prompt, origin, then for each
--   sample that goes on: its id, its new id, 1 if its age is its group's
local FIRST, SIZE = 11, 4 -- where the groups start in ARGV, and arguments of each
local stop = superseded_service(ARGV[1]) or replayed(ARGV[2])
if stop then return stop end
local seq, cursor = tonumber(ARGV[3]), redis.call('HGET', META, 'cursor')
if cursor ~= ARGV[5] then
  return refuse('conflict', 'the data cursor is at "' .. cursor .. '", not at "' .. ARGV[5] .. '": go on from there')
end
local groups, sample_bytes = tonumber(ARGV[10]), tonumber(ARGV[9])
local more = FIRST + SIZE * groups
if number(META, 'group_seq') ~= seq or gone(more) then
  return {'moved', 'other groups were admitted meanwhile, or pooled samples left their pool: try again'}
end
local bytes = (#KEYS - OWN - groups - 5 * (#ARGV - more + 1) / 3) * sample_bytes
stop = no_room(groups, bytes, tonumber(ARGV[7]), tonumber(ARGV[8]))
if stop then return stop end
local key = OWN + 1
for n = 0, groups - 1 do key = admit_group(key, seq + n, FIRST + SIZE * n, sample_bytes) end
redis.call('HSET', META, 'cursor', ARGV[6], 'group_seq', seq + groups)
redis.call('HINCRBY', LEDGER, 'admitted', groups)
redis.call('HINCRBY', LEDGER, 'open', groups)
hold(groups, bytes)
for arg = more, #ARGV, 3 do
  continue_pooled(key, ARGV[arg], ARGV[arg + 1], ARGV[arg + 2] == '1')
  key = key + 5
end
return remember(ARGV[2], {'ok'})
