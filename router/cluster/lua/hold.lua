-- Renew a router's leases and take those that are free.
--
-- KEYS  meta
-- ARGV  router, milliseconds, streams
-- Gives for each stream 1 if the router holds its lease now, else 0
local base = string.sub(KEYS[1], 1, -5) .. 'lease:'
redis.call('HDEL', KEYS[1], '') -- now a full Redis takes the few bytes that follow, too
local held = {}
for i = 3, #ARGV do
  local lease = base .. ARGV[i]
  local owner = redis.call('GET', lease)
  local is_ours = not owner or owner == ARGV[1]
  if is_ours then
    redis.call('SET', lease, ARGV[1], 'PX', ARGV[2])
  end
  held[#held + 1] = is_ours and 1 or 0
end
return held
