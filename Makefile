# What a person types. The CI does the same: .ci/run.

CARGO     ?= cargo
PREFIX    ?= /usr/local
DESTDIR   ?=
UNITS     ?= $(PREFIX)/lib/systemd/system
TARGET    := $(abspath $(or $(CARGO_TARGET_DIR),target))
RELEASE   := $(TARGET)/release
WORKSPACE := --workspace --exclude compcache-preload

.PHONY: all build bench-build demo test-build test bench suites check ci install man clean

all: build

# Two calls: in one, cargo would give the preload object the features of everything else.
build:
	$(CARGO) build --release -p compcache
	$(CARGO) build --release -p compcache-preload

# All in one call, so that what they have in common is built once: with the features of `compcache` alone, for nobody else asks for more.
bench-build: build
	$(CARGO) build --release -p compcache -p compcache-bench -p compcache-testkit

# A real program in two fifths of what it needs, beside the kernel's zram where the machine has it.
demo: bench-build
	python3 demo/run.py $(RELEASE)

test-build:
	$(CARGO) test $(WORKSPACE) --no-run --lib --bins --tests --examples

# One test more at a time than there are processors: most end-to-end tests wait part of their time.
test: export RUST_TEST_THREADS ?= $(shell expr $$(nproc) + 1)

# The programs under test preload the release object; COMPCACHE_REQUIRE_ALL=1 turns skipped tests into failures. What was skipped is
# listed before the last of them.
test: export COMPCACHE_PRELOAD = $(RELEASE)/libcompcache_preload.so
test: export COMPCACHE_SKIPS = $(TARGET)/skipped
# One that hangs is ended, says where, and costs no more than itself.
test: export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER = $(abspath .ci/watched)
test: build
	@rm -f $(COMPCACHE_SKIPS) && touch $(COMPCACHE_SKIPS)
	@status=0; \
	$(CARGO) test $(WORKSPACE) --no-fail-fast --lib --bins --tests --examples || status=1; \
	echo "skipped here, $$(wc -l < $(COMPCACHE_SKIPS)):"; sort $(COMPCACHE_SKIPS); \
	$(CARGO) test $(WORKSPACE) --no-fail-fast --doc || status=1; \
	exit $$status

bench: bench-build
	$(RELEASE)/compcache-bench store
	$(RELEASE)/compcache-bench scan
	$(RELEASE)/compcache-bench hotcold
	$(RELEASE)/compcache-bench latency
	$(RELEASE)/compcache-bench programs
	$(RELEASE)/compcache-bench dd
	$(RELEASE)/compcache-bench disk
	$(RELEASE)/compcache-bench disk-memory
	$(RELEASE)/compcache-bench swap-latency
	$(RELEASE)/compcache-bench tiers
	$(RELEASE)/compcache-bench writeback
	$(RELEASE)/compcache-bench sweep
	$(RELEASE)/compcache-bench --runs 1 apps
	$(RELEASE)/compcache-bench iozone --content real
	$(RELEASE)/compcache-bench iozone --disk throttled
	$(RELEASE)/compcache-bench files
	$(RELEASE)/compcache-bench fits
	$(RELEASE)/compcache-bench limits
	$(RELEASE)/compcache-bench scan --content python --order sequential,random --sides zram:lz4,swap:lz4
	$(RELEASE)/compcache-bench --runs 3 emulated

# What others wrote about file systems, on mounts and below them. For root.
suites: build
	.ci/suites

check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(WORKSPACE) --all-targets -- -D warnings
	$(CARGO) clippy --release -p compcache-preload -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps $(WORKSPACE)

ci:
	.ci/run

# The manual pages are made from the flags; the made ones are kept in docs/man.
man: build
	$(RELEASE)/compcache man docs/man

# Of what `make` has built: root, who mostly runs this, may have no cargo. Units look for the program where it is installed, and completions where the shells do.
install:
	@test -x $(RELEASE)/compcache -a -f $(RELEASE)/libcompcache_preload.so || { echo "$(RELEASE) has not all of it; run make before, as who builds" >&2; exit 1; }
	install -D -m 755 $(RELEASE)/compcache $(DESTDIR)$(PREFIX)/bin/compcache
	install -D -m 755 $(RELEASE)/libcompcache_preload.so $(DESTDIR)$(PREFIX)/lib/compcache/libcompcache_preload.so
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 644 docs/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(UNITS)
	for unit in units/*; do \
		sed 's,/usr/local/bin,$(PREFIX)/bin,' $$unit >$(DESTDIR)$(UNITS)/$${unit#units/} || exit 1; \
		chmod 644 $(DESTDIR)$(UNITS)/$${unit#units/} || exit 1; \
	done
	install -d $(addprefix $(DESTDIR)$(PREFIX)/share/,bash-completion/completions zsh/site-functions fish/vendor_completions.d)
	$(RELEASE)/compcache completions bash >$(DESTDIR)$(PREFIX)/share/bash-completion/completions/compcache
	$(RELEASE)/compcache completions zsh >$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_compcache
	$(RELEASE)/compcache completions fish >$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/compcache.fish
	chmod 644 $(addprefix $(DESTDIR)$(PREFIX)/share/,bash-completion/completions/compcache zsh/site-functions/_compcache fish/vendor_completions.d/compcache.fish)

clean:
	$(CARGO) clean
