/*
 * Threads come and go while memory leaves.
 *
 * When a thread ends, the kernel clears the tid word in its control block without waiting for a pager: if that page is
 * evicted, whoever joins the thread waits for ever. Modes:
 *
 *   churn       threads are created and joined in bursts while another thread makes everything cold
 *   cold        threads sleep until their stacks are as cold as can be, then end
 *   very_many   others sleep, after more than anybody keeps in mind have ended, and their control blocks must stay
 *   own_stacks  the same on stacks that the program allocated itself, in the middle of its heap
 *   handles     a thread unmaps what its handle was written to before whoever made it goes on
 *   detached    nobody joins; the stacks are reused by the C library
 */
#include "trap.h"

enum { BURST = 16, PARKED = 48, OWN_STACK = 256 * 1024 };

static struct area area;
static atomic_bool stop;
static atomic_int woken, ended;

static void *walk_for_ever(void *unused)
{
	(void)unused;
	while (!atomic_load(&stop)) filler_walk();
	return NULL;
}

static void look_around(uintptr_t start)
{
	char local[8192];
	memset(local, (int)start, sizeof(local));
	for (size_t i = 0; i < 8; i++) {
		size_t page = mix(start * 64 + i) % area.pages;
		page_check(area.at + page * PAGE, area.tag, page, 1);
	}
	for (size_t i = 0; i < sizeof(local); i++) MUST(local[i] == (char)start);
	atomic_fetch_add(&ended, 1);
}

static void *brief(void *argument)
{
	look_around((uintptr_t)argument);
	return argument;
}

static void *parked(void *argument)
{
	/* Raw futex-free waiting: a thread that polls rarely leaves its stack alone. */
	while (!atomic_load(&woken)) sleep_ms(300);
	if ((uintptr_t)argument & 1) look_around((uintptr_t)argument);
	return argument;
}

static void join_within(pthread_t thread, uintptr_t expected)
{
	struct timespec until;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 20;
	void *result;
	int error = pthread_timedjoin_np(thread, &result, &until);
	if (error) die("HANG: pthread_join of thread %ju: error %d", (uintmax_t)expected, error);
	MUST((uintptr_t)result == expected);
}

static void churn(void)
{
	for (uintptr_t burst = 0; burst < 100; burst++) {
		pthread_t threads[BURST];
		for (uintptr_t i = 0; i < BURST; i++)
			MUST(pthread_create(&threads[i], NULL, brief, (void *)(burst * BURST + i)) == 0);
		for (uintptr_t i = 0; i < BURST; i++) join_within(threads[i], burst * BURST + i);
	}
}

static void park(bool own_stacks)
{
	pthread_t threads[PARKED];
	for (uintptr_t i = 0; i < PARKED; i++) {
		pthread_attr_t attributes;
		MUST(pthread_attr_init(&attributes) == 0);
		if (own_stacks) {
			/* Touched as a heap is: the neighbours of a stack are ordinary memory. */
			unsigned char *around = map_private(OWN_STACK + 2 * 64 * PAGE);
			memset(around, 0x5a, OWN_STACK + 2 * 64 * PAGE);
			MUST(pthread_attr_setstack(&attributes, around + 64 * PAGE, OWN_STACK) == 0);
		}
		MUST(pthread_create(&threads[i], &attributes, parked, (void *)i) == 0);
		pthread_attr_destroy(&attributes);
	}
	for (int i = 0; i < 3; i++) area_push_out(&area);
	atomic_store(&woken, 1);
	for (uintptr_t i = 0; i < PARKED; i++) join_within(threads[i], i);
}

static void detach(void)
{
	for (uintptr_t i = 0; i < 800; i++) {
		pthread_t thread;
		MUST(pthread_create(&thread, NULL, brief, (void *)i) == 0);
		MUST(pthread_detach(thread) == 0);
		while ((int)i - atomic_load(&ended) > 32) sched_yield();
	}
	double start = seconds_now();
	while (atomic_load(&ended) < 800) {
		if (seconds_now() - start > 20) die("HANG: %d of 800 detached threads ended", atomic_load(&ended));
		sleep_ms(1);
	}
}

static void *end_at_once(void *argument) { return argument; }

/* The stacks stay mapped. */
static void come_and_go(size_t threads)
{
	enum { STACK = 32 << 10 };
	char *stacks = map_private(threads * STACK);
	for (size_t i = 0; i < threads; i++) {
		pthread_attr_t attributes;
		pthread_t thread;
		MUST(pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stacks + i * STACK, STACK) == 0);
		MUST(pthread_create(&thread, &attributes, end_at_once, NULL) == 0);
		MUST(pthread_join(thread, NULL) == 0 && madvise(stacks + i * STACK, STACK, MADV_DONTNEED) == 0);
	}
}

static int wake_up[2];

static void *wait_for_word(void *argument)
{
	char byte;
	MUST(read(wake_up[0], &byte, 1) == 1);
	return argument;
}

static void very_many(void)
{
	enum { SLEEPERS = 8, LOOKS = 100 };
	pthread_t threads[SLEEPERS];
	MUST(pipe(wake_up) == 0);
	for (uintptr_t i = 0; i < SLEEPERS; i++) MUST(pthread_create(&threads[i], NULL, wait_for_word, (void *)i) == 0);
	for (size_t look = 0; look < LOOKS; look++) {
		sleep_ms(30);
		for (size_t i = 0; i < SLEEPERS; i++)
			if (present_pages((void *)(threads[i] / PAGE * PAGE), 1) == 0)
				die("EVICTED: the control block of thread %zu, at look %zu", i, look);
	}
	MUST(write(wake_up[1], "12345678", SLEEPERS) == SLEEPERS);
	for (uintptr_t i = 0; i < SLEEPERS; i++) join_within(threads[i], i);
}

static pthread_t *handle;

static void *unmap_handle(void *unused)
{
	MUST(munmap(handle, PAGE) == 0);
	atomic_fetch_add(&ended, 1);
	return unused;
}

static void handles(void)
{
	enum { THREADS = 200 };
	pthread_attr_t at_once;
	struct sched_param urgent = {.sched_priority = 1};
	cpu_set_t one;
	CPU_ZERO(&one);
	CPU_SET(sched_getcpu(), &one);
	/* On one processor, which the new thread gets at once. */
	MUST(sched_setaffinity(0, sizeof(one), &one) == 0 && pthread_attr_init(&at_once) == 0);
	MUST(pthread_attr_setdetachstate(&at_once, PTHREAD_CREATE_DETACHED) == 0);
	MUST(pthread_attr_setinheritsched(&at_once, PTHREAD_EXPLICIT_SCHED) == 0);
	MUST(pthread_attr_setschedpolicy(&at_once, SCHED_FIFO) == 0);
	MUST(pthread_attr_setschedparam(&at_once, &urgent) == 0);
	for (int i = 0; i < THREADS; i++) {
		handle = map_private(PAGE);
		int error = pthread_create(handle, &at_once, unmap_handle, NULL);
		if (error == EPERM) lacks("real-time threads");
		MUST(error == 0);
		while (atomic_load(&ended) <= i) sleep_ms(1);
	}
}

int main(int argc, char **argv)
{
	if (mode_is(argc, argv, "very_many")) come_and_go(5000);
	area = area_new(working_set() / 2, 3, 1);
	area_push_out(&area);
	pthread_t walker;
	MUST(pthread_create(&walker, NULL, walk_for_ever, NULL) == 0);
	if (mode_is(argc, argv, "churn")) churn();
	else if (mode_is(argc, argv, "cold")) park(false);
	else if (mode_is(argc, argv, "very_many")) very_many();
	else if (mode_is(argc, argv, "own_stacks")) park(true);
	else if (mode_is(argc, argv, "handles")) handles();
	else if (mode_is(argc, argv, "detached")) detach();
	else die("churn | cold | very_many | own_stacks | handles | detached");
	atomic_store(&stop, true);
	join_within(walker, 0);
	area_check(&area, 1);
	return passed();
}
