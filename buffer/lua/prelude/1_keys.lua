-- The run's keys, the first ones of every script (RUN_KEYS in buffer/keys.py has the same order).
local META, LEDGER, COUNTERS, DROPPED = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local GROUPS, READY, LEASES, SPOOLS = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local TOMBSTONES, TOMBSTONE_ORDER, POLICIES, CHANGES = KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local SIZES, REPEATS, REPEAT_ORDER, POOLS = KEYS[13], KEYS[14], KEYS[15], KEYS[16]
local IN_STATE = {queued = KEYS[17], running = KEYS[18], parked = KEYS[19],
  finished = KEYS[20], scored = KEYS[21], failed = KEYS[22], pooled = KEYS[23]}
local OWN = 23 -- what a script has besides is KEYS[OWN + 1] and on

local function number(key, field)
  return tonumber(redis.call('HGET', key, field) or '0')
end

local function group_id(seq)
  return string.format('g%09d', seq)
end

local function sample_id(group, index)
  return string.format('%s.%03d', group, index)
end

-- Milliseconds of Redis' own clock, so that leases do not depend on a worker's.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
