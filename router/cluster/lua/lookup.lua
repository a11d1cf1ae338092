-- Count the leading blocks of a chain for every holder asked about.
--
-- KEYS  meta
-- ARGV  the chain's keys, 8 bytes each; then of each holder its tier and stream, "cpu" meaning:
--       on gpu or cpu
-- Gives the counts, in the order asked
--
-- Prefix closure (who has block n has those before it) lets all holders be bisected at once: a
-- range of blocks and those whose end lies in it; a look-up in the middle parts them. Closure can
-- break, so the two blocks right before an end are looked at too, as router.index.prefix does.
local pcall, sub, byte, floor = redis.pcall, string.sub, string.byte, math.floor
local band = bit.band

local base = sub(KEYS[1], 1, -5)
local buckets = base .. 'b:'
local chain = ARGV[1]
local num_blocks = floor(#chain / 8)

local values = {}
local function value(n) -- of block n, from 1; '' where it has no holder
  local found = values[n]
  if not found then
    local i = n * 8
    found = pcall('HGET', buckets .. sub(chain, i - 7, i - 6), sub(chain, i - 5, i))
    if type(found) ~= 'string' then
      found = ''
    end
    values[n] = found
  end
  return found
end

-- at and mask of one bit, and of another that does as well
local function holds(holder, bits)
  local b = byte(bits, holder[1])
  if b and band(b, holder[2]) ~= 0 then
    return true
  end
  b = byte(bits, holder[3])
  return b ~= nil and band(b, holder[4]) ~= 0
end

local function bisect(holder, low, high) -- it has block low, and not block high
  while high - low > 1 do
    local middle = floor((low + high) / 2)
    if holds(holder, value(middle)) then
      low = middle
    else
      high = middle
    end
  end
  return low
end

local function checked(holder, ending)
  for n = math.max(2, ending - 2), ending - 1 do
    if not holds(holder, value(n)) then
      return checked(holder, bisect(holder, 1, n))
    end
  end
  return ending
end

local function part(low, high, holders) -- all of them have block low, none has block high
  while high - low > 1 do
    local middle = floor((low + high) / 2)
    local bits = value(middle)
    if bits == value(low) then
      low = middle
    elseif bits == '' then
      high = middle
    else
      local have, lack = {}, {}
      for _, holder in ipairs(holders) do
        if holds(holder, bits) then
          have[#have + 1] = holder
        else
          lack[#lack + 1] = holder
        end
      end
      if #have == 0 then
        high = middle
      elseif #lack == 0 then
        low = middle
      else
        part(low, middle, lack)
        low, holders = middle, have
      end
    end
  end
  for _, holder in ipairs(holders) do
    holder.count = checked(holder, low)
  end
end

local names = {}
for i = 2, #ARGV, 2 do
  names[#names + 1] = ARGV[i] .. ' ' .. ARGV[i + 1]
  names[#names + 1] = ARGV[i] == 'cpu' and 'gpu ' .. ARGV[i + 1] or names[#names]
end
local counts = {}
if #names == 0 then
  return counts
end
local bits = redis.call('HMGET', base .. 'holders', unpack(names))
local alike = {} -- holders of the same bits have the same count
local asked, present = {}, {}
for i = 1, #bits, 2 do
  local one, other = bits[i] or bits[i + 1], bits[i + 1] or bits[i]
  local holder = { count = 0 }
  if one then
    local name = one .. ' ' .. other
    if alike[name] then
      holder = alike[name]
    else
      one, other = tonumber(one), tonumber(other)
      holder[1], holder[2] = floor(one / 8) + 1, 2 ^ (one % 8)
      holder[3], holder[4] = floor(other / 8) + 1, 2 ^ (other % 8)
      alike[name] = holder
      if num_blocks > 0 and holds(holder, value(1)) then
        present[#present + 1] = holder
      end
    end
  end
  asked[#asked + 1] = holder
end
if #present > 0 then
  part(1, num_blocks + 1, present)
end
for i, holder in ipairs(asked) do
  counts[i] = holder.count
end
return counts
