
-- The steps after the claims: `heartbeat`, `recall`, `keep`. The reply shows the ledger's final state.
local function close(ledger)
  local key, in_use, waiting, reuse, reply = ledger.key, ledger.in_use, ledger.waiting, ledger.reuse, ledger.reply
  local pause_end_ms = ledger.pause_end_ms
  -- `heartbeat`: only a queue needs it. Long-ended heartbeats are removed when a new one is added, so that they cannot
  -- accumulate.
  local heartbeat = nil
  if waiting > 0 and ledger.beat > 0 then
    local last_ms = now_ms + respond_ms
    heartbeat = text_of(ALIVE + last_ms - (last_ms + (ledger.beat - 1) / 2) % 2)
  end
  if enter(ledger, heartbeat) then
    call('ZREMRANGEBYSCORE', key, ALIVE, ALIVE + now_ms - MAX_LEASE_MS - 1)
  elseif waiting == 0 and in_use == 0 and not ledger.pause_over then
    call('ZREMRANGEBYSCORE', key, ALIVE, '+inf')
  end
  if reuse > 0 and (ledger.refused or waiting > 0 or pause_end_ms) then
    making_room().recall(key)
  end
  -- `keep`: the replica concludes from the reply that it has the right. Ended rights are removed when a new one is added, so that
  -- they cannot accumulate.
  if reuse == 2 and waiting == 0 and in_use > 0 and in_use <= ledger.limit and not pause_end_ms then
    if call('ZADD', key, KEEPING + now_ms + RIGHT_MS, '~' .. replica) == 1 then
      call('ZREMRANGEBYSCORE', key, KEEPING, KEEPING + now_ms - 1)
    end
  end
  local least_ms = ledger.pause_over and math.max(ttl_ms, ledger.pause_over - now_ms) or ttl_ms
  if (ledger.pause_over or in_use + waiting > 0) and call('PTTL', key) < least_ms then
    call('PEXPIRE', key, least_ms + lease_ms)
  end
  -- The two sets of a fair ledger must outlive its queue, even if a longer lease or a pause has set the TTL of the ledger.
  local fair = ledger.fair
  if fair and (fair.began or waiting > 0 and call('PTTL', fair.lines) < least_ms) then
    call('PEXPIRE', fair.lines, least_ms + lease_ms)
    call('PEXPIRE', fair.shares, least_ms + lease_ms)
  end
  reply[1], reply[2], reply[4] = in_use, waiting, pause_end_ms and -pause_end_ms or 0
  if waiting > 0 then
    local head = ledger.head or score_at(key, '0')
    if head % 1 ~= 0 then -- the head was passed over
      for i, score in ipairs(call('ZRANGE', key, '0', MAX_SEARCHED - 1, 'WITHSCORES')) do
        head = i % 2 == 0 and tonumber(score) or head
        if head % 1 == 0 then
          break
        end
      end
      head = head % 1 == 0 and math.min(head, 0) or 0
    end
    reply[3] = head
    if in_use > 0 and not pause_end_ms then
      reply[4] = in_use == ledger.promoted and promoted_end_ms or score_at(key, string.format('%d', waiting))
    end
  end
end
