
-- The long way begins here. All its functions are created in each call, so what each captures counts: see "Speed".
-- First the helpers that its steps share.

-- Behind the last record.
local replica, wake_prefix = string.sub(packed, -REPLICA_CHARS), string.sub(packed, record, -REPLICA_CHARS - 1)
local promoted_end_ms = now_ms + math.min(respond_ms, lease_ms)
local oldest = ALIVE + now_ms - waiter_ttl_ms -- an older heartbeat is that of a dead replica
local budget = SWEEP_BUDGET

-- Faster than `%.0f` or `..`. In two parts, because `%d` has only 32 bits in some servers.
local function text_of(number)
  return string.format('%d%09d', number / 1000000000, number % 1000000000)
end

-- Every list is short enough for `unpack`, which takes 8,000 values: an exchange names at most MAX_PERMITS (message.rs) permits of a
-- ledger, and other lists end with the budget.
local function on_all(command, key, list)
  return #list > 0 and redis.call(command, key, unpack(list)) or 0
end

-- Appends all members of a permit of this weight to a list for ZADD.
local function push(list, score, id, weight)
  local size = #list
  list[size + 1], list[size + 2] = score, id
  if weight and weight > 1 then
    for unit = 2, weight do
      list[size + 2 * unit - 1], list[size + 2 * unit] = score, id .. string.sub(DIGITS, unit, unit)
    end
  end
end

-- Scores in the order of the ids; false for a missing member.
local function scores_of(key, ...)
  local scores = redis.call('ZMSCORE', key, ...)
  for i = 1, #scores do
    scores[i] = scores[i] and tonumber(scores[i])
  end
  return scores
end

-- The position in DIGITS of a character of a member: the weight of a permit, or the number of a unit, 1 for the id itself.
local function digit_at(member, at)
  return string.find(DIGITS, string.sub(member, at, at), 1, true)
end

local function score_at(key, rank)
  return tonumber(redis.call('ZRANGE', key, rank, rank, 'WITHSCORES')[2])
end

-- Whether the waiters of another replica can be granted slots. It is 'dead' once it has been silent for the waiter TTL; before, it is
-- 'unreachable' while it is silent, or should receive wake-ups but does not. The script asks before publishing, because `PUBLISH`
-- counts only subscribers at this server, while its message may reach others, and would count as a grant there.
local function contact_with(owner, key, contacts)
  local contact = contacts[owner]
  if not contact then
    local heartbeat = tonumber(redis.call('ZSCORE', key, '@' .. owner))
    if not heartbeat or heartbeat < oldest then
      contact = 'dead'
    elseif heartbeat < ALIVE + now_ms then
      contact = 'unreachable'
    else
      -- By pcall: an ACL may forbid it.
      local receives = heartbeat % 2 == 0 or redis.pcall('PUBSUB', 'NUMSUB', wake_prefix .. owner)[2] ~= 0
      contact = receives and 'reachable' or 'unreachable'
    end
    contacts[owner] = contact
  end
  return contact
end

