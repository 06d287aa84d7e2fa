/*
 * Fills memory as fast as it can be filled, in pieces that are each new to the system, with what compresses well, and then looks at each once: prints
 * "right".
 *
 *   floods MIB
 */
#include "trap.h"

int main(int argc, char **argv)
{
	MUST(argc > 1);
	size_t count = strtoul(argv[1], NULL, 10);
	unsigned char *text = malloc(MIB), **all = calloc(count, sizeof *all);
	MUST(text && all);
	for (size_t line = 0; line < MIB / 64; line++) snprintf((char *)text + line * 64, 64, "line %zu of a text that is the same but for a number", line / 16);
	for (size_t nth = 0; nth < count; nth++) {
		MUST(all[nth] = malloc(MIB));
		memcpy(all[nth], text, MIB);
	}
	if (getenv("TRAP_PLANT")) all[count / 2][1] ^= 1;
	for (size_t nth = 0; nth < count; nth++)
		if (memcmp(all[nth], text, MIB)) die("WRONG BYTES in piece %zu", nth);
	return passed();
}
