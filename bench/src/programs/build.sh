# A build: make compiles the sources in a directory, two at a time, into a new one. Prints all that came of it.
set -eu
directory=$(mktemp -d "$1/build.XXXXXX")
printf 'all: $(patsubst %%.c,%%.s,$(notdir $(wildcard %s/*.c)))\n%%.s: %s/%%.c\n\tgcc -O2 -w -S -o $@ $<\n' "$1" "$1" >"$directory/Makefile"
make -s -j2 -C "$directory"
cat "$directory"/*.s
