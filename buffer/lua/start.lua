#!lua
-- QUEUED or PARKED samples become RUNNING, leased to a worker; so does a RUNNING one whose lease has expired.
-- KEYS: the run's keys, sample...
-- ARGV: service epoch, worker, lease in ms, sample id...
local stop = superseded_service(ARGV[1])
if stop then return stop end
local now, reply = now_ms(), {'ok'}
for i = 4, #ARGV do
  local state = redis.call('HGET', KEYS[OWN + i - 3], 'state')
  if not state then return refuse('missing', 'there is no sample ' .. ARGV[i] .. ': list the open samples again') end
  local expired = state == 'running' and tonumber(redis.call('ZSCORE', IN_STATE.running, ARGV[i])) <= now
  if state ~= 'queued' and state ~= 'parked' and not expired then
    return no_transition('sample', ARGV[i], state, 'running')
  end
end
for i = 4, #ARGV do
  local sample, id = KEYS[OWN + i - 3], ARGV[i]
  if redis.call('HGET', sample, 'state') == 'running' then redis.call('HINCRBY', COUNTERS, 'leases_expired', 1) end
  if number(sample, 'num_tokens') > 0 then
    redis.call('HINCRBY', COUNTERS, 'resumes', 1)
    if redis.call('HINCRBY', sample, 'resumes', 1) == 1 then redis.call('HINCRBY', COUNTERS, 'samples_resumed', 1) end
  end
  move(sample, id, 'running', string.format('%.0f', now + tonumber(ARGV[3])))
  redis.call('HSET', sample, 'worker', ARGV[2])
  reply[#reply + 1] = redis.call('HINCRBY', sample, 'attempt', 1)
end
return reply
