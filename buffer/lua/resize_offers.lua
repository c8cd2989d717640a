#!lua flags=allow-oom
-- Batches have this many groups from now on; offers that READY groups of that size don't cover are taken back.
-- KEYS: the run's keys
-- ARGV: service epoch, num groups
-- Replies with the offers that are left.
local stop = superseded_service(ARGV[1])
if stop then return stop end
redis.call('HSET', META, 'offer_size', ARGV[2])
withdraw()
return {'ok', number(META, 'offered')}
