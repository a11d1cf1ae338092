-- Read some sessions; forget those whose time is over.
--
-- KEYS  meta
-- ARGV  where to go on (0: begin), about how many
-- Gives {where to go on (0: that was all), how many were forgotten, session and state by turns}
local sessions = string.sub(KEYS[1], 1, -5) .. 'sessions'
local now = tonumber(redis.call('TIME')[1])
local scanned = redis.call('HSCAN', sessions, ARGV[1], 'COUNT', ARGV[2])
local found, kept, num_over = scanned[2], {}, 0
for i = 1, #found, 2 do
  local state = found[i + 1]
  if #state < 4 or struct.unpack('<I4', state) <= now then
    redis.call('HDEL', sessions, found[i])
    num_over = num_over + 1
  else
    kept[#kept + 1] = found[i]
    kept[#kept + 1] = string.sub(state, 5)
  end
end
return { scanned[1], num_over, kept }
