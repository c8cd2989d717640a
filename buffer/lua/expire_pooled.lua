#!lua flags=allow-oom
-- POOLED samples are given up; those that are POOLED no more are left alone, so the same call again changes nothing.
-- KEYS: the run's keys, then for each sample: sample, tokens
-- ARGV: service epoch, reason (a sample without a token is "empty" whatever it says), sample id...
local stop = superseded_service(ARGV[1])
if stop then return stop end
for i = 3, #ARGV do
  local sample = KEYS[OWN + 2 * i - 5]
  if redis.call('HGET', sample, 'state') == 'pooled' then
    local empty = number(sample, 'num_tokens') == 0
    expire_pooled(OWN + 2 * i - 5, ARGV[i], empty and 'empty' or ARGV[2])
  end
end
return {'ok'}
