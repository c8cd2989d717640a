-- Capacity that groups hold from their admission until they are trained, or dropped: groups, and bytes at the worst.
local function hold(groups, bytes)
  redis.call('HINCRBY', META, 'held_groups', groups)
  redis.call('HINCRBY', META, 'held_bytes', string.format('%.0f', bytes + 0)) -- no "-0"
end

-- The refusal of an admission that would hold more than the caps; 0 bytes is no cap.
local function no_room(groups, bytes, most_groups, most_bytes)
  local held_groups, held_bytes = number(META, 'held_groups'), number(META, 'held_bytes')
  if groups > 0 and held_groups + groups > most_groups then
    return refuse('full', held_groups .. ' groups are not trained yet, ' .. groups .. ' more would pass ' ..
      'buffer.max_groups = ' .. most_groups .. ': train a step first, or raise it')
  end
  if bytes > 0 and most_bytes > 0 and held_bytes + bytes > most_bytes then
    return refuse('full', string.format('%.0f bytes are held by groups that are not trained yet, %.0f more would ' ..
      'pass buffer.max_bytes = %.0f: train a step first, or raise it', held_bytes, bytes, most_bytes))
  end
end

-- Steps up to this one are trained and no later one is: capacity is freed, or held again when a trainer rolled back.
local function set_trained(step)
  local old = number(META, 'trained_step')
  for s = math.min(old, step) + 1, math.min(math.max(old, step), number(META, 'leased_step')) do
    local lease = redis.call('HGET', LEASES, s)
    if lease then
      lease = cjson.decode(lease)
      local sign = step > old and -1 or 1
      hold(sign * #lease.groups, sign * lease.bytes)
    end
  end
  redis.call('HSET', META, 'trained_step', step)
end
