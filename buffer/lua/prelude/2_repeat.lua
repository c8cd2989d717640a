-- A call that is sent again because its answer was lost gets that answer: replies lie under the nonce of their call.
-- Only calls that the run's own state can't recognise carry one; see `transition` in buffer/scripts.py.
local KEPT_REPEATS = 4096 -- calls that may come between one and its repetition; about 0.5 MB

local function replayed(nonce)
  local reply = redis.call('HGET', REPEATS, nonce)
  return reply and cjson.decode(reply)
end

local function remember(nonce, reply)
  redis.call('HSET', REPEATS, nonce, cjson.encode(reply))
  if redis.call('RPUSH', REPEAT_ORDER, nonce) > KEPT_REPEATS then
    redis.call('HDEL', REPEATS, redis.call('LPOP', REPEAT_ORDER))
  end
  return reply
end
