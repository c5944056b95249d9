-- One change of the record of overrides. Its edits are applied together or not at all. Overrides that the store has
-- lost are restored first.
--
-- Data
-- ====
-- The record is a hash. The field 'token' has 'version token' of the latest change; versions grow with each change.
-- Each other field is an override. Its name denotes its subject, and its text is
-- 'since_ms end_ms known_ms version token json', which is opaque here from the token on. `version` belongs to the
-- change that wrote the text. A removed override has the end 0. A text is kept until `known_ms`, the latest end that its
-- field has ever had: until then a disconnected replica may have an older override in force, and learns from the text
-- that its override was replaced or removed. So a missing field was lost with the store's data, and replicas restore what
-- they have in force there: of two texts for a field the greater version wins. The hash expires with its last text.
-- Replicas of other versions read and write the same.
--
-- The log is a list of the latest changes, newest first, each as JSON. It has only the first 50 restored overrides of a
-- change.
--
-- KEYS
-- ====
-- The record, the log.
--
-- ARGV
-- ====
--   1, 2     token of this change; a note about it for the log
--   3, 4     channel and message to publish after it, in which '"not_after_ms":0' is replaced by a time
--   5, 6     maximum number of overrides; maximum number of changes in the log
--   7, 8     in ms: furthest valid time from now; how long the log is kept
--   9, 10    number of texts that the record may have lost; number of edits
--   11       '1' to log the note in any case
--   then for each text
--            field, text
--   then for each edit
--            field
--            token that the caller has seen there ('' if there was no override)
--            length in ms; or '' to remove the override
--            text after the token
--
-- Reply
-- =====
--   'done', now_ms
--   'changed', field, its text ('' if it has no override now): the caller has seen another token there
--   'full': there would be too many overrides
--   'same': nothing to remove; without edits, nothing was lost
--
-- Texts that have expired or cannot be read are removed, and so are some of removed overrides, if they are too many. The first write frees memory, so that a change is possible at `maxmemory`.

local record, log = KEYS[1], KEYS[2]
local token, note, channel, message = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local most, most_logged = tonumber(ARGV[5]), tonumber(ARGV[6])
local furthest_ms, log_ms = tonumber(ARGV[7]), tonumber(ARGV[8])
local lost, edits, is_noted = tonumber(ARGV[9]), tonumber(ARGV[10]), ARGV[11] == '1'
local MOST_EDITS = 50 -- restored edits that are logged

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function read(text)
  local parts = { string.match(text, '^(%d+) (%d+) (%d+) (%d+) (%x+) (.*)$') }
  if not parts[6] then
    return nil
  end
  local entry = { text = text, since = parts[1], token = parts[5], json = parts[6] }
  entry.end_ms, entry.known_ms, entry.version = tonumber(parts[2]), tonumber(parts[3]), tonumber(parts[4])
  entry.is_in_force = entry.end_ms > now_ms
  local is_known = entry.known_ms > now_ms and entry.end_ms <= entry.known_ms
  local is_near = math.max(entry.known_ms, entry.version) <= now_ms + furthest_ms
  return is_known and is_near and entry or nil
end

-- Read the record.
local entries, ended, version = {}, {}, now_ms
local all = redis.call('HGETALL', record)
for i = 1, #all, 2 do
  local field, text = all[i], all[i + 1]
  if field == 'token' then
    local latest = tonumber(string.match(text, '^(%d+) %x+$') or 0)
    version = math.max(version, latest <= now_ms + furthest_ms and latest + 1 or 0)
  else
    entries[field] = read(text)
    if not entries[field] and #ended < most then
      ended[#ended + 1] = field
    end
  end
end

-- Restore lost texts.
local new, last_ms, before_after = {}, 0, {}
for i = 1, lost do
  local field, text = ARGV[10 + 2 * i], ARGV[11 + 2 * i]
  local entry, known = read(text), entries[field]
  if entry and entry.is_in_force and (not known or known.version < entry.version) then
    if #before_after < MOST_EDITS then
      before_after[#before_after + 1] = { field, known and known.is_in_force and known.text or '', text }
    end
    entries[field], new[field] = entry, true
    last_ms = math.max(last_ms, entry.known_ms)
  end
end

for _, entry in pairs(entries) do
  version = math.max(version, entry.version + 1)
end

local function written(since, end_ms, known_ms, of, json)
  return read(string.format('%s %.0f %.0f %.0f %s %s', since, end_ms, known_ms, version, of, json))
end

-- Apply the edits.
if edits > 0 then
  before_after = {}
end
for i = 1, edits do
  local at = 12 + 2 * lost + (i - 1) * 4
  local field, seen, length_ms, text = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local was = entries[field]
  local before = was and was.is_in_force and was.text or ''
  if (before ~= '' and was.token or '') ~= seen then
    return { 'changed', field, before }
  end
  local known_ms, to = was and was.known_ms or 0, nil
  if length_ms ~= '' then
    local end_ms = now_ms + tonumber(length_ms)
    to = written(string.format('%.0f', now_ms), end_ms, math.max(known_ms, end_ms), token, text)
  elseif before ~= '' then
    to = written(was.since, 0, known_ms, was.token, was.json)
  end
  if to then
    before_after[#before_after + 1] = { field, before, to.is_in_force and to.text or '' }
    entries[field], new[field] = to, true
    last_ms = math.max(last_ms, to.known_ms)
  end
end
if not is_noted and (edits > 0 and #before_after == 0 or not next(new)) then
  return { 'same' }
end

-- Check the size of the record.
local count, removed, forgotten = 0, 0, {}
for field, entry in pairs(entries) do
  if entry.is_in_force then
    count = count + 1
  elseif removed < most then
    removed = removed + 1
  else
    forgotten[#forgotten + 1], new[field] = field, nil
  end
end

redis.call('LLEN', log) -- fails on a wrong type before anything is written
redis.call('HDEL', record, '-', unpack(ended))
if count > most then
  return { 'full' }
end
redis.call('HDEL', record, '-', unpack(forgotten))
local ttl_ms = redis.call('PTTL', record)
for field in pairs(new) do
  redis.call('HSET', record, field, entries[field].text)
end
if edits > 0 then
  redis.call('HSET', record, 'token', string.format('%.0f %s', version, token))
end
if ttl_ms == -1 then
  last_ms = now_ms + furthest_ms -- the hash was not created here
end
if last_ms - now_ms > ttl_ms then
  redis.call('PEXPIRE', record, string.format('%.0f', math.max(last_ms - now_ms, 1000)))
end

if #before_after > 0 or is_noted then
  local some = #before_after > 0 and before_after or nil -- an empty list would be written as an object
  local entry = { at_ms = string.format('%.0f', now_ms), token = token, note = note, edits = some }
  redis.call('LPUSH', log, cjson.encode(entry))
  redis.call('LTRIM', log, 0, most_logged - 1)
  redis.call('PEXPIRE', log, log_ms)
end
local not_after = '"not_after_ms":' .. string.format('%.0f', now_ms + 5000)
if next(new) then
  redis.pcall('PUBLISH', channel, (string.gsub(message, '"not_after_ms":0', not_after, 1)))
end
return { 'done', string.format('%.0f', now_ms) }
