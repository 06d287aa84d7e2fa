/*
 * A heap that grows piece by piece, for somebody who measures it. Each piece is touched at once, before a pager can know
 * of it, and some old pages at random between. The kernel then cannot join a piece to the one before, and under a pager the
 * heap becomes as many mappings as there were looks at it. Prints "area ADDRESS PAGES" and "warm" when all of it is there,
 * then goes over it at random for some seconds, verifying, and prints "right".
 *
 *   grows MIB SECONDS PIECE_KIB
 */
#include "trap.h"

enum { TAG = 44, OLD_PER_PIECE = 8 };
static unsigned char *heap;
static uint64_t step;

static void check_one_of(size_t pages)
{
	size_t page = mix(step++) % pages;
	page_check(heap + page * PAGE, TAG, page, 1);
}

int main(int argc, char **argv)
{
	MUST(argc > 3);
	size_t pages = strtoul(argv[1], NULL, 10) * MIB / PAGE, piece = strtoul(argv[3], NULL, 10) * 1024 / PAGE;
	double seconds = strtod(argv[2], NULL);
	/* Nothing else may move the break: stdio's buffer lies elsewhere. */
	static char buffer[256];
	MUST(setvbuf(stdout, buffer, _IOFBF, sizeof(buffer)) == 0);
	MUST(piece > 0 && sbrk((intptr_t)(PAGE - (uintptr_t)sbrk(0) % PAGE)) != (void *)-1);
	heap = sbrk(0);
	for (size_t have = 0; have < pages; have += piece) {
		MUST(sbrk((intptr_t)(piece * PAGE)) == heap + have * PAGE);
		for (size_t page = have; page < have + piece; page++) page_write(heap + page * PAGE, TAG, page, 1);
		for (int i = 0; i < OLD_PER_PIECE; i++) check_one_of(have + piece);
		/* Several looks of a pager's. */
		sleep_ms(2);
	}
	if (getenv("TRAP_PLANT")) heap[(pages - 1) / 2 * PAGE] ^= 1;
	printf("area %#lx %zu\nwarm\n", (unsigned long)(uintptr_t)heap, pages);
	fflush(stdout);
	double until = seconds_now() + seconds;
	do {
		for (size_t i = 0; i < pages; i++) check_one_of(pages);
	} while (seconds_now() < until);
	for (size_t page = 0; page < pages; page++) page_check(heap + page * PAGE, TAG, page, 1);
	return passed();
}
