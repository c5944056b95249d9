
-- Claims: slots in several ledgers and charges to rates, all or nothing. First the code that both ways share; then the
-- short way, for claims that get all their slots, on ledgers that otherwise only release. The long way is in
-- claim_slots.lua.

local fill, run_claims, write_claims
if refund_count + claim_count > 0 then
  function fill(count, standing)
    local standings = {}
    for i = 1, count do
      standings[i] = standing
    end
    return standings
  end

  -- `take` takes the slots. All steps that can fail precede the first change.
  local function claim(first_charge, charges, first_ask, asks, first_ticket, take)
    local answer, standings = {}, nil
    local quotes, refused, later = {}, false, false
    for i = 1, charges do
      local quoted = quote(first_charge + CHARGE_ARGS * (i - 1))
      quotes[i] = quoted
      refused, later = refused or quoted.refuses, later or quoted.later
    end
    -- No slot is held while the claim waits for its start.
    if not refused and not later then
      standings, refused = take(first_ask, asks, first_ticket)
    end
    for i = 1, charges do
      local size, quoted = #answer, quotes[i]
      if quoted.allowed and refused then
        answer[size + 1] = 0
      elseif not quoted.allowed then
        answer[size + 1] = -quoted.start_us
      else -- CHARGED_REPLY
        local tat = quoted.tat
        change(quoted.index, tat)
        answer[size + 1], answer[size + 2], answer[size + 3] = quoted.start_us, tat.us, tat.rem
        answer[size + 4], answer[size + 5], answer[size + 6] = tat.since_us, tat.charged, quoted.before_us
      end
    end
    for _, standing in ipairs(standings or fill(asks, ABSENT)) do
      answer[#answer + 1] = standing
    end
    return answer
  end

  -- `take` takes the slots of a claim; `failures` are the errors of claims whose ledgers failed.
  function run_claims(take, failures)
    local first = first_claim
    for i = 1, claim_count do
      local charges, asks, first_ticket = tonumber(ARGV[first]), tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2])
      local first_charge = first + CLAIM_ARGS
      local first_ask = first_charge + CHARGE_ARGS * charges
      replies[ledger_count + 2 + i] = failures[i]
        or outcome(pcall(claim, first_charge, charges, first_ask, asks, first_ticket, take))
      first = first_ask + ASK_ARGS * asks
    end
  end

  -- `enter_slots` writes the slots. At maxmemory, or without permission, Redis denies the first of these commands, and then
  -- the others do not run. Returns whether they have run.
  function write_claims(enter_slots)
    local written, failure = pcall(function()
      write_rates()
      enter_slots()
    end)
    for i = 1, written and 0 or claim_count do
      replies[ledger_count + 2 + i] = outcome(written, failure)
    end
    return written
  end

  -- The short way, if there is a slot for every ask.
  if not is_long then
    local asked, first = {}, first_claim -- the number of asks by the index of their ledger
    for _ = 1, claim_count do
      local ask = first + CLAIM_ARGS + CHARGE_ARGS * ARGV[first]
      first = ask + ASK_ARGS * ARGV[first + 1]
      for at = ask, first - 1, ASK_ARGS do
        local index = tonumber(ARGV[at])
        asked[index] = (asked[index] or 0) + 1
      end
    end
    for index, count in pairs(asked) do
      -- Without newcomers of its own, each record has this length.
      local limit = struct.unpack('<d', packed, first_record + RECORD_BYTES * (index - 1))
      is_long = is_long or counts[4 * index - 3] + count > limit
    end
  end
  if not is_long then
    local entering = {} -- the arguments of ZADD by the index of their ledger

    local function take(ask, asks)
      local standings = {}
      for i = 1, asks do
        local index = tonumber(ARGV[ask])
        local list = entering[index] or {}
        local size = #list
        list[size + 1], list[size + 2] = lease_end_text, ARGV[ask + 2]
        entering[index], standings[i] = list, lease_end_ms
        ask = ask + ASK_ARGS
      end
      return standings, false
    end

    local repeats = false -- whether some permits are there already
    local function enter_slots()
      for index, list in pairs(entering) do
        local key, before, count = KEYS[index], counts[4 * index - 3], #list / 2
        local entered = call('ZADD', key, 'NX', unpack(list))
        local after = before + entered
        counts[4 * index - 3] = after
        if after >= LIST_SIZE and before < LIST_SIZE then
          call('ZADD', key, '0', LONG_NAME)
          call('ZREM', key, LONG_NAME)
        end
        if counts[4 * index - 1] == 0 or call('PTTL', key) < ttl_ms then
          call('PEXPIRE', key, ttl_ms + lease_ms)
        end
        repeats = repeats or entered < count
      end
    end

    run_refunds()
    run_claims(take, {})
    write_claims(enter_slots)
    -- A repeated claim has its slots until their own deadlines.
    local first = first_claim
    for i = 1, repeats and claim_count or 0 do
      local answer, asks = replies[ledger_count + 2 + i], tonumber(ARGV[first + 1])
      local ask = first + CLAIM_ARGS + CHARGE_ARGS * ARGV[first]
      for k = 1, type(answer) == 'table' and asks or 0 do
        local at, of = #answer - asks + k, ask + ASK_ARGS * (k - 1)
        if answer[at] == lease_end_ms then
          answer[at] = tonumber(call('ZSCORE', KEYS[tonumber(ARGV[of])], ARGV[of + 2]))
        end
      end
      first = ask + ASK_ARGS * asks
    end
    for i = 1, claim_count > 0 and ledger_count or 0 do
      replies[i + 2] = counts[4 * i - 3]
    end
  end
end
if not is_long then
  return replies
end
