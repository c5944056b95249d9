
-- A late exchange does nothing: meanwhile its replica may have admitted others in place of the permits that it releases.
if now_us > not_after_us then
  return { now_us, LATE }
end

-- The short way: `release`, `renew` and `acquire` of each ledger, if no other step would change anything. A lease that ends within
-- this second takes the long way: `TIME` has the second as text.

local replies, arg, record = { now_us, 0, nil }, 2, first_record -- with room for one more
-- For claims and for the long way, four numbers for each ledger: holders whose lease lasts beyond this second; all other
-- holders, and waiters; all members; and members removed.
local counts, is_long = claim_count > 0 and {}, false
local dues_count, has_fair, has_paced, generation = 0, false, false, nil
for i = 1, ledger_count do
  local limit, _, options, releases, renews, adopts, acquires, waits_at = struct.unpack(RECORD, packed, record)
  local key, first, lasting, early, size, removed, is_short, failure = KEYS[i], arg + releases, 0, 0, 0, 0, false, nil
  if releases > 0 then
    size = redis.pcall('ZREM', key, unpack(ARGV, arg, first - 1))
    may_write, removed = true, size
  end
  if type(size) == 'number' then
    size = redis.pcall('ZCARD', key) -- by pcall: one ledger's error does not stop the others
  end
  if type(size) == 'table' then
    failure = size.err
  else
    if size > 0 then
      lasting = call('ZCOUNT', key, '(' .. time[1] .. '999', LAST_DEADLINE)
    elseif expects == 1 and removed == 0 and acquires + claim_count > 0 then -- holders may be lost with all other data: then no step of this ledger runs
      generation = generation or redis.pcall('GET', ARGV[#ARGV - 1]) -- by pcall: an ACL may forbid it
      failure = type(generation) ~= 'table' and generation ~= ARGV[#ARGV] and LOST or nil
    end
    is_short = not failure and adopts == 0 and (options < 8 or options >= 64 and options < 72)
      and (acquires == 0 or lasting + acquires <= limit)
      and (claim_count == 0 or renews + acquires == 0) -- see claims.lua
    if lasting < size then
      early = call('ZCOUNT', key, '-inf', time[1] .. '999')
      -- Beside holders there may be heartbeats of replicas whose waiters have left, but no pause.
      is_short = is_short and early == 0 and lasting + acquires > 0 and not call('ZSCORE', key, '!')
    end
  end
  if not lease_end_text and (renews + adopts + claim_count > 0 or is_short and acquires > 0) then
    lease_end_text = string.format('%d%09d', lease_end_ms / 1000000000, lease_end_ms % 1000000000) -- as `text_of`
  end
  if is_short and lasting >= limit then -- `bring_forward` would shorten leases with a deadline too far ahead
    too_late_text = too_late_text
      or '(' .. string.format('%d%09d', latest_end_ms / 1000000000, latest_end_ms % 1000000000)
    is_short = call('ZCOUNT', key, too_late_text, LAST_DEADLINE) == 0
  end
  if is_short and renews > 0 then
    -- All permits are holders. If every renewal moves a deadline, none is missing.
    is_short = redis.pcall('ZADD', key, 'XX', 'GT', 'CH', scored(lease_end_text, first, renews)) == renews
  end
  -- At maxmemory Redis lets a script write if its first write may free memory, whether or not it does. So leases are
  -- renewed and adopted even then. Newcomers are refused, unless they share an exchange with these.
  if renews + adopts > 0 and not is_short and not may_write then
    redis.pcall('ZREM', key, '')
    may_write = true
  end
  if is_short and acquires > 0 then
    local entered = redis.pcall('ZADD', key, 'NX', scored(lease_end_text, first + renews, acquires))
    if type(entered) == 'table' then
      is_short, failure = false, entered.err
    else
      is_short = entered == acquires -- or this exchange is a repetition
      lasting, size = lasting + entered, size + entered
      if lasting >= LIST_SIZE and lasting - entered < LIST_SIZE then
        call('ZADD', key, '0', LONG_NAME)
        call('ZREM', key, LONG_NAME)
      end
    end
  end
  if is_short and renews + acquires > 0 and (size == acquires or call('PTTL', key) < ttl_ms) then
    call('PEXPIRE', key, ttl_ms + lease_ms)
  end
  replies[i + 2] = failure or claim_count == 0 and is_short and lasting
  if not replies[i + 2] or claim_count > 0 then
    counts, is_long = counts or { nil, nil, nil, nil }, is_long or not is_short -- preallocated
    counts[4 * i - 3], counts[4 * i - 2], counts[4 * i - 1], counts[4 * i] = lasting, early, size, removed
  end
  if options >= 64 then
    local is_fair = options % 128 >= 64
    has_fair = has_fair or is_fair
    dues_count = dues_count + ((is_fair and acquires > 0 or options % 256 >= 128) and 1 or 0)
    if options % 2048 >= 1024 then
      has_paced, dues_count = true, dues_count + 1
    end
  end
  arg, record = first + renews + adopts + acquires, waits_at + acquires
end
if not is_long and refund_count + claim_count == 0 then
  return replies
end
local first_refund = arg + dues_count
local first_claim = first_refund + REFUND_ARGS * refund_count
