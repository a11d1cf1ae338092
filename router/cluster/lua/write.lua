-- Apply a part of what was learned of a pool to its holder's bit. All of it or nothing.
--
-- KEYS  meta
-- ARGV  1 incarnation    2 the pool's stream    3 "1": cleared    4 stored    5 removed
-- Gives {result, how many keys were skipped because something else lies there}
local OK, LOST = 0, 2
local call, pcall, sub, byte, char, rep =
  redis.call, redis.pcall, string.sub, string.byte, string.char, string.rep
local band = bit.band

local meta = KEYS[1]
local base = sub(meta, 1, -5)
local buckets, holders = base .. 'b:', base .. 'holders'
local name, stored, removed = 'pool ' .. ARGV[2], ARGV[4], ARGV[5]
local num_skipped = 0

if call('HGET', meta, 'incarnation') ~= ARGV[1] then
  return { LOST, 0 }
end

-- Redis refuses for want of memory only as a script's first write, and only one that may grow
-- memory. So a delta that stores is refused whole; one that only removes goes through.
if stored ~= '' then
  call('HSETNX', meta, 'schema', '') -- it is there; a full Redis refuses this command
else
  call('HDEL', meta, '')
end

local function bit_of_pool()
  local found = call('HGET', holders, name)
  if found then
    return tonumber(found)
  end
  local free = 0
  while call('HEXISTS', holders, free) == 1 do
    free = free + 1
  end
  call('HSET', holders, free, name, name, free)
  return free
end

local function store(keys, at, mask, alone)
  local with = {} -- value -> the same with this bit
  for i = 1, #keys, 8 do
    local bucket, field = buckets .. sub(keys, i, i + 1), sub(keys, i + 2, i + 7)
    local is_new = pcall('HSETNX', bucket, field, alone)
    if is_new == 0 then
      local old = call('HGET', bucket, field)
      local new = with[old]
      if not new then
        local bits = byte(old, at)
        if not bits then
          new = old .. rep('\0', at - 1 - #old) .. char(mask)
        elseif band(bits, mask) ~= 0 then
          new = old
        else
          new = sub(old, 1, at - 1) .. char(bits + mask) .. sub(old, at + 1)
        end
        with[old] = new
      end
      if new ~= old then
        call('HSET', bucket, field, new)
      end
    elseif is_new ~= 1 then
      num_skipped = num_skipped + 1
    end
  end
end

local function remove(keys, at, mask, alone)
  local without = { [alone] = '' }
  for i = 1, #keys, 8 do
    local bucket, field = buckets .. sub(keys, i, i + 1), sub(keys, i + 2, i + 7)
    local old = pcall('HGET', bucket, field)
    if type(old) == 'string' then
      local new = without[old]
      if not new then
        local bits = byte(old, at)
        if not bits or band(bits, mask) == 0 then
          new = old
        else
          new = sub(old, 1, at - 1) .. char(bits - mask) .. sub(old, at + 1)
          local last = #new
          while last > 0 and byte(new, last) == 0 do
            last = last - 1
          end
          new = sub(new, 1, last)
        end
        without[old] = new
      end
      if new == '' then
        call('HDEL', bucket, field)
      elseif new ~= old then
        call('HSET', bucket, field, new)
      end
    elseif old then
      num_skipped = num_skipped + 1
    end
  end
end

if ARGV[3] == '1' then
  local number_of_bit = call('HGET', holders, name)
  if number_of_bit then
    call('HDEL', holders, name)
    call('HSET', holders, number_of_bit, '') -- dead: the sweeper frees it
  end
end
if stored ~= '' or removed ~= '' then
  local held = bit_of_pool()
  local at, mask = math.floor(held / 8) + 1, 2 ^ (held % 8)
  local alone = rep('\0', at - 1) .. char(mask)
  remove(removed, at, mask, alone)
  store(stored, at, mask, alone)
end
return { OK, num_skipped }
