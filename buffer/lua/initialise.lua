#!lua flags=allow-oom
-- Make the run's meta record with version 0 of the policy, or check that this code understands the one that is there.
-- KEYS: the run's keys
-- ARGV: schema version, body of version 0, the schema that is taken over as it is
local schema = redis.call('HGET', META, 'schema')
if schema == 'importing' then
  return refuse('schema', 'an import into this run has not finished: let it finish, or run `april buffer import` again')
end
if schema == ARGV[3] then redis.call('HSET', META, 'schema', ARGV[1]) end
if schema and schema ~= ARGV[1] and schema ~= ARGV[3] then
  return refuse('schema', 'the run has data of schema ' .. schema .. ', this release reads schema ' .. ARGV[1] ..
    ': use the release that wrote it, or another run name')
end
if not schema then
  redis.call('HSET', META, 'schema', ARGV[1], 'cursor', '')
  redis.call('HSET', POLICIES, '0', ARGV[2], '0:state', 'active')
end
return {'ok'}
