
-- Claims: slots in several ledgers and charges to rates, all or nothing.

local ABSENT = 0
local FULL = 1
local QUEUE_FULL = 2
local CLAIM_ARGS = 3
local CHARGE_ARGS = 7
local ASK_ARGS = 3
local PAYER_BYTES = 24

local function fill(count, standing)
  local standings = {}
  for i = 1, count do
    standings[i] = standing
  end
  return standings
end

-- Moves a permit, just enqueued at the end with `ticket`, to its claim's place: the lowest free ticket from the claim's
-- first ticket on. Slots may have been granted past that place, so the permit is marked as passed over, unless a waiter
-- ahead of it was not. Returns the new ticket.
local function advance(ledger, id, ticket, first, fits)
  local key, first_text = ledger.key, '-' .. text_of(-first)
  enter(ledger)
  local function are_taken(count)
    return call('ZCOUNT', key, first_text, string.format('(%.0f', first + count)) == count
  end
  local taken, more = 0, 1
  while are_taken(more) do
    taken, more = more, 2 * more
  end
  while more - taken > 1 do
    local middle = math.floor((taken + more) / 2)
    if are_taken(middle) then
      taken = middle
    else
      more = middle
    end
  end
  if first + taken >= ticket then
    return ticket
  end
  local head, place = score_at(key, '0'), first + taken
  local mark = (head % 1 ~= 0 or place < head) and 0.5 or 0
  call('ZADD', key, string.format('%.1f', place + mark), id)
  ledger.ticket, ledger.head = nil, nil
  if fits then -- the head may need more units than are free, and this waiter fewer
    replies[2] = 1
  end
  return place
end

-- Takes slots up to the first ledger where the claim must wait, or none at all. Returns the standings, and whether the
-- claim was refused.
local function take_slots(ask, asks, first_ticket)
  local WAIT = '1'
  local IF_FREE = '2'
  local WEIGHT_AT = 17
  local DIGITS = '-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz'
  local standings, slots = fill(asks, ABSENT), {}
  for i = 1, asks do
    local ledger, want, id = ledgers[tonumber(ARGV[ask])], ARGV[ask + 1], ARGV[ask + 2]
    local standing, in_use, limit = ledger.scores[id], ledger.in_use, ledger.limit
    local weight = ledger.heavy and string.find(DIGITS, sub(id, WEIGHT_AT, WEIGHT_AT), 1, true) or 1
    local fits = in_use + weight <= limit or in_use == 0 and limit > 0
    if not standing and ledger.waiting == ledger.passed and fits then
      slots[#slots + 1] = { i = i, ledger = ledger, id = id, weight = weight }
    else
      local payer = not standing and ledger.fair and ledger.payers[id]
      standing = standing or want == WAIT and admit(ledger, id, true, payer) or FULL
      ledger.refused = ledger.refused or standing == FULL
      if (standing == FULL or standing == QUEUE_FULL) and want ~= IF_FREE then
        standings = fill(asks, ABSENT)
        standings[i] = standing
        return standings, true
      end
      if standing < 0 and first_ticket < standing and not ledger.scores[id] then
        standing = advance(ledger, id, standing, first_ticket, fits)
      end
      if payer and standing < 0 then
        shares.join(ledger.fair, payer, id, standing, ledger.waiting)
        replies[2] = fits and 1 or replies[2]
      end
      standings[i] = standing
      if standing < 0 then
        ledger.scores[id] = standing
        break
      end
    end
    ask = ask + ASK_ARGS
  end
  for _, slot in ipairs(slots) do
    local ledger = slot.ledger
    ledger.in_use = ledger.in_use + slot.weight
    ledger.scores[slot.id] = lease_end_ms
    push(ledger.entering, lease_end_text, slot.id, slot.weight)
    standings[slot.i] = lease_end_ms
  end
  return standings, false
end

-- All steps that can fail precede the first change.
local function claim(first_charge, charges, first_ask, asks, first_ticket)
  local answer, standings = {}, nil
  local quotes, refused, later = {}, false, false
  for ask = first_ask, first_ask + ASK_ARGS * (asks - 1), ASK_ARGS do
    local index = tonumber(ARGV[ask])
    if not ledgers[index] then
      error(replies[index + 2], 0)
    end
  end
  for i = 1, charges do
    local quoted = quote(first_charge + CHARGE_ARGS * (i - 1))
    quotes[i] = quoted
    refused, later = refused or quoted.refuses, later or quoted.later
  end
  -- No slot is held while the claim waits for its start.
  if not refused and not later then
    standings, refused = take_slots(first_ask, asks, first_ticket)
  end
  for i = 1, charges do
    local size, quoted = #answer, quotes[i]
    if quoted.allowed and refused then
      answer[size + 1] = 0
    elseif not quoted.allowed then
      answer[size + 1] = -quoted.start_us
    else -- CHARGED_REPLY
      local tat = quoted.tat
      tats[quoted.index], changed[quoted.index] = tat, true
      answer[size + 1], answer[size + 2], answer[size + 3] = quoted.start_us, tat.us, tat.rem
      answer[size + 4], answer[size + 5], answer[size + 6] = tat.since_us, tat.charged, quoted.before_us
    end
  end
  for _, standing in ipairs(standings or fill(asks, ABSENT)) do
    answer[#answer + 1] = standing
  end
  return answer
end

-- At maxmemory Redis denies the first of these commands, and then the others do not run.
local function write()
  -- The server counts from a time slightly earlier than ours, and rounds.
  local TTL_SPARE_MS = 2
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
  for _, ledger in ipairs(ledgers) do
    if ledger then
      enter(ledger)
    end
  end
end

-- Look up the current standings of the permits of all claims.
local asked, first = {}, arg -- the permits by the index of their ledger
for _ = 1, claim_count do
  local asks = tonumber(ARGV[first + 1])
  first = first + CLAIM_ARGS + CHARGE_ARGS * tonumber(ARGV[first])
  for _ = 1, asks do
    local index = tonumber(ARGV[first])
    asked[index] = asked[index] or {}
    table.insert(asked[index], ARGV[first + 2])
    first = first + ASK_ARGS
  end
end
for index, ids in pairs(asked) do
  local ledger, scores = ledgers[index], {}
  if ledger then
    ledger.payers = {}
    for i, id in ipairs(ledger.fair and ids or {}) do
      ledger.payers[id] = #ledger.fair.text + 1 - PAYER_BYTES * (#ids + 1 - i) -- the last ones
    end
    for i, score in ipairs(scores_of(ledger.key, unpack(ids))) do
      scores[ids[i]] = score and math.floor(score)
    end
    ledger.scores, ledger.swept = scores, false
  end
end
for i = 1, claim_count do
  local charges, asks, first_ticket = tonumber(ARGV[arg]), tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  local first_charge = arg + CLAIM_ARGS
  local first_ask = first_charge + CHARGE_ARGS * charges
  replies[ledger_count + 2 + i] = outcome(pcall(claim, first_charge, charges, first_ask, asks, first_ticket))
  arg = first_ask + ASK_ARGS * asks
end
local written, failure = pcall(write)
for i = 1, written and 0 or claim_count do
  replies[ledger_count + 2 + i] = outcome(written, failure)
end
for i, ledger in ipairs(ledgers) do
  if ledger then
    if not written then
      ledger.in_use = call('ZCOUNT', ledger.key, '0', LAST_DEADLINE)
      ledger.waiting = call('ZCOUNT', ledger.key, '-inf', '-1')
      ledger.entering, ledger.head, ledger.fair = {}, nil, nil
    end
    local ok, result = pcall(close, ledger)
    replies[i + 2] = outcome(ok, ok and ledger.reply or result)
  end
end
return replies
