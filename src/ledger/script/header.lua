-- One exchange of a replica with its ledgers: the same steps, in the same order, as in ledger/machine/.
--
-- script/mod.rs joins this text from parts: header, hello, short_way, rates, claims, helpers, rare, queue, shares, pace, close,
-- steps, claim_slots.
--
-- Data
-- ====
-- A ledger is a sorted set. Its scores lie in four bands:
--
--   band     scores           member        score
--   waiting  below 0          permit id     ticket (its arrival in us - 2^52), unique: lower tickets are first; plus a half, if a slot was or may
--                                           have been granted past the waiter
--   holding  0 .. 2^51 - 1    permit id     deadline in ms; a permit of weight w has w members: the id, and the id
--                                           followed by each of the second to the w-th of DIGITS; each unit counts as one
--   alive    2^51 .. 2^52-1   '@'..replica  2^51 + the time until which it calls again unless it has stopped, in ms (a
--                                           heartbeat); even, or odd if it subscribes to its wake-ups
--            2^51 .. 2^52-1   '!'           2^51 + the end of a pause and of its ramp, in ms: until the end of the pause
--                                           nobody gets a slot, and then the limit rises from 0 over RAMP_MS; plus a half, once an
--                                           operator has ended it
--   keeping  from 2^52 on     '~'..replica  2^52 + the time until which it may keep freed slots, in ms: it does not release
--                                           them, renews their leases, and reuses them without a call
--
-- A permit id is the text of its replica (REPLICA_CHARS long) and the text of its name (its number in the replica, as text), whose
-- first character, at WEIGHT_AT, encodes the weight by its position in DIGITS. The members of a permit are written and removed
-- together. The character at UNIT_AT numbers a member's unit by its position in DIGITS; the id itself, without this character, is
-- unit 1.
--
-- A fair ledger has two more sorted sets. '<ledger>:shares' has the payments of tenants, in us of virtual time:
--
--   virtual time   below 0          ''       virtual time - 2^51
--   waiting        0 .. 2^51 - 1    tenant   its payments; it has a line
--   idle           2^51 .. 2^52-1   tenant   2^51 + its payments, until virtual time has reached them
--
-- '<ledger>:lines' has the waiters, all with the score 0, so in the order of the text: tenant (TENANT_CHARS), 2^52 + ticket, permit
-- id, cost of the grant in us, both numbers with 16 digits. It may still have permits that wait no longer. Both sets may be lost:
-- while the lines have fewer entries than the queue has waiters, the queue is served in order of arrival. These sets are not in
-- KEYS: an exchange with a cluster has one ledger, and their names have its hash tag. The eviction policy must be `noeviction`: any
-- other may take a single ledger.
--
-- A ledger whose limit finds its own value has a text, '<ledger>:pace': limit, generation of results, score, wall, until when
-- it stands and for how long in ms, 1 if a result of this generation was accepted, until when growth is used up in ms, and of
-- the last cut its time in ms, from and to (see pace.rs).
--
-- The state of a rate is a text, 'us rem count/period_us/burst/rounded/before_group/group/start_us charged since_us'
-- (see rate.rs): the theoretical arrival time is us + rem / count; of the units that were `charged` since `since_us`, refunds are
-- possible. Versions without groups also wrote five words, but their third word ends with the burst: each version can read the
-- other's states.
--
-- A generation is a text, 'id found_ms': the data of the namespace, or in a cluster of a part, have been there since the
-- moment id in us, and a replica found at found_ms that they had replaced others (0: none has).
--
-- KEYS
-- ====
-- The ledgers, each once, and then the states of rates, each once. A hello has neither, but the generation.
--
-- ARGV
-- ====
-- EXCHANGE and RECORD are packed numbers. Names in capitals are constants of layout.rs, whose values script/mod.rs puts in: the number of
-- arguments for each element.
--
--   ARGV[1]  of the exchange      EXCHANGE: lease_ms; respond_ms, within which this replica calls again while it has
--                                         waiters; waiter_ttl_ms; not_after_us; numbers of ledgers, refunds and claims; 1 if the
--                                         replica expects a generation, else 0: newcomers fail in a ledger that is empty
--                                         while the data have another one
--            for each ledger      RECORD: limit, max_waiters, options,
--                                         numbers of permits to release, renew, adopt and acquire
--                                 for each permit to acquire '1' if it waits for a slot, else '0' (from `waits_at` on)
--            in the end           prefix of the channels for wake-ups
--                                 replica
--   then     for each ledger      its permits to release (all members), renew, adopt and acquire, in this order
--   then     for each fair ledger that acquires or owes (see the options) its dues, packed:
--                                 DUES_NUMBERS: units of the permits that are settled for; numbers of departures, of
--                                         reports, and of settlements
--                                 for each permit to acquire its payer: tenant, cost of a grant in us, with 16 digits
--                                 for each departure, a waiter among the permits to release, its text in the lines
--                                 for each report and settlement tenant, us (negative: a refund), and the cost so far
--                                         of the tenant's most expensive permit
--                                 for each ask of a claim its payer
--            behind these of a limit that finds its own value PACE_REPORT: floor, ceiling; generation of results, and numbers of
--                                         accepted and of overloaded results
--   then     for each refund      REFUND_ARGS: index of its state in KEYS, cost; since_us and charged after the charge,
--                                         and start_us before it
--   then     for each claim       CLAIM_ARGS: numbers of charges and asks; its first ticket (0: none)
--              for each charge    CHARGE_ARGS: index of its state in KEYS, count, period_us, burst, cost, wait_us,
--                                         1 if its limit is not enforced, else 0
--              for each ask       ASK_ARGS: index of its ledger in KEYS, what to do without a free slot, permit:
--                                         refuse the claim (0), WAIT, or proceed without the slot (IF_FREE)
--   then     if it expects one    the name of the generation, and what the replica has seen there less than a lease ago. The
--                                         name is not in KEYS, since a server may be one of a cluster that is not known as such
--   of a hello                    the id of the generation that the replica has seen less than a lease ago (0: none), or
--                                         '' if it does not ask
--
-- Options are a sum: 1 if the replica has waiters here, or newcomers that may wait; 2 if it also subscribes to its wake-ups; 4 if
-- kept slots are recalled when a permit waits or is refused, or 8 if the replica also asks for the right to keep slots; 16 if a
-- permit to renew, adopt or acquire weighs more than one unit; 32 if all replicas are told when a permit to adopt is missing; 64 if
-- the ledger is fair; 128 if it owes: its dues also have departures, reports or settlements, or payers for claims; 256 if the
-- replica asks for its holders; 2048 times the length + 1 of a pause to start, in ms, or 2048 to end the present pause; 512 if it
-- knows that pause, which starts only if it was not ended; 1024 if the limit finds its own value.
--
-- Repetition: an exchange without an answer may have run. A later one names its permits again: releases, renewals and adoptions
-- then change nothing more, and requests ask under new names, while the old ones are released until not_after_us has passed.
-- Charges, refunds, results and reports of dues are never sent twice.
--
-- Reply
-- =====
--   1, 2     now_us, and 1 if another exchange should follow at once (the sweep is not finished, or a
--            newcomer that fits has queued), LATE if the exchange arrived after its not_after_us, else 0. Of a
--            late exchange no step runs, and nothing follows.
--   then     for each ledger      the text of its error; or the number of units in use; or a list
--                                 LEDGER_REPLY: in use, waiting, ticket of the first waiter that was never passed over
--                                         (0: none), which shows waiters before it that their turn has passed;
--                                         nearest deadline in ms, at which waiters call again, since only calls expire
--                                         leases (0: no holders or no waiters), or the negated end of a pause, until its
--                                         ramp is over
--                                 a standing for each permit renewed, adopted and acquired
--                                 the names of the replica's promoted waiters
--                                 the queue positions, from 1, of renewed permits that wait: the first MAX_PLACES,
--                                         before any permit leaves the queue
--                                 a list of the names of the replica's holders, nearest deadline first, if it asks,
--                                         and no more units are in use than the sweep may still look at
--                                 the limit and the generation of results, if the limit finds its own value
--   then     for each claim       the text of its error; or a list
--                                 for each charge: 0 (not charged), or the negated start that the rate would allow,
--                                         in us, or
--                                         CHARGED_REPLY: start in us, new us, rem, since_us, charged, old start_us
--                                 a standing for each ask
--   of a hello                    a list of the generation's id and found_ms, unless the server cannot keep one
--
-- A number in place of a ledger's list means: the queue is empty, nothing was adopted, and all renewed or acquired
-- permits hold for a lease from now.
--
-- A standing is a ticket, a deadline, or one of ABSENT, FULL, QUEUE_FULL. For an adopted permit that was missing
-- it is the negated deadline.
--
-- Wake-ups
-- ========
-- 'granted_us until_ms names key' is published to another replica whose waiters were promoted. Without names it
-- recalls the replica's kept slots. If nobody would receive the message at this server, although the replica subscribes
-- to its wake-ups, the replica is not connected. If its heartbeat has ended, it has stopped. Its waiters are then passed
-- over instead of promoted, and keep their places for waiter_ttl_ms.
--
-- 'lost key' is published to all replicas: a ledger has lost permits, or a generation has replaced another one.
--
-- Speed
-- =====
-- Lua rebuilds every function on each call, and ten captured variables cost as much as a Redis command. So the script
-- has two paths. Most batches need only the short way, which builds one small function: `release`, `renew` and
-- `acquire`. It suffices if the other steps would change nothing: the queue is empty, no lease has ended, there
-- is no pause, and every newcomer weighs one unit and gets a slot. Otherwise the long way, all steps as in machine/, takes
-- over after `release`; its steps are functions only if two places call them. Claims have a short way as well (claims.lua).
--
-- Numbers are slow to pass to a command, so a number that is passed often is converted to text once.

local call = redis.call

local packed = ARGV[1]
local lease_ms, respond_ms, waiter_ttl_ms, not_after_us, ledger_count, refund_count, claim_count, expects, first_record =
  struct.unpack(EXCHANGE, packed)

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = (now_us - now_us % 1000) / 1000
local lease_end_ms = now_ms + lease_ms
local latest_end_ms = now_ms + MAX_LEASE_MS -- a later deadline was set before the clock was stepped back

-- A key must outlive the leases and the heartbeat of this call. It gets an extra lease, so that its TTL is set only
-- once per lease.
local ttl_ms = lease_ms + respond_ms + waiter_ttl_ms

local lease_end_text, too_late_text -- created on demand
local may_write = false -- even at maxmemory, after the call's first write

-- Arguments for ZADD: the permits from ARGV[first] on, each with this score.
local function scored(score, first, count)
  if count == 1 then
    return score, ARGV[first]
  end
  local list = { score, ARGV[first] }
  for i = 2, count do
    list[2 * i - 1], list[2 * i] = score, ARGV[first + i - 1]
  end
  return unpack(list)
end
