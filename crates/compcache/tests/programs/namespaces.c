/*
 * New namespaces, and what else unshare does. Some of it the kernel allows to a process of one thread only, and a pager's
 * threads make it several [S24]:
 *
 *   refused  this is refused under a pager, and allowed without; memory is right afterwards
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

static void allowed_to_one_thread(const char *what, int got)
{
	if (expects_eviction() ? got != -1 || errno != EINVAL : got != 0) die("%s: %d, errno %d", what, got, errno);
}

static void refused(void)
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
	allowed_to_one_thread("unshare of CLONE_VM", unshare(CLONE_VM));
	allowed_to_one_thread("unshare of CLONE_THREAD", unshare(CLONE_THREAD));
	allowed_to_one_thread("unshare of CLONE_SIGHAND", unshare(CLONE_SIGHAND));
	work();
	pid_t child = fork();
	if (child == 0) {
		allowed_to_one_thread("setns into a user namespace", setns(namespace, CLONE_NEWUSER));
		work();
		_exit(0);
	}
	must_succeed(child);
	allowed_to_one_thread("unshare of CLONE_NEWUSER", unshare(CLONE_NEWUSER));
	work();
	close(pipes[1]);
	must_succeed(other);
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
	if (mode_is(argc, argv, "refused")) refused();
	else if (mode_is(argc, argv, "others")) others();
	else if (mode_is(argc, argv, "sandbox")) sandbox();
	else die("refused | others | sandbox");
	return passed();
}
