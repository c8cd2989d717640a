#!lua flags=allow-oom
-- Become the run's service: every older epoch is fenced from now on. What the run is, and isn't stored yet, is stored.
-- KEYS: the run's keys
-- ARGV: service id, nonce, the highest service and trainer epoch known elsewhere, then names and values of the identity
-- Replies with the service epoch and the trainer epoch. New ones begin above those that are known elsewhere: the ones
-- that an emptied Redis gave out must not be given out again, and nobody may hold the trainer epoch that is set here.
local before = replayed(ARGV[2])
if before then return before end
for i = 5, #ARGV, 2 do
  local known = redis.call('HGET', META, 'identity:' .. ARGV[i])
  if known and known ~= ARGV[i + 1] then
    return refuse('identity', 'the buffer holds a run with ' .. ARGV[i] .. ' = ' .. known .. ' and this one has ' ..
      ARGV[i + 1] .. ", so its unfinished samples can't be continued; set another run.dir and run.name")
  end
end
for i = 5, #ARGV, 2 do redis.call('HSET', META, 'identity:' .. ARGV[i], ARGV[i + 1]) end
local epoch = math.max(number(META, 'service_epoch'), tonumber(ARGV[3])) + 1
local trainer, highest = number(META, 'trainer_epoch'), tonumber(ARGV[4])
if trainer < highest then trainer = highest + 1 end
redis.call('HSET', META, 'service_epoch', epoch, 'service_id', ARGV[1], 'trainer_epoch', trainer)
return remember(ARGV[2], {'ok', epoch, trainer})
