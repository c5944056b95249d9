
-- The long way of claims: slots, places in the queues, and refusals.


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

-- Takes slots up to the first ledger where the claim must wait, or none at all. All claims name their ledgers in one order, each
-- once, so that none wait in a circle. Returns the standings, and whether the claim was refused.
local function take_slots(ask, asks, first_ticket)
  local standings, slots = fill(asks, ABSENT), {}
  for i = 1, asks do
    local ledger, want, id = ledgers[tonumber(ARGV[ask])], ARGV[ask + 1], ARGV[ask + 2]
    local standing, in_use, limit = ledger.scores[id], ledger.in_use, ledger.limit
    local weight = ledger.heavy and digit_at(id, WEIGHT_AT) or 1
    local fits = limit > 0 and in_use + (in_use > 0 and weight or math.min(weight, ledger.whole)) <= limit
    if not standing and ledger.waiting == ledger.passed and fits then
      slots[#slots + 1] = { i = i, ledger = ledger, id = id, weight = weight }
    else
      local payer_at = not standing and ledger.fair and ledger.payers_at[id]
      standing = standing or want == WAIT and admit(ledger, id, true, payer_at) or FULL
      ledger.refused = ledger.refused or standing == FULL
      if (standing == FULL or standing == QUEUE_FULL) and want ~= IF_FREE then
        standings = fill(asks, ABSENT)
        standings[i] = standing
        return standings, true
      end
      if standing < 0 and first_ticket < standing and not ledger.scores[id] then
        standing = advance(ledger, id, standing, first_ticket, fits)
      end
      if payer_at and standing < 0 then
        shares.join(ledger.fair, payer_at, id, standing, ledger.waiting)
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

-- Look up the current standings of the permits of all claims.
local asked, failures, first = {}, {}, first_claim -- the permits by the index of their ledger
for i = 1, claim_count do
  local asks = tonumber(ARGV[first + 1])
  first = first + CLAIM_ARGS + CHARGE_ARGS * tonumber(ARGV[first])
  for _ = 1, asks do
    local index = tonumber(ARGV[first])
    failures[i] = failures[i] or not ledgers[index] and replies[index + 2] or nil
    asked[index] = asked[index] or {}
    table.insert(asked[index], ARGV[first + 2])
    first = first + ASK_ARGS
  end
end
for index, ids in pairs(asked) do
  local ledger, scores = ledgers[index], {}
  if ledger then
    ledger.payers_at = {}
    for i, id in ipairs(ledger.fair and ids or {}) do
      ledger.payers_at[id] = #ledger.fair.dues + 1 - PAYER_BYTES * (#ids + 1 - i) -- behind all else, in the order of the asks
    end
    for i, score in ipairs(scores_of(ledger.key, unpack(ids))) do
      scores[ids[i]] = score and math.floor(score)
    end
    ledger.scores, ledger.swept = scores, false
  end
end
run_refunds()
run_claims(take_slots, failures)
local written = write_claims(function()
  for _, ledger in ipairs(ledgers) do
    if ledger then
      enter(ledger)
    end
  end
end)
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
