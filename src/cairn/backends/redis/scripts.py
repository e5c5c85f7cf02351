"""The scripts that Redis runs, each atomically, and the layout of a key group.

    cairn:<job id>:{<operator>:<key group>}:rows     hash: name -> value, and the fence
    cairn:<job id>:{<operator>:<key group>}:names    sorted set: the same names, in order
    cairn:<job id>:claims                            set: <key group>:<operator>, of all of these

A name is the number of the state (4 bytes), then key and entry, in msgpack. The fence is five
fields whose names are one letter long, so no row has them:

    t, e, o    term, epoch and slot that own the key group
    v          the marker: number and nonce of the epoch whose state the rows are
    s          number of each state, with its number of keys and rows

Always true here:
- marker and rows change in one script, so a copy of Redis (a replica, an append-only file) that is
  too old has an older marker;
- the claims list every key group that is there: each is added and removed together with its keys;
- a script that fails half way leaves the marker UNFINISHED, which nobody takes for an epoch;
- hash and sorted set have the same number of rows, so a lost one is noticed;
- a write that replaces all rows does so even if the marker is that of its epoch: the rows may be
  incomplete, or of other types.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

FENCE_FIELDS: Final = 5
UNFINISHED: Final = "~"
"""Begin of the marker of rows that are of no epoch: between two pieces of one change."""


class Script(NamedTuple):
    text: str
    sha: str


def _script(text: str) -> Script:
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


# KEYS: rows, names, claims. ARGV: term, epoch, owner, member of claims.
# Returns {1, marker, states, is whole (0 or 1)}; {0} if the key group has a newer owner.
CLAIM: Final = _script("""
local f = redis.call('HMGET', KEYS[1], 't', 'e', 'v', 's')
local t, e = tonumber(f[1] or '-1'), tonumber(f[2] or '-1')
local term, epoch = tonumber(ARGV[1]), tonumber(ARGV[2])
if t > term or (t == term and e > epoch) then return {0} end
redis.call('SADD', KEYS[3], ARGV[4])
redis.call('HSET', KEYS[1], 't', ARGV[1], 'e', ARGV[2], 'o', ARGV[3],
  'v', f[3] or '', 's', f[4] or '')
local more = redis.call('HLEN', KEYS[1]) - redis.call('ZCARD', KEYS[2])
return {1, f[3] or '', f[4] or '', more == 5 and 1 or 0}
""")

# KEYS: rows, names. ARGV: owner, marker before (or * to remove all rows), marker after, states,
# number of states to remove, number of rows to put, these state numbers, these rows (name, value),
# names to delete. Returns {1, marker after}; {0, marker} if the key group is not as expected.
WRITE: Final = _script("""
local rows, names = KEYS[1], KEYS[2]
local f = redis.call('HMGET', rows, 'o', 'v', 't', 'e')
if f[1] ~= ARGV[1] then return {0, f[2] or ''} end
if ARGV[2] == '*' then
  redis.call('UNLINK', rows, names)
  redis.call('HSET', rows, 't', f[3], 'e', f[4], 'o', f[1], 'v', '~', 's', '')
elseif f[2] == ARGV[3] then
  return {1, f[2]}
elseif f[2] ~= ARGV[2] then
  return {0, f[2] or ''}
else
  redis.call('HSET', rows, 'v', '~')
end
local function remove(first, last)
  for i = first, last, 4000 do
    local some = {}
    for j = i, math.min(i + 3999, last) do some[#some + 1] = ARGV[j] end
    redis.call('HDEL', rows, unpack(some))
    redis.call('ZREM', names, unpack(some))
  end
end
local wipes, puts = tonumber(ARGV[5]), tonumber(ARGV[6])
for i = 7, 6 + wipes do
  local low, high = '[' .. string.sub(ARGV[i], 1, 4), '(' .. string.sub(ARGV[i], 5, 8)
  while true do
    local found = redis.call('ZRANGEBYLEX', names, low, high, 'LIMIT', 0, 4000)
    if #found == 0 then break end
    redis.call('HDEL', rows, unpack(found))
    redis.call('ZREM', names, unpack(found))
  end
end
local first, last = 7 + wipes, 6 + wipes + 2 * puts
for i = first, last, 4000 do
  local pairs, scored = {}, {}
  for j = i, math.min(i + 3998, last), 2 do
    pairs[#pairs + 1] = ARGV[j]
    pairs[#pairs + 1] = ARGV[j + 1]
  end
  if redis.call('HSET', rows, unpack(pairs)) > 0 then
    for j = 1, #pairs, 2 do scored[j], scored[j + 1] = '0', pairs[j] end
    redis.call('ZADD', names, unpack(scored))
  end
end
remove(last + 1, #ARGV)
redis.call('HSET', rows, 'v', ARGV[3], 's', ARGV[4])
return {1, ARGV[3]}
""")

# KEYS: rows, names. ARGV: lowest name, end of names, number of rows.
# Returns {marker, is whole (0 or 1), names, values}.
PAGE: Final = _script("""
local v = redis.call('HGET', KEYS[1], 'v') or ''
local more = redis.call('HLEN', KEYS[1]) - redis.call('ZCARD', KEYS[2])
local is_whole = more == 5 and 1 or 0
local names = redis.call('ZRANGEBYLEX', KEYS[2], ARGV[1], ARGV[2], 'LIMIT', 0, ARGV[3])
if #names == 0 then return {v, is_whole, names, names} end
return {v, is_whole, names, redis.call('HMGET', KEYS[1], unpack(names))}
""")

# KEYS: rows and names of each key group. ARGV: the marker of each.
# Returns the index of the first key group that is not as expected; -1 if all are.
CHECK: Final = _script("""
for i = 1, #ARGV do
  local rows, names = KEYS[2 * i - 1], KEYS[2 * i]
  local v = redis.call('HGET', rows, 'v')
  if v ~= ARGV[i] or redis.call('HLEN', rows) - redis.call('ZCARD', names) ~= 5 then
    return i - 1
  end
end
return -1
""")

# KEYS: claims, then rows and names of key groups. ARGV: the term of the leader, then the member of
# claims of each key group. Removes key groups that have no newer owner; returns how many keys.
REMOVE: Final = _script("""
local removed = 0
for i = 2, #ARGV do
  local rows, names = KEYS[2 * i - 2], KEYS[2 * i - 1]
  local t = tonumber(redis.call('HGET', rows, 't') or '-1')
  if t <= tonumber(ARGV[1]) then
    removed = removed + redis.call('UNLINK', rows, names)
    redis.call('SREM', KEYS[1], ARGV[i])
  end
end
return removed
""")


def call_script(script: Script, keys: list[str], args: list[Any]) -> list[Any]:
    """Return the command that runs a script."""
    return ["EVALSHA", script.sha, len(keys), *keys, *args]


def keys_of(job_id: str, operator: str, group: int) -> list[str]:
    """Return the names of the hash and the sorted set of a key group."""
    head = f"cairn:{job_id}:{{{operator}:{group}}}"
    return [f"{head}:rows", f"{head}:names"]


def claims_key(job_id: str) -> str:
    """Return the name of the set that lists every key group of a job."""
    return f"cairn:{job_id}:claims"


def member_of(operator: str, group: int) -> str:
    """Return what the set of claims has for a key group."""
    return f"{group}:{operator}"
