-- A lease that ran out by Redis' clock, and that nobody renewed.
local function expired(id, now)
  local expiry = redis.call('ZSCORE', IN_STATE.running, id)
  return expiry and tonumber(expiry) <= now
end

local function count_expiry(sample)
  redis.call('HINCRBY', sample, 'expiries', 1)
  redis.call('HINCRBY', COUNTERS, 'leases_expired', 1)
end
