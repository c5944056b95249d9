-- Steps that not every exchange needs. Their functions are created when they are needed.
local some = nil
local function sometimes()
  if some then
    return some
  end
  some = {}

  -- `pause`: the longest applies. An end too far ahead was set before the clock was stepped back. A pause that an operator has
  -- ended is marked by a half, and stays for as long as it was to last, for replicas that ask whether it goes on: they would
  -- repeat a pause that the store has lost. `before`: its score, or 0.
  function some.pause(ledger, before)
    local key = ledger.key
    local earliest = ALIVE + now_ms + RAMP_MS
    local latest = earliest + MAX_LEASE_MS
    local ended = before % 1
    local over = math.min(before - ended, latest)
    if ledger.pause == 1 then
      ended = 0.5
    elseif ledger.pause > 1 and (ended == 0 or ledger.options % 1024 < 512) then -- see the options
      over = math.max(ended == 0 and over or 0, math.min(earliest + ledger.pause - 1, latest))
      ended = 0
    end
    local lasts = over > ALIVE + now_ms
    local score = lasts and over + ended or 0
    if score ~= before then
      redis.call('ZREM', key, PAUSE) -- also allows the next command at maxmemory
      if lasts then
        redis.call('ZADD', key, string.format('%.1f', score), PAUSE)
      end
    end
    ledger.pause_over = lasts and over - ALIVE
    if lasts and ended == 0 then
      local end_ms = over - ALIVE - RAMP_MS
      ledger.limit = math.ceil(ledger.limit * math.max(math.min(now_ms - end_ms, RAMP_MS), 0) / RAMP_MS)
      ledger.pause_end_ms = end_ms
    end
  end

  -- `renew` never shortens a lease, since another replica may have granted a longer one. An ended lease is revived if
  -- it has not been expired yet: its slot is still free. `adopt` runs before `promote`, so that the queue gets only the
  -- slots that the true holders leave. It may exceed the limit. Returns the new numbers, the places of the first renewed
  -- waiters, and false: the exchange is not short.
  function some.extend(ledger, first, renews, extends, in_use, waiting, end_ms, end_text)
    local key, reply, list, places, missing = ledger.key, ledger.reply, {}, nil, false
    for i, score in ipairs(scores_of(key, unpack(ARGV, first, first + extends - 1))) do
      local id, standing, text = ARGV[first + i - 1], score or ABSENT, end_text
      local weight = ledger.heavy and digit_at(id, WEIGHT_AT) or 1
      if score and score >= 0 then
        standing = math.max(math.min(score, now_ms + MAX_LEASE_MS), end_ms)
        text = standing == end_ms and text or text_of(standing)
        push(list, text, id, weight)
      elseif i > renews then
        standing, missing = -end_ms, true
        push(list, text, id, weight)
        in_use, waiting = in_use + weight, score and waiting - 1 or waiting
      else
        standing = math.floor(standing)
        places = places or {}
        if score and #places < MAX_PLACES then
          places[#places + 1] = redis.call('ZCOUNT', key, '-inf', string.format('%.1f', score))
        end
      end
      reply[LEDGER_REPLY + i] = standing
    end
    on_all('ZADD', key, list)
    if missing and ledger.options % 64 >= 32 then -- see the options
      redis.pcall('PUBLISH', wake_prefix .. 'all', 'lost ' .. key)
    end
    return in_use, waiting, places, false
  end

  return some
end

-- Steps that hardly any exchange needs.
local function rarely()
  local few = {}

  -- `list`: the numbers of the replica's holders.
  function few.list_holders(key, in_use, waiting)
    local listed = {}
    budget = budget - in_use
    for _, member in ipairs(redis.call('ZRANGE', key, waiting, waiting + in_use - 1)) do
      if #member < UNIT_AT and string.sub(member, 1, REPLICA_CHARS) == replica then
        listed[#listed + 1] = string.sub(member, WEIGHT_AT)
      end
    end
    return listed
  end

  -- `expire`, within the budget, plus the rest of the last permit. `ended`: units whose lease has ended. Returns how many have expired.
  function few.expire(ledger, ended, waiting)
    local key, expired = ledger.key, math.min(ended, budget)
    if expired > 0 then
      budget = budget - expired
      if expired < ended then
        local last = waiting + expired - 1
        local member = redis.call('ZRANGE', key, last, last)[1]
        expired = expired + digit_at(member, WEIGHT_AT) - digit_at(member, UNIT_AT)
      end
      redis.call('ZREMRANGEBYRANK', key, waiting, waiting + expired - 1)
    end
    ledger.more = ended > expired
    return expired
  end

  -- Marks waiters that were passed over.
  function few.mark(key, skipped)
    local marks = {}
    for i, ticket in ipairs(scores_of(key, unpack(skipped))) do
      if ticket % 1 == 0 then
        push(marks, string.format('%.1f', ticket + 0.5), skipped[i])
      end
    end
    on_all('ZADD', key, marks)
  end

  -- If the clock was stepped back, dead holders would keep their slots until it has caught up: their deadlines are brought
  -- forward, within the budget, plus the rest of the last permit. `far`: units with a deadline beyond `too_late`, a text.
  function few.bring_forward(ledger, far, too_late)
    local key, moved = ledger.key, math.min(far, budget)
    if moved > 0 then
      budget = budget - moved
      local last, list = ledger.waiting + ledger.in_use - 1, {}
      local first_rank = last - moved + 1
      if moved < far then
        first_rank = first_rank + 1 - digit_at(redis.call('ZRANGE', key, first_rank, first_rank)[1], UNIT_AT)
      end
      for _, member in ipairs(redis.call('ZRANGE', key, first_rank, last)) do
        push(list, string.sub(too_late, 2), member)
      end
      on_all('ZADD', key, list)
      moved = #list / 2
    end
    ledger.more = ledger.more or far > moved
  end

  return few
end

-- Steps that make room: for a newcomer in the queue, and for waiters among kept slots.
local function making_room()
  local room = {}

  -- `sweep`: evicts dead waiters from a full queue, if an ended heartbeat suggests that it has any. A queue longer than
  -- the budget is searched in part, at a position derived from the clock. Returns how many were evicted.
  function room.sweep(key, waiting)
    local window, dead, contacts = math.min(waiting, budget), {}, {}
    if window == 0 or redis.call('ZCOUNT', key, ALIVE, oldest - 1) == 0 then
      return 0
    end
    budget = budget - window
    local start = now_us % (waiting - window + 1)
    for _, other in ipairs(redis.call('ZRANGE', key, start, start + window - 1)) do
      local owner = string.sub(other, 1, REPLICA_CHARS)
      if owner ~= replica and contact_with(owner, key, contacts) == 'dead' then
        dead[#dead + 1] = other
      end
    end
    on_all('ZREM', key, dead)
    if #dead == 0 then -- else each newcomer would search again; dead waiters elsewhere are evicted at the head
      redis.call('ZREMRANGEBYSCORE', key, ALIVE, oldest - 1)
    end
    return #dead
  end

  -- `recall`: ends the other replicas' rights to keep slots. Each is notified once; if the notice is lost, the right
  -- expires anyway. The caller learns it from its reply.
  function room.recall(key)
    local recalled = {}
    for _, right in ipairs(redis.call('ZRANGE', key, KEEPING, '+inf', 'BYSCORE')) do
      local owner = string.sub(right, 2)
      if owner ~= replica then
        redis.pcall('PUBLISH', wake_prefix .. owner, string.format('%.0f 0  %s', now_us, key))
        recalled[#recalled + 1] = right
      end
    end
    on_all('ZREM', key, recalled)
  end

  return room
end

