#!lua flags=allow-oom
-- Samples that ran under an older service epoch are set aside and their leases are lost.
-- KEYS: the run's keys, sample...
-- ARGV: service epoch, sample id...
local stop = superseded_service(ARGV[1])
if stop then return stop end
for i = 2, #ARGV do
  local sample = KEYS[OWN + i - 1]
  if redis.call('HGET', sample, 'state') == 'running' then
    set_aside(sample, ARGV[i])
    redis.call('HSET', sample, 'worker', '')
  end
end
return {'ok'}
