-- Apply a part of a delta to the holders' bits and to its stream's head. All of it or nothing.
--
-- KEYS  meta
-- ARGV  1 incarnation            2 router                    3 stream
--       4 "1": the router must hold the stream's lease; "0" for a pool's stream
--       5 "1": cleared           6 position, or ""           7 newest, or ""   ("": as before)
--       8 status, or ""          9.. of each change: tier, stored, removed, keys of copies, counts of copies ("2,3,1")
-- Gives {result, how many keys were skipped because something else lies there}
local OK, FENCED, LOST = 0, 1, 2
local FIRST, STEP = 9, 5
local call, pcall, sub, byte, char, rep =
  redis.call, redis.pcall, string.sub, string.byte, string.char, string.rep
local band = bit.band

local meta = KEYS[1]
local base = sub(meta, 1, -5)
local buckets, heads, holders = base .. 'b:', base .. 'feeds', base .. 'holders'
local stream, is_fenced, cleared = ARGV[3], ARGV[4] == '1', ARGV[5] == '1'
local num_skipped = 0

if call('HGET', meta, 'incarnation') ~= ARGV[1] then
  return { LOST, 0 }
end
if is_fenced and call('GET', base .. 'lease:' .. stream) ~= ARGV[2] then
  return { FENCED, 0 }
end

-- Redis refuses for want of memory only as a script's first write, and only one that may grow
-- memory. So a delta that stores is refused whole; one that only removes goes through.
local stores = false
for i = FIRST, #ARGV, STEP do
  stores = stores or ARGV[i + 1] ~= '' or ARGV[i + 3] ~= ''
end
if stores then
  call('HSETNX', meta, 'schema', '') -- it is there; a full Redis refuses this command
else
  call('HDEL', meta, '')
end

local function retire(tier)
  local name = tier .. ' ' .. stream
  local number_of_bit = call('HGET', holders, name)
  if number_of_bit then
    call('HDEL', holders, name)
    call('HSET', holders, number_of_bit, '') -- dead: the sweeper frees it
    call('UNLINK', base .. 'copies:' .. number_of_bit)
  end
end

local function bit_of(tier)
  local name = tier .. ' ' .. stream
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

local function forget_copies(copies, keys)
  if call('EXISTS', copies) == 1 then
    for i = 1, #keys, 8 do
      call('HDEL', copies, sub(keys, i, i + 7))
    end
  end
end

local function count_copies(copies, keys, numbers)
  local i = 1
  for count in string.gmatch(numbers, '%d+') do
    local key = sub(keys, i, i + 7)
    if count == '1' then
      call('HDEL', copies, key)
    else
      call('HSET', copies, key, count)
    end
    i = i + 8
  end
end

if cleared then
  retire('gpu')
  retire('cpu')
  retire('pool')
end
for i = FIRST, #ARGV, STEP do
  local tier, stored, removed, copied = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local held = bit_of(tier)
  local at, mask = math.floor(held / 8) + 1, 2 ^ (held % 8)
  local alone = rep('\0', at - 1) .. char(mask)
  local copies = base .. 'copies:' .. held
  remove(removed, at, mask, alone)
  forget_copies(copies, removed)
  store(stored, at, mask, alone)
  store(copied, at, mask, alone)
  count_copies(copies, copied, ARGV[i + 4])
end

if is_fenced then
  call('HSET', heads, 'w' .. stream, ARGV[2])
  if ARGV[6] ~= '' then
    call('HSET', heads, 'p' .. stream, ARGV[6])
  elseif cleared then
    call('HDEL', heads, 'p' .. stream)
  end
  if ARGV[7] ~= '' then
    call('HSET', heads, 't' .. stream, ARGV[7])
  end
  if ARGV[8] ~= '' then
    call('HSET', heads, 's' .. stream, ARGV[8])
  end
end
return { OK, num_skipped }
