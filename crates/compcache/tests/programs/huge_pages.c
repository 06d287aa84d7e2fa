/*
 * Transparent huge pages: asked for by madvise; filled, evicted, partly discarded, forked, collapsed again.
 * Whether the kernel gives any is its business (AnonHugePages is printed on stderr); contents are ours.
 */
#include "trap.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define HUGE ((size_t)2 * MIB)

int main(void)
{
	size_t bytes = working_set() / 2 / HUGE * HUGE;
	unsigned char *room = map_private(bytes + HUGE);
	unsigned char *at = room + (HUGE - (uintptr_t)room % HUGE) % HUGE;
	if (madvise(at, bytes, MADV_HUGEPAGE) != 0) lacks("transparent huge pages");
	struct area area = area_over(at, bytes, 23);
	area_fill(&area, 1);
	area_check(&area, 1);
	area_push_out(&area);
	area_check(&area, 1);
	for (size_t page = 0; page < area.pages; page += 3) page_write(at + page * PAGE, 23, page, 2);
	area_push_out(&area);
	for (size_t page = 0; page < area.pages; page++) page_check(at + page * PAGE, 23, page, page % 3 ? 1 : 2);
	area_fill(&area, 3);

	/* Half of each huge page is discarded; collapsing must keep the rest and the zeroes. */
	filler_walk();
	for (size_t start = 0; start < bytes; start += HUGE) MUST(madvise(at + start, HUGE / 2, MADV_DONTNEED) == 0);
	area_push_out(&area);
	for (size_t start = 0; start < bytes; start += HUGE) {
		if (start / HUGE % 2) (void)madvise(at + start, HUGE, MADV_COLLAPSE);
		must_be_zero(at + start, HUGE / 2, "the discarded half of a huge page");
		for (size_t page = start / PAGE + HUGE / 2 / PAGE; page < (start + HUGE) / PAGE; page++) page_check(at + page * PAGE, 23, page, 3);
	}
	area_fill(&area, 4);
	pid_t child = fork();
	if (child == 0) {
		area_push_out(&area);
		area_check(&area, 4);
		area_fill(&area, 5);
		area_check(&area, 5);
		_exit(0);
	}
	area_check(&area, 4);
	must_succeed(child);
	area_push_out(&area);
	area_check(&area, 4);
	return passed();
}
