-- Send a heartbeat; create the namespace if it is empty (new, or flushed).
--
-- KEYS  meta
-- ARGV  schema, incarnation to begin with, router ("": only look), its load, milliseconds it lives
-- Gives {schema, incarnation, routers that live}
--
-- Schemas 1 and 2 had the blocks of replicas in buckets, and notes in a stream. A router of schema 3
-- drops both and keeps the rest. It begins another incarnation, so that older routers write nothing
-- more; they refuse the namespace from then on, and each works alone.
local meta = KEYS[1]
local base = string.sub(meta, 1, -5)
local found = redis.call('HMGET', meta, 'schema', 'incarnation')
if not found[1] then
  redis.call('HSET', meta, 'schema', ARGV[1], 'incarnation', ARGV[2])
  found = { ARGV[1], ARGV[2] }
elseif (found[1] == '1' or found[1] == '2') and ARGV[1] == '3' then
  redis.call('HSET', meta, 'schema', ARGV[1], 'incarnation', ARGV[2])
  redis.call('UNLINK', base .. 'work', base .. 'feeds', base .. 'log')
  local holders = base .. 'holders'
  for _, name in ipairs(redis.call('HKEYS', holders)) do
    if string.match(name, '^[gc]pu ') then
      local number = redis.call('HGET', holders, name)
      redis.call('HDEL', holders, name)
      redis.call('HSET', holders, number, '') -- dead: the sweeper frees it
      redis.call('UNLINK', base .. 'copies:' .. number)
    end
  end
  found = { ARGV[1], ARGV[2] }
end
if ARGV[3] == '' or found[1] ~= ARGV[1] then
  return { found[1], found[2] or '', {} }
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local routers = base .. 'routers'
redis.call('HDEL', KEYS[1], '') -- now a full Redis takes the few bytes that follow, too
redis.call('SET', base .. 'load:' .. ARGV[3], ARGV[4], 'PX', ARGV[5])
redis.call('ZADD', routers, now + ARGV[5], ARGV[3])
redis.call('ZREMRANGEBYSCORE', routers, '-inf', now)
return { found[1], found[2] or '', redis.call('ZRANGE', routers, 0, -1) }
