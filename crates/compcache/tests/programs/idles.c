/* Does nothing for some seconds (the first argument), then verifies; twice. Idle memory may all be gone by then. */
#include "trap.h"

int main(int argc, char **argv)
{
	long seconds = argc > 1 ? strtol(argv[1], NULL, 10) : 3;
	struct area area = area_new(working_set(), 32, 1);
	for (uint64_t round = 1; round < 3; round++) {
		sleep_ms(seconds * 1000);
		area_check(&area, round);
		area_fill(&area, round + 1);
	}
	sleep_ms(seconds * 1000);
	area_check(&area, 3);
	return passed();
}
