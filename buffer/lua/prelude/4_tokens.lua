-- Tokens of a sample: a list of pieces that only grows.
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

-- The record, of a sample or a group, has tokens of these versions.
local function age(record, oldest, newest)
  local known = redis.call('HMGET', record, 'oldest', 'newest')
  if oldest < (tonumber(known[1]) or math.huge) then redis.call('HSET', record, 'oldest', oldest) end
  if newest > (tonumber(known[2]) or -1) then redis.call('HSET', record, 'newest', newest) end
end

local function extend(sample, tokens, group, piece)
  if piece.count == 0 then return end
  redis.call('RPUSH', tokens, piece.bytes)
  redis.call('HINCRBY', sample, 'num_tokens', piece.count)
  redis.call('HINCRBY', COUNTERS, 'tokens_appended', piece.count)
  for _, record in ipairs({sample, group}) do age(record, piece.version, piece.version) end
end
