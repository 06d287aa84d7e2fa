/*
 * Others read and write evicted memory of a process: a debugger, a profiler, a crash reporter.
 *
 * The kernel does not wait for a pager in PTRACE_PEEKDATA and /proc/PID/mem: it answers EIO for a page that is not there.
 * That is allowed here; a wrong byte is not.
 *
 *   peekdata   PTRACE_PEEKDATA and PTRACE_POKEDATA on the stopped main thread of a traced child
 *   vm_readv   process_vm_readv and process_vm_writev of a running child
 *   proc_mem   pread and pwrite of /proc/PID/mem
 *   stopped    the whole child is stopped by SIGSTOP, as by a shell's Ctrl-Z, with all its pager's threads, and then read:
 *              the reader has to wait, in the kernel, until somebody else continues the child
 *   continued  SIGSTOP and SIGCONT, again and again, while the child works; then it goes on rightly
 */
#include "trap.h"
#include <sys/ptrace.h>
#include <sys/uio.h>

enum { RUN = 16 };
static struct area area;
static int to_child[2], to_parent[2];

static void tell(int fd) { MUST(write(fd, "x", 1) == 1); }
static void await(int fd)
{
	char byte;
	MUST(read(fd, &byte, 1) == 1);
}

static pid_t child_with_cold_memory(void)
{
	MUST(pipe(to_child) == 0 && pipe(to_parent) == 0);
	pid_t child = fork();
	if (child != 0) {
		await(to_parent[0]);
		return child;
	}
	close(to_parent[0]);
	close(to_child[1]);
	area_fill(&area, 2);
	area_push_out(&area);
	tell(to_parent[1]);
	await(to_child[0]);
	/* The parent wrote to the last run. */
	for (size_t page = 0; page < area.pages; page++)
		page_check(area.at + page * PAGE, area.tag, page, page < area.pages - RUN ? 2 : 3);
	_exit(0);
}

static void hang(int signal)
{
	(void)signal;
	die("HANG: reading the evicted memory of another process");
}

/*
 * Stops the child; another process continues it a second later. Nobody waits until it has stopped: a thread that is telling its
 * pager of an unmapping at that moment stops when the pager goes on.
 */
static pid_t stop_for_a_second(pid_t child)
{
	pid_t other = fork();
	if (other == 0) {
		sleep_ms(1000);
		_exit(kill(child, SIGCONT) == 0 ? 0 : 1);
	}
	MUST(kill(child, SIGSTOP) == 0);
	sleep_ms(50);
	return other;
}

static size_t refused;

/* The page is not there and this way of reading cannot wait for it. */
static bool is_refusal(bool failed)
{
	if (failed && errno == EIO) refused++;
	return failed && errno == EIO;
}

static void read_run(const char *how, pid_t child, int mem, size_t page)
{
	unsigned char got[RUN * PAGE];
	unsigned char *at = area.at + page * PAGE;
	alarm(15);
	if (strcmp(how, "peekdata") == 0) {
		for (size_t i = 0; i < sizeof(got); i += 8) {
			errno = 0;
			long word = ptrace(PTRACE_PEEKDATA, child, at + i, NULL);
			if (is_refusal(errno != 0)) page_write(got + i / PAGE * PAGE, area.tag, page + i / PAGE, 2);
			else MUST(errno == 0);
			if (errno) i = i / PAGE * PAGE + PAGE - 8;
			else memcpy(got + i, &word, 8);
		}
	} else if (mem >= 0) {
		for (size_t i = 0; i < RUN; i++) {
			ssize_t count = pread(mem, got + i * PAGE, PAGE, (off_t)(uintptr_t)(at + i * PAGE));
			if (is_refusal(count < 0)) page_write(got + i * PAGE, area.tag, page + i, 2);
			else MUST(count == (ssize_t)PAGE);
		}
	} else {
		struct iovec local = {got, sizeof(got)}, remote = {at, sizeof(got)};
		MUST(process_vm_readv(child, &local, 1, &remote, 1, 0) == (ssize_t)sizeof(got));
	}
	alarm(0);
	for (size_t i = 0; i < RUN; i++) page_check(got + i * PAGE, area.tag, page + i, 2);
}

static void write_run(pid_t child, size_t page)
{
	unsigned char new[RUN * PAGE];
	for (size_t i = 0; i < RUN; i++) page_write(new + i * PAGE, area.tag, page + i, 3);
	struct iovec local = {new, sizeof(new)}, remote = {area.at + page * PAGE, sizeof(new)};
	alarm(15);
	MUST(process_vm_writev(child, &local, 1, &remote, 1, 0) == (ssize_t)sizeof(new));
	alarm(0);
}

static void read_child(const char *how)
{
	pid_t child = child_with_cold_memory(), other = 0;
	int mem = -1, status;
	if (strcmp(how, "peekdata") == 0) {
		if (ptrace(PTRACE_SEIZE, child, NULL, NULL) != 0) lacks("ptrace");
		MUST(ptrace(PTRACE_INTERRUPT, child, NULL, NULL) == 0);
		MUST(waitpid(child, &status, __WALL) == child && WIFSTOPPED(status));
	} else if (strcmp(how, "proc_mem") == 0) {
		char path[64];
		snprintf(path, sizeof(path), "/proc/%d/mem", child);
		mem = open(path, O_RDWR);
		if (mem < 0) lacks("/proc/PID/mem");
	} else if (strcmp(how, "stopped") == 0) {
		other = stop_for_a_second(child);
	}
	for (size_t page = 0; page + RUN < area.pages; page += RUN * 4) read_run(how, child, mem, page);
	if (strcmp(how, "peekdata") == 0) MUST(ptrace(PTRACE_DETACH, child, NULL, NULL) == 0);
	if (other) must_succeed(other);
	write_run(child, area.pages - RUN);
	if (refused && !expects_eviction()) die("%zu reads were refused, and nothing is evicted", refused);
	tell(to_child[1]);
	must_succeed(child);
}

static void stop_and_continue(void)
{
	pid_t child = fork();
	if (child == 0) {
		for (uint64_t round = 1; round < 6; round++) {
			area_push_out(&area);
			area_check(&area, round);
			area_fill(&area, round + 1);
		}
		_exit(0);
	}
	int status;
	for (int i = 0; i < 30; i++) {
		MUST(kill(child, SIGSTOP) == 0);
		sleep_ms(3);
		MUST(kill(child, SIGCONT) == 0);
		sleep_ms(5);
		if (waitpid(child, &status, WNOHANG) == child) {
			MUST(WIFEXITED(status) && WEXITSTATUS(status) == 0);
			return;
		}
	}
	must_succeed(child);
}

int main(int argc, char **argv)
{
	MUST(argc == 2);
	signal(SIGALRM, hang);
	area = area_new(working_set() / 2, 27, 1);
	if (mode_is(argc, argv, "continued")) stop_and_continue();
	else read_child(argv[1]);
	area_check(&area, 1);
	return passed();
}
