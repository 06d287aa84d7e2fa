/*
 * A program cannot see that it is being paged, as far as that can be: its descriptors, children, signals, timers
 * and limits are those it would have without.
 */
#include "trap.h"
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>

static void say(const char *what, long value)
{
	char line[128];
	int length = snprintf(line, sizeof(line), "%s %ld\n", what, value);
	MUST(write(1, line, (size_t)length) == length);
}

/* As sandboxes ask for it. */
static void say_threads(void)
{
	struct stat told;
	int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	MUST(proc >= 0);
	MUST(fstatat(proc, "self/task/", &told, 0) == 0);
	say("threads, beside the directory", (long)told.st_nlink);
	MUST(stat("/proc/self/task", &told) == 0);
	say("threads, by their path", (long)told.st_nlink);
	close(proc);
}

static void *say_threads_from_another(void *unused)
{
	say_threads();
	return unused;
}

/* Everything is printed; the output must be the one of a run without a pager. */
static void look(void)
{
	for (int fd = 0; fd < 1024; fd++)
		if (fcntl(fd, F_GETFD) >= 0) say("open descriptor", fd);
	int fd = open("/dev/null", O_RDONLY);
	say("the next descriptor", fd);
	close(fd);
	errno = 0;
	say("a child that nobody started", waitpid(-1, NULL, WNOHANG));
	say("errno of that", errno);
	sigset_t mask, pending;
	MUST(pthread_sigmask(SIG_BLOCK, NULL, &mask) == 0 && sigpending(&pending) == 0);
	for (int signal = 1; signal < 65; signal++) {
		struct sigaction action;
		if (sigismember(&mask, signal) == 1) say("blocked signal", signal);
		if (sigismember(&pending, signal) == 1) say("pending signal", signal);
		if (sigaction(signal, NULL, &action) == 0 && action.sa_handler != SIG_DFL) say("handled signal", signal);
	}
	stack_t stack;
	MUST(sigaltstack(NULL, &stack) == 0);
	say("alternative stack", stack.ss_flags);
	struct itimerval timer;
	MUST(getitimer(ITIMER_REAL, &timer) == 0);
	say("timer", timer.it_value.tv_sec + timer.it_value.tv_usec);
	say("priority", getpriority(PRIO_PROCESS, 0));
	say("scheduling policy", sched_getscheduler(0));
	cpu_set_t all;
	MUST(sched_getaffinity(0, sizeof(all), &all) == 0);
	say("processors", CPU_COUNT(&all));
	say("dumpable", prctl(PR_GET_DUMPABLE));
	say("no new privileges", prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
	say("subreaper", prctl(PR_GET_PDEATHSIG, &fd) == 0 ? fd : -1);
	for (int limit = 0; limit < RLIM_NLIMITS; limit++) {
		struct rlimit value;
		MUST(getrlimit(limit, &value) == 0);
		say("limit", (long)value.rlim_cur);
	}
	say_threads();
	pthread_t thread;
	MUST(pthread_create(&thread, NULL, say_threads_from_another, NULL) == 0 && pthread_join(thread, NULL) == 0);
	/* errno is the program's own. */
	errno = 4711;
	filler_walk();
	MUST(errno == 4711);
}

int main(void)
{
	look();
	struct area area = area_new(working_set() / 2, 42, 1);
	area_push_out(&area);
	look();
	area_check(&area, 1);
	look();
	return passed();
}
