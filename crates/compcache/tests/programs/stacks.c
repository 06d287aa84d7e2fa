/*
 * Stacks of every kind:
 *
 *   recursion    deep in the main thread and in threads with large stacks, while everything else gets cold
 *   sigaltstack  signal frames that the kernel writes to an evicted alternative stack
 *   coroutines   contexts whose stacks are evicted heap memory
 */
#include "trap.h"
#include <sys/resource.h>
#include <ucontext.h>

static struct area area;

/* Each frame holds a page that must be found again on the way back. */
static __attribute__((noinline)) uint64_t descend(uint64_t tag, size_t depth, bool push)
{
	uint64_t frame[WORDS];
	page_write(frame, tag, depth, 1);
	uint64_t below = depth ? descend(tag, depth - 1, push) : 0;
	if (depth == 0 && push) {
		filler_walk();
		filler_walk();
		filler_walk();
	}
	page_check(frame, tag, depth, 1);
	return below + frame[0];
}

static uint64_t expected_sum(uint64_t tag, size_t depth)
{
	uint64_t sum = 0;
	for (size_t i = 0; i <= depth; i++) sum += page_seed(tag, i, 1);
	return sum;
}

static void *deep_thread(void *argument)
{
	uint64_t tag = (uintptr_t)argument;
	for (int round = 0; round < 2; round++) MUST(descend(tag, 4000, true) == expected_sum(tag, 4000));
	return NULL;
}

static void recursion(void)
{
	struct rlimit limit;
	MUST(getrlimit(RLIMIT_STACK, &limit) == 0);
	size_t depth = limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= 8 * MIB ? 1500 : limit.rlim_cur / PAGE / 4;
	pthread_t threads[2];
	pthread_attr_t attributes;
	MUST(pthread_attr_init(&attributes) == 0 && pthread_attr_setstacksize(&attributes, 24 * MIB) == 0);
	for (uintptr_t i = 0; i < 2; i++) MUST(pthread_create(&threads[i], &attributes, deep_thread, (void *)(i + 60)) == 0);
	for (int round = 0; round < 3; round++) {
		area_push_out(&area);
		MUST(descend(59, depth, round != 1) == expected_sum(59, depth));
	}
	for (size_t i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}

static unsigned char *alternative;
static size_t alternative_bytes;
static atomic_int handled;

static void on_signal(int signal, siginfo_t *info, void *context)
{
	(void)context;
	unsigned char local[2048];
	if (local < alternative || local >= alternative + alternative_bytes) die("the handler does not run on its stack");
	memset(local, signal, sizeof(local));
	for (size_t i = 0; i < sizeof(local); i++) MUST(((volatile unsigned char *)local)[i] == signal);
	(void)info;
	atomic_fetch_add(&handled, 1);
}

static void altstack(void)
{
	alternative_bytes = 64 * PAGE;
	struct area around = area_new(2 * MIB, 61, 1);
	alternative = around.at + MIB;
	stack_t stack = {.ss_sp = alternative, .ss_size = alternative_bytes};
	MUST(sigaltstack(&stack, NULL) == 0);
	struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK};
	MUST(sigaction(SIGUSR1, &action, NULL) == 0 && sigaction(SIGALRM, &action, NULL) == 0);
	for (int round = 0; round < 5; round++) {
		area_push_out(&around);
		MUST(raise(SIGUSR1) == 0);
		MUST(kill(getpid(), SIGALRM) == 0);
	}
	MUST(atomic_load(&handled) == 10);
	/* Signals in a stream while memory comes and goes. */
	timer_t timer;
	struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
	MUST(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
	struct itimerspec interval = {{0, 500000}, {0, 500000}};
	MUST(timer_settime(timer, 0, &interval, NULL) == 0);
	for (int round = 0; round < 5; round++) {
		filler_walk();
		area_check(&area, 1);
	}
	MUST(timer_delete(timer) == 0);
	MUST(atomic_load(&handled) > 12);
	MUST((handled = 0) == 0);
	for (size_t page = 0; page < around.pages; page++)
		if (page < 256 || page >= 256 + 64) page_check(around.at + page * PAGE, 61, page, 1);
}

enum { COROUTINES = 64, CO_STACK = 16 * 4096 };
static ucontext_t home, contexts[COROUTINES];
static int finished;

static void coroutine(unsigned which)
{
	uint64_t frame[WORDS];
	for (uint64_t round = 0; round < 4; round++) {
		page_write(frame, which + 100, 7, round);
		swapcontext(&contexts[which], &home);
		page_check(frame, which + 100, 7, round);
	}
	finished++;
}

static void coroutines(void)
{
	unsigned char *stacks = map_private(COROUTINES * CO_STACK);
	for (unsigned i = 0; i < COROUTINES; i++) {
		MUST(getcontext(&contexts[i]) == 0);
		contexts[i].uc_stack.ss_sp = stacks + i * CO_STACK;
		contexts[i].uc_stack.ss_size = CO_STACK;
		contexts[i].uc_link = &home;
		makecontext(&contexts[i], (void (*)(void))coroutine, 1, i);
	}
	for (int round = 0; round < 5; round++) {
		for (unsigned i = 0; i < COROUTINES; i++) MUST(swapcontext(&home, &contexts[i]) == 0);
		push_out(stacks, COROUTINES * CO_STACK / PAGE);
	}
	MUST(finished == COROUTINES);
}

int main(int argc, char **argv)
{
	area = area_new(working_set() / 2, 24, 1);
	if (mode_is(argc, argv, "recursion")) recursion();
	else if (mode_is(argc, argv, "sigaltstack")) altstack();
	else if (mode_is(argc, argv, "coroutines")) coroutines();
	else die("recursion | sigaltstack | coroutines");
	area_check(&area, 1);
	return passed();
}
