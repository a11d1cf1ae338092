-- Begin a sweep, if no other router does; retire feeds that nobody has fed for long.
--
-- KEYS  meta
-- ARGV  router, milliseconds of its lease on sweeping, milliseconds until a feed is forgotten
-- Gives {1 or 0: whether it is ours, feeds forgotten, bits that are dead by now}
local call = redis.call
local base = string.sub(KEYS[1], 1, -5)
local sweeper = base .. 'sweeper'
local owner = call('GET', sweeper)
if owner and owner ~= ARGV[1] then
  return { 0, 0, {} }
end
call('HDEL', KEYS[1], '') -- now a full Redis takes the few bytes that follow, too
call('SET', sweeper, ARGV[1], 'PX', ARGV[2])

local feeds, holders = base .. 'feeds', base .. 'holders'
local time = call('TIME')
local now, num_forgotten = tonumber(time[1]), 0
for _, name in ipairs(call('HKEYS', feeds)) do
  if string.sub(name, 1, 1) == 'n' then
    local feed = string.sub(name, 2)
    local since = tonumber(call('HGET', feeds, 'a' .. feed) or '') -- abandoned since
    if call('EXISTS', base .. 'lease:' .. feed) == 1 then
      if since then
        call('HDEL', feeds, 'a' .. feed)
      end
    elseif not since then
      call('HSET', feeds, 'a' .. feed, now)
    elseif (now - since) * 1000 >= tonumber(ARGV[3]) then
      for _, tier in ipairs({ 'gpu', 'cpu', 'pool' }) do
        local held = call('HGET', holders, tier .. ' ' .. feed)
        if held then
          call('HDEL', holders, tier .. ' ' .. feed)
          call('HSET', holders, held, '')
          call('UNLINK', base .. 'copies:' .. held)
        end
      end
      call('HDEL', feeds, 'n' .. feed, 'p' .. feed, 's' .. feed, 'w' .. feed, 'a' .. feed)
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
