-- A group that is READY once the samples that it wanted are SCORED parts with the others.
local function count_raced(outcome, tokens)
  redis.call('HINCRBY', COUNTERS, 'raced_samples_' .. outcome, 1)
  redis.call('HINCRBY', COUNTERS, 'raced_tokens_' .. outcome, tokens)
end

-- The group's keys start at OWN + 1. What is reserved for those that leave is free again.
local function part(id, count)
  local group, left = KEYS[OWN + 1], {}
  local prompt = cjson.decode(redis.call('HGET', group, 'origin')).prompt_id
  for index = 0, count - 1 do
    local sample = KEYS[OWN + 2 + 2 * index]
    local known = redis.call('HMGET', sample, 'state', 'num_tokens')
    if known[1] == 'scored' then
      count_raced('trained', known[2])
    elseif known[1] ~= 'failed' then
      count_raced('left', known[2])
      enter_pool(sample, sample_id(id, index), prompt)
      left[#left + 1] = index
    end
  end
  if #left == 0 then return end
  local bytes = number(SIZES, id) / count * #left
  redis.call('HSET', group, 'left', table.concat(left, ' '))
  redis.call('HINCRBY', SIZES, id, string.format('%.0f', -bytes + 0))
  hold(0, -bytes)
end
