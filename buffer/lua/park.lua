#!lua flags=allow-oom
-- RUNNING becomes PARKED with its last piece, or QUEUED if it has no token; POOLED stays. The same again changes nothing.
-- KEYS: the run's keys, sample, tokens, group
-- ARGV: service epoch, sample id, worker, attempt, start or "", version, count, piece
local sample, tokens, group = KEYS[OWN + 1], KEYS[OWN + 2], KEYS[OWN + 3]
local piece = {start = tonumber(ARGV[5]), version = tonumber(ARGV[6]), count = tonumber(ARGV[7]), bytes = ARGV[8]}
local stop = superseded_service(ARGV[1]) or lost_lease(sample, ARGV[2], ARGV[3], ARGV[4])
if stop then return stop end
local state, again = redis.call('HGET', sample, 'state'), repeated(sample, tokens, piece)
local aside = state == 'parked' or state == 'queued'
local pooled = takes_last(sample, state)
if (aside or pooled) and (again or piece.count == 0) then return {'ok'} end
if state ~= 'running' and not pooled then return no_transition('sample', ARGV[2], state, 'parked') end
stop = not again and misfit(sample, ARGV[2], piece)
if stop then return stop end
if pooled then
  extend_pooled(sample, tokens, ARGV[2], piece)
  return {'ok'}
end
if not again then extend(sample, tokens, group, piece) end
set_aside(sample, ARGV[2])
return {'ok'}
