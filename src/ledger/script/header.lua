-- One exchange of a replica with its ledgers: the same steps, in the same order, as in ledger/machine/.
--
-- script/mod.rs joins this text from parts: header, short_way, queue, close, steps, rates, claims.
--
-- Data
-- ====
-- A ledger is a sorted set. Its scores lie in four bands:
--
--   band     scores           member        score
--   waiting  below 0          permit id     ticket, unique: lower goes first; a half more, if a slot was or may have
--                                           been given past it
--   holding  0 .. 2^51 - 1    permit id     deadline in ms; of a permit that weighs w units w members, the id, and the
--                                           id with each of the second to the w-th of DIGITS: each unit counts as one
--   alive    2^51 .. 2^52-1   '@'..replica  2^51 + the time until which its waiters count as alive, in ms (a heartbeat);
--                                           even, or odd if it subscribes to its wake-ups
--   keeping  from 2^52 on     '~'..replica  2^52 + the time until which it may keep freed slots, in ms
--
-- A permit id is the text of its replica (REPLICA_CHARS long) and the text of its name, whose first character is the
-- weight, at WEIGHT_AT: its place in DIGITS. The members of a permit are written and removed together: which unit one
-- stands for is the place in DIGITS of its character at UNIT_AT, or 1 for the id, which has none.
--
-- The state of a rate is a text, 'us rem count/period_us/burst/rounded/before_group/group/start_us charged since_us' (see
-- rate.rs): the theoretical arrival time is us + rem / count. It has five words, as the states of versions without groups,
-- whose third ends with the burst: each version reads those of the other.
--
-- KEYS
-- ====
-- The ledgers, each once; then the states of rates, each once.
--
-- ARGV
-- ====
-- A RECORD is seven packed numbers. Capitals are the constants below: how many arguments there are for one thing.
--
--   ARGV[1]  of the exchange      RECORD: lease_ms, promote_ms, heartbeat_ms, not_after_us,
--                                         how many ledgers, refunds and claims
--            for each ledger      RECORD: limit, max_waiters, options,
--                                         how many permits to release, renew, adopt and acquire
--                                 for each permit to acquire '1' if it waits for a slot, else '0'
--            in the end           prefix of the channels for wake-ups
--                                 replica
--   then     for each ledger      its permits to release (all members), renew, adopt and acquire, in this order
--   then     for each refund      REFUND_ARGS: index of its state in KEYS, cost; since_us and charged as the charge left
--                                         them, and start_us before it
--   then     for each claim       CLAIM_ARGS: how many charges and asks; the ticket with which it was first
--                                         enqueued (0: none)
--              for each charge    CHARGE_ARGS: index of its state in KEYS, count, period_us, burst, cost, wait_us,
--                                         1 if its limit is not enforced, else 0
--              for each ask       ASK_ARGS: index of its ledger in KEYS, what to do without a free slot, permit:
--                                         refuse the claim (0), WAIT, or go on without it (IF_FREE)
--
-- Options are a sum: 1 if the replica has waiters here; 2 if it subscribes to its wake-ups; 4 if kept slots are to be
-- recalled when a permit waits or is refused, or 8 if the replica also asks for the right to keep some; 16 if a permit to
-- renew, adopt or acquire weighs more than one unit.
--
-- Reply
-- =====
--   1, 2     now_us, and 1 if there is more to sweep, else 0
--   then     for each ledger      the text of its error; or how many units are in use; or a list
--                                 LEDGER_REPLY: in use, waiting, ticket of the first waiter that was never passed over
--                                         (0: none), nearest deadline in ms (0: no holders or no waiters)
--                                 a standing for each permit renewed, adopted and acquired
--                                 the numbers of the replica's promoted waiters
--                                 the place in the queue of each permit renewed that waits, of the first MAX_PLACES, from 1
--                                         on, before anybody leaves the queue
--   then     for each claim       the text of its error; or a list
--                                 for each charge: 0 (not charged), or the start that the rate would allow, in us with
--                                         a minus, or CHARGED_REPLY: start in us, new us, rem, since_us, charged, old start_us
--                                 a standing for each ask
--
-- The number in place of a ledger's list means: no waiters, nothing was adopted, and all permits renewed or acquired
-- hold for a lease from now.
--
-- A standing is a ticket, a deadline, or one of ABSENT, FULL, QUEUE_FULL, STALE. That of an adopted permit which was
-- missing is its deadline with a minus.
--
-- Wake-ups
-- ========
-- 'granted_us until_ms numbers key' is published to another replica whose waiters were promoted. Without numbers it
-- recalls the slots that the replica keeps. If nobody would receive it at this server, though the replica subscribes to
-- its wake-ups, the replica is not connected: its waiters are not promoted but passed over, and keep their places.
--
-- Speed
-- =====
-- Lua rebuilds every function on each call, and ten captured variables cost as much as a Redis command. So there are
-- two ways. Most batches need only the short one, which builds two small functions: `release`, `renew` and `acquire`,
-- where the other steps would change nothing, since there are no waiters, no lease has ended and every newcomer weighs
-- one unit and gets a slot. The long way, all steps as in machine/, takes over behind `release`; its steps are functions only where two
-- places need them. A function has the constants that it needs as locals of its own, since they cost less than captured
-- ones: some stand twice.
--
-- Numbers are slow to pass to a command, so a number that is passed often is made a text once.

local RECORD = '<ddddddd'
local REPLICA_CHARS = 16
local LAST_DEADLINE = '2251799813685247'
local MAX_LEASE_MS = 3600000
-- Redis keeps a small set as a list, which is slow from some members on. Adding a member whose name is too long for a
-- list makes it a skip list for good, so that member need not stay.
local LIST_SIZE = 24
local LONG_NAME = '.................................................................'

local call = redis.call

local packed = ARGV[1]
local lease_ms, promote_ms, heartbeat_ms, not_after_us, ledger_count, refund_count, claim_count, first_record =
  struct.unpack(RECORD, packed)

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = (now_us - now_us % 1000) / 1000
local lease_end_ms = now_ms + lease_ms
local latest_end_ms = now_ms + MAX_LEASE_MS -- a deadline beyond it was set before the clock was stepped back
local stale = now_us > not_after_us

-- A key must last for the leases and the heartbeat of this call. It gets a lease more, so that its TTL is set once a
-- lease only.
local ttl_ms = lease_ms + heartbeat_ms

local lease_end_text, too_late_text -- made when needed
local may_write = false -- even at maxmemory, from the first write of the call on

-- Faster than `%.0f` or `..`. In two parts, because some servers have 32 bits for `%d`.
local function text_of(number)
  return string.format('%d%09d', number / 1000000000, number % 1000000000)
end

-- The permits from ARGV[first] on, each behind this score, for ZADD.
local function scored(score, first, count)
  local list = { score, ARGV[first] }
  for i = 2, count do
    list[2 * i - 1], list[2 * i] = score, ARGV[first + i - 1]
  end
  return unpack(list)
end
