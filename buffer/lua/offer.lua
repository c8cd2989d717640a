#!lua flags=allow-oom
-- Offer one more batch if READY groups that no offer speaks for are enough.
-- KEYS: the run's keys
-- ARGV: service epoch, nonce, num groups
-- Replies 1 if it did, else 0.
local stop = superseded_service(ARGV[1]) or replayed(ARGV[2])
if stop then return stop end
local size, offered = tonumber(ARGV[3]), number(META, 'offered')
local spoken_for = offered * math.max(number(META, 'offer_size'), size)
local surplus = redis.call('ZCARD', READY) - spoken_for - size
if surplus < 0 then return {'ok', 0} end
redis.call('HSET', META, 'offered', offered + 1, 'offer_size', size)
if surplus > 0 then redis.call('HINCRBY', COUNTERS, 'surplus_groups_kept', surplus) end
return remember(ARGV[2], {'ok', 1})
