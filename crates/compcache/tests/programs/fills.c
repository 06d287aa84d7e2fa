/*
 * Fills new memory, page by page, and uses older memory all the time between; what was filled is not used again before the end. What the
 * older memory costs under a pager shows whether the new memory takes its turn to leave.
 *
 *   fills HOT_MIB COLD_MIB NEW_MIB
 */
#include "trap.h"

enum { HOT_TAG = 45, COLD_TAG, NEW_TAG, USES_PER_PAGE = 32 };

static unsigned char *filled(int tag, size_t pages)
{
	unsigned char *at = map_private(pages * PAGE);
	for (size_t page = 0; page < pages; page++) page_write(at + page * PAGE, tag, page, 1);
	return at;
}

static void check(const unsigned char *at, int tag, size_t pages)
{
	for (size_t page = 0; page < pages; page++) page_check(at + page * PAGE, tag, page, 1);
}

int main(int argc, char **argv)
{
	MUST(argc > 3);
	size_t hot_pages = strtoul(argv[1], NULL, 10) * MIB / PAGE, cold_pages = strtoul(argv[2], NULL, 10) * MIB / PAGE;
	size_t new_pages = strtoul(argv[3], NULL, 10) * MIB / PAGE;
	unsigned char *hot = filled(HOT_TAG, hot_pages);
	unsigned char *cold = filled(COLD_TAG, cold_pages);
	if (getenv("TRAP_PLANT")) cold[(cold_pages - 1) / 2 * PAGE] ^= 1;
	uint64_t step = 0;
	/* Until all of it is back. */
	for (size_t i = 0; i < hot_pages * 16; i++) {
		size_t page = mix(step++) % hot_pages;
		page_check(hot + page * PAGE, HOT_TAG, page, 1);
	}
	unsigned char *more = map_private(new_pages * PAGE);
	for (size_t page = 0; page < new_pages; page++) {
		page_write(more + page * PAGE, NEW_TAG, page, 1);
		for (int i = 0; i < USES_PER_PAGE; i++) {
			size_t old = mix(step++) % hot_pages;
			page_check(hot + old * PAGE, HOT_TAG, old, 1);
		}
		/* So much comes back that what is registered never has nothing that may leave. */
		for (int i = 0; i < USES_PER_PAGE; i++) {
			size_t old = mix(step++) % cold_pages;
			page_check(cold + old * PAGE, COLD_TAG, old, 1);
		}
	}
	check(hot, HOT_TAG, hot_pages);
	check(cold, COLD_TAG, cold_pages);
	check(more, NEW_TAG, new_pages);
	return passed();
}
