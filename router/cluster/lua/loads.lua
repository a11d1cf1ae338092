-- Read what every living router has in flight.
--
-- KEYS  meta
-- Gives router and load by turns
local base = string.sub(KEYS[1], 1, -5)
local loads = {}
for _, router in ipairs(redis.call('ZRANGE', base .. 'routers', 0, -1)) do
  local load = redis.pcall('GET', base .. 'load:' .. router)
  if type(load) == 'string' then
    loads[#loads + 1] = router
    loads[#loads + 1] = load
  end
end
return loads
