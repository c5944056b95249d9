
-- The long way begins here: helpers shared by its steps, and `admit`, which gives newcomers a slot or a place in the
-- queue.

local sub = string.sub
local replica, wake_channel = sub(packed, -REPLICA_CHARS), sub(packed, record, -REPLICA_CHARS - 1)
local promoted_end_ms = now_ms + math.min(respond_ms, lease_ms)
local oldest = ALIVE + now_ms - waiter_ttl_ms -- an older heartbeat is that of a dead replica
local budget = SWEEP_BUDGET

-- Faster than `%.0f` or `..`. In two parts, because `%d` has only 32 bits in some servers.
local function text_of(number)
  return string.format('%d%09d', number / 1000000000, number % 1000000000)
end

-- Every list is short enough for `unpack`: see MAX_PERMITS and the budget.
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
      local receives = heartbeat % 2 == 0 or redis.pcall('PUBSUB', 'NUMSUB', wake_channel .. owner)[2] ~= 0
      contact = receives and 'reachable' or 'unreachable'
    end
    contacts[owner] = contact
  end
  return contact
end

-- Writes the admitted permits, and the replica's heartbeat if given. Returns whether the heartbeat is new.
local function enter(ledger, heartbeat)
  local key, list, size = ledger.key, ledger.entering, ledger.in_use + ledger.waiting
  local before = size - #list / 2
  if heartbeat then
    push(list, heartbeat, '@' .. replica)
  end
  local added = on_all('ZADD', key, list)
  if size >= LIST_SIZE and before < LIST_SIZE then
    call('ZADD', key, '0', LONG_NAME)
    call('ZREM', key, LONG_NAME)
  end
  ledger.entering = {}
  local fair = ledger.fair
  if fair then
    local scores, tenants = fair.scores, nil
    if fair.entering then
      call('ZADD', fair.lines, unpack(fair.entering))
    end
    for name in pairs(fair.changed) do
      tenants = tenants or { '-' .. text_of(IDLE - fair.time), '' }
      push(tenants, text_of(scores[name]), name)
      if #tenants > 4000 then
        call('ZADD', fair.shares, unpack(tenants))
        tenants = {}
      end
    end
    if tenants then
      on_all('ZADD', fair.shares, tenants)
      fair.changed = {}
    end
    if fair.forgets then
      call('ZREMRANGEBYSCORE', fair.shares, text_of(IDLE), text_of(IDLE + fair.forgets))
    end
    fair.entering, fair.forgets = nil, nil
  end
  return added > size - before
end

-- Returns the standing of a newcomer. `enter` writes its slot or place. `payer`: only in a fair ledger.
local function admit(ledger, id, waits, payer)
  local waiting, in_use, limit = ledger.waiting, ledger.in_use, ledger.limit
  local weight = ledger.heavy and digit_at(id, WEIGHT_AT) or 1
  local fits = limit > 0 and in_use + (in_use > 0 and weight or math.min(weight, ledger.most)) <= limit
  if waiting == ledger.passed and fits then
    ledger.in_use = in_use + weight
    lease_end_text = lease_end_text or text_of(lease_end_ms)
    push(ledger.entering, lease_end_text, id, weight)
    return lease_end_ms
  end
  if not waits then
    ledger.refused = true
    return FULL
  end
  -- `sweep`: evicts dead waiters from a full queue, if an ended heartbeat suggests that it has any. A queue longer than
  -- the budget is searched in part, at a position derived from the clock.
  if waiting >= ledger.max_waiters and not ledger.swept then
    enter(ledger)
    ledger.swept = true
    local key, window = ledger.key, math.min(waiting, budget)
    if window > 0 and call('ZCOUNT', key, ALIVE, oldest - 1) > 0 then
      budget = budget - window
      local start = now_us % (waiting - window + 1)
      local dead, contacts = {}, {}
      for _, other in ipairs(call('ZRANGE', key, start, start + window - 1)) do
        local owner = sub(other, 1, REPLICA_CHARS)
        if owner ~= replica and contact_with(owner, key, contacts) == 'dead' then
          dead[#dead + 1] = other
        end
      end
      on_all('ZREM', key, dead)
      waiting = waiting - #dead
      if #dead == 0 then -- else each newcomer would search again; dead waiters elsewhere are evicted at the head
        call('ZREMRANGEBYSCORE', key, ALIVE, oldest - 1)
      end
    end
    ledger.waiting = waiting
  end
  local places, line = ledger.max_waiters - waiting, 0
  if payer and places > 0 then
    -- The waiters of one tenant leave free places to others.
    places = CROWD * places
    if waiting >= places then
      local fair = ledger.fair
      local name = sub(fair.text, payer, payer + TENANT_CHARS - 1)
      if fair.entering then -- some may be in the line already
        call('ZADD', fair.lines, unpack(fair.entering))
        fair.entering = nil
      end
      line = call('ZLEXCOUNT', fair.lines, '[' .. name, '(' .. name .. ':')
    end
  end
  if places <= line then
    ledger.refused = true
    return QUEUE_FULL
  end
  -- In a fair ledger, its tenant's turn may come before that of a waiter that needs more units than are free.
  ledger.more = payer and fits
  -- Tickets never decrease, so a ticket below the head's is known to have left the queue, or was passed over; `advance` in
  -- claim_slots.lua marks those that it gives.
  local ticket, text = ledger.ticket and ledger.ticket + 1, nil
  if not ticket then
    ticket = FIRST_TICKET + now_us
    text = '-' .. text_of(-ticket)
    if waiting > 0 and call('ZCOUNT', ledger.key, text, '-1') > 0 then
      ticket, text = math.floor(score_at(ledger.key, string.format('%d', waiting - 1))) + 1, nil
    end
  end
  if waiting == 0 then
    ledger.head = ticket
  end
  ledger.ticket, ledger.waiting = ticket, waiting + 1
  push(ledger.entering, text or '-' .. text_of(-ticket), id)
  return ticket
end
