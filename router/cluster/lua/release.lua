-- Give a router's leases back, and forget the router.
--
-- KEYS  meta
-- ARGV  router, streams
local base = string.sub(KEYS[1], 1, -5)
for i = 2, #ARGV do
  local lease = base .. 'lease:' .. ARGV[i]
  if redis.call('GET', lease) == ARGV[1] then
    redis.call('DEL', lease)
  end
end
redis.call('DEL', base .. 'load:' .. ARGV[1])
redis.call('ZREM', base .. 'routers', ARGV[1])
return 1
