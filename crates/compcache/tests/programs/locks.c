/*
 * Memory that the program locked stays where it is.
 *
 *   mlock      what is locked before and after it was evicted comes in, stays in, and is right
 *   onfault    mlock2(MLOCK_ONFAULT)
 *   mlockall   MCL_CURRENT | MCL_FUTURE of more memory than the cap: nothing hangs and nothing is lost
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

int main(int argc, char **argv)
{
	if (mode_is(argc, argv, "mlock")) some(false);
	else if (mode_is(argc, argv, "onfault")) some(true);
	else if (mode_is(argc, argv, "mlockall")) all();
	else die("mlock | onfault | mlockall");
	return passed();
}
