
-- Fair shares: what the tenants of a fair ledger have paid, and the lines of their waiters, as in machine/shares.rs. The
-- function captures nothing, since most calls do not need it.

local function fair_of(key, text, removed, acquires)
  local DUES_HEAD = 32
  local PAYER_BYTES = 16
  local REPORT_BYTES = 24
  local PLACE_CHARS = 66
  local TENANT_CHARS = 8
  local TICKET_AT = 9
  local ID_AT = 25
  local COST_AT = 51
  local MAX_DEBT_US = 600000000
  local LAST_US = 1125899906842624
  local CROWD = 4
  local IDLE = 2251799813685248
  local FIRST_TICKET = -4503599627370496
  local call, sub, max, min = redis.call, string.sub, math.max, math.min
  local lines, shares = key .. ':lines', key .. ':shares'
  local settled_units, left, reports, settled = struct.unpack('<dddd', text)
  local time = nil
  local paid, waits, known = {}, {}, {} -- by tenant
  local changed, forgets = {}, nil
  local gone, entering, added = {}, {}, {} -- from and to the lines
  local waiting, rank, bound, bound_name, all = {}, 0, -1, '', false -- the tenants that wait, as far as they were fetched
  local line_of, passed, tenant, entry = {}, {}, nil, nil
  local fair = {}

  local function digits(number)
    return string.format('%07d%09d', number / 1000000000, number % 1000000000)
  end

  local function know(name, score)
    score = score and tonumber(score)
    known[name] = true
    waits[name] = score and score < IDLE
    paid[name] = score and (waits[name] and score or score - IDLE)
  end

  local function pay(name, us, most_us)
    local before = paid[name]
    if us < 0 then
      paid[name] = max(before + us, 0)
    else
      paid[name] = max(before, min(before + us, time + max(MAX_DEBT_US, most_us)))
    end
    changed[name] = true
  end

  -- The first in the line of a tenant, behind those that were passed over, or nil. `most`: how many may be needed.
  local function first_of(name, most)
    local line = line_of[name]
    if not line or not line[line.at] and not line.is_whole then
      local from, wanted = line and '(' .. line[#line] or '[' .. name, min(most, 63) + 1
      line = call('ZRANGEBYLEX', lines, from, '(' .. name .. ':', 'LIMIT', '0', wanted .. '')
      line.at, line.is_whole, line_of[name] = 1, #line < wanted, line
    end
    return line[line.at]
  end

  -- The waiter of the tenant that has paid for the least, and its ticket, or nil.
  function fair.next(free)
    while true do
      local best, at = nil, nil
      for i = 1, #waiting do
        local name = waiting[i]
        if not best or paid[name] < paid[best] or paid[name] == paid[best] and name < best then
          best, at = name, i
        end
      end
      if not all and (not best or paid[best] > bound or paid[best] == bound and best > bound_name) then
        if rank == 0 and time then
          rank = 1
        end
        local count = min(free, 16) + (rank == 0 and 1 or 0)
        local fetched = call('ZRANGE', shares, rank .. '', rank + count - 1 .. '', 'WITHSCORES')
        all = #fetched < 2 * count
        for i = 1, #fetched, 2 do
          local name, score = fetched[i], tonumber(fetched[i + 1])
          if name == '' then
            time = score + IDLE
          elseif score >= IDLE then
            all = true
          else
            bound, bound_name = score, name
            if not known[name] then
              know(name, score)
              waiting[#waiting + 1] = name
            end
          end
        end
        rank = rank + count
        if not time then
          return nil
        end
      elseif not best then
        return nil
      else
        tenant, entry = best, first_of(best, free)
        if entry then
          return sub(entry, ID_AT, COST_AT - 1), tonumber(sub(entry, TICKET_AT, ID_AT - 1)) + FIRST_TICKET
        end
        table.remove(waiting, at)
        if not passed[best] then
          waits[best], changed[best] = false, true
        end
      end
    end
  end

  -- The waiter leaves its line without a slot.
  function fair.leave()
    local line = line_of[tenant]
    gone[#gone + 1], line.at = entry, line.at + 1
  end

  function fair.pass_over()
    local line = line_of[tenant]
    passed[tenant], line.at = true, line.at + 1
  end

  function fair.charge(number_waiting)
    local cost_us = tonumber(sub(entry, COST_AT))
    fair.leave()
    time = max(time, paid[tenant])
    pay(tenant, cost_us, cost_us)
    time = min(time + math.floor(cost_us / (number_waiting + 1)), LAST_US)
    if not first_of(tenant, 1) and not passed[tenant] then
      waits[tenant] = false
      for i = 1, #waiting do
        if waiting[i] == tenant then
          table.remove(waiting, i)
          break
        end
      end
    end
  end

  function fair.write_gone()
    if #gone > 0 then
      call('ZREM', lines, unpack(gone))
      gone = {}
    end
  end

  -- Where a newcomer's payer is in the text.
  function fair.payer_of(number)
    return DUES_HEAD + PAYER_BYTES * (number - 1) + 1
  end

  function fair.payer_of_claim(number)
    local before = PLACE_CHARS * left + REPORT_BYTES * (reports + settled)
    return fair.payer_of(acquires + number) + before
  end

  function fair.is_crowded(payer, number_waiting, places)
    if number_waiting < CROWD * places then
      return false
    end
    local name = sub(text, payer, payer + TENANT_CHARS - 1)
    local line = call('ZLEXCOUNT', lines, '[' .. name, '(' .. name .. ':') + (added[name] or 0)
    return line >= CROWD * places
  end

  function fair.join(payer, id, ticket)
    local name, cost_us = sub(text, payer, payer + TENANT_CHARS - 1), struct.unpack('<d', text, payer + TENANT_CHARS)
    local size = #entering
    entering[size + 1], entering[size + 2] = '0', name .. digits(ticket - FIRST_TICKET) .. id .. digits(cost_us)
    added[name] = (added[name] or 0) + 1
    if not known[name] then
      local scores = call('ZMSCORE', shares, name, time and name or '')
      know(name, scores[1])
      time = time or scores[2] and tonumber(scores[2]) + IDLE or 0
    end
    if not waits[name] then
      local before = paid[name] or 0
      paid[name], waits[name], changed[name], forgets = max(before, time), true, true, time
      if before <= time then
        time = min(time + 1, LAST_US)
      end
    end
  end

  function fair.write()
    fair.write_gone()
    if #entering > 0 then
      call('ZADD', lines, unpack(entering))
      entering, added = {}, {}
    end
    local list = {}
    for name in pairs(changed) do
      local size = #list
      if size == 0 then
        list[1], list[2], size = string.format('%.0f', time - IDLE), '', 2
      end
      list[size + 1], list[size + 2] = digits(waits[name] and paid[name] or paid[name] + IDLE), name
      if size > 1000 then
        call('ZADD', shares, unpack(list))
        list = {}
      end
    end
    if #list > 0 then
      call('ZADD', shares, unpack(list))
    end
    if forgets then
      call('ZREMRANGEBYSCORE', shares, digits(IDLE), digits(IDLE + forgets))
    end
    changed, forgets = {}, nil
  end

  -- While anybody waits, the set and the lines are kept for as long as the ledger.
  function fair.keep(least_ms, more_ms)
    if call('PTTL', lines) < least_ms then
      call('PEXPIRE', lines, least_ms + more_ms)
      call('PEXPIRE', shares, least_ms + more_ms)
    end
  end

  -- `settle`
  local from = fair.payer_of(acquires + 1)
  for i = 1, left do
    gone[i] = sub(text, from, from + PLACE_CHARS - 1)
    from = from + PLACE_CHARS
  end
  fair.write_gone()
  local count = reports + (removed >= settled_units + left and settled or 0)
  if count > 0 then
    local names = { '' }
    for i = 1, count do
      local at = from + REPORT_BYTES * (i - 1)
      names[i + 1] = sub(text, at, at + TENANT_CHARS - 1)
    end
    local scores = call('ZMSCORE', shares, unpack(names))
    time = scores[1] and tonumber(scores[1]) + IDLE
    for i = 2, time and count + 1 or 1 do
      local name = names[i]
      local us, most_us = struct.unpack('<dd', text, from + REPORT_BYTES * (i - 2) + TENANT_CHARS)
      if not known[name] then
        know(name, scores[i])
        waiting[#waiting + 1] = waits[name] and name or nil
      end
      if not paid[name] and us > 0 then
        paid[name], waits[name] = time, false
      end
      if paid[name] then
        pay(name, us, most_us)
      end
    end
  end
  return fair
end
