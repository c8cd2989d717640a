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

-- Whether these very bytes were the last that were appended: a call that is sent again changes nothing.
local function repeated(sample, tokens, piece)
  return piece.count > 0 and number(sample, 'num_tokens') == piece.start + piece.count
    and redis.call('LINDEX', tokens, -1) == piece.bytes
end

local function misfit(sample, id, piece)
  local stored = number(sample, 'num_tokens')
  if piece.start and piece.start ~= stored then
    return refuse('length', 'sample ' .. id .. ' has ' .. stored .. ' tokens, the piece starts at ' .. piece.start ..
      ': read the sample again and append what follows')
  end
end

local function extend(sample, tokens, group, piece)
  if piece.count == 0 then return end
  redis.call('RPUSH', tokens, piece.bytes)
  redis.call('HINCRBY', sample, 'num_tokens', piece.count)
  redis.call('HINCRBY', COUNTERS, 'tokens_appended', piece.count)
  for _, record in ipairs({sample, group}) do
    local known = redis.call('HMGET', record, 'oldest', 'newest')
    if piece.version < (tonumber(known[1]) or math.huge) then redis.call('HSET', record, 'oldest', piece.version) end
    if piece.version > (tonumber(known[2]) or -1) then redis.call('HSET', record, 'newest', piece.version) end
  end
end
