#!lua flags=allow-oom
-- OPEN or READY becomes DROPPED: its records are deleted, a tombstone says why. The same reason again changes nothing.
-- KEYS: the run's keys, group, then for each of its samples: sample, tokens
-- ARGV: service epoch, group id, reason
local stop = superseded_service(ARGV[1])
if stop then return stop end
local state = redis.call('HGET', GROUPS, ARGV[2])
if not state then
  local tombstone = redis.call('HGET', TOMBSTONES, ARGV[2])
  if not tombstone then return refuse('missing', 'there is no group ' .. ARGV[2] .. ': list the open groups again') end
  if tombstone:match('^%S+') == ARGV[3] then return {'ok'} end
  state = 'dropped as ' .. tombstone:match('^%S+')
end
if state ~= 'open' and state ~= 'ready' then return no_transition('group', ARGV[2], state, 'dropped') end
drop(ARGV[2], OWN + 1, state, ARGV[3])
return {'ok'}
