-- Give a router's leases back, and with "1" forget the router.
--
-- KEYS  meta
-- ARGV  router, "1" or "0", streams
local base = string.sub(KEYS[1], 1, -5)
for i = 3, #ARGV do
  local lease = base .. 'lease:' .. ARGV[i]
  if redis.call('GET', lease) == ARGV[1] then
    redis.call('DEL', lease)
  end
end
if ARGV[2] == '1' then
  redis.call('DEL', base .. 'load:' .. ARGV[1])
  redis.call('ZREM', base .. 'routers', ARGV[1])
end
return 1
