#!lua flags=allow-oom
-- The encoded batch of a step is on disk: keep its digest, delete its samples' tokens.
-- KEYS: the run's keys, tokens...
-- ARGV: service epoch, step, sha256
local stop = superseded_service(ARGV[1])
if stop then return stop end
if redis.call('HEXISTS', LEASES, ARGV[2]) == 0 then
  return refuse('missing', 'step ' .. ARGV[2] .. ' has no lease: lease it first')
end
local sha256 = redis.call('HGET', SPOOLS, ARGV[2])
if sha256 and sha256 ~= ARGV[3] then
  return refuse('conflict', 'step ' .. ARGV[2] .. ' was spooled as ' .. sha256 .. ': serve those bytes')
end
redis.call('HSET', SPOOLS, ARGV[2], ARGV[3])
for i = OWN + 1, #KEYS do redis.call('UNLINK', KEYS[i]) end
return {'ok'}
