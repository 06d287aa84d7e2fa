/*
 * Walks over all of a working set, page by page, again and again: PASSES times.
 */
#include "trap.h"

int main(int argc, char **argv)
{
	MUST(argc == 2);
	struct area area = area_new(working_set(), 50, 1);
	for (int pass = atoi(argv[1]); pass > 0; pass--) area_check(&area, 1);
	return passed();
}
