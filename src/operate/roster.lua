-- Adds a replica to the roster or removes it, and drops stale replicas.
-- KEYS[1] the roster, a sorted set: members are replicas, scores their latest registration, in ms of this clock
-- ARGV[1] the member, ARGV[2] the age in ms at which a member is stale, ARGV[3] '1' to add it, '0' to remove it
-- Returns the time in ms, and the number of members.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms - ARGV[2])
-- From before a step back of this clock, so their replicas may be gone. Those that are there come back within a minute.
redis.call('ZREMRANGEBYSCORE', KEYS[1], now_ms + ARGV[2], '+inf')
if ARGV[3] == '1' then
  redis.call('ZADD', KEYS[1], now_ms, ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return { now_ms, redis.call('ZCARD', KEYS[1]) }
