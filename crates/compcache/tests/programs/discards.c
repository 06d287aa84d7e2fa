/*
 * Memory that the program threw away must not come back:
 *
 *   dontneed     MADV_DONTNEED of evicted, of present and of half evicted ranges: zero afterwards
 *   racing       the same while other threads evict, write and discard without a pause
 *   free         MADV_FREE: each page old or zero until it is written, then what was written
 *   reclaimed    the same while the kernel takes what was freed, in a memory control group
 *   brk          the heap's end goes down and up again: the part that left reads as zeroes
 *   wipeonfork   zero in the child, whole in the parent
 *   dontfork     absent in the child, whole in the parent
 *   guard        MADV_GUARD_INSTALL discards; after MADV_GUARD_REMOVE it reads as zeroes
 *   guard_errors what MADV_GUARD_INSTALL refuses keeps its contents, what it has done before it refuses stays done
 *   guard_stream guard pages stay where they are while the memory around them is filled in order
 *   guard_past_libc  the same, where libc does not hear of those over new memory
 *   advice       COLD, PAGEOUT, POPULATE_READ, POPULATE_WRITE, WILLNEED, RANDOM, SEQUENTIAL: contents stay
 */
#include "trap.h"
#include <setjmp.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif

static void dontneed(void)
{
	struct area area = area_new(working_set() / 2, 11, 1);
	for (uint64_t round = 1; round < 4; round++) {
		area_push_out(&area);
		/* Stripes: those of an even number are discarded; some pages beside them are present, the rest evicted. */
		for (size_t page = 0; page < area.pages; page += 5) page_check(area.at + page * PAGE, 11, page, round);
		for (size_t page = 0; page + 24 <= area.pages; page += 24) MUST(madvise(area.at + page * PAGE, 11 * PAGE, MADV_DONTNEED) == 0);
		for (int again = 0; again < 2; again++) {
			for (size_t page = 0; page + 24 <= area.pages; page += 24) {
				must_be_zero(area.at + page * PAGE, 11 * PAGE, "MADV_DONTNEED");
				for (size_t i = page + 11; i < page + 24; i++) page_check(area.at + i * PAGE, 11, i, round);
			}
			filler_walk();
			filler_walk();
		}
		area_fill(&area, round + 1);
	}
	area_check(&area, 4);
	MUST(madvise(area.at, area.pages * PAGE, MADV_DONTNEED) == 0);
	must_be_zero(area.at, area.pages * PAGE, "MADV_DONTNEED of all");
}

static atomic_bool stop;

static void *walk_for_ever(void *unused)
{
	(void)unused;
	while (!atomic_load(&stop)) filler_walk();
	return NULL;
}

static void *discard_for_ever(void *argument)
{
	uint64_t tag = (uintptr_t)argument, round = 0;
	enum { PAGES = 256 };
	unsigned char *at = map_private(PAGES * PAGE);
	uint64_t known[PAGES] = {0};
	while (!atomic_load(&stop)) {
		uint64_t random = mix(tag << 32 | ++round);
		size_t from = random % PAGES, count = 1 + (random >> 16) % 32;
		if (from + count > PAGES) count = PAGES - from;
		for (size_t page = from; page < from + count; page++) {
			if (random >> 40 & 1) page_write(at + page * PAGE, tag, page, known[page] = round);
			else known[page] = 0;
		}
		if (!(random >> 40 & 1)) MUST(madvise(at + from * PAGE, count * PAGE, MADV_DONTNEED) == 0);
		if (random >> 56 == 0) sleep_ms(1);
		for (size_t page = (random >> 48) % 4; page < PAGES; page += 4) {
			if (known[page]) page_check(at + page * PAGE, tag, page, known[page]);
			else must_be_zero(at + page * PAGE, PAGE, "discarded while others evict");
		}
	}
	return NULL;
}

static void racing(void)
{
	pthread_t threads[4];
	for (uintptr_t i = 0; i < 3; i++) MUST(pthread_create(&threads[i], NULL, discard_for_ever, (void *)(i + 1)) == 0);
	MUST(pthread_create(&threads[3], NULL, walk_for_ever, NULL) == 0);
	sleep_ms(2500);
	atomic_store(&stop, true);
	for (size_t i = 0; i < 4; i++) pthread_join(threads[i], NULL);
}

static void lazily(void)
{
	struct area area = area_new(working_set() / 2, 12, 1);
	for (uint64_t round = 1; round < 4; round++) {
		if (round != 2) area_push_out(&area);
		/* Past libc the second time. */
		if (round == 2) MUST(syscall(SYS_madvise, area.at, area.pages * PAGE, MADV_FREE) == 0);
		else MUST(madvise(area.at, area.pages * PAGE, MADV_FREE) == 0);
		if (round == 3) filler_walk();
		for (size_t page = 0; page < area.pages; page += 2) page_write(area.at + page * PAGE, 12, page, round + 1);
		filler_walk();
		filler_walk();
		for (size_t page = 0; page < area.pages; page++) {
			if (page % 2 == 0) page_check(area.at + page * PAGE, 12, page, round + 1);
			else if (!page_is_zero(area.at + page * PAGE)) page_check(area.at + page * PAGE, 12, page, round);
		}
		area_fill(&area, round + 1);
	}
	area_check(&area, 4);
}

/*
 * What is freed lazily, past libc, and the kernel takes when it wants to: which it does, for this group's sake, as soon as some of it is on its way out.
 */
static void reclaimed(const char *group)
{
	char path[4096], pid[32];
	snprintf(path, sizeof(path), "%s/cgroup.procs", group);
	int procs = open(path, O_WRONLY);
	MUST(procs >= 0 && write(procs, pid, (size_t)snprintf(pid, sizeof(pid), "%d", getpid())) > 0);
	snprintf(path, sizeof(path), "%s/memory.reclaim", group);
	int reclaim = open(path, O_WRONLY);
	if (reclaim < 0) {
		snprintf(path, sizeof(path), "%s/memory.force_empty", group);
		reclaim = open(path, O_WRONLY);
	}
	if (reclaim < 0) lacks("memory.reclaim or memory.force_empty");
	struct area area = area_new(working_set() / 4, 22, 1);
	area_push_out(&area);
	long reclaims = 0;
	/* They leave after ten seconds at the earliest, a few at a time; should all have left within one walk it was for nothing. */
	for (int attempt = 0; reclaims == 0; attempt++) {
		area_fill(&area, 2);
		MUST(syscall(SYS_madvise, area.at, area.pages * PAGE, MADV_FREE) == 0);
		long before = pages_that_are(PRESENT, area.at, area.pages), present = before;
		for (double start = seconds_now(); expects_eviction() && reclaims < 3 && present > 0;) {
			filler_walk();
			present = pages_that_are(PRESENT, area.at, area.pages);
			if (attempt > 2 || seconds_now() - start > 60) die("NOT EVICTED: %ld of %ld pages are there", present, before);
			if (present == 0 || present > before - 8) continue;
			MUST(write(reclaim, "32M", 3) >= 0 || errno == EAGAIN || errno == EBUSY);
			reclaims++;
		}
		if (!expects_eviction()) break;
	}
	for (size_t page = 0; page < area.pages; page++)
		if (!page_is_zero(area.at + page * PAGE)) page_check(area.at + page * PAGE, 22, page, 2);
}

static void heap_end(void)
{
	size_t bytes = working_set() / 2;
	/* Nothing in between may call malloc: the heap's end is ours. */
	unsigned char *base = sbrk(0);
	MUST(brk(base + (PAGE - (uintptr_t)base % PAGE) % PAGE) == 0);
	base = sbrk((intptr_t)bytes);
	MUST(base != (void *)-1);
	struct area area = area_over(base, bytes, 13), low = area_over(base, bytes / 2, 13);
	area_fill(&area, 1);
	for (uint64_t round = 1; round < 5; round++) {
		area_push_out(&area);
		MUST(sbrk(-(intptr_t)(bytes / 2)) != (void *)-1);
		if (round % 2) filler_walk();
		MUST(sbrk((intptr_t)(bytes / 2)) == base + bytes / 2);
		must_be_zero(base + bytes / 2, bytes / 2, "the heap went down and up again");
		area_check(&low, round);
		area_fill(&area, round + 1);
	}
	area_push_out(&area);
	area_check(&area, 5);
}

static sigjmp_buf faulted;
static void on_fault(int signal) { siglongjmp(faulted, signal); }

static bool faults(const void *at)
{
	struct sigaction action = {.sa_handler = on_fault}, old;
	MUST(sigaction(SIGSEGV, &action, &old) == 0);
	bool did = true;
	if (sigsetjmp(faulted, 1) == 0) {
		(void)*(const volatile unsigned char *)at;
		did = false;
	}
	MUST(sigaction(SIGSEGV, &old, NULL) == 0);
	return did;
}

static void over_fork(int advice)
{
	struct area area = area_new(working_set() / 2, 14, 1), plain = area_new(4 * MIB, 15, 1);
	MUST(madvise(area.at, area.pages * PAGE, advice) == 0);
	for (uint64_t round = 1; round < 4; round++) {
		area_push_out(&area);
		pid_t child = fork();
		if (child == 0) {
			area_check(&plain, 1);
			if (advice == MADV_WIPEONFORK) {
				must_be_zero(area.at, area.pages * PAGE, "MADV_WIPEONFORK in the child");
				area_fill(&area, 77);
				area_push_out(&area);
				area_check(&area, 77);
			} else {
				for (size_t page = 0; page < area.pages; page += 97)
					if (!faults(area.at + page * PAGE)) die("MADV_DONTFORK: page %zu exists in the child", page);
				/* What is mapped there afterwards is new memory. */
				must_be_zero(mmap(area.at, area.pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
					     area.pages * PAGE, "mapped in the child where the parent has MADV_DONTFORK");
			}
			_exit(0);
		}
		must_succeed(child);
		area_check(&area, round);
		area_fill(&area, round + 1);
	}
}

static void guard(void)
{
	struct area area = area_new(working_set() / 2, 16, 1);
	area_push_out(&area);
	size_t from = area.pages / 4, count = area.pages / 2;
	if (madvise(area.at + from * PAGE, count * PAGE, MADV_GUARD_INSTALL) != 0) lacks("MADV_GUARD_INSTALL");
	for (size_t page = from; page < from + count; page += 61)
		if (!faults(area.at + page * PAGE)) die("a guard page can be read: page %zu", page);
	filler_walk();
	MUST(madvise(area.at + from * PAGE, count * PAGE, MADV_GUARD_REMOVE) == 0);
	must_be_zero(area.at + from * PAGE, count * PAGE, "guard pages were installed and removed");
	for (size_t page = 0; page < area.pages; page++)
		if (page < from || page >= from + count) page_check(area.at + page * PAGE, 16, page, 1);
}

/* Over a hole guards come on both sides of it, and ENOMEM; from the first mapping on that may have none, none come. */
static void guard_errors(void)
{
	enum { PART = 64 };
	struct area area = area_new(8 * PART * PAGE, 18, 1);
	unsigned char *locked = area.at + 6 * PART * PAGE;
	if (mlock(locked, PART * PAGE) != 0) lacks("mlock of 64 pages");
	push_out(area.at, 6 * PART);
	if (madvise(area.at, 0, MADV_GUARD_INSTALL) != 0) lacks("MADV_GUARD_INSTALL");
	MUST(madvise(area.at + 1, PAGE, MADV_GUARD_INSTALL) == -1 && errno == EINVAL);
	MUST(madvise(area.at, (size_t)-1, MADV_GUARD_INSTALL) == -1 && errno == EINVAL);
	MUST(madvise(area.at, (size_t)-(uintptr_t)area.at, MADV_GUARD_INSTALL) == -1 && errno == EINVAL);
	area_check(&area, 1);

	push_out(area.at, 6 * PART);
	unsigned char *hole = area.at + 2 * PART * PAGE;
	MUST(munmap(hole, PART * PAGE) == 0);
	MUST(madvise(area.at + PART * PAGE, 3 * PART * PAGE, MADV_GUARD_INSTALL) == -1 && errno == ENOMEM);
	MUST(madvise(area.at + 5 * PART * PAGE, 3 * PART * PAGE, MADV_GUARD_INSTALL) == -1 && errno == EINVAL);
	for (size_t part = 0; part < 8; part++) {
		bool guarded = part == 1 || part == 3 || part == 5;
		for (size_t page = part * PART; page < (part + 1) * PART; page += 7) {
			if (part == 2) continue;
			if (faults(area.at + page * PAGE) != guarded) die("page %zu of part %zu", page, part);
		}
	}
	filler_walk();
	MUST(madvise(area.at + 3 * PART * PAGE, 3 * PART * PAGE, MADV_GUARD_REMOVE) == 0);
	MUST(madvise(area.at + PART * PAGE, PART * PAGE, MADV_GUARD_REMOVE) == 0);
	for (size_t part = 0; part < 8; part++) {
		if (part == 1 || part == 3 || part == 5) must_be_zero(area.at + part * PART * PAGE, PART * PAGE, "had guards");
		else if (part != 2)
			for (size_t page = part * PART; page < (part + 1) * PART; page++)
				page_check(area.at + page * PAGE, 18, page, 1);
	}
}

/* As libc does on the stacks of threads. */
static int guard_past_libc(void *at, size_t len, int advice) { return (int)syscall(SYS_madvise, at, len, advice); }

static void guard_stream(int (*advise)(void *, size_t, int))
{
	struct area area = area_new(8 * MIB, 19, 1);
	for (uint64_t round = 1; round < 4; round++) {
		area_push_out(&area);
		/* What is filled is new memory the second time, and comes back from where it was the other times. */
		if (round == 2) MUST(madvise(area.at, area.pages * PAGE, MADV_DONTNEED) == 0);
		for (size_t page = 7; page < area.pages; page += 8)
			if ((round == 2 ? advise : madvise)(area.at + page * PAGE, PAGE, MADV_GUARD_INSTALL) != 0)
				lacks("MADV_GUARD_INSTALL");
		for (size_t page = 0; page < area.pages; page++)
			if (page % 8 != 7) page_write(area.at + page * PAGE, 19, page, round + 1);
		for (size_t page = 7; page < area.pages; page += 8)
			if (!faults(area.at + page * PAGE)) die("a guard page is gone: page %zu in round %zu", page, (size_t)round);
		for (size_t page = 7; page < area.pages; page += 8) {
			MUST(madvise(area.at + page * PAGE, PAGE, MADV_GUARD_REMOVE) == 0);
			if (!page_is_zero(area.at + page * PAGE)) die("NOT ZERO: guards were removed: page %zu", page);
			page_write(area.at + page * PAGE, 19, page, round + 1);
		}
		area_check(&area, round + 1);
	}
}

static void advice(void)
{
	static const int kinds[] = {MADV_COLD, MADV_PAGEOUT, MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_WILLNEED,
				    MADV_RANDOM, MADV_SEQUENTIAL, MADV_NORMAL, MADV_MERGEABLE, MADV_UNMERGEABLE,
				    MADV_DONTDUMP, MADV_DODUMP};
	struct area area = area_new(working_set() / 2, 17, 1);
	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		area_push_out(&area);
		/* What the kernel does not know it refuses; all that counts here is the contents. */
		if (madvise(area.at + 3 * PAGE, (area.pages - 7) * PAGE, kinds[i]) != 0 && errno != EINVAL)
			die("madvise %d: errno %d", kinds[i], errno);
		area_check(&area, i + 1);
		area_fill(&area, i + 2);
	}
}

int main(int argc, char **argv)
{
	struct area kept = area_new(working_set() / 4, 8, 1);
	if (mode_is(argc, argv, "dontneed")) dontneed();
	else if (mode_is(argc, argv, "racing")) racing();
	else if (mode_is(argc, argv, "free")) lazily();
	else if (argc > 2 && mode_is(argc, argv, "reclaimed")) reclaimed(argv[2]);
	else if (mode_is(argc, argv, "brk")) heap_end();
	else if (mode_is(argc, argv, "wipeonfork")) over_fork(MADV_WIPEONFORK);
	else if (mode_is(argc, argv, "dontfork")) over_fork(MADV_DONTFORK);
	else if (mode_is(argc, argv, "guard")) guard();
	else if (mode_is(argc, argv, "guard_errors")) guard_errors();
	else if (mode_is(argc, argv, "guard_stream")) guard_stream(madvise);
	else if (mode_is(argc, argv, "guard_past_libc")) guard_stream(guard_past_libc);
	else if (mode_is(argc, argv, "advice")) advice();
	else die("dontneed | racing | free | reclaimed GROUP | brk | wipeonfork | dontfork | guard | guard_errors | guard_stream | guard_past_libc | advice");
	area_check(&kept, 1);
	return passed();
}
