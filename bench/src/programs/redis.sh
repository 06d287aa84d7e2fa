# A key-value store, filled, walked, changed and asked by a script of its own. Prints what it saw.
set -eu
directory=$(mktemp -d "$1/redis.XXXXXX")
script=$2
keys=$3
socket=$directory/socket
redis-server --port 0 --unixsocket "$socket" --save '' --appendonly no --dir "$directory" >"$directory/log" &
server=$!
trap 'kill "$server" 2>/dev/null || :' EXIT
until redis-cli -s "$socket" ping >/dev/null 2>&1; do
	kill -0 "$server" || { cat "$directory/log" >&2 && exit 1; }
	sleep 0.05
done
redis-cli -e -s "$socket" --eval "$script" , "$keys"
redis-cli -s "$socket" shutdown nosave
wait "$server" || exit 1
trap - EXIT
