
-- A late exchange does nothing: meanwhile its replica may have admitted others in place of the permits that it releases.
local LATE = 2
if now_us > not_after_us then
  return { now_us, LATE }
end

-- The short way: `release`, `renew` and `acquire` of each ledger, if no other step would change anything.

local replies, arg, record = { now_us, 0, nil }, 2, first_record -- with room for one more
-- For the long way, three numbers for each ledger: holders whose lease lasts beyond this second, all members, and members
-- removed.
local counts = refund_count + claim_count > 0 and {}
for i = 1, ledger_count do
  local limit, _, options, releases, renews, adopts, acquires, waits = struct.unpack(RECORD, packed, record)
  local key, first, lasting, size, removed, is_short, failure = KEYS[i], arg + releases, 0, 0, 0, false, nil
  if not lease_end_text and renews + adopts + acquires + claim_count > 0 then
    lease_end_text = string.format('%d%09d', lease_end_ms / 1000000000, lease_end_ms % 1000000000) -- as `text_of`
  end
  -- At maxmemory Redis lets a script write if its first write may free memory, whether or not it does. So leases are
  -- renewed and adopted even then. Newcomers are refused, unless they share an exchange with these.
  if releases > 0 then
    size = redis.pcall('ZREM', key, unpack(ARGV, arg, first - 1))
    may_write, removed = true, size
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
    is_short = lasting == size and adopts + claim_count == 0 and (options < 8 or options >= 64 and options < 72)
      and (acquires == 0 or lasting + acquires <= limit)
  end
  if is_short and lasting >= limit then -- `expire` would shorten leases with a deadline too far ahead
    too_late_text = too_late_text or '(' .. string.format('%.0f', latest_end_ms)
    is_short = call('ZCOUNT', key, too_late_text, LAST_DEADLINE) == 0
  end
  if is_short and renews > 0 then
    -- All members are holders. If every renewal moves a deadline, no permit is missing.
    is_short = call('ZADD', key, 'XX', 'GT', 'CH', scored(lease_end_text, first, renews)) == renews
  end
  if is_short and acquires > 0 then
    local entered = redis.pcall('ZADD', key, 'NX', scored(lease_end_text, first + renews, acquires))
    if type(entered) == 'table' then
      is_short, failure = false, entered.err
    else
      is_short = entered == acquires -- or this exchange is a repetition
      lasting, size = lasting + entered, size + entered
      if size >= LIST_SIZE and size - entered < LIST_SIZE then
        call('ZADD', key, '0', LONG_NAME)
        call('ZREM', key, LONG_NAME)
      end
    end
  end
  if is_short and renews + acquires > 0 and (size == acquires or call('PTTL', key) < ttl_ms) then
    call('PEXPIRE', key, ttl_ms + lease_ms)
  end
  replies[i + 2] = failure or is_short and lasting
  if not replies[i + 2] then
    counts = counts or { nil, nil, nil } -- preallocated
    counts[3 * i - 2], counts[3 * i - 1], counts[3 * i] = lasting, size, removed
  end
  arg, record = first + renews + adopts + acquires, waits + acquires
end
if not counts then
  return replies
end
