
-- Rates: the arithmetic of rate.rs, where the reasons are. Products are at most 2^52, so all of this is exact.

local REFUND_ARGS = 9
local tats = {} -- the states of rates by their index in KEYS; false: there is none
local changed = {} -- those to be written

-- The time of a cost, as microseconds and a remainder in parts of the count.
local function time_of(cost, count, period_us)
  local parts = cost * period_us
  local rem = parts % count
  return (parts - rem) / count, rem
end

local function stored(index)
  if tats[index] == nil then
    local text, tat = call('GET', KEYS[index]), false
    if text then
      local us, rem, rate, refunded_us, since_us = string.match(text, '^(%d+) (%d+) (%S+) (%d+) (%d+)$')
      if not us then
        error('WRONGTYPE the key of a rate holds something else', 0)
      end
      tat = { us = tonumber(us), rem = tonumber(rem), rate = rate }
      tat.refunded_us, tat.since_us = tonumber(refunded_us), tonumber(since_us)
    end
    tats[index] = tat
  end
  return tats[index]
end

-- The rate of a charge or a refund, as a state names it.
local function rate_at(first)
  return ARGV[first + 1] .. '/' .. ARGV[first + 2] .. '/' .. ARGV[first + 3]
end

-- The state as this rate counts; nil if it is over. One too far ahead was set before the clock was stepped back.
local function read(index, rate, burst_us, burst_rem)
  local MAX_WAIT_US = 86400000000
  local tat = stored(index)
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

-- Takes back what is left of a charge.
local function refund(first)
  local MAX_EXACT = 4503599627370496
  local index, count, period_us = tonumber(ARGV[first]), tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2])
  local burst_us, burst_rem = time_of(tonumber(ARGV[first + 3]), count, period_us)
  local cost_us, cost_rem = time_of(tonumber(ARGV[first + 4]), count, period_us)
  local tat = read(index, rate_at(first), burst_us, burst_rem)
  local refunded_us = tonumber(ARGV[first + 7])
  if not tat or tat.since_us ~= tonumber(ARGV[first + 8]) or tat.refunded_us < refunded_us then
    return
  end
  local top_us, top_rem = tonumber(ARGV[first + 5]) - (tat.refunded_us - refunded_us), tonumber(ARGV[first + 6])
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
    tats[index], changed[index] = tat, true
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
  tats[index], changed[index] = tat, true
end

-- The state that a charge would leave, and when the request may start. Nothing is charged yet.
local function quote(first)
  local index, count, period_us = tonumber(ARGV[first]), tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2])
  local burst, cost = tonumber(ARGV[first + 3]), tonumber(ARGV[first + 4])
  local shadow = ARGV[first + 6] == '1'
  local wait_us = shadow and 0 or tonumber(ARGV[first + 5])
  local rate = rate_at(first)
  local tat = read(index, rate, time_of(burst, count, period_us))
    or { us = now_us, rem = 0, rate = rate, refunded_us = 0, since_us = now_us }
  -- It may start as soon as what was there before leaves room for it.
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
    index = index, tat = tat, start_us = now_us + ahead_us,
    allowed = allowed, refuses = not allowed and not shadow, later = allowed and ahead_us > 0,
  }
end

for _ = 1, refund_count do
  -- By pcall: the next charge to this key reports what is wrong with it.
  pcall(refund, arg)
  arg = arg + REFUND_ARGS
end
