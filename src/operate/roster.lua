-- Adds a replica to the roster or removes it, and drops stale replicas; and does the same with the values that it declares
-- for limits.
-- KEYS[1] the roster, a sorted set: members are replicas, scores their latest registration, in ms of this clock
-- KEYS[2] and so on: of a limit, a sorted set: members are replicas as in the roster, scores the values that they declare
-- ARGV[1] the member, ARGV[2] the age in ms at which a member is stale
-- ARGV[3] '1' to add it, '0' to remove it, '2' to add it, and values only if no other replica declares any, or one the same
-- ARGV[4] and so on: the value for each limit, or '-1' to add none
-- Returns the time in ms, the number of members, and for each limit the other replicas with the highest and the lowest
-- value ('' if there is none), each with the value, and 1 if some other has the same value.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms - ARGV[2])
-- From before a step back of this clock, so their replicas may be gone. Those that are there come back within a minute.
redis.call('ZREMRANGEBYSCORE', KEYS[1], now_ms + ARGV[2], '+inf')
if ARGV[3] ~= '0' then
  redis.call('ZADD', KEYS[1], now_ms, ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
local count = redis.call('ZCARD', KEYS[1])

-- The first replica in a range that is there.
local function first(key, from, to, order)
  while true do
    local found = redis.call('ZRANGE', key, from, to, 'BYSCORE', unpack(order))
    if not found[1] or redis.call('ZSCORE', KEYS[1], found[1]) then
      return found[1] or '', tonumber(found[2] or 0)
    end
    redis.call('ZREM', key, found[1])
  end
end

local UP, DOWN = { 'LIMIT', 0, 1, 'WITHSCORES' }, { 'REV', 'LIMIT', 0, 1, 'WITHSCORES' }
local declared = {}
for i = 2, #KEYS do
  local key, value = KEYS[i], ARGV[i + 2]
  redis.call('ZREM', key, ARGV[1])
  if redis.call('ZCARD', key) > 2 * count then -- most are gone, and the others come back within a minute
    redis.call('ZREMRANGEBYRANK', key, 0, -1)
  end
  local highest, high = first(key, '+inf', '-inf', DOWN)
  local lowest, low = first(key, '-inf', '+inf', UP)
  local is_shared = first(key, value, value, UP) ~= ''
  if value ~= '-1' and (ARGV[3] == '1' or ARGV[3] == '2' and (is_shared or highest == '')) then
    redis.call('ZADD', key, value, ARGV[1])
    redis.call('PEXPIRE', key, ARGV[2])
  end
  declared[#declared + 1] = { highest, high, lowest, low, is_shared and 1 or 0 }
end
return { now_ms, count, declared }
