-- One change of the record of overrides: all of its edits, or none. The same steps as in memory.rs.
--
-- Data
-- ====
-- The record is a hash: the field 'token' has the token of the latest change, and each other field is an override. Its
-- name says what it is about, and its text is 'since_ms end_ms token json', which is opaque here from the token on.
-- The hash expires with the last end that it has ever had, so that an override that was removed is not mistaken for one
-- that was lost with the store's data.
--
-- The log is a list of the latest changes, newest first, each as JSON.
--
-- KEYS
-- ====
-- The record, the log.
--
-- ARGV
-- ====
--   1, 2     token of this change; a note about it for the log
--   3, 4     channel and message to be published after it, in which '"not_after_ms":0' gets a time
--   5, 6     most overrides, most changes in the log
--   7, 8     in ms: furthest end that counts, time for which the log is kept
--   9        how many edits
--   then for each edit
--            field
--            token that the caller has seen there ('' if there was no override)
--            length in ms; or '' if what follows is a whole text
--            text from behind the token on; or a whole text that was there before; or '' to remove the override
--
-- Reply
-- =====
--   'done', now_ms
--   'changed', field, its text ('' if there is none now): the caller has seen another token there
--   'full': there would be too many overrides
--   'same': there is nothing to remove
--
-- Ends that have passed, and texts that cannot be read, are removed. The first write frees memory, so that a change is
-- possible at `maxmemory`.

local record, log = KEYS[1], KEYS[2]
local token, note, channel, message = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local most, most_logged = tonumber(ARGV[5]), tonumber(ARGV[6])
local furthest_ms, log_ms = tonumber(ARGV[7]), tonumber(ARGV[8])
local edits = tonumber(ARGV[9])

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local texts, ended, count = {}, {}, 0
local all = redis.call('HGETALL', record)
for i = 1, #all, 2 do
  local field, text = all[i], all[i + 1]
  if field ~= 'token' then
    local end_ms = tonumber(string.match(text, '^%d+ (%d+) %x+ ') or 0)
    if end_ms > now_ms and end_ms <= now_ms + furthest_ms then
      texts[field] = text
      count = count + 1
    elseif #ended < most then
      ended[#ended + 1] = field
    end
  end
end

local function token_of(text)
  return text and string.match(text, '^%d+ %d+ (%x+) ') or ''
end

local after, last_ms, changes = {}, 0, {}
for i = 1, edits do
  local at = 10 + (i - 1) * 4
  local field, seen, length_ms, text = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local before = texts[field]
  if token_of(before) ~= seen then
    return { 'changed', field, before or '' }
  end
  if length_ms ~= '' then
    text = string.format('%.0f %.0f ', now_ms, now_ms + tonumber(length_ms)) .. token .. ' ' .. text
  end
  local end_ms = tonumber(string.match(text, '^%d+ (%d+) ') or 0)
  if end_ms <= now_ms then
    text = '' -- one that is put back has ended meanwhile
  end
  if text ~= (before or '') then
    changes[#changes + 1] = { field, before or '', text }
    count = count + (before and 0 or 1) - (text == '' and 1 or 0)
    last_ms = math.max(last_ms, text == '' and 0 or end_ms)
  end
end
if #changes == 0 then
  return { 'same' }
end

redis.call('LLEN', log) -- an error of its type comes before anything is written
redis.call('HDEL', record, '-', unpack(ended))
if count > most then
  return { 'full' }
end
local ttl_ms = redis.call('PTTL', record)
for _, change in ipairs(changes) do
  if change[3] == '' then
    redis.call('HDEL', record, change[1])
  end
end
for _, change in ipairs(changes) do
  if change[3] ~= '' then
    redis.call('HSET', record, change[1], change[3])
  end
end
redis.call('HSET', record, 'token', token)
if ttl_ms == -1 then
  last_ms = now_ms + furthest_ms -- it was not made here
end
if last_ms - now_ms > ttl_ms then
  redis.call('PEXPIRE', record, string.format('%.0f', math.max(last_ms - now_ms, 1000)))
end

local entry = { at_ms = string.format('%.0f', now_ms), token = token, note = note, edits = changes }
redis.call('LPUSH', log, cjson.encode(entry))
redis.call('LTRIM', log, 0, most_logged - 1)
redis.call('PEXPIRE', log, log_ms)
local not_after = '"not_after_ms":' .. string.format('%.0f', now_ms + 5000)
redis.pcall('PUBLISH', channel, (string.gsub(message, '"not_after_ms":0', not_after, 1)))
return { 'done', string.format('%.0f', now_ms) }
