-- Put sessions, each with the second it is forgotten in.
--
-- KEYS  meta
-- ARGV  seconds they live, then session and state by turns
local sessions = string.sub(KEYS[1], 1, -5) .. 'sessions'
local until_s = struct.pack('<I4', redis.call('TIME')[1] + ARGV[1])
for i = 2, #ARGV, 2 do
  redis.call('HSET', sessions, ARGV[i], until_s .. ARGV[i + 1])
end
return 1
