-- What an acknowledged step does to its groups.
-- LEASED becomes CONSUMED for the groups named from ARGV[first] on; then the steps up to `step` are durable.
local function release(step, first)
  local key = OWN + 1
  for arg = first, #ARGV do key = key + forget(ARGV[arg], key) end
  redis.call('HINCRBY', LEDGER, 'leased', first - #ARGV - 1)
  redis.call('HINCRBY', LEDGER, 'consumed', #ARGV - first + 1)
  for done = number(META, 'durable_step') + 1, math.min(step, number(META, 'leased_step')) do
    for _, record in ipairs({LEASES, SPOOLS}) do redis.call('HDEL', record, done) end
  end
  redis.call('HSET', META, 'durable_step', step)
end
