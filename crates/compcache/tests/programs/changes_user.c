/*
 * A server that starts as root, starts threads, and gives its rights up. The C library changes every thread it knows,
 * by a signal; the pager must neither be lost by that nor lose the right to do its work. Modes:
 *
 *   threads  the process goes on, verifying and changing, with all its threads
 *   forks    it then forks: the child has no more right than its parent; cold memory that must not be written, or not be
 *            touched, or is not the child's, is as it was
 *   again    twice, and writes between to what the first fork has brought back
 *   last     under a limit that lets it make one process and no thread, from a thread whose stack is cold but for its end
 */
#include "trap.h"
#include <grp.h>
#include <sys/resource.h>

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

/* Memory in the page of a stream, which every fork looks at. */
static volatile char *beside_stream(uintptr_t *page)
{
	/* Not among what libc uses itself. */
	for (size_t i = 0; i < 1000; i++) MUST(malloc(64));
	for (;;) {
		FILE *stream = fopen("/dev/null", "r");
		char *beside = malloc(64);
		MUST(stream && beside);
		*page = ((uintptr_t)stream + 0x68) / PAGE * PAGE;
		if ((uintptr_t)beside / PAGE * PAGE == *page) return beside;
	}
}

static void fork_again(void)
{
	uintptr_t page;
	volatile char *beside = beside_stream(&page);
	for (char round = 1; round < 5; round++) {
		*beside = 0;
		push_out((void *)page, 1);
		pid_t child = fork();
		if (child == 0) _exit(0);
		must_succeed(child);
		*beside = round;
		child = fork();
		if (child == 0) {
			if (*beside != round) die("WRONG BYTES: %d, not %d", *beside, round);
			_exit(0);
		}
		must_succeed(child);
	}
}

/* Leaves the stack behind as one whose frames have been deep. */
static __attribute__((noinline)) void fill_stack(void)
{
	volatile char deep[256 << 10];
	for (size_t i = 0; i < sizeof(deep); i++) deep[i] = (char)mix(i);
}

static int wake_up[2];
static _Atomic uintptr_t stack_page;

static void *fork_last(void *argument)
{
	const struct area *area = argument;
	char byte;
	fill_stack();
	atomic_store(&stack_page, (uintptr_t)__builtin_frame_address(0) / PAGE * PAGE);
	MUST(read(wake_up[0], &byte, 1) == 1);
	pid_t child;
	/* Threads that were joined may count a moment longer. */
	while ((child = fork()) < 0 && errno == EAGAIN) sleep_ms(5);
	if (child == 0) {
		area_check(area, 4);
		_exit(0);
	}
	must_succeed(child);
	return NULL;
}

static void fork_on_cold_stack(struct area *area)
{
	pthread_t forking;
	MUST(pipe(wake_up) == 0);
	MUST(pthread_create(&forking, NULL, fork_last, area) == 0);
	while (!atomic_load(&stack_page)) sched_yield();
	sleep_ms(20);
	push_out((void *)(atomic_load(&stack_page) - 16 * PAGE), 16);
	/* The main thread, the one that forks, and one more. */
	struct rlimit three = {3, 3};
	MUST(setrlimit(RLIMIT_NPROC, &three) == 0);
	MUST(write(wake_up[1], "", 1) == 1);
	MUST(pthread_join(forking, NULL) == 0);
}

int main(int argc, char **argv)
{
	bool is_known = argc > 1 && strstr("threads forks again last", argv[1]);
	if (!is_known) die("threads | forks | again | last");
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
	/* Nobody else's, so that its processes can be counted. */
	uid_t user = mode_is(argc, argv, "last") ? 400000000 + (uid_t)getpid() : 65534;
	MUST(setresuid(user, user, user) == 0);
	MUST(geteuid() == user && setuid(0) != 0);
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
	if (mode_is(argc, argv, "again")) fork_again();
	if (mode_is(argc, argv, "last")) fork_on_cold_stack(&area);
	area_check(&area, 4);
	return passed();
}
