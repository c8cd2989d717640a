#!lua flags=allow-oom
-- Published weights get the next version, QUEUED; the same epoch and step again get theirs, QUEUED anew if it failed.
-- KEYS: the run's keys
-- ARGV: service epoch, trainer epoch, step, body (JSON with step, trainer_epoch and path)
-- Replies with the version.
local KEPT_POLICIES = 512 -- the oldest of more is forgotten, unless it is active; about 0.2 MB
local stop = superseded_service(ARGV[1]) or superseded_trainer(ARGV[2])
if stop then return stop end
local published = 'of:' .. ARGV[2] .. ':' .. ARGV[3]
local version = redis.call('HGET', POLICIES, published)
if version then
  if redis.call('HGET', POLICIES, version .. ':state') == 'failed' then
    redis.call('HSET', POLICIES, version, ARGV[4], version .. ':state', 'queued')
    redis.call('HDEL', POLICIES, version .. ':outcome')
  end
  return {'ok', tonumber(version)}
end
version = redis.call('HINCRBY', META, 'newest_version', 1)
redis.call('HSET', META, 'newest_step', ARGV[3])
redis.call('HSET', POLICIES, published, version, version, ARGV[4], version .. ':state', 'queued')
local oldest = version - KEPT_POLICIES
local body = redis.call('HGET', POLICIES, oldest)
if body and oldest ~= number(META, 'active_version') then
  local old = cjson.decode(body)
  redis.call('HDEL', POLICIES, oldest, oldest .. ':state', oldest .. ':outcome',
    'of:' .. old.trainer_epoch .. ':' .. old.step)
end
return {'ok', version}
