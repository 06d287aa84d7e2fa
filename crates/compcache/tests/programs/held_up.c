/*
 * Fills memory as fast as it can be filled, in new mappings, and does between what must not be cut short while it is made to wait: writes that are larger
 * than a pipe holds, threads that come and go, copies of itself. Prints "right".
 *
 *   held_up MIB
 */
#include "trap.h"

static int pipe_ends[2];
static unsigned char text[MIB];

static void fill(unsigned char *piece, size_t nth)
{
	memcpy(piece, text, MIB);
	memcpy(piece, &nth, sizeof nth);
}

static bool is_right(const unsigned char *piece, size_t nth)
{
	return memcmp(piece, &nth, sizeof nth) == 0 && memcmp(piece + sizeof nth, text + sizeof nth, MIB - sizeof nth) == 0;
}

/* Takes a little at a time, so that the writer is in the midst of it most of the time. Returns how many pieces there were. */
static void *taker(void *unused UNUSED)
{
	static unsigned char piece[MIB];
	size_t pieces = 0, held = 0, nth;
	for (ssize_t got; (got = read(pipe_ends[0], piece + held, MIB - held < 16384 ? MIB - held : 16384)) > 0;) {
		if ((held += got) < MIB) continue;
		memcpy(&nth, piece, sizeof nth);
		if (!is_right(piece, nth)) die("WRONG BYTES came through the pipe");
		pieces++, held = 0;
	}
	if (held) die("a piece of %zu bytes came through the pipe", held);
	return (void *)pieces;
}

/* So deep that it lies below the page of its control block. */
static void *deep(void *unused UNUSED)
{
	volatile unsigned char room[64 << 10];
	size_t sum = 0;
	for (size_t at = 0; at < sizeof room; at += 512) room[at] = 1;
	for (size_t at = 0; at < sizeof room; at += 512) sum += room[at];
	return (void *)sum;
}

int main(int argc, char **argv)
{
	MUST(argc > 1);
	size_t count = strtoul(argv[1], NULL, 10), written = 0;
	unsigned char **all = calloc(count, sizeof *all);
	pthread_t takes, works;
	void *result;
	for (size_t line = 0; line < MIB / 64; line++) snprintf((char *)text + line * 64, 64, "line %zu of a text that is the same but for a number", line / 16);
	MUST(all && pipe(pipe_ends) == 0 && pthread_create(&takes, NULL, taker, NULL) == 0);
	for (size_t nth = 0; nth < count; nth++) {
		MUST(all[nth] = malloc(MIB));
		fill(all[nth], nth);
		if (nth % 8 == 7) {
			ssize_t length = write(pipe_ends[1], all[nth], MIB);
			if (length != (ssize_t)MIB) die("of %zu bytes %zd were written", MIB, length);
			written++;
			MUST(pthread_create(&works, NULL, deep, NULL) == 0 && pthread_join(works, &result) == 0);
			if (result != (void *)(size_t)128) die("a thread found %p", result);
		}
		if (nth % 256 == 255) {
			int status;
			pid_t child = fork();
			MUST(child >= 0);
			if (child == 0) _exit(deep(NULL) == (void *)(size_t)128 && is_right(all[nth / 2], nth / 2) ? 0 : 1);
			MUST(waitpid(child, &status, 0) == child);
			if (status != 0) die("a copy ended with %#x", status);
		}
	}
	MUST(close(pipe_ends[1]) == 0 && pthread_join(takes, &result) == 0);
	if (result != (void *)written) die("%zu pieces were written, and %zu came", written, (size_t)result);
	if (getenv("TRAP_PLANT")) all[count / 2][100] ^= 1;
	for (size_t nth = 0; nth < count; nth++)
		if (!is_right(all[nth], nth)) die("WRONG BYTES in piece %zu", nth);
	return passed();
}
