-- Moves of one sample. A sample's state is in its record and, the same, in the one sorted set that holds its id.
local function move(sample, id, state, score)
  local old = redis.call('HGET', sample, 'state')
  if old ~= state then redis.call('ZREM', IN_STATE[old], id) end
  redis.call('ZADD', IN_STATE[state], score or '0', id)
  redis.call('HSET', sample, 'state', state)
end

-- RUNNING becomes PARKED, in order of its oldest version, or QUEUED if it has no token.
local function set_aside(sample, id)
  local oldest = redis.call('HGET', sample, 'oldest')
  move(sample, id, oldest and 'parked' or 'queued', oldest)
  redis.call('HSET', sample, 'aside', string.format('%.0f', now_ms()))
end
