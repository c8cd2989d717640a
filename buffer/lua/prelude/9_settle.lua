-- What a terminal sample does to its group.
local READY_SEQS = 4294967296 -- scores are exact to 2^53: 2^32 groups in order of readiness, 2^21 versions

local function fail_sample(group, sample, id, reason, text)
  redis.call('HSET', sample, 'fail_reason', reason, 'error', text, 'worker', '')
  move(sample, id, 'failed')
  redis.call('HINCRBY', group, 'num_failed', 1)
  redis.call('HINCRBY', COUNTERS, 'samples_failed', 1)
  redis.call('HINCRBY', COUNTERS, 'failed:' .. reason, 1)
end

-- OPEN becomes READY, DROPPED, or stays; its keys start at OWN + 1. Returns the state.
local function settle(id)
  local group = KEYS[OWN + 1]
  local known = redis.call('HMGET', group, 'num_samples', 'num_failed', 'min_scored', 'num_scored', 'wanted')
  local count, failed, scored = tonumber(known[1]), tonumber(known[2] or '0'), tonumber(known[4] or '0')
  if count - failed < math.max(tonumber(known[3] or '0'), 1) then
    drop(id, OWN + 1, 'open', 'too_few_samples')
    return 'dropped'
  end
  if scored + failed < count and scored < (tonumber(known[5]) or count) then return 'open' end
  if known[5] then part(id, count) end
  local oldest = tonumber(redis.call('HGET', group, 'oldest') or redis.call('HGET', group, 'admitted_version'))
  local seq = redis.call('HINCRBY', META, 'ready_seq', 1)
  redis.call('ZADD', READY, string.format('%.0f', oldest * READY_SEQS + seq), id)
  redis.call('HSET', GROUPS, id, 'ready')
  redis.call('HINCRBY', LEDGER, 'open', -1)
  redis.call('HINCRBY', LEDGER, 'ready', 1)
  return 'ready'
end

-- `settle` as a reply. A group that it dropped is gone, so that only the nonce can tell a repeated call what it did.
local function settled(nonce, id)
  local reply = {'ok', settle(id)}
  return reply[2] == 'dropped' and remember(nonce, reply) or reply
end
