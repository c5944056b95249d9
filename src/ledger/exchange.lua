-- One exchange of a replica with its ledgers: the same steps, in the same order, as in machine.rs.
--
-- A ledger is a sorted set. Its scores lie in four bands:
--   waiting   below 0         permit id     ticket, unique: lower goes first
--   holding   0 .. 2^51 - 1   permit id     deadline in ms
--   alive     2^51 .. 2^52-1  '@'..replica  2^51 + the time until which its waiters count as alive, in ms
--   keeping   from 2^52 on    '~'..replica  2^52 + the time until which it may keep slots that came free, in ms
-- A permit id is the text of its replica and the text of its number (SEQ_CHARS long).
--
-- The state of a rate is a text, 'us rem rate refunded_us since_us' (see rate.rs): the theoretical arrival time is
-- us + rem / count.
--
-- KEYS   the ledgers, each once; then the states of rates, each once
-- ARGV   CALL packed: lease_ms, promote_ms, alive_ms, not_after_us, how many ledgers, refunds and claims there are, and
--        the replica with its length before it; behind it the prefix of the channels for wake-ups; then
--        for each ledger: LEDGER packed: limit, max_waiters, needs (1 if the replica waits here; and 2 if others that
--        keep slots are to be told when somebody waits or is refused, or 4 if it also wants to keep some itself), how
--        many permits to release, to renew and to adopt; behind it 1 or 0 for each permit to acquire (whether it would
--        wait); then all these permits in this order;
--        for each refund: the place of its state in KEYS, the rate's count, period_us and burst, the cost, and what
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
-- Lua makes functions anew for each call, which takes longer than what most of them do. So there are two ways. Most
-- ledgers need only the short one, the function `short`: `release`, `renew` and `acquire`, where the other steps would
-- change nothing, since nobody waits, no lease has ended and all who come get a slot. The long one, all steps as in
-- machine.rs, comes behind it, and is made only if a ledger of this call, a refund or a claim needs it.
--
-- Numbers are slow to pass to a command, so what is passed often is a text.

local CALL, LEDGER, LEDGER_CHARS = '<ddddI4I4I4I4c0', '<I4I4I4I4I4I4', 24
local ALIVE, LAST_DEADLINE = 2251799813685248, '2251799813685247'

-- Redis keeps small sets as lists, which are slow from some members on. One whose name is too long for a list makes a
-- skip list of it, and need not stay.
local LIST_SIZE, LONG_NAME_CHARS = 24, 65

local call, sub = redis.call, string.sub

local lease_ms, promote_ms, alive_ms, not_after_us, ledgers, refunds, claims, replica, call_chars =
  struct.unpack(CALL, ARGV[1])

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)
local lease_end_ms = now_ms + lease_ms
local stale = now_us > not_after_us

-- What is to last is to last for the leases and the mark of this call. The key gets more than that, so that it is told
-- once a lease.
local ttl_ms = lease_ms + alive_ms

local MAX_LEASE_MS = 3600000
local latest_end_ms = now_ms + MAX_LEASE_MS -- a deadline beyond it was set before the clock was stepped back
local lease_end_text, too_late_text -- made when needed
local may_write = false -- even at maxmemory, from the first write of the call on

-- All these renewed? Only for a ledger in which nobody waits: those that are there hold, and if all of them get later
-- deadlines, all of them are there.
local function renew_all(key, first, last)
  lease_end_text = lease_end_text or lease_end_ms .. ''
  local scored = { 'XX', 'GT', 'CH' }
  for i = first, last do
    local size = 2 * (i - first) + 3
    scored[size + 1], scored[size + 2] = lease_end_text, ARGV[i]
  end
  return call('ZADD', key, unpack(scored)) == last - first + 1
end

-- `release`; then, if the ledger has only leases that go on, and slots for all who come, `renew` and `acquire`. Returns
-- how many are in use then; or false for the long way, which goes on behind `release` and may renew again, and what is
-- known: how many leases go on beyond this second, of how many members.
local function short(key, limit, releases, renews, acquires, extends, more_is_asked, first)
  -- At maxmemory Redis lets a script write if its first write may free memory, whether or not it does: so leases are
  -- renewed and adopted even then. Newcomers are refused, unless they come with these.
  if releases > 0 then
    call('ZREM', key, unpack(ARGV, first, first + releases - 1))
    may_write = true
  elseif extends and not may_write then
    call('ZREM', key, '')
    may_write = true
  end
  local lasting, size = 0, call('ZCARD', key)
  if size > 0 then
    lasting = call('ZCOUNT', key, '(' .. time[1] .. '999', LAST_DEADLINE)
  end
  if lasting < size or more_is_asked or acquires > 0 and (stale or lasting + acquires > limit) then
    return false, lasting, size
  end
  if lasting >= limit then -- `reap` would set back deadlines that are too late
    too_late_text = too_late_text or '(' .. latest_end_ms
    if call('ZCOUNT', key, too_late_text, LAST_DEADLINE) > 0 then
      return false, lasting, size
    end
  end
  first = first + releases
  if renews > 0 and not renew_all(key, first, first + renews - 1) then
    return false, lasting, size
  end
  local entered = 0
  if acquires > 0 then
    first = first + renews
    lease_end_text = lease_end_text or lease_end_ms .. ''
    local entering = { 'NX', lease_end_text, ARGV[first] }
    for i = 2, acquires do
      entering[2 * i], entering[2 * i + 1] = lease_end_text, ARGV[first + i - 1]
    end
    entered = call('ZADD', key, unpack(entering))
    if size < LIST_SIZE and size + acquires >= LIST_SIZE then
      local name = string.rep('.', LONG_NAME_CHARS)
      call('ZADD', key, '0', name)
      call('ZREM', key, name)
    end
  end
  if renews + acquires > 0 and (size == 0 or call('PTTL', key) < ttl_ms) then
    call('PEXPIRE', key, ttl_ms + lease_ms)
  end
  if entered < acquires then -- this is a repeated exchange
    return false, lasting + entered, size + entered
  end
  return lasting + entered
end

local replies, at = { now_us, 0, nil }, 2 -- with room for one more; the next of ARGV
local known = refunds + claims > 0 and {} -- for the long way: of each ledger what `short` knows of it
for i = 1, ledgers do
  local asked = ARGV[at]
  local limit, _, needs, releases, renews, adopts = struct.unpack(LEDGER, asked)
  local acquires = #asked - LEDGER_CHARS
  -- By pcall: one ledger's error does not stop the others.
  local extends, more_is_asked = renews + adopts > 0, adopts + claims > 0 or needs >= 4
  local ok, result, lasting, size =
    pcall(short, KEYS[i], limit, releases, renews, acquires, extends, more_is_asked, at + 1)
  replies[i + 2] = not ok and (type(result) == 'table' and result.err or result) or result
  if not result then
    known = known or {}
    known[i] = { lasting, size }
  end
  at = at + 1 + releases + renews + adopts + acquires
end
if not known then
  return replies
end

local ABSENT, FULL, LINE_FULL, STALE = 0, 1, 2, 3
local FIRST_TICKET = -4503599627370496 -- -2^52: with the time in us added, negative until the year 2112
local KEEPING = 4503599627370496
local RIGHT_MS = 100
local SWEEP_BUDGET = 1000
local SEQ_CHARS = 10

local min, max = math.min, math.max

local wake_channel = sub(ARGV[1], call_chars)
local handed_until_ms = now_ms + promote_ms
local budget, more = SWEEP_BUDGET, 0

-- The ledger at work, and what is asked of it.
local key, limit, max_waiters, waits, reuse
local renews, adopts, acquires
local in_use, waiting
local lasting -- of those in use, at least so many leases go on
local marks -- the replicas known to be alive or not
local handed -- how many waiters were given slots
local refused -- whether a newcomer got neither a slot nor a place
local reply
local entering, ticket, swept -- newcomers, as a list for ZADD; the last ticket among them; whether the line was swept

-- What a function uses from around it has to be found when it is made, which takes long, unless the function around it
-- uses the same: this one has found it for all.
local function long_way()
  -- No list is too long for `unpack`: see MAX_PERMITS and the budget.
  local function on_all(command, list)
    if #list > 0 then
      call(command, key, unpack(list))
    end
  end

  -- Adds to a list for ZADD.
  local function push(scored, score, member)
    local size = #scored
    scored[size + 1], scored[size + 2] = score == lease_end_ms and lease_end_text or score, member
  end

  -- In the order of the ids; false for one that is not there.
  local function scores_of(...)
    local scores = call('ZMSCORE', key, ...)
    for i = 1, #scores do
      scores[i] = tonumber(scores[i]) or false
    end
    return scores
  end

  local function score_at(rank)
    rank = rank .. ''
    return tonumber(call('ZRANGE', key, rank, rank, 'WITHSCORES')[2])
  end

  -- Who asks is alive.
  local function is_alive(owner)
    if marks[owner] == nil then
      local mark = tonumber(call('ZSCORE', key, '@' .. owner))
      marks[owner] = mark ~= nil and mark >= ALIVE + now_ms
    end
    return marks[owner]
  end

  -- A renewal never shortens a lease, since another replica may have granted a longer one. A lease that has ended comes
  -- back to life if it was not reaped: its slot was not given away.
  local function renewed(deadline)
    return max(min(deadline, latest_end_ms), lease_end_ms)
  end

  local function renew(first)
    local last, size = first + renews - 1, #reply
    if waiting == 0 and renew_all(key, first, last) then
      for i = 1, renews do
        reply[size + i] = lease_end_ms
      end
      return true
    end
    local scored = {}
    for i, score in ipairs(scores_of(unpack(ARGV, first, last))) do
      if score and score >= 0 then
        score = renewed(score)
        push(scored, score, ARGV[first + i - 1])
      end
      reply[size + i] = score or ABSENT
    end
    on_all('ZADD', scored)
    return false
  end

  -- Comes before `promote`, so that the line gets what the true holders leave. May exceed the limit.
  local function adopt(first)
    local scored = {}
    for i, score in ipairs(scores_of(unpack(ARGV, first, first + adopts - 1))) do
      local holds = score and score >= 0
      local standing = STALE
      if holds or not stale then
        local deadline = holds and renewed(score) or lease_end_ms
        push(scored, deadline, ARGV[first + i - 1])
        standing = holds and deadline or -deadline
      end
      reply[#reply + 1] = standing
    end
    on_all('ZADD', scored)
  end

  -- The line comes first in the set, then the holders, nearest deadline first. Counts those that `short` did not.
  local function look(known)
    if known then
      lasting = known[1]
    else
      lasting = call('ZCOUNT', key, '(' .. time[1] .. '999', LAST_DEADLINE)
    end
    in_use, waiting = lasting, 0
    if lasting < (known and known[2] or call('ZCARD', key)) then
      waiting = call('ZCOUNT', key, '-inf', '-1')
      in_use = call('ZCOUNT', key, '0', LAST_DEADLINE)
    end
  end

  -- Takes as much as there is from the budget, and notes whether there is more to do.
  local function spend(wanted)
    local spent = min(wanted, budget)
    budget = budget - spent
    more = spent < wanted and 1 or more
    return spent
  end

  local function reap()
    local reaped = in_use > lasting and spend(call('ZCOUNT', key, '0', now_ms)) or 0
    if reaped > 0 then
      call('ZREMRANGEBYRANK', key, waiting, waiting + reaped - 1)
      in_use = in_use - reaped
    end
    if in_use < limit then
      return
    end
    -- The clock was stepped back: the dead among these would hold their slots until it has caught up.
    local far = spend(call('ZCOUNT', key, latest_end_ms + 1, LAST_DEADLINE))
    if far > 0 then
      local scored, last = {}, waiting + in_use - 1
      for _, id in ipairs(call('ZRANGE', key, last - far + 1, last)) do
        push(scored, latest_end_ms, id)
      end
      on_all('ZADD', scored)
    end
  end

  -- Returns the numbers of own waiters promoted.
  local function promote()
    local promoted, owners = {}, {}
    if in_use >= limit or waiting == 0 then
      return promoted
    end
    local until_text = handed_until_ms .. ''
    local window = limit - in_use
    while in_use < limit and waiting > 0 do
      window = min(window, waiting, budget)
      if window == 0 then
        more = 1
        break
      end
      local scored, dead = {}, {}
      for _, id in ipairs(call('ZRANGE', key, '0', window - 1)) do
        if in_use == limit then
          break
        end
        budget, waiting = budget - 1, waiting - 1
        local owner = sub(id, 1, -SEQ_CHARS - 1)
        if is_alive(owner) then
          in_use, handed = in_use + 1, handed + 1
          push(scored, until_text, id)
          if not promoted[owner] then
            promoted[owner] = {}
            owners[#owners + 1] = owner
          end
          table.insert(promoted[owner], sub(id, -SEQ_CHARS))
        else
          dead[#dead + 1] = id
        end
      end
      on_all('ZADD', scored)
      on_all('ZREM', dead)
      window = budget -- some were dead, and so may be many
    end
    for _, owner in ipairs(owners) do
      if owner ~= replica then
        local numbers = table.concat(promoted[owner])
        local wake = string.format('%.0f %.0f %s %s', now_us, handed_until_ms, numbers, key)
        -- By pcall: an ACL may forbid it, and then waiters learn of their slots when they ask.
        redis.pcall('PUBLISH', wake_channel .. owner, wake)
      end
    end
    return promoted[replica] or {}
  end

  -- Drops dead waiters from a line that is full, if a mark that has ended tells that there may be some. A line that is
  -- longer than the budget is searched in part, somewhere.
  local function sweep()
    local window = min(waiting, budget)
    if window == 0 or call('ZCOUNT', key, ALIVE, ALIVE + now_ms - 1) == 0 then
      return
    end
    budget = budget - window
    local start = now_us % (waiting - window + 1)
    local dead = {}
    for _, id in ipairs(call('ZRANGE', key, start, start + window - 1)) do
      if not is_alive(sub(id, 1, -SEQ_CHARS - 1)) then
        dead[#dead + 1] = id
      end
    end
    on_all('ZREM', dead)
    waiting = waiting - #dead
    if #dead == 0 then
      call('ZREMRANGEBYSCORE', key, ALIVE, ALIVE + now_ms - 1)
    end
  end

  -- Adds those who were admitted.
  local function enter(list)
    local size = in_use + waiting
    on_all('ZADD', list)
    if size >= LIST_SIZE and size - #list / 2 < LIST_SIZE then
      local name = string.rep('.', LONG_NAME_CHARS)
      call('ZADD', key, '0', name)
      call('ZREM', key, name)
    end
  end

  local function admit(id, waits)
    if stale then
      return STALE
    end
    if waiting == 0 and in_use < limit then
      in_use = in_use + 1
      push(entering, lease_end_ms, id)
      return lease_end_ms
    end
    if not waits then
      refused = true
      return FULL
    end
    if waiting >= max_waiters and not swept then
      enter(entering)
      sweep()
      entering, swept = {}, true
    end
    if waiting >= max_waiters then
      refused = true
      return LINE_FULL
    end
    -- Tickets never go back, so that a ticket below the head's is known to have left the line.
    local text
    if ticket then
      ticket = ticket + 1
    else
      ticket = FIRST_TICKET + now_us
      text = string.format('%.0f', ticket)
      if waiting > 0 and call('ZCOUNT', key, text, '-1') > 0 then
        ticket, text = score_at(waiting - 1) + 1, nil
      end
    end
    waiting = waiting + 1
    push(entering, text or ticket, id)
    return ticket
  end

  local function acquire(first, wishes)
    entering, ticket, swept = {}, nil, false
    local size = #reply
    for i, score in ipairs(scores_of(unpack(ARGV, first, first + acquires - 1))) do
      reply[size + i] = score or admit(ARGV[first + i - 1], sub(wishes, i, i) == '1')
    end
    enter(entering)
  end

  -- The right to keep slots is over for the other replicas. Each is told once; if that is lost, the right ends by itself.
  -- The one that asks sees it in the reply.
  local function recall()
    local told = {}
    for _, mark in ipairs(call('ZRANGE', key, KEEPING, '+inf', 'BYSCORE')) do
      local owner = sub(mark, 2)
      if owner ~= replica then
        redis.pcall('PUBLISH', wake_channel .. owner, string.format('%.0f 0  %s', now_us, key))
        told[#told + 1] = mark
      end
    end
    on_all('ZREM', told)
  end

  -- What comes after the claims: the reply tells how it is then.
  local function close()
    -- `alive`: marks matter to a line only. One that ended long ago goes when another comes, or they would pile up.
    if waiting == 0 and in_use == 0 then
      call('ZREMRANGEBYSCORE', key, ALIVE, '+inf')
    elseif waits and waiting > 0 then
      if call('ZADD', key, ALIVE + now_ms + alive_ms, '@' .. replica) == 1 then
        call('ZREMRANGEBYSCORE', key, ALIVE, ALIVE + now_ms - MAX_LEASE_MS - 1)
      end
    end
    if reuse > 0 and (refused or waiting > 0) then
      recall()
    end
    if reuse == 2 and waiting == 0 and in_use > 0 and in_use <= limit then
      -- `keep`: rights that have ended go when another comes, so that they cannot pile up.
      if call('ZADD', key, KEEPING + now_ms + RIGHT_MS, '~' .. replica) == 1 then
        call('ZREMRANGEBYSCORE', key, KEEPING, KEEPING + now_ms - 1)
      end
    end
    if in_use + waiting > 0 and call('PTTL', key) < ttl_ms then
      call('PEXPIRE', key, ttl_ms + lease_ms)
    end
    reply[1], reply[2] = in_use, waiting
    if waiting > 0 then
      reply[3] = score_at(0)
      reply[4] = in_use == 0 and 0 or in_use == handed and handed_until_ms or score_at(waiting)
    end
  end

  -- The long way: the steps behind `release`.
  local function run(first, wishes, known)
    reply, marks, handed, refused = { 0, 0, 0, 0 }, { [replica] = true }, 0, false
    local brief = adopts + acquires == 0
    look(known)
    if renews > 0 then
      brief = renew(first) and brief
    end
    if adopts > 0 then
      adopt(first + renews)
      look()
    end
    reap()
    local promoted = promote()
    if acquires > 0 then
      acquire(first + renews + adopts, wishes)
    end
    for _, number in ipairs(promoted) do
      reply[#reply + 1] = number
    end
    if claims == 0 then -- else this waits for them
      close()
    end
    return brief and waiting == 0 and #promoted == 0 and in_use or reply
  end

  -- As the text of an error, if it is one.
  local function told(ok, result)
    return ok and result or type(result) == 'table' and result.err or result
  end

  local states = {} -- of the ledgers, for the claims
  at = 2
  for i = 1, ledgers do
    local asked, needs, releases = ARGV[at], 0, 0
    key, limit, max_waiters, needs, releases, renews, adopts = KEYS[i], struct.unpack(LEDGER, asked)
    waits, reuse, acquires = needs % 2 == 1, math.floor(needs / 2), #asked - LEDGER_CHARS
    if not replies[i + 2] then
      replies[i + 2] = told(pcall(run, at + 1 + releases, sub(asked, LEDGER_CHARS + 1), known[i]))
    end
    at = at + 1 + releases + renews + adopts + acquires
    if claims > 0 then
      states[i] = {
        failed = type(replies[i + 2]) == 'string' and replies[i + 2],
        key = key, limit = limit, max_waiters = max_waiters, waits = waits, reuse = reuse,
        in_use = in_use, waiting = waiting, marks = marks, reply = reply, handed = handed, refused = refused,
        asked = {}, scores = {}, entering = {}, swept = false,
      }
    end
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
      local share_us = min(cost_us, top_us - now_us)
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
      ahead_us = max(tat.rem > room_rem and ahead_us + 1 or ahead_us, 0)
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

    local function queue(state, id)
      key, limit, max_waiters, marks = state.key, state.limit, state.max_waiters, state.marks
      in_use, waiting = state.in_use, state.waiting
      entering, ticket, swept, refused = state.entering, state.ticket, state.swept, state.refused
      local standing = admit(id, true)
      state.waiting, state.entering, state.ticket = waiting, entering, ticket
      state.swept, state.refused = swept, refused
      return standing
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
          standing = standing or want == WAIT and queue(state, id) or FULL
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
        push(state.entering, lease_end_ms, slot.id)
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
        local failed = states[tonumber(ARGV[i])].failed
        if failed then
          error(failed, 0)
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
        key, in_use, waiting = state.key, state.in_use, state.waiting
        enter(state.entering)
      end
    end

    for _ = 1, refunds do
      -- By pcall: what is wrong with the key, its next charge will tell.
      pcall(refund)
      at = at + 9
    end
    local from = at
    for _ = 1, claims do
      local asks = tonumber(ARGV[from + 1])
      from = from + 2 + 7 * tonumber(ARGV[from])
      for _ = 1, asks do
        table.insert(states[tonumber(ARGV[from])].asked, ARGV[from + 2])
        from = from + 3
      end
    end
    for _, state in ipairs(states) do
      if not state.failed and #state.asked > 0 then
        key = state.key
        for i, score in ipairs(scores_of(unpack(state.asked))) do
          state.scores[state.asked[i]] = score
        end
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
      if not state.failed then
        key, limit, reply = state.key, state.limit, state.reply
        waits, reuse, handed = state.waits, state.reuse, state.handed
        in_use, waiting, refused = state.in_use, state.waiting, state.refused
        if not written then
          look()
        end
        local ok, result = pcall(close)
        replies[i + 2] = told(ok, ok and reply or result)
      end
    end
  end
  replies[2] = more
  return replies
end
return long_way()
