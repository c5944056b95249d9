-- One exchange of a replica with its ledgers: the same steps, in the same order, as in machine.rs.
--
-- A ledger is a sorted set. Its scores lie in four bands:
--   waiting   below 0         permit id     ticket, unique: lower goes first
--   holding   0 .. 2^51 - 1   permit id     deadline in ms
--   alive     2^51 .. 2^52-1  '@'..replica  2^51 + the time until which its waiters count as alive, in ms
--   keeping   from 2^52 on    '~'..replica  2^52 + the time until which it may keep slots that came free, in ms
-- A permit id is the text of its replica (REPLICA_CHARS long) and the text of its number.
--
-- The state of a rate is a text, 'us rem rate refunded_us since_us' (see rate.rs): the theoretical arrival time is
-- us + rem / count.
--
-- KEYS   the ledgers, each once; then the states of rates, each once
-- ARGV   a text of packed numbers, SEVEN at a time: lease_ms, promote_ms, alive_ms, not_after_us, how many ledgers,
--        refunds and claims there are; then for each ledger: limit, max_waiters, needs (1 if the replica waits here; and
--        2 if others that keep slots are to be told when somebody waits or is refused, or 4 if it also wants to keep some
--        itself), how many permits to release, to renew, to adopt and to acquire, and behind these seven 1 or 0 for each
--        permit to acquire (whether it would wait); at the end the prefix of the channels for wake-ups, and the replica;
--        then for each ledger all these permits in this order;
--        then for each refund: the place of its state in KEYS, the rate's count, period_us and burst, the cost, and what
--        the charge made of the state: us, rem, refunded_us, since_us;
--        for each claim: how many charges and asks; for each charge the place of its state in KEYS, the rate's count,
--        period_us and burst, the cost, wait_us and whether it only looks on (0 or 1); for each ask the place of its
--        ledger in KEYS, what to do if there is no slot (0: refuse the claim, 1: wait, 2: go on without it), and the permit
-- Reply  now_us, whether there is more to sweep (0 or 1), then for each ledger the text of its error, or a list: in
--        use, waiting, ticket of the head (0: none), nearest deadline in ms (0: nobody holds or nobody waits), a
--        standing for each permit renewed, adopted and acquired, the numbers of own waiters promoted. In place of the
--        list there may be only how many are in use: nobody waits then, nothing was adopted, and all permits renewed or
--        acquired hold for a lease from now;
--        then for each claim the text of its error, or a list: for each charge 0 (not charged), or the time from which
--        on the rate would allow it, in us with a minus, or the time from which on it may begin, in us, and the new
--        state: us, rem, refunded_us, since_us; and a standing for each ask.
--        A standing is a ticket, a deadline, or one of ABSENT, FULL, LINE_FULL, STALE. That of an adopted permit which
--        was not there is its deadline with a minus.
-- Tells  other replicas of their waiters promoted: 'granted_us until_ms numbers key'; or, without numbers, that somebody
--        wants the slots that they keep
--
-- Lua makes functions anew for each call, and finds for each what it uses from around it: ten such findings take as long
-- as a command. So there are two ways. Most ledgers need only the short one, without functions of its own: `release`,
-- `renew` and `acquire`, where the other steps would change nothing, since nobody waits, no lease has ended and all who
-- come get a slot. The long one, all steps as in machine.rs, comes behind it and goes on behind `release`; its steps are
-- functions only where two places need them.
--
-- Numbers are slow to pass to a command, so what is passed often is a text.

local SEVEN, REPLICA_CHARS = '<ddddddd', 16
local ALIVE, LAST_DEADLINE = 2251799813685248, '2251799813685247'
local MAX_LEASE_MS = 3600000

-- Redis keeps small sets as lists, which are slow from some members on. One whose name is too long for a list makes a
-- skip list of it, and need not stay.
local LIST_SIZE, LONG_NAME = 24, '.................................................................'

local call, sub = redis.call, string.sub

local packed = ARGV[1]
local lease_ms, promote_ms, alive_ms, not_after_us, ledgers, refunds, claims, first_ledger = struct.unpack(SEVEN, packed)

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = (now_us - now_us % 1000) / 1000
local lease_end_ms = now_ms + lease_ms
local latest_end_ms = now_ms + MAX_LEASE_MS -- a deadline beyond it was set before the clock was stepped back
local stale = now_us > not_after_us

-- What is to last is to last for the leases and the mark of this call. The key gets more than that, so that it is told
-- once a lease.
local ttl_ms = lease_ms + alive_ms

local lease_end_text, too_late_text -- made when needed
local may_write = false -- even at maxmemory, from the first write of the call on

-- By `%.0f` or `..` it takes longer. In two parts: some servers have 32 bits for `%d`.
local function text_of(number)
  return string.format('%d%09d', number / 1000000000, number % 1000000000)
end

-- These of ARGV with this score, for ZADD.
local function scored(score, first, count)
  local list = { score, ARGV[first] }
  for i = 2, count do
    list[2 * i - 1], list[2 * i] = score, ARGV[first + i - 1]
  end
  return unpack(list)
end

local replies, at, place = { now_us, 0, nil }, 2, first_ledger -- with room for one more; the next of ARGV and of SEVEN
local known = refunds + claims > 0 and {} -- for the long way: how many hold beyond this second, of how many members
for i = 1, ledgers do
  local limit, _, needs, releases, renews, adopts, acquires, wishes = struct.unpack(SEVEN, packed, place)
  local key, first, lasting, size, goes_on, failure = KEYS[i], at + releases, 0, 0, false, nil
  if not lease_end_text and renews + adopts + acquires + claims > 0 then
    lease_end_text = text_of(lease_end_ms)
  end
  -- At maxmemory Redis lets a script write if its first write may free memory, whether or not it does: so leases are
  -- renewed and adopted even then. Newcomers are refused, unless they come with these.
  if releases > 0 then
    size = redis.pcall('ZREM', key, unpack(ARGV, at, first - 1))
    may_write = true
  elseif renews + adopts > 0 and not may_write then
    size = redis.pcall('ZREM', key, '')
    may_write = true
  end
  if type(size) == 'number' then
    size = redis.pcall('ZCARD', key) -- by pcall: one ledger's error does not stop the others
  end
  if type(size) == 'table' then
    failure = size.err
  else
    if size > 0 then
      lasting = call('ZCOUNT', key, '(' .. time[1] .. '999', LAST_DEADLINE)
    end
    goes_on = lasting == size and adopts + claims == 0 and needs < 4
      and (acquires == 0 or not stale and lasting + acquires <= limit)
  end
  if goes_on and lasting >= limit then -- `reap` would set back deadlines that are too late
    too_late_text = too_late_text or '(' .. text_of(latest_end_ms)
    goes_on = call('ZCOUNT', key, too_late_text, LAST_DEADLINE) == 0
  end
  if goes_on and renews > 0 then
    -- Those that are there hold, and if all of them get later deadlines, all of them are there.
    goes_on = call('ZADD', key, 'XX', 'GT', 'CH', scored(lease_end_text, first, renews)) == renews
  end
  if goes_on and acquires > 0 then
    local entered = redis.pcall('ZADD', key, 'NX', scored(lease_end_text, first + renews, acquires))
    if type(entered) == 'table' then
      goes_on, failure = false, entered.err
    else
      goes_on = entered == acquires -- or this is a repeated exchange
      lasting, size = lasting + entered, size + entered
      if size >= LIST_SIZE and size - entered < LIST_SIZE then
        call('ZADD', key, '0', LONG_NAME)
        call('ZREM', key, LONG_NAME)
      end
    end
  end
  if goes_on and renews + acquires > 0 and (size == acquires or call('PTTL', key) < ttl_ms) then
    call('PEXPIRE', key, ttl_ms + lease_ms)
  end
  replies[i + 2] = failure or goes_on and lasting
  if not replies[i + 2] then
    known = known or {}
    known[2 * i - 1], known[2 * i] = lasting, size
  end
  at, place = first + renews + adopts + acquires, wishes + acquires
end
if not known then
  return replies
end

local ABSENT, FULL, LINE_FULL, STALE = 0, 1, 2, 3
local SWEEP_BUDGET = 1000

local replica, wake_channel = sub(packed, -REPLICA_CHARS), sub(packed, place, -REPLICA_CHARS - 1)
local handed_until_ms = now_ms + promote_ms
local budget = SWEEP_BUDGET

-- No list is too long for `unpack`: see MAX_PERMITS and the budget.
local function on_all(command, key, list)
  return #list > 0 and redis.call(command, key, unpack(list)) or 0
end

-- Adds to a list for ZADD.
local function push(list, score, member)
  local size = #list
  list[size + 1], list[size + 2] = score, member
end

-- In the order of the ids; false for one that is not there.
local function scores_of(key, ...)
  local scores = redis.call('ZMSCORE', key, ...)
  for i = 1, #scores do
    scores[i] = scores[i] and tonumber(scores[i])
  end
  return scores
end

local function score_at(key, rank)
  return tonumber(redis.call('ZRANGE', key, rank, rank, 'WITHSCORES')[2])
end

-- `alive` has those that were looked up. Who asks is alive.
local function is_alive(key, alive, owner)
  if owner ~= replica and alive[owner] == nil then
    local mark = tonumber(call('ZSCORE', key, '@' .. owner))
    alive[owner] = mark ~= nil and mark >= ALIVE + now_ms
  end
  return owner == replica or alive[owner]
end

-- Adds those who were admitted, and the replica's mark if it is given. Returns whether that is new.
local function enter(ledger, mark)
  local key, list, size = ledger.key, ledger.entering, ledger.in_use + ledger.waiting
  local before = size - #list / 2
  if mark then
    push(list, mark, '@' .. replica)
  end
  local added = on_all('ZADD', key, list)
  if size >= LIST_SIZE and before < LIST_SIZE then
    call('ZADD', key, '0', LONG_NAME)
    call('ZREM', key, LONG_NAME)
  end
  ledger.entering = {}
  return added > size - before
end

local function admit(ledger, id, waits)
  local waiting = ledger.waiting
  if stale then
    return STALE
  end
  if waiting == 0 and ledger.in_use < ledger.limit then
    ledger.in_use = ledger.in_use + 1
    push(ledger.entering, lease_end_text, id)
    return lease_end_ms
  end
  if not waits then
    ledger.refused = true
    return FULL
  end
  -- `sweep`: drops dead waiters from a line that is full, if a mark that has ended tells that there may be some. A line
  -- that is longer than the budget is searched in part, somewhere.
  if waiting >= ledger.max_waiters and not ledger.swept then
    enter(ledger)
    ledger.swept = true
    local key, now, window = ledger.key, ALIVE + now_ms, math.min(waiting, budget)
    if window > 0 and call('ZCOUNT', key, ALIVE, now - 1) > 0 then
      budget = budget - window
      local start = now_us % (waiting - window + 1)
      local dead, alive = {}, {}
      for _, other in ipairs(call('ZRANGE', key, start, start + window - 1)) do
        if not is_alive(key, alive, sub(other, 1, REPLICA_CHARS)) then
          dead[#dead + 1] = other
        end
      end
      on_all('ZREM', key, dead)
      waiting = waiting - #dead
      if #dead == 0 then
        call('ZREMRANGEBYSCORE', key, ALIVE, now - 1)
      end
    end
    ledger.waiting = waiting
  end
  if waiting >= ledger.max_waiters then
    ledger.refused = true
    return LINE_FULL
  end
  -- Tickets never go back, so that a ticket below the head's is known to have left the line.
  local ticket, text = ledger.ticket and ledger.ticket + 1, nil
  if not ticket then
    local FIRST_TICKET = -4503599627370496 -- -2^52: with the time in us added, negative until the year 2112
    ticket = FIRST_TICKET + now_us
    text = '-' .. text_of(-ticket)
    if waiting > 0 and call('ZCOUNT', ledger.key, text, '-1') > 0 then
      ticket, text = score_at(ledger.key, waiting - 1 .. '') + 1, nil
    end
  end
  if waiting == 0 then
    ledger.head = ticket
  end
  ledger.ticket, ledger.waiting = ticket, waiting + 1
  push(ledger.entering, text or '-' .. text_of(-ticket), id)
  return ticket
end

-- What comes after the claims: the reply tells how it is then.
local function close(ledger)
  local KEEPING, RIGHT_MS = 4503599627370496, 100
  local key, in_use, waiting, reuse, reply = ledger.key, ledger.in_use, ledger.waiting, ledger.reuse, ledger.reply
  -- `alive`: marks matter to a line only. One that ended long ago goes when another comes, or they would pile up.
  if enter(ledger, waiting > 0 and ledger.waits and text_of(ALIVE + now_ms + alive_ms)) then
    call('ZREMRANGEBYSCORE', key, ALIVE, ALIVE + now_ms - MAX_LEASE_MS - 1)
  elseif waiting == 0 and in_use == 0 then
    call('ZREMRANGEBYSCORE', key, ALIVE, '+inf')
  end
  -- `recall`: the right to keep slots is over for the other replicas. Each is told once; if that is lost, the right ends
  -- by itself. The one that asks sees it in the reply.
  if reuse > 0 and (ledger.refused or waiting > 0) then
    local told = {}
    for _, mark in ipairs(call('ZRANGE', key, KEEPING, '+inf', 'BYSCORE')) do
      local owner = sub(mark, 2)
      if owner ~= replica then
        redis.pcall('PUBLISH', wake_channel .. owner, string.format('%.0f 0  %s', now_us, key))
        told[#told + 1] = mark
      end
    end
    on_all('ZREM', key, told)
  end
  -- `keep`: rights that have ended go when another comes, so that they cannot pile up.
  if reuse == 2 and waiting == 0 and in_use > 0 and in_use <= ledger.limit then
    if call('ZADD', key, KEEPING + now_ms + RIGHT_MS, '~' .. replica) == 1 then
      call('ZREMRANGEBYSCORE', key, KEEPING, KEEPING + now_ms - 1)
    end
  end
  if in_use + waiting > 0 and call('PTTL', key) < ttl_ms then
    call('PEXPIRE', key, ttl_ms + lease_ms)
  end
  reply[1], reply[2] = in_use, waiting
  if waiting > 0 then
    reply[3] = ledger.head or score_at(key, '0')
    reply[4] = in_use == 0 and 0 or in_use == ledger.handed and handed_until_ms or score_at(key, waiting .. '')
  end
end

-- The steps behind `release`; also those after the claims, if there are none. At first nobody is known to wait.
local function run(ledger, size, first, renews, adopts, acquires, wishes)
  local key, limit, reply = ledger.key, ledger.limit, ledger.reply
  local lasting, in_use, waiting, brief = ledger.in_use, ledger.in_use, 0, adopts + acquires == 0
  -- The line comes first in the set, then the holders, nearest deadline first.
  if lasting < size then
    in_use, waiting = call('ZCOUNT', key, '0', LAST_DEADLINE), call('ZCOUNT', key, '-inf', '-1')
  end

  -- `renew` never shortens a lease, since another replica may have granted a longer one. A lease that has ended comes back
  -- to life if it was not reaped: its slot was not given away. `adopt` comes before `promote`, so that the line gets what
  -- the true holders leave. May exceed the limit.
  local extends, changed = renews + adopts, 0
  if extends > 0 and adopts == 0 and waiting == 0 then -- as in the short way
    changed = call('ZADD', key, 'XX', 'GT', 'CH', scored(lease_end_text, first, renews))
  end
  if changed < extends then
    local list = {}
    for i, score in ipairs(scores_of(key, unpack(ARGV, first, first + extends - 1))) do
      local standing, text = score or ABSENT, lease_end_text
      if score and score >= 0 then
        standing = math.max(math.min(score, latest_end_ms), lease_end_ms)
        text = standing == lease_end_ms and text or text_of(standing)
        push(list, text, ARGV[first + i - 1])
      elseif i > renews and stale then
        standing = STALE
      elseif i > renews then
        standing = -lease_end_ms
        push(list, text, ARGV[first + i - 1])
        in_use, waiting = in_use + 1, score and waiting - 1 or waiting
      end
      reply[4 + i] = standing
    end
    on_all('ZADD', key, list)
    brief = false
  else
    for i = 1, extends do
      reply[4 + i] = lease_end_ms
    end
  end

  -- `reap`, as much as the budget allows.
  local ended = in_use > lasting and call('ZCOUNT', key, '0', now_ms) or 0
  local reaped = math.min(ended, budget)
  if reaped > 0 then
    call('ZREMRANGEBYRANK', key, waiting, waiting + reaped - 1)
    in_use, budget = in_use - reaped, budget - reaped
  end
  local far = 0
  if in_use >= limit then -- the clock was stepped back: the dead among these would hold their slots until it is there again
    too_late_text = too_late_text or '(' .. text_of(latest_end_ms)
    far = call('ZCOUNT', key, too_late_text, LAST_DEADLINE)
    local set_back = math.min(far, budget)
    far, budget = far - set_back, budget - set_back
    if set_back > 0 then
      local last = waiting + in_use - 1
      local list = {}
      for _, id in ipairs(call('ZRANGE', key, last - set_back + 1, last)) do
        push(list, sub(too_late_text, 2), id)
      end
      on_all('ZADD', key, list)
    end
  end
  replies[2] = (ended > reaped or far > 0) and 1 or replies[2]

  -- `promote`, first those at the head of the line.
  local promoted, alive, handed, window = {}, {}, 0, limit - in_use
  local until_text = window > 0 and waiting > 0 and text_of(handed_until_ms)
  while in_use < limit and waiting > 0 do
    window = math.min(window, waiting, budget)
    if window == 0 then
      replies[2] = 1
      break
    end
    local list, dead = {}, {}
    for _, id in ipairs(call('ZRANGE', key, '0', string.format('%d', window - 1))) do
      if in_use == limit then
        break
      end
      budget, waiting = budget - 1, waiting - 1
      local owner = sub(id, 1, REPLICA_CHARS)
      if is_alive(key, alive, owner) then
        in_use, handed = in_use + 1, handed + 1
        push(list, until_text, id)
        local numbers = promoted[owner] or {}
        numbers[#numbers + 1], promoted[owner] = sub(id, REPLICA_CHARS + 1), numbers
      else
        dead[#dead + 1] = id
      end
    end
    on_all('ZADD', key, list)
    on_all('ZREM', key, dead)
    window = budget -- some were dead, and so may be many
  end
  for owner, numbers in pairs(promoted) do
    if owner ~= replica then
      local wake = string.format('%.0f %.0f %s %s', now_us, handed_until_ms, table.concat(numbers), key)
      -- By pcall: an ACL may forbid it, and then waiters learn of their slots when they ask.
      redis.pcall('PUBLISH', wake_channel .. owner, wake)
    end
  end

  ledger.in_use, ledger.waiting, ledger.handed = in_use, waiting, handed
  if acquires > 0 then
    first = first + extends
    for i, score in ipairs(scores_of(key, unpack(ARGV, first, first + acquires - 1))) do
      local wish = sub(packed, wishes + i - 1, wishes + i - 1)
      reply[#reply + 1] = score or admit(ledger, ARGV[first + i - 1], wish == '1')
    end
  end
  local own = promoted[replica]
  for i = 1, own and #own or 0 do
    reply[#reply + 1] = own[i]
  end
  if claims > 0 then
    enter(ledger)
    return reply
  end
  close(ledger)
  return brief and ledger.waiting == 0 and not own and ledger.in_use or reply
end

-- As the text of an error, if it is one.
local function told(ok, result)
  return ok and result or type(result) == 'table' and result.err or result
end

local states = {} -- of the ledgers, for the claims; false for one that has failed
at, place = 2, first_ledger
for i = 1, ledgers do
  local limit, max_waiters, needs, releases, renews, adopts, acquires, wishes = struct.unpack(SEVEN, packed, place)
  states[i] = false
  if not replies[i + 2] then
    local ledger = { -- with room for all
      key = KEYS[i], limit = limit, max_waiters = max_waiters, waits = needs % 2 == 1, reuse = (needs - needs % 2) / 2,
      in_use = known[2 * i - 1], waiting = nil, handed = nil, head = nil, ticket = nil,
      entering = {}, reply = { 0, 0, 0, 0, nil },
    }
    local ok, result = pcall(run, ledger, known[2 * i], at + releases, renews, adopts, acquires, wishes)
    replies[i + 2], states[i] = told(ok, result), ok and claims > 0 and ledger
  end
  at, place = at + releases + renews + adopts + acquires, wishes + acquires
end

-- These functions are made only for those who need them.
if refunds + claims > 0 then
  local WAIT, IF_FREE = '1', '2'
  local MAX_WAIT_US, MAX_EXACT = 86400000000, 4503599627370496
  -- The server reckons from a time a little before ours, and rounds.
  local TTL_SPARE_MS = 2

  local tats = {} -- the states of rates by their place in KEYS; false: there is none
  local changed = {} -- those to be written

  -- So many at a rate, as microseconds and a remainder in parts of the count. The product is at most 2^52, so all of
  -- this is exact.
  local function time_of(cost, count, period_us)
    local parts = cost * period_us
    local rem = parts % count
    return (parts - rem) / count, rem
  end

  local function stored(place)
    if tats[place] == nil then
      local text, tat = call('GET', KEYS[place]), false
      if text then
        local us, rem, rate, refunded_us, since_us = string.match(text, '^(%d+) (%d+) (%S+) (%d+) (%d+)$')
        if not us then
          error('WRONGTYPE the key of a rate holds something else', 0)
        end
        tat = { us = tonumber(us), rem = tonumber(rem), rate = rate }
        tat.refunded_us, tat.since_us = tonumber(refunded_us), tonumber(since_us)
      end
      tats[place] = tat
    end
    return tats[place]
  end

  -- A rate as it is named in a state.
  local function rate_at(from)
    return ARGV[from + 1] .. '/' .. ARGV[from + 2] .. '/' .. ARGV[from + 3]
  end

  -- The state as this rate counts; nil if it is over. One too far ahead was set before the clock was stepped back.
  local function read(place, rate, burst_us, burst_rem)
    local tat = stored(place)
    if not tat or tat.us < now_us or tat.us == now_us and tat.rem == 0 then
      return nil
    end
    local us, rem, refunded_us, since_us = tat.us, tat.rem, tat.refunded_us, tat.since_us
    if tat.rate ~= rate then
      us, rem, refunded_us, since_us = rem > 0 and us + 1 or us, 0, 0, since_us + 1
    end
    local ahead_us = us - now_us - MAX_WAIT_US
    if ahead_us > burst_us or ahead_us == burst_us and rem > burst_rem then
      us, rem, refunded_us, since_us = now_us + MAX_WAIT_US + burst_us, burst_rem, 0, since_us + 1
    end
    return { us = us, rem = rem, rate = rate, refunded_us = refunded_us, since_us = since_us }
  end

  -- The reasons are in rate.rs.
  local function refund()
    local place, count, period_us = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
    local burst_us, burst_rem = time_of(tonumber(ARGV[at + 3]), count, period_us)
    local cost_us, cost_rem = time_of(tonumber(ARGV[at + 4]), count, period_us)
    local tat = read(place, rate_at(at), burst_us, burst_rem)
    local refunded_us = tonumber(ARGV[at + 7])
    if not tat or tat.since_us ~= tonumber(ARGV[at + 8]) or tat.refunded_us < refunded_us then
      return
    end
    local top_us, top_rem = tonumber(ARGV[at + 5]) - (tat.refunded_us - refunded_us), tonumber(ARGV[at + 6])
    local is_last = top_us == tat.us and top_rem == tat.rem
    local ahead_us = tat.us - now_us
    if top_us > tat.us or top_us == tat.us and top_rem > tat.rem then
      return
    end
    if is_last and (ahead_us > cost_us or ahead_us == cost_us and tat.rem >= cost_rem) then
      tat.us, tat.rem = tat.us - cost_us, tat.rem - cost_rem
      if tat.rem < 0 then
        tat.us, tat.rem = tat.us - 1, tat.rem + count
      end
      tats[place], changed[place] = tat, true
      return
    end
    local share_us = math.min(cost_us, top_us - now_us)
    if share_us <= 0 or (ahead_us > burst_us or ahead_us == burst_us and tat.rem > burst_rem) and not is_last then
      return
    end
    tat.us, tat.refunded_us = tat.us - share_us, tat.refunded_us + share_us
    if tat.refunded_us > MAX_EXACT then
      tat.refunded_us, tat.since_us = 0, tat.since_us + 1
    end
    tats[place], changed[place] = tat, true
  end

  -- What a charge would make of its state, and from when on the request may begin. Nothing is charged yet.
  local function quote(from)
    local place, count, period_us = tonumber(ARGV[from]), tonumber(ARGV[from + 1]), tonumber(ARGV[from + 2])
    local burst, cost = tonumber(ARGV[from + 3]), tonumber(ARGV[from + 4])
    local shadow = ARGV[from + 6] == '1'
    local wait_us = shadow and 0 or tonumber(ARGV[from + 5])
    local rate = rate_at(from)
    local tat = read(place, rate, time_of(burst, count, period_us))
      or { us = now_us, rem = 0, rate = rate, refunded_us = 0, since_us = now_us }
    -- It may begin as soon as what was there before leaves room for it.
    local room_us, room_rem = time_of(burst - cost, count, period_us)
    local ahead_us = tat.us - now_us - room_us
    ahead_us = math.max(tat.rem > room_rem and ahead_us + 1 or ahead_us, 0)
    local cost_us, cost_rem = time_of(cost, count, period_us)
    tat.us, tat.rem = tat.us + cost_us, tat.rem + cost_rem
    if tat.rem >= count then
      tat.us, tat.rem = tat.us + 1, tat.rem - count
    end
    local allowed = ahead_us <= wait_us
    return {
      place = place, tat = tat, start_us = now_us + ahead_us,
      allowed = allowed, refuses = not allowed and not shadow, later = allowed and ahead_us > 0,
    }
  end

  local function fill(count, standing)
    local standings = {}
    for i = 1, count do
      standings[i] = standing
    end
    return standings
  end

  -- Takes slots up to the first ledger that makes it wait, or none at all. Returns the standings, and whether it was
  -- refused.
  local function walk(from, asks)
    local standings, free = fill(asks, ABSENT), {}
    for i = 1, asks do
      local state, want, id = states[tonumber(ARGV[from])], ARGV[from + 1], ARGV[from + 2]
      local standing = state.scores[id]
      if not standing and state.waiting == 0 and state.in_use < state.limit then
        free[#free + 1] = { i = i, state = state, id = id }
      else
        standing = standing or want == WAIT and admit(state, id, true) or FULL
        state.refused = state.refused or standing == FULL
        if (standing == FULL or standing == LINE_FULL) and want ~= IF_FREE then
          standings = fill(asks, ABSENT)
          standings[i] = standing
          return standings, true
        end
        standings[i] = standing
        if standing < 0 then
          state.scores[id] = standing
          break
        end
      end
      from = from + 3
    end
    for _, slot in ipairs(free) do
      local state = slot.state
      state.in_use = state.in_use + 1
      state.scores[slot.id] = lease_end_ms
      push(state.entering, lease_end_text, slot.id)
      standings[slot.i] = lease_end_ms
    end
    return standings, false
  end

  -- Whatever can fail comes before what changes anything.
  local function claim(charges, asks)
    local first_ask = at + 7 * charges
    local answer, standings = {}, nil
    local quotes, refused, later = {}, stale, false
    for i = first_ask, first_ask + 3 * asks - 1, 3 do
      local place = tonumber(ARGV[i])
      if not states[place] then
        error(replies[place + 2], 0)
      end
    end
    for i = 1, charges do
      local quoted = quote(at + 7 * (i - 1))
      quotes[i] = quoted
      refused, later = refused or quoted.refuses, later or quoted.later
    end
    -- Nothing is held while a time is waited for.
    if not refused and not later then
      standings, refused = walk(first_ask, asks)
    end
    for _, quoted in ipairs(quotes) do
      local size, tat = #answer, quoted.tat
      if stale or quoted.allowed and refused then
        answer[size + 1] = 0
      elseif not quoted.allowed then
        answer[size + 1] = -quoted.start_us
      else
        tats[quoted.place], changed[quoted.place] = tat, true
        answer[size + 1], answer[size + 2], answer[size + 3] = quoted.start_us, tat.us, tat.rem
        answer[size + 4], answer[size + 5] = tat.refunded_us, tat.since_us
      end
    end
    for _, standing in ipairs(standings or fill(asks, stale and STALE or ABSENT)) do
      answer[#answer + 1] = standing
    end
    return answer
  end

  -- At maxmemory Redis denies the first of these, and so all, or none.
  local function write()
    for place in pairs(changed) do
      local tat = tats[place]
      local text = '%.0f %.0f %s %.0f %.0f'
      text = string.format(text, tat.us, tat.rem, tat.rate, tat.refunded_us, tat.since_us)
      local ttl_ms = math.floor((tat.us - now_us) / 1000) + TTL_SPARE_MS
      call('SET', KEYS[place], text, 'PX', ttl_ms)
    end
    for _, state in ipairs(states) do
      if state then
        enter(state)
      end
    end
  end

  for _ = 1, refunds do
    -- By pcall: what is wrong with the key, its next charge will tell.
    pcall(refund)
    at = at + 9
  end
  local asked, from = {}, at -- the permits, by the places of their ledgers
  for _ = 1, claims do
    local asks = tonumber(ARGV[from + 1])
    from = from + 2 + 7 * tonumber(ARGV[from])
    for _ = 1, asks do
      local place = tonumber(ARGV[from])
      asked[place] = asked[place] or {}
      table.insert(asked[place], ARGV[from + 2])
      from = from + 3
    end
  end
  for place, ids in pairs(asked) do
    local state, scores = states[place], {}
    if state then
      for i, score in ipairs(scores_of(state.key, unpack(ids))) do
        scores[ids[i]] = score
      end
      state.scores, state.swept = scores, false
    end
  end
  for i = 1, claims do
    local charges, asks = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
    at = at + 2
    replies[ledgers + 2 + i] = told(pcall(claim, charges, asks))
    at = at + 7 * charges + 3 * asks
  end
  local written, failure = pcall(write)
  for i = 1, written and 0 or claims do
    replies[ledgers + 2 + i] = told(written, failure)
  end
  for i, state in ipairs(states) do
    if state then
      if not written then
        state.in_use = call('ZCOUNT', state.key, '0', LAST_DEADLINE)
        state.waiting = call('ZCOUNT', state.key, '-inf', '-1')
        state.entering, state.head = {}, nil
      end
      local ok, result = pcall(close, state)
      replies[i + 2] = told(ok, ok and state.reply or result)
    end
  end
end
return replies
