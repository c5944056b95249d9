
-- Fair shares: what the tenants of a fair ledger have paid, and the lines of their waiters, as in machine/shares.rs. Without a fair
-- ledger none of this is created.
--
-- A fair ledger has, in `ledger.fair`:
--   lines, shares                its sets
--   scores                       of tenants, as in the set; false for one that is not there
--   changed, forgets             names whose score has changed; the virtual time up to which idle tenants are forgotten
--   entering, began              new texts for the lines; whether payments begin anew
--   time                         virtual time; nil until it was read
--   names, rank, all             tenants that wait, as far as they were read: the first `rank` members of the set, or all,
--   bound, bound_name            the last with this score and name
--   line_of                      for tenants, the first texts of their lines: `at` is the next, `is_whole`: no more are in the store,
--                                `passed`: a waiter was passed over
--   tenant, turn                 the tenant whose turn `next_by_share` has found, and its index in `names`
--   dues                         what the exchange says of payments: see ARGV

local shares = has_fair and {}
if has_fair then
  -- Reads virtual time, and the next `count` of the tenants that wait.
  function shares.read(fair, count)
    local scores, rank, names = fair.scores, fair.rank, fair.names
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
          scores[name], names[#names + 1] = score, name
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
      -- In a text a digit follows the tenant, and ':' follows '9'.
      local fetched = redis.call('ZRANGE', fair.lines, from, '(' .. name .. ':', 'BYLEX', 'LIMIT', '0', string.format('%d', wanted))
      fetched.at, fetched.is_whole, fetched.passed = 1, #fetched < wanted, line and line.passed
      fair.line_of = fair.line_of or {}
      fair.line_of[name], line = fetched, fetched
    end
    return line[line.at], line
  end

  -- What a tenant owes, or gets back. `free`: slots for waiters, for which tenants are read at once.
  function shares.report(fair, name, us, most_us, free)
    if fair.rank == 0 then
      shares.read(fair, math.min(free, 16))
    end
    if not fair.time then
      return
    end
    local scores, names = fair.scores, fair.names
    local score = scores[name]
    if score == nil then
      score = tonumber(redis.call('ZSCORE', fair.shares, name)) or false
      if score and score < IDLE then
        names[#names + 1] = name
      end
    end
    scores[name] = score or us > 0 and IDLE + fair.time
    if scores[name] then
      shares.pay(fair, name, us, most_us)
    end
  end

  -- `settle`. A waiter that is in no line any more has paid for a grant, and left before it knew. In a repeated exchange fewer members
  -- are removed, and nothing is settled again: in part would need names.
  function shares.settle(fair, removed, acquires, free)
    local dues = fair.dues
    local settled_units, left, reports, settled = struct.unpack('<dddd', dues)
    local is_settled = removed >= settled_units + left
    local from = DUES_HEAD + PAYER_BYTES * acquires + 1
    for _ = 1, left do
      local text = string.sub(dues, from, from + LINED_CHARS - 1)
      if redis.call('ZREM', fair.lines, text) == 0 and is_settled then
        shares.report(fair, string.sub(text, 1, TENANT_CHARS), -tonumber(string.sub(text, COST_AT)), 0, free)
      end
      from = from + LINED_CHARS
    end
    for _ = 1, reports + (is_settled and settled or 0) do
      local us, most_us = struct.unpack('<dd', dues, from + TENANT_CHARS)
      shares.report(fair, string.sub(dues, from, from + TENANT_CHARS - 1), us, most_us, free)
      from = from + REPORT_BYTES
    end
  end

  -- A newcomer joins the line of its tenant. `number_waiting`: with this one.
  function shares.join(fair, payer_at, id, ticket, number_waiting)
    local dues, scores, entering = fair.dues, fair.scores, fair.entering or {}
    local name = string.sub(dues, payer_at, payer_at + TENANT_CHARS - 1)
    local cost = string.sub(dues, payer_at + TENANT_CHARS, payer_at + PAYER_BYTES - 1)
    local size, arrival = #entering, ticket - FIRST_TICKET
    local arrival_text = string.format('%07d%09d', arrival / 1000000000, arrival % 1000000000)
    entering[size + 1], entering[size + 2] = '0', name .. arrival_text .. id .. cost
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

  -- The first waiter of the tenant that has paid for the least, and its text in the line of this tenant. Without any: nil.
  -- `gone`: texts that leave the lines; `served`: those that no longer wait, though this is not written yet.
  function shares.next_by_share(ledger, gone, served, free)
    local fair = ledger.fair
    local scores, names = fair.scores, fair.names
    while budget > 0 do
      local tenant, turn, paid = nil, nil, nil
      for i = 1, #names do
        local name = names[i]
        local score = scores[name]
        if not tenant or score < paid or score == paid and name < tenant then
          tenant, turn, paid = name, i, score
        end
      end
      if not fair.all and (not tenant or paid > fair.bound or paid == fair.bound and tenant > fair.bound_name) then
        shares.read(fair, math.min(free, 16))
        if not fair.time then
          return nil
        end
      elseif not tenant then
        return nil
      else
        local text, line = shares.first_of(fair, tenant, free)
        if text then
          local id = string.sub(text, PERMIT_AT, COST_AT - 1)
          line.at, fair.tenant, fair.turn = line.at + 1, tenant, turn
          -- Waiters come first in the set.
          if not served[id] and (redis.call('ZRANK', ledger.key, id) or ledger.waiting) < ledger.waiting then
            return id, text
          end
          gone[#gone + 1], budget = text, budget - 1
        else
          table.remove(names, turn)
          if not line.passed then
            scores[tenant], fair.changed[tenant], budget = paid + IDLE, true, budget - 1
          end
        end
      end
    end
  end

  -- Charges the tenant of the waiter that `next_by_share` found for its grant, in advance. What other slots cost, their replicas report.
  -- Virtual time moves a little with each grant: machine/shares.rs says why.
  function shares.charge(fair, text, waiting)
    local tenant, cost_us = fair.tenant, tonumber(string.sub(text, COST_AT))
    fair.time = math.max(fair.time, fair.scores[tenant])
    shares.pay(fair, tenant, cost_us, cost_us)
    local next_us = math.min(fair.time + math.floor(cost_us / (waiting + 1)), LAST_US)
    fair.time = math.max(fair.time, math.min(next_us, fair.scores[tenant]))
    local more, line = shares.first_of(fair, tenant, 1)
    if not more and not line.passed then
      table.remove(fair.names, fair.turn)
      fair.scores[tenant] = fair.scores[tenant] + IDLE
    end
  end
end
