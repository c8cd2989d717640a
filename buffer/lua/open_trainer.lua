#!lua flags=allow-oom
-- A new trainer session: older epochs are fenced, steps up to its checkpoint are durable, later ones are replayed.
-- KEYS: the run's keys, then for each group: group, then for each of its samples: sample, tokens
-- ARGV: service epoch, nonce, durable step of the trainer, durable and leased step as the caller read them, group id...
-- Replies with the trainer epoch.
local stop = superseded_service(ARGV[1]) or replayed(ARGV[2])
if stop then return stop end
local step, durable, leased = tonumber(ARGV[3]), number(META, 'durable_step'), number(META, 'leased_step')
if step < durable then
  return refuse('conflict', 'steps up to ' .. durable .. ' are acknowledged, the checkpoint ends at step ' .. step ..
    ': restore the checkpoint of step ' .. durable .. ' or a later one')
end
if durable ~= tonumber(ARGV[4]) or leased ~= tonumber(ARGV[5]) then
  return {'moved', 'other steps were leased or acknowledged meanwhile: try again'}
end
set_trained(step)
release(step, 6)
redis.call('HSET', META, 'leased_step', math.max(leased, step))
return remember(ARGV[2], {'ok', redis.call('HINCRBY', META, 'trainer_epoch', 1)})
