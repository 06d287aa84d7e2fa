/*
 * Walks over all of a working set, page by page, again and again: PASSES times. With a second argument it counts the passes
 * in the last word of each page.
 */
#include "trap.h"

static void count_in(const struct area *area, uint64_t pass)
{
	for (size_t page = 0; page < area->pages; page++) {
		unsigned char *at = area->at + page * PAGE;
		volatile uint64_t *last = (volatile uint64_t *)at + WORDS - 1;
		*last ^= pass;
		page_check(at, area->tag, page, 1);
		*last ^= pass + 1;
	}
}

int main(int argc, char **argv)
{
	MUST(argc == 2 || argc == 3);
	struct area area = area_new(working_set(), 50, 1);
	for (int pass = 0; pass < atoi(argv[1]); pass++) {
		if (argc == 2) area_check(&area, 1);
		else count_in(&area, (uint64_t)pass);
	}
	return passed();
}
