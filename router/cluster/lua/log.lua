-- Read streams' logs from where a router has read them to.
--
-- KEYS  meta
-- ARGV  bytes that are enough; then of each stream: its name, the generation that was read, entries
--       read of it
-- Gives {0, then of each stream: {generation, number of the first entry, 1 or 0: whether
-- that is all, its head as w, p, t, s ("": none), entries}}
local call = redis.call
local base = string.sub(KEYS[1], 1, -5)
local heads = base .. 'feeds'
local STEP, size, enough = 32, 0, tonumber(ARGV[1])
local incarnation = call('HGET', KEYS[1], 'incarnation') or ''
local found = { 0 }
for i = 2, #ARGV, 3 do
  local stream, at = ARGV[i], tonumber(ARGV[i + 2])
  local head = call('HMGET', heads, 'g' .. stream, 'w' .. stream, 'p' .. stream, 't' .. stream,
    's' .. stream)
  local generation = incarnation .. ':' .. (head[1] or '')
  if generation ~= ARGV[i + 1] then
    at = 0
  end
  local log, first, entries, is_all = base .. 'log:' .. stream, at, {}, 0
  while is_all == 0 and size < enough do
    local some = call('LRANGE', log, at, at + STEP - 1)
    for _, entry in ipairs(some) do
      entries[#entries + 1] = entry
      size = size + #entry
    end
    at = at + #some
    is_all = #some < STEP and 1 or 0
  end
  found[#found + 1] = { generation, first, is_all, head[2] or '', head[3] or '', head[4] or '',
    head[5] or '', entries }
end
return found
