-- Add an entry to the work stream.
--
-- KEYS  meta
-- ARGV  router, the notes, entries the stream keeps, milliseconds it keeps them
local work = string.sub(KEYS[1], 1, -5) .. 'work'
redis.call('HDEL', KEYS[1], '') -- now a full Redis takes what follows, too; it is trimmed
local id = redis.call('XADD', work, 'MAXLEN', '~', ARGV[3], '*', 'r', ARGV[1], 'd', ARGV[2])
local oldest = tonumber(string.match(id, '^%d+')) - tonumber(ARGV[4])
redis.call('XTRIM', work, 'MINID', '~', string.format('%.0f', oldest))
return id
