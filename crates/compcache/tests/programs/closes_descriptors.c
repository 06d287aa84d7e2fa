/*
 * Closes descriptors it never opened, as daemons and shells do, and goes on using its memory.
 * When the pager's userfaultfd is closed this way, evicted pages silently become zeroes.
 */
#include "trap.h"

static void close_everything(const char *how)
{
	if (strcmp(how, "closefrom") == 0) {
		closefrom(3);
	} else if (strcmp(how, "close_range") == 0) {
		MUST(close_range(3, ~0u, 0) == 0);
	} else if (strcmp(how, "unshare") == 0) {
		MUST(close_range(3, ~0u, CLOSE_RANGE_UNSHARE) == 0);
	} else if (strcmp(how, "loop") == 0) {
		for (int fd = 3; fd < 65536; fd++) close(fd);
	} else if (strcmp(how, "all") == 0) {
		closefrom(0);
	} else if (strcmp(how, "dup2") == 0) {
		for (int fd = 3; fd < 1024; fd++) MUST(dup2(2, fd) == fd);
	} else {
		die("closefrom | close_range | unshare | loop | all | dup2");
	}
}

int main(int argc, char **argv)
{
	MUST(argc == 2);
	struct area area = area_new(working_set() / 2, 1, 1);
	area_push_out(&area);
	close_everything(argv[1]);
	area_check(&area, 1);
	area_fill(&area, 2);
	area_push_out(&area);
	close_everything(argv[1]);
	area_check(&area, 2);
	pid_t child = fork();
	if (child == 0) {
		close_everything(argv[1]);
		area_push_out(&area);
		close_everything(argv[1]);
		area_check(&area, 2);
		_exit(0);
	}
	must_succeed(child);
	area_check(&area, 2);
	return strcmp(argv[1], "all") == 0 ? 0 : passed();
}
