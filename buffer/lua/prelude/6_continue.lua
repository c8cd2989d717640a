-- What becomes of POOLED samples.
local function leave_pool(sample, id, outcome)
  local known, left = redis.call('HMGET', sample, 'pool', 'num_tokens'), {}
  for other in redis.call('HGET', POOLS, known[1]):gmatch('%S+') do
    if other ~= id then left[#left + 1] = other end
  end
  redis.call('HSET', POOLS, known[1], table.concat(left, ' '))
  if #left == 0 then redis.call('HDEL', POOLS, known[1]) end
  redis.call('ZREM', IN_STATE.pooled, id)
  redis.call('HINCRBY', META, 'pool_' .. outcome, 1)
  count_pooled(-1, -tonumber(known[2]))
end

-- Its keys start at `first`: sample and tokens. Whoever still runs it is fenced, since the record is gone.
local function expire_pooled(first, id, reason)
  leave_pool(KEYS[first], id, 'expired:' .. reason)
  redis.call('UNLINK', KEYS[first], KEYS[first + 1])
end

-- It goes on in a new group, PARKED or FINISHED. Its keys start at `first`: sample, tokens, new group, sample, tokens.
local function continue_pooled(first, id, new_id, counts_age)
  local group, sample, fields = KEYS[first + 2], KEYS[first + 3], redis.call('HGETALL', KEYS[first])
  leave_pool(KEYS[first], id, 'continued')
  for _, piece in ipairs(redis.call('LRANGE', KEYS[first + 1], 0, -1)) do
    redis.call('RPUSH', KEYS[first + 4], piece)
  end
  redis.call('HSET', sample, unpack(fields))
  redis.call('HSET', sample, 'state', 'queued', 'worker', '', 'continued_from', id)
  redis.call('HDEL', sample, 'pool')
  set_aside(sample, new_id)
  if redis.call('HEXISTS', sample, 'finish_reason') == 1 then move(sample, new_id, 'finished') end
  if counts_age then age(group, number(sample, 'oldest'), number(sample, 'newest')) end
  redis.call('UNLINK', KEYS[first], KEYS[first + 1])
end
