
-- Fair shares: what the tenants of a fair ledger have paid, and the lines of their waiters, as in machine/shares.rs. The
-- rest is in steps.lua (`promote`) and queue.lua (`enter`, `admit`), where only fair ledgers run it.
--
-- Scores of tenants are kept as they are in the set: `scores[tenant]` is false for one that is not there.

-- These functions are created when they are needed, and capture nothing.
local function functions_of_shares()
  local shares = { read = 0, pay = 0, first_of = 0, report = 0, settle = 0, join = 0 } -- preallocated

  -- Reads virtual time, and the next `count` of the tenants that wait.
  function shares.read(fair, count)
    local scores, rank, waiting = fair.scores, fair.rank, fair.waiting
    if rank == 0 then
      count = count + 1
    end
    local first, last = string.format('%d', rank), string.format('%d', rank + count - 1)
    local list = redis.call('ZRANGE', fair.shares, first, last, 'WITHSCORES')
    local all = #list < 2 * count
    for i = 1, #list, 2 do
      local name, score = list[i], tonumber(list[i + 1])
      if name == '' then
        fair.time = score + IDLE
      elseif score >= IDLE then
        all = true
      else
        fair.bound, fair.bound_name = score, name
        if scores[name] == nil then
          scores[name], waiting[#waiting + 1] = score, name
        end
      end
    end
    fair.rank, fair.all = rank + count, all
  end

  -- Charges a tenant, or refunds it.
  function shares.pay(fair, name, us, most_us)
    local score = fair.scores[name]
    local base = score >= IDLE and IDLE or 0
    if us < 0 then
      score = math.max(score + us, math.min(score, base + fair.time - MAX_CREDIT_US), base)
    else
      score = math.max(score, math.min(score + us, base + fair.time + math.max(MAX_DEBT_US, most_us)))
    end
    fair.scores[name], fair.changed[name] = score, true
  end

  -- The first in the line of a tenant, behind those that were passed over, or nil; and the line, as far as it was read.
  -- `most`: how many may be needed.
  function shares.first_of(fair, name, most)
    local line = fair.line_of and fair.line_of[name]
    if not line or not line[line.at] and not line.is_whole then
      local from, wanted = line and '(' .. line[#line] or '[' .. name, math.min(most, 63) + 1
      local fetched = redis.call('ZRANGE', fair.lines, from, '(' .. name .. ':', 'BYLEX', 'LIMIT', '0', string.format('%d', wanted))
      fetched.at, fetched.is_whole, fetched.passed = 1, #fetched < wanted, line and line.passed
      fair.line_of = fair.line_of or {}
      fair.line_of[name], line = fetched, fetched
    end
    return line[line.at], line
  end

  -- What a tenant owes, or gets back. `free`: slots for waiters.
  function shares.report(fair, name, us, most_us, free)
    if fair.rank == 0 then
      shares.read(fair, math.min(free, 16))
    end
    if not fair.time then
      return
    end
    local scores, waiting = fair.scores, fair.waiting
    local score = scores[name]
    if score == nil then
      score = tonumber(redis.call('ZSCORE', fair.shares, name)) or false
      if score and score < IDLE then
        waiting[#waiting + 1] = name
      end
    end
    scores[name] = score or us > 0 and IDLE + fair.time
    if scores[name] then
      shares.pay(fair, name, us, most_us)
    end
  end

  -- `settle`. A waiter that is in no line any more has paid for a grant, and left before it knew.
  function shares.settle(fair, removed, acquires, free)
    local text = fair.text
    local settled_units, left, reports, settled = struct.unpack('<dddd', text)
    local is_settled = removed >= settled_units + left
    local from = DUES_HEAD + PAYER_BYTES * acquires + 1
    for _ = 1, left do
      local place = string.sub(text, from, from + PLACE_CHARS - 1)
      if redis.call('ZREM', fair.lines, place) == 0 and is_settled then
        shares.report(fair, string.sub(place, 1, TENANT_CHARS), -tonumber(string.sub(place, COST_AT)), 0, free)
      end
      from = from + PLACE_CHARS
    end
    for _ = 1, reports + (is_settled and settled or 0) do
      local us, most_us = struct.unpack('<dd', text, from + TENANT_CHARS)
      shares.report(fair, string.sub(text, from, from + TENANT_CHARS - 1), us, most_us, free)
      from = from + REPORT_BYTES
    end
  end

  -- A newcomer joins the line of its tenant. `number_waiting`: with this one.
  function shares.join(fair, payer, id, ticket, number_waiting)
    local text, scores, entering = fair.text, fair.scores, fair.entering or {}
    local name, cost = string.sub(text, payer, payer + TENANT_CHARS - 1), string.sub(text, payer + TENANT_CHARS, payer + PAYER_BYTES - 1)
    local size, place = #entering, ticket - FIRST_TICKET
    local place_text = string.format('%07d%09d', place / 1000000000, place % 1000000000)
    entering[size + 1], entering[size + 2] = '0', name .. place_text .. id .. cost
    fair.entering = entering
    local score = scores[name]
    if score == nil then
      score = tonumber(redis.call('ZSCORE', fair.shares, name)) or false
      scores[name] = score
    end
    if not score or score >= IDLE then
      if fair.rank == 0 then
        shares.read(fair, 0)
      end
      if not fair.time and number_waiting > 1 then -- payments were lost, but lines may not be
        redis.call('ZREMRANGEBYRANK', fair.lines, '0', '-1')
      end
      local time, before = fair.time or 0, score and score - IDLE or 0
      fair.began = fair.began or not fair.time
      scores[name], fair.forgets, fair.changed[name] = math.max(before, time), time, true
      fair.time = before <= time and math.min(time + 1, LAST_US) or time
    end
  end

  return shares
end

local shares = nil -- these functions, and the state of a fair ledger of which anything is asked
