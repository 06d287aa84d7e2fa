# The command behind the number, so many times at once, the last argument counted up. Prints what they said, in order.
set -eu
directory=$(mktemp -d "$1/copies.XXXXXX")
copies=$2
shift 2
pids=
for nth in $(seq "$copies"); do
	"$@" "$nth" >"$directory/$nth" &
	pids="$pids $!"
done
for pid in $pids; do wait "$pid"; done
for nth in $(seq "$copies"); do cat "$directory/$nth"; done
