/*
 * New namespaces, and what else unshare does. Some of it the kernel allows to a process of one thread only, which under a pager
 * it must be for that moment [S24]:
 *
 *   alone    this is allowed, again and again, and to children; memory is right afterwards, and still paged
 *   threads  it is refused to a program that has two threads
 *   others   all other namespaces can be made and left again, by a process that goes on and forks
 *   sandbox  a child that is made in a user namespace of its own makes more there
 */
#include "trap.h"

static struct area area;
static uint64_t generation = 1;

static void work(void)
{
	area_check(&area, generation);
	area_fill(&area, ++generation);
	area_push_out(&area);
	area_check(&area, generation);
}

/* 0 in a child in a user namespace of its own. */
static pid_t fork_into_user_namespace(void)
{
	pid_t child = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
	if (child < 0) lacks("user namespaces");
	return child;
}

static void allowed(const char *what, int got)
{
	if (got != 0) die("%s: %d, errno %d", what, got, errno);
}

static void *make_cold(void *unused)
{
	area_push_out(&area);
	work();
	return unused;
}

static void alone(void)
{
	int pipes[2];
	char path[64], nothing;
	MUST(pipe(pipes) == 0);
	/* There is a namespace to enter until the pipe is closed. */
	pid_t other = fork_into_user_namespace();
	if (other == 0) {
		close(pipes[1]);
		_exit(read(pipes[0], &nothing, 1) == 0 ? 0 : 1);
	}
	snprintf(path, sizeof(path), "/proc/%d/ns/user", other);
	int namespace = open(path, O_RDONLY | O_CLOEXEC);
	MUST(namespace >= 0);
	work();
	allowed("unshare of CLONE_VM", unshare(CLONE_VM));
	area_check(&area, generation);
	struct area fresh = area_new(working_set(), 47, 1);
	area_push_out(&fresh);
	area_check(&fresh, 1);
	MUST(munmap(fresh.at, fresh.pages * PAGE) == 0);
	allowed("unshare of CLONE_THREAD", unshare(CLONE_THREAD));
	work();
	for (int round = 0; round < 1000; round++) allowed("unshare of CLONE_SIGHAND", (int)syscall(SYS_unshare, CLONE_SIGHAND));
	work();
	/* A process that has had threads: they are gone as soon as the kernel says so. */
	pthread_t thread;
	MUST(pthread_create(&thread, NULL, make_cold, NULL) == 0 && pthread_join(thread, NULL) == 0);
	while (unshare(CLONE_VM) != 0) sleep_ms(1);
	work();
	pid_t child = fork();
	if (child == 0) {
		allowed("setns into a user namespace", setns(namespace, CLONE_NEWUSER));
		work();
		_exit(0);
	}
	must_succeed(child);
	allowed("unshare of CLONE_NEWUSER", unshare(CLONE_NEWUSER));
	work();
	child = fork();
	if (child == 0) {
		work();
		_exit(0);
	}
	must_succeed(child);
	close(pipes[1]);
	must_succeed(other);
}

static void *wait_for_the_end(void *pipe)
{
	char nothing;
	MUST(read(*(int *)pipe, &nothing, 1) == 0);
	return pipe;
}

static void threads(void)
{
	int pipes[2];
	pthread_t thread;
	MUST(pipe(pipes) == 0 && pthread_create(&thread, NULL, wait_for_the_end, &pipes[0]) == 0);
	for (int round = 0; round < 20; round++) {
		if (unshare(CLONE_NEWUSER) != -1 || errno != EINVAL) die("unshare of CLONE_NEWUSER with two threads: errno %d", errno);
		area_check(&area, generation);
	}
	work();
	close(pipes[1]);
	MUST(pthread_join(thread, NULL) == 0);
	work();
}

static void others(void)
{
	static const char *const names[] = {"mnt", "uts", "ipc", "net", "pid", "cgroup"};
	enum { NAMES = sizeof(names) / sizeof(names[0]) };
	int before[NAMES];
	for (size_t i = 0; i < NAMES; i++) {
		char path[64];
		snprintf(path, sizeof(path), "/proc/self/ns/%s", names[i]);
		before[i] = open(path, O_RDONLY | O_CLOEXEC);
		if (before[i] < 0) lacks(path);
	}
	work();
	int all = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWCGROUP;
	if (unshare(all) != 0) {
		if (errno == EPERM) lacks("the right to make namespaces");
		die("unshare: errno %d", errno);
	}
	work();
	pid_t child = fork();
	if (child == 0) {
		MUST(getpid() == 1);
		work();
		_exit(0);
	}
	must_succeed(child);
	for (size_t i = 0; i < NAMES; i++)
		if (setns(before[i], 0) != 0) die("setns back into %s: errno %d", names[i], errno);
	work();
}

static void sandbox(void)
{
	for (int round = 0; round < 3; round++) {
		work();
		area_push_out(&area);
		pid_t child = fork_into_user_namespace();
		if (child == 0) {
			area_check(&area, generation);
			MUST(unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWPID) == 0);
			area_fill(&area, generation + 1);
			filler_walk();
			area_check(&area, generation + 1);
			_exit(0);
		}
		must_succeed(child);
	}
	work();
}

int main(int argc, char **argv)
{
	area = area_new(working_set() / 2, 46, generation);
	area_push_out(&area);
	if (mode_is(argc, argv, "alone")) alone();
	else if (mode_is(argc, argv, "threads")) threads();
	else if (mode_is(argc, argv, "others")) others();
	else if (mode_is(argc, argv, "sandbox")) sandbox();
	else die("alone | threads | others | sandbox");
	return passed();
}
