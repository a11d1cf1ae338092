-- End a sweep: bits that were dead when it began are in no bucket any more and may be given away.
--
-- KEYS  meta
-- ARGV  router, bits
-- Gives how many were freed
local base = string.sub(KEYS[1], 1, -5)
local num_freed = 0
if redis.call('GET', base .. 'sweeper') == ARGV[1] then
  for i = 2, #ARGV do
    if redis.call('HGET', base .. 'holders', ARGV[i]) == '' then
      redis.call('HDEL', base .. 'holders', ARGV[i])
      num_freed = num_freed + 1
    end
  end
  redis.call('DEL', base .. 'sweeper')
end
return num_freed
