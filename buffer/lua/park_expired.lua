#!lua flags=allow-oom
-- RUNNING samples whose lease expired and was not renewed are set aside; what their owner still sends is refused.
-- KEYS: the run's keys, sample...
-- ARGV: service epoch, nonce, sample id...
-- Replies with the ids of those that were set aside.
local stop = superseded_service(ARGV[1]) or replayed(ARGV[2])
if stop then return stop end
local now, reply = now_ms(), {'ok'}
for i = 3, #ARGV do
  local sample = KEYS[OWN + i - 2]
  if expired(ARGV[i], now) then
    set_aside(sample, ARGV[i])
    redis.call('HSET', sample, 'worker', '')
    count_expiry(sample)
    reply[#reply + 1] = ARGV[i]
  end
end
return #reply > 1 and remember(ARGV[2], reply) or reply
