#!lua flags=allow-oom
-- Renew the leases of running samples by Redis' clock, expired or not, unless they were taken over.
-- KEYS: the run's keys, sample...
-- ARGV: service epoch, lease in ms, then for each sample: id, worker, attempt
-- Replies with the positions (from 0) of the leases that were lost.
local stop = superseded_service(ARGV[1])
if stop then return stop end
local expiry, reply = string.format('%.0f', now_ms() + tonumber(ARGV[2])), {'ok'}
for i = 0, (#ARGV - 2) / 3 - 1 do
  local held = redis.call('HMGET', KEYS[OWN + 1 + i], 'state', 'worker', 'attempt')
  if held[1] == 'running' and held[2] == ARGV[4 + 3 * i] and held[3] == ARGV[5 + 3 * i] then
    redis.call('ZADD', IN_STATE.running, expiry, ARGV[3 + 3 * i])
  else
    reply[#reply + 1] = i
  end
end
return reply
