-- Take the bits that belong to no holder any more out of some buckets; drop blocks without holders.
--
-- KEYS  meta
-- ARGV  router, milliseconds of its lease on sweeping, the first bucket, how many blocks are enough
-- Gives {the bucket to go on with (65536: none; -1: another router sweeps), blocks changed,
-- blocks dropped}
local call, pcall, sub, byte, char, floor =
  redis.call, redis.pcall, string.sub, string.byte, string.char, math.floor
local NUM_BUCKETS, MAX_EMPTY = 65536, 4096

local base = sub(KEYS[1], 1, -5)
local buckets = base .. 'b:'
local sweeper = call('GET', base .. 'sweeper')
if sweeper ~= ARGV[1] then
  return { -1, 0, 0 }
end
call('PEXPIRE', base .. 'sweeper', ARGV[2])

local alive = {} -- byte, from 1 -> mask of the bits that a holder has
local holders = call('HGETALL', base .. 'holders')
for i = 1, #holders, 2 do
  local number = tonumber(holders[i])
  if number and holders[i + 1] ~= '' then
    local at = floor(number / 8) + 1
    alive[at] = bit.bor(alive[at] or 0, 2 ^ (number % 8))
  end
end

local function cleaned(value)
  local bytes, last = {}, 0
  for at = 1, #value do
    local kept = bit.band(byte(value, at), alive[at] or 0)
    bytes[at] = char(kept)
    if kept ~= 0 then
      last = at
    end
  end
  return table.concat(bytes, '', 1, last)
end

local clean = {}
local bucket, enough = tonumber(ARGV[3]), tonumber(ARGV[4])
local stop = math.min(NUM_BUCKETS, bucket + MAX_EMPTY)
local num_seen, num_changed, num_dropped = 0, 0, 0
while bucket < stop and num_seen < enough do
  local key = buckets .. char(bucket % 256, floor(bucket / 256))
  local found = pcall('HGETALL', key)
  if not found.err then
    num_seen = num_seen + #found / 2
    for i = 1, #found, 2 do
      local value = found[i + 1]
      local new = clean[value]
      if not new then
        new = cleaned(value)
        clean[value] = new
      end
      if new == '' then
        call('HDEL', key, found[i])
        num_dropped = num_dropped + 1
      elseif new ~= value then
        call('HSET', key, found[i], new)
        num_changed = num_changed + 1
      end
    end
  end
  bucket = bucket + 1
end
return { bucket, num_changed, num_dropped }
