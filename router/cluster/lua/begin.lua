-- Read what a snapshot begins with, all of one moment.
--
-- KEYS  meta
-- Gives {incarnation, entries written to the log, its last id, the work stream's last id, holders,
-- heads, streams whose last delta the holder of their lease wrote}; holders and heads as names and
-- values by turns
local base = string.sub(KEYS[1], 1, -5)
local function last_id(stream)
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
  return last[1] and last[1][1] or '0-0'
end
local heads, led = redis.call('HGETALL', base .. 'feeds'), {}
for i = 1, #heads, 2 do
  local stream = string.sub(heads[i], 2)
  local wrote = string.sub(heads[i], 1, 1) == 'w'
  if wrote and redis.call('GET', base .. 'lease:' .. stream) == heads[i + 1] then
    led[#led + 1] = stream
  end
end
local meta = redis.call('HMGET', KEYS[1], 'incarnation', 'log')
return {
  meta[1] or '',
  meta[2] or '0',
  last_id(base .. 'log'),
  last_id(base .. 'work'),
  redis.call('HGETALL', base .. 'holders'),
  heads,
  led,
}
