-- One exchange of a replica with its ledgers: the same steps, in the same order, as in machine.rs.
--
-- A ledger is a sorted set. Its scores lie in three bands:
--   waiting   below 0         permit id     ticket, unique: lower goes first
--   holding   0 .. 2^51 - 1   permit id     deadline in ms
--   alive     2^51 and above  '@'..replica  2^51 + the time until which its waiters count as alive, in ms
-- A permit id is the text of its replica and the text of its number (SEQ_CHARS long).
--
-- KEYS   the ledgers, each once
-- ARGV   replica, lease_ms, promote_ms, alive_ms, not_after_us, prefix of the channels for wake-ups; then for each
--        ledger: limit, max_waiters, whether the replica waits here (0 or 1), how many permits to release, to renew
--        and to adopt, a text with 1 or 0 for each permit to acquire (whether it would wait), and the numbers of all
--        these permits in this order
-- Reply  now_us, whether there is more to sweep (0 or 1), then for each ledger the text of its error, or a list: in
--        use, waiting, ticket of the head (0: none), nearest deadline in ms (0: nobody holds or nobody waits), a
--        standing for each permit renewed, adopted and acquired, the numbers of own waiters promoted.
--        A standing is a ticket, a deadline, or one of ABSENT, FULL, LINE_FULL, STALE. That of an adopted permit which
--        was not there is its deadline with a minus.
-- Tells  other replicas of their waiters promoted: 'granted_us until_ms numbers key'
--
-- The functions are few, because Lua makes them anew for each call.

local ABSENT, FULL, LINE_FULL, STALE = 0, 1, 2, 3
local FIRST_TICKET = -4503599627370496 -- -2^52: with the time in us added, negative until the year 2112
local ALIVE, LAST_DEADLINE = 2251799813685248, '2251799813685247'
local MAX_LEASE_MS = 3600000
local SWEEP_BUDGET = 1000
local SEQ_CHARS = 10
local CHUNK = 2000 -- `unpack` has a limit

local call, min, max, sub = redis.call, math.min, math.max, string.sub

local replica, wake_channel = ARGV[1], ARGV[6]
local lease_ms, promote_ms, alive_ms = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)
local lease_end_ms = now_ms + lease_ms
local lease_end_text = string.format('%.0f', lease_end_ms)
local latest_end_ms = now_ms + MAX_LEASE_MS -- a deadline beyond it was set before the clock was stepped back
local stale = now_us > tonumber(ARGV[5])

local budget, more = SWEEP_BUDGET, 0
local at = 7 -- the next of ARGV

-- The ledger at work.
local key, limit, max_waiters
local existed, in_use, waiting, nearest_ms
local marks -- the replicas known to be alive or not
local reply

local function take(count)
  local ids = {}
  for i = 1, count do
    ids[i] = replica .. ARGV[at]
    at = at + 1
  end
  return ids
end

local function in_chunks(command, list)
  for first = 1, #list, CHUNK do
    call(command, key, unpack(list, first, min(first + CHUNK - 1, #list)))
  end
end

-- Adds to a list for ZADD. Numbers are slow to pass, so the frequent one goes as text.
local function push(scored, score, member)
  local size = #scored
  scored[size + 1], scored[size + 2] = score == lease_end_ms and lease_end_text or score, member
end

-- In the order of the ids; false for one that is not there.
local function scores_of(ids)
  local scores = {}
  for first = 1, #ids, CHUNK do
    local chunk = call('ZMSCORE', key, unpack(ids, first, min(first + CHUNK - 1, #ids)))
    for i = 1, #chunk do
      scores[#scores + 1] = tonumber(chunk[i]) or false
    end
  end
  return scores
end

local function score_at(rank)
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

-- At maxmemory Redis lets a script write if its first write may free memory, whether or not it does. This is why
-- `run` begins with it: leases are renewed and adopted even then. Newcomers are refused, unless they come with these.
local function release(ids)
  in_chunks('ZREM', ids)
end

-- A renewal never shortens a lease, since another replica may have granted a longer one. A lease that has ended comes
-- back to life if it was not reaped: its slot was not given away.
local function renewed(deadline)
  return max(min(deadline, latest_end_ms), lease_end_ms)
end

local function renew(ids)
  local scored = {}
  for i, score in ipairs(scores_of(ids)) do
    if score and score >= 0 then
      score = renewed(score)
      push(scored, score, ids[i])
    end
    reply[#reply + 1] = score or ABSENT
  end
  in_chunks('ZADD', scored)
end

-- Comes before `promote`, so that the line gets what the true holders leave. May exceed the limit.
local function adopt(ids)
  local scored = {}
  for i, score in ipairs(scores_of(ids)) do
    local holds = score and score >= 0
    local standing = STALE
    if holds or not stale then
      local deadline = holds and renewed(score) or lease_end_ms
      push(scored, deadline, ids[i])
      standing = holds and deadline or -deadline
    end
    reply[#reply + 1] = standing
  end
  in_chunks('ZADD', scored)
end

-- The line comes first in the set, then the holders, nearest deadline first.
local function look()
  in_use, waiting, nearest_ms = 0, 0, score_at('0')
  existed = nearest_ms ~= nil
  if existed and nearest_ms < 0 then
    waiting = call('ZCOUNT', key, '-inf', '-1')
    nearest_ms = score_at(waiting)
  end
  if nearest_ms and nearest_ms < ALIVE then
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
  if in_use > 0 and nearest_ms <= now_ms then
    local reaped = spend(call('ZCOUNT', key, 0, now_ms))
    if reaped > 0 then
      call('ZREMRANGEBYRANK', key, waiting, waiting + reaped - 1)
      in_use = in_use - reaped
    end
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
    in_chunks('ZADD', scored)
  end
end

-- Returns the numbers of own waiters promoted.
local function promote()
  local until_ms = now_ms + promote_ms
  local promoted, owners = {}, {}
  local window = limit - in_use
  while in_use < limit and waiting > 0 do
    window = min(window, waiting, budget)
    if window == 0 then
      more = 1
      break
    end
    local scored, dead = {}, {}
    for _, id in ipairs(call('ZRANGE', key, 0, window - 1)) do
      if in_use == limit then
        break
      end
      budget, waiting = budget - 1, waiting - 1
      local owner = sub(id, 1, -SEQ_CHARS - 1)
      if is_alive(owner) then
        in_use = in_use + 1
        push(scored, until_ms, id)
        if not promoted[owner] then
          promoted[owner] = {}
          owners[#owners + 1] = owner
        end
        table.insert(promoted[owner], sub(id, -SEQ_CHARS))
      else
        dead[#dead + 1] = id
      end
    end
    in_chunks('ZADD', scored)
    in_chunks('ZREM', dead)
    window = budget -- some were dead, and so may be many
  end
  for _, owner in ipairs(owners) do
    if owner ~= replica then
      local numbers = table.concat(promoted[owner])
      local wake = string.format('%.0f %.0f %s %s', now_us, until_ms, numbers, key)
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
  in_chunks('ZREM', dead)
  waiting = waiting - #dead
  if #dead == 0 then
    call('ZREMRANGEBYSCORE', key, ALIVE, ALIVE + now_ms - 1)
  end
end

-- Newcomers, as a list for ZADD; the last ticket among them; whether the line was swept for them.
local entering, ticket, swept

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
    return FULL
  end
  if waiting >= max_waiters and not swept then
    in_chunks('ZADD', entering)
    sweep()
    entering, swept = {}, true
  end
  if waiting >= max_waiters then
    return LINE_FULL
  end
  -- Tickets never go back, so that a ticket below the head's is known to have left the line.
  local tail = ticket or waiting > 0 and score_at(waiting - 1) or FIRST_TICKET
  ticket = max(tail + 1, FIRST_TICKET + now_us)
  waiting = waiting + 1
  push(entering, ticket, id)
  return ticket
end

local function acquire(ids, waits)
  entering, ticket, swept = {}, nil, false
  for i, score in ipairs(scores_of(ids)) do
    reply[#reply + 1] = score or admit(ids[i], sub(waits, i, i) == '1')
  end
  in_chunks('ZADD', entering)
end

-- Marks matter to a line only. One that ended long ago goes when another comes, so that they cannot pile up.
local function alive(waits)
  if existed and waiting == 0 and in_use == 0 then
    call('ZREMRANGEBYSCORE', key, ALIVE, '+inf')
  elseif waits and waiting > 0 then
    if call('ZADD', key, ALIVE + now_ms + alive_ms, '@' .. replica) == 1 then
      call('ZREMRANGEBYSCORE', key, ALIVE, ALIVE + now_ms - MAX_LEASE_MS - 1)
    end
  end
end

-- The key outlives the leases and the mark of this call, and longer ones in it. It gets more than that, so that
-- it is told once a lease.
local function keep()
  local ttl_ms = lease_ms + alive_ms
  if call('PTTL', key) < ttl_ms then
    call('PEXPIRE', key, ttl_ms + lease_ms)
  end
end

local function run(waits, releases, renews, adopts, asks)
  reply, marks = { 0, 0, 0, 0 }, { [replica] = true }
  if releases > 0 then
    release(take(releases))
  elseif renews + adopts > 0 then
    release({ '' })
  end
  if renews > 0 then
    renew(take(renews))
  end
  if adopts > 0 then
    adopt(take(adopts))
  end
  look()
  reap()
  local promoted = promote()
  if #asks > 0 then
    acquire(take(#asks), asks)
  end
  alive(waits)
  if in_use + waiting > 0 then
    keep()
  end
  reply[1], reply[2] = in_use, waiting
  if waiting > 0 then
    reply[3] = score_at('0')
    reply[4] = in_use > 0 and score_at(waiting) or 0
  end
  for _, number in ipairs(promoted) do
    reply[#reply + 1] = number
  end
  return reply
end

local replies = { now_us, 0 }
for i = 1, #KEYS do
  key, limit, max_waiters = KEYS[i], tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  local waits, asks = ARGV[at + 2] == '1', ARGV[at + 6]
  local releases, renews, adopts = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
  at = at + 7
  local following = at + releases + renews + adopts + #asks
  -- By pcall: one ledger's error does not stop the others.
  local ok, result = pcall(run, waits, releases, renews, adopts, asks)
  replies[i + 2] = ok and result or type(result) == 'table' and result.err or result
  at = following
end
replies[2] = more
return replies
