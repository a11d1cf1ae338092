-- Read what a snapshot of the pools begins with.
--
-- KEYS  meta
-- Gives {incarnation, holders}; holders as names and values by turns
local base = string.sub(KEYS[1], 1, -5)
return {
  redis.call('HGET', KEYS[1], 'incarnation') or '',
  redis.call('HGETALL', base .. 'holders'),
}
