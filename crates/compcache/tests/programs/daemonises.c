/*
 * The textbook daemon: fork, setsid, fork, close everything; the first process is gone while the last one goes on with
 * the memory it was given. The verdict goes to the file named by the first argument.
 */
#include "trap.h"

int main(int argc, char **argv)
{
	MUST(argc == 2);
	char partial[512];
	MUST(snprintf(partial, sizeof(partial), "%s.partial", argv[1]) < (int)sizeof(partial));
	struct area area = area_new(working_set() / 2, 2, 1);
	area_push_out(&area);

	pid_t child = fork();
	MUST(child >= 0);
	if (child > 0) _exit(0);
	MUST(setsid() > 0);
	child = fork();
	MUST(child >= 0);
	if (child > 0) _exit(0);
	closefrom(0);
	MUST(chdir("/") == 0);
	umask(022);
	report_fd = open(partial, O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0644);
	MUST(report_fd == 0 && dup(0) == 1 && dup(0) == 2);
	sleep_ms(200);

	area_check(&area, 1);
	area_fill(&area, 2);
	area_push_out(&area);
	area_check(&area, 2);
	MUST(passed() == 0);
	MUST(rename(partial, argv[1]) == 0);
	return 0;
}
