-- A new group, whose keys start at `key` and which is described from ARGV[arg] on. Returns where the next one's start.
local function admit_group(key, seq, arg, sample_bytes)
  local count, id = tonumber(ARGV[arg]), group_id(seq)
  redis.call('HSET', KEYS[key], 'seq', seq, 'num_samples', count, 'admitted_version', ARGV[4],
    'prompt', ARGV[arg + 2], 'origin', ARGV[arg + 3])
  if ARGV[arg + 1] ~= '' then redis.call('HSET', KEYS[key], 'wanted', ARGV[arg + 1]) end
  for index = 0, count - 1 do
    redis.call('HSET', KEYS[key + 1 + index], 'state', 'queued', 'num_tokens', 0, 'attempt', 0)
    redis.call('ZADD', IN_STATE.queued, 0, sample_id(id, index))
  end
  redis.call('HSET', GROUPS, id, 'open')
  redis.call('HSET', SIZES, id, string.format('%.0f', count * sample_bytes))
  return key + 1 + count
end

-- Whether one of the samples that are to go on, named in every third of ARGV from `first` on, is POOLED no more.
local function gone(first)
  for arg = first, #ARGV, 3 do
    if not redis.call('ZSCORE', IN_STATE.pooled, ARGV[arg]) then return true end
  end
  return false
end
