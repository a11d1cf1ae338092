-- Note that a router lives; create the namespace where it is empty (new, or flushed).
--
-- KEYS  meta
-- ARGV  schema, incarnation to begin with, router ("": only look), its load, milliseconds it lives
-- Gives {schema, incarnation, entries written to the log, routers that live}
local meta = KEYS[1]
local base = string.sub(meta, 1, -5)
local found = redis.call('HMGET', meta, 'schema', 'incarnation', 'log')
if not found[1] then
  redis.call('HSET', meta, 'schema', ARGV[1], 'incarnation', ARGV[2])
  found = redis.call('HMGET', meta, 'schema', 'incarnation', 'log')
end
if ARGV[3] == '' or found[1] ~= ARGV[1] then
  return { found[1], found[2] or '', found[3] or '0', {} }
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local routers = base .. 'routers'
redis.call('HDEL', KEYS[1], '') -- now a full Redis takes the few bytes that follow, too
redis.call('SET', base .. 'load:' .. ARGV[3], ARGV[4], 'PX', ARGV[5])
redis.call('ZADD', routers, now + ARGV[5], ARGV[3])
redis.call('ZREMRANGEBYSCORE', routers, '-inf', now)
return { found[1], found[2] or '', found[3] or '0', redis.call('ZRANGE', routers, 0, -1) }
