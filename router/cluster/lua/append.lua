-- Append changes to a stream's log, and write its head. All of it or nothing.
--
-- KEYS  meta
-- ARGV  1 incarnation            2 router                    3 stream
--       4 "1": cleared           5 position, or ""           6 newest, or ""   ("": as before)
--       7 status, or ""          8 "1": blocks are stored    9 the changes, packed, or ""
-- Gives the result
local OK, FENCED, LOST = 0, 1, 2
local call = redis.call

local meta = KEYS[1]
local base = string.sub(meta, 1, -5)
local stream = ARGV[3]
local heads, log = base .. 'feeds', base .. 'log:' .. stream

if call('HGET', meta, 'incarnation') ~= ARGV[1] then
  return LOST
end
if call('GET', base .. 'lease:' .. stream) ~= ARGV[2] then
  return FENCED
end

-- Redis refuses for want of memory only as a script's first write, and only one that may grow
-- memory. So changes that store blocks are refused whole; a clear goes through.
if ARGV[8] == '1' then
  call('HSETNX', meta, 'schema', '') -- it is there; a full Redis refuses this command
else
  call('HDEL', meta, '')
end

if ARGV[4] == '1' then
  call('UNLINK', log)
  call('HINCRBY', heads, 'g' .. stream, 1) -- what was read of the log before does not go on
  call('HDEL', heads, 'p' .. stream)
end
if ARGV[9] ~= '' then
  call('RPUSH', log, ARGV[9])
end
call('HSET', heads, 'w' .. stream, ARGV[2])
for letter, value in pairs({ p = ARGV[5], t = ARGV[6], s = ARGV[7] }) do
  if value ~= '' then
    call('HSET', heads, letter .. stream, value)
  end
end
return OK
