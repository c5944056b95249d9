
-- A limit that finds its own value, as in ledger/pace.rs. Without one this is not created.

local pace = nil
if has_paced then
  -- `pace`: counts what a replica reports of the upstream, while this much is in use and as much has just left. Puts the limit that
  -- was found in place of the ledger's, and returns its generation.
  function pace(ledger, in_use, removed)
    local key, pattern = ledger.key .. PACE, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) ([01]) (%d+) (%d+) (%d+) (%d+)$'
    local floor, ceiling, reported, accepted, overloaded = struct.unpack(PACE_REPORT, ledger.results)
    local stored = redis.pcall('GET', key) -- by pcall: in a cluster the key may be on its way to another node
    local is_known = type(stored) ~= 'table'
    local limit, generation, score, wall, until_ms, wall_ms, any, grown_ms, cut_ms, from, to = string.match(is_known and stored or '', pattern)
    limit = math.max(floor, math.min(tonumber(limit or ledger.limit), ceiling))
    generation = is_known and tonumber(generation or 0) or reported
    if is_known and reported == generation and accepted + overloaded > 0 then
      local before = limit
      wall, until_ms, wall_ms = tonumber(wall or 0), tonumber(until_ms or 0), tonumber(wall_ms or 0)
      grown_ms, cut_ms, from, to = tonumber(grown_ms or 0), tonumber(cut_ms or 0), tonumber(from or 0), tonumber(to or 0)
      in_use = math.max(in_use, math.min(in_use + removed, limit))
      any = accepted > 0 and '1' or any or '0'
      score = math.max(tonumber(score or 0) + OVERLOAD * overloaded - accepted, 0)
      if score >= TRIP then
        local is_same = wall > 0 and 10 * math.abs(in_use - wall) <= wall and any == '1'
        wall_ms = is_same and math.min(2 * wall_ms, MAX_WALL_MS) or WALL_MS
        wall, until_ms = in_use, now_ms + wall_ms
        cut_ms, from, to = now_ms, limit, math.max(floor, math.min(limit - 1, math.floor(9 * in_use / 10)))
        limit, generation, score, any = to, generation + 1, 0, '0'
      elseif accepted > 0 and 10 * in_use >= 9 * limit then
        local left_ms, top = until_ms - now_ms, ceiling
        if wall > 0 and left_ms > 0 and left_ms <= wall_ms then -- else the clock was stepped back since
          top = math.min(ceiling, wall - 1)
        end
        local a_second = math.max(math.floor(limit / 10), 1)
        local unused_ms = grown_ms > now_ms and 1000 or math.min(now_ms - grown_ms, 1000) -- ahead if the clock was stepped back
        limit = math.max(limit, math.min(limit + math.min(accepted, math.floor(unused_ms * a_second / 1000)), top))
        grown_ms = now_ms - unused_ms + math.ceil(1000 * (limit - before) / a_second)
        wall = 10 * limit > 11 * wall and 0 or wall
      end
      -- Keys may be many: as long as a limit is as declared, nothing is kept.
      if stored or score > 0 or generation > 0 or limit ~= before then
        local text = '%.0f %.0f %.0f %.0f %.0f %.0f %s %.0f %.0f %.0f %.0f'
        text = string.format(text, limit, generation, score, wall, until_ms, wall_ms, any, grown_ms, cut_ms, from, to)
        if redis.pcall('SET', key, text, 'PX', PACE_TTL_MS).err then -- at maxmemory the limit stays as it is
          limit, generation = before, reported
        end
      end
    end
    ledger.limit, ledger.whole = limit, limit
    return generation
  end
end
