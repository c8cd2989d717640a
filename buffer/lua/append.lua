#!lua
-- A running sample grows by one piece, or one that ran until it was POOLED; the same piece again changes nothing.
-- KEYS: the run's keys, sample, tokens, group
-- ARGV: service epoch, sample id, worker, attempt, start, version, count, piece
local sample, tokens, group = KEYS[OWN + 1], KEYS[OWN + 2], KEYS[OWN + 3]
local piece = {start = tonumber(ARGV[5]), version = tonumber(ARGV[6]), count = tonumber(ARGV[7]), bytes = ARGV[8]}
local stop = superseded_service(ARGV[1]) or lost_lease(sample, ARGV[2], ARGV[3], ARGV[4])
if stop then return stop end
if repeated(sample, tokens, piece) then return {'ok'} end
local state = redis.call('HGET', sample, 'state')
local pooled = takes_last(sample, state)
if state ~= 'running' and not pooled then return no_transition('sample', ARGV[2], state, 'longer') end
stop = misfit(sample, ARGV[2], piece)
if stop then return stop end
if pooled then extend_pooled(sample, tokens, ARGV[2], piece) else extend(sample, tokens, group, piece) end
return {'ok'}
