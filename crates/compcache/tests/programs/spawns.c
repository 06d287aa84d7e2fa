/*
 * Other ways to start a program: vfork, posix_spawn, system, popen; with the path, the arguments and the environment
 * lying in evicted memory, where the kernel must read them.
 */
#include "trap.h"
#include <spawn.h>

static struct area area;
static size_t next_page;

/* A string in memory that is cold: each on a page of its own, after the pages that are checked. */
static unsigned char *strings;
enum { STRINGS = 400 };

static char *cold_string(const char *text)
{
	MUST(next_page < STRINGS);
	(void)text;
	return (char *)strings + next_page++ * PAGE + 17;
}

static void prepare_strings(void)
{
	strings = map_private(STRINGS * PAGE);
	for (size_t page = 0; page < STRINGS; page += 4) {
		page_write(strings + page * PAGE, 6, page, 1);
		page_write(strings + (page + 1) * PAGE, 6, page + 1, 1);
		page_write(strings + (page + 2) * PAGE, 6, page + 2, 1);
		page_write(strings + (page + 3) * PAGE, 6, page + 3, 1);
		strcpy((char *)strings + page * PAGE + 17, "/bin/sh");
		strcpy((char *)strings + (page + 1) * PAGE + 17, "-c");
		strcpy((char *)strings + (page + 2) * PAGE + 17, "test \"$WORD\" = cold && exit 33");
		strcpy((char *)strings + (page + 3) * PAGE + 17, "WORD=cold");
	}
	push_out(strings, STRINGS);
}

static void must_end_with(pid_t child, int code)
{
	int status;
	MUST(child > 0);
	while (waitpid(child, &status, 0) < 0) MUST(errno == EINTR);
	if (!WIFEXITED(status) || WEXITSTATUS(status) != code) die("child ended with status %#x, not code %d", status, code);
}

static void check_some(size_t round)
{
	for (size_t page = round; page < area.pages; page += 16) page_check(area.at + page * PAGE, area.tag, page, 1);
}

int main(int argc, char **argv)
{
	area = area_new(working_set() / 2, 5, 1);
	prepare_strings();
	bool with_vfork = mode_is(argc, argv, "vfork"), with_fork = mode_is(argc, argv, "fork");
	bool with_spawn = mode_is(argc, argv, "posix_spawn"), with_shell = mode_is(argc, argv, "system");
	for (size_t round = 0; round < 20; round++) {
		if (round % 5 == 0) {
			area_push_out(&area);
			push_out(strings + next_page * PAGE, STRINGS - next_page);
		}
		char *path = cold_string("path"), *option = cold_string("-c"), *script = cold_string("script");
		char *variable = cold_string("variable");
		char *arguments[] = {path, option, script, NULL}, *environment[] = {variable, NULL};
		if (with_vfork || with_fork) {
			pid_t child = with_vfork ? vfork() : fork();
			if (child == 0) {
				/* The child of vfork runs in this very memory: it may also be the one that faults. */
				if (area.at[(round * 7 + 3) * PAGE] == 0 && page_is_zero(area.at + (round * 7 + 3) * PAGE)) _exit(9);
				execve(path, arguments, environment);
				_exit(8);
			}
			must_end_with(child, 33);
		} else if (with_spawn) {
			pid_t child;
			int error = posix_spawn(&child, path, NULL, NULL, arguments, environment);
			if (error) die("posix_spawn: error %d", error);
			must_end_with(child, 33);
		} else if (with_shell) {
			int status = system("exit 33");
			if (!WIFEXITED(status) || WEXITSTATUS(status) != 33) die("system: status %#x", status);
			FILE *pipe = popen("echo out of a pipe", "r");
			char line[64] = "";
			MUST(pipe && fgets(line, sizeof(line), pipe) && strcmp(line, "out of a pipe\n") == 0);
			MUST(pclose(pipe) == 0);
		} else {
			die("vfork | fork | posix_spawn | system");
		}
		check_some(round);
	}
	area_check(&area, 1);
	return passed();
}
