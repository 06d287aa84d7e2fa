/*
 * Does nothing for some seconds (the first argument), then verifies; twice. Idle memory may all be gone by then.
 * With `line` it says "ready" and does nothing until it is given a line on standard input.
 */
#include "trap.h"

static void idle(const char *how_long)
{
	if (strcmp(how_long, "line") != 0) {
		sleep_ms(strtol(how_long, NULL, 10) * 1000);
		return;
	}
	puts("ready");
	fflush(stdout);
	while (getchar() != '\n' && !feof(stdin)) {}
}

int main(int argc, char **argv)
{
	const char *how_long = argc > 1 ? argv[1] : "3";
	struct area area = area_new(working_set(), 32, 1);
	for (uint64_t round = 1; round < 3; round++) {
		idle(how_long);
		area_check(&area, round);
		area_fill(&area, round + 1);
	}
	idle(how_long);
	area_check(&area, 3);
	return passed();
}
