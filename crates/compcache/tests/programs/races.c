/*
 * Many threads write to the same pages while they come and go: no write may be lost, none may be seen twice.
 *
 *   counters  every thread has its own word in every page and adds to it without any lock
 *   atomics   all threads add to the same words atomically
 *   ordering  what a thread wrote before a release is seen after the acquire, on other pages
 */
#include "trap.h"

enum { THREADS = 4, PAGES = 4096 };
static unsigned char *room;
static double until;
static uint64_t expected[THREADS][PAGES];
static _Atomic uint64_t total;

static void *counts(void *argument)
{
	size_t which = (uintptr_t)argument;
	uint64_t state = which + 1;
	while (seconds_now() < until) {
		for (int i = 0; i < 256; i++) {
			size_t page = mix(state++ * 1315423911u) % PAGES;
			volatile uint64_t *word = (volatile uint64_t *)(void *)(room + page * PAGE) + 100 + which;
			uint64_t now = *word;
			if (now != expected[which][page])
				die("LOST UPDATE: page %zu word of thread %zu is %ju, not %ju", page, which, (uintmax_t)now,
				    (uintmax_t)expected[which][page]);
			*word = ++expected[which][page];
		}
	}
	return NULL;
}

static void *adds(void *argument)
{
	uint64_t state = (uintptr_t)argument + 1, count = 0;
	while (seconds_now() < until)
		for (int i = 0; i < 256; i++, count++)
			atomic_fetch_add((_Atomic uint64_t *)(void *)(room + mix(state++ * 2654435761u) % PAGES * PAGE) + 7, 1);
	atomic_fetch_add(&total, count);
	return NULL;
}

enum { SLOTS = 1024 };

/* Each producer fills a page, then publishes its number in another page; each consumer checks what is published. */
static void *publishes(void *argument)
{
	uint64_t which = (uintptr_t)argument;
	bool producer = which % 2 == 0;
	uint64_t lane = which / 2, state = which;
	for (uint64_t step = 1; seconds_now() < until; step++) {
		size_t slot = producer ? step % SLOTS : mix(state++) % SLOTS;
		unsigned char *page = room + (lane * 2 * SLOTS + slot) * PAGE;
		_Atomic uint64_t *sign = (_Atomic uint64_t *)(void *)(room + (lane * 2 * SLOTS + SLOTS + slot) * PAGE) + 3;
		volatile uint64_t *words = (volatile uint64_t *)(void *)page;
		if (producer) {
			words[10] = step;
			words[500] = step * 3;
			atomic_store_explicit(sign, step, memory_order_release);
		} else {
			uint64_t seen = atomic_load_explicit(sign, memory_order_acquire);
			uint64_t last = words[500], first = words[10];
			if (seen && (first < seen || last < seen * 3))
				die("OUT OF ORDER: %ju was published, the page says %ju and %ju", (uintmax_t)seen, (uintmax_t)first,
				    (uintmax_t)last);
		}
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct area kept = area_new(working_set() / 4, 8, 1);
	void *(*work)(void *) = mode_is(argc, argv, "counters")   ? counts
				: mode_is(argc, argv, "atomics")  ? adds
				: mode_is(argc, argv, "ordering") ? publishes
								  : NULL;
	if (!work) die("counters | atomics | ordering");
	room = map_private(PAGES * PAGE);
	/* Compressible, never same-filled; the words that count start at zero. */
	for (size_t page = 0; page < PAGES; page++) {
		page_write(room + page * PAGE, 39, page, 1);
		uint64_t *words = (uint64_t *)(void *)(room + page * PAGE);
		words[3] = words[7] = words[10] = words[500] = 0;
		for (size_t i = 0; i < THREADS; i++) words[100 + i] = 0;
	}
	filler_walk();
	until = seconds_now() + 2.5;
	pthread_t threads[THREADS];
	for (uintptr_t i = 0; i < THREADS; i++) MUST(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
	while (seconds_now() < until) filler_walk();
	for (size_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
	uint64_t sum = 0;
	for (size_t page = 0; page < PAGES; page++) {
		uint64_t *words = (uint64_t *)(void *)(room + page * PAGE);
		sum += words[7];
		for (size_t i = 0; i < THREADS; i++)
			if (work == counts && words[100 + i] != expected[i][page]) die("LOST UPDATE at the end: page %zu thread %zu", page, i);
	}
	if (sum != atomic_load(&total)) die("LOST UPDATES: %ju of %ju", (uintmax_t)sum, (uintmax_t)atomic_load(&total));
	area_check(&kept, 1);
	return passed();
}
