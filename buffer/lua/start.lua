#!lua flags=allow-oom
-- QUEUED or PARKED samples become RUNNING, leased to a worker; so does a RUNNING one whose lease has expired.
-- KEYS: the run's keys, sample...
-- ARGV: service epoch, nonce, worker, lease in ms, sample id...
-- Replies with the attempt of each.
local stop = superseded_service(ARGV[1]) or replayed(ARGV[2])
if stop then return stop end
local now, reply = now_ms(), {'ok'}
for i = 5, #ARGV do
  local state = redis.call('HGET', KEYS[OWN + i - 4], 'state')
  if not state or state == 'pooled' then
    return refuse('missing', 'there is no sample ' .. ARGV[i] .. ': list the open samples again')
  end
  if state ~= 'queued' and state ~= 'parked' and not expired(ARGV[i], now) then
    return no_transition('sample', ARGV[i], state, 'running')
  end
end
for i = 5, #ARGV do
  local sample, id = KEYS[OWN + i - 4], ARGV[i]
  if redis.call('HGET', sample, 'state') == 'running' then count_expiry(sample) end
  if number(sample, 'num_tokens') > 0 then
    redis.call('HINCRBY', COUNTERS, 'resumes', 1)
    if redis.call('HINCRBY', sample, 'resumes', 1) == 1 then redis.call('HINCRBY', COUNTERS, 'samples_resumed', 1) end
  end
  move(sample, id, 'running', string.format('%.0f', now + tonumber(ARGV[4])))
  redis.call('HSET', sample, 'worker', ARGV[3])
  reply[#reply + 1] = redis.call('HINCRBY', sample, 'attempt', 1)
end
return remember(ARGV[2], reply)
