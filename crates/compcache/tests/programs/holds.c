/*
 * Holds memory while somebody measures it: prints "area ADDRESS PAGES", fills, prints "warm", then goes over it again
 * and again for some seconds, verifying, and prints "right".
 *
 *   holds MIB SECONDS [text|noise|same] [HOT_MIB] [BEGIN_MIB]
 *
 * With HOT_MIB only the first part is walked. With BEGIN_MIB that much is used at first, and the rest after a line on
 * standard input. With TRAP_LOCK in the environment it locks all of it then (mlockall), and prints "locked".
 */
#include "trap.h"

static const char *kind;

static void write_one(unsigned char *at, size_t page)
{
	uint64_t *words = (uint64_t *)(void *)at;
	page_write(at, 100, page, 1);
	if (strcmp(kind, "text") == 0) return;
	for (unsigned i = 0; i < WORDS; i++) words[i] = strcmp(kind, "same") == 0 ? 0x5a5a000000000001u + page % 7 : mix(page * WORDS + i);
}

static void check_one(const unsigned char *at, size_t page)
{
	const volatile uint64_t *words = (const volatile uint64_t *)(const void *)at;
	if (strcmp(kind, "text") == 0) {
		page_check(at, 100, page, 1);
		return;
	}
	for (unsigned i = 0; i < WORDS; i++) {
		uint64_t right = strcmp(kind, "same") == 0 ? 0x5a5a000000000001u + page % 7 : mix(page * WORDS + i);
		if (words[i] != right) die("WRONG BYTES in page %zu", page);
	}
}

int main(int argc, char **argv)
{
	MUST(argc > 2);
	size_t pages = strtoul(argv[1], NULL, 10) * MIB / PAGE;
	double seconds = strtod(argv[2], NULL);
	kind = argc > 3 ? argv[3] : "text";
	size_t hot = argc > 4 ? strtoul(argv[4], NULL, 10) * MIB / PAGE : pages;
	size_t begin = argc > 5 ? strtoul(argv[5], NULL, 10) * MIB / PAGE : pages;
	unsigned char *at = map_private(pages * PAGE);
	printf("area %#lx %zu\n", (unsigned long)(uintptr_t)at, pages);
	for (size_t page = 0; page < begin; page++) write_one(at + page * PAGE, page);
	if (getenv("TRAP_PLANT")) at[(pages - 1) / 2 * PAGE] ^= 1;
	printf("warm\n");
	fflush(stdout);
	if (begin < pages) {
		MUST(getchar() == '\n');
		for (size_t page = begin; page < pages; page++) write_one(at + page * PAGE, page);
	}
	if (getenv("TRAP_LOCK")) {
		if (mlockall(MCL_CURRENT) != 0) lacks("mlockall");
		printf("locked\n");
		fflush(stdout);
	}
	double until = seconds_now() + seconds;
	do {
		for (size_t page = 0; page < hot; page++) check_one(at + page * PAGE, page);
	} while (seconds_now() < until);
	for (size_t page = 0; page < pages; page++) check_one(at + page * PAGE, page);
	return passed();
}
