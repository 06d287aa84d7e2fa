/*
 * Ends in every way, in the middle of everything: threads write and evict without a pause. The status must be the one
 * of a run without a pager. Modes: exit, _exit, return, thread_exit, last_thread, past_libc (the only thread ends as a thread), abort,
 * kill, term, segv, trap, handled_term, quick_exit, atexit, in_child (a forked child is killed, the parent goes on).
 */
#include "trap.h"

enum { THREADS = 3 };
static struct area area;

static void *busy(void *argument)
{
	uint64_t tag = (uintptr_t)argument;
	struct area mine = area_new(working_set() / 4, tag, 0);
	for (uint64_t round = 0;; round++) {
		area_check(&mine, round);
		area_fill(&mine, round + 1);
	}
	return NULL;
}

static void start_threads(void)
{
	for (uintptr_t i = 0; i < THREADS; i++) {
		pthread_t thread;
		MUST(pthread_create(&thread, NULL, busy, (void *)(i + 95)) == 0);
	}
	filler_walk();
	sleep_ms(50);
}

static void at_exit(void)
{
	/* Static destructors may walk all they have. */
	area_check(&area, 1);
	static const char word[] = "atexit\n";
	MUST(write(1, word, sizeof(word) - 1) > 0);
}

static void *exits(void *unused)
{
	(void)unused;
	sleep_ms(20);
	exit(43);
}

static void on_term(int signal)
{
	area_check(&area, 1);
	_exit(50 + (signal == SIGTERM));
}

static void *last(void *unused)
{
	(void)unused;
	sleep_ms(50);
	area_check(&area, 1);
	pthread_exit(NULL);
}

int main(int argc, char **argv)
{
	MUST(argc == 2);
	const char *mode = argv[1];
	area = area_new(working_set() / 4, 29, 1);
	/* A planted byte is found here, not by a thread that the end may overtake. */
	area_check(&area, 1);
	area_push_out(&area);
	if (strcmp(mode, "last_thread") == 0) {
		/* The process ends when its last thread does: with status 0. */
		pthread_t thread;
		MUST(passed() == 0 && pthread_create(&thread, NULL, last, NULL) == 0);
		pthread_exit(NULL);
	}
	if (strcmp(mode, "past_libc") == 0) {
		for (int round = 0; round < 3; round++) {
			pid_t child = fork();
			if (child == 0) syscall(SYS_exit, 48);
			int status;
			MUST(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 48);
		}
		MUST(passed() == 0);
		syscall(SYS_exit, 49);
	}
	if (strcmp(mode, "in_child") == 0) {
		for (int round = 0; round < 4; round++) {
			pid_t child = fork();
			if (child == 0) {
				start_threads();
				for (;;) area_check(&area, 1);
			}
			sleep_ms(100 + round * 37);
			MUST(kill(child, SIGKILL) == 0);
			int status;
			MUST(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
			area_check(&area, 1);
		}
		return passed();
	}
	start_threads();
	area_check(&area, 1);
	MUST(passed() == 0);
	if (strcmp(mode, "exit") == 0) exit(42);
	if (strcmp(mode, "_exit") == 0) _exit(44);
	if (strcmp(mode, "return") == 0) return 45;
	if (strcmp(mode, "quick_exit") == 0) quick_exit(46);
	if (strcmp(mode, "atexit") == 0) {
		MUST(atexit(at_exit) == 0);
		exit(47);
	}
	if (strcmp(mode, "thread_exit") == 0) {
		pthread_t thread;
		MUST(pthread_create(&thread, NULL, exits, NULL) == 0);
		for (;;) filler_walk();
	}
	if (strcmp(mode, "abort") == 0) abort();
	if (strcmp(mode, "kill") == 0) kill(getpid(), SIGKILL);
	if (strcmp(mode, "term") == 0) kill(getpid(), SIGTERM);
	if (strcmp(mode, "segv") == 0) *(volatile int *)8 = 1;
	if (strcmp(mode, "trap") == 0) __builtin_trap();
	if (strcmp(mode, "handled_term") == 0) {
		signal(SIGTERM, on_term);
		kill(getpid(), SIGTERM);
	}
	for (;;) sleep_ms(1000);
}
