-- Moves of one group. Its state is in GROUPS alone: open, ready, or leased:STEP; gone once CONSUMED or DROPPED.
local KEPT_TOMBSTONES = 1000 -- enough to ask why a recent group was dropped, about 0.2 MB

-- Deletes a group and its samples; `first` is where its keys start: group, then sample and tokens of each.
local function forget(id, first)
  local count = number(KEYS[first], 'num_samples')
  for index = 0, count - 1 do
    local sample, tokens = KEYS[first + 1 + 2 * index], KEYS[first + 2 + 2 * index]
    local state = redis.call('HGET', sample, 'state')
    if state and state ~= 'pooled' then -- others have left the group
      redis.call('ZREM', IN_STATE[state], sample_id(id, index))
      redis.call('UNLINK', sample, tokens)
    end
  end
  redis.call('UNLINK', KEYS[first])
  for _, record in ipairs({GROUPS, SIZES}) do redis.call('HDEL', record, id) end
  return 1 + 2 * count
end

-- Offers that READY groups no longer cover are taken back.
local function withdraw()
  local size = math.max(number(META, 'offer_size'), 1)
  local covered = math.floor(redis.call('ZCARD', READY) / size)
  if number(META, 'offered') > covered then redis.call('HSET', META, 'offered', covered) end
end

local function drop(id, first, state, reason)
  local record = redis.call('HMGET', KEYS[first], 'seq', 'admitted_version', 'origin')
  hold(-1, -number(SIZES, id))
  forget(id, first)
  redis.call('ZREM', READY, id)
  redis.call('HINCRBY', LEDGER, state, -1)
  redis.call('HINCRBY', LEDGER, 'dropped', 1)
  redis.call('HINCRBY', DROPPED, reason, 1)
  redis.call('HSET', TOMBSTONES, id, table.concat({reason, record[1], record[2], record[3]}, ' '))
  if redis.call('RPUSH', TOMBSTONE_ORDER, id) > KEPT_TOMBSTONES then
    redis.call('HDEL', TOMBSTONES, redis.call('LPOP', TOMBSTONE_ORDER))
  end
  withdraw()
end
