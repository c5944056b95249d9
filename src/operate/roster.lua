-- Adds a replica to the roster, or takes it off, and drops those that are stale.
-- KEYS[1] the roster, a sorted set: members are replicas, scores when they were last added, in ms of this clock
-- ARGV[1] the member, ARGV[2] after how many ms a member is stale, ARGV[3] '1' to add it, '0' to take it off
-- Returns the time in ms, and how many members there are.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms - ARGV[2])
if ARGV[3] == '1' then
  redis.call('ZADD', KEYS[1], now_ms, ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return { now_ms, redis.call('ZCARD', KEYS[1]) }
