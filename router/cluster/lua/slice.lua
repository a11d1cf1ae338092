-- Pack the blocks of some buckets, for a snapshot.
--
-- KEYS  meta
-- ARGV  the first bucket, and how many blocks are enough
-- Gives {the bucket to go on with (65536: none), what was skipped, then by turns a value (the
-- holders' bits) and the keys of all blocks that have it, 8 bytes each}
local pcall, char, concat, floor = redis.pcall, string.char, table.concat, math.floor
local NUM_BUCKETS, MAX_EMPTY = 65536, 4096

local buckets = string.sub(KEYS[1], 1, -5) .. 'b:'
local bucket, enough = tonumber(ARGV[1]), tonumber(ARGV[2])
local last = math.min(NUM_BUCKETS, bucket + MAX_EMPTY)
local num_blocks, num_skipped = 0, 0
local groups, values = {}, {}
while bucket < last and num_blocks < enough do
  local low = char(bucket % 256, floor(bucket / 256))
  local found = pcall('HGETALL', buckets .. low)
  if found.err then
    num_skipped = num_skipped + 1
  else
    for i = 1, #found, 2 do
      local field, value = found[i], found[i + 1]
      if #field == 6 then
        local group = groups[value]
        if not group then
          group = {}
          groups[value] = group
          values[#values + 1] = value
        end
        group[#group + 1] = low
        group[#group + 1] = field
        num_blocks = num_blocks + 1
      else
        num_skipped = num_skipped + 1
      end
    end
  end
  bucket = bucket + 1
end
local packed = { bucket, num_skipped }
for _, value in ipairs(values) do
  packed[#packed + 1] = value
  packed[#packed + 1] = concat(groups[value])
end
return packed
