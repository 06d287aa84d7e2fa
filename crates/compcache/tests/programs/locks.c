/*
 * Memory that the program locked stays where it is.
 *
 *   mlock      what is locked before and after it was evicted comes in, stays in, and is right
 *   onfault    mlock2(MLOCK_ONFAULT)
 *   mlockall   MCL_CURRENT | MCL_FUTURE of more memory than the cap: nothing hangs and nothing is lost
 *   unmapping  the same, while another thread unmaps, moves and discards what was cold
 *   growing    mremap makes locked memory longer, and moves it, again and again
 */
#include "trap.h"

static void must_be_present(const struct area *area, const char *when)
{
	unsigned char in_memory[512];
	MUST(area->pages <= sizeof(in_memory));
	MUST(mincore(area->at, area->pages * PAGE, in_memory) == 0);
	size_t count = 0;
	for (size_t page = 0; page < area->pages; page++) count += in_memory[page] & 1;
	long present = present_pages(area->at, area->pages);
	if (count != area->pages || (present >= 0 && (size_t)present != area->pages))
		die("LOCKED PAGES LEFT: %zu by mincore, %ld by pagemap, of %zu: %s", count, present, area->pages, when);
}

static void some(bool onfault)
{
	struct area early = area_new(2 * MIB, 19, 1), late = area_new(2 * MIB, 20, 1);
	if (onfault) {
		if (mlock2(early.at, 2 * MIB, MLOCK_ONFAULT) != 0) lacks("mlock2");
	} else {
		MUST(mlock(early.at, 2 * MIB) == 0);
	}
	area_push_out(&late);
	must_be_present(&early, "locked before others were made cold");
	/* Evicted before it is locked: mlock must bring it in. With ONFAULT the first use does. */
	if (onfault) {
		MUST(mlock2(late.at, 2 * MIB, MLOCK_ONFAULT) == 0);
		area_check(&late, 1);
	} else {
		MUST(mlock(late.at, 2 * MIB) == 0);
	}
	must_be_present(&late, "just locked");
	for (int i = 0; i < 4; i++) {
		filler_walk();
		must_be_present(&early, "after others were walked");
		must_be_present(&late, "after others were walked");
	}
	area_check(&early, 1);
	area_check(&late, 1);
	MUST(munlock(late.at, 2 * MIB) == 0);
	area_push_out(&late);
	area_check(&late, 1);
	area_check(&early, 1);
}

static void all(void)
{
	struct area early = area_new(8 * MIB, 21, 1);
	area_push_out(&early);
	if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0) lacks("mlockall");
	struct area late = area_new(16 * MIB, 22, 1);
	filler_walk();
	area_check(&early, 1);
	area_check(&late, 1);
	pid_t child = fork();
	if (child == 0) {
		area_check(&early, 1);
		area_check(&late, 1);
		_exit(0);
	}
	must_succeed(child);
	MUST(munlockall() == 0);
	area_push_out(&late);
	area_check(&late, 1);
	area_check(&early, 1);
}

#define BLOCKS 64
/* More discards than a pager could keep for later. */
#define DISCARDS 6000

static struct area blocks[BLOCKS];
static struct area discarded;
static atomic_bool is_locking, is_locked;

static void *change_map(void *unused)
{
	void *unmapped = NULL;
	while (!atomic_load(&is_locking)) sched_yield();
	for (size_t i = 0; i < BLOCKS; i++) {
		if (i % 3 == 0) {
			unmapped = blocks[i].at;
			MUST(munmap(unmapped, MIB / 4) == 0);
			blocks[i].at = NULL;
		} else if (i % 3 == 1) {
			/* To the place of the one before it, which was just unmapped. */
			void *to = unmapped, *moved = mremap(blocks[i].at, MIB / 4, MIB / 4, MREMAP_MAYMOVE | MREMAP_FIXED, to);
			MUST(moved == to);
			blocks[i].at = moved;
		}
		for (size_t n = 0; n < DISCARDS / BLOCKS && !atomic_load(&is_locked); n++)
			/* Refused once it is locked. */
			(void)madvise(discarded.at + n % discarded.pages * PAGE, PAGE, MADV_DONTNEED);
		unsigned char *fresh = map_private(MIB);
		memset(fresh, 1, MIB);
		MUST(munmap(fresh, MIB) == 0);
	}
	return unused;
}

static void unmapping(void)
{
	struct area early = area_new(8 * MIB, 23, 1);
	discarded = area_new(MIB, 24, 1);
	for (size_t i = 0; i < BLOCKS; i++) blocks[i] = area_new(MIB / 4, 100 + i, 1);
	pthread_t thread;
	MUST(pthread_create(&thread, NULL, change_map, NULL) == 0);
	area_push_out(&early);
	for (size_t i = 0; i < BLOCKS; i++) area_push_out(&blocks[i]);
	/* What hangs stays so: the test need not wait. */
	alarm(60);
	atomic_store(&is_locking, true);
	if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0) lacks("mlockall");
	atomic_store(&is_locked, true);
	MUST(pthread_join(thread, NULL) == 0);
	alarm(0);
	area_check(&early, 1);
	for (size_t i = 0; i < BLOCKS; i++)
		if (blocks[i].at) area_check(&blocks[i], 1);
	MUST(munlockall() == 0);
	area_push_out(&early);
	area_check(&early, 1);
	for (size_t i = 0; i < BLOCKS; i++)
		if (blocks[i].at) area_check(&blocks[i], 1);
}

enum { EARLY, COLD, ALL };

/* Locked before anything was evicted, and after it was itself; or with all else. */
static void grow(int when)
{
	struct area area = area_new(MIB / 4, 30 + when, 1), other = area_new(MIB, 35, 1);
	if (when == EARLY) MUST(mlock(area.at, area.pages * PAGE) == 0);
	area_push_out(when == EARLY ? &other : &area);
	if (when == COLD) MUST(mlock(area.at, area.pages * PAGE) == 0);
	if (when == ALL && mlockall(MCL_CURRENT | MCL_FUTURE) != 0) lacks("mlockall");
	for (int i = 0; i < 3; i++) {
		size_t before = area.pages * PAGE;
		/* Where there is room, and it is not. */
		unsigned char *to = map_private(4 * before);
		MUST(munmap(to, 4 * before) == 0);
		MUST(mremap(area.at, before, 2 * before, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
		area.at = to;
		area_check(&area, 1);
		area.pages *= 2;
		for (size_t at = before; at < 2 * before; at++)
			if (to[at]) die("WRONG BYTES where nothing has been, at %zu of %zu", at, before);
		area_fill(&area, 1);
		must_be_present(&area, "after it was made longer");
	}
	if (when == ALL) MUST(munlockall() == 0);
	else MUST(munlock(area.at, area.pages * PAGE) == 0);
	area_push_out(&area);
	area_check(&area, 1);
	MUST(munmap(area.at, area.pages * PAGE) == 0);
}

static void growing(void)
{
	/* What hangs stays so: the test need not wait. */
	alarm(60);
	grow(EARLY);
	grow(COLD);
	grow(ALL);
	alarm(0);
}

int main(int argc, char **argv)
{
	if (mode_is(argc, argv, "mlock")) some(false);
	else if (mode_is(argc, argv, "onfault")) some(true);
	else if (mode_is(argc, argv, "mlockall")) all();
	else if (mode_is(argc, argv, "unmapping")) unmapping();
	else if (mode_is(argc, argv, "growing")) growing();
	else die("mlock | onfault | mlockall | unmapping");
	return passed();
}
