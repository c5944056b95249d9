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
      local first, last = text_of(IDLE), text_of(IDLE + fair.forgets)
      on_all('ZREM', fair.shares, call('ZRANGE', fair.shares, first, last, 'BYSCORE', 'LIMIT', '0', SWEEP_BUDGET))
    end
    fair.entering, fair.forgets = nil, nil
  end
  return added > size - before
end

-- Returns the standing of a newcomer. `enter` writes its slot or place. `payer_at`: where its payer
-- begins in the dues; only in a fair ledger.
local function admit(ledger, id, waits, payer_at)
  local waiting, in_use, limit = ledger.waiting, ledger.in_use, ledger.limit
  local weight = ledger.heavy and digit_at(id, WEIGHT_AT) or 1
  local fits = limit > 0 and in_use + (in_use > 0 and weight or math.min(weight, ledger.whole)) <= limit
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
  if waiting >= ledger.max_waiters and not ledger.swept then
    enter(ledger)
    ledger.swept = true
    waiting = waiting - making_room().sweep(ledger.key, waiting)
    ledger.waiting, ledger.head = waiting, nil
  end
  local places, line = ledger.max_waiters - waiting, 0
  if payer_at and places > 0 then
    -- The waiters of one tenant leave free places to others.
    places = CROWD * places
    if waiting >= places then
      local fair = ledger.fair
      local name = string.sub(fair.dues, payer_at, payer_at + TENANT_CHARS - 1)
      if fair.entering then -- some may be in the line already
        redis.call('ZADD', fair.lines, unpack(fair.entering))
        fair.entering = nil
      end
      line = redis.call('ZLEXCOUNT', fair.lines, '[' .. name, '(' .. name .. ':')
    end
  end
  if places <= line then
    ledger.refused = true
    return QUEUE_FULL
  end
  -- In a fair ledger, its tenant's turn may come before that of a waiter that needs more units than are free.
  ledger.more = ledger.more or payer_at and fits
  -- Tickets never decrease, so a ticket below the head's is known to have left the queue, or was passed over; `advance` in
  -- claim_slots.lua marks those that it gives.
  local ticket, text = ledger.ticket and ledger.ticket + 1, nil
  if not ticket then
    ticket = FIRST_TICKET + now_us
    text = '-' .. text_of(-ticket)
    if waiting > 0 and redis.call('ZCOUNT', ledger.key, text, '-1') > 0 then
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
