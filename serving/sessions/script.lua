-- All writes of the Redis store. One script, so that each is atomic: guards are checked and writes made with nothing in between.
-- ARGV: prefix, the time ('' = the server's), the operation, then its values in order.
local place = 0
local function take()
  place = place + 1
  return ARGV[place]
end
local P, now, operation = take() .. ':', tonumber(take()), take()
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1e6
end
local freed = {} -- blobs that nobody refers to any more: the caller removes their files

local LATEST_END = 3660 -- seconds from now (store.py): a lease that ends later was made under a wrong clock, and has lapsed
local function held(till) return tonumber(till) > now and tonumber(till) <= now + LATEST_END end
local function later(seconds) return string.format('%.6f', now + tonumber(seconds)) end
local function member(tenant, id) return tenant .. '\0' .. id end
local function session_key(tenant, id) return P .. 's:' .. member(tenant, id) end
local function history_key(tenant, id) return P .. 'h:' .. member(tenant, id) end
local function response_key(tenant, id) return P .. 'r:' .. member(tenant, id) end
local function pieces_key(tenant, id) return P .. 'p:' .. member(tenant, id) end
local function fence() return redis.call('INCR', P .. 'fence') end

local function count(tenant, field, change)
  if change ~= 0 then
    redis.call('HINCRBY', P .. 'usage', field, change)
    redis.call('HINCRBY', P .. 'usage:' .. tenant, field, change)
  end
end

local function refer(hash, change, size, name)
  local key = P .. 'b:' .. hash
  if redis.call('EXISTS', key) == 1 then
    if redis.call('HINCRBY', key, 'refs', change) <= 0 then
      local old = redis.call('HGET', key, 'name')
      redis.call('DEL', key, P .. 'd:' .. old)
      redis.call('SREM', P .. 'blobs', hash)
      freed[#freed + 1] = old
    end
    if name ~= '' then
      redis.call('DEL', P .. 'd:' .. name)
      freed[#freed + 1] = name
    end
  elseif change > 0 then
    redis.call('HSET', key, 'refs', change, 'size', size, 'name', name)
    redis.call('PERSIST', P .. 'd:' .. name)
    redis.call('SADD', P .. 'blobs', hash)
  end
end

local function drop_response(tenant, id)
  local key = response_key(tenant, id)
  local found = redis.call('HMGET', key, 'bytes', 'session', 'key')
  if not found[1] then return 0 end
  count(tenant, 'responses', -1)
  count(tenant, 'response_bytes', -tonumber(found[1]))
  redis.call('DEL', key, pieces_key(tenant, id))
  redis.call('ZREM', P .. 'responses', member(tenant, id))
  if found[2] ~= '' then redis.call('SREM', P .. 'rs:' .. member(tenant, found[2]), id) end
  if found[3] ~= '' then redis.call('DEL', P .. 'rk:' .. member(tenant, found[3])) end
  return tonumber(found[1])
end

local function remove_session(tenant, id)
  local key, name = session_key(tenant, id), member(tenant, id)
  local bytes = redis.call('HGET', key, 'bytes')
  if not bytes then return end
  count(tenant, 'sessions', -1)
  count(tenant, 'bytes', -tonumber(bytes))
  redis.call('DEL', key, history_key(tenant, id))
  for _, index in ipairs({'index', 'idle', 'expiry'}) do redis.call('ZREM', P .. index, name) end
  for _, response in ipairs(redis.call('SMEMBERS', P .. 'rs:' .. name)) do drop_response(tenant, response) end
end

local function take_response()
  if take() == '0' then return nil end
  return {tenant = take(), id = take(), at = take(), piece = take(), head = take(), count = take(), expires = take(),
    running = take()}
end

local function write_response(r)
  local key = response_key(r.tenant, r.id)
  redis.call('HSET', key, 'count', r.count)
  if r.head ~= '' then
    local change = #r.head - tonumber(redis.call('HGET', key, 'bytes'))
    redis.call('DEL', pieces_key(r.tenant, r.id))
    redis.call('HSET', key, 'head', r.head, 'expires', r.expires, 'running', r.running, 'bytes', #r.head)
    redis.call('ZADD', P .. 'responses', r.expires, member(r.tenant, r.id))
    count(r.tenant, 'response_bytes', change)
  elseif r.piece ~= '' then
    redis.call('RPUSH', pieces_key(r.tenant, r.id), r.piece)
  end
end

local function response_fits(r)
  return not r or redis.call('HGET', response_key(r.tenant, r.id), 'count') == r.at
end

local function write_one()
  local tenant, id, mode, version, guard, seconds = take(), take(), take(), take(), take(), take()
  local s = {version = take(), updated = take(), expires = take(), bytes = take(), head = take(), bounds = take()}
  local keep, pieces, references = take(), {}, {}
  for _ = 1, tonumber(take()) do pieces[#pieces + 1] = take() end
  for _ = 1, tonumber(take()) do references[#references + 1] = {take(), tonumber(take()), take(), take()} end
  local response = take_response()
  local key, name = session_key(tenant, id), member(tenant, id)
  local found = redis.call('HMGET', key, 'version', 'fence', 'bytes')
  if mode == 'add' then
    if found[1] then return 'lost' end
  elseif found[1] ~= version or found[2] ~= guard then
    return 'lost'
  end
  if not response_fits(response) then return 'response' end
  for _, r in ipairs(references) do -- what is referred to must be here or brought along
    if r[2] > 0 and r[4] == '' and redis.call('EXISTS', P .. 'b:' .. r[1]) == 0 then return 'lost' end
  end
  if response then write_response(response) end
  if mode == 'del' then
    remove_session(tenant, id)
  else
    redis.call('HSET', key, 'version', s.version, 'updated', s.updated, 'bytes', s.bytes, 'head', s.head)
    if s.bounds ~= '' then redis.call('HSET', key, 'bounds', s.bounds) end
    if seconds ~= '' then
      redis.call('HSET', key, 'until', later(seconds))
    else -- not under a lease: whoever had one is fenced off
      redis.call('HSET', key, 'fence', fence(), 'owner', '', 'until', '0')
    end
    if mode == 'add' then count(tenant, 'sessions', 1) end
    count(tenant, 'bytes', tonumber(s.bytes) - tonumber(found[3] or 0))
    redis.call('ZADD', P .. 'index', 0, name)
    redis.call('ZADD', P .. 'idle', s.updated, name)
    if s.expires ~= '' then redis.call('ZADD', P .. 'expiry', s.expires, name) else redis.call('ZREM', P .. 'expiry', name) end
    if keep ~= '' then -- cuts fall between pieces: both end at boundaries
      local list, left = history_key(tenant, id), tonumber(redis.call('HGET', key, 'history') or 0)
      while left > tonumber(keep) do left = left - (#redis.call('RPOP', list) - 8) / 4 end
      for _, piece in ipairs(pieces) do
        redis.call('RPUSH', list, piece)
        left = left + (#piece - 8) / 4
      end
      redis.call('HSET', key, 'history', left)
    end
  end
  for _, r in ipairs(references) do refer(unpack(r)) end
  return 'made'
end

local operations = {}

function operations.write()
  local verdicts = {}
  for _ = 1, tonumber(take()) do
    if take() == 'session' then
      verdicts[#verdicts + 1] = write_one()
    else
      local response = take_response()
      if response_fits(response) then
        write_response(response)
        verdicts[#verdicts + 1] = 'made'
      else
        verdicts[#verdicts + 1] = 'response'
      end
    end
  end
  return {verdicts, freed}
end

function operations.discard() -- of snapshots that were brought, those that no write has taken: asked, because answers can be lost
  local left = {}
  for _ = 1, tonumber(take()) do
    local hash, name = take(), take()
    if redis.call('HGET', P .. 'b:' .. hash, 'name') ~= name then
      redis.call('DEL', P .. 'd:' .. name)
      left[#left + 1] = name
    end
  end
  return left
end

function operations.take() -- {fence, holder, seconds left}; `mark` makes asking again after a lost answer harmless
  local key, owner, seconds, mark = session_key(take(), take()), take(), take(), take()
  local found = redis.call('HMGET', key, 'fence', 'owner', 'until', 'mark')
  if not found[1] then return {0, '', '0'} end
  if held(found[3]) then
    if found[4] == mark then return {tonumber(found[1]), owner, seconds} end
    return {0, found[2], string.format('%.6f', tonumber(found[3]) - now)}
  end
  local new = fence()
  redis.call('HSET', key, 'fence', new, 'owner', owner, 'until', later(seconds), 'mark', mark)
  return {new, owner, seconds}
end

function operations.prolong()
  local alive = {}
  for _ = 1, tonumber(take()) do
    local key, guard, seconds = session_key(take(), take()), take(), take()
    local held = redis.call('HGET', key, 'fence') == guard
    if held and tonumber(seconds) > 0 then
      redis.call('HSET', key, 'until', later(seconds))
    elseif held then -- given back: worth nothing from now on
      redis.call('HSET', key, 'until', '0', 'fence', fence())
    end
    alive[#alive + 1] = held and 1 or 0
  end
  return alive
end

function operations.drop()
  remove_session(take(), take())
  return 0
end

function operations.recount() -- of the snapshots given, those whose count is not that of the boundaries that name them
  local lower, named, differing, batch = take() == '1', {}, {}, 1000
  for first = 0, redis.call('ZCARD', P .. 'index') - 1, batch do
    for _, name in ipairs(redis.call('ZRANGE', P .. 'index', first, first + batch - 1)) do
      local bounds = redis.call('HGET', P .. 's:' .. name, 'bounds')
      if bounds and #bounds >= 12 then -- a seal, the length of the JSON, the JSON, ids
        local json = bounds:sub(13, 12 + struct.unpack('<I4', bounds:sub(9, 12)))
        for hash in json:gmatch('"snapshot":"(%x+)"') do named[hash] = (named[hash] or 0) + 1 end
      end
    end
  end
  for _ = 1, tonumber(take()) do
    local hash = take()
    local counted, right = tonumber(redis.call('HGET', P .. 'b:' .. hash, 'refs') or nil), named[hash] or 0
    if counted and counted ~= right then
      differing[#differing + 1] = {hash, counted, right}
      if lower or counted < right then refer(hash, right - counted, '', '') end
    end
  end
  return {differing, freed}
end

function operations.add_response() -- '' or the id of the response that has the key or the id
  local tenant, id, session, idempotency, length, expires, running, head =
    take(), take(), take(), take(), take(), take(), take(), take()
  local key = response_key(tenant, id)
  if idempotency ~= '' then
    local other = redis.call('GET', P .. 'rk:' .. member(tenant, idempotency))
    if other then return other end
  end
  if redis.call('EXISTS', key) == 1 then return id end
  redis.call('HSET', key, 'session', session, 'key', idempotency, 'count', length, 'expires', expires, 'running', running,
    'bytes', #head, 'head', head)
  redis.call('ZADD', P .. 'responses', expires, member(tenant, id))
  if session ~= '' then redis.call('SADD', P .. 'rs:' .. member(tenant, session), id) end
  if idempotency ~= '' then redis.call('SET', P .. 'rk:' .. member(tenant, idempotency), id) end
  count(tenant, 'responses', 1)
  count(tenant, 'response_bytes', #head)
  return ''
end

function operations.drop_response()
  return drop_response(take(), take())
end

function operations.evict_response() -- bytes freed, or -1 if it must stay
  local tenant, id, over = take(), take(), take() == '1'
  local found = redis.call('HMGET', response_key(tenant, id), 'expires', 'running', 'session')
  if not found[1] then return -1 end
  local expired, running = tonumber(found[1]) <= now, found[2] == '1'
  if running and found[3] ~= '' then
    local leased = redis.call('HGET', session_key(tenant, found[3]), 'until')
    if leased and held(leased) then return -1 end
  end
  if not expired and (running or not over) then return -1 end
  return drop_response(tenant, id)
end

return operations[operation]()
