-- Begin a sweep unless another router sweeps; forget streams that nobody has written for long.
--
-- KEYS  meta
-- ARGV  router, milliseconds of its lease on sweeping, milliseconds until a stream is forgotten
-- Gives {1 or 0: whether it is ours, streams forgotten, bits that are dead by now}
local call = redis.call
local base = string.sub(KEYS[1], 1, -5)
local sweeper = base .. 'sweeper'
local owner = call('GET', sweeper)
if owner and owner ~= ARGV[1] then
  return { 0, 0, {} }
end
call('HDEL', KEYS[1], '') -- now a full Redis takes the few bytes that follow, too
call('SET', sweeper, ARGV[1], 'PX', ARGV[2])

local heads, holders = base .. 'feeds', base .. 'holders'
local time = call('TIME')
local now, num_forgotten = tonumber(time[1]), 0
for _, name in ipairs(call('HKEYS', heads)) do
  if string.sub(name, 1, 1) == 'w' then
    local stream = string.sub(name, 2)
    local since = tonumber(call('HGET', heads, 'a' .. stream) or '') -- abandoned since
    if call('EXISTS', base .. 'lease:' .. stream) == 1 then
      if since then
        call('HDEL', heads, 'a' .. stream)
      end
    elseif not since then
      call('HSET', heads, 'a' .. stream, now)
    elseif (now - since) * 1000 >= tonumber(ARGV[3]) then
      call('UNLINK', base .. 'log:' .. stream)
      for letter in string.gmatch('agpstw', '.') do
        call('HDEL', heads, letter .. stream)
      end
      num_forgotten = num_forgotten + 1
    end
  end
end

local dead = {}
local found = call('HGETALL', holders)
for i = 1, #found, 2 do
  if found[i + 1] == '' then
    dead[#dead + 1] = found[i]
  end
end
return { 1, num_forgotten, dead }
