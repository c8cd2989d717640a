-- Who may write: nil, or the refusal to return before the first write. An epoch above the newest is a lost buffer's.
local function refuse(tag, sentence)
  if tag == 'fenced' then redis.call('HINCRBY', COUNTERS, 'fenced_writes', 1) end
  return {tag, sentence}
end

local function lost_buffer(who, epoch, current)
  return refuse('fenced', who .. ' epoch ' .. epoch .. ' was not given out by this buffer, which has come to ' ..
    current .. ': was it emptied or set back? Stop this ' .. who .. ', and see what is gone before you go on')
end

local function superseded_service(epoch)
  local current = number(META, 'service_epoch')
  if tonumber(epoch) > current then return lost_buffer('service', epoch, current) end
  if tonumber(epoch) ~= current then
    return refuse('fenced', 'service epoch ' .. epoch .. ' does not own this run, epoch ' .. current ..
      ' does: stop this service, or claim the run again')
  end
end

local function superseded_trainer(epoch)
  local current = number(META, 'trainer_epoch')
  if tonumber(epoch) > current then return lost_buffer('trainer', epoch, current) end
  if tonumber(epoch) ~= current then
    return refuse('fenced', 'trainer epoch ' .. epoch .. ' was superseded by epoch ' .. current ..
      ': stop this trainer, or open a new session')
  end
end

local function lost_lease(sample, id, worker, attempt)
  local held = redis.call('HMGET', sample, 'worker', 'attempt')
  if held[1] ~= worker or held[2] ~= attempt then
    return refuse('fenced', 'attempt ' .. attempt .. ' of ' .. worker .. ' no longer holds sample ' .. id ..
      ': stop generating it')
  end
end

local function no_transition(what, id, state, wanted)
  return refuse('transition', what .. ' ' .. id .. ' is ' .. state .. " and can't become " .. wanted)
end
