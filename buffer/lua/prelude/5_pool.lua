-- Samples that their groups were READY without: POOLED until their prompt comes up again. Their line in META is exact:
-- pool_entered = pool_samples + pool_continued + pool_expired:REASON over all reasons. POOLS lists them by prompt.
local POOLED_BYTES, BYTES_PER_TOKEN = 512, 8 -- of a record besides its tokens, about; of an id and its log-prob

local function count_pooled(samples, tokens)
  redis.call('HINCRBY', META, 'pool_samples', samples)
  redis.call('HINCRBY', META, 'pool_bytes', POOLED_BYTES * samples + BYTES_PER_TOKEN * tokens)
end

-- Whether a sample still takes the last tokens of whoever ran it when its group was READY.
local function takes_last(sample, state)
  return state == 'pooled' and redis.call('HEXISTS', sample, 'finish_reason') == 0
end

-- POOLED samples are in order of their oldest version; those without a token come first.
local function order_pooled(sample, id)
  redis.call('ZADD', IN_STATE.pooled, redis.call('HGET', sample, 'oldest') or '-1', id)
end

-- A sample leaves its group. One that runs keeps its lease, for its last tokens; nobody else may write any more.
local function enter_pool(sample, id, prompt)
  local known = redis.call('HMGET', sample, 'state', 'num_tokens')
  move(sample, id, 'pooled')
  order_pooled(sample, id)
  redis.call('HSET', sample, 'pool', prompt)
  if known[1] ~= 'running' then redis.call('HSET', sample, 'worker', '') end
  local ids = redis.call('HGET', POOLS, prompt)
  redis.call('HSET', POOLS, prompt, ids and ids .. ' ' .. id or id)
  redis.call('HINCRBY', META, 'pool_entered', 1)
  count_pooled(1, tonumber(known[2]))
end

-- The tokens of a sample that has left its group.
local function extend_pooled(sample, tokens, id, piece)
  extend(sample, tokens, nil, piece)
  order_pooled(sample, id)
  count_pooled(0, piece.count)
  redis.call('HINCRBY', COUNTERS, 'raced_tokens_left', piece.count)
end
