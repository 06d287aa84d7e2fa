/*
 * A server that starts as root, starts threads, and gives its rights up. The C library changes every thread it knows,
 * by a signal; the pager must neither be lost by that nor lose the right to do its work. Modes:
 *
 *   threads  the process goes on, verifying and changing, with all its threads
 *   forks    it then forks: the child has no more right than its parent; cold memory that must not be written, or not be
 *            touched, or is not the child's, is as it was
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

enum { PARTS = 4 };
static struct area parts[PARTS];

/* Cold memory, of which the first part may only be read, the next not be touched, and the third is not for children. */
static void parts_make(void)
{
	size_t bytes = working_set() / 4 / PARTS;
	char *at = map_private(bytes * PARTS);
	for (size_t i = 0; i < PARTS; i++) {
		parts[i] = area_over(at + i * bytes, bytes, 40 + i);
		area_fill(&parts[i], 1);
	}
	push_out(at, bytes / PAGE * PARTS);
	MUST(mprotect(parts[0].at, bytes, PROT_READ) == 0);
	MUST(mprotect(parts[1].at, bytes, PROT_NONE) == 0);
	MUST(madvise(parts[2].at, bytes, MADV_DONTFORK) == 0);
}

static void parts_check(bool in_child)
{
	size_t bytes = parts[0].pages * PAGE;
	unsigned char resident;
	int ends[2];
	MUST(pipe(ends) == 0 && write(ends[1], "x", 1) == 1);
	MUST(read(ends[0], parts[0].at, 1) < 0 && errno == EFAULT);
	MUST(read(ends[0], parts[0].at + bytes - PAGE, 1) < 0 && errno == EFAULT);
	MUST(write(ends[1], parts[1].at, 1) < 0 && errno == EFAULT);
	MUST(write(ends[1], parts[1].at + bytes - PAGE, 1) < 0 && errno == EFAULT);
	area_check(&parts[0], 1);
	MUST(mprotect(parts[1].at, bytes, PROT_READ | PROT_WRITE) == 0);
	area_check(&parts[1], 1);
	if (in_child)
		MUST(mincore(parts[2].at, PAGE, &resident) < 0 && errno == ENOMEM);
	else
		area_check(&parts[2], 1);
	area_check(&parts[3], 1);
	close(ends[0]);
	close(ends[1]);
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
		parts_make();
		pid_t child = fork();
		if (child == 0) {
			parts_check(true);
			area_check(&area, 4);
			area_fill(&area, 5);
			filler_walk();
			filler_walk();
			area_check(&area, 5);
			_exit(0);
		}
		must_succeed(child);
		parts_check(false);
	}
	atomic_store(&stop, true);
	for (size_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
	area_check(&area, 4);
	return passed();
}
