#!lua flags=allow-oom
-- Steps up to this one are durable: their groups become CONSUMED and their records are deleted.
-- KEYS: the run's keys, then for each group: group, then for each of its samples: sample, tokens
-- ARGV: service epoch, trainer epoch, step, durable step as the caller read it, group id...
local stop = superseded_service(ARGV[1]) or superseded_trainer(ARGV[2])
if stop then return stop end
local step, durable, leased = tonumber(ARGV[3]), number(META, 'durable_step'), number(META, 'leased_step')
if step > leased then
  return refuse('conflict', 'step ' .. step .. ' was never leased, the last one is ' .. leased .. ': lease it first')
end
if step <= durable then return {'ok'} end
if durable ~= tonumber(ARGV[4]) then return {'moved', 'other steps were acknowledged meanwhile: try again'} end
set_trained(math.max(number(META, 'trained_step'), step))
release(step, 5)
return {'ok'}
