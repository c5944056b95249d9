
-- The steps after `release`. If the exchange has no claims, the steps after the claims follow directly. At first the
-- queue is assumed to be empty.
local function run(ledger, early, size, removed, first, renews, adopts, acquires, waits)
  local key, limit, heavy, reply = ledger.key, ledger.limit, ledger.heavy, ledger.reply
  local latest_end_ms = now_ms + MAX_LEASE_MS
  -- Until they are counted: holders whose lease lasts beyond this second (`lasting`); `early` are all other holders, and waiters.
  local lasting, in_use, waiting, brief = ledger.in_use, ledger.in_use, 0, adopts + acquires == 0
  -- The queue comes first in the set, then the holders, nearest deadline first.
  if early > 0 then
    waiting = call('ZCOUNT', key, '-inf', '-1')
    in_use = lasting + early - waiting
  end

  -- `pause`: the longest applies. An end too far ahead was set before the clock was stepped back. A pause that an
  -- operator has ended is marked by a half, and stays for as long as it was to last, for replicas that ask whether it goes
  -- on: they would repeat a pause that the store has lost.
  if ledger.pause > 0 or in_use + waiting < size then -- a member that neither holds nor waits may be a pause
    local before = tonumber(call('ZSCORE', key, PAUSE)) or 0
    local earliest, latest = ALIVE + now_ms + RAMP_MS, ALIVE + latest_end_ms + RAMP_MS
    local ended = before % 1
    local over = math.min(before - ended, latest)
    if ledger.pause == 1 then
      ended = 0.5
    elseif ledger.pause > 1 and (ended == 0 or not ledger.asks_pause) then
      over = math.max(ended == 0 and over or 0, math.min(earliest + ledger.pause - 1, latest))
      ended = 0
    end
    local lasts = over > ALIVE + now_ms
    local score = lasts and over + ended or 0
    if score ~= before then
      call('ZREM', key, PAUSE) -- also allows the next command at maxmemory
      if lasts then
        call('ZADD', key, string.format('%.1f', score), PAUSE)
      end
    end
    ledger.pause_over = lasts and over - ALIVE
    if lasts and ended == 0 then
      local end_ms = over - ALIVE - RAMP_MS
      limit = math.ceil(limit * math.max(math.min(now_ms - end_ms, RAMP_MS), 0) / RAMP_MS)
      ledger.limit, ledger.pause_end_ms, brief = limit, end_ms, false
    end
  end

  -- `renew` never shortens a lease, since another replica may have granted a longer one. An ended lease is revived if
  -- it has not been expired yet: its slot is still free. `adopt` runs before `promote`, so that the queue gets only the
  -- slots that the true holders leave. It may exceed the limit. The first renewed waiters learn their places.
  local extends, changed, places = renews + adopts, 0, nil
  if extends > 0 and adopts == 0 and waiting == 0 and not heavy then -- as in the short way
    changed = call('ZADD', key, 'XX', 'GT', 'CH', scored(lease_end_text, first, renews))
  end
  if changed < extends then
    local list, missing = {}, false
    for i, score in ipairs(scores_of(key, unpack(ARGV, first, first + extends - 1))) do
      local id, standing, text = ARGV[first + i - 1], score or ABSENT, lease_end_text
      local weight = heavy and string.find(DIGITS, sub(id, WEIGHT_AT, WEIGHT_AT), 1, true) or 1
      if score and score >= 0 then
        standing = math.max(math.min(score, latest_end_ms), lease_end_ms)
        text = standing == lease_end_ms and text or text_of(standing)
        push(list, text, id, weight)
      elseif i > renews then
        standing, missing = -lease_end_ms, true
        push(list, text, id, weight)
        in_use, waiting = in_use + weight, score and waiting - 1 or waiting
      else
        standing = math.floor(standing)
        places = places or {}
        if score and #places < MAX_PLACES then
          places[#places + 1] = call('ZCOUNT', key, '-inf', string.format('%.1f', score))
        end
      end
      reply[LEDGER_REPLY + i] = standing
    end
    on_all('ZADD', key, list)
    if missing and ledger.tells then
      redis.pcall('PUBLISH', wake_channel .. 'all', 'lost ' .. key)
    end
    brief = false
  else
    for i = 1, extends do
      reply[LEDGER_REPLY + i] = lease_end_ms
    end
  end

  -- `list`, within the budget
  local listed = ledger.asks_holders and in_use <= budget and {}
  if listed then
    budget, brief = budget - in_use, false
    for _, member in ipairs(call('ZRANGE', key, waiting, waiting + in_use - 1)) do
      if #member < UNIT_AT and sub(member, 1, REPLICA_CHARS) == replica then
        listed[#listed + 1] = sub(member, WEIGHT_AT)
      end
    end
  end

  -- `expire`, within the budget, plus the rest of the last permit.
  local ended = in_use > lasting and call('ZCOUNT', key, '0', now_ms) or 0
  local expired = math.min(ended, budget)
  if expired > 0 then
    budget = budget - expired
    if expired < ended then
      local last = waiting + expired - 1
      local member = call('ZRANGE', key, last, last)[1]
      local weight = string.find(DIGITS, sub(member, WEIGHT_AT, WEIGHT_AT), 1, true)
      expired = expired + weight - string.find(DIGITS, sub(member, UNIT_AT, UNIT_AT), 1, true)
    end
    call('ZREMRANGEBYRANK', key, waiting, waiting + expired - 1)
    in_use = in_use - expired
  end
  if ended > expired then
    replies[2] = 1
  end

  -- `promote`, from the head of the queue on. A waiter whose replica is silent, or should receive wake-ups but does not,
  -- is passed over: it keeps its place, and a later waiter gets the slot. The script asks before publishing, because `PUBLISH`
  -- counts only subscribers at this server, while its message may reach others, and would count as a grant there.
  --
  -- A waiter that needs more units than are free blocks the queue behind it, because it would otherwise starve. A
  -- permit heavier than the limit, which was lowered in the meantime, enters alone, once the ramp after a pause is over.
  local alive, subscribers, promoted, promotions, passed, window = nil, nil, nil, 0, 0, limit - in_use
  local until_text, blocked, was_full = nil, false, window <= 0
  if window > 0 and waiting > 0 then
    promoted, until_text = {}, text_of(promoted_end_ms)
  end
  local fair = ledger.fair
  -- While `in_line`, the waiters of a fair ledger are served in the order of shares, each as the `entry` of its `line`. Once
  -- nobody is left there, `line` is false, and the queue is passed once more in order of arrival: as many waiters as entries
  -- do not prove that each has one.
  local in_line, line, gone = fair, nil, fair and {}
  if ledger.owes then
    shares.settle(fair, removed, acquires, waiting > 0 and math.max(window, 0) or 0)
  end
  if fair and window > 0 and waiting > 0 and call('ZCARD', fair.lines) < waiting then
    -- Some waiters stand in no line, since it was lost, or their replica is older: the queue is served in order of arrival.
    in_line, line = nil, false
  end
  while in_use < limit and passed < waiting and passed < MAX_PASSED and not blocked do
    local ids, tenant, entry, place = nil, nil, nil, nil
    while in_line and not entry and budget > 0 do
      -- The tenant that has paid for the least, and the first in its line.
      local scores, names, paid = fair.scores, fair.waiting, nil
      tenant = nil
      for i = 1, #names do
        local name = names[i]
        local score = scores[name]
        if not tenant or score < paid or score == paid and name < tenant then
          tenant, place, paid = name, i, score
        end
      end
      if not fair.all and (not tenant or paid > fair.bound or paid == fair.bound and tenant > fair.bound_name) then
        shares.read(fair, math.min(limit - in_use, 16))
        in_line = fair.time and in_line
      elseif tenant then
        entry, line = shares.first_of(fair, tenant, limit - in_use)
        if not entry then
          table.remove(names, place)
          if not line.passed then
            scores[tenant], fair.changed[tenant], budget = paid + IDLE, true, budget - 1
          end
        end
      else
        in_line = nil
      end
    end
    if entry then
      ids = { sub(entry, PERMIT_AT, COST_AT - 1) }
    elseif in_line then
      replies[2] = 1
      break
    elseif fair and line ~= false then
      -- All other waiters in the lines were passed over, or have left.
      passed, window, line = 0, limit - in_use, false
    end
    window = ids and math.min(1, budget) or math.min(window, waiting - passed, MAX_PASSED - passed, budget)
    if window == 0 then
      replies[2] = 1
      break
    end
    if not ids then
      local first_rank = passed == 0 and '0' or passed .. ''
      ids = call('ZRANGE', key, first_rank, string.format('%d', passed + window - 1))
    end
    local list, dead, skipped, more_units = {}, nil, nil, 0
    for _, id in ipairs(ids) do
      if in_use == limit then
        break
      end
      local owner, heartbeat = sub(id, 1, REPLICA_CHARS), true
      local waits = true
      if entry then
        waits = (call('ZRANK', key, id) or waiting) < waiting
        line.at = line.at + 1
      end
      if waits and owner ~= replica then
        alive, subscribers = alive or {}, subscribers or {}
        heartbeat = is_alive(key, alive, owner)
        if heartbeat and heartbeat < ALIVE + now_ms then
          subscribers[owner] = 0 -- it is silent
        elseif heartbeat and heartbeat % 2 == 1 and not subscribers[owner] then
          -- By pcall: an ACL may forbid it.
          subscribers[owner] = redis.pcall('PUBSUB', 'NUMSUB', wake_channel .. owner)[2] or 1
        end
      end
      if not waits then
        budget = budget - 1
        gone[#gone + 1] = entry
      elseif not heartbeat then
        dead, budget = dead or {}, budget - 1
        dead[#dead + 1] = id
        if entry then
          gone[#gone + 1] = entry
        end
      elseif subscribers and subscribers[owner] == 0 then
        skipped = skipped or {}
        skipped[#skipped + 1] = id
        if entry then
          line.passed = true
        end
      else
        local weight = 1
        if string.byte(id, WEIGHT_AT) ~= LIGHT then
          weight = string.find(DIGITS, sub(id, WEIGHT_AT, WEIGHT_AT), 1, true)
          if in_use + (in_use > 0 and weight or math.min(weight, ledger.most)) > limit then
            blocked = true
            break
          end
          more_units, budget = weight - 1, math.max(budget, weight)
        end
        in_use, promotions, budget = in_use + weight, promotions + weight, budget - weight
        push(list, until_text, id, weight)
        if entry then
          local cost_us = tonumber(sub(entry, COST_AT))
          gone[#gone + 1] = entry
          fair.time = math.max(fair.time, fair.scores[tenant])
          shares.pay(fair, tenant, cost_us, cost_us)
          local next_us = math.min(fair.time + math.floor(cost_us / (waiting + 1)), LAST_US)
          fair.time = math.max(fair.time, math.min(next_us, fair.scores[tenant]))
          if not shares.first_of(fair, tenant, 1) and not line.passed then
            table.remove(fair.waiting, place)
            fair.scores[tenant] = fair.scores[tenant] + IDLE
          end
        end
        local names = promoted[owner] or {}
        names[#names + 1], promoted[owner] = sub(id, WEIGHT_AT), names
        if weight > 1 then -- fewer fit behind it than the window has
          break
        end
      end
    end
    if skipped then
      local marks = {}
      for i, ticket in ipairs(scores_of(key, unpack(skipped))) do
        if ticket % 1 == 0 then
          push(marks, string.format('%.1f', ticket + 0.5), skipped[i])
        end
      end
      on_all('ZADD', key, marks)
      passed = passed + #skipped
    end
    on_all('ZADD', key, list)
    waiting = waiting - #list / 2 + more_units
    if dead then
      call('ZREM', key, unpack(dead))
      waiting = waiting - #dead
    end
    window = 8 * window -- some were dead or passed over, so many more may be
  end
  if fair then
    on_all('ZREM', fair.lines, gone)
  end
  if promotions > 0 then
    for owner, names in pairs(promoted) do
      if owner ~= replica then
        local wake = text_of(now_us) .. ' ' .. until_text .. ' ' .. table.concat(names) .. ' ' .. key
        -- By pcall: an ACL may forbid it, and then waiters learn of their slots when they poll.
        redis.pcall('PUBLISH', wake_channel .. owner, wake)
      end
    end
  end
  local own = promoted and promoted[replica]

  -- If the clock was stepped back, dead holders would keep their slots until it has caught up.
  if was_full or blocked or heavy then
    too_late_text = too_late_text or '(' .. text_of(latest_end_ms)
    local far = call('ZCOUNT', key, too_late_text, LAST_DEADLINE)
    local brought_forward = math.min(far, budget)
    if brought_forward > 0 then
      budget = budget - brought_forward
      local last, list = waiting + in_use - 1, {}
      local first_rank = last - brought_forward + 1
      if brought_forward < far then -- plus the rest of the last permit
        local member = call('ZRANGE', key, first_rank, first_rank)[1]
        first_rank = first_rank + 1 - string.find(DIGITS, sub(member, UNIT_AT, UNIT_AT), 1, true)
      end
      for _, member in ipairs(call('ZRANGE', key, first_rank, last)) do
        push(list, sub(too_late_text, 2), member)
      end
      on_all('ZADD', key, list)
      brought_forward = #list / 2
    end
    if far > brought_forward then
      replies[2] = 1
    end
  end

  -- `acquire`
  ledger.in_use, ledger.waiting, ledger.promoted, ledger.passed = in_use, waiting, promotions, passed
  if acquires > 0 then
    first = first + extends
    for i, score in ipairs(scores_of(key, unpack(ARGV, first, first + acquires - 1))) do
      local id, wait = ARGV[first + i - 1], sub(packed, waits + i - 1, waits + i - 1)
      local payer = fair and DUES_HEAD + PAYER_BYTES * (i - 1) + 1
      local standing = score and math.floor(score) or admit(ledger, id, wait == '1', payer)
      reply[#reply + 1] = standing
      if fair and not score and standing < 0 then
        shares.join(fair, payer, id, standing, ledger.waiting)
        replies[2] = ledger.more and 1 or replies[2]
      end
    end
  end
  for i = 1, own and #own or 0 do
    reply[#reply + 1] = own[i]
  end
  for i = 1, places and #places or 0 do
    reply[#reply + 1] = places[i]
  end
  reply[#reply + 1] = listed or nil
  if claim_count > 0 then
    enter(ledger)
    return reply
  end
  close(ledger)
  return brief and ledger.waiting == 0 and not own and ledger.in_use or reply
end

local ledgers = {} -- for the claims; false for a failed ledger
local dues = arg -- the dues of the next fair ledger
arg, record = 2, first_record
for i = 1, ledger_count do
  local limit, max_waiters, options, releases, renews, adopts, acquires, waits = struct.unpack(RECORD, packed, record)
  ledgers[i] = false
  local is_fair, owes = options % 128 >= 64, options % 256 >= 128
  local has_text = owes or is_fair and acquires > 0
  if not replies[i + 2] then
    local ledger = { -- preallocated
      key = KEYS[i], limit = limit, most = limit, max_waiters = max_waiters, -- `limit`: without what a pause takes
      waits = options % 4, reuse = (options % 16 - options % 4) / 4, heavy = options % 32 >= 16,
      tells = options % 64 >= 32, asks_holders = options % 512 >= 256, asks_pause = options % 1024 >= 512,
      pause = (options - options % 1024) / 1024, pause_end_ms = nil, pause_over = nil, fair = nil, owes = owes,
      in_use = counts[4 * i - 3], waiting = nil, promoted = nil, passed = nil, head = nil, ticket = nil,
      entering = {}, reply = { 0, 0, 0, 0, nil }, -- LEDGER_REPLY
    }
    local early, size, removed = counts[4 * i - 2], counts[4 * i - 1], counts[4 * i]
    if is_fair then
      shares = shares or functions_of_shares()
      ledger.fair = { -- preallocated
        lines = KEYS[i] .. LINES, shares = KEYS[i] .. SHARES, text = has_text and ARGV[dues],
        -- Payments of tenants, and the names whose payment has changed; the virtual time up to which tenants without waiters
        -- are forgotten; new entries of lines; whether payments begin anew.
        scores = {}, changed = {}, forgets = nil, entering = nil, began = nil,
        -- Virtual time; the tenants that wait, and their lines, as far as they were read: `rank` of them, the last with the
        -- score `bound` and the name `bound_name`, or `all`.
        time = nil, waiting = {}, line_of = nil, rank = 0, all = false, bound = -1, bound_name = '',
      }
    end
    local ok, result = pcall(run, ledger, early, size, removed, arg + releases, renews, adopts, acquires, waits)
    replies[i + 2], ledgers[i] = outcome(ok, result), ok and claim_count > 0 and ledger
  end
  dues = has_text and dues + 1 or dues
  arg, record = arg + releases + renews + adopts + acquires, waits + acquires
end
if refund_count + claim_count == 0 then
  return replies
end
