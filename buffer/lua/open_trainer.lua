#!lua flags=allow-oom
-- A new trainer session: older epochs are fenced, steps up to its checkpoint are durable, later ones are replayed.
-- KEYS: the run's keys, then for each group: group, then for each of its samples: sample, tokens
-- ARGV: service epoch, durable step of the trainer, durable and leased step as the caller read them, group id...
-- Replies with the trainer epoch.
local stop = superseded_service(ARGV[1])
if stop then return stop end
local step, durable, leased = tonumber(ARGV[2]), number(META, 'durable_step'), number(META, 'leased_step')
if step < durable then
  return refuse('conflict', 'steps up to ' .. durable .. ' are acknowledged, the checkpoint ends at step ' .. step ..
    ': restore the checkpoint of step ' .. durable .. ' or a later one')
end
if durable ~= tonumber(ARGV[3]) or leased ~= tonumber(ARGV[4]) then
  return {'moved', 'other steps were leased or acknowledged meanwhile: try again'}
end
release(step, 5)
redis.call('HSET', META, 'trained_step', step, 'leased_step', math.max(leased, step))
return {'ok', redis.call('HINCRBY', META, 'trainer_epoch', 1)}
