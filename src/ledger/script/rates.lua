
-- Rates: the arithmetic of rate.rs, which explains it. Times are at most 2^53, and larger products are divided in steps, so all of
-- this is exact.

-- The reply for the results of a pcall: the function's own result, or the text of its error. An error of Lua, or a number that is
-- none, comes from the data: it concerns this key alone.
local function outcome(ok, result)
  local text = type(result) == 'table' and result.err or result
  if not ok and (string.find(text, '^user_script:') or string.find(text, 'not a valid float', 1, true)) then
    return 'WRONGTYPE the key of a ledger holds something else'
  end
  return ok and result or text
end

-- Created only if they are needed.
local run_refunds, quote, change, write_rates
if refund_count + claim_count > 0 then
  local tats = {} -- states of rates by their index in KEYS; false if missing
  local changed = {} -- indexes of states to write

  -- a * m / d, rounded down, and the remainder: for a up to 2^53, and m and d below 2^42. A quotient beyond 2^53 is rounded.
  local function divided(a, m, d)
    local quotient, rem = 0, a * m
    if rem <= MAX_EXACT then
      return (rem - rem % d) / d, rem % d
    end
    rem = 0
    for shift = 50, 0, -10 do
      local sum = rem * 1024 + math.floor(a / 2 ^ shift) % 1024 * m
      rem = sum % d
      quotient = quotient * 1024 + (sum - rem) / d
    end
    return quotient, rem
  end

  -- The state of a rate, unless the bucket is empty. If its recorded rate is unusable, the state has no count.
  local function stored(index)
    if tats[index] == nil then
      local text = call('GET', KEYS[index])
      local us, rem, rate, charged, since_us = string.match(text or '', '^(%d+) (%d+) (%S+) (%d+) (%d+)$')
      local count, period_us, burst, more = string.match(rate or '', '^(%d+)/(%d+)/(%d+)(.*)$')
      local rounded, before_group, group, start_us = string.match(more or '', '^/(%d+)/(%d+)/(%d+)/(%d+)$')
      local tat = {
        us = tonumber(us), rem = tonumber(rem), charged = tonumber(charged), since_us = tonumber(since_us),
        rounded = tonumber(rounded), before_group = tonumber(before_group), group = tonumber(group),
        start_us = tonumber(start_us),
      }
      if us and not rounded then
        -- Written by a version without groups: none of its charges is refunded.
        tat.charged, tat.since_us, tat.start_us = 0, tat.since_us + 1, tat.us
        tat.rounded, tat.before_group, tat.group = 0, 0, 0
      end
      if text and not us or us and math.max(tat.us, tat.since_us, tat.start_us, tat.charged, tat.group) > 2 * MAX_EXACT then
        error('WRONGTYPE the key of a rate holds something else', 0)
      end
      count, period_us, burst = tonumber(count), tonumber(period_us), tonumber(burst)
      if count and math.min(count, period_us, burst) > 0 and math.max(count, burst) <= MAX_RATE
        and period_us <= MAX_PERIOD_US and burst * period_us <= MAX_BURST_US * count and tat.rem < count then
        tat.count, tat.period_us, tat.burst = count, period_us, burst
      end
      tats[index] = us and tat or false
    end
    local tat = tats[index]
    return tat and (tat.us > now_us or tat.us == now_us and tat.rem > 0) and tat
  end

  -- Whether a bucket is empty later than its rate can remember with this burst, and the latest such time.
  local function is_forgotten(tat, burst)
    local us, rem = divided(burst, tat.period_us, tat.count)
    us = us + now_us + MAX_WAIT_US
    return tat.us > us or tat.us == us and tat.rem > rem, us, rem
  end

  -- Contents of the bucket at the latest start, less these units; may be negative.
  local function rest_without(tat, units)
    local us, rem = divided(units, tat.period_us, tat.count)
    us, rem = tat.us - tat.start_us - us, tat.rem - rem
    if rem < 0 then
      return us - 1, rem + tat.count
    end
    return us, rem
  end

  -- The state converted to this rate; nil if the bucket is empty.
  local function read(index, count, period_us, burst)
    local tat = stored(index)
    if not tat then
      return nil
    end
    if not tat.count then
      tat.us, tat.rem = tat.rem > 0 and tat.us + 1 or tat.us, 0
      tat.count, tat.period_us, tat.burst = count, period_us, burst
    end
    local forgotten, latest_us, latest_rem = is_forgotten(tat, tat.burst)
    if forgotten then
      -- The state was set before the clock was stepped back, or holds a debt that is forgotten.
      tat.us, tat.rem, tat.start_us = latest_us, latest_rem, math.min(tat.start_us, now_us)
      tat.since_us, tat.charged, tat.before_group, tat.group = tat.since_us + 1, 0, 0, 0
      changed[index] = true
    end
    if tat.count == count and tat.period_us == period_us then
      return tat
    end
    -- Convert to the same number of units under this rate.
    local units, parts = divided(tat.us - now_us, tat.count, tat.period_us)
    parts = parts + tat.rem
    units, parts = units + math.floor(parts / tat.period_us), parts % tat.period_us
    local fraction, more = divided(ROUNDING_PARTS, parts, tat.period_us)
    fraction = (more > 0 and fraction + 1 or fraction) - tat.rounded
    if fraction < 0 then
      units, fraction = units - 1, fraction + ROUNDING_PARTS
    end
    if units < 0 then
      units, fraction = 0, 0
    end
    local rest, below = divided(fraction, period_us, ROUNDING_PARTS)
    local us, rem = divided(units, period_us, count)
    rem = rem + (below > 0 and rest + 1 or rest)
    local converted = {
      us = now_us + us + math.floor(rem / count), rem = rem % count, count = count, period_us = period_us, burst = burst,
      rounded = below > 0 and math.floor((ROUNDING_PARTS - below) / period_us) or 0,
      since_us = tat.since_us, charged = tat.charged, before_group = tat.before_group, group = tat.group,
      start_us = math.max(tat.start_us, now_us),
    }
    if is_forgotten(converted, burst) then
      return tat
    end
    tats[index], changed[index] = converted, true
    return converted
  end

  -- Refunds a charge, as far as the rules allow.
  local function refund(first)
    local index, cost, charged = tonumber(ARGV[first]), tonumber(ARGV[first + 1]), tonumber(ARGV[first + 3])
    local tat = stored(index)
    if not tat or not tat.count or tat.since_us ~= tonumber(ARGV[first + 2]) or tat.charged < charged then
      return
    end
    local since = tat.charged - charged
    local later = since
    if charged > tat.before_group then
      tat.group = math.max(tat.group - cost, 0)
      later = math.min(since, tat.group)
    end
    local us, rem = divided(cost, tat.period_us, tat.count)
    local rest_us, rest_rem = rest_without(tat, later)
    if since == 0 then
      tat.charged = math.max(tat.charged - cost, 0)
      tat.before_group = math.min(tat.before_group, tat.charged)
      tat.start_us = math.max(tonumber(ARGV[first + 4]), math.min(tat.start_us, now_us))
    elseif rest_us < 0 then
      us, rem = 0, 0
    elseif rest_us < us or rest_us == us and rest_rem < rem then
      us, rem = rest_us, rest_rem
    end
    tat.us, tat.rem = tat.us - us, tat.rem - rem
    if tat.rem < 0 then
      tat.us, tat.rem = tat.us - 1, tat.rem + tat.count
    end
    if tat.us < now_us then
      tat.us, tat.rem = now_us, 0
    end
    changed[index] = true
  end

  -- The state after a charge, and when the request may start. Charges nothing yet.
  function quote(first)
    local index, count, period_us = tonumber(ARGV[first]), tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2])
    local burst, cost = tonumber(ARGV[first + 3]), tonumber(ARGV[first + 4])
    local shadow = ARGV[first + 6] == '1'
    local wait_us = shadow and 0 or tonumber(ARGV[first + 5])
    local before = read(index, count, period_us, burst) or {
      us = now_us, rem = 0, count = count, period_us = period_us, burst = burst, rounded = 0,
      since_us = now_us, charged = 0, before_group = 0, group = 0, start_us = now_us,
    }
    -- The rate in force: another one if the use is too large for this rate to remember.
    local names = count == before.count and period_us == before.period_us
    count, period_us = before.count, before.period_us
    local tat = {
      count = count, period_us = period_us, burst = before.burst, rounded = before.rounded, since_us = before.since_us,
      charged = before.charged, before_group = before.before_group, group = before.group,
    }
    if tat.charged + cost > MAX_EXACT then
      tat.since_us, tat.charged, tat.before_group, tat.group = tat.since_us + 1, 0, 0, 0
    end
    local us, rem = divided(cost, period_us, count)
    tat.us, tat.rem = before.us + us, before.rem + rem
    if tat.rem >= count then
      tat.us, tat.rem = tat.us + 1, tat.rem - count
    end
    if names and (burst >= before.burst or not is_forgotten(tat, burst)) then
      tat.burst = burst
    end
    -- The request may start as soon as the earlier charges leave room for it. The excess over the burst is a debt.
    us, rem = divided(math.max(burst - cost, 0), period_us, count)
    us = before.us - us
    local start_us = math.max(before.rem > rem and us + 1 or us, now_us)
    tat.start_us = math.max(before.start_us, wait_us == WAIT_FOREVER_US and now_us or start_us)
    tat.charged, tat.group = tat.charged + cost, tat.group + cost
    if rest_without(tat, tat.group) < 0 then
      tat.before_group, tat.group = tat.charged - cost, cost
    end
    local allowed = start_us - now_us <= wait_us
    return {
      index = index, tat = tat, before_us = before.start_us, start_us = start_us,
      allowed = allowed, refuses = not allowed and not shadow, later = allowed and start_us > now_us,
    }
  end

  -- Begins with the states that are stored.
  function run_refunds()
    tats, changed = {}, {}
    for i = 0, refund_count - 1 do
      -- By pcall: the next charge to this key reports its error.
      pcall(refund, first_refund + REFUND_ARGS * i)
    end
  end

  -- The new state of a rate.
  function change(index, tat)
    tats[index], changed[index] = tat, true
  end

  function write_rates()
    -- The server counts from a time slightly earlier than ours, and rounds.
    for index in pairs(changed) do
      local tat = tats[index]
      local text = '%.0f %.0f %.0f/%.0f/%.0f/%.0f/%.0f/%.0f/%.0f %.0f %.0f'
      text = string.format(
        text, tat.us, tat.rem, tat.count, tat.period_us, tat.burst, tat.rounded, tat.before_group, tat.group,
        tat.start_us, tat.charged, tat.since_us
      )
      local ttl_ms = math.floor((tat.us - now_us) / 1000) + TTL_SPARE_MS
      call('SET', KEYS[index], text, 'PX', ttl_ms)
    end
  end
end
