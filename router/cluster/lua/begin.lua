-- Read what a snapshot begins with, all of one moment.
--
-- KEYS  meta
-- Gives {incarnation, the work stream's last id, holders, heads}; holders and heads as names and
-- values by turns
local base = string.sub(KEYS[1], 1, -5)
local last = redis.call('XREVRANGE', base .. 'work', '+', '-', 'COUNT', 1)
return {
  redis.call('HGET', KEYS[1], 'incarnation') or '',
  last[1] and last[1][1] or '0-0',
  redis.call('HGETALL', base .. 'holders'),
  redis.call('HGETALL', base .. 'feeds'),
}
