
-- The steps after `release`, in their order, and `run`, which takes a ledger through them.

-- The next waiter in order of arrival, behind the first `at`. `waiters`: all that were read, each with its ticket: at first as many as
-- there are free units, and the one that will be first then; later many more, since some were dead or passed over. `left`: how many
-- wait behind those that were looked at.
local function next_by_arrival(key, waiters, at, free, left, served)
  local id = nil
  repeat
    at = at + 1
    id = waiters and waiters[2 * at - 1]
    if not id then
      local first, window = at - 1, math.min(at == 1 and free + 1 or 8 * at, left, budget)
      local first_rank = first == 0 and '0' or string.format('%d', first)
      local more = redis.call('ZRANGE', key, first_rank, string.format('%d', first + window - 1), 'WITHSCORES')
      waiters = waiters or more
      for i = 1, first == 0 and 0 or #more do
        waiters[2 * first + i] = more[i]
      end
      id = waiters[2 * at - 1]
    end
  until not served or not served[id] -- nothing was written yet
  return id, waiters, at
end

-- `promote`: grants free slots to waiters. A waiter whose replica is not reachable is passed over: it keeps its place, and a later
-- waiter gets the slot. A waiter that needs more units than are free blocks the queue behind it, because it would otherwise
-- starve. A permit heavier than the limit, which was lowered in the meantime, enters alone, once the ramp after a pause is over.
-- Behind MAX_PASSED unreachable waiters nobody is served until these are dead. Returns the replica's own waiters that were granted a
-- slot.
local function promote(ledger)
  local key, fair, limit, in_use, waiting, passed = ledger.key, ledger.fair, ledger.limit, ledger.in_use, ledger.waiting, 0
  local granted, dead, skipped, promoted, until_text = {}, nil, nil, {}, text_of(promoted_end_ms)
  local contacts, gone, served = nil, fair and {}, fair and {} -- texts that leave the lines; waiters that leave the set
  local waiters, at = nil, 0
  -- The waiters of a fair ledger are served in the order of shares, until nobody is left in the lines; then the queue is passed
  -- once more in order of arrival. It is served in that order alone if the lines have fewer entries, since they were lost, or a
  -- replica is older.
  local in_lines = fair and redis.call('ZCARD', fair.lines) >= waiting
  while in_use < limit and passed < waiting and passed < MAX_PASSED do
    local id, text = nil, nil
    if in_lines then
      id, text = shares.next_by_share(ledger, gone, served, limit - in_use)
      if not id and budget > 0 then
        in_lines, passed = false, 0
      end
    end
    if budget > 0 and not id then
      id, waiters, at = next_by_arrival(key, waiters, at, limit - in_use, waiting - passed, served)
    end
    if not id then
      ledger.more = true
      break
    end
    local owner = string.sub(id, 1, REPLICA_CHARS)
    contacts = contacts or owner ~= replica and {}
    local contact = owner == replica and 'caller' or contact_with(owner, key, contacts)
    if contact == 'dead' then
      dead = dead or {}
      dead[#dead + 1] = id
      waiting, budget = waiting - 1, budget - 1
    elseif contact == 'unreachable' then
      skipped = skipped or {}
      skipped[#skipped + 1] = id
      passed = passed + 1
    else
      local weight = 1
      if string.byte(id, WEIGHT_AT) ~= LIGHT then
        weight = digit_at(id, WEIGHT_AT)
        if in_use + (in_use > 0 and weight or math.min(weight, ledger.whole)) > limit then
          ledger.blocked = true
          break
        end
        budget = math.max(budget, weight)
      end
      push(granted, until_text, id, weight)
      if text then
        shares.charge(fair, text, waiting)
      end
      in_use, waiting, budget = in_use + weight, waiting - 1, budget - weight
      local names = promoted[owner] or {}
      names[#names + 1], promoted[owner] = string.sub(id, WEIGHT_AT), names
    end
    if text and contact == 'unreachable' then
      fair.line_of[fair.tenant].passed = true
    elseif text then
      gone[#gone + 1], served[id] = text, true
    end
  end
  if skipped then
    rarely().mark(key, skipped)
  elseif waiters and not fair then -- all that were looked at have left the queue, except for one that blocks it
    ledger.head = tonumber(waiters[ledger.blocked and 2 * at or 2 * at + 2])
  end
  on_all('ZADD', key, granted)
  if dead then
    redis.call('ZREM', key, unpack(dead))
  end
  if fair then
    on_all('ZREM', fair.lines, gone)
  end
  for owner, names in pairs(promoted) do
    if owner ~= replica then
      local wake = text_of(now_us) .. ' ' .. until_text .. ' ' .. table.concat(names) .. ' ' .. key
      -- By pcall: an ACL may forbid it, and then waiters learn of their slots when they poll.
      redis.pcall('PUBLISH', wake_prefix .. owner, wake)
    end
  end
  ledger.promoted, ledger.in_use, ledger.waiting, ledger.passed = in_use - ledger.in_use, in_use, waiting, passed
  return promoted[replica]
end

-- All steps after `release`. If the exchange has no claims, the steps after the claims follow directly. `lasting`: holders whose lease
-- lasts beyond this second; `early`: all other holders, and waiters.
local function run(ledger, lasting, early, size, removed, first, renews, adopts, acquires, waits_at)
  local key, fair, heavy, reply = ledger.key, ledger.fair, ledger.heavy, ledger.reply
  local in_use, waiting, places, own = lasting, 0, nil, nil
  -- The queue comes first in the set, then the holders, nearest deadline first.
  if early > 0 then
    waiting = call('ZCOUNT', key, '-inf', '-1')
    in_use = lasting + early - waiting
  end
  local pace_generation = ledger.results and pace(ledger, in_use, removed)
  if ledger.pause > 0 or in_use + waiting < size then -- a member that neither holds nor waits may be a pause
    local before = call('ZSCORE', key, PAUSE)
    if before or ledger.pause > 0 then
      sometimes().pause(ledger, tonumber(before) or 0)
    end
  end
  local extends, is_short = renews + adopts, adopts == 0 and waiting == 0 and not heavy -- as in the short way
  if extends > 0 then
    if is_short and call('ZADD', key, 'XX', 'GT', 'CH', scored(lease_end_text, first, renews)) == renews then
      for i = 1, renews do
        reply[LEDGER_REPLY + i] = lease_end_ms
      end
    else
      in_use, waiting, places, is_short = sometimes().extend(ledger, first, renews, extends, in_use, waiting,
        lease_end_ms, lease_end_text)
    end
  end
  local lists = ledger.options % 512 >= 256 and in_use <= budget -- see the options
  local listed = lists and rarely().list_holders(key, in_use, waiting) or nil
  local ended = in_use > lasting and call('ZCOUNT', key, '0', now_ms) or 0
  if ended > 0 then
    in_use = in_use - rarely().expire(ledger, ended, waiting)
  end
  local free = ledger.limit - in_use
  if ledger.owes then
    shares.settle(fair, removed, acquires, waiting > 0 and math.max(free, 0) or 0)
  end
  ledger.in_use, ledger.waiting = in_use, waiting
  if waiting > 0 and free > 0 then
    own = promote(ledger)
  end
  if free <= 0 or ledger.blocked or heavy then
    too_late_text = too_late_text or '(' .. text_of(now_ms + MAX_LEASE_MS)
    local far = call('ZCOUNT', key, too_late_text, LAST_DEADLINE)
    if far > 0 then
      rarely().bring_forward(ledger, far, too_late_text)
    end
  end
  -- `acquire`
  if acquires > 0 then
    first = first + extends
    for i, score in ipairs(scores_of(key, unpack(ARGV, first, first + acquires - 1))) do
      local id, wait = ARGV[first + i - 1], string.sub(packed, waits_at + i - 1, waits_at + i - 1)
      local payer_at = fair and DUES_HEAD + PAYER_BYTES * (i - 1) + 1
      local standing = score and math.floor(score) or admit(ledger, id, wait == '1', payer_at)
      reply[#reply + 1] = standing
      if fair and not score and standing < 0 then
        shares.join(fair, payer_at, id, standing, ledger.waiting)
      end
    end
  end
  replies[2] = ledger.more and 1 or replies[2]
  for i = 1, own and #own or 0 do
    reply[#reply + 1] = own[i]
  end
  for i = 1, places and #places or 0 do
    reply[#reply + 1] = places[i]
  end
  reply[#reply + 1] = listed
  if pace_generation then
    reply[#reply + 1], reply[#reply + 2] = ledger.whole, pace_generation
  end
  if claim_count > 0 then
    enter(ledger)
    return reply
  end
  close(ledger)
  local is_brief = acquires == 0 and (extends == 0 or is_short) and not own and not listed and not pace_generation
    and not ledger.pause_end_ms
  return is_brief and ledger.waiting == 0 and ledger.in_use or reply
end

local ledgers = {} -- for the claims; false for a failed ledger
local dues = arg -- the dues of the next fair ledger
arg, record = 2, first_record
for i = 1, ledger_count do
  local limit, max_waiters, options, releases, renews, adopts, acquires, waits_at = struct.unpack(RECORD, packed, record)
  ledgers[i] = false
  local is_fair, owes, is_paced = options % 128 >= 64, options % 256 >= 128, options > 1023 and options % 2048 > 1023
  local has_text = owes or is_fair and acquires > 0
  if not replies[i + 2] then
    local ledger = { -- with room for what is added: the pause, the head and the next ticket
      key = KEYS[i], limit = limit, whole = limit, max_waiters = max_waiters, -- `limit`: what a pause and its ramp leave of `whole`
      options = options, beat = options % 4, -- 1 if the replica has waiters here, 3 if it also subscribes
      reuse = 0, heavy = false, pause = 0, fair = nil, owes = owes,
      in_use = 0, waiting = 0, promoted = 0, passed = 0, entering = {}, reply = { 0, 0, 0, 0, nil }, -- LEDGER_REPLY
    }
    if options > 3 then
      ledger.reuse, ledger.heavy = (options % 16 - options % 4) / 4, options % 32 >= 16
      ledger.pause = (options - options % 2048) / 2048
    end
    if is_paced then
      ledger.results = ARGV[has_text and dues + 1 or dues]
    end
    if is_fair then
      ledger.fair = { -- preallocated
        lines = KEYS[i] .. LINES, shares = KEYS[i] .. SHARES, dues = has_text and ARGV[dues],
        scores = {}, changed = {}, forgets = nil, entering = nil, began = nil, time = nil, names = {}, line_of = nil,
        rank = 0, all = false, bound = -1, bound_name = '', tenant = nil, turn = nil,
      }
    end
    local ok, result = pcall(run, ledger, counts[4 * i - 3], counts[4 * i - 2], counts[4 * i - 1], counts[4 * i],
      arg + releases, renews, adopts, acquires, waits_at)
    replies[i + 2], ledgers[i] = outcome(ok, result), ok and claim_count > 0 and ledger
  end
  dues = has_text and dues + 1 or dues
  dues = is_paced and dues + 1 or dues
  arg, record = arg + releases + renews + adopts + acquires, waits_at + acquires
end
if refund_count + claim_count == 0 then
  return replies
end
