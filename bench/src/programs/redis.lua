-- Sets, counts and gets keys; the answer is a digest of what was seen.
local keys = tonumber(ARGV[1])
local kinds = { 'user', 'order', 'session', 'item' }
for nth = 1, keys do
  local name = kinds[nth % 4 + 1] .. '-' .. nth
  redis.call('set', 'key:' .. nth, string.format('{"id":%d,"name":"%s","upper":"%s","score":%d,"tags":["%s",%d]}',
    nth, name, string.upper(name), nth * 7919 % 100003, kinds[nth % 4 + 1], nth % 97))
end
local digest = ''
for nth = 1, keys, 16 do
  redis.call('append', 'key:' .. nth, nth % 10)
  digest = redis.sha1hex(digest .. redis.call('get', 'key:' .. nth))
end
local at = 7
for _ = 1, keys / 200 do
  at = at * 16807 % 2147483647
  digest = redis.sha1hex(digest .. redis.call('get', 'key:' .. (at % keys + 1)))
end
return { redis.call('dbsize'), digest }
