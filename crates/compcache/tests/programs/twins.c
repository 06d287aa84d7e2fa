/*
 * A process that forks, for somebody who measures both. Fills its memory and prints "alone"; forks and prints "forked", while
 * the two share every page; the child writes every page and "written" is printed; both verify, and "right" is printed.
 * Before each step it waits for a line on standard input, or its end.
 *
 *   twins MIB
 */
#include "trap.h"

static void say_and_wait(const char *word)
{
	MUST(write(1, word, strlen(word)) == (ssize_t)strlen(word));
	char letter;
	while (read(0, &letter, 1) == 1 && letter != '\n') {}
}

int main(int argc, char **argv)
{
	MUST(argc > 1);
	struct area area = area_new(strtoul(argv[1], NULL, 10) * MIB, 45, 1);
	say_and_wait("alone\n");
	/* A byte lets the child write, the end of the pipe lets it end. */
	int go[2], done[2];
	char nothing;
	MUST(pipe(go) == 0 && pipe(done) == 0);
	pid_t child = fork();
	if (child == 0) {
		close(go[1]);
		close(done[0]);
		MUST(read(go[0], &nothing, 1) == 1);
		area_fill(&area, 2);
		MUST(write(done[1], "d", 1) == 1);
		MUST(read(go[0], &nothing, 1) == 0);
		area_check(&area, 2);
		_exit(0);
	}
	MUST(child > 0);
	close(go[0]);
	close(done[1]);
	say_and_wait("forked\n");
	MUST(write(go[1], "g", 1) == 1 && read(done[0], &nothing, 1) == 1);
	say_and_wait("written\n");
	close(go[1]);
	area_check(&area, 1);
	must_succeed(child);
	return passed();
}
