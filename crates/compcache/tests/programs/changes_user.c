/*
 * A server that starts as root, starts threads, and gives its rights up. The C library changes every thread it knows,
 * by a signal; the pager must neither be lost by that nor lose the right to do its work. Modes:
 *
 *   threads  the process goes on, verifying and changing, with all its threads
 *   forks    it then forks: the child has no more right than its parent
 */
#include "trap.h"
#include <grp.h>

enum { THREADS = 3 };
static atomic_bool stop;
static atomic_int rounds_done;

static void *work(void *argument)
{
	uint64_t tag = (uintptr_t)argument;
	struct area area = area_new(working_set() / 4, tag, 0);
	for (uint64_t round = 0; !atomic_load(&stop); round++) {
		area_check(&area, round);
		area_fill(&area, round + 1);
		atomic_fetch_add(&rounds_done, 1);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	if (!mode_is(argc, argv, "threads") && !mode_is(argc, argv, "forks")) die("threads | forks");
	if (geteuid() != 0) lacks("root");
	setenv("TRAP_KEEP_PAGEMAP", "1", 1);
	struct area area = area_new(working_set() / 2, 28, 1);
	area_push_out(&area);
	pthread_t threads[THREADS];
	for (uintptr_t i = 0; i < THREADS; i++) MUST(pthread_create(&threads[i], NULL, work, (void *)(i + 90)) == 0);
	sleep_ms(100);
	gid_t group = 65534;
	MUST(setgroups(1, &group) == 0);
	MUST(setresgid(65534, 65534, 65534) == 0);
	MUST(setresuid(65534, 65534, 65534) == 0);
	MUST(geteuid() == 65534 && setuid(0) != 0);
	for (uint64_t round = 1; round < 4; round++) {
		area_check(&area, round);
		area_fill(&area, round + 1);
		area_push_out(&area);
	}
	int so_far = atomic_load(&rounds_done);
	double start = seconds_now();
	while (atomic_load(&rounds_done) < so_far + THREADS) {
		if (seconds_now() - start > 20) die("HANG: the threads stand still since the user changed");
		sleep_ms(5);
	}
	if (mode_is(argc, argv, "forks")) {
		pid_t child = fork();
		if (child == 0) {
			area_check(&area, 4);
			area_fill(&area, 5);
			filler_walk();
			filler_walk();
			area_check(&area, 5);
			_exit(0);
		}
		must_succeed(child);
	}
	atomic_store(&stop, true);
	for (size_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
	area_check(&area, 4);
	return passed();
}
