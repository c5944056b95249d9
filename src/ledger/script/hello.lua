
-- A hello, or a query on a connection that is made: asks for the time, and for the generation of the data. Replicas with work ask a
-- few times in each lease, so that the generation does not end before their permits.
if ledger_count + refund_count + claim_count == 0 then
  local key, known = KEYS[1], tonumber(ARGV[2])
  local kept = key and known and redis.pcall('GET', key)
  if not known or type(kept) == 'table' then
    return { now_us, 0 }
  end
  local id, found_text = string.match(kept or '', '^(%d+) (%d+)$')
  -- A generation began at the time that is its id. A loss found after `known` began has been announced already.
  local is_found = known > 0 and (not id or tonumber(id) ~= known and found_text * 1000 < known)
  id = id or string.format('%.0f', now_us)
  found_text = is_found and string.format('%.0f', now_ms) or found_text or '0'
  -- Replicas may have different leases.
  local longest_ms = math.max(redis.call('PTTL', key), ttl_ms + lease_ms)
  -- By pcall: at maxmemory, and in a copy, this fails.
  if redis.pcall('SET', key, id .. ' ' .. found_text, 'PX', longest_ms).err then
    return { now_us, 0 }
  end
  if is_found then
    redis.pcall('PUBLISH', string.sub(packed, first_record, -REPLICA_CHARS - 1) .. 'all', 'lost ' .. key)
  end
  return { now_us, 0, { tonumber(id), tonumber(found_text) } }
end
