#!lua flags=allow-oom
-- The batch of a step: READY groups, oldest version first, become LEASED, once; afterwards the same answer for ever.
-- KEYS: the run's keys
-- ARGV: service epoch, trainer epoch, step, num groups
-- Replies with the lease as JSON, its digest or "", the last trained step; with nothing if no batch is offered.
local stop = superseded_service(ARGV[1]) or superseded_trainer(ARGV[2])
if stop then return stop end
local step, size = tonumber(ARGV[3]), tonumber(ARGV[4])
local lease, trained = redis.call('HGET', LEASES, step), number(META, 'trained_step')
if lease then return {'ok', lease, redis.call('HGET', SPOOLS, step) or '', trained} end
local durable, last = number(META, 'durable_step'), number(META, 'leased_step')
if step <= durable then
  return refuse('conflict', 'step ' .. step .. ' is durable since step ' .. durable .. ': ask for ' .. last + 1)
end
if step ~= last + 1 then
  return refuse('conflict', 'the last leased step is ' .. last .. ': ask for step ' .. last + 1 .. ', not ' .. step)
end
if number(META, 'offered') == 0 or redis.call('ZCARD', READY) < size then return {'ok'} end
local ids, bytes = redis.call('ZRANGE', READY, 0, size - 1), 0
redis.call('ZREMRANGEBYRANK', READY, 0, size - 1)
for _, id in ipairs(ids) do
  redis.call('HSET', GROUPS, id, 'leased:' .. step)
  bytes = bytes + number(SIZES, id)
end
redis.call('HINCRBY', LEDGER, 'ready', -size)
redis.call('HINCRBY', LEDGER, 'leased', size)
-- The trainer holds the newest published version, and one more for each leased step that is still to be trained.
local known = math.max(number(META, 'newest_step'), trained)
local version = number(META, 'newest_version') + math.max(step - 1 - known, 0)
lease = cjson.encode({groups = ids, policy_version = version, bytes = bytes})
redis.call('HSET', LEASES, step, lease)
redis.call('HSET', META, 'leased_step', step)
redis.call('HINCRBY', META, 'offered', -1)
withdraw()
return {'ok', lease, '', trained}
