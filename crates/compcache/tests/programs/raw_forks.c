/*
 * Copies of a process that no fork handler hears of: the raw system calls, and _Fork and clone of the C library.
 * Such a child finds evicted pages as zeroes, unless the pager notices; each must have right memory, and so its parent.
 * "past_libc" makes the system call itself, which nothing in the process can notice.
 *
 * Where the kernel writes the child's number, the rest of that page is right too ("clone", "clone3", "clone_function").
 * "changes" is such a copy that unmaps, discards and moves memory, and makes a copy of itself, before it looks at any. What is wiped in copies is zero.
 */
#include "trap.h"
#include <linux/sched.h>

/* The kernel writes the child's number to the middle of its third page. */
static struct area told;

static pid_t *number(void) { return (pid_t *)(void *)(told.at + 2 * PAGE + PAGE / 2); }

static pid_t copy_of_process(const char *how)
{
	if (strcmp(how, "clone") == 0) return (pid_t)syscall(SYS_clone, SIGCHLD | CLONE_CHILD_SETTID, 0, 0, number(), 0);
	if (strcmp(how, "clone3") == 0) {
		struct clone_args arguments = {
			.flags = CLONE_CHILD_SETTID, .child_tid = (uintptr_t)number(), .exit_signal = SIGCHLD};
		return (pid_t)syscall(SYS_clone3, &arguments, sizeof(arguments));
	}
	if (strcmp(how, "fork") == 0) {
#ifdef SYS_fork
		return (pid_t)syscall(SYS_fork);
#else
		lacks("SYS_fork");
#endif
	}
	if (strcmp(how, "_Fork") == 0) return _Fork();
	if (strcmp(how, "past_libc") == 0) {
		long result;
		__asm__ volatile("syscall" : "=a"(result) : "a"(57L) : "rcx", "r11", "memory");
		return (pid_t)result;
	}
	die("clone | clone3 | fork | _Fork | clone_function | past_libc");
}

static struct area area;

static void told_check(void)
{
	pid_t found = *number();
	if (found == (pid_t)syscall(SYS_gettid)) {
		/* What was there before. */
		static _Alignas(8) unsigned char page[PAGE];
		page_write(page, told.tag, 2, 1);
		memcpy(number(), page + PAGE / 2, sizeof(pid_t));
	}
	area_check(&told, 1);
}

static int child_work(void *is_told)
{
	if (is_told && *number() != (pid_t)syscall(SYS_gettid)) die("the child's number is not there: %d", *number());
	told_check();
	area_check(&area, 1);
	for (size_t page = 0; page < area.pages; page += 2) page_write(area.at + page * PAGE, area.tag, page, 2);
	filler_walk();
	filler_walk();
	for (size_t page = 0; page < area.pages; page++) page_check(area.at + page * PAGE, area.tag, page, page % 2 ? 1 : 2);
	/* And it may fork as any process. */
	pid_t child = fork();
	if (child == 0) {
		for (size_t page = 0; page < area.pages; page++) page_check(area.at + page * PAGE, area.tag, page, page % 2 ? 1 : 2);
		_exit(0);
	}
	must_succeed(child);
	return 0;
}

static void changes(void)
{
	enum { PIECES = 8 };
	const size_t pages = working_set() / 2 / PAGE / PIECES;
	for (int round = 0; round < 5; round++) {
		struct area piece[PIECES];
		unsigned char *place = map_private(pages * PAGE);
		struct area wiped = area_new(pages * PAGE, 29, 1);
		MUST(madvise(wiped.at, pages * PAGE, MADV_WIPEONFORK) == 0);
		area_push_out(&wiped);
		for (int i = 0; i < PIECES; i++) piece[i] = area_new(pages * PAGE, 30 + i, 1);
		for (int i = 0; i < PIECES; i++) area_push_out(&piece[i]);
		pid_t child = copy_of_process("past_libc");
		if (child == 0) {
			MUST(munmap(piece[0].at, pages * PAGE) == 0);
			MUST(madvise(piece[1].at, pages * PAGE, MADV_DONTNEED) == 0);
			MUST(mremap(piece[2].at, pages * PAGE, pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place);
			piece[2].at = place;
			pid_t grandchild = copy_of_process("past_libc");
			if (grandchild == 0) MUST(munmap(piece[3].at, pages * PAGE) == 0);
			must_be_zero(piece[1].at, pages * PAGE, "discarded");
			must_be_zero(wiped.at, pages * PAGE, "MADV_WIPEONFORK in a copy past libc");
			for (int i = grandchild ? 2 : 4; i < PIECES; i++) area_check(&piece[i], 1);
			area_check(&piece[2], 1);
			if (grandchild) must_succeed(grandchild);
			_exit(0);
		}
		must_succeed(child);
		for (int i = 0; i < PIECES; i++) {
			area_check(&piece[i], 1);
			MUST(munmap(piece[i].at, pages * PAGE) == 0);
		}
		area_check(&wiped, 1);
		MUST(munmap(wiped.at, pages * PAGE) == 0);
		MUST(munmap(place, pages * PAGE) == 0);
	}
}

int main(int argc, char **argv)
{
	MUST(argc == 2);
	if (mode_is(argc, argv, "changes")) {
		changes();
		return passed();
	}
	area = area_new(working_set() / 2, 7, 1);
	told = area_new(16 * PAGE, 9, 1);
	bool is_told = strncmp(argv[1], "clone", 5) == 0;
	for (int round = 0; round < 3; round++) {
		area_push_out(&told);
		area_push_out(&area);
		pid_t child;
		if (mode_is(argc, argv, "clone_function")) {
			unsigned char *stack = map_private(MIB);
			child = clone(child_work, stack + MIB, SIGCHLD | CLONE_CHILD_SETTID, &told, NULL, NULL, number());
		} else {
			child = copy_of_process(argv[1]);
			if (child == 0) _exit(child_work(is_told ? &told : NULL));
		}
		must_succeed(child);
		area_check(&area, 1);
	}
	return passed();
}
