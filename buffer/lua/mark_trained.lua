#!lua flags=allow-oom
-- Steps up to this one are trained.
-- KEYS: the run's keys
-- ARGV: service epoch, trainer epoch, step
-- Replies with the last trained step.
local stop = superseded_service(ARGV[1]) or superseded_trainer(ARGV[2])
if stop then return stop end
local step, leased = tonumber(ARGV[3]), number(META, 'leased_step')
if step > leased then
  return refuse('conflict', 'step ' .. step .. ' was never leased, the last one is ' .. leased .. ': lease it first')
end
local trained = math.max(number(META, 'trained_step'), step)
set_trained(trained)
return {'ok', trained}
