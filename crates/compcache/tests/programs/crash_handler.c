/*
 * A program's own crash handler walks its memory, evicted as it may be, and writes a report.
 *
 *   handler  SIGSEGV on an alternative stack; the handler verifies everything and ends with 7
 *   helper   the handler forks a helper, which reads the crashed process by process_vm_readv while it waits
 */
#include "trap.h"
#include <sys/uio.h>

static struct area area;
static bool with_helper;

static void on_crash(int signal, siginfo_t *info, void *context)
{
	(void)context;
	if (signal != SIGSEGV || (uintptr_t)info->si_addr != 24) die("signal %d at %p", signal, info->si_addr);
	if (with_helper) {
		pid_t crashed = getpid(), child = fork();
		if (child == 0) {
			unsigned char page[PAGE];
			for (size_t i = 0; i < area.pages; i += 3) {
				struct iovec local = {page, PAGE}, remote = {area.at + i * PAGE, PAGE};
				MUST(process_vm_readv(crashed, &local, 1, &remote, 1, 0) == (ssize_t)PAGE);
				page_check(page, area.tag, i, 1);
			}
			_exit(0);
		}
		must_succeed(child);
	}
	area_check(&area, 1);
	MUST(passed() == 0);
	_exit(7);
}

int main(int argc, char **argv)
{
	with_helper = mode_is(argc, argv, "helper");
	if (!with_helper && !mode_is(argc, argv, "handler")) die("handler | helper");
	area = area_new(working_set() / 2, 31, 1);
	stack_t stack = {.ss_sp = map_private(64 * PAGE), .ss_size = 64 * PAGE};
	MUST(sigaltstack(&stack, NULL) == 0);
	struct sigaction action = {.sa_sigaction = on_crash, .sa_flags = SA_SIGINFO | SA_ONSTACK};
	MUST(sigaction(SIGSEGV, &action, NULL) == 0);
	area_push_out(&area);
	*(volatile int *)24 = 1;
	return 3;
}
